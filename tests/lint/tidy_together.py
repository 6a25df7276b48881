"""Runs clang-tidy on sources of one folder together, so that torch's headers are read once for all.

A source alone spends nearly all its time on these headers. Together means a file that includes the
sources; where that has a finding, or two sources do not go together because they declare the same
private name, each source is checked alone, and only that counts.

Usage: tidy_together.py CLANG_TIDY COMPILE_COMMANDS FOLDER WORK [--alone]
"""

import json
import re
import subprocess
import sys
from pathlib import Path

# These declare private names that others declare too.
ALONE = {
    "hooks/host/connect_ranks.cpp",
    "hooks/host/reducer.cpp",
    "hooks/host/sockets.cpp",
    "hooks/host/start_reducer.cpp",
    "hooks/meetings.cpp",
    "hooks/peers.cpp",
    "hooks/workspace.cpp",
    "tests/engine/streams/torch_device.cpp",
}
OPTIONS = ["--quiet", "--extra-arg=-Wno-unknown-warning-option"]
# A file that does not name what it uses must not get it from the precompiled headers.
PRECOMPILED = re.compile(r" -Winvalid-pch -include \S*cmake_pch\.hxx")
OUTPUT = re.compile(r" -o \S+ -c \S+$")


def sources_by_flags(entries: list[dict[str, str]], folder: Path) -> dict[str, list[Path]]:
    """Sources of `folder` that are compiled alike; the key is their command without a source."""
    groups: dict[str, list[Path]] = {}
    for entry in entries:
        source = Path(entry["file"])
        if source.suffix == ".cpp" and source.is_relative_to(folder):
            flags = OUTPUT.sub("", PRECOMPILED.sub("", entry["command"]))
            groups.setdefault(flags, []).append(source)
    return groups


def write_unit(unit: Path, sources: list[Path]) -> None:
    """Writes a file that includes all sources."""
    allowed = "// NOLINT(bugprone-suspicious-include)"
    unit.write_text("".join(f'#include "{source}"  {allowed}\n' for source in sources))


def entry(directory: Path, flags: str, source: Path) -> dict[str, str]:
    """A source's line in a database of commands."""
    return {"directory": str(directory), "command": f"{flags} -c {source}", "file": str(source)}


def is_clean(clang_tidy: str, work: Path, source: Path, *, show: bool) -> bool:
    """Whether clang-tidy finds nothing in `source`."""
    command = [clang_tidy, "-p", str(work), *OPTIONS, str(source)]
    return subprocess.run(command, capture_output=not show).returncode == 0


def check(clang_tidy: str, commands: Path, folder: Path, work: Path, alone: bool) -> bool:
    """Whether clang-tidy finds nothing in any source of `folder`."""
    root = Path.cwd()
    groups = sources_by_flags(json.loads(commands.read_text()), root / folder)
    if not groups:
        raise SystemExit(f"{commands} has no source of {folder}: build the package first")
    work.mkdir(parents=True, exist_ok=True)
    database, units = [], []
    for number, (flags, sources) in enumerate(groups.items()):
        together = [s for s in sources if str(s.relative_to(root)) not in ALONE]
        unit = work.resolve() / f"unit_{number}.cpp"
        write_unit(unit, together)
        units.append((unit, together, [s for s in sources if s not in together]))
        database += [entry(commands.parent.resolve(), flags, s) for s in [unit, *sources]]
    (work / "compile_commands.json").write_text(json.dumps(database, indent=1))
    clean = True
    for unit, together, rest in units:
        if alone or not together or not is_clean(clang_tidy, work, unit, show=False):
            rest += together
            if not alone:
                print(f"{folder}: together they have findings; each alone:", flush=True)
        for source in rest:
            clean = is_clean(clang_tidy, work, source, show=True) and clean
    return clean


if __name__ == "__main__":
    tool, compile_commands, room, scratch, *options = sys.argv[1:]
    if not check(
        tool, Path(compile_commands), Path(room), Path(scratch), alone="--alone" in options
    ):
        sys.exit(1)
