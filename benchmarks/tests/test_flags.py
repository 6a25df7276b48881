"""Options that mean nothing beside others are refused, however they are written."""

from __future__ import annotations

import pytest
from gradferry.errors import ConfigError
from gradferry_lab.cli import main
from gradferry_lab.flags import Parser, refuse


@pytest.mark.parametrize(
    ("command", "flag", "words"),
    [
        (["doctor"], "--model", ["--model", "nope:x"]),
        (["doctor"], "--hooks", ["--hooks", "torch:fp32", "q4"]),  # the setting, but named
        (["plan"], "--world", ["--world", "64"]),
        (["plan"], "--params", ["--par", "1e9"]),
        (["bench", "train"], "--hooks", ["--hooks", "q4"]),
        (["bench", "train"], "--rounds", ["--rounds", "3"]),
        (["bench", "collective"], "-n", ["-n3"]),
        (["bench", "collective"], "--minbytes", ["--minbytes", "4K"]),
    ],
)
@pytest.mark.parametrize("smoke_first", [True, False])
def test_smoke_names_the_option_that_it_sets_too(
    command: list[str],
    flag: str,
    words: list[str],
    smoke_first: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "multiprocessing.process.BaseProcess.start", lambda _: pytest.fail("started")
    )
    line = ["--smoke", *words] if smoke_first else [*words, "--smoke"]
    assert main([*command, *line]) == 2
    assert f"{flag} means nothing beside --smoke, which sets it" in capsys.readouterr().err


def test_only_options_that_were_named_are_refused() -> None:
    parser = Parser()
    parser.add_argument("--count", "-c", type=int, default=3)
    parser.add_argument("--all", action="store_true")
    for words, option, flag in ((["-c3"], "count", "-c"), (["--all"], "all", "--all")):
        with pytest.raises(ConfigError, match=f"^{flag} means nothing here; leave it out$"):
            refuse(parser.parse_args(words), [option], "here")
    refuse(parser.parse_args(["--all"]), ["count"], "here")
    refuse(parser.parse_args([]), ["count", "all"], "here")


def test_bench_overlap_says_what_took_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "overlap", "--hooks", "q4"]) == 2
    said = capsys.readouterr().err
    for word in ("torch.profiler", "state.events()", "bench train"):
        assert word in said
