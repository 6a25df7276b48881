"""benchmarks/ef21_muon.py: what arrives of a gradient, by the way of keeping errors."""

from __future__ import annotations

import torch
from gradferry_lab.workloads import load_task
from gradferry_lab.workloads.optimizers import make_optimizer
from programs import load_program

bench = load_program("benchmarks/ef21_muon.py")
SHAPE = (2, 128)
# A block of sign1 with both magnitudes: their mean is 2, and a bf16.
MIXED = torch.tensor([1.0, -3.0]).repeat(128).view(SHAPE)


def arrivals(codec: str, way: str, gradients: list[torch.Tensor], momentum: float = 0.0):
    sender = bench.Sender(torch.nn.Parameter(torch.zeros(SHAPE)), codec, way, momentum)
    return [sender.arrives(each, 0, step).clone() for step, each in enumerate(gradients)]


def test_residuals_are_added_to_the_next_gradient():
    # 1 and -3 are sent as 2 and -2, so that -1 is withheld everywhere.
    first, second = arrivals("sign1", "residual", [MIXED, torch.zeros(SHAPE)])
    assert torch.equal(first, MIXED.sign() * 2)
    assert torch.equal(second, torch.full(SHAPE, -1.0))


def test_ef21_sends_what_its_estimate_lacks():
    # The estimate 2, -2 lacks -1 everywhere, which a block of one magnitude has exactly.
    first, second = arrivals("sign1", "gradient", [MIXED, MIXED])
    assert torch.equal(first, MIXED.sign() * 2)
    assert torch.equal(second, MIXED)


def test_the_momentum_of_a_rank_is_nesterovs():
    gradients = [torch.full(SHAPE, value) for value in (4.0, 8.0)]
    # Averages are 1 and 2.75, from 0. Three quarters of a gradient give way to them.
    first, second = arrivals("exact", "momentum", gradients, 0.75)
    assert torch.equal(first, torch.full(SHAPE, 1.75))
    assert torch.equal(second, torch.full(SHAPE, 4.0625))


def test_ranks_keep_the_momentum_of_matrices_that_muon_trains():
    task = load_task(bench.TASK)
    model = task.build_model()
    optimizer = make_optimizer("Muon", task, model, None)
    muon = optimizer.param_groups[0]
    momentum = muon["momentum"]
    senders = bench.senders(model, optimizer, "q4", "momentum")
    assert momentum > 0 == muon["momentum"]
    assert not muon["nesterov"]
    kept = {
        name: {sender._momentum for sender in ranks}
        for (name, _), ranks in zip(model.named_parameters(), senders, strict=True)
    }
    assert kept.pop("blocks.0.attention_out.weight") == {momentum}
    assert kept["head.weight"] == kept["position"] == {0.0}
