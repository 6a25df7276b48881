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
from collections.abc import Callable
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
    for number, snippet in enumerate(snippets):
        place = f"{page}, snippet {number}"
        kinds = (k for name, word, k in _THINGS if name == Path(page).name and word in snippet)
        kind = next(kinds, _Things)
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


# What needs no more than a line: name -> what makes it of the other things.
_MADE: dict[str, Callable[[Any], Any]] = {
    "ddp": lambda t: t["DistributedDataParallel"](t["model"]),
    "state": lambda t: t["gradferry"].attach(t["ddp"], "q4"),
    "optimizer": lambda t: t["torch"].optim.AdamW(t["model"].parameters(), lr=1e-3),
    "inputs": lambda t: t["torch"].ones(SHAPE),
    "batches": lambda t: [t["inputs"]] * 3,
    "batch_fn": lambda t: lambda: (t["inputs"],),
    "rank": lambda t: t["dist"].get_rank(),
    "size": lambda t: t["dist"].get_world_size(),
    "store": lambda t: t["dist"].PrefixStore("reducer.md", t["dist"].group.WORLD.get_group_store()),
    "folder": lambda t: t.folder,
    "path": lambda t: f"{t.folder}/dcp",
    "old_rate": lambda t: 0.1,
    "new_rate": lambda t: 0.01,
    "wandb": lambda t: mock.Mock(spec=["log"]),
    "mlflow": lambda t: mock.Mock(spec=["log_metrics"]),
    "writer": lambda t: mock.Mock(spec=["add_scalar"]),
    # compatibility.md, diloco.md, reducer.md
    "mine": lambda t: t["state"].state_dict(),
    "replicas": lambda t: 2,
    "parts": lambda t: 2,
    "names": lambda t: [name for name, _ in t["model"].named_parameters()],
    "reducer": lambda t: t["gradferry"].Reducer(t["model"].named_parameters(), "q4"),
    "tensor": lambda t: t["torch"].ones(SHAPE),
    "starts": lambda t: [p.detach().clone() for p in t["model"].parameters()],
    "loss": lambda t: t["model"](t["inputs"]),
    # a parameter server in reducer.md
    "start": lambda t: t["p"].clone(),
    "residual": lambda t: t["torch"].zeros(SHAPE),
    "step": lambda t: 0,
    "messages": lambda t: [t["gradferry"].encode(t["p"].grad, "q4")] * 2,
    "change_message": lambda t: t["messages"][0],
}


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
            make = getattr(self, f"make_{name}", None)
            self.made[name] = make() if make else _MADE[name](self)
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


class _Fsdp(_Things):
    def make_mesh(self) -> Any:
        return self["init_device_mesh"]("cpu", (2, 2), mesh_dim_names=("replica", "shard"))

    def make_state(self) -> Any:
        mesh = self["mesh"]
        for block in (*self["model"].blocks, self["model"]):
            self["fully_shard"](block, mesh=mesh)
        return self["gradferry"].fsdp.attach(self["model"], "q4")

    def make_evaluate(self) -> Any:
        return lambda model: model(self["inputs"])

    def make_optimizer(self) -> Any:
        self["state"]  # parameters are replaced when the model is sharded
        return _MADE["optimizer"](self)

    def step(self, names: dict[str, Any]) -> None:
        if "state" in names:
            names["model"](self["inputs"]).backward()
            assert names["state"].stats()["steps"] == 1


class _Reducer(_Things):
    def step(self, names: dict[str, Any]) -> None:
        only_made = "backend" in names  # over a group of its own
        assert names["reducer"].stats()["steps"] == (0 if only_made else 1)


class _Server(_Things):
    def make_p(self) -> Any:
        torch = self["torch"]
        made = torch.zeros(SHAPE)
        made.grad = torch.ones(SHAPE)
        return made

    def make_optimizer(self) -> Any:
        return self["torch"].optim.Adam([self["p"]])

    def step(self, names: dict[str, Any]) -> None:
        assert abs(names["p"].mean() - 1) < 0.1


# By page and a word of the snippet; the first that matches.
_THINGS: tuple[tuple[str, str, type[_Things]], ...] = (
    ("compatibility.md", "", _Zero),
    ("fsdp.md", "", _Fsdp),
    ("reducer.md", "gradferry.encode", _Server),
    ("reducer.md", "", _Reducer),
)
