"""A hook's numbers in a trainer's own log."""

from __future__ import annotations

from typing import Any

from gradferry.ddp.state import HookState

# The numbers of `HookState.on_step` that tell whether compression works and pays.
# docs/guide/numbers.md has all.
_NAMES = ("ratio", "wire_bytes", "exposed_ms", "worker_residual_ratio", "owner_residual_ratio")


class Metrics:
    """Means over the steps of this rank since they were last taken."""

    def __init__(self, state: HookState) -> None:
        self._sums = dict.fromkeys(_NAMES, 0.0)
        self._steps = 0
        state.on_step(self._add)

    def _add(self, row: dict[str, Any]) -> None:
        for name in _NAMES:
            self._sums[name] += row[name]
        self._steps += 1

    def take(self) -> dict[str, float]:
        """The means, as ``gradferry/<name>``; empty if there was no step."""
        sums, steps = self._sums, self._steps
        self._sums, self._steps = dict.fromkeys(_NAMES, 0.0), 0
        return {f"gradferry/{name}": total / steps for name, total in sums.items() if steps}
