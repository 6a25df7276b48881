"""check_imports finds a planted mistake of each kind, and nothing in a tree without one."""

from pathlib import Path

import pytest
from check_imports import LAB, PACKAGE, arrows, circles, packages, violations

LAWFUL = {
    "__init__.py": "from gradferry import checkpoint\nfrom gradferry.ddp.state import HookState\n",
    "__main__.py": "from gradferry_lab.cli import main\n",
    "_native.pyi": "import torch\n",
    "errors.py": "class GradferryError(Exception): ...\n",
    "checkpoint.py": "from gradferry.ddp.state import HookState\n",
    "optim.py": "import torch\n",
    "core/__init__.py": "",
    "core/config.py": "from gradferry import _native\nfrom ..errors import GradferryError\n",
    "core/device.py": "import importlib\nimportlib.import_module('gradferry._cuda')\n",
    "reduction/costs.py": "from gradferry.core import config\n",
    "reduction/predict.py": "from .costs import Costs\nfrom . import costs\n",
    "reduction/__init__.py": "",
    "reduction/running.py": "from gradferry.core import config\n",
    "ddp/__init__.py": "",
    "fsdp/__init__.py": "from gradferry.reduction import running\n",
    "ddp/state.py": "import gradferry.reduction.predict\nHookState = None\n",
    "lab/__init__.py": "",
    "lab/cli.py": "from gradferry.optim import OneBitAdam\nfrom gradferry_lab import info\n",
    "lab/info.py": "from gradferry._build_info import WIRE_VERSION\n",
    "_build_info.pyi": "WIRE_VERSION: int\n",
}


@pytest.fixture
def package(tmp_path: Path) -> tuple[Path, Path]:
    for name, text in LAWFUL.items():
        write((tmp_path / PACKAGE, tmp_path / LAB), name, text)
    return tmp_path / PACKAGE, tmp_path / LAB


def place_of(name: str) -> str:
    """A file's path: "lab/" is a package of its own."""
    return f"{LAB}/{name.removeprefix('lab/')}" if name.startswith("lab/") else f"{PACKAGE}/{name}"


def write(package: tuple[Path, Path], name: str, text: str) -> None:
    file = package[0].parent / place_of(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_violations_a_lawful_tree_and_this_one_have_none(package):
    assert violations(*package) == []
    assert violations(*packages()) == []


@pytest.mark.parametrize(
    ("file", "planted", "target", "reason"),
    [
        ("core/config.py", "from gradferry.reduction.costs import Costs", "reduction.costs",
         "core must not import reduction"),
        ("core/config.py", "import gradferry_lab.cli", "lab.cli", "core must not import lab"),
        ("core/config.py", "from gradferry import HookState", "", "core must not import package"),
        ("core/config.py", "from .. import optim", "optim", "core must not import public"),
        ("core/config.py", "from ..reduction import predict", "reduction.predict",
         "core must not import reduction"),
        ("core/config.py", "def late():\n    from gradferry.ddp import state", "ddp.state",
         "core must not import ddp"),
        ("core/config.py", "if TYPE_CHECKING:\n    from gradferry.ddp.state import HookState",
         "ddp.state", "core must not import ddp"),
        ("core/config.py", "import importlib\nimportlib.import_module('gradferry_lab.cli')",
         "lab.cli", "core must not import lab"),
        ("errors.py", "from gradferry import __main__", "__main__",
         "ground must not import command"),
        ("reduction/costs.py", "from gradferry.ddp.state import HookState", "ddp.state",
         "reduction must not import ddp"),
        ("reduction/running.py", "from gradferry.ddp import state", "ddp.state",
         "reduction must not import ddp"),
        ("ddp/state.py", "from gradferry.optim import OneBitAdam", "optim",
         "ddp must not import public"),
        ("ddp/state.py", "from gradferry import fsdp", "fsdp", "ddp must not import fsdp"),
        ("fsdp/__init__.py", "from gradferry.ddp.state import HookState", "ddp.state",
         "fsdp must not import ddp"),
        ("checkpoint.py", "from gradferry_lab import info", "lab.info",
         "public must not import lab"),
        ("lab/cli.py", "import gradferry", "", "lab must not import package"),
        ("__init__.py", "from gradferry_lab import info", "lab.info",
         "the library must not import the laboratory"),
        ("__init__.py", "def late():\n    from gradferry_lab import info", "lab.info",
         "the library must not import the laboratory"),
    ],
)  # fmt: skip
def test_violations_planted_import_is_found(package, file, planted, target, reason):
    write(package, file, f"{LAWFUL[file]}{planted}\n")
    line_number = f"{LAWFUL[file]}{planted}".count("\n") + 1
    (line,) = [line for line in violations(*package) if "circle" not in line]
    name = f"{PACKAGE}.{target}".rstrip(".").replace(f"{PACKAGE}.lab", LAB)
    assert line.startswith(f"{place_of(file)}:{line_number}: imports {name}: ")
    assert reason in line


@pytest.mark.parametrize("file", ["tools/plot.py", "helpers.py", "forecasts/__init__.py"])
def test_violations_unknown_room_is_found(package, file):
    write(package, file, "import torch\n")
    (line,) = violations(*package)
    assert line.startswith(f"{PACKAGE}/{file}: is in no room")


def test_violations_circle_between_modules_is_found_once(package):
    for back in (
        "from gradferry.reduction.predict import Predictor",
        "def late():\n    from . import predict",
        "if TYPE_CHECKING:\n    from gradferry.reduction.predict import Predictor",
    ):
        write(package, "reduction/costs.py", f"{back}\n")
        assert violations(*package) == [
            "a circle of imports: gradferry.reduction.costs, gradferry.reduction.predict"
        ]
    write(package, "reduction/costs.py", "")
    for one, other in ("ab", "bc", "ca"):
        write(package, f"reduction/{one}.py", f"from gradferry.reduction import {other}\n")
    assert circles(arrows(*package)) == [[f"gradferry.reduction.{name}" for name in "abc"]]
