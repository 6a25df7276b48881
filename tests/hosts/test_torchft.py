"""gradferry in torchft's DiLoCo: replicas that are killed, stop, and come back.

Replicas move their models as a test says, and write down what every committed step has averaged.
What was applied and what is withheld then add up to the mean of the changes, step by step. Numbers
are whole multiples of 2^-8 and replicas 1, 2 or 4, so that fp32 holds all sums and means exactly.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import signal
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import gradferry
import pytest
import torch
import torch.distributed as dist
from torch import nn
from training_alone import flat, movements, residuals, shift
from world import _context

PARTS = 2
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Job:
    """What a replica does.

    Attributes:
        folder: for a file of each committed step, and for what a replica raises.
        steps: the training ends when so many are committed, the last two of them by `at_end`
            replicas.
        dies: where a replica is killed: "between" averages, or "inside" one, when its messages are
            on their way; or where it "stops", inside, too; or is "deaf": it does not hear that
            the average is there. Empty: nowhere.
        at: the step at which it does.
        comes_back: it begins when another one has gone on alone.
        participants: the least. With `spares`, replicas beyond these take part with zeros.
        delay: inner steps from the beginning of an average to its end.
        seconds: the timeout of the manager.
    """

    lighthouse: str
    folder: str
    at_end: int
    steps: int = 4
    codec: str = "q4"
    dies: str = ""
    at: int = 2
    comes_back: bool = False
    participants: int = 1
    spares: bool = False
    delay: int = 0
    seconds: float = 60.0


# --- a replica ------------------------------------------------------------------------------------


class Replica:
    """A model of two parts, of which every step averages one."""

    def __init__(self, number: int, job: Job) -> None:
        import torchft
        from gradferry.integrations.torchft import compress
        from torchft.local_sgd import DiLoCo
        from torchft.manager import WorldSizeMode

        self.number, self.job = number, job
        self.parts = nn.ModuleList(nn.Linear(128, 96, bias=False) for _ in range(PARTS))
        for parameter in self.parts.parameters():
            nn.init.zeros_(parameter)
        self.inner = torch.optim.SGD(self.parts.parameters(), lr=0.0)
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        seconds = timedelta(seconds=job.seconds)
        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=seconds),
            load_state_dict=self.load,
            state_dict=self.parts.state_dict,
            min_replica_size=job.participants,
            use_async_quorum=False,
            timeout=seconds,
            rank=0,
            world_size=1,
            world_size_mode=WorldSizeMode(int(job.spares)),
            store_addr="localhost",
            store_port=self.store.port,
            lighthouse_addr=job.lighthouse,
            replica_id=f"replica_{number}",
            hostname="localhost",
            init_sync=False,
        )
        self.diloco = DiLoCo(
            self.manager,
            list(self.parts),
            self.inner,
            [torch.optim.SGD(part.parameters(), lr=1.0) for part in self.parts],
            sync_every=PARTS * (1 + job.delay),
            fragment_sync_delay=job.delay,
        )
        self.averages = compress(self.diloco, job.codec)
        self.withheld = [torch.zeros(96 * 128, dtype=torch.float64)] * PARTS
        self.replicas = self.together = 0
        for index, fragment in enumerate(self.diloco._fragments):
            fragment._average_grads = self.watched(index, fragment._average_grads)

    gates: list[Any]

    def common(self) -> list[torch.Tensor]:
        return [flat(part.original_parameters.values()) for part in self.diloco._fragments]

    def watched(self, index: int, begin: Callable[[], None]) -> Callable[[], None]:
        """Notes what an average begins with, or ends the process inside."""

        def watch() -> None:
            self.part, self.before = index, self.common()[index]
            self.change = flat(self.diloco._fragments[index]._grads.values())
            begin()
            if self.manager.current_step() == self.job.at and self.job.dies in INSIDE:
                self.averages[index].wait = lambda: INSIDE[self.job.dies](self)

        return watch

    def load(self, state: Any) -> None:
        """Is healed."""
        self.parts.load_state_dict(state)
        self.withheld = [torch.zeros(96 * 128, dtype=torch.float64)] * PARTS

    def report(self) -> None:
        average = self.averages[self.part]
        del average.wait
        average.wait()
        self.manager.report_error(RuntimeError("has heard of no average"))

    def train(self) -> None:
        number = 0
        with self.diloco:
            # All replicas of a quorum see the same numbers, and end together.
            while not (
                self.manager.current_step() >= self.job.steps
                and self.replicas == self.job.at_end
                and self.together >= 2
            ):
                step = self.manager.current_step()
                if self.job.dies == "between" and step == self.job.at:
                    os.kill(os.getpid(), signal.SIGKILL)
                for part in self.parts:
                    shift(part, movements(part, number, self.number))
                number += 1
                self.inner.step()
                if self.manager.current_step() > step:
                    self.note()
        self.manager.shutdown()

    def note(self) -> None:
        """Writes down a committed step."""
        reducer = self.averages[self.part].reducer
        assert reducer is not None
        withheld = torch.zeros_like(self.change)
        if tiles := reducer._started.tiles():
            worker, owner = residuals(reducer.state_dict(), tiles)
            withheld = worker / reducer.world_size + owner
        record = {
            "common": self.common(),
            "applied": self.before - self.common()[self.part],
            "change": self.change if self.manager.is_participating() else 0 * self.change,
            "participants": self.manager.num_participants(),
            "replicas": reducer.world_size,
            "withheld before": self.withheld[self.part],
            "withheld": withheld,
        }
        torch.save(record, f"{self.job.folder}/{self.manager.current_step()}_{self.number}.pt")
        self.together = self.together + 1 if self.replicas == reducer.world_size else 1
        self.replicas, self.withheld[self.part] = reducer.world_size, withheld
        if self.replicas == 1 and self.together == 1:
            self.gates[1].wait(120)


INSIDE: dict[str, Callable[[Replica], None]] = {
    "inside": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stops": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "deaf": Replica.report,
}


def run_replica(number: int, job: Job, gates: list[Any]) -> None:
    """The life of a process. Replicas come through a gate to their first quorum together; through
    the other gate one that is alone, once it has taken a step, and one that comes back.
    """
    torch.set_num_threads(1)
    try:
        if job.comes_back:
            gates[1].wait(120)
        replica = Replica(number, job)
        replica.gates = gates
        if not job.comes_back:
            gates[0].wait(120)
        replica.train()
    except BaseException:
        Path(job.folder, f"error_{number}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


# --- replicas -------------------------------------------------------------------------------------


class Replicas:
    """Processes, with what they have in common."""

    def __init__(self, folder: Path, lighthouse: Any) -> None:
        self.folder, self.lighthouse = folder, lighthouse
        self.processes: dict[int, Any] = {}

    def job(self, **changes: Any) -> Job:
        return Job(self.lighthouse.address(), str(self.folder), **changes)

    def start(self, number: int, job: Job, gates: list[Any]) -> None:
        process = _context.Process(target=run_replica, args=(number, job, gates), daemon=True)
        process.start()
        self.processes[number] = process

    def start_all(self, jobs: list[Job]) -> None:
        self.gates = [_context.Barrier(size) for size in (len(jobs), 2)]
        for number, job in enumerate(jobs):
            self.start(number, job, self.gates)

    def expect_ends(self, codes: dict[int, int]) -> None:
        for number, code in codes.items():
            self.processes[number].join(120)
            said = self.folder / f"error_{number}"
            text = said.read_text() if said.exists() else ""
            assert self.processes[number].exitcode == code, text

    def records(self) -> dict[int, dict[int, Record]]:
        """By step and replica."""
        found: dict[int, dict[int, Record]] = defaultdict(dict)
        for path in self.folder.glob("*.pt"):
            step, number = map(int, path.stem.split("_"))
            found[step][number] = torch.load(path)
        return dict(sorted(found.items()))

    def expect_exact(self, replicas: list[list[int]], deaf: int | None = None) -> None:
        """Every step was taken by replicas whose global parameters are equal to the bit, and whose
        average is the mean of their changes, less what is withheld.

        Args:
            replicas: of one step after the other, each set of them once.
            deaf: a step that was not taken by all who averaged.
        """
        records = self.records()
        for step, of_step in records.items():
            first, *others = of_step.values()
            for other in others:
                assert all(map(torch.equal, first["common"], other["common"])), step
            if step == deaf:
                continue
            assert {each["replicas"] for each in of_step.values()} == {len(of_step)}, step
            total = sum(each["change"] for each in of_step.values()) / first["participants"]
            for name, sign in (("withheld before", 1), ("withheld", -1)):
                total += sign * sum(each[name] for each in of_step.values())
            assert torch.equal(first["applied"], total), step
        seen = [sorted(of_step) for of_step in records.values()]
        assert [one for one, before in zip(seen, [None, *seen], strict=False) if one != before] == (
            replicas
        )


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    from torchft.coordination import LighthouseServer

    # It waits for replicas from which it has heard within 4 seconds.
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=4_000
    )
    made = Replicas(tmp_path, lighthouse)
    yield made
    for process in made.processes.values():
        process.kill()
        process.join()
    lighthouse.shutdown()


@pytest.mark.parametrize(
    ("codec", "options"),
    [("q4", {"delay": 2}), ("off", {}), ("q4", {"participants": 2, "spares": True})],
    ids=["delay", "off", "spares"],
)
def test_averages_are_exact_and_equal(
    replicas: Replicas, codec: str, options: dict[str, Any]
) -> None:
    replicas.start_all([replicas.job(at_end=4, codec=codec, **options)] * 4)
    replicas.expect_ends(dict.fromkeys(range(4), 0))
    replicas.expect_exact([[0, 1, 2, 3]])
    withheld = [r["withheld"] for of_step in replicas.records().values() for r in of_step.values()]
    assert any(each.any() for each in withheld) == (codec != "off")


@pytest.mark.parametrize("dies", ["between", "inside", "stops"])
def test_replicas_that_are_left_go_on_with_what_they_have_withheld(
    replicas: Replicas, dies: str
) -> None:
    job = replicas.job(at_end=2, steps=5, seconds=6.0 if dies == "stops" else 60.0)
    lost = dataclasses.replace(job, dies=dies)
    replicas.start_all([job, job, lost, lost])
    replicas.expect_ends({0: 0, 1: 0})
    for number in (2, 3):
        replicas.processes[number].kill()
    replicas.expect_ends({2: -signal.SIGKILL, 3: -signal.SIGKILL})
    replicas.expect_exact([[0, 1, 2, 3], [0, 1]])


def test_a_replica_that_comes_back_is_healed_and_withholds_nothing(replicas: Replicas) -> None:
    job = replicas.job(at_end=2)
    replicas.start_all([job, dataclasses.replace(job, dies="between")])
    replicas.expect_ends({1: -signal.SIGKILL})
    replicas.start(1, dataclasses.replace(job, comes_back=True), replicas.gates)
    replicas.expect_ends({0: 0, 1: 0})
    replicas.expect_exact([[0, 1], [0], [0, 1]])


def test_a_replica_that_missed_a_step_is_healed_and_withholds_nothing(replicas: Replicas) -> None:
    job = replicas.job(at_end=2, steps=6)
    replicas.start_all([job, dataclasses.replace(job, dies="deaf")])
    replicas.expect_ends({0: 0, 1: 0})
    replicas.expect_exact([[0, 1], [0], [0, 1]], deaf=job.at + 1)


def test_replicas_with_other_codecs_are_told(replicas: Replicas) -> None:
    job = replicas.job(at_end=2)
    replicas.start_all([job, dataclasses.replace(job, codec="q8")])
    replicas.expect_ends({0: 1, 1: 1})
    for number in range(2):
        text = (replicas.folder / f"error_{number}").read_text()
        assert "RankMismatchError: rank 1 differs from rank 0 in codec" in text


# --- refused --------------------------------------------------------------------------------------


def made(group: Any = None, **options: Any) -> Any:
    import torchft
    from torchft.local_sgd import DiLoCo

    manager = mock.Mock(
        _use_async_quorum=False,
        _timeout=timedelta(seconds=30),
        _pg=group or torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
    )
    model = nn.Linear(3, 3)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2)]
    return DiLoCo(manager, [model], *optimizers, sync_every=2, **options)


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "other": (lambda: nn.Linear(3, 3), {}, "must be torchft's DiLoCo, not Linear"),
    "quantized": (lambda: made(should_quantize=True), {}, "torchft's should_quantize is set"),
    "group": (lambda: made(group=dist.HashStore()), {}, "averages over HashStore"),
    "auto": (made, {"codec": "auto"}, "a Reducer sees nothing"),
    "decay": (made, {"residual_decay": 0.0}, "residual_decay=0.0 must be above 0"),
    "momentum": (made, {"momentum": 0.9}, "there is no option 'momentum' here"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused(name: str) -> None:
    from gradferry.integrations.torchft import compress

    make, arguments, text = REFUSED[name]
    diloco = make()
    with pytest.raises(gradferry.ConfigError, match=re.escape(text)):
        compress(diloco, **arguments)
    for fragment in getattr(diloco, "_fragments", ()):
        assert "_average_grads" not in vars(fragment)


def test_old_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.1.1")
    monkeypatch.delitem(sys.modules, "gradferry.integrations.torchft", raising=False)
    with pytest.raises(gradferry.ConfigError, match=r"torchft 0\.1\.1 is too old: pip install"):
        importlib.import_module("gradferry.integrations.torchft")


def test_it_is_given_once_and_waits_less_than_the_manager() -> None:
    from gradferry.integrations.torchft import compress

    diloco = made()
    (averages,) = compress(diloco, "q8")
    assert averages.reducer is None
    assert diloco._manager._pg._timeout == timedelta(seconds=15)
    with pytest.raises(gradferry.ConfigError, match="through a codec already"):
        compress(diloco, "q8")
