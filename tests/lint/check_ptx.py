"""Checks PTX files for instructions that would make a GPU compute other bits than a CPU.

Fused multiply-adds, approximate functions, and flushing of subnormal numbers to zero. Run it with
the files as arguments: PTX, or objects in which nvcc left PTX uncompressed. It prints one line per
violation and fails if there is one.
"""

import re
import sys
from pathlib import Path

PREDICATE = r"(?:@!?%\w+\s+)?"
FORBIDDEN = re.compile(
    rf"^\s*{PREDICATE}((?:fma\.|mad\.\S*f(?:32|64))\S*|\w+\S*\.(?:approx|ftz)\S*)"
)
ENTRY = re.compile(r"\.entry\s+(\w+)")


def ptx_of(content: bytes) -> str:
    """Returns the PTX in a file: all of it, or what an object holds between zero bytes."""
    parts = [part for part in content.split(b"\0") if b".version" in part and b".target" in part]
    return "\n".join(part.decode(errors="replace") for part in parts)


def violations(text: str) -> list[tuple[int, str, str]]:
    """Returns (line number, kernel, instruction) of everything forbidden in a PTX file."""
    found = []
    kernel = "?"
    for number, line in enumerate(text.splitlines(), start=1):
        if match := ENTRY.search(line):
            kernel = match[1]
        elif match := FORBIDDEN.match(line):
            found.append((number, kernel, match[1]))
    return found


def main(files: list[str]) -> int:
    kernels = 0
    lines = []
    for file in files:
        text = ptx_of(Path(file).read_bytes())
        kernels += len(ENTRY.findall(text))
        lines += [f"{file}:{n}: {kernel}: {what}" for n, kernel, what in violations(text)]
    print(*lines, sep="\n", end="\n" if lines else "")
    if kernels == 0:
        print("no kernels were given")
        return 1
    print(f"{kernels} kernels, {len(lines)} violations")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
