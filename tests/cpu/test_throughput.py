# SPDX-License-Identifier: Apache-2.0
"""Frames a second and latency: what a loaded engine hears, and what is made of it. No test depends on a time."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from omni_npu_phase import contract
from omni_npu_phase.commands.app import app
from omni_npu_phase.speech import load, observe, throughput, tiny_qwen3_tts
from omni_npu_phase.speech.engine import EngineError
from omni_npu_phase.speech.load import Ask, Heard, LoadedEngine, LoadSpec
from omni_npu_phase.speech.observe import Row

TEXT = "The rain has ended."
LONG = TEXT * 8
# Enough to be still speaking when the late request's prompt is read, on a busy machine too.
FRAMES = 120
SPEC = LoadSpec("chunked", "nowhere", "strict", 16, 400, 2, observed=True)


def _left(loaded: LoadedEngine) -> list[int]:
    """The engine's processes that are still there."""
    left = []
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == loaded._process.pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                left.append(process.pid)
    return left


# One real engine: a neighbour speaks while a long prompt is read in chunks.


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadSpec, list[Heard], list[Row]]:
    folder = tmp_path_factory.mktemp("loaded")
    spec = replace(SPEC, model=str(tiny_qwen3_tts.cached()))
    loaded = LoadedEngine(spec, folder)
    try:
        loaded.wait()
        # Its own, and one for each stage.
        assert len(_left(loaded)) >= 3
        before = loaded.cpu_seconds()
        heard = loaded.speak([Ask("0-n0", TEXT, FRAMES), Ask("0-long", LONG, 2, late=True)])
        assert loaded.cpu_seconds() > before > 0
        (rows,) = observe.read(folder)
    finally:
        loaded.close()
    assert _left(loaded) == []
    with pytest.raises(EngineError, match="it ended between two rounds"):
        loaded.cpu_seconds()
    return spec, heard, rows


def test_requests_are_heard_in_order(spoken: tuple[LoadSpec, list[Heard], list[Row]]) -> None:
    _, (neighbour, late), _ = spoken
    assert (neighbour.name, neighbour.frames) == ("0-n0", FRAMES)
    assert (late.name, late.frames) == ("0-long", 2)
    for heard in (neighbour, late):
        assert 0 <= heard.sent < heard.first <= heard.last
    # The late request is sent when the other has been heard, and speaks beside it.
    assert neighbour.first <= late.sent < neighbour.last
    assert late.prompt_len > 100 > neighbour.prompt_len


def test_a_long_prompt_is_read_beside_its_neighbour(spoken: tuple[LoadSpec, list[Heard], list[Row]]) -> None:
    spec, (_, late), rows = spoken
    made = throughput._long_prompt(spec, [late], rows)
    assert (made.prefill, made.budget, made.prompt_len) == ("chunked", 16, late.prompt_len)
    # Each of these steps holds a token of the neighbour, which is decoding.
    assert late.prompt_len // 16 <= made.reading_steps.median <= late.prompt_len // 15 + 1
    assert made.longest_gap_seconds.median >= made.reading_gap_seconds.median > 0
    assert made.usual_gap_seconds.median > 0


# What is made of it.


class _Scripted:
    """In an engine's place: answers with times that are known, and notes who spoke when."""

    order: list[tuple[str, int]]

    def __init__(self, spec: LoadSpec, folder: Path) -> None:
        self.spec, self.folder = spec, folder
        assert folder.is_dir()

    def wait(self) -> float:
        return 3.0

    def speak(self, asks: Sequence[Ask]) -> list[Heard]:
        if asks[0].name != "first":
            self.order.append((self.spec.name, len(asks)))
        whole = 2.0 if self.spec.name == "released" else 1.0
        return [
            Heard(ask.name, len(ask.text), ask.frames, index / 1000, index / 1000 + whole / 10, whole)
            for index, ask in enumerate(asks)
        ]

    def cpu_seconds(self) -> float:
        return 0.5 * len(self.order)

    def close(self) -> None:
        self.order.append((self.spec.name, 0))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[_Scripted]:
    cls = type("Scripted", (_Scripted,), {"order": []})
    monkeypatch.setattr(throughput, "LoadedEngine", cls)
    monkeypatch.setattr(tiny_qwen3_tts, "cached", lambda: Path("tiny"))
    return cls


