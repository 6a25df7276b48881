"""The package as it is imported: what that loads, and where its public names are."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_importing_gradferry_does_not_load_the_laboratory() -> None:
    loaded = run(
        "import sys, torch.distributed; before = set(sys.modules); import gradferry\n"
        "print(*(set(sys.modules) - before))"
    ).split()
    assert "gradferry.ddp.state" in loaded
    laboratory = ("gradferry_lab", "rich", "matplotlib")
    assert not [name for name in loaded if name.startswith(laboratory)]


def test_every_public_name_is_there() -> None:
    missing = run(
        "import gradferry; print(*(n for n in gradferry.__all__ if not hasattr(gradferry, n)))"
    )
    assert missing.split() == []


@pytest.mark.parametrize("path", ["gradferry.checkpoint", "gradferry.optim", "gradferry.errors"])
def test_public_modules_are_imported_by_their_name(path: str) -> None:
    assert run(f"import {path}; print({path}.__name__)").split() == [path]


def test_the_command_says_its_version_without_torch() -> None:
    loaded = run(
        "import sys; from gradferry_lab.command import main; main(['--version'])\n"
        "print(*sys.modules)"
    )
    import gradferry

    version, modules = loaded.splitlines()
    assert version == gradferry.__version__
    assert "torch" not in modules.split()


DRAWS = (
    "from gradferry_lab import cli, command\n"
    "from gradferry_lab.output.curves import Axis, draw_loss_curves\n"
    "cli.main = lambda arguments: draw_loss_curves([], Axis('loss'))\n"
)


@pytest.mark.parametrize(
    ("missing", "command"),
    [("rich", "from gradferry_lab import command\n"), ("matplotlib", DRAWS)],
)
def test_a_command_without_its_extra_says_what_to_install(missing: str, command: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.modules[{missing!r}] = None\n{command}"
            "sys.exit(command.main(['info']))",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"gradferry: this command needs {missing}: pip install 'gradferry[lab]'"
    )


def test_the_module_is_the_command() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "gradferry", "--version"], capture_output=True, text=True, check=True
    )
    import gradferry

    assert shown.stdout.strip() == gradferry.__version__
