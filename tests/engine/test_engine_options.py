"""What a reduce-scatter and an all-gather cannot do is refused when an engine is made."""

from __future__ import annotations

import re
from typing import Any

import gradferry
import pytest
import torch
from engine_options import engine_options, parameter
from gradferry import _native


def spec(**changes: Any) -> _native.ParameterSpec:
    given = {"owner": 0, "worker_residual": False, "owner_residual": False, **changes}
    return _native.ParameterSpec(
        name="weight", num_elements=5, dtype=torch.float32, codec="q4", warmup="exact", **given
    )


BOTH = [
    ({"parameters": [parameter("weight", 5, "q4")]}, "'weight' has no owner"),
    ({"parameters": [spec(owner=1)]}, "owner 1, which is none of 1 ranks"),
    ({"momentum": 0.5}, "no momentum mode"),
    ({"find_unused_parameters": True}, "no find_unused_parameters"),
    ({"nodes": [[0, 1]]}, "no sums within nodes"),
]


@pytest.mark.parametrize(
    ("collective", "changes", "text"),
    [
        *((name, *row) for name in ("reduce_scatter", "all_gather") for row in BOTH),
        ("reduce_scatter", {"parameters": [spec(owner_residual=True)]}, "has an owner residual"),
        ("reduce_scatter", {"keep_gathered": True}, "keep_gathered is for an all-gather"),
        ("all_gather", {"parameters": [spec(worker_residual=True)]}, "an all-gather keeps none"),
        ("all_reduce", {}, "'weight' has an owner"),
        (
            "gather",
            {},
            "'all_reduce', 'reduce_scatter' or 'all_gather', not 'gather'",
        ),
    ],
)
def test_what_a_collective_cannot_do_is_refused(
    collective: str, changes: dict[str, Any], text: str
) -> None:
    given: dict[str, Any] = {
        "parameters": [spec()],
        "nodes": [[0]],
        "chunk_bytes": _native.CHUNK_BYTES,
        "workspace_cap_bytes": 1 << 26,
        "collective": collective,
    }

    def make() -> None:
        options = engine_options(**{**given, **changes})
        _native.HostEngine(options, tensors=[], lanes={}, memory=None, local_stage="")

    with pytest.raises(gradferry.ConfigError, match=re.escape(text)):
        make()
