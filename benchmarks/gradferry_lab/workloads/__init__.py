"""What demo, bench, converge and doctor train, and how: tasks, models, hooks, one training loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gradferry.core.names import closest
from gradferry.errors import ConfigError

from gradferry_lab.workloads.convex import load_convex
from gradferry_lab.workloads.task import Task
from gradferry_lab.workloads.text import GPT2_SMALL, TEN_MILLION, TINY, load_text
from gradferry_lab.workloads.vision import load_digits, load_tiny_vision

TASKS: dict[str, Callable[[], Task]] = {
    "text": load_text,
    "tiny_text": partial(load_text, TINY, "tiny_text"),
    "text_10m": partial(load_text, TEN_MILLION, "text_10m"),
    "gpt2_small": partial(load_text, GPT2_SMALL, "gpt2_small"),
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
