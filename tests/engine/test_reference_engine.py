"""The reference's exchange is that of the page at the head of hooks/bucket_engine.h."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from reference import CODECS, Parameter, ReferenceEngine

Q4 = CODECS["q4"]


class Walk:
    """A step of the exchange of one tile, by the lines at the head of hooks/bucket_engine.h."""

    def __init__(self, world_size: int, n: int, momentum: float) -> None:
        self.momentum, self.alpha = momentum, np.float32(1 - momentum)
        self.worker = [np.zeros((1, n), np.float32) for _ in range(world_size)]
        self.owner = np.zeros((1, n), np.float32)
        self.step = 0

    def scatter(self) -> None:
        v = [self.alpha * g + r for g, r in zip(self.gradients, self.worker, strict=True)]
        self.sent = [Q4.decode(Q4.encode(each, "float32"), each.size, "float32") for each in v]
        self.worker = [each - sent for each, sent in zip(v, self.sent, strict=True)]

    def reduce(self) -> None:
        total = sum(self.sent[1:], start=self.sent[0])
        u = total * (np.float32(1) / np.float32(len(self.sent))) + self.owner
        self.mean = Q4.encode(u, "float32")
        self.owner = u - Q4.decode(self.mean, u.size, "float32")

    def gather(self) -> None:
        self.gathered = self.mean

    def decode(self) -> None:
        self.result = Q4.decode(self.gathered, self.owner.size, "float32")
        self.worker = [r + np.float32(self.momentum) * self.result for r in self.worker]

    def commit(self) -> None:
        self.step += 1


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_page_of_the_engine_says_what_the_reference_does(momentum: float) -> None:
    page = (Path(__file__).parents[2] / "hooks" / "bucket_engine.h").read_text()
    page = page[page.index("// The exchange of a bucket") : page.index("The cases:")]
    steps = re.findall(r"^// +([a-z]+)  +\w", page, re.MULTILINE)
    assert steps == ["scatter", "reduce", "gather", "decode", "commit"]
    n, rng = 1100, np.random.default_rng(7)
    walk = Walk(3, n, momentum)
    reference = ReferenceEngine(
        3, [Parameter("w", n, "float32")], error_feedback="both", momentum=momentum
    )
    for _ in range(3):
        gradients = [rng.standard_normal(n).astype(np.float32) for _ in range(3)]
        walk.gradients = [gradient[None] for gradient in gradients]
        for step in steps:
            getattr(walk, step)()
        (expected,) = reference.step([[gradient] for gradient in gradients])[0]
        assert (walk.result[0] == expected).all()
        for mine, theirs in zip(walk.worker, reference.worker_residual[0], strict=True):
            assert (mine[0] == theirs).all()
        assert (walk.owner[0] == reference.owner_residual[0]).all()
