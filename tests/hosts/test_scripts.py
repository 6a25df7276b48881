"""examples/trainers: every script trains, as docs/guide/trainers.md says to start it."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from documented import ROOT, blocks
from trained import expect_trained
from trainings import SECONDS, launched
from two_machines import run_on_two
from world import World

FOLDER = ROOT / "examples" / "trainers"
TORCHRUN = (*("-m", "torch.distributed.run", "--standalone"), "--nproc-per-node=2")


@pytest.mark.parametrize(
    ("script", "launcher"),
    [("with_lightning.py", ()), ("with_fabric.py", ()), ("with_transformers.py", TORCHRUN)],
)
def test_script_trains(tmp_path: Path, script: str, launcher: tuple[str, ...]) -> None:
    ended = subprocess.run(
        [sys.executable, *launcher, str(FOLDER / script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    expect_trained(ended.returncode, ended.stdout, ended.stderr)


class Alone(dict[str, Any]):
    """What a script has in place of gradferry's state."""

    def stats(self) -> dict[str, float]:
        return {"ratio": 1.0}


def case_sharded(script: str, folder: str, codec: str | None) -> tuple[list[str], str]:
    """A script with another codec, or without gradferry: all losses, and what it says."""
    import gradferry
    from accelerate import DistributedType, PartialState
    from accelerate.state import AcceleratorState

    attach, backward = gradferry.fsdp.attach, torch.Tensor.backward
    losses: list[str] = []

    def attach_other(model: Any, _: str) -> Any:
        return attach(model, codec) if codec else Alone()

    def note(loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
        losses.append(loss.item().hex())
        backward(loss, *arguments, **options)

    gpus = ("gloo", DistributedType.MULTI_GPU)
    AcceleratorState._reset_state(reset_partial_state=True)  # it keeps the mesh of the run before
    os.chdir(Path(folder).parent)  # for what Lightning writes
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        for patch in (
            launched(),
            mock.patch.object(sys, "argv", [script, folder]),
            mock.patch.object(gradferry.fsdp, "attach", attach_other),
            mock.patch.object(torch.Tensor, "backward", note),
            # This world is there already.
            mock.patch.object(dist, "init_process_group"),
            mock.patch.object(dist, "destroy_process_group"),
            # accelerate shards on GPUs alone: it takes CPUs for such.
            mock.patch.object(PartialState, "_prepare_backend", return_value=gpus),
            mock.patch.dict(os.environ, ACCELERATE_TORCH_DEVICE="cpu"),
            # Inductor would take longer than all the rest.
            mock.patch.object(torch, "compile", partial(torch.compile, backend="eager")),
        ):
            stack.enter_context(patch)
        runpy.run_path(str(FOLDER / script), run_name="__main__")
    return losses, said.getvalue()


@pytest.mark.parametrize(
    "script", ["with_accelerate_sharded.py", "with_lightning_sharded.py", "with_fsdp2.py"]
)
def test_hybrid_sharding_trains_as_without_gradferry(
    world_of_4: World, tmp_path: Path, script: str
) -> None:
    def run(codec: str | None) -> list[tuple[list[str], str]]:
        folder = str(tmp_path / str(codec))
        return world_of_4.run(
            case_sharded, seconds=SECONDS, script=script, folder=folder, codec=codec
        )

    def losses(ranks: list[tuple[list[str], str]]) -> list[list[str]]:
        return [of_rank for of_rank, _ in ranks]

    alone, compressed = losses(run(None)), run("q4")
    assert losses(run("exact")) == alone
    assert losses(compressed) != alone
    expect_trained(0, compressed[0][1])
    if (tmp_path / "q4").exists():
        resumed = losses(run("q4"))
        assert resumed == [each[-len(resumed[0]) :] for each in losses(compressed)]


@pytest.mark.usefixtures("namespaces_allowed")
def test_accelerate_trains_on_two_machines(tmp_path: Path) -> None:
    (block,) = (each for each in blocks("docs/guide/trainers.md", "") if "accelerate" in each)
    export, *commands = block.splitlines()
    (code, said), (other, others_said) = run_on_two(commands, tmp_path, export)
    assert other == 0, others_said
    expect_trained(code, "\n".join(said))
