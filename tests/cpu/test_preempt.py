# SPDX-License-Identifier: Apache-2.0
"""``omni-npu-phase validate --preempt``: real engines with too few KV blocks, and what its report makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omni_npu_phase.commands.app import app
from omni_npu_phase.speech import preempt, tiny_qwen3_tts
from omni_npu_phase.speech.preempt import ENOUGH, OFF, ON, Report
from omni_npu_phase.speech.validate import Options, validate_preempted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("preempted")


@pytest.fixture(scope="module")
def spoken(folder: Path) -> Report:
    return validate_preempted(Options(tiny_qwen3_tts.cached(), folder))


def test_with_exact_replay_the_same_is_spoken(spoken: Report, folder: Path) -> None:
    assert spoken.verdict == "equal", spoken.summary()
    written = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert (written["verdict"], written["reasons"]) == ("equal", [])
    assert written["preemptions"] >= 2
    for index, own in enumerate(spoken.spoken[OFF]):
        other = written["prompts"][index]["first_other_frame"]
        assert other["on"] is None
        # Whoever was never preempted spoke the same without replay, too; of the others some other frame came.
        assert (other["off"] is None) is (not own.preempted)
    assert "| Good morning to you all. |" in (folder / "report.md").read_text(encoding="utf-8")


def test_it_says_where_each_was_preempted(spoken: Report) -> None:
    places = [own.where() for own in spoken.spoken[ON]]
    assert "never" in places
    assert any("in its prompt, at " in place for place in places)
    assert any("behind frame " in place for place in places)


def test_what_proves_nothing(spoken: Report) -> None:
    never = [replace(own, preempted=[]) for own in spoken.spoken[ON]]
    quiet = replace(spoken, spoken={**spoken.spoken, ON: never})
    assert (quiet.verdict, quiet.unproven) == (
        "proves nothing",
        [f"no request was preempted with {quiet.blocks} KV blocks"],
    )
    same = replace(spoken, spoken={**spoken.spoken, OFF: spoken.spoken[ENOUGH]})
    assert "without replay the same was spoken" in same.summary()
    crowded = replace(spoken, spoken={**spoken.spoken, ENOUGH: spoken.spoken[ON]})
    assert crowded.unproven == ["the engine with enough KV blocks preempted a request"]


def test_another_frame_is_a_fault(spoken: Report) -> None:
    without = replace(spoken, spoken={**spoken.spoken, ON: spoken.spoken[OFF]})
    assert without.verdict == "different"
    first = next(index for index, own in enumerate(spoken.spoken[OFF]) if own.preempted)
    assert without.faults[0] == f"prompt {first + 1}: frame {spoken.first_other(OFF)[first]} is another with replay"


def test_devices_without_such_engines(tmp_path: Path) -> None:
    arguments = ["validate", "--preempt", "--device", "cuda", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "engines with few KV blocks are made on cpu and emulated, not cuda" in " ".join(result.stderr.split())


def test_first_other_frame() -> None:
    assert preempt._first_other([[1], [2]], [[1], [2]]) is None
    assert preempt._first_other([[1]], [[1], [2]]) == 1
    assert preempt._first_other([[1], [3]], [[1], [2]]) == 1