def test_released_and_mixin_take_turns(scripted: type[_Scripted]) -> None:
    options = throughput.Options(Path("tiny"), requests=(1, 4), frames=10, rounds=2, neighbours=0)
    report = throughput.run(options)
    first, second = ("released", "mixin"), ("mixin", "released")
    turns = [(name, number) for names in (first, second) for number in (1, 4) for name in names]
    assert scripted.order == [*turns, ("mixin", 0), ("released", 0)]
    made = {(row.runner, row.requests): row for row in report.concurrent}
    assert set(made) == {("released", 1), ("mixin", 1), ("released", 4), ("mixin", 4)}
    assert made["released", 4].frames_per_second == throughput.Spread(20.0, 20.0, 20.0)
    assert made["mixin", 4].frames_per_second == throughput.Spread(40.0, 40.0, 40.0)
    assert made["mixin", 4].ratio == throughput.Spread(2.0, 2.0, 2.0)
    assert made["released", 4].ratio == throughput.Spread(1.0, 1.0, 1.0)
    assert made["released", 4].first_audio_seconds == throughput.Spread(0.2, 0.2, 0.2)
    assert made["mixin", 4].cpu_seconds_per_frame.median == pytest.approx(0.5 / 40, abs=1e-4)
    assert report.long_prompt == []


def _rows(chunks: int, neighbours: int = 2, steps: int = 12) -> list[Row]:
    """Neighbours decode in every step, 10 ms each and 50 where the long prompt is read: from step 4 on, in chunks."""
    rows, seconds = [], 0.0
    for step in range(steps):
        reads = 4 <= step < 4 + chunks
        names = [f"0-n{number}" for number in range(neighbours)] + (["0-long"] if reads else [])
        for name in names:
            told = {contract.IS_PREFILL: name == "0-long" or step == 0}
            read = {"request": f"{name}-x", "step": step, "told": told, "seconds": seconds}
            rows.append(Row(**{**dict.fromkeys(field.name for field in fields(Row)), **read}))
        seconds += 0.05 if reads else 0.01
    return rows


def test_gaps_of_neighbours() -> None:
    late = [Heard("0-long", 90, 2, 1.0, 1.5, 2.0)]
    made = throughput._long_prompt(SPEC, late, _rows(3))
    assert made.reading_steps.median == 3
    assert made.usual_gap_seconds.median == pytest.approx(0.01)
    # The step before them reaches into the first gap.
    assert made.reading_gap_seconds.median == pytest.approx(0.05)
    assert made.longest_gap_seconds.median == pytest.approx(0.05)
    assert made.first_audio_seconds.median == pytest.approx(0.5)
    one = throughput._long_prompt(replace(SPEC, budget=None), late, _rows(1))
    assert (one.budget, one.reading_steps.median) == (SPEC.max_model_len, 1)


