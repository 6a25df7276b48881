"""Checks the dependency law of the C++ rooms: python_bindings -> hooks -> include <- kernels.

Run it as a script; it prints one line per violation and fails if there is one.
"""

import re
import sys
from pathlib import Path

TORCH = r"(torch|ATen|c10|pybind11)/|Python\.h$"
ROOMS = ("include", "kernels", "hooks", "benchmarks", "python_bindings")
# What must not include what: patterns of a path from the root or, where no file of ours has that
# name, of the name. ROOM is the group of the first pattern.
LAW = (
    (r"include/", r"(?!include/|[a-z_]+$)", "include/ uses the standard library alone"),
    (r"kernels/", TORCH, "kernels/ must not know torch"),
    (r"kernels/", r"(?!include|kernels)ROOMS/", "kernels/ knows include/ alone"),
    (r"kernels/common/", r"kernels/(?!common/)\w+/", "kernels/common/ knows no codec"),
    (
        r"kernels/(?!common/|cuda/)(\w+)/",
        r"kernels/(?!ROOM/|common/|cuda/)\w+/",
        "the codec ROOM knows no other codec",
    ),
    (r"hooks/", r"(?!include|hooks)ROOMS/", "hooks/ knows include/ alone"),
    (r"hooks/protocol/", TORCH, "hooks/protocol/ must not know torch"),
    (r"hooks/protocol/", r"hooks/[^/]+$", "hooks/protocol/ knows nothing else of hooks/"),
    (r"hooks/(?!host/)", r"hooks/host/", "hooks/host/ is for itself"),
    (r"hooks/(?!device/)", r"hooks/device/", "hooks/device/ is for itself"),
    (r"benchmarks/", r"(?!include|kernels|bench)ROOMS/", "benchmarks/ knows include/ and kernels/"),
    (r"python_bindings/", r"(kernels|benchmarks)/", "python_bindings/ knows no kernels"),
)
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
SUFFIXES = {".h", ".cuh", ".cpp", ".cu"}


def meant(root: Path, file: Path, name: str) -> str:
    """The path from the root of the file of ours that `name` means, or `name`."""
    for folder in (file.parent, root, *(root / room for room in ROOMS), root / "hooks/include"):
        candidate = (folder / name).resolve()
        if candidate.is_file() and candidate.is_relative_to(root):
            return str(candidate.relative_to(root))
    return name


def violations(root: Path) -> list[str]:
    """One line per include that breaks the law, for the tree at `root`."""
    root = root.resolve()
    found = []
    files = [file for room in ROOMS for file in sorted((root / room).rglob("*"))]
    for file in (file for file in files if file.suffix in SUFFIXES):
        place = str(file.relative_to(root))
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            if not (match := INCLUDE.match(line)):
                continue
            target = meant(root, file, match[1])
            for source, forbidden, reason in LAW:
                if here := re.match(source, place):
                    room = here[1] if here.re.groups else ""
                    pattern = forbidden.replace("ROOMS", f"({'|'.join(ROOMS)})")
                    if re.match(pattern.replace("ROOM", room), target):
                        why = reason.replace("ROOM", room)
                        found.append(f'{place}:{number}: includes "{match[1]}": {why}')
    return found


if __name__ == "__main__":
    lines = violations(Path(__file__).parents[2])
    print(*lines, sep="\n", end="\n" if lines else "")
    sys.exit(bool(lines))
