"""The package: what its import loads, what it is called, which torch it asks for and runs with."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import gradferry
import pytest
import torch
from gradferry import _build_info, _native
from gradferry._compat import check_torch
from gradferry.core import device
from gradferry_lab.info import facts
from programs import load_program

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"besides_torch": ["numpy>=1.26"]}


# --- imports --------------------------------------------------------------------------------------


# The command comes before torch and the library; what needs an extra comes last, without it.
SCRIPT = """
import atexit, contextlib, io, json, runpy, sys
from unittest import mock
from gradferry_lab import cli

with contextlib.suppress(SystemExit):
    cli.main(["--version"])
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as help:
    cli.main(["--help"])
facts = {"torch": "torch" in sys.modules, "help": help.getvalue()}
import torch.distributed
before = set(sys.modules)
with mock.patch("atexit.register", wraps=atexit.register) as register:
    import gradferry
from gradferry import _native
ends = [call.args[1:] for call in register.call_args_list if call.args[0] == _native.shutdown]
facts["ends"] = ends
facts["loaded"] = sorted(set(sys.modules) - before)
facts["missing"] = [name for name in gradferry.__all__ if not hasattr(gradferry, name)]
import gradferry.checkpoint, gradferry.errors, gradferry.optim
sys.argv = ["gradferry", "--version"]
try:
    runpy.run_module("gradferry", run_name="__main__")
except SystemExit as ended:
    codes = [ended.code]
sys.modules["rich"] = None
codes.append(cli.main(["info"]))
del sys.modules["rich"]
sys.modules["matplotlib"] = None
facts["same help"] = cli.parser().format_help() == facts["help"]
from gradferry_lab import info
from gradferry_lab.output.curves import draw_loss_curves
info.run = lambda arguments: draw_loss_curves([], "loss")
codes.append(cli.main(["info"]))
info.run = lambda arguments: __import__("of_the_user")
try:
    cli.main(["info"])
except ModuleNotFoundError as error:
    facts["not of an extra"] = error.name
