"""A parameter server over torch.distributed.rpc, with four bits per element in both directions.

python examples/parameter_server.py --codec q4 --workers 2 --steps 200

In every step each worker sends the gradients of its part of the data, encoded. The server adds up
the messages, lets its optimizer step, and answers with the encoded change of the parameters. Both
ends keep what their encoding has withheld and add it to what they encode next: error feedback
(Karimireddy et al., arXiv 1901.09847) in both directions (DoubleSqueeze, arXiv 1905.05957).
`--codec exact` sends fp32.
"""

import argparse
import hashlib
import os
import tempfile
from collections.abc import Callable

import gradferry
import torch
from diloco import CONTEXT, VALIDATION, count, examples, source_code
from torch import nn
from torch.distributed import rpc
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, spawn
from torch.nn.functional import cross_entropy


class Copy:
    """The model, the same to the bit on the server and all workers, and what was withheld here."""

    def __init__(self, arguments: argparse.Namespace, number: int) -> None:
        torch.manual_seed(arguments.seed)  # all copies begin alike
        self.model = nn.Sequential(
            nn.Embedding(256, 32),
            nn.Flatten(),
            nn.Linear(32 * CONTEXT, 256),
            nn.GELU(),
            nn.Linear(256, 256),
        )
        self.parameters = list(self.model.parameters())
        # Biases are few and matter much: they travel as they are.
        self.codecs = [arguments.codec if p.dim() > 1 else "exact" for p in self.parameters]
        self.residuals = [torch.zeros_like(p) for p in self.parameters]
        self.number, self.sent = number, 0  # seed and step of the codecs that use random numbers

    def encode(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """One message per parameter, of the tensor and of what earlier messages lack."""
        messages = []
        for tensor, codec, residual in zip(tensors, self.codecs, self.residuals, strict=True):
            residual += tensor
            message = gradferry.encode(residual, codec, seed=self.number, step=self.sent)
            residual -= gradferry.decode(message, codec, shape=tensor.shape, dtype=tensor.dtype)
            messages.append(message)
        self.sent += 1
        return messages

    @torch.no_grad()
    def apply(self, change: list[torch.Tensor] | None) -> None:
        """Adds what the server sends to all copies; None before its first step."""
        if change is None:
            return
        for p, codec, message in zip(self.parameters, self.codecs, change, strict=True):
            p += gradferry.decode(message, codec, shape=p.shape, dtype=p.dtype)

    def digest(self) -> str:
        every = b"".join(p.detach().numpy().tobytes() for p in self.parameters)
        return hashlib.sha256(every).hexdigest()


class Worker(Copy):
    def __init__(self, arguments: argparse.Namespace, number: int) -> None:
        super().__init__(arguments, number)
        text = source_code()[:-VALIDATION]
        self.text = text.tensor_split(arguments.workers)[number - 1]
        self.generator = torch.Generator().manual_seed(1000 * arguments.seed + number)

    def gradients(self, change: list[torch.Tensor] | None) -> tuple[list[torch.Tensor], float]:
        """Messages of the gradients after that change, and the loss."""
        self.apply(change)
        begins = torch.randint(len(self.text) - CONTEXT, (64,), generator=self.generator)
        context, following = examples(self.text, begins)
        self.model.zero_grad()
        loss = cross_entropy(self.model(context), following)
        loss.backward()
        return self.encode([p.grad for p in self.parameters]), loss.item()

    def finish(self, change: list[torch.Tensor] | None) -> str:
        self.apply(change)
        return self.digest()


class Server(Copy):
    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments, 0)
        self.optimizer = torch.optim.Adam(self.parameters, lr=1e-3)

    def change(self, messages_by_worker: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """Takes a step; returns the messages that make it on the workers' copies."""
        starts = [p.detach().clone() for p in self.parameters]
        for p, codec, *messages in zip(
            self.parameters, self.codecs, *messages_by_worker, strict=True
        ):
            p.grad = gradferry.accumulate(messages, codec, shape=p.shape, dtype=p.dtype)
        self.optimizer.step()
        with torch.no_grad():
            pairs = list(zip(self.parameters, starts, strict=True))
            change = self.encode([p - start for p, start in pairs])
            # This copy, too, takes what the messages say. What they lack is in the residual and
            # comes with the next change.
            for p, start in pairs:
                p.copy_(start)
        self.apply(change)
        return change


def name_of(rank: int) -> str:
    return f"worker{rank}" if rank > 0 else "server"


worker: Worker  # of this process, if it is one


def gradients(change: list[torch.Tensor] | None) -> tuple[list[torch.Tensor], float]:
    return worker.gradients(change)


def finish(change: list[torch.Tensor] | None) -> str:
    return worker.finish(change)


def ask(workers: list[str], call: Callable, change: list[torch.Tensor] | None) -> list:
    """What all workers answer, in their order. They work at the same time."""
    futures = [rpc.rpc_async(name, call, args=(change,)) for name in workers]
    answers = []
    for name, future in zip(workers, futures, strict=True):
        try:
            answers.append(future.wait())
        except Exception as error:
            raise RuntimeError(f"{name} failed, or did not answer in time: {error}") from None
    return answers


def size(messages: list[torch.Tensor]) -> int:
    return sum(message.numel() for message in messages)


def serve(arguments: argparse.Namespace) -> None:
    server = Server(arguments)
    workers = [name_of(number) for number in range(1, arguments.workers + 1)]
    change, received, sent = None, 0, 0
    losses = []
    for step in range(arguments.steps):
        answers = ask(workers, gradients, change)
        change = server.change([messages for messages, _ in answers])
        received += sum(size(messages) for messages, _ in answers)
        sent += len(workers) * size(change)
        losses += [loss for _, loss in answers]
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}: mean loss {sum(losses) / len(losses):.4f}", flush=True)
            losses.clear()
    digests = {server.digest(), *ask(workers, finish, change)}
    if len(digests) > 1:
        raise RuntimeError(f"the copies of the parameters differ: {sorted(digests)}")

    text = source_code()
    begins = torch.arange(len(text) - VALIDATION - CONTEXT, len(text) - CONTEXT)
    context, following = examples(text, begins)
    with torch.no_grad():
        loss = cross_entropy(server.model(context), following).item()
    print(f"validation: loss {loss:.4f}")
    print(f"the server received {received} bytes and sent {sent}")
    print(f"all {len(workers) + 1} copies of the parameters have SHA-256 {digests.pop()}")


