# SPDX-License-Identifier: Apache-2.0
"""The real engine core, scheduler, workers and talker on the CPU platform, with the mixin in the real runner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from omni_npu_phase import platform
from omni_npu_phase.settings import PLATFORM_VARIABLE
from omni_npu_phase.speech import tiny_qwen3_tts

from .talker_runs import talker_runs

TEXTS = {"a": "Hello world", "b": "The rain has ended."}
SEEDED = {"seed": 5, "temperature": 0.9}
BLOCKS = {"texts": TEXTS, "budget": 7, "max_model_len": 96, "sampling": {"max_tokens": 16}}
CASES: Mapping[str, dict[str, Any]] = {
    "unchunked": {"texts": TEXTS, "budget": 128},
    "one at a time": {"texts": {"b": TEXTS["b"]}, "budget": 128},
    "chunked": {"texts": TEXTS, "budget": 7},
    "chunked, asynchronous": {"texts": TEXTS, "budget": 7, "asynchronous": True},
    "asynchronous": {"texts": TEXTS, "budget": 128, "asynchronous": True},
    "least chunks": {"texts": TEXTS, "budget": 2},
    "seeded": {"texts": TEXTS, "budget": 128, "sampling": SEEDED},
    "seeded, chunked": {"texts": TEXTS, "budget": 7, "sampling": SEEDED},
    # Two ranks add up in another order. In float32 that decides no argmax here, in bfloat16 it does.
    "one process": {"texts": TEXTS, "budget": 7, "dtype": "float32"},
    "two processes": {
        **{"texts": TEXTS, "budget": 7, "dtype": "float32"},
        **{"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    },
    "enough blocks": {**BLOCKS},
    # One is the null block; the third that is left is for whichever request needs a second one first.
    "few blocks": {**BLOCKS, "num_gpu_blocks_override": 4},
}


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[str, Any]]:
    model = tiny_qwen3_tts.cached()
    return dict(zip(CASES, talker_runs(model, list(CASES.values())), strict=True))


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


def test_off_leaves_the_runner_of_an_engine_as_released() -> None:
    case = {"texts": {"a": TEXTS["a"]}, "budget": 128}
    (run,) = talker_runs(tiny_qwen3_tts.cached(), [case], OMNI_NPU_PHASE="off")
    (runner,) = run["runners"]
    assert "OmniGPUModelRunner" in _names(runner)
    assert not [name for name in _names(runner) if "Phase" in name]
    assert (runner["mixin"], runner["mode"]) == (None, "off")
    assert {row["called_by"] for row in run["ranks"][0]} == {"vllm_omni"}


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
