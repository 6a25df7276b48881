"""`gradferry doctor`, over a link of a chosen rate."""

from __future__ import annotations

import pytest


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces_allowed")
def test_doctor_on_a_slow_link_says_compress(rows_of, capfd) -> None:
    *steps, verdict = rows_of("doctor", "--smoke", "--link", "100mbit")
    found = {row["hook"]: row for row in steps}
    assert set(found) == {"torch:fp32", "q4"}
    for row in (*steps, verdict):
        assert row["kind"] == ("verdict" if row is verdict else "step")
        assert (row["ranks"], row["hosts"], row["ranks_per_host"]) == (2, 2, 1)
    for row in steps:
        assert row["ratio_to_none"] == pytest.approx(row["ms"] / verdict["none_ms"])
        assert row["steps"] in (2, 5, 10, 15)
        assert row["times_faster_low"] <= row["times_faster"] <= row["times_faster_high"]
    # A ring of two ranks sends all of fp32; q4 sends some 4.3 bits, in a step of many.
    assert found["torch:fp32"]["wire_bytes"] == 4 * verdict["elements"]
    assert 6 < found["torch:fp32"]["wire_bytes"] / found["q4"]["wire_bytes"] < 8
    # 3.49 MB at 0.1 Gb/s are 279 ms at the least, of which q4 sends a seventh.
    assert found["torch:fp32"]["ms"] > 279
    shown = capfd.readouterr().out
    assert verdict["text"].startswith("Use q4: ")
    for said in ("small, 2 ranks", "link 100mbit", "Figures of --smoke mean nothing"):
        assert said in shown
    assert "Use q4" not in shown