print(json.dumps({**facts, "codes": codes}))
"""


def test_package_is_imported_without_the_laboratory_and_the_command_without_its_extras() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    first, of_module, found = done.stdout.splitlines()
    said = json.loads(found)
    assert first == of_module == gradferry.__version__
    assert not said["torch"]  # to say a version, and which commands there are
    assert "doctor" in said["help"]
    assert said["same help"]
    assert "gradferry.ddp.state" in said["loaded"]
    # FSDP2 takes longer to import than all the rest.
    laboratory = ("gradferry_lab", "rich", "matplotlib", "torch.distributed.fsdp")
    assert not [name for name in said["loaded"] if name.startswith(laboratory)]
    assert said["missing"] == []  # of the public names
    assert said["ends"] == [[1.0]]  # seconds for what is in flight when Python exits
    assert said["codes"] == [0, 2, 2]
    assert said["not of an extra"] == "of_the_user"
    assert [line for line in done.stderr.splitlines() if "gradferry" in line] == [
        f"gradferry: this command needs {missing}: pip install 'gradferry[lab]'"
        for missing in ("rich", "matplotlib")
    ]


def test_modules_import_from_modules_and_not_from_the_package() -> None:
    package = ROOT / "python_bindings" / "gradferry"
    modules = {"_native", "_build_info", *(path.stem for path in package.iterdir())}
    for file in set(package.rglob("*.py")) - {package / "__init__.py"}:
        text = file.read_text()
        assert not re.search(r"^ *import gradferry$", text, re.MULTILINE), file
        for names in re.findall(r"^ *from gradferry import (.+)", text, re.MULTILINE):
            assert modules.issuperset(re.findall(r"\w+", names)), file


# --- names and versions ---------------------------------------------------------------------------


OF_THE_BUILD = ("3.4.5+torch2.9", "torch==2.9.*")
CMAKE = """
cmake_minimum_required(VERSION 3.25)
project(gradferry VERSION 3.4.5 LANGUAGES CXX)
set(GRADFERRY_OLDEST_TORCH 2.7)
set(GRADFERRY_NEWEST_TORCH 2.9)
"""


# What is built, with which torch, from a source archive or a checkout; its version and its torch.
@pytest.mark.parametrize(
    ("state", "torch_version", "from_archive", "expected"),
    [
        ("wheel", "2.9.0", False, OF_THE_BUILD),
        ("editable", "2.9.1+cu132", False, OF_THE_BUILD),
        ("metadata_wheel", "2.9.0a0+git1", False, OF_THE_BUILD),
        ("wheel", "2.9.0", True, ("3.4.5", "torch==2.9.*")),
        ("sdist", None, False, ("3.4.5", "torch>=2.7,<2.10")),
        ("sdist", "2.9.0", False, ("3.4.5", "torch>=2.7,<2.10")),
        ("metadata_wheel", None, False, None),
    ],
)
def test_version_and_torch_of_what_is_built(
    tmp_path, monkeypatch, state, torch_version, from_archive, expected
):
    tool = load_program("cmake/package_metadata.py", "meta")
    (tmp_path / "CMakeLists.txt").write_text(CMAKE)
    if from_archive:
        (tmp_path / "PKG-INFO").touch()

    def version(name: str) -> str:
        assert name == "torch"
        if torch_version is None:
            raise metadata.PackageNotFoundError(name)
        return torch_version

    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool.metadata, "version", version)
    provider = tool.Provider()
    provider.build_state(state)
    if expected is None:
        with pytest.raises(SystemExit, match=r"install torch .* pip install --no-build-isolation"):
            provider.dynamic_metadata(SETTINGS, {})
        return
    found = provider.dynamic_metadata(SETTINGS, {})
    assert found == {"version": expected[0], "dependencies": [expected[1], "numpy>=1.26"]}


@pytest.mark.torch_core
def test_everything_names_the_same_version():
    torch_minor = ".".join(torch.__version__.split(".")[:2])
    assert _build_info.TORCH_VERSION == torch.__version__
    assert _build_info.WIRE_VERSION == 2
    assert re.fullmatch(r"\d+\.\d+\.\d+", _build_info.GRADFERRY_VERSION)
    assert gradferry.__version__ == f"{_build_info.GRADFERRY_VERSION}+torch{torch_minor}"
    assert metadata.version("gradferry") == gradferry.__version__
    assert facts()["gradferry"].startswith(f"{gradferry.__version__}, ")
    requirements = metadata.requires("gradferry")
    assert requirements is not None
    assert f"torch=={torch_minor}.*" in requirements


# --- the torch that runs --------------------------------------------------------------------------


@pytest.mark.torch_core
def test_check_torch_accepts_the_same_minor_version():
    check_torch(torch.__version__)
    for running in ("2.11.0", "2.11.1", "2.11.0+cpu", "2.11.0a0+git1"):
        check_torch(running, built_against="2.11.0+cu130")


BUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


@pytest.mark.torch_core
def test_check_torch_says_what_to_install():
    with pytest.raises(ImportError) as error:
        check_torch("2.12.0+cpu", "2.11.0+cu130")
    message = str(error.value)
    assert "\n" not in message
    assert "built against torch 2.11.0+cu130 but runs with torch 2.12.0+cpu: " in message
    for text in ("install torch 2.11;", _build_info.OLDEST_TORCH, "ends in +torch2.12,", BUILD):
        assert text in message


@pytest.mark.torch_core
def test_cuda_kernels_load_without_a_gpu_or_there_are_none():
    if _build_info.CUDA_COMPILER:
        device.load_kernels("cuda")
        assert (
            f"{_build_info.CUDA_COMPILER} for {_build_info.CUDA_ARCHITECTURES}" in facts()["CUDA"]
        )
    else:
        assert facts()["CUDA"].startswith("no kernels in this build")
    assert f"{torch.cuda.device_count()} devices" in facts()["CUDA"]


# --- _native.pyi ----------------------------------------------------------------------------------

# `make lint` compares by stubtest what there is, but not the arguments of pybind11's functions:
# they stand at the beginning of the functions' documentation.
STUB = Path(_native.__file__).parent / "_native.pyi"


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Those of the stub and of its classes, by dotted name."""
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and not inner.decorator_list:
                    yield f"{node.name}.{inner.name}", inner


def runtime(name: str) -> ast.FunctionDef:
    """As the first line of its documentation has it."""
    found: Any = _native
    for part in name.split("."):
        found = getattr(found, part)
    (parsed,) = ast.parse(f"def {found.__doc__.splitlines()[0]}: ...").body
    assert isinstance(parsed, ast.FunctionDef)
    return parsed


def arguments(function: ast.FunctionDef) -> tuple[list[str], list[str], int, int]:
    """Names of positional arguments and of those by name alone; how many have a default."""
    every = function.args
    positional = [argument.arg for argument in (*every.posonlyargs, *every.args)]
    by_name = [argument.arg for argument in every.kwonlyargs]
    defaults = sum(default is not None for default in every.kw_defaults)
    return positional, by_name, len(every.defaults), defaults


@pytest.mark.parametrize(("name", "stub"), [pytest.param(*f, id=f[0]) for f in functions()])
def test_stub_names_the_arguments_of_the_built_function(name: str, stub: ast.FunctionDef) -> None:
    assert arguments(stub) == arguments(runtime(name))
