"""Training loops as users have them: with `exact` they train to the bit as with plain DDP.

With two ranks, (a + b) / 2 is what plain DDP computes as a / 2 + b / 2: halving is exact, and a sum
of two does not depend on order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from scenario import hooked
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from world import World

TOKENS, WIDTH, CONTEXT = 40, 32, 12
Attach = Callable[[DistributedDataParallel], Any]


@contextlib.contextmanager
def may_have_children() -> Iterator[None]:
    """Ranks of a World are daemons, to which multiprocessing allows no processes of their own."""
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):
        yield


class LanguageModel(nn.Module):
    """One block; the embedding and the head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.embedding.weight = self.head.weight

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden = self.embedding(tokens)
        q, k, v = self.attention(self.norm(hidden)).chunk(3, dim=-1)
        hidden = hidden + self.project(scaled_dot_product_attention(q, k, v, is_causal=True))
        scores = self.head(hidden)
        if targets is None:
            return scores[:, -1:], None
        return scores, cross_entropy(scores.flatten(0, 1), targets.flatten())


class Windows(Dataset):
    """Windows of a text that repeats itself."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.text = torch.randint(TOKENS, (CONTEXT + 1,), generator=generator).repeat(number)
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.text[index : index + CONTEXT + 1]
        return piece[:-1], piece[1:]


def like_nanogpt(attach: Attach) -> list[float]:
    """Batches from one tensor, accumulation by DDP's own flag, a loss scale, clipped gradients, a
    rate by hand, and an evaluation now and then.
    """
    model = LanguageModel()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    ddp = DistributedDataParallel(model)
    attach(ddp, grad_scaler=scaler)
    text = Windows(9).text
    generator = torch.Generator().manual_seed(dist.get_rank())

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(text) - CONTEXT - 1, (4,), generator=generator).tolist()
        rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        return rows[:, :-1], rows[:, 1:]

    losses = []
    x, y = batch()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 + math.cos(math.pi * step / STEPS)) / 2
        if step % 2 == 0:
            ddp.eval()
            with torch.no_grad():
                losses.append(ddp(*batch())[1].item())
            ddp.train()
        for part in range(3):
            ddp.require_backward_grad_sync = part == 2
            with torch.autocast("cpu", torch.bfloat16):
                loss = ddp(x, y)[1] / 3
            x, y = batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


class Trainer:
    """Epochs over a DataLoader whose worker is forked while the engine runs, and snapshots."""

    def __init__(self, attach: Attach, snapshot: bytes | None) -> None:
        self.model = LanguageModel()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.epoch = 0
        if snapshot is not None:
            saved = torch.load(io.BytesIO(snapshot))
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.epoch = saved["epoch"]
        self.ddp = DistributedDataParallel(self.model)
        attach(self.ddp)
        data = Windows(32)
        self.loader = DataLoader(
            data,
            batch_size=4,
            sampler=DistributedSampler(data),
            num_workers=1,
            multiprocessing_context="fork",
        )
        self.losses: list[float] = []

    def run_batch(self, source: torch.Tensor, targets: torch.Tensor, train: bool) -> float:
        with torch.set_grad_enabled(train):
            _, loss = self.ddp(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        return loss.item()

    def train(self, until: int) -> bytes:
        while self.epoch < until:
            self.loader.sampler.set_epoch(self.epoch)
            for train in (True, False):
                self.losses += [self.run_batch(*batch, train) for batch in self.loader]
            self.epoch += 1
        file = io.BytesIO()
        parts = {"model": self.model, "optimizer": self.optimizer}
        saved = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**saved, "epoch": self.epoch}, file)
        return file.getvalue()


def like_mingpt_ddp(attach: Attach) -> list[float]:
    with may_have_children():
        first = Trainer(attach, None)
        snapshot = first.train(1)
        second = Trainer(attach, snapshot)
        second.train(2)
    return first.losses + second.losses


def like_pytorch_examples(attach: Attach) -> list[float]:
    """Images, batch norm, a criterion outside of the model, a schedule by epochs, and means over
    all ranks; the last batch is smaller.
    """
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    ddp = DistributedDataParallel(model)
    attach(ddp)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    generator = torch.Generator().manual_seed(6)
    data = TensorDataset(
        torch.randn(30, 3, 8, 8, generator=generator), torch.arange(30).remainder(10)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        ddp.train()
        for images, labels in loader:
            loss = criterion(ddp(images), labels)
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ddp.eval()
        with torch.no_grad():
            total = torch.stack([criterion(ddp(images), labels) for images, labels in loader]).sum()
        dist.all_reduce(total)
        losses.append(total.item())
        schedule.step()
        ddp.load_state_dict(ddp.state_dict())  # with DDP's own prefix
    return losses


STEPS = 6
LOOPS = {
    # Steps of the optimizer; the second loop has two engines of four each.
    like_nanogpt: [STEPS],
    like_mingpt_ddp: [4, 4],
    like_pytorch_examples: [8],
}


@dataclasses.dataclass
class Attached:
    """Attaches a codec, or none, and keeps what it attached to."""

    codec: str | None
    models: list[DistributedDataParallel] = dataclasses.field(default_factory=list)
    states: list[Any] = dataclasses.field(default_factory=list)

    def __call__(self, ddp: DistributedDataParallel, **options: Any) -> None:
        self.models.append(ddp)
        if self.codec is not None:
            self.states.append(hooked(ddp, self.codec, **options))


def case_loop(loop: Callable[[Attach], list[float]]) -> dict[str, Any]:
    answers = {}
    for codec in (None, "exact", "q4"):
        torch.manual_seed(3)
        attach = Attached(codec)
        losses = loop(attach)
        answers[str(codec)] = {
            "losses": losses,
            "parameters": [p.detach() for p in attach.models[-1].parameters()],
            "steps": [state.stats()["steps"] for state in attach.states],
        }
    return answers


@pytest.mark.parametrize("loop", LOOPS)
def test_loop_trains_as_with_plain_ddp(world_of_2: World, loop: Any) -> None:
    first, second = world_of_2.run(case_loop, loop=loop)
    for answer in (first, second):
        plain, exact = answer["None"], answer["exact"]
        assert exact["losses"] == plain["losses"]
        assert all(map(torch.equal, exact["parameters"], plain["parameters"]))
        assert exact["steps"] == answer["q4"]["steps"] == LOOPS[loop]
    # A codec that is lossy trains otherwise, but on all ranks alike.
    assert all(map(torch.equal, first["q4"]["parameters"], second["q4"]["parameters"]))
    assert first["q4"]["losses"] != first["exact"]["losses"]


class Broken(nn.Module):
    """Dynamo makes three graphs of its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(48, 48) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        x = self.second(x).tanh()
        torch._dynamo.graph_break()
        return self.last(x)


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="aot_eager")


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def as_it_is(module: nn.Module) -> nn.Module:
    return module


@on_ranks()
def test_compiled_models_with_graph_breaks_train_as_plain_ddp() -> None:
    ways = {
        "plain": (as_it_is, as_it_is),
        "before DDP": (compiled, as_it_is),
        "after DDP": (as_it_is, compiled),
        "in place before DDP": (compiled_in_place, as_it_is),
        "in place after DDP": (as_it_is, compiled_in_place),
    }
    graphs, expected = {}, []
    for name, (before, after) in ways.items():
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(4)
        ddp = DistributedDataParallel(before(Broken()))
        if name != "plain":
            hooked(ddp, "exact")
        model = after(ddp)
        generator = torch.Generator().manual_seed(dist.get_rank())
        gradients = []
        for _ in range(3):
            ddp.zero_grad()
            model(torch.randn(4, 48, generator=generator)).square().sum().backward()
            gradients += [p.grad for p in ddp.parameters()]
        graphs[name] = counters["stats"]["unique_graphs"]
        assert all(map(torch.equal, gradients, expected or gradients)), name
        expected = expected or gradients
    torch._dynamo.reset()
    assert graphs.pop("plain") == 0
    assert min(graphs.values()) >= 3, graphs
