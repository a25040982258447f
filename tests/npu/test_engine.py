# SPDX-License-Identifier: Apache-2.0
"""vLLM-Ascend's own engine with vLLM-Omni's talker: chunked or not, released or with the mixin, the same codes.

The runner is made by its own ``__init__`` and loads its model; its steps, sampling and asynchronous output are the
released code. Engines run in one process of their own, on the emulated device, one after the other; every read of a
host tensor there is checked for a copy that is still on its way. Controls are engines that are wrong on purpose.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from omni_npu_phase import contract
from omni_npu_phase.settings import MODE_VARIABLE, OBSERVE_VARIABLE
from omni_npu_phase.speech import observe
from omni_npu_phase.speech.observe import Row

TEXTS = {"a": "Hello there, this is a long prompt that is cut into pieces.", "b": "Good morning.", "c": "Hello world"}
FRAMES = 6
CAPTURED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 4]}
POISON = -0x04040405
"""An int32 of the bytes that stand in host memory until a copy into it has been waited for."""


@dataclass(frozen=True)
class Case:
    """How an engine is made, and what is wrong with it."""

    budget: int
    mode: str = "strict"
    asynchronous: bool = False
    joins: Mapping[str, int] = field(default_factory=dict)
    """How many tokens the first request has when another joins; those left out are there from the start."""
    chunk: int = 0
    """Tokens of one request a step at most; 0 for no such limit."""
    with_embeds: bool = False
    """Whether requests bring prompt embeddings, which the mixin uploads row by row; the talker adds its own."""
    captured: bool = False
    """Whether MTP is a captured graph, in vLLM-Ascend's own wrapper; the talker's forward pass runs eagerly."""
    requests: str = "abc"
    mutant: str | None = None


LATE = {"b": 3, "c": 3}
# The batch has a free first row when the first request has ended, and takes it for the next that comes.
ENDED = {"c": FRAMES + 1}
CASES = {
    "whole": Case(512),
    "chunked": Case(23),
    "late": Case(16, joins=LATE),
    "async": Case(23, asynchronous=True, joins=LATE),
    "released": Case(16, mode="off", asynchronous=True, joins=LATE),
    "captured": Case(23, captured=True, joins=ENDED),
    "released captured": Case(23, mode="off", captured=True, joins=ENDED),
    "embeds": Case(32, chunk=7, with_embeds=True),
    "embeds whole": Case(512, with_embeds=True),
}
CONTROLS = {
    "span": Case(7, requests="c", mutant="span"),
    "other memory": Case(23, captured=True, mutant="other memory"),
    "unordered": replace(CASES["captured"], mutant="unordered"),
    "no wait": Case(16, asynchronous=True, mutant="no wait"),
    "one slot": replace(CASES["embeds"], mutant="one slot"),
}


@dataclass
class Spoken:
    """What an engine did: its tokens by request, the rows its talker saw, and what the host did too early."""

    mixed: bool
    lengths: dict[str, int]
    tokens: dict[str, list[int]]
    rows: list[Row] = field(default_factory=list)
    hazards: list[str] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)
    """Rows of each replayed graph of MTP, padding with them."""
    batches: int = 0
    """How often MTP was run."""
    staged: int = 0
    """Uploads through the mixin's staging slots."""

    def __post_init__(self) -> None:
        requests = observe.by_request(self.rows, list(self.lengths.values()))
        self.frames = {name: request.codes for name, request in zip(self.lengths, requests, strict=True)}


