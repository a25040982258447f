# SPDX-License-Identifier: Apache-2.0
"""The driver: a real runner class, made without an engine, taken through a scenario by its own methods.

The class's own ``_preprocess``, ``_talker_mtp_forward`` and postprocessing run unchanged, on vLLM's own input batch,
request states and buffers. Stand-ins take the place of what needs an engine: the pipeline-parallel group, the graph
dispatcher, and, in scenarios with padding, the captured graph.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from omni_npu_phase.conformance import model as recording
from omni_npu_phase.conformance.model import HIDDEN, Log, RecordingModel
from omni_npu_phase.conformance.scenarios import Row, Scenario, Setting, Step, Variant
from omni_npu_phase.contract import FIELDS
from omni_npu_phase.releases import v2
from omni_npu_phase.step.mtp import mtp_inputs
from omni_npu_phase.step.port import device_side

UNTOUCHED = 100.0
"""What the input embeddings hold before every step, so that a write to a wrong row shows."""
_FEWEST_REQUESTS = 16
_ROWS_BEHIND = 4
"""Rows of the step's buffer behind its spans, as a padded step has them."""


@dataclass(slots=True)
class StepRecord:
    """What one step left behind, beside the model's log. Tensors are host copies in float32 or int64."""

    rows: Step
    offsets: list[int]
    log: Log = field(default_factory=Log)
    returned_ids: list[int] | None = None
    embeds: list[list[float]] | None = None
    same_buffers: bool = True
    """Whether the tensors returned are the runner's own buffers, at their old addresses (R6)."""
    ids_written: bool = False
    codes: dict[str, list[int] | None] = field(default_factory=dict)
    """Each request's stored codes after the step, and those after everything the device wrote later (T9)."""
    codes_later: dict[str, list[int] | None] = field(default_factory=dict)
    last_later: dict[str, list[float] | None] = field(default_factory=dict)
    live: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Each request's live buffer as the model forward found it."""


@dataclass(slots=True)
class Recording:
    """A scenario run: its steps as far as they came, the error that ended it, and the warnings on the way."""

    scenario: Scenario
    variant: Variant
    device: str
    token_indices: Mapping[str, int]
    steps: list[StepRecord] = field(default_factory=list)
    error: BaseException | None = None
    untouched_by_error: bool = True
    """After an error: whether nothing of the refused rows was written since their hook returned."""
    warnings: list[str] = field(default_factory=list)

    def token(self, row: Row, index: int = 0) -> int:
        return recording.token(self.token_indices[row.request], row.computed + index)


class DriverError(RuntimeError):
    """The driver could not set up a runner of a class: this says nothing about the contract."""


def run_scenario(cls: type, scenario: Scenario, variant: Variant, device: torch.device) -> Recording:
    """Run one scenario on a runner of ``cls``. What the runner raises in a step is recorded, not raised.

    Raises :class:`DriverError` where no runner of the class can be made.
    """
    indices = {request: index + 1 for index, request in enumerate(scenario.requests)}
    record = Recording(scenario, variant, device.type, indices)
    with _warnings_of_package(record.warnings), _single_stage():
        try:
            bench = _bench_for(cls)(cls, scenario, variant, device, indices)
        except Exception as error:
            raise DriverError(f"cannot set up {cls.__qualname__}: {type(error).__name__}: {error}") from error
        try:
            with torch.inference_mode():
                for rows in scenario.steps:
                    bench.take_step(rows, record)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the runner under test raises is its result
            record.error = error
    return record


def _bench_for(cls: type) -> type[_Bench]:
    if not v2.is_model_state(cls):
        return _Bench
    from omni_npu_phase.conformance.driver_v2 import StateBench

    return StateBench


