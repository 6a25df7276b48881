"""Predictions: what they count is what travels, and what they advise follows from them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import gradferry
import pytest
import torch
from gradferry import _native
from gradferry.core.nodes import flat
from gradferry.errors import ConfigError
from gradferry.forecast.buckets import CodecTraffic, ddp_buckets
from gradferry.forecast.costs import Parameter
from gradferry.forecast.diagnosis import needs_momentum
from gradferry.forecast.hook_names import hook_config
from gradferry.forecast.observe import observe
from gradferry.forecast.predict import Prediction
from gradferry.forecast.verdict import advise
from gradferry_lab.cli import main
from scenario import Run, Scenario, Weight
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World

WEIGHTS = (*tuple(Weight(f"w{i}", (90 + 7 * i, 70)) for i in range(9)), Weight("bias", (50,)))
SCENARIO = Scenario(WEIGHTS, codec="q4", ddp={"bucket_cap_mb": 0.06})


def case_buckets(scenario: Scenario) -> dict[str, Any]:
    run = Run(scenario)
    ready: dict[int, int] = {}
    parameters = list(run.model.parameters())
    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(
            lambda _, index=index: ready.__setitem__(index, len(ready))
        )
    for step in range(4):
        run.step(step)
    before = run.state.stats()["wire_bytes"]
    ready.clear()
    run.step(4)
    stats = run.state.stats()
    return {
        "ready": [float(ready[index]) for index in range(len(parameters))],
        "buckets": stats["step_buckets"],
        "sent": stats["wire_bytes"] - before,
        "events": run.state.events(),
        "stats": stats,
    }


@pytest.mark.torch_core
@pytest.mark.parametrize("world_size", [2, 3])
def test_buckets_and_bytes_are_those_of_the_hook(worlds: Any, world_size: int) -> None:
    answers = worlds(world_size).run(case_buckets, scenario=SCENARIO)
    parameters = [Parameter(w.name, w.shape) for w in WEIGHTS]
    buckets = ddp_buckets(parameters, answers[0]["ready"], 0.06)
    assert buckets == answers[0]["buckets"]
    assert len(buckets) > 3
    traffic = CodecTraffic(hook_config("q4"), parameters, flat(world_size))
    cut = traffic.cut(buckets)
    assert traffic.sent_bytes(cut) == max(answer["sent"] for answer in answers)


def test_steps_are_observed_in_what_the_hook_says_of_them(world_of_2: World) -> None:
    answer = world_of_2.run(case_buckets, scenario=SCENARIO)[0]
    last = answer["events"][-1]["step"]
    of_last = [event for event in answer["events"] if event["step"] == last]
    assert observe(of_last, answer["stats"]) is None  # none comes after it
    longer = answer["events"][-len(answer["buckets"]) :]
    later = [
        [
            {**event, "step": 5 + n, **{k: event[k] + 1000.0 * n for k in _INSTANTS}}
            for event in longer
        ]
        for n in range(5)
    ]
    events = [event for step in later for event in step]
    seen = observe(events, answer["stats"])
    assert seen is not None
    assert seen.buckets == tuple(map(tuple, answer["buckets"]))
    assert seen.ready_s[0] == 0
    assert list(seen.ready_s) == sorted(seen.ready_s)
    held = sum(e["encoded_ms"] - e["begin_ms"] for e in longer)
    tail = max(e["complete_ms"] for e in longer) - longer[-1]["encoded_ms"]
    assert seen.exposed_s == pytest.approx(1e-3 * (held + tail))
    assert seen.without_s + seen.exposed_s == pytest.approx(1.0)


_INSTANTS = ("begin_ms", "encoded_ms", "complete_ms")


@pytest.mark.parametrize("codec", ["exact", "q4", "sign1", "topk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codec_cost_times_every_function(codec: str, dtype: torch.dtype) -> None:
    arguments = {
        "dtype": dtype,
        "worker_residual": codec == "sign1",
        "owner_residual": codec != "exact",
        "momentum": False,
        "num_elements": 1 << 17,
        "rounds": 1,
    }
    speed = _native.codec_cost(codec, world_size=3, **arguments)
    assert set(speed) == {
        "encode_per_element", "reduce_per_element", "decode_per_element", "check_per_byte",
    }  # fmt: skip
    assert all(0 < seconds < 1e-3 for seconds in speed.values())
    with pytest.raises(ConfigError, match="a tile for every rank"):
        _native.codec_cost(codec, world_size=33, **arguments)


def predictions(**ms: float) -> list[Prediction]:
    return [
        Prediction(hook.replace("_", ":"), None, 1e-3 * value, 1e-3 * (value - 100), 0)
        for hook, value in {"none": 100.0, **ms}.items()
    ]


@pytest.mark.parametrize(
    ("ms", "sentence"),
    [
        (
            {"torch_fp32": 100.2, "torch_bf16": 100.1, "q4": 100.3},
            "Do not compress: torch:fp32 takes 100.2 ± 0.1 ms per step, 1.00 times a step without "
            "communication: the backward pass hides its communication; torch:bf16 (100.1 ± 0.0 "
            "ms) is less precise and less than 2% faster.",
        ),
        (
            {"torch_fp32": 150, "torch_bf16": 120, "q4": 130},
            "Do not compress: torch:bf16 takes 120.0 ± 6.0 ms per step, 1.20 times a step without "
            "communication, and the fastest codec, q4, would take 130.0 ± 9.0 ms; a measurement "
            "may prefer q4.",
        ),
        (
            {"torch_fp32": 150, "torch_bf16": 120, "q4": 119},
            "Do not compress: torch:bf16 takes 120.0 ± 6.0 ms per step, 1.20 times a step without "
            "communication; q4 (119.0 ± 5.7 ms) is less precise and less than 2% faster; a "
            "measurement may prefer q4.",
        ),
        (
            {"torch_fp32": 150, "torch_bf16": 120, "bf16": 119},
            "Do not compress: torch:bf16 takes 120.0 ± 6.0 ms per step, 1.20 times a step without "
            "communication, and the fastest codec, bf16, would take 119.0 ± 5.7 ms; a measurement "
            "may prefer bf16.",
        ),
        (
            {"torch_fp32": 900, "torch_bf16": 500, "q8": 201, "q4": 200},
            "Use q8: q8 takes 201.0 ± 30.3 ms per step, 2.01 times a step without communication, "
            "2.49 times faster than torch:bf16, the best without gradferry; q4 (200.0 ± 30.0 ms) "
            "is less precise and less than 2% faster; a measurement may prefer q4.",
        ),
        (
            {"sync": 104, "torch_fp32": 900, "torch_bf16": 500, "q4": 200, "sign1": 110},
            "Use q4: q4 takes 200.0 ± 30.0 ms per step, 2.00 times a step without communication, "
            "2.50 times faster than torch:bf16, the best without gradferry; in momentum mode "
            "sign1 would take 110.0 ± 3.0 ms.",
        ),
    ],
)
def test_the_verdict_is_one_sentence(ms, sentence):
    assert advise(predictions(**ms), needs_momentum) == sentence


@pytest.mark.parametrize(("exchange", "told"), [("two-level", True), ("flat", False)])
def test_the_verdict_says_how_to_get_its_exchange(exchange, told):
    *others, q4 = predictions(torch_fp32=900, q4=200)
    found = [*others, replace(q4, exchange=exchange)]
    verdict = advise(found, needs_momentum, {"two-level": "nodes=2"})
    assert verdict.startswith(f"Use q4 ({exchange}): ")
    assert ("without gradferry; for this exchange attach with nodes=2." in verdict) == told


def check_doctor_rows(rows: list[dict[str, Any]], hooks: list[str]) -> None:
    kinds = [row["kind"] for row in rows]
    assert kinds == sorted(kinds, key=["link", "codec", "node", "prediction", "verdict"].index)
    found = {row["hook"]: row for row in rows if row["kind"] == "prediction"}
    assert list(found) == hooks
    none, sync = found["none"], found["sync"]
    (verdict,) = (row for row in rows if row["kind"] == "verdict")
    (latency_us,) = {
        row["latency_us"] for row in rows if row.get("collective") == "all-reduce float32"
    }
    # What ranks wait for each other, and for one element.
    assert sync["exposed_ms"] == pytest.approx(verdict["waiting_ms"] + 1e-3 * latency_us)
    assert sync["wire_bytes"] == 4
    for row in found.values():
        assert row["ms"] == pytest.approx(none["ms"] + row["exposed_ms"])
        assert row["ratio_to_none"] == pytest.approx(row["ms"] / none["ms"])
        assert row["ratio_to_sync"] == pytest.approx(row["ms"] / sync["ms"])
        assert row["exposed_ms"] >= 0
    assert found["torch:bf16"]["wire_bytes"] * 2 == found["torch:fp32"]["wire_bytes"]
    assert found["sign1"]["needs_momentum"]
    assert not found["q4"]["needs_momentum"]
    for row in rows:
        if row["kind"] == "link":
            assert row["us"] > 0
            assert row["gbit_per_s"] > 0
            assert row["latency_us"] > 0


DOCTOR_HOOKS = ["none", "sync", "torch:fp32", "torch:fp16", "torch:bf16", "q4", "sign1"]


def test_doctor_smoke_predicts_on_loopback(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert main(["doctor", "--smoke", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    check_doctor_rows(rows, DOCTOR_HOOKS)
    shown = capsys.readouterr().out
    assert rows[-1]["text"] in shown
    assert "Predicted step: small, link loopback" in shown


@pytest.mark.usefixtures("namespaces_allowed")
def test_doctor_smoke_predicts_on_a_link(tmp_path, capfd):
    file = tmp_path / "rows.json"
    assert main(["doctor", "--smoke", "--link", "200mbit", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    check_doctor_rows(rows, DOCTOR_HOOKS)
    assert {(row["ranks"], row["hosts"], row["ranks_per_host"]) for row in rows} == {(2, 2, 1)}
    assert "link 200mbit" in capfd.readouterr().out
    # The largest messages: at most the rate, and less the more else runs here.
    for row in rows:
        if row["kind"] == "link" and row["bytes"] > 1 << 18:
            assert 0 < row["gbit_per_s"] < 0.2
    # 3.49 MB at 0.2 Gb/s are 139 ms at the least, of which q4 sends a seventh, and then encodes,
    # which a busy machine may make as long again.
    found = {row["hook"]: row for row in rows if row["kind"] == "prediction"}
    assert found["torch:fp32"]["ms"] > 139
    assert found["q4"]["exposed_ms"] < found["torch:fp32"]["exposed_ms"]


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces_allowed")
def test_doctor_predicts_both_exchanges_where_ranks_share_hosts(tmp_path, capfd):
    file = tmp_path / "rows.json"
    link = ["--link", "1gbit", "--hosts", "2", "--ranks-per-host", "2"]
    hooks = ["--hooks", "torch:fp32", "q4", "--bucket-caps", "25"]
    smoke = ["--model", "small", "--turns", "1"]
    assert main(["doctor", *smoke, *hooks, *link, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    found = [(row["hook"], row["exchange"]) for row in rows if row["kind"] == "prediction"]
    assert found == [
        *((hook, None) for hook in ("none", "sync", "torch:fp32")),
        ("q4", "flat"),
        ("q4", "two-level"),
    ]
    links = {(row["exchange"], row["collective"]) for row in rows if row["kind"] == "link"}
    assert {name for exchange, name in links if exchange == "two-level"} == {
        "all-to-all", "all-gather", "local all-to-all", "local all-gather",
    }  # fmt: skip
    (node,) = (row for row in rows if row["kind"] == "node")
    assert (node["nodes"], node["ranks_per_node"]) == (2, [2, 2])
    assert node["shares_memory"]
    assert node["pack_ns"] > 0
    assert node["sum_ns"] > 0
    # Two of three messages leave the host of a flat exchange, and half of the two tiles that a node
    # sends are for itself: what leaves is a third of what the flat one sends.
    wire = {row["exchange"]: row["wire_bytes"] for row in rows if row.get("hook") == "q4"}
    assert wire["two-level"] == pytest.approx(wire["flat"] / 3, rel=0.1)
    shown = capfd.readouterr().out
    assert "two-level" in shown
    assert "whose sums are encoded" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hooks", "q5"], "q5"),
        (["--hooks", "torch:powersgd:4"], "measure it with bench train"),
        (["--model", "transfomer"], "did you mean 'transformer'"),
        (["--turns", "0"], "--turns: 0"),
        (["--bucket-caps", "0"], "--bucket-caps: 0"),
        (["--ranks", "1"], "two ranks at least"),
    ],
)
def test_doctor_refuses_before_it_starts_a_process(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(
        "multiprocessing.process.BaseProcess.start", lambda self: pytest.fail("started")
    )
    assert main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


def case_own_model() -> tuple[str, list[str], bool]:
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1))
    ddp = DistributedDataParallel(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    class Loss(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).square().mean()

    ddp = DistributedDataParallel(Loss(model), bucket_cap_mb=0.1)
    found = gradferry.doctor(ddp, lambda: (torch.randn(4, 300),), hooks=["q4"], show=False)
    unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return found.verdict, [p.hook for p in found.predictions], unchanged


def test_doctor_looks_at_a_model_that_is_there(world_of_2: World) -> None:
    answers = world_of_2.run(case_own_model)
    assert answers[0] == answers[1]
    verdict, hooks, unchanged = answers[0]
    assert re.match(r"Use q4: |Do not compress: ", verdict)
    assert hooks == ["none", "sync", "torch:fp32", "q4"]
    assert unchanged


def case_bad_batches() -> list[str]:
    ddp = DistributedDataParallel(nn.Linear(300, 1))
    x = torch.randn(4, 300)
    said = []
    for batch_fn in (
        lambda: x, lambda: None, lambda: (x, x), lambda: {"y": x}, lambda n: (x,), (x,),
    ):  # fmt: skip
        try:
            gradferry.doctor(ddp, batch_fn, hooks=["q4"], show=False)
        except ConfigError as error:
            said.append(str(error))
    return said


def test_doctor_says_what_a_batch_must_be(world_of_2: World) -> None:
    expected = (
        r"batch_fn: a batch is a Tensor; it must be a tuple or list .*one tensor alone is \(x,\)",
        r"batch_fn: a batch is None; it must be",
        r"batch_fn: the model's forward\(input: .* does not take a batch of 2 values: too many",
        r"does not take a batch of y: missing a required argument: 'input'",
        r"batch_fn must be a function without arguments .*'n'",
        r"batch_fn must be a function without arguments .* cannot be called",
    )
    for said in world_of_2.run(case_bad_batches):
        for sentence, pattern in zip(said, expected, strict=True):
            assert re.search(pattern, sentence, re.DOTALL), sentence
