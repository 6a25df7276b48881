"""A rank that forges messages: every honest rank raises the same named error, and never a hang."""

from __future__ import annotations

from typing import Any

import pytest
from forging import case_forged, check
from world import World


@pytest.mark.torch_core
def test_forger_that_does_nothing_wrong_is_believed(world_of_3: World) -> None:
    assert check(world_of_3, "none", {}) == (None, "")


# One function checks headers of either phase: what it expects depends on the phase in these.
OF_A_PHASE = ("phase", "source_rank", "layout_hash", "payload_bytes", "payload", "corrupt")


@pytest.mark.parametrize(
    ("phase", "field", "value", "named"),
    [
        pytest.param(
            phase,
            *row,
            marks=pytest.mark.slow if phase == "gather" and row[0] not in OF_A_PHASE else (),
        )
        for phase in ("scatter", "gather")
        for row in (
            ("magic", 7, "magic is 7, expected 1498564167"),
            ("wire_version", 1, "wire version is 1, expected 2"),
            ("phase", 3, "phase is 3, expected"),
            ("source_rank", 2, "source rank is 2, expected 1"),
            ("config_hash", 11, "configuration hash is 11, expected"),
            ("layout_hash", 12, "layout hash is 12, expected"),
            ("step", 5, "step is 5, expected 0"),
            ("chunk", 3, "chunk is 3, expected 0"),
            ("payload_bytes", 16, "payload bytes is 16, expected"),
            ("checksum", 99, "checksum is 0, expected 99"),
            ("payload", 1, "checksum is"),
            # Bits 31 of two words: next to each other, and in two tiles.
            ("top_bits", 4, "checksum is"),
            ("top_bits", 2192, "checksum is"),
            ("corrupt", 3, "number of corrupt tiles is 1, expected 0"),
        )
    ],
)
def test_message_with_a_wrong_field_is_refused_by_all_ranks(
    world_of_3: World, phase: str, field: str, value: int, named: str
) -> None:
    kind, text = check(world_of_3, phase, {field: value})
    assert kind == "ProtocolError"
    assert named in text
    assert f"chunk 0, {phase}" in text
    assert "rank 0 refused a message from rank 1" in text


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("magic", 7, "magic is 7"),
        ("wire_version", 1, "wire version is 1, expected 2"),
        ("phase", 1, "phase is 1, expected 3"),
        ("source_rank", 2, "source rank is 2, expected 1"),
        ("checksum", 99, "checksum is 99"),
        ("step", 4, "step is 4, expected 0"),
        ("bucket", 4, "bucket is 4, expected 0"),
    ],
)
def test_commit_with_a_wrong_field_is_refused(
    world_of_3: World, field: str, value: int, named: str
) -> None:
    # Who could not read it says so in its own name: the text differs in the first rank named.
    answers: list[Any] = world_of_3.run(case_forged, phase="commit", change={field: value})
    for rank in (0, 2):
        outcome = answers[rank][0]
        assert outcome.error == "ProtocolError"
        assert named in outcome.text
        assert f"rank {rank} refused a message from rank 1" in outcome.text


def test_rank_in_trouble_is_named_on_all_ranks(world_of_3: World) -> None:
    kind, text = check(world_of_3, "scatter", {"status": 12})
    assert kind == "PeerError"
    assert "rank 1 failed while it compressed gradients" in text


def test_what_another_rank_refused_is_raised_with_its_values(world_of_3: World) -> None:
    change = {"status": 7, "failed_rank": 2, "failed_phase": 2, "expected": 8, "received": 9}
    kind, text = check(world_of_3, "commit", change)
    assert kind == "ProtocolError"
    assert "rank 1 refused a message from rank 2" in text
    assert "step is 9, expected 8" in text
