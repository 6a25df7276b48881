"""What demo, bench, converge and doctor train, and how: tasks, models, hooks, one training loop."""

from __future__ import annotations

from collections.abc import Callable

from gradferry.core.names import closest
from gradferry.errors import ConfigError

from gradferry_lab.workloads.convex import load_convex
from gradferry_lab.workloads.digits import load_digits
from gradferry_lab.workloads.task import Task
from gradferry_lab.workloads.text import load_text, load_text_10m, load_tiny_text
from gradferry_lab.workloads.vision import load_tiny_vision, load_vision

TASKS: dict[str, Callable[[], Task]] = {
    "text": load_text,
    "tiny_text": load_tiny_text,
    "text_10m": load_text_10m,
    "vision": load_vision,
    "tiny_vision": load_tiny_vision,
    "digits": load_digits,
    "convex": load_convex,
}


def load_task(name: str) -> Task:
    """Loads a task's data. Raises ConfigError for an unknown name or missing data."""
    if name not in TASKS:
        raise ConfigError(
            f"unknown task {name!r}; tasks are {', '.join(TASKS)}{closest(name, list(TASKS))}"
        )
    return TASKS[name]()
