"""What commands refuse before they start a process: what is said, and that the exit code is 2."""

from __future__ import annotations

import shlex

import pytest
import torch
from gradferry_lab.cli import main

BY_SMOKE = "means nothing beside --smoke, which sets it"
# A command line, and what it is told; "..." stands for anything.
REFUSED = [
    ("bench codec --codecs q5", "q5"),
    ("bench codec --rounds 0", "--rounds: 0"),
    ("bench codec --world-sizes -1", "--world-sizes: -1"),
    ("bench codec --sizes-mb 8 0", "--sizes-mb: 0 must be more than 0"),
    ("bench collective --codecs q5", "q5"),
    ("bench collective --codecs q4 auto", "auto"),
    ("bench collective -f 1", "--stepfactor: 1 must be at least 2"),
    ("bench collective --ranks 0", "--ranks"),
    ("bench collective --smoke -n3", f"-n {BY_SMOKE}"),
    ("bench train --hooks q4+momentun=0.9", "did you mean 'momentum'"),
    ("bench train --hooks sign1+momentum=0.9+warmup=q8", "warmup='q8'...warmup_steps="),
    ("bench train --model resnet", "'resnet'...transformer, small, or module:function"),
    ("bench train --model no_such_module:make", "No module named 'no_such_module'"),
    ("bench train --model json:dumps", "must be a function without arguments"),
    ("bench train --rounds 0", "--rounds: 0"),
    ("bench train --bucket-caps 4 0", "--bucket-caps: 0"),
    ("bench train --link 1GB/s", "--link '1GB/s'"),  # bytes
    ("bench train --parallel hsdp --hooks torch:fp16", "hook 'torch:fp16' is for DDP; under"),
    ("bench train --parallel hsdp --hooks auto", "name a codec for FSDP2, such as 'q4'"),
    ("bench train --parallel fsdp --hooks q4+gather=q8", "did you mean 'all_gather'"),
    ("bench train --parallel fsdp --hooks q4+keep_gathered=1", "keep_gathered cannot be '1'"),
    ("bench train --hooks q4+all_gather=q8", "'all_gather' is no argument of attach that can be"),
    ("bench train --parallel hsdp --hooks q4+momentum=0.9+warmup_steps=9", "leave out warmup_"),
    ("bench train --parallel hsdp --bucket-caps 4", "--bucket-caps means nothing with --par"),
    ("bench train --parallel hsdp --exchange two-level", "ranks of a host share a replica"),
    ("bench train --hosts 3", "--hosts means nothing without --link; leave it out"),
    ("bench train --smoke --hooks q4", f"--hooks {BY_SMOKE}"),
    ("converge --worlds 0", "--worlds: 0 must be at least 1"),
    ("converge --tasks convexx", "did you mean 'convex'"),
    ("converge --keep", "name it with --json FILE"),
    ("converge --keep --json no_such.json", "no_such.json cannot be read"),
    (
        "converge --keep --json benchmarks/results/convergence.json",
        "['full', 'quick']",
    ),
    ("converge --out /dev/null/results", "cannot make this folder"),
    ("converge --from /dev/null", "/dev/null cannot be read"),
    ("demo --task txt", "did you mean 'text'"),
    ("demo --steps 0", "steps must be at least"),
    ("demo --ranks 99", "ranks must be from 1 to 16"),
    ("demo --out /dev/null/results", "cannot make this folder"),
    ("doctor --hooks auto", "there is no codec 'auto'"),
    ("doctor --model transfomer", "did you mean 'transformer'"),
    ("doctor --bucket-cap 0", "--bucket-cap: 0"),
    ("doctor --ranks 1", "two ranks at least"),
    ("doctor --parallel fsdp", "`gradferry bench train --parallel fsdp --model module:function`"),
    ("doctor --smoke --model nope:x", f"--model {BY_SMOKE}"),
    ("plan --world 1", "must be a number from 2"),
    ("plan --gpus-per-node 0", "--gpus-per-node: 0 must be a number from 1"),
    ("plan --world 10 --gpus-per-node 8", "multiple of --gpus-per-node"),
    ("plan --world 8 --gpus-per-node 8", "is one node"),
    ("plan --link unshaped", "--link 'unshaped' is no rate; write 100mbit, 1gbit or 2.5gbit\n"),
    ("plan --compute-ms -1", "--compute-ms: -1 must be a number from 0"),
    ("plan --params 0", "--params: 0 must be"),
    ("plan --hooks auto q4", "'auto' chooses among hooks"),
    ("plan --hooks none", "hook 'none' sends nothing to speak of"),
    ("plan --parallel hsdp --world 8", "use --parallel fsdp"),
]
if not torch.cuda.is_available():
    NO_GPU = "sees no GPU on this machine"
    REFUSED += [
        ("bench codec", NO_GPU),
        ("converge --device cuda", NO_GPU),
        ("doctor --device cuda", f"{NO_GPU}; run this where there is one"),
    ]


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(("line", "said"), REFUSED, ids=[line for line, _ in REFUSED])
def test_commands_refuse_before_they_start_a_process(line, said, capsys):
    assert main(shlex.split(line)) == 2
    error = capsys.readouterr().err
    for part in said.split("..."):
        assert part in error