class _Bench:
    """A V1 runner of one class with what its ``_preprocess`` needs, and the scheduler's side of a scenario."""

    model_class: type[RecordingModel] = RecordingModel
    hidden_size: int = HIDDEN
    dtype: torch.dtype = torch.float32

    def __init__(
        self, cls: type, scenario: Scenario, variant: Variant, device: torch.device, indices: Mapping[str, int]
    ) -> None:
        self.scenario, self.variant, self.device, self.indices = scenario, variant, device, indices
        spans = [sum(row.span for row in rows) for rows in scenario.steps]
        self.max_tokens = max(spans) + _ROWS_BEHIND
        self.max_len = max(row.prompt + row.computed + row.span for rows in scenario.steps for row in rows) + 8
        self.max_requests = max(_FEWEST_REQUESTS, *map(len, scenario.steps))
        self.model = self._make_model()
        self.runner = self._make_runner(cls)
        self.model.ids, self.model.buffer = self._inputs()
        self.model.returning = self._remember
        self.hidden = torch.zeros(self.max_tokens, self.hidden_size, dtype=self.dtype, device=device)

    def _make_model(self) -> Any:
        behaviour = self.scenario.behaviour
        # Released code recognises a model by its class name.
        return type(behaviour.class_name, (self.model_class,), {})(
            behaviour,
            batched=self.variant.hook == "batched",
            mtp=self.variant.mtp,
            max_rows=self.max_requests,
            device=self.device,
        )

    def _make_runner(self, cls: type) -> Any:
        return _make_runner(
            cls,
            self.model,
            self.scenario.setting,
            self.variant,
            self.device,
            self.max_requests,
            self.max_tokens,
            self.max_len,
            hidden_size=self.hidden_size,
            dtype=self.dtype,
        )

    def _inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The runner's own buffers of token ids and embeddings."""
        return device_side(self.runner.input_ids), device_side(self.runner.inputs_embeds)

    def _mtp_inputs(self) -> list[torch.Tensor]:
        return mtp_inputs(self.runner)

    def _live(self) -> Mapping[str, dict[str, Any]]:
        """Every request's live buffer."""
        live: dict[str, dict[str, Any]] = self.runner.model_intermediate_buffer
        return live

    # The scheduler's side.

    def take_step(self, rows: Step, record: Recording) -> None:
        setting = self.scenario.setting
        self._update_requests(rows)
        offsets = np.cumsum([0, *(row.span for row in rows)]).tolist()
        total = offsets[-1]
        buffer_rows = total - setting.buffer_short if setting.buffer_short else total + _ROWS_BEHIND
        self._fill_inputs(rows, offsets)
        step = StepRecord(rows, offsets[:-1])
        self.model.log = step.log
        record.steps.append(step)
        self._remember()
        ids, embeds = self._inputs()
        ids_version, addresses = ids._version, (ids.data_ptr(), embeds.data_ptr())
        try:
            outputs = self._preprocess(rows, buffer_rows)
        except Exception:
            record.untouched_by_error = self._untouched(step)
            raise
        step.ids_written = ids._version != ids_version
        step.same_buffers = self._same_buffers(outputs, addresses)
        step.returned_ids = None if outputs[0] is None else outputs[0].tolist()
        step.embeds = None if outputs[1] is None else outputs[1].float().tolist()
        step.live = {request: recording.copy_info(info) for request, info in self._live().items()}
        step.codes = {row.request: self._stored_codes(row.request) for row in rows}
        self._finish_step(rows, step)

    def _preprocess(self, rows: Step, buffer_rows: int) -> Sequence[Any]:
        """The step up to the model forward; gives the token ids and embeddings that the forward gets, and more."""
        scheduled = _scheduler_output(self._claimed(rows), reverse=self.scenario.setting.scheduled_reversed)
        outputs: Sequence[Any] = self.runner._preprocess(scheduled, buffer_rows)
        self.runner._gather_runtime_additional_information()
        return outputs

    def _postprocess(self, rows: Step) -> None:
        spans = np.array([row.span for row in rows], dtype=np.int32)
        scheduled = _scheduler_output(rows, reverse=self.scenario.setting.scheduled_reversed)
        self.runner._process_additional_information_updates(self.hidden, None, spans, scheduled)

    def _finish_step(self, rows: Step, step: StepRecord) -> None:
        """Postprocessing by the released code, then all device buffers written over, as a next step would."""
        for row, start in zip(rows, step.offsets, strict=True):
            self.hidden[start : start + row.span].fill_(self.indices[row.request])
        if self.scenario.behaviour.has_preprocess:
            self._postprocess(rows)
        self.model.scribble()
        self.hidden.fill_(200)
        for row in rows:
            step.codes_later[row.request] = self._stored_codes(row.request)
            last = self._live().get(row.request, {}).get("last", {}).get("hidden")
            step.last_later[row.request] = None if last is None else last.float().reshape(-1).tolist()

    def _update_requests(self, rows: Step) -> None:
        """Bring request states and input batch to these rows, with vLLM's own add, remove, condense and swap."""
        runner, batch = self.runner, self.runner.input_batch
        wanted = [row.request for row in rows]
        for request in [known for known in batch.req_ids if known not in wanted]:
            batch.remove_request(request)
        for row in rows:
            state = runner.requests.get(row.request)
            if state is None:
                state = runner.requests[row.request] = self._new_state(row)
                if row.request not in self.scenario.setting.no_buffer:
                    runner.model_intermediate_buffer[row.request] = self._new_info(row.request)
            elif state.prompt_token_ids is not None and len(state.prompt_token_ids) != row.prompt:
                state.prompt_token_ids = self._prompt(row)
                state.num_prompt_tokens = row.prompt
            known = row.computed + row.span - row.prompt
            while len(state.output_token_ids) < known:
                state.output_token_ids.append(self._token(row, row.prompt + len(state.output_token_ids)))
            if row.request not in batch.req_id_to_index:
                batch.add_request(state)
        batch.condense()
        for index, request in enumerate(wanted):
            if batch.req_ids[index] != request:
                batch.swap_states(index, batch.req_id_to_index[request])
        batch.refresh_metadata()
        for index, row in enumerate(rows):
            batch.num_computed_tokens_cpu[index] = row.computed
            batch.num_prompt_tokens[index] = row.prompt
        for request in self.scenario.setting.missing:
            runner.requests.pop(request, None)
        if self.scenario.setting.stale:
            for request in wanted:
                runner.model_intermediate_buffer.setdefault(request, {}).update(recording.hostile_fields())

    def _new_state(self, row: Row) -> Any:
        from vllm.v1.worker.gpu_input_batch import CachedRequestState

        request = self._new_request(row)
        state = CachedRequestState(
            req_id=row.request, **request, generator=None, block_ids=([0],), output_token_ids=[], mm_features=[]
        )
        if request["prompt_embeds"] is not None:
            state.prompt_embeds_cpu = request["prompt_embeds"]
        return state

    def _new_request(self, row: Row) -> dict[str, Any]:
        """A request as it was sent, under the names that vLLM's states have for its parts."""
        from vllm.sampling_params import SamplingParams

        setting, index = self.scenario.setting, self.indices[row.request]
        seed = setting.seeds.get(row.request)
        extra = None if seed is None else dict.fromkeys(("tts_local_seed", "qwen3_tts_request_seed"), seed)
        embeds = None
        if row.request in setting.prompt_embeds:
            embeds = torch.tensor([recording.prompt_embedding(index, place) for place in range(row.prompt)])
        return {
            "prompt_token_ids": self._prompt(row) if embeds is None else None,
            "prompt_embeds": embeds,
            "sampling_params": SamplingParams(max_tokens=9, seed=7, extra_args=extra),
            "num_computed_tokens": max(row.computed, 0),
        }

    def _new_info(self, request: str) -> dict[str, Any]:
        """What a request's live buffer holds from its first step on."""
        info: dict[str, Any] = {"voice": "v", recording.MARK: {recording.ARRIVED: request}}
        return {**info, **({recording.NESTED: {"once": request}} if self.scenario.setting.nested else {})}

    def _prompt(self, row: Row) -> list[int]:
        return [self._token(row, position) for position in range(row.prompt)]

    def _token(self, row: Row, position: int) -> int:
        return recording.token(self.indices[row.request], position)

    def _fill_inputs(self, rows: Step, offsets: Sequence[int]) -> None:
        runner = self.runner
        self._write_ids(runner.input_ids.cpu, rows, offsets)
        starts = runner.query_start_loc.cpu
        starts[: len(offsets)] = torch.tensor(self._claimed_offsets(rows, offsets), dtype=starts.dtype)
        for buffer in (runner.input_ids, runner.query_start_loc):
            device_side(buffer).copy_(buffer.cpu)
        device_side(runner.inputs_embeds).fill_(UNTOUCHED)

    def _write_ids(self, ids: torch.Tensor, rows: Step, offsets: Sequence[int]) -> None:
        ids.zero_()
        for row, start in zip(rows, offsets, strict=False):
            for index in range(row.span):
                ids[start + index] = self._token(row, row.computed + index)

    def _claimed(self, rows: Step) -> Step:
        """The rows with the spans that the scheduler claims."""
        return tuple(replace(row, span=self.scenario.setting.claimed_spans.get(row.request, row.span)) for row in rows)

    def _claimed_offsets(self, rows: Step, offsets: Sequence[int]) -> list[int]:
        claimed = self.scenario.setting.claimed_offsets
        own = [claimed.get(row.request, start) for row, start in zip(rows, offsets, strict=False)]
        return [*own, *offsets[len(rows) :]]

    # Observation.

    def _stored_codes(self, request: str) -> list[int] | None:
        codes = self._live().get(request, {}).get("codes", {}).get("audio")
        return None if codes is None else [int(value) for value in codes.reshape(-1).tolist()]

    def _remember(self) -> None:
        """Note what a runner may write to: where a step begins, and again whenever a hook returns.

        By then the runner has refreshed its keywords, and the hook has mutated what it wanted to.
        """
        self.remembered = self._contents()

    def _contents(self) -> _Contents:
        ids, embeds = self._inputs()
        mtp_ids, *mtp_parts = self._mtp_inputs() if self.variant.mtp else [torch.empty(0)]
        return _Contents(
            ids=ids.tolist(),
            embeds=embeds.float().tolist(),
            stored={request: _stored(info) for request, info in self._live().items()},
            in_mtp=[
                [recording.place(int(token_id)) for token_id in mtp_ids.tolist()],
                *([recording.place_of(vector) for vector in part.float().tolist()] for part in mtp_parts),
            ],
        )

    def _untouched(self, step: StepRecord) -> bool:
        """Whether nothing of the refused rows was written: those of the last hook call, or all where none was made.

        Rows of earlier calls are not looked at: what their hooks returned may be written at any time.
        """
        before, now = self.remembered, self._contents()
        last = max((call.call for call in step.log.hooks), default=None)
        refused = {call.place for call in step.log.hooks if call.call == last}
        for row, start in zip(step.rows, step.offsets, strict=True):
            own, span = recording.place(self._token(row, row.computed)), slice(start, start + row.span)
            if last is not None and own not in refused:
                continue
            if now.ids[span] != before.ids[span] or now.embeds[span] != before.embeds[span]:
                return False
            known, found = (contents.stored.get(row.request, {}) for contents in (before, now))
            # Before the first hook, a runner may already have put keywords of its own into the buffer.
            if found != known and (last is not None or any(found.get(key) != known[key] for key in known)):
                return False
            for was, lies in zip(before.in_mtp, now.in_mtp, strict=True):
                if any(new == own != old for old, new in zip(was, lies, strict=True)):
                    return False
        return True

    def _same_buffers(self, outputs: Sequence[Any], addresses: tuple[int, int]) -> bool:
        if tuple(buffer.data_ptr() for buffer in self._inputs()) != addresses:
            return False
        return all(
            tensor is None or tensor.data_ptr() == address
            for tensor, address in zip(outputs[:2], addresses, strict=True)
        )


