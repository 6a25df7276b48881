"""One rank of a training on a host of its own, whose link goes down or is slow.

Says on the way, in files of its folder, what the test waits for: `ready` in the middle of the
steps, where it waits for `go`, and at the end what it saw.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gradferry_lab.ranks.network import DEVICE
from outcomes import attempt
from scenario import Run, Scenario, Weight

SCENARIO = Scenario((Weight("first", (192, 64)), Weight("bias", (50,)), Weight("last", (256, 64))))
STEPS = 40


def main(rank: int, folder: str, seconds: float) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    dist.init_process_group(
        "gloo",
        init_method="tcp://10.251.0.1:29400",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=seconds),
    )
    run = Run(SCENARIO)
    for step in range(STEPS // 2):
        run.step(step)
    Path(folder, f"ready {rank}").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    for step in range(STEPS // 2, STEPS):
        outcome = attempt(lambda at=step: run.step(at))
        if outcome.error is not None:
            break
    parameters = run.parameter_hash()
    answer = {"error": outcome.error, "text": outcome.headline, "parameters": parameters}
    Path(folder, f"rank {rank}").write_text(json.dumps(answer))
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
