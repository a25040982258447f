# SPDX-License-Identifier: Apache-2.0
"""The real engine core, scheduler, workers and talker on the CPU platform, with the mixin in the real runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from omni_npu_phase import platform
from omni_npu_phase.commands.app import app
from omni_npu_phase.settings import PLATFORM_VARIABLE
from omni_npu_phase.step.route import BATCHED_HOOK
from omni_npu_phase.tracing import schema
from omni_npu_phase.tracing.check import check

pytestmark = pytest.mark.xdist_group("talker")


@pytest.fixture
def runs(talker: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return talker


def _codes(run: dict[str, Any], rank: int = 0) -> dict[str, list[list[int]]]:
    codes: dict[str, list[list[int]]] = {}
    for row in run["ranks"][rank]:
        codes.setdefault(row["request"], [])
        if row["codes"] is not None:
            codes[row["request"]].append(row["codes"])
    return codes


def _names(runner: dict[str, Any]) -> list[str]:
    return [name.rpartition(".")[2] for name in runner["classes"]]


def test_the_plugin_put_the_mixin_before_the_released_runner(runs: dict[str, dict[str, Any]]) -> None:
    for runner in (*runs["unchunked"]["runners"], *runs["two processes"]["runners"]):
        names = _names(runner)
        # The plugin's class has this name; the platform's own call would have made one of its runner.
        assert (
            names.index("PhaseGPUARModelRunner") < names.index("PhaseRoutingMixin") < names.index("OmniGPUModelRunner")
        )
        assert (runner["mixin"], runner["mode"]) == ("PhaseRoutingMixin", "on")
    assert {row["called_by"] for row in runs["chunked"]["ranks"][0]} == {"omni_npu_phase"}
    assert len(runs["two processes"]["runners"]) == 2


def test_off_leaves_the_runner_of_an_engine_as_released(runs: dict[str, dict[str, Any]]) -> None:
    (runner,) = runs["off"]["runners"]
    assert "OmniGPUModelRunner" in _names(runner)
    assert not [name for name in _names(runner) if "Phase" in name]
    assert (runner["mixin"], runner["mode"]) == (None, "off")
    assert {row["called_by"] for row in runs["off"]["ranks"][0]} == {"vllm_omni"}


@pytest.mark.parametrize("asked", ["", "cuda", "CPU"])
def test_nothing_is_active_unless_asked_for(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLATFORM_VARIABLE, asked)
    assert platform.vllm_platform() is None
    assert platform.omni_platform() is None


@pytest.mark.parametrize("name", ["chunked", "chunked, asynchronous", "asynchronous", "least chunks"])
def test_codes_are_those_of_the_unchunked_engine(name: str, runs: dict[str, dict[str, Any]]) -> None:
    assert _codes(runs[name]) == _codes(runs["unchunked"])
    assert runs[name]["tokens"] == runs["unchunked"]["tokens"]


def test_codes_do_not_depend_on_who_shares_the_batch(runs: dict[str, dict[str, Any]]) -> None:
    assert _codes(runs["one at a time"])["b"] == _codes(runs["unchunked"])["b"]


def test_a_tail_and_a_decode_row_shared_a_step(runs: dict[str, dict[str, Any]]) -> None:
    steps: dict[int, list[tuple[int, Any]]] = {}
    for row in runs["chunked"]["ranks"][0]:
        steps.setdefault(row["step"], []).append((row["span"], row["told"]["_omni_is_prefill"]))
    assert any((1, False) in rows and any(prefill for _, prefill in rows) for rows in steps.values())


def test_a_seeded_request_draws_the_same_when_its_prompt_is_chunked(runs: dict[str, dict[str, Any]]) -> None:
    assert runs["seeded, chunked"]["tokens"] == runs["seeded"]["tokens"]
    assert runs["seeded"]["tokens"] != runs["unchunked"]["tokens"]


def test_both_ranks_route_alike(runs: dict[str, dict[str, Any]]) -> None:
    first, second = (
        [{key: value for key, value in row.items() if key != "seconds"} for row in rank]
        for rank in runs["two processes"]["ranks"]
    )
    assert first == second
    assert _codes(runs["two processes"]) == _codes(runs["one process"])


def test_a_preempted_request_is_told_its_phase_and_reads_its_prompt_from_elsewhere(
    runs: dict[str, dict[str, Any]],
) -> None:
    """A finding about the model: after preemption it slices its prompt from an offset of its own, not from C.

    The runner's part holds: the replay is prefill again, with C from 0 (M4, M5, M8). The model's offset stands at the
    end of the prompt since the first time, so that every row of the replay is padding, and the speech is another.
    """
    rows = [row for row in runs["few blocks"]["ranks"][0] if row["request"] == "b"]
    told = [tuple(row["told"].values()) for row in rows]
    first_decode = told.index((29, 29, False))
    again = told.index((29, 0, True), 1)
    assert first_decode < again
    replay = rows[again:]
    assert [(*told[again + index], row["span"]) for index, row in enumerate(replay[:6])] == [
        (29, 0, True, 7),
        (29, 7, True, 7),
        (29, 14, True, 7),
        (29, 21, True, 7),
        (29, 28, True, 7),
        (29, 35, False, 1),
    ]
    assert all(row["codes"] is None and row["unchanged"] for row in replay[:5])
    assert [row["sliced_from"] for row in replay[:5]] == [29, 36, 43, 50, 57]
    assert _codes(runs["few blocks"])["a"] == _codes(runs["enough blocks"])["a"]
    assert _codes(runs["few blocks"])["b"] != _codes(runs["enough blocks"])["b"]


def test_with_exact_replay_a_preempted_request_speaks_on_as_before(runs: dict[str, dict[str, Any]]) -> None:
    """No hook sees again what was given back, so that the model's rows are those of a request that never stopped."""
    known, replayed = runs["enough blocks"], runs["few blocks, replay"]
    assert replayed["tokens"] == known["tokens"]
    assert _codes(replayed) == _codes(known)
    seen = [[row["told"] for row in run["ranks"][0] if row["request"] == "b"] for run in (known, replayed)]
    assert [told for told in seen[1] if not list(told.values())[-1]] == [
        told for told in seen[0] if not list(told.values())[-1]
    ]


@pytest.mark.parametrize(("name", "ranks"), [("two processes", [(0, True), (1, True)]), ("off, traced", [(0, False)])])
def test_a_trace_is_what_the_engine_did(
    name: str, ranks: list[tuple[int, bool]], runs: dict[str, dict[str, Any]], traces: dict[str, Path]
) -> None:
    """Each rank writes one, all the same; no clause is broken, mixin or not."""
    written = schema.find(traces[name])
    assert [(trace.header.tp, trace.header.mixin) for trace in written] == ranks
    result = check(written)
    assert result.findings == []
    assert all(result.judged[clause] for clause in ("R2", "R5", "T1", "T2", "T4", "M4"))
    for trace, rank in zip(written, runs[name]["ranks"], strict=True):
        rows = [each for each_step in trace.steps() for each in each_step.rows]
        assert [(each.request, each.span) for each in rows] == [(each["request"], each["span"]) for each in rank]
        assert [each.hook for each in rows] == [
            schema.BATCHED if each["hook"] == BATCHED_HOOK else schema.SCALAR for each in rank
        ]
        assert [each.seen_by_mtp for each in rows] == [each["codes"] is not None for each in rank]
        assert any(each.lengths.tail for each in rows)
    if len(written) == 2:
        assert CliRunner().invoke(app, ["trace", "compare", str(traces[name])]).exit_code == 0