@dataclass(frozen=True, slots=True)
class _Contents:
    """What a runner may write to, as it was at one time."""

    ids: list[int]
    embeds: list[list[float]]
    stored: dict[str, dict[str, Any]]
    """Each live buffer without the runner-owned fields, which may be refreshed at any time (M9)."""
    in_mtp: list[list[tuple[int, int]]]
    """Request and position that each row of each MTP input buffer names."""


def _stored(info: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _frozen(value) for key, value in info.items() if key not in FIELDS}


def _frozen(value: Any) -> Any:
    """A value that later writes into it do not change, and that compares as a whole."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: _frozen(inner) for key, inner in value.items()}
    return [_frozen(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _accepted(method: Callable[..., Any], **keywords: Any) -> dict[str, Any]:
    """Those keywords that this release's method takes."""
    parameters = inspect.signature(method).parameters
    return {name: value for name, value in keywords.items() if name in parameters}


def _scheduler_output(rows: Step, *, reverse: bool) -> Any:
    from vllm.v1.core.sched.output import SchedulerOutput

    output = SchedulerOutput.make_empty()
    scheduled = [(row.request, row.span) for row in rows]
    output.num_scheduled_tokens = dict(reversed(scheduled) if reverse else scheduled)
    output.total_num_scheduled_tokens = sum(row.span for row in rows)
    return output


