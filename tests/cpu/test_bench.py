# SPDX-License-Identifier: Apache-2.0
"""The bench: its command, what it prints, and its arithmetic. No time is judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from omni_npu_phase.bench import timing
from omni_npu_phase.bench.steps import Case
from omni_npu_phase.bench.timing import Result
from omni_npu_phase.commands.app import app

KEYS = {
    *("rows", "hidden", "hook", "mix", "updates", "released_us", "mixin_us", "ratio", "ratio_min", "ratio_max"),
    *("operations", "transfers", "syncs"),
}


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_SECONDS_PER_CASE", 0.01)


def _bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "--hidden", "8", *arguments])


def test_json(tmp_path: Path) -> None:
    picture = tmp_path / "bench.png"
    done = _bench(
        "--rows", "2", "--rows", "4", "--hook", "scalar", "--updates", "talker", "--json", "--plot", str(picture)
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert [(each["mix"], each["rows"]) for each in report["results"]] == [
        ("decode", 2), ("decode", 4), ("mixed", 2), ("mixed", 4)
    ]  # fmt: skip
    for each in report["results"]:
        assert set(each) >= KEYS
        assert each["released_us"] > 0 < each["mixin_us"]
        assert each["ratio_min"] <= each["ratio_max"]
        assert each["operations"] < each["released_operations"]
    assert {each["mix"] for each in report["fits"]} == {"decode", "mixed"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_table() -> None:
    done = _bench("--rows", "3", "--mix", "decode", "--hook", "batched", "--updates", "toy")
    assert done.exit_code == 0, done.output
    assert "batched │ decode │ toy" in done.stdout
    assert "Floor, a bare loop" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "--rows"),
        (["--rows", "many"], "--rows"),
        (["--hook", "none"], "--hook"),
        (["--rows", "1", "--mix", "mixed"], "a mixed step has at least 2 rows"),
        (["--plot", "bench.doc"], "a name that ends in .png or .svg"),
        (["--rows", "1", "--mix", "decode", "--plot", "/nowhere/bench.png"], "no such folder"),
    ],
)
def test_bad_input(arguments: list[str], message: str) -> None:
    done = _bench(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def _result(rows: int, released_us: float, mixin_us: float) -> Result:
    return Result(rows, 8, "batched", "decode", "toy", released_us, mixin_us, 1, 1, 1, 1, 1)


def test_fit() -> None:
    results = [_result(rows, 100 + 10 * rows, 50 + 2 * rows) for rows in (1, 8, 64)]
    assert timing.fit(results, lambda each: each.released_us) == timing.Fit(100.0, 10.0)
    assert timing.fit(results, lambda each: each.mixin_us) == timing.Fit(50.0, 2.0)
    assert timing.fit(results[:1], lambda each: each.mixin_us) is None


def test_a_mixed_step_has_its_chunk_in_the_middle() -> None:
    spans = [row.span for row in Case(64, 8, "batched", "mixed").placed()]
    assert (len(spans), spans.count(1), spans[32]) == (64, 63, 512)