@pytest.mark.parametrize(
    ("budget", "rows", "reason"),
    [
        (16, _rows(1), "it read the long prompt in 1 steps"),
        (None, _rows(3), "it read the long prompt in 3 steps"),
        (16, _rows(3, neighbours=0), "no neighbour spoke"),
        (16, _rows(3, steps=4), "no neighbour spoke"),
    ],
    ids=["not-chunked", "chunked", "alone", "after-them"],
)
def test_what_shows_nothing_is_refused(budget: int | None, rows: list[Row], reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        throughput._long_prompt(replace(SPEC, budget=budget), [Heard("0-long", 90, 2, 1.0, 1.5, 2.0)], rows)


# Engines that fail.


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python that does what a test writes into it."""
    script = tmp_path / "python"
    monkeypatch.setattr("sys.executable", str(script))
    return script


def _write(script: Path, body: str) -> None:
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)


def _start(folder: Path, spec: LoadSpec) -> None:
    (folder / "own").mkdir()
    loaded = LoadedEngine(spec, folder / "own")
    try:
        loaded.wait()
        loaded.speak([Ask("0-n0", TEXT, 40)])
    finally:
        loaded.close()
        assert _left(loaded) == []


MIXED = "echo PhaseRoutingMixin is before it >&2; "
HEARD = json.dumps([{"name": "0-n0", "prompt_len": 9, "frames": 39, "sent": 0.0, "first": 0.1, "last": 0.2}])


@pytest.mark.parametrize(
    ("body", "mode", "reason"),
    [
        ("echo 'ValueError: no KV cache' >&2; exit 3", "strict", "chunked engine failed: ValueError: no KV cache"),
        ("exit 3", "strict", "the chunked engine failed: "),
        ("echo 1.0; sleep 100", "strict", "chunked engine has no mixin"),
        (f"{MIXED} echo 1.0; sleep 100", "off", "chunked engine has the mixin"),
        (f"{MIXED} echo 1.0; read line; exit 1", "strict", "the chunked engine failed: "),
        (f"{MIXED} echo 1.0; read line; echo '{HEARD}'; sleep 100", "strict", "40 frames were asked for, 39 came"),
        ("sleep 100", "strict", "no answer in 1 s"),
    ],
    ids=["error", "silent-death", "no-mixin", "mixin", "death-in-a-round", "too-few-frames", "hangs"],
)
def test_an_engine_that_fails_says_why_and_leaves_nothing(
    body: str, mode: Any, reason: str, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(python, body)
    if reason.startswith("no answer"):
        monkeypatch.setattr(load, "START_SECONDS", 1)
    with pytest.raises(EngineError, match=reason):
        _start(tmp_path, replace(SPEC, mode=mode))


# The command.


def _invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench-speech", *arguments])


def test_the_command_prints_tables_or_json(scripted: type[_Scripted], monkeypatch: pytest.MonkeyPatch) -> None:
    late = [Heard("0-long", 90, 2, 1.0, 1.5, 2.0)]
    monkeypatch.setattr(
        throughput,
        "_long_prompts",
        lambda *_: [
            throughput._long_prompt(replace(SPEC, name="unchunked", budget=None), late, _rows(1)),
            throughput._long_prompt(SPEC, late, _rows(3)),
        ],
    )
    table = _invoke("--requests", "4", "--rounds", "1")
    assert table.exit_code == 0, table.output
    assert "load average" in table.stdout
    assert "unchunked" in table.stdout
    read = json.loads(_invoke("--requests", "4", "--rounds", "1", "--json").stdout)
    assert read["schema"] == 1
    assert [(row["runner"], row["requests"]) for row in read["concurrent"]] == [("released", 4), ("mixin", 4)]
    assert [row["prefill"] for row in read["long_prompt"]] == ["unchunked", "chunked"]
    assert set(read["long_prompt"][0]["longest_gap_seconds"]) == {"median", "least", "most"}
    assert len(read["runtime"]["load_average"]["before"]) == 3


def test_the_command_says_in_one_line_why_it_cannot(scripted: type[_Scripted], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any) -> float:
        raise EngineError("the released engine failed: no memory", "what it wrote\n")

    monkeypatch.setattr(scripted, "wait", fails)
    done = _invoke()
    assert done.exit_code == 2
    assert "error: the released engine failed: no memory" in done.stderr
    assert "what it wrote" not in done.stderr
    assert "Traceback" not in done.output
    # Both were started, and both are ended.
    assert scripted.order == [("mixin", 0), ("released", 0)]
    assert "what it wrote" in _invoke("--debug").stderr
    assert _invoke("--requests", "0").exit_code == 2

    monkeypatch.setattr(scripted, "wait", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    done = _invoke()
    assert done.exit_code == 2
    assert "error: ended by SIGTERM, without a report" in done.stderr
    assert scripted.order[-2:] == [("mixin", 0), ("released", 0)]
