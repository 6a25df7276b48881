"""Registers, stack and shared memory of every CUDA kernel in a library, by architecture.

    python tools/kernel_resources.py LIBRARY ROWS.json

Reads the machine code with cuobjdump, of the CUDA toolkit; needs no GPU. Rows are sorted, those of
kernels with a stack first: what does not fit into registers is spilled there. Ends with code 77
where there is no cuobjdump, or no machine code (PTX alone).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

SKIPPED = 77
ARCHITECTURE = re.compile(r"^arch = (sm_\w+)$")
FUNCTION = re.compile(r"^\s*Function (\S+):$")
NUMBERS = ("registers", "stack", "shared", "local")
USAGE = re.compile(r"^\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def rows_of(listing: str) -> list[dict[str, Any]]:
    """What cuobjdump --dump-resource-usage says of each kernel."""
    rows, architecture, kernel = [], "", ""
    for line in listing.splitlines():
        if found := ARCHITECTURE.match(line):
            architecture = found[1]
        elif found := FUNCTION.match(line):
            kernel = found[1]
        elif found := USAGE.match(line):
            numbers = dict(zip(NUMBERS, map(int, found.groups()), strict=True))
            rows.append({"arch": architecture, "kernel": kernel, **numbers})
    return sorted(rows, key=lambda row: (-row["stack"], -row["registers"], *row.values()))


def demangled(names: list[str]) -> list[str]:
    """As C++ writes them, where c++filt is found."""
    if shutil.which("c++filt") is None:
        return names
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True)
    return done.stdout.splitlines()


def main() -> int:
    """Writes the rows."""
    library, result = map(Path, sys.argv[1:])
    result.unlink(missing_ok=True)
    if shutil.which("cuobjdump") is None:
        print("skipped: cuobjdump is not on this machine")
        return SKIPPED
    command = ["cuobjdump", "--dump-resource-usage", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stderr)
        return 1
    rows = rows_of(done.stdout)
    if not rows:
        print(f"skipped: {library.name} holds no machine code")
        return SKIPPED
    for row, name in zip(rows, demangled([row["kernel"] for row in rows]), strict=True):
        row["kernel"] = name
    result.write_text(json.dumps(rows, indent=1) + "\n")
    most, spilling = max(row["registers"] for row in rows), sum(row["stack"] > 0 for row in rows)
    print(f"{len(rows)} kernels, at most {most} registers, {spilling} with a stack")
    return 0


if __name__ == "__main__":
    sys.exit(main())
