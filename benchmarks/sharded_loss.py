"""What compressed averages over replicas do to the loss of sharded training under FSDP2.

`python benchmarks/sharded_loss.py` trains task tiny_text with AdamW on four processes of this
machine, two replicas of two shards, with three seeds each, uncompressed and with q4.
`gradferry converge --sharded` does so in one replica. Trainings with one seed begin with the same
weights and see the same batches. It prints the last validation loss of every training, its mean and
spread over seeds, what it differs from the first codec's, and the bytes that a rank's hook sends
per step, counted and by formula.
"""

from __future__ import annotations

import argparse
from statistics import mean, stdev
from typing import Any

from gradferry.errors import GradferryError
from gradferry_lab.flags import add_json, require_at_least_one
from gradferry_lab.output.json_file import write_json
from gradferry_lab.ranks.launch import Emit, run_ranks
from gradferry_lab.workloads import load_task
from gradferry_lab.workloads.parallel import HSDP, check_parallel
from gradferry_lab.workloads.training import TrainingRun, train

_TASK = "tiny_text"
_RANKS = 4


def train_all(emit: Emit, codecs: list[str], seeds: int, steps: int) -> list[dict[str, Any]]:
    """On every rank: a row of each training."""
    task = load_task(_TASK)
    rows = []
    for seed in range(seeds):
        for codec in codecs:
            run = train(task, codec, steps=steps, seed=seed, parallel=HSDP)
            rows.append({"parallel": HSDP, "seed": seed, "steps": steps, **_row(run)})
            emit(rows[-1])
    return rows


def _row(run: TrainingRun) -> dict[str, Any]:
    return {
        "codec": run.hook,
        "initial_loss": run.initial_loss,
        "final_loss": run.final_loss,
        "wire_bytes_per_step": run.wire_bytes_per_step,
        "wire_bytes_formula": run.wire_bytes_formula,
        "wire_bytes_measured": run.measured,
        "ranks": run.num_ranks,
        "ms_per_step": run.ms_per_step,
    }


def print_row(row: dict[str, Any]) -> None:
    """Prints a result as soon as it is there."""
    print(
        f"seed {row['seed']}, {row['codec']}: validation loss {row['final_loss']:.4f}", flush=True
    )


def print_summary(rows: list[dict[str, Any]], codecs: list[str]) -> None:
    """A line per codec; differences are paired by seed."""
    first = [row["final_loss"] for row in rows if row["codec"] == codecs[0]]
    for codec in codecs:
        of_codec = [row for row in rows if row["codec"] == codec]
        losses = [row["final_loss"] for row in of_codec]
        spread = stdev(losses) if len(losses) > 1 else 0.0
        row = of_codec[-1]
        counted = "counted" if row["wire_bytes_measured"] else "computed"
        print(
            f"{codec}: loss {mean(losses):.4f} (spread {spread:.4f}), "
            f"{row['wire_bytes_per_step']:,} bytes per step {counted}, "
            f"{row['wire_bytes_formula']:,} by formula"
        )
        if codec != codecs[0]:
            pairs = ", ".join(f"{b - a:+.4f}" for a, b in zip(first, losses, strict=True))
            relative = mean(losses) / mean(first) - 1
            print(f"  less {codecs[0]}: by seed {pairs}; of means {100 * relative:+.2f} %")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codecs", nargs="+", default=["off", "q4"], help="(default: off q4)")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--steps", type=int, default=400, help="(default: 400)")
    add_json(parser)
    options = parser.parse_args()
    try:
        require_at_least_one(options, "seeds", "steps")
        for codec in options.codecs:
            check_parallel(HSDP, codec)
        arguments = (options.codecs, options.seeds, options.steps)
        rows = run_ranks(train_all, arguments, _RANKS, print_row)
    except GradferryError as error:
        raise SystemExit(str(error)) from error
    print_summary(rows, options.codecs)
    if options.json is not None:
        write_json(options.json, rows, results_of="sharded loss")


if __name__ == "__main__":
    main()
