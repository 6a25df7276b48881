"""Five minutes of the soak."""

from __future__ import annotations

import pytest
import soak


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_minutes_of_random_trainings_leave_nothing_behind() -> None:
    assert soak.run(seed=1, seconds=300)["trainings"] > 0
