"""The pages whose snippets are tested, and what a snippet finds when it runs.

A snippet runs in a namespace of its own. Names that it reads and does not make are made for it:
imports, a model, a hook, what loops go through.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/guide/*.md"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_IMPORTS = """
import contextlib
import datetime
import gradferry
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
"""
SHAPE = (64, 64)


def blocks(page: str, language: str) -> list[str]:
    """Code blocks of a page, in that language; '' for those without one."""
    return [body for name, body in _FENCE.findall((ROOT / page).read_text()) if name == language]


def case_snippets(page: str, snippets: list[str], folder: str) -> int:
    """Runs snippets; those that leave a hook on a model then train one step through it."""
    kind = _THINGS.get(Path(page).name, _Things)
    for number, snippet in enumerate(snippets):
        place = f"{page}, snippet {number}"
        with contextlib.ExitStack() as stack:
            things = kind(folder, stack)
            namespace = {name: things[name] for name in sorted(names_from_outside(snippet))}
            exec(compile(snippet, place, "exec"), namespace)
            things.step({**things.made, **namespace})
    return len(snippets)


def names_from_outside(snippet: str) -> set[str]:
    """Names that are read before they are assigned."""
    made = set(dir(builtins))
    found: set[str] = set()
    for statement in ast.parse(snippet).body:
        nodes = list(ast.walk(statement))
        stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        read = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        if isinstance(statement, ast.AugAssign):
            read |= stored
        elif not isinstance(statement, ast.Assign):  # a loop, whose names are its own
            made |= stored
        inner = {n.arg for n in nodes if isinstance(n, ast.arg)}
        for each in nodes:
            if isinstance(each, ast.comprehension):
                inner |= {n.id for n in ast.walk(each.target) if isinstance(n, ast.Name)}
        found |= read - made - inner
        made |= stored
    return found


class _Things:
    def __init__(self, folder: str, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.made: dict[str, Any] = {}
        exec(_IMPORTS, self.made)
        doctor = self.made["gradferry"].doctor
        few = functools.partial(doctor, hooks=("torch:bf16", "q4"), show=False)  # of a second
        stack.enter_context(mock.patch("gradferry.doctor", few))

    def __getitem__(self, name: str) -> Any:
        if name not in self.made:
            self.made[name] = getattr(self, f"make_{name}")()
        return self.made[name]

    def step(self, names: dict[str, Any]) -> None:
        """Trains, where there is something to train, and looks that callbacks were called."""
        if "ddp" in names:
            names["ddp"](self["inputs"]).square().mean().backward()
            if "state" in names and not names["gradferry"].HookState.passes_through.fget(
                names["state"]
            ):
                assert names["state"].stats()["steps"] > 0
            (names.get("optimizer") or self["optimizer"]).step()
        for name in ("wandb", "mlflow", "writer"):
            if name in names:
                assert names[name].mock_calls

    def make_model(self) -> Any:
        torch, nn = self["torch"], self["nn"]

        class Model(nn.Sequential):
            """Its output is a loss."""

            def forward(self, inputs: Any) -> Any:
                return super().forward(inputs).square().mean()

        torch.manual_seed(0)
        names = ("embedding", "up", "down")
        model = Model(OrderedDict((name, nn.Linear(*SHAPE)) for name in names))
        model.blocks = [model.up, model.down]
        return model

    def make_ddp(self) -> Any:
        return self["DistributedDataParallel"](self["model"])

    def make_state(self) -> Any:
        return self["gradferry"].attach(self["ddp"], "q4")

    def make_optimizer(self) -> Any:
        return self["torch"].optim.AdamW(self["model"].parameters(), lr=1e-3)

    def make_inputs(self) -> Any:
        return self["torch"].ones(SHAPE)

    def make_batches(self) -> Any:
        return [self["inputs"]] * 3

    def make_batch_fn(self) -> Any:
        return lambda: (self["inputs"],)

    def make_rank(self) -> Any:
        return self["dist"].get_rank()

    def make_folder(self) -> Any:
        return self.folder

    def make_path(self) -> Any:
        return f"{self.folder}/dcp"

    def make_old_rate(self) -> Any:
        return 0.1

    def make_new_rate(self) -> Any:
        return 0.01

    def make_wandb(self) -> Any:
        return mock.Mock(spec=["log"])

    def make_mlflow(self) -> Any:
        return mock.Mock(spec=["log_metrics"])

    def make_writer(self) -> Any:
        return mock.Mock(spec=["add_scalar"])


class _Zero(_Things):
    def make_optimizer(self) -> Any:
        torch = self["torch"]
        made = self["ZeroRedundancyOptimizer"](
            self["ddp"].parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3
        )
        self["state"]
        self["ddp"](self["inputs"]).backward()
        made.step()
        return made

    def make_shards(self) -> Any:
        self["optimizer"].consolidate_state_dict(to=0)
        saved = [self["optimizer"].state_dict() if self["rank"] == 0 else None]
        self["dist"].broadcast_object_list(saved)
        return saved[0]

    def make_mine(self) -> Any:
        return self["state"].state_dict()


class _Fsdp(_Things):
    def make_mesh(self) -> Any:
        return self["init_device_mesh"]("cpu", (2, 2), mesh_dim_names=("replica", "shard"))

    def make_state(self) -> Any:
        mesh = self["mesh"]
        for block in (*self["model"].blocks, self["model"]):
            self["fully_shard"](block, mesh=mesh["shard"])
        return self["gradferry"].fsdp.attach(self["model"], "q4", mesh["replica"])

    def make_optimizer(self) -> Any:
        self["state"]  # parameters are replaced when the model is sharded
        return super().make_optimizer()

    def step(self, names: dict[str, Any]) -> None:
        if "state" in names:
            names["model"](self["inputs"]).backward()
            assert names["state"].stats()["steps"] == 1


class _ModelParallel(_Things):
    make_replicas = make_parts = lambda self: 2


class _Diloco(_Things):
    def make_names(self) -> Any:
        return [name for name, _ in self["model"].named_parameters()]


class _Reducer(_Things):
    def make_reducer(self) -> Any:
        return self["gradferry"].Reducer(self["model"].named_parameters(), "q4")

    def make_starts(self) -> Any:
        return [p.detach().clone() for p in self["model"].parameters()]

    def make_loss(self) -> Any:
        return self["model"](self["inputs"])

    def step(self, names: dict[str, Any]) -> None:
        assert names["reducer"].stats()["steps"] == 1


class _Server(_Things):
    def make_p(self) -> Any:
        torch = self["torch"]
        made = torch.zeros(SHAPE)
        made.grad = torch.ones(SHAPE)
        return made

    def make_start(self) -> Any:
        return self["p"].clone()

    def make_residual(self) -> Any:
        return self["torch"].zeros(SHAPE)

    def make_optimizer(self) -> Any:
        return self["torch"].optim.Adam([self["p"]])

    def make_step(self) -> Any:
        return 0

    def make_messages(self) -> Any:
        return [self["gradferry"].encode(self["p"].grad, "q4")] * 2

    def make_change_message(self) -> Any:
        return self["messages"][0]

    def step(self, names: dict[str, Any]) -> None:
        assert abs(names["p"].mean() - 1) < 0.1


_THINGS = {
    "zero.md": _Zero,
    "fsdp.md": _Fsdp,
    "model_parallel.md": _ModelParallel,
    "diloco.md": _Diloco,
    "reducer.md": _Reducer,
    "parameter_server.md": _Server,
}
