"""`_native.DeviceNode`, which the measurements on a device time: on the fake device, against sums
in numpy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from gradferry import ConfigError, _native
from test_device_codec import gaussian, launches_of, on_device
from world import World

Worlds = Callable[[int], World]

NUM_ELEMENTS = gaussian(0).numel()
RANKS = 3


@pytest.fixture
def worlds(device_worlds: Worlds) -> Worlds:
    return device_worlds


def make(num_elements: int = NUM_ELEMENTS, num_ranks: int = RANKS) -> _native.DeviceNode:
    import fake_device
    from gradferry.core.device import load_kernels

    load_kernels(fake_device.DEVICE.type)
    return _native.DeviceNode(
        dtype=torch.float32,
        num_elements=num_elements,
        device=fake_device.DEVICE,
        num_ranks=num_ranks,
    )


def case_sum() -> tuple[list[np.ndarray], int, str]:
    """Without what came from the last sibling, with it, and behind it; launches; races."""
    import fake_device

    node = make()
    gradients = [on_device(gaussian(rank)) for rank in range(RANKS)]
    sums = []
    for rank in range(1, RANKS):
        node.receive(rank, gradients[rank])
        sums.append(node.sum(gradients[0]).cpu().numpy())
    node.pack(gradients[0])  # for a sibling: changes nothing here
    sums.append(node.sum(gradients[0]).cpu().numpy())
    launches = launches_of(lambda: (node.pack(gradients[0]), node.sum(gradients[0])))
    return sums, launches, str(fake_device.machine.races())


def test_a_node_adds_in_rank_order(worlds: Worlds) -> None:
    ((sums, launches, races),) = worlds(1).run(case_sum)
    own, one, two = (gaussian(rank).numpy() for rank in range(RANKS))
    expected = (own + one + two) * np.float32(1 / RANKS)
    assert np.isnan(sums[0]).all()  # a message has not come
    assert sums[1].tobytes() == sums[2].tobytes() == expected.tobytes()
    assert (launches, races) == (2, "[]")


def case_refused() -> list[str]:
    said = []
    node = make()
    for call in (
        lambda: make(num_ranks=0),
        lambda: make(num_elements=0),
        lambda: make(num_elements=1 << 29, num_ranks=3),
        lambda: node.receive(0, on_device(gaussian(0))),
        lambda: node.receive(RANKS, on_device(gaussian(0))),
        lambda: node.sum(gaussian(0)),
        lambda: node.pack(on_device(gaussian(0))[1:]),
    ):
        try:
            call()
            said.append("nothing")
        except ConfigError as error:
            said.append(str(error))
    return said


def test_what_cannot_be_summed_is_refused(worlds: Worlds) -> None:
    (said,) = worlds(1).run(case_refused)
    no_rank, no_element, large, own, beyond, host, short = said
    assert "a node has at least one rank and one element, not 0 and" in no_rank
    assert "not 3 and 0" in no_element
    assert "messages of 536870912 elements from 3 ranks exceed 4 GiB" in large
    assert own == "rank must be 1 to 2, not 0"
    assert beyond == "rank must be 1 to 2, not 3"
    assert "gradient must be contiguous, of the right dtype, on fake:0, with 9192" in host
    assert "gradient must be contiguous, of the right dtype, on fake:0, with 9192" in short