def run(rank: int, rendezvous: str, arguments: argparse.Namespace) -> None:
    """One process: the server, or a worker, which answers the server until that is done."""
    global worker
    if rank > 0:
        worker = Worker(arguments, rank)
    options = rpc.TensorPipeRpcBackendOptions(init_method=rendezvous, rpc_timeout=arguments.timeout)
    rpc.init_rpc(
        name_of(rank),
        rank=rank,
        world_size=arguments.workers + 1,
        rpc_backend_options=options,
    )
    if rank == 0:
        serve(arguments)
    rpc.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--codec", default="q4", help="in both directions (default: q4)")
    parser.add_argument("--workers", type=count, default=2, metavar="N")
    parser.add_argument("--steps", type=count, default=200, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--timeout", type=float, default=60, metavar="S", help="of an answer (default: 60)"
    )
    arguments = parser.parse_args()

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each process, as torchrun has it
    with tempfile.TemporaryDirectory() as folder:
        try:  # a process that ends too early ends the others
            spawn(run, (f"file://{folder}/rendezvous", arguments), nprocs=arguments.workers + 1)
        except (ProcessExitedException, ProcessRaisedException) as error:
            raise SystemExit(f"{name_of(error.error_index)} ended first: {error}") from None


if __name__ == "__main__":
    main()
