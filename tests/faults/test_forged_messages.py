"""Messages with lawful headers and damaged content: all honest ranks raise the same named error.

Fields of headers and commits are refused one by one in `HeaderLaw` (tests/kernels/wire_test.cpp),
in `test_faults.py` and in simulated worlds.
"""

from __future__ import annotations

import pytest
from forging import check
from world import World

PASSED_ON = {"status": 7, "failed_rank": 2, "failed_phase": 2, "expected": 8, "received": 9}


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("phase", "change", "error", "named"),
    [
        ("none", {}, None, ()),
        ("scatter", {"corrupt": 3}, "ProtocolError", ("from rank 1", "scatter", "corrupt tiles")),
        ("gather", {"corrupt": 3}, "ProtocolError", ("from rank 1", "gather", "corrupt tiles")),
        ("scatter", {"status": 12}, "PeerError", ("rank 1 failed",)),
        ("commit", PASSED_ON, "ProtocolError", ("rank 1 refused", "from rank 2", "9", "8")),
    ],
)
def test_content_that_no_honest_rank_sends(
    world_of_3: World, phase: str, change: dict[str, int], error: str | None, named: tuple[str, ...]
) -> None:
    kind, text = check(world_of_3, phase, change)
    assert kind == error
    assert all(name in text for name in named), text
