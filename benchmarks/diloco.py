"""examples/diloco.py on hosts behind a slow link: the outer step with a codec against fp32's.

`python benchmarks/diloco.py`, as root, trains on three hosts (network namespaces of this machine)
joined at 50 Mb/s, with three seeds each, uncompressed and with q4. It prints the last loss of every
training, its mean and spread, and the median time of an outer step, connections and first steps
left out.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path
from statistics import mean, median, stdev

from gradferry_lab.flags import add_json
from gradferry_lab.output.json_file import write_json
from gradferry_lab.ranks.network import DEVICE, Network, address, parse_link

EXAMPLE = Path(__file__).parents[1] / "examples" / "diloco.py"
LINE = re.compile(r"outer step \d+: loss ([0-9.]+), took (\d+) ms")


def train(codec: str, seed: int, arguments: argparse.Namespace) -> tuple[float, list[float]]:
    """The last loss, and the milliseconds of every outer step but the first."""
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder) / "printed"
        environment = [
            f"WORLD_SIZE={arguments.hosts}",
            f"MASTER_ADDR={address(1)}",
            "MASTER_PORT=29400",
            f"GLOO_SOCKET_IFNAME={DEVICE}",
            "OMP_NUM_THREADS=1",
        ]
        example = [sys.executable, str(EXAMPLE), "--codec", codec, "--seed", str(seed)]
        commands = [
            ["env", *environment, f"RANK={rank}", *example] for rank in range(arguments.hosts)
        ]
        commands[0] = ["sh", "-c", f'exec "$@" >{printed}', "sh", *commands[0]]
        with Network(parse_link(arguments.link), commands) as network:
            if any(network.wait()):
                raise SystemExit(f"a rank failed with --codec {codec} --seed {seed}")
        steps = LINE.findall(printed.read_text())
    return float(steps[-1][0]), [float(ms) for _, ms in steps[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--link", default="50mbit")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--codecs", nargs="+", default=["off", "q4"])
    add_json(parser)
    arguments = parser.parse_args()
    losses: dict[str, list[float]] = {codec: [] for codec in arguments.codecs}
    times: dict[str, list[float]] = {codec: [] for codec in arguments.codecs}
    for seed in range(arguments.seeds):
        for codec in arguments.codecs:
            loss, steps = train(codec, seed, arguments)
            losses[codec].append(loss)
            times[codec] += steps
            print(f"seed {seed}, {codec}: loss {loss:.4f}, outer step {median(steps):.0f} ms")
    rows = [
        {
            "codec": codec,
            "hosts": arguments.hosts,
            "link": arguments.link,
            "losses": losses[codec],
            "loss": mean(losses[codec]),
            "spread": stdev(losses[codec]) if arguments.seeds > 1 else 0.0,
            "outer_step_ms": median(times[codec]),
        }
        for codec in arguments.codecs
    ]
    for row in rows:
        print(
            f"{row['codec']}: loss {row['loss']:.4f} (spread {row['spread']:.4f}), "
            f"outer step {row['outer_step_ms']:.0f} ms"
        )
    if arguments.json is not None:
        write_json(arguments.json, rows, results_of="diloco")


if __name__ == "__main__":
    main()
