"""`gradferry bench`: measurements on this machine, as ratios within one run."""

from __future__ import annotations

import argparse

from gradferry_lab.bench import codec, collective, train

_BENCHMARKS = (
    ("codec", codec, "kernels of every codec on a GPU against a copy of as many bytes"),
    ("collective", collective, "compressed all-reduce against the backend's own"),
    ("train", train, "training steps under every hook, on a link of a chosen rate"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares one sub-command per benchmark."""
    benchmarks = parser.add_subparsers(required=True, metavar="BENCHMARK")
    for name, module, summary in _BENCHMARKS:
        benchmark = benchmarks.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(benchmark)
        benchmark.set_defaults(run_benchmark=module.run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the benchmark that was named."""
    code: int = arguments.run_benchmark(arguments)
    return code
