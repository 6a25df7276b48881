"""examples/gradferry.ipynb, run from the top in a kernel of its own."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples/gradferry.ipynb"
SECONDS = 300


@pytest.mark.slow  # four trainings on two ranks
def test_the_notebook_compares_codecs(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=SECONDS, resources=where).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    rows = re.findall(r"^(exact|q4|rht:bits=3) +([\d.]+) +([\d.]+) +([\d.]+)$", printed, re.M)
    ratios = {codec: float(ratio) for codec, _, _, ratio in rows}
    # 32 bits against 4.3 and 3.1; biases, which stay as they are, and headers take the rest.
    assert ratios["exact"] == 1
    assert 7 < ratios["q4"] < 32 / 4.3
    assert 9.5 < ratios["rht:bits=3"] < 32 / 3.1
    # It begins at ln 256 = 5.5, that of 256 characters equally likely.
    assert all(float(loss) < 2 for _, loss, _, _ in rows)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