@pytest.fixture(scope="module")
def spoken(emulated_stack: Path) -> dict[str, Spoken]:
    command = [sys.executable, "-m", __name__, str(emulated_stack)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-4000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {
        answer.pop("case"): Spoken(**{**answer, "rows": [Row(**row) for row in answer["rows"]]}) for answer in answers
    }


@pytest.fixture(scope="module")
def emulated_stack(request: pytest.FixtureRequest) -> Path:
    if request.config.getoption("--device") != "emulated":
        pytest.skip(
            "engines of tests are for the emulated device; `omni-npu-phase validate --device npu` is for an NPU"
        )
    for package in ("vllm_omni", "vllm_ascend"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    from omni_npu_phase.emulated_ascend import engine
    from omni_npu_phase.speech import tiny_qwen3_tts

    return tiny_qwen3_tts.cached(platform=engine.PLATFORM)


def _spoken(spoken: dict[str, Spoken], name: str) -> Spoken:
    if name not in spoken:
        pytest.skip("this vLLM-Ascend captures nothing that torch has not compiled, which is not modelled")
    return spoken[name]


@pytest.mark.parametrize("name", CASES)
def test_every_engine_makes_the_same_codes(name: str, spoken: dict[str, Spoken]) -> None:
    said, whole = _spoken(spoken, name), spoken["embeds whole" if CASES[name].with_embeds else "whole"]
    assert said.hazards == []
    assert said.tokens == whole.tokens
    # The observer sees no replayed graph; tokens depend on every code of the frames before.
    if not CASES[name].captured:
        assert said.frames == whole.frames
        assert all(len(frames) == FRAMES for frames in said.frames.values())
    assert said.mixed is (CASES[name].mode == "strict")


def test_prompts_are_cut_as_intended(spoken: dict[str, Spoken]) -> None:
    assert all(row.span == row.prompt_len for row in spoken["whole"].rows if row.lengths.prefill)
    for name in ("chunked", "late", "async", "released", "embeds"):
        assert sum(row.lengths.prefill for row in spoken[name].rows) > len(TEXTS), name
    assert any(row.lengths.tail for row in spoken["chunked"].rows)
    first, *others = (row for row in spoken["late"].rows if row.step == _joined(spoken["late"]))
    assert (first.request, first.lengths.prefill) == ("a", False)
    assert others


def _joined(said: Spoken) -> int:
    return min(row.step for row in said.rows if row.request != "a")


@pytest.mark.parametrize("name", ["captured", "released captured"])
def test_captured_mtp_is_replayed_with_padding(name: str, spoken: dict[str, Spoken]) -> None:
    """T10, R6: two rows in a graph for four, which reads and writes where it did at capture."""
    replayed = _spoken(spoken, name).replayed
    assert 4 in replayed
    assert sum(replayed) > FRAMES


@pytest.mark.parametrize("name", ["captured", "released captured"])
def test_prefill_beside_it_does_not_keep_mtp_from_its_graph(name: str, spoken: dict[str, Spoken]) -> None:
    """Before it takes a graph for MTP, vLLM-Ascend looks at the progress of as many rows of the batch, from the first
    on. These are MTP's own: vLLM puts decode rows first."""
    said = _spoken(spoken, name)
    mixed = [rows for rows in _steps(said) if {row.lengths.prefill for row in rows} == {True, False}]
    assert any(row.request == "c" for rows in mixed for row in rows)
    assert not any(rows[0].lengths.prefill for rows in mixed)
    assert len(said.replayed) == said.batches


def test_mtp_behind_a_prefill_row_runs_without_its_graph_and_makes_the_same_codes(spoken: dict[str, Spoken]) -> None:
    said = _spoken(spoken, "unordered")
    behind = [rows for rows in _steps(said) if rows[0].lengths.prefill and not rows[-1].lengths.prefill]
    assert behind
    assert len(said.replayed) == said.batches - len(behind)
    assert said.tokens == spoken["whole"].tokens


def _steps(said: Spoken) -> list[list[Row]]:
    return [list(rows) for _, rows in groupby(said.rows, key=lambda row: row.step)]


def test_inputs_in_other_memory_are_not_seen_by_the_graph(spoken: dict[str, Spoken]) -> None:
    assert _spoken(spoken, "other memory").tokens != spoken["whole"].tokens


def test_rows_are_uploaded_through_the_staging_slots(spoken: dict[str, Spoken]) -> None:
    assert spoken["embeds whole"].tokens != spoken["whole"].tokens
    assert spoken["embeds"].staged >= sum(row.lengths.prefill for row in spoken["embeds"].rows)
    assert spoken["chunked"].staged == 0


def test_a_guard_by_span_is_seen(spoken: dict[str, Spoken]) -> None:
    said = spoken["span"]
    tails = [row for row in said.rows if row.lengths.tail]
    assert tails
    assert all(row.seen_by_mtp for row in tails), "T2"
    assert said.frames["c"] != spoken["whole"].frames["c"]


def test_a_removed_wait_for_the_tokens_is_seen(spoken: dict[str, Spoken]) -> None:
    said = spoken["no wait"]
    assert any("was read by the host before the copy was waited for" in hazard for hazard in said.hazards)
    assert any(POISON in tokens for tokens in said.tokens.values())


def test_a_slot_without_its_wait_is_seen(spoken: dict[str, Spoken]) -> None:
    """The device fetches late, and then finds in the slot the prompt embeddings of the step's last request."""
    said = spoken["one slot"]
    assert any("pinned source" in hazard for hazard in said.hazards)
    assert said.tokens != spoken["embeds"].tokens


# What follows runs in the process of the engines.


def main(model: Path) -> None:
    from omni_npu_phase.speech.talker_engine import prepare

    prepare("emulated")
    # Since 0.30 a model need not be compiled to be captured.
    captures = int(metadata.version("vllm-ascend").split(".")[1]) >= 30
    for name, case in {**CASES, **CONTROLS}.items():
        if case.captured and not captures:
            continue
        sys.stdout.write(json.dumps({"case": name, **_speak(model, case)}) + "\n")
        sys.stdout.flush()


def _speak(model: Path, case: Case) -> dict[str, Any]:
    os.environ[MODE_VARIABLE] = case.mode
    with tempfile.TemporaryDirectory() as folder, ExitStack() as changes:
        os.environ[OBSERVE_VARIABLE] = folder
        from omni_npu_phase.speech.talker_engine import talker_engine

        limit = {"long_prefill_token_threshold": case.chunk} if case.chunk else {}
        graphs = {"enforce_eager": False, "compilation_config": CAPTURED} if case.captured else {}
        settings = {"budget": case.budget, "asynchronous": case.asynchronous, **limit, **graphs}
        import vllm_omni.patch  # noqa: F401 - the platform, and with it the device

        from omni_npu_phase import PhaseRoutingMixin, emulated_ascend, plugin

        # vLLM asks its plug-ins once a process.
        plugin.install()
        device = emulated_ascend.active_device()
        staged: list[int] = []
        replayed: list[int] = []
        for target, attribute, value in _changes(case, device, staged):
            changes.enter_context(mock.patch.object(target, attribute, value))
        with talker_engine(model, **settings) as engine, device.counting() as counting:
            runner = engine.core.model_executor.driver_worker.worker.model_runner
            mtp = mock.patch.object(runner, "_talker_mtp_forward", wraps=runner._talker_mtp_forward)
            called = changes.enter_context(mtp)
            if case.captured:
                changes.enter_context(_replays_noted(runner, replayed))
            if case.mutant == "unordered":
                runner.reorder_batch_threshold = None
            if case.mutant == "other memory":
                inputs = runner.talker_mtp_inputs_embeds
                inputs.gpu = inputs.gpu.clone()
            for name in case.requests:
                while len(engine.tokens.get("a", ())) < case.joins.get(name, 0):
                    engine.step()
                engine.submit(name, TEXTS[name], max_tokens=FRAMES + 1, with_embeds=case.with_embeds)
            tokens = engine.run()
        (rows,) = observe.read(Path(folder))
        return {
            "mixed": isinstance(runner, PhaseRoutingMixin),
            "lengths": engine.prompt_lens,
            "tokens": tokens,
            "rows": [asdict(row) for row in rows],
            "hazards": counting.hazards,
            "staged": len(staged),
            "replayed": replayed,
            "batches": sum(bool(call.args[0]) for call in called.call_args_list),
        }


def _changes(case: Case, device: Any, staged: list[int]) -> list[tuple[Any, str, Any]]:
    """What is replaced for a case, as (object, name, value)."""
    import torch

    from omni_npu_phase.buffers.staging import PinnedStaging

    changes: list[tuple[Any, str, Any]] = [
        (torch.Tensor, "tolist", _checked(torch.Tensor.tolist, device)),
        (PinnedStaging, "upload", _counted(PinnedStaging.upload, staged)),
    ]
    if case.captured:
        from omni_npu_phase.speech.observed_talker import ObservedTalker

        # The observer reads codes on the host, which no capture can hold.
        changes.append((ObservedTalker, "talker_mtp", ObservedTalker.__mro__[1].talker_mtp))
    if case.with_embeds:
        from vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_talker import (
            Qwen3TTSTalkerForConditionalGeneration as Talker,
        )
        from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner

        changes.append((OmniGPUModelRunner, "_update_states", _with_embeds(OmniGPUModelRunner._update_states)))
        changes.append((Talker, "preprocess", _added(Talker.preprocess)))
    if case.mutant == "span":
        from omni_npu_phase.step import v1

        changes.append((v1, "plan_step", _by_span(v1.plan_step)))
    if case.mutant == "no wait":
        from vllm.v1.worker import gpu_model_runner

        output = gpu_model_runner.AsyncGPUModelRunnerOutput
        changes.append((output, "get_output", _unwaited(output.get_output)))
    if case.mutant == "one slot":
        changes.append((PinnedStaging, "_free_slot", _reused_early))
    return changes


@contextmanager
def _replays_noted(runner: Any, replayed: list[int]) -> Iterator[None]:
    from omni_npu_phase.emulated_ascend.graphs import NPUGraph

    runner.model = runner.model.unwrap()
    rows = {
        id(entry.aclgraph): descriptor.num_tokens
        for descriptor, entry in runner.talker_mtp.concrete_aclgraph_entries.items()
    }
    released = NPUGraph.replay

    def replay(graph: NPUGraph) -> None:
        # The code predictor has graphs of its own.
        if id(graph) in rows:
            replayed.append(rows[id(graph)])
        released(graph)

    with mock.patch.object(NPUGraph, "replay", replay):
        yield


def _checked(released: Callable[..., Any], device: Any) -> Callable[..., Any]:
    def tolist(tensor: Any) -> Any:
        if tensor.device.type == "cpu":
            device.check_host_read(tensor)
        return released(tensor)

    return tolist


def _counted(released: Callable[..., Any], staged: list[int]) -> Callable[..., Any]:
    def upload(self: Any, dest: Any, source: Any) -> None:
        staged.append(dest.numel())
        released(self, dest, source)

    return upload


def _with_embeds(released: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM-Omni has a method that keeps a request's prompt embeddings for its overlay; 0.30 calls it nowhere."""

    def update_states(self: Any, scheduler_output: Any) -> Any:
        result = released(self, scheduler_output)
        self._decode_and_store_request_payloads(scheduler_output)
        return result

    return update_states


def _added(released: Callable[..., Any]) -> Callable[..., Any]:
    """The released talker has a prompt of its own making, and writes over whatever was brought."""

    def preprocess(self: Any, input_ids: Any, input_embeds: Any, **info: Any) -> Any:
        ids, embeds, updates = released(self, input_ids, input_embeds, **info)
        return ids, embeds + input_embeds if info[contract.IS_PREFILL] else embeds, updates

    return preprocess


def _by_span(released: Callable[..., Any]) -> Callable[..., Any]:
    def plan(*args: Any, **keywords: Any) -> Any:
        made = released(*args, **keywords)
        alone = [span == 1 for span in made.spans]
        return replace(made, prefill=[not one for one in alone], eligible=alone)

    return plan


def _unwaited(released: Callable[..., Any]) -> Callable[..., Any]:
    def get_output(self: Any) -> Any:
        self.async_copy_ready_event = mock.Mock()
        return released(self)

    return get_output


def _reused_early(staging: Any, size: int) -> Any:
    import torch

    slot = staging._slots[0]
    if slot.memory.numel() < size:
        slot.memory = torch.empty(1 << 16, dtype=torch.uint8, pin_memory=True)
    return slot


if __name__ == "__main__":
    main(Path(sys.argv[1]))
