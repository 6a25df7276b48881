"""Training of a sharded model behind gradferry's hooks, saved by torch.distributed.checkpoint."""

from __future__ import annotations

from typing import Any

import gradferry
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from sharding import RATE, Sharding, bits, local_gradients
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

Attach = dict[str, Any]  # arguments of gradferry.fsdp.attach beside the model and its replicas


def gradients_of(model: nn.Module, sharding: Sharding, steps: int) -> list[list[np.ndarray]]:
    """[step][parameter]: this rank's parts."""
    gradients = []
    for step in range(steps):
        sharding.backward(model, step)
        gradients.append(local_gradients(model))
        model.zero_grad()
    return gradients


class Training:
    """A model, an optimizer, and the state of its hooks."""

    def __init__(self, sharding: Sharding, attach: Attach) -> None:
        self.sharding = sharding
        self.model = sharding.model(sharding.mesh())
        self.state = gradferry.fsdp.attach(self.model, **attach)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)

    def train(self, steps: range) -> bytes:
        for step in steps:
            self.sharding.backward(self.model, step)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return bits(self.model)

    def saved(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "hook": self.state}

    def load(self, path: str, resized: bool) -> None:
        from gradferry.checkpoint import ResizedState

        saved = self.saved()
        if resized:
            saved["hook"] = ResizedState(self.state, path)
        dcp.load(saved, checkpoint_id=path)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )


def case_save_and_go_on(
    sharding: Sharding, attach: Attach, path: str, in_background: bool = False
) -> dict[str, Any]:
    training = Training(sharding, attach)
    training.train(range(3))
    save = dcp.async_save if in_background else dcp.save
    saving = save(training.saved(), checkpoint_id=path)
    state, values = training.state.state_dict(), training.train(range(3, 5))
    if in_background:
        saving.result()
    return {"state": state, "values": values}


def case_load_and_go_on(
    sharding: Sharding, attach: Attach, path: str, resized: bool = False
) -> dict[str, Any]:
    training = Training(sharding, attach)
    training.load(path, resized)
    return {"state": training.state.state_dict(), "values": training.train(range(3, 5))}
