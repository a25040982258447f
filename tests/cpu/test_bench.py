# SPDX-License-Identifier: Apache-2.0
"""The bench: its command, what it prints, and its arithmetic. No time is judged."""

from __future__ import annotations

import json
import pstats
from pathlib import Path
from time import thread_time_ns
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from omni_npu_phase.bench import timing
from omni_npu_phase.bench.steps import Case, Steps, around_hooks, engineless
from omni_npu_phase.bench.timing import Result
from omni_npu_phase.commands import bench as command
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
        "--rows", "1", "--rows", "4", "--hook", "scalar", "--updates", "qwen3-tts", "--json", "--plot", str(picture)
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert [(each["mix"], each["rows"]) for each in report["results"]] == [
        ("decode", 1), ("decode", 4), ("mixed", 1), ("mixed", 4)
    ]  # fmt: skip
    for each in report["results"]:
        assert set(each) >= KEYS
        assert each["updates"] == "qwen3-tts"
        assert each["released_us"] > 0 < each["mixin_us"]
        assert each["ratio_min"] <= each["ratio_max"]
        assert each["operations"] <= each["released_operations"] + 9
    assert {each["mix"] for each in report["fits"]} == {"decode", "mixed"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_tables() -> None:
    """A model without batched hook is measured with its scalar one only; the toy has a table of its own."""
    done = _bench("--rows", "2", "--mix", "decode", "--updates", "personaplex", "--updates", "toy")
    assert done.exit_code == 0, done.output
    real, toy = done.stdout.split("Synthetic hooks")
    assert "personaplex │ scalar │ decode" in real
    assert "toy     │ batched │ decode" in toy
    assert "batched" not in real


def test_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PROFILED_STEPS", 3)
    written = tmp_path / "bench.prof"
    arguments = ("--rows", "2", "--mix", "decode", "--hook", "scalar", "--updates", "toy", "--profile", str(written))
    done = _bench(*arguments)
    assert done.exit_code == 0, done.output
    assert "us a step" in done.stdout
    profiled = pstats.Stats(str(written))
    assert ("_preprocess", 3) in {(name, calls[0]) for (_, _, name), calls in profiled.stats.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "--rows"),
        (["--rows", "many"], "--rows"),
        (["--hook", "none"], "--hook"),
        (["--updates", "talker"], "--updates"),
        (["--profile", "bench.prof", "--rows", "1"], "one case, not"),
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


def test_a_mixed_step_has_its_chunk_in_the_middle(released: type) -> None:
    with engineless():
        steps = Steps(released, Case(4, 8, "batched", "mixed"), torch.device("cpu"))
        assert steps.runner.input_batch.req_ids == ["r0", "r1", "prompt", "r2", "r3"]
        assert list(steps._scheduled.num_scheduled_tokens.values()) == [1, 1, 512, 1, 1]


def test_a_lap_ends_where_it_began(released: type) -> None:
    """Requests are put back to the end of their prompts before their text ends."""
    offsets = []
    with engineless():
        steps = Steps(released, Case(1, 8, "scalar", updates="qwen3-tts"), torch.device("cpu"))
        for _ in range(50):
            steps.take()
            offsets.append(steps.live()["r0"]["meta"]["talker_text_offset"])
            steps.finish()
    assert offsets == [*range(1, 49), 1, 2]


def test_what_hooks_take_is_left_out(released: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that works ten times as long as its step does not make the step longer."""
    clock = timing.HookClock()
    with engineless():
        steps = Steps(released, Case(8, 8, "scalar"), torch.device("cpu"))
        own = steps.model.preprocess

        def slow(**given: Any) -> Any:
            began = thread_time_ns()
            while thread_time_ns() - began < 2_000_000:
                pass
            return own(**given)

        steps.model.preprocess = slow
        with around_hooks(steps.model, clock.around):
            spent = min(timing._take(steps, clock) for _ in range(5))
    # Eight calls of two milliseconds each are sixteen.
    assert clock.ns > 16e6
    assert spent < 8_000