def _make_runner(
    cls: type,
    model: Any,
    setting: Setting,
    variant: Variant,
    device: torch.device,
    max_requests: int,
    max_tokens: int,
    max_len: int,
    *,
    hidden_size: int = HIDDEN,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A V1 runner of ``cls`` around ``model``, made without its ``__init__``, with what its ``_preprocess`` needs."""
    from transformers import PretrainedConfig
    from vllm.config import CUDAGraphMode, VllmConfig

    runner: Any = object.__new__(cls)
    runner.device, runner.dtype, runner.pin_memory = device, dtype, device.type != "cpu"
    runner.max_num_reqs = max_requests
    runner.model = model
    runner.phase_mode = variant.mode
    runner.supports_mm_inputs, runner.enable_prompt_embeds = setting.multimodal, setting.ids_absent
    runner.uses_mrope, runner.uses_xdrope_dim = False, 0
    runner.is_pooling_model = runner.is_multimodal_raw_input_only_model = False
    runner.is_multimodal_pruning_enabled = False
    runner.requires_sequence_parallel, runner.pcp_size = False, 1
    runner.encoder_cache, runner.lookback_token_ids = {}, None
    runner.speculative_config, runner.uniform_decode_query_len = None, 1
    runner.requests, runner.model_intermediate_buffer = {}, {}
    if not hasattr(model, "requires_raw_input_tokens"):
        model.requires_raw_input_tokens = False
    model_config = SimpleNamespace(
        is_encoder_decoder=False,
        enforce_eager=True,
        async_chunk=False,
        hf_text_config=PretrainedConfig(hidden_size=hidden_size),  # type: ignore[call-arg]
        subtalker_sampling_params={"do_sample": False, "top_k": 1},
    )
    runner.model_config = model_config
    runner.vllm_config = VllmConfig()
    object.__setattr__(runner.vllm_config, "model_config", model_config)
    runner.parallel_config = runner.vllm_config.parallel_config
    runner.compilation_config = runner.vllm_config.compilation_config
    runner.compilation_config.max_cudagraph_capture_size = max_requests
    runner.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    runner.cudagraph_dispatcher = _Dispatcher(setting.padded)

    _configure_ascend(runner.vllm_config)

    make = runner._make_buffer
    runner.input_ids = make(max_tokens, dtype=torch.int32)
    runner.inputs_embeds = make(max_tokens, hidden_size, dtype=dtype, numpy=False)
    runner.query_start_loc = make(max_requests + 1, dtype=torch.int32)
    runner.is_token_ids = make(max_tokens, dtype=torch.bool)
    device_side(runner.is_token_ids).fill_(True)
    runner.is_mm_embed_buffers = [make(max_tokens, dtype=torch.bool) for _ in range(2)]
    runner.is_mm_embed = runner.is_mm_embed_buffers[0]
    runner.is_mm_embed_idx = 0
    runner.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
    runner.input_batch = _make_input_batch(device, max_requests, max_tokens, max_len)
    _init_talker_mtp(runner)
    if variant.mtp and setting.padded:
        runner.talker_mtp = captured(model.talker_mtp)
    return runner


def _init_talker_mtp(runner: Any) -> None:
    """Let the runner make its MTP buffers. Before 0.22 it does so where it loads its model, which is here already."""
    if hasattr(runner, "_init_talker_mtp"):
        runner._init_talker_mtp()
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    with mock.patch.object(GPUModelRunner, "load_model"):
        runner.load_model()


def _configure_ascend(vllm_config: Any) -> None:
    """Set up vLLM-Ascend's own configuration, as its worker does before it makes a runner."""
    if "vllm_ascend" in sys.modules and importlib.util.find_spec("vllm_ascend.ascend_config") is not None:
        from vllm_ascend.ascend_config import init_ascend_config

        init_ascend_config(vllm_config)


def _make_input_batch(device: torch.device, max_requests: int, max_tokens: int, max_len: int) -> Any:
    from vllm.v1.worker.gpu_input_batch import InputBatch

    return InputBatch(
        **_accepted(
            InputBatch.__init__,
            max_num_reqs=max_requests,
            max_model_len=max_len,
            max_num_batched_tokens=max_tokens,
            device=device,
            pin_memory=False,
            vocab_size=1 << 21,
            block_sizes=[16],
            kernel_block_sizes=[16],
            max_num_blocks_per_req=[max_len // 16 + 1],
        )
    )


class _Dispatcher:
    """Stand-in for vLLM's graph dispatcher: full graphs of one padded size, or none."""

    def __init__(self, padded: int) -> None:
        self._padded = padded

    def dispatch(self, num_tokens: int, **_: Any) -> tuple[Any, Any]:
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import BatchDescriptor

        if self._padded:
            return CUDAGraphMode.FULL, BatchDescriptor(self._padded)
        return CUDAGraphMode.NONE, BatchDescriptor(num_tokens)


def captured(function: Callable[..., Any]) -> Any:
    """Stand-in for a captured MTP graph: an instance of this platform's graph wrapper class that captures nothing.

    In full-graph mode it replays, so the keywords of a call are those of the capture, as on a device; in any other mode
    the function runs directly.
    """
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context

    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        replayed = get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.FULL
        return function(*args, **({} if replayed else keywords))

    return object.__new__(type("CapturedStandIn", (_graph_wrapper(),), {"__call__": call}))


def _graph_wrapper() -> type:
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm_omni.platforms import current_omni_platform

    # Before 0.22 platforms have none of their own, and the module of the runners names it.
    of_platform = current_omni_platform.get_graph_wrapper_cls
    npu = sys.modules.get("vllm_omni.platforms.npu.worker.npu_model_runner")
    wrapper: type = of_platform() if of_platform else npu.ACLGraphWrapper if npu else CUDAGraphWrapper
    return wrapper


@contextlib.contextmanager
def _single_stage() -> Iterator[None]:
    """A pipeline of one stage and one rank, for code that asks for its group outside an engine."""
    from vllm.distributed import parallel_state

    group = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1, rank_in_group=0, rank=0)
    names = ("_PP", "_TP", "_DP")
    before = {name: getattr(parallel_state, name) for name in names}
    for name in names:
        setattr(parallel_state, name, before[name] or group)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(parallel_state, name, value)


@contextlib.contextmanager
def _warnings_of_package(into: list[str]) -> Iterator[None]:
    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            into.append(record.getMessage())

    logger, handler = logging.getLogger("omni_npu_phase"), Collect(logging.WARNING)
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
