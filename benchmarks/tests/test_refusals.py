"""What commands refuse before they start a process: what is said, and that the exit code is 2."""

from __future__ import annotations

import shlex

import pytest
import torch
from gradferry.errors import ConfigError
from gradferry_lab.cli import main
from gradferry_lab.flags import Parser, refuse

BY_SMOKE = "means nothing beside --smoke, which sets it"
NO_RATE = "is no rate; write 100mbit, 1gbit or 2.5gbit\n"
# A command line, and what it is told; "..." stands for anything.
REFUSED = [
    ("bench codec --codecs q5", "q5"),
    ("bench codec --isas sse2", "sse2"),
    ("bench codec --threads 0", "--threads: 0"),
    ("bench codec --rounds 0", "--rounds: 0"),
    ("bench codec --world-sizes -1", "--world-sizes: -1"),
    ("bench codec --num-elements 4096", "4096"),
    ("bench codec --num-elements 1099511627776", "1099511627776"),
    ("bench codec --sizes-mb 1", "--sizes-mb is for a GPU (--device cuda) only"),
    ("bench codec --device cuda --threads 2", "--threads is for the CPU only"),
    ("bench codec --device cuda --isas avx2", "--isas is for the CPU only"),
    ("bench codec --device cuda --num-elements 9", "--num-elements is for the CPU only"),
    ("bench codec --device cuda --sizes-mb 8 0", "--sizes-mb: 0 must be more than 0"),
    ("bench codec --device cuda --codecs q5", "q5"),
    ("bench collective --codecs q5", "q5"),
    ("bench collective --codecs q4 auto", "auto"),
    ("bench collective -b 1M -e 1K", "-e 1K is less than -b 1M"),
    ("bench collective -f 1", "-f 1"),
    ("bench collective -n 0", "-n 0"),
    ("bench collective -w -1", "-w -1"),
    ("bench collective --ranks 0", "--ranks"),
    (
        "bench collective --op reduce_scatter --device cuda",
        "--op reduce_scatter with --device cuda: a compressed reduce-scatter runs on hosts alone; "
        "leave out --device",
    ),
    (
        "bench collective --op reduce_scatter --exchange auto two-level",
        "--op reduce_scatter with --exchange two-level: a compressed reduce-scatter has no sums "
        "within hosts; use --exchange flat",
    ),
    ("bench collective --smoke -n3", f"-n {BY_SMOKE}"),
    ("bench collective --minbytes 4K --smoke", f"--minbytes {BY_SMOKE}"),
    ("bench overlap --hooks q4", "torch.profiler...state.events()...bench train"),
    ("bench train --hooks q5", "q5"),
    ("bench train --hooks q4+momentun=0.9", "did you mean 'momentum'"),
    ("bench train --hooks q4+warmup_steps=x", "warmup_steps cannot be 'x'"),
    ("bench train --hooks q4+error_feedback=all", "error_feedback='all'"),
    (
        "bench train --model resnet",
        "unknown model 'resnet'...transformer, vgg, embedding, small, or module:function",
    ),
    ("bench train --model transfomer", "did you mean 'transformer'"),
    ("bench train --model no_such_module:make", "No module named 'no_such_module'"),
    ("bench train --model math:make", "math"),
    ("bench train --model math:pi", "cannot be called"),
    ("bench train --model json:dumps", "must be a function without arguments"),
    ("bench train --rounds 0", "--rounds: 0"),
    ("bench train --steps 0", "--steps: 0"),
    ("bench train --bucket-caps 4 0", "--bucket-caps: 0"),
    ("bench train --link fast", "--link 'fast'"),
    ("bench train --link 1GB/s", "--link '1GB/s'"),  # bytes
    ("bench train --ranks 0", "--ranks"),
    ("bench train --parallel hsdp --hooks torch:fp16", "hook 'torch:fp16' is for DDP; under"),
    (
        "bench train --parallel hsdp --hooks torch:powersgd:4",
        "is for DDP; under hsdp there are",
    ),
    ("bench train --parallel hsdp --hooks sync", "none, torch:fp32, torch:bf16 (FSDP2's own"),
    ("bench train --parallel hsdp --hooks auto", "name a codec for FSDP2, such as 'q4'"),
    ("bench train --parallel fsdp --hooks q5", "unknown hook 'q5'"),
    ("bench train --parallel fsdp --hooks q4+gather=q8", "did you mean 'all_gather'"),
    ("bench train --parallel fsdp --hooks q4+all_gather=rht", "all_gather='rht' is none of"),
    ("bench train --parallel fsdp --hooks q4+keep_gathered=1", "keep_gathered cannot be '1'"),
    ("bench train --parallel fsdp --hooks sign1", "sign1 needs scatter_feedback"),
    ("bench train --parallel fsdp --hooks q4+momentum=0.8", "is for averages over replicas"),
    ("bench train --hooks q4+all_gather=q8", "'all_gather' is no argument of attach that can be"),
    (
        "bench train --parallel hsdp --hooks q4+momentum=0.9+warmup_steps=9",
        "leave out warmup_",
    ),
    ("bench train --parallel hsdp --bucket-caps 4", "--bucket-caps means nothing with --par"),
    (
        "bench train --parallel hsdp --exchange two-level",
        "ranks of a host share a replica",
    ),
    ("bench train --most-steps 9", "--most-steps means nothing without --until-loss; leave it out"),
    ("bench train --hosts 3", "--hosts means nothing without --link; leave it out"),
    ("bench train --smoke --hooks q4", f"--hooks {BY_SMOKE}"),
    ("bench train --rounds 3 --smoke", f"--rounds {BY_SMOKE}"),
    ("converge --worlds 0", "--worlds: 0 must be at least 1"),
    ("converge --tasks convexx", "did you mean 'convex'"),
    ("converge --out /dev/null/results", "cannot make this folder"),
    ("converge --from /dev/null", "/dev/null cannot be read"),
    (
        "converge --from x --fresh",
        "--fresh means nothing beside --from, which trains nothing",
    ),
    ("converge --from x --worlds 2", "--worlds means nothing beside --from"),
    ("converge --from x --known y", "--known means nothing beside --from"),
    ("demo --hooks torch:fp32 qq4", "did you mean 'q4'"),
    ("demo --task txt", "did you mean 'text'"),
    ("demo --steps 0", "steps must be at least"),
    ("demo --ranks 99", "ranks must be from 1 to 16"),
    ("demo --out /dev/null/results", "cannot make this folder"),
    ("doctor --hooks q5", "q5"),
    ("doctor --hooks auto", "'auto' chooses among hooks"),
    ("doctor --hooks torch:powersgd:4", "`gradferry bench train` compares others"),
    ("doctor --model transfomer", "did you mean 'transformer'"),
    ("doctor --bucket-cap 0", "--bucket-cap: 0"),
    ("doctor --ranks 1", "two ranks at least"),
    ("doctor --parallel fsdp", "`gradferry bench train --parallel fsdp --model module:function`"),
    ("doctor --smoke --model nope:x", f"--model {BY_SMOKE}"),
    ("doctor --hooks torch:fp32 q4 --smoke", f"--hooks {BY_SMOKE}"),  # the setting, but named
    ("plan --world 1", "must be a number from 2"),
    ("plan --gpus-per-node 0", "--gpus-per-node: 0 must be a number from 1"),
    ("plan --world 10 --gpus-per-node 8", "multiple of --gpus-per-node"),
    ("plan --world 8 --gpus-per-node 8", "is one node"),
    ("plan --link fast", "fast"),
    ("plan --link unshaped", f"--link 'unshaped' {NO_RATE}"),
    ("plan --link loopback", f"--link 'loopback' {NO_RATE}"),
    ("plan --compute-ms -1", "--compute-ms: -1 must be a number from 0"),
    ("plan --params 0", "--params: 0 must be"),
    ("plan --params inf", "--params: inf must be"),
    ("plan --bucket-cap nan", "--bucket-cap: nan must be"),
    ("plan --hooks q5", "q5"),
    ("plan --hooks auto q4", "'auto' chooses among hooks"),
    ("plan --hooks torch:powersgd:4", "use bench train"),
    ("plan --hooks none", "hook 'none' sends nothing to speak of"),
    ("plan --parallel hsdp --world 8", "use --parallel fsdp"),
    ("plan --parallel fsdp --hooks q4+all_gather=rht", "all_gather='rht' is none of"),
    ("plan --parallel fsdp --hooks torch:fp16", "hook 'torch:fp16' is for DDP"),
    ("plan --gpu 4090", "--gpu 4090: plan knows no GPUs; say by --compute-ms"),
    ("plan --params 1e4B", "--params: 1e+13 must be"),
    ("plan --smoke --world 64", f"--world {BY_SMOKE}"),
    ("plan --param 1e9 --smoke", f"--params {BY_SMOKE}"),
]
if not torch.cuda.is_available():
    NO_GPU = "sees no GPU on this machine"
    REFUSED += [
        ("bench codec --device cuda", NO_GPU),
        ("doctor --device cuda", f"{NO_GPU}; run this where there is one"),
    ]


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(("line", "said"), REFUSED, ids=[line for line, _ in REFUSED])
def test_commands_refuse_before_they_start_a_process(line, said, capsys):
    assert main(shlex.split(line)) == 2
    error = capsys.readouterr().err
    for part in said.split("..."):
        assert part in error


def test_only_options_that_were_named_are_refused() -> None:
    parser = Parser()
    parser.add_argument("--count", "-c", type=int, default=3)
    parser.add_argument("--all", action="store_true")
    for words, option, flag in ((["-c3"], "count", "-c"), (["--all"], "all", "--all")):
        with pytest.raises(ConfigError, match=f"^{flag} means nothing here; leave it out$"):
            refuse(parser.parse_args(words), [option], "here")
    refuse(parser.parse_args(["--all"]), ["count"], "here")
    refuse(parser.parse_args([]), ["count", "all"], "here")
