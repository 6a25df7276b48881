"""Checks the dependency law of the C++ rooms: python_bindings -> hooks -> include <- kernels.

measure times codecs, with include and kernels; python_bindings binds it, benchmarks are programs on
it. Within hooks, host and device do not know each other, nor does anything above know them.

Run it as a script; it prints one line per violation and fails if there is one.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

# What a file in each room may include from other rooms.
MAY_INCLUDE = {
    "include": (),
    "kernels": ("include",),
    "hooks": ("include",),
    "measure": ("include", "kernels"),
    "benchmarks": ("include", "measure"),
    "python_bindings": ("include", "hooks", "measure"),
}
ENGINES = ("host", "device")  # folders of hooks
TORCH = re.compile(r"(torch|ATen|c10|pybind11)/|Python\.h$")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
SUFFIXES = {".h", ".cuh", ".cpp", ".cu"}


def included(file: Path) -> Iterator[tuple[int, str]]:
    """Yields (line number, name) of every include directive of a file."""
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if match := INCLUDE.match(line):
            yield number, match[1]


def locate(root: Path, file: Path, name: str) -> Path | None:
    """Returns the file of ours that `name` means, relative to root; None when it is not ours."""
    rooms = (root / room for room in MAY_INCLUDE)
    for folder in (file.parent, root, *rooms, root / "hooks/include"):
        candidate = (folder / name).resolve()
        if candidate.is_file() and candidate.is_relative_to(root):
            return candidate.relative_to(root)
    return None


def complaint(root: Path, file: Path, name: str) -> str | None:
    """Returns why `file` must not include `name`, or None when it may."""
    here = file.relative_to(root)
    room = here.parts[0]
    target = locate(root, file, name)
    if target is None:
        if room == "kernels" and TORCH.match(name):
            return "kernels/ must not know torch"
        if room == "include" and not re.fullmatch(r"[a-z_]+", name):
            return "include/ uses the standard library alone"
        return None
    if target.parts[0] != room and target.parts[0] not in MAY_INCLUDE[room]:
        return f"{room}/ must not include {target.parts[0]}/"
    if room == target.parts[0] == "hooks" and target.parts[1] in ENGINES:
        engine = target.parts[1]
        if here.parts[1] != engine:
            return f"hooks/{engine}/ is for itself: what others need of it belongs in hooks/"
    # A codec is a folder of kernels/; files directly in kernels/ list the codecs.
    if room == target.parts[0] == "kernels" and len(here.parts) > 2 and len(target.parts) > 2:
        codec, other = here.parts[1], target.parts[1]
        if codec == "common" and other != "common":
            return f"kernels/common must not include the codec {other}"
        if other not in (codec, "common"):
            return f"the codec {codec} must not include the codec {other}"
    return None


def violations(root: Path) -> list[str]:
    """Returns one line per include that breaks the law, for the tree at `root`."""
    root = root.resolve()
    found = []
    for room in MAY_INCLUDE:
        for file in sorted((root / room).rglob("*")):
            if file.suffix not in SUFFIXES:
                continue
            for number, name in included(file):
                if reason := complaint(root, file, name):
                    place = f"{file.relative_to(root)}:{number}"
                    found.append(f'{place}: includes "{name}": {reason}')
    return found


def main() -> int:
    lines = violations(Path(__file__).parents[2])
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
