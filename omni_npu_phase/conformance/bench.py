# SPDX-License-Identifier: Apache-2.0
"""How a runner is made without an engine, and how it is given rows.

The runner is of a real class, on vLLM's own input batch, request states and buffers. Stand-ins take the place of what
needs an engine: the pipeline-parallel group, the graph dispatcher, and, in scenarios with padding, the captured graph.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from omni_npu_phase.conformance import recording_model as recording
from omni_npu_phase.conformance.recording_model import HIDDEN, UNTOUCHED, RecordingModel, StateModel
from omni_npu_phase.conformance.scenarios import Row, Scenario, Setting, Step, Variant
from omni_npu_phase.releases import v2
from omni_npu_phase.step.mtp import mtp_inputs
from omni_npu_phase.step.port import device_side

ROWS_BEHIND = 4
"""Rows of the step's buffer behind its spans, as a padded step has them."""
_PLAIN = Setting()
_OWNED = (dict, list, set)
"""What a runner changes in itself, and so must not share with another one."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a runner is made for: tokens of a step, tokens of a request, requests, columns of an embedding."""

    tokens: int
    length: int
    requests: int = 16
    hidden: int = HIDDEN
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, steps: Sequence[Step], hidden: int = HIDDEN, dtype: torch.dtype = torch.float32) -> Sizes:
        """Large enough for these steps."""
        return cls(
            tokens=max(sum(row.span for row in rows) for rows in steps) + ROWS_BEHIND,
            length=max(row.prompt_len + row.num_computed + row.span for rows in steps for row in rows) + 8,
            requests=max(16, *map(len, steps)),
            hidden=hidden,
            dtype=dtype,
        )


class Bench:
    """A V1 runner of one class around a model, and the scheduler's side of its steps.

    ``indices`` number the requests, so that token ids name them. Whoever drives a model with requests of its own
    overrides :meth:`token`, :meth:`new_request` and :meth:`new_info`.
    """

    model_class: type[RecordingModel] = RecordingModel
    unanswered = 0.0
    """What an embedding row holds that its hook gave nothing for (E5)."""

    def __init__(
        self,
        cls: type,
        model: Any,
        variant: Variant,
        device: torch.device,
        sizes: Sizes,
        setting: Setting = _PLAIN,
        indices: Mapping[str, int] | None = None,
    ) -> None:
        self.model, self.variant, self.device, self.sizes = model, variant, device, sizes
        self.setting, self.indices = setting, indices or {}
        self.sampled: dict[str, int] = {}
        """How many tokens each request has, behind its furthest step."""
        self.runner = self.make_runner(cls)
        self.hidden = torch.zeros(sizes.tokens, sizes.hidden, dtype=sizes.dtype, device=device)
        """Hidden states, as the model forward would leave them."""

    # How the runner is made.

    def make_runner(self, cls: type) -> Any:
        """A runner of ``cls``: what its own ``__init__`` gives it where that runs here, and what a step needs."""
        from transformers import PretrainedConfig
        from vllm.config import CUDAGraphMode, VllmConfig
        from vllm.platforms import current_platform

        sizes, setting, model = self.sizes, self.setting, self.model
        runner: Any = object.__new__(cls)
        own = _made_by_its_init(cls, self.device)
        vars(runner).update({name: copy.copy(value) if type(value) in _OWNED else value for name, value in own.items()})
        runner.device, runner.dtype, runner.pin_memory = self.device, sizes.dtype, self.device.type != "cpu"
        runner.max_num_reqs = sizes.requests
        runner.model = model
        runner.phase_mode = self.variant.mode
        runner.phase_replay = "exact" if setting.replay else "off"
        runner.supports_mm_inputs, runner.enable_prompt_embeds = setting.multimodal, setting.ids_absent
        runner.uses_mrope, runner.uses_xdrope_dim = False, 0
        runner.is_pooling_model = runner.is_multimodal_raw_input_only_model = False
        runner.is_multimodal_pruning_enabled = False
        runner.requires_sequence_parallel, runner.pcp_size, runner.dcp_size = False, 1, 1
        runner.encoder_cache, runner.lookback_token_ids = {}, None
        runner.speculative_config, runner.uniform_decode_query_len = None, 1
        runner.requests, runner.model_intermediate_buffer = {}, {}
        if not hasattr(model, "requires_raw_input_tokens"):
            model.requires_raw_input_tokens = False
        model_config = copy.copy(own.get("model_config") or SimpleNamespace(is_encoder_decoder=False, is_hybrid=False))
        for name, value in {
            "enforce_eager": True,
            "async_chunk": False,
            "hf_text_config": PretrainedConfig(hidden_size=sizes.hidden),
            "subtalker_sampling_params": {"do_sample": False, "top_k": 1},
        }.items():
            object.__setattr__(model_config, name, value)
        runner.model_config = model_config
        # Without a model there is nothing for a platform to check, and vLLM-Ascend 0.20 stumbles over that.
        with mock.patch.object(type(current_platform), "check_and_update_config"):
            runner.vllm_config = VllmConfig()
        object.__setattr__(runner.vllm_config, "model_config", model_config)
        runner.parallel_config = runner.vllm_config.parallel_config
        runner.compilation_config = runner.vllm_config.compilation_config
        runner.compilation_config.max_cudagraph_capture_size = sizes.requests
        runner.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        runner.cudagraph_dispatcher = _Dispatcher(setting.padded)

        _configure_ascend(runner.vllm_config)

        make = runner._make_buffer
        runner.input_ids = make(sizes.tokens, dtype=torch.int32)
        runner.inputs_embeds = make(sizes.tokens, sizes.hidden, dtype=sizes.dtype, numpy=False)
        runner.query_start_loc = make(sizes.requests + 1, dtype=torch.int32)
        runner.is_token_ids = make(sizes.tokens, dtype=torch.bool)
        device_side(runner.is_token_ids).fill_(True)
        runner.is_mm_embed_buffers = [make(sizes.tokens, dtype=torch.bool) for _ in range(2)]
        runner.is_mm_embed = runner.is_mm_embed_buffers[0]
        runner.is_mm_embed_idx = 0
        runner.positions = torch.zeros(sizes.tokens, dtype=torch.int64, device=self.device)
        runner.input_batch = _input_batch(self.device, sizes)
        _init_talker_mtp(runner)
        if self.variant.mtp and setting.padded:
            runner.talker_mtp = captured(model.talker_mtp)
        return runner

    def missing(self, error: BaseException) -> str:
        """What this bench does not give a runner, if that is what an error came from; else nothing.

        Without an engine a runner is not as complete as there, which is no fault of the runner.
        """
        for cause in _causes(error):
            if isinstance(cause, AttributeError) and any(cause.obj is own for own in self._made()):
                what = "the runner" if cause.obj is self.runner else f"its {type(cause.obj).__name__}"
                return f"{what} has no {cause.name}, which its own __init__ or an engine sets"
        return ""

    def _made(self) -> Iterator[Any]:
        """What this bench made in place of an engine."""
        config = getattr(self.runner, "vllm_config", None)
        yield from (self.runner, config, getattr(config, "model_config", None))

    # What a step is made of.

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The runner's own buffers of token ids and embeddings."""
        return device_side(self.runner.input_ids), device_side(self.runner.inputs_embeds)

    def mtp_inputs(self) -> list[torch.Tensor]:
        """The runner's own buffers of MTP inputs, token ids first."""
        return mtp_inputs(self.runner)

    def live(self) -> Mapping[str, dict[str, Any]]:
        """Every request's live buffer."""
        live: dict[str, dict[str, Any]] = self.runner.model_intermediate_buffer
        return live

    def schedule(self, rows: Step) -> list[int]:
        """Bring requests, input batch and input buffers to these rows; gives their offsets, and the end of the last."""
        self.update_requests(rows)
        offsets: list[int] = np.cumsum([0, *(row.span for row in rows)]).tolist()
        self.fill_inputs(rows, offsets)
        return offsets

    def preprocess(self, rows: Step, buffer_rows: int) -> Sequence[Any]:
        """The step up to the model forward; gives the token ids and embeddings that the forward gets, and more."""
        scheduled = scheduler_output(self.claimed(rows), reverse=self.setting.scheduled_reversed)
        outputs: Sequence[Any] = self.runner._preprocess(scheduled, buffer_rows)
        self.forward: list[Any] = self.runner._gather_runtime_additional_information()
        return outputs

    def postprocess(self, rows: Step) -> None:
        """What the runner does with :attr:`hidden` behind the model forward."""
        spans = np.array([row.span for row in rows], dtype=np.int32)
        scheduled = scheduler_output(rows, reverse=self.setting.scheduled_reversed)
        self.runner._process_additional_information_updates(self.hidden, None, spans, scheduled)

    def update_requests(self, rows: Step) -> None:
        """Bring request states and input batch to these rows, with vLLM's own add, remove, condense and swap."""
        runner, batch = self.runner, self.runner.input_batch
        wanted = [row.request for row in rows]
        ended = {row.request for row in rows if row.anew == "request"}
        for request in [known for known in batch.req_ids if known not in wanted or known in ended]:
            batch.remove_request(request)
        for request in ended:
            del runner.requests[request], runner.model_intermediate_buffer[request], self.sampled[request]
        for row in rows:
            state = runner.requests.get(row.request)
            if state is None:
                state = runner.requests[row.request] = self.new_state(row)
                if row.request not in self.setting.no_buffer:
                    runner.model_intermediate_buffer[row.request] = self.new_info(row.request)
                if row.request in self.setting.no_dictionary:
                    runner.model_intermediate_buffer[row.request] = ["no dictionary"]
            elif row.anew == "prompt" or (
                state.prompt_token_ids is not None and len(state.prompt_token_ids) != row.prompt_len
            ):
                state.prompt_token_ids = self.prompt(row)
                state.num_prompt_tokens = row.prompt_len
                state.output_token_ids.clear()
                self.sampled.pop(row.request, None)
            # A request that is read again after a preemption has what its furthest step sampled, too.
            end, furthest = row.num_computed + row.span, self.sampled.get(row.request, 0)
            known = max(end, furthest) - row.prompt_len
            self.sampled[row.request] = max(end + 1, furthest)
            while len(state.output_token_ids) < known:
                state.output_token_ids.append(self.token(row, row.prompt_len + len(state.output_token_ids)))
            if row.request not in batch.req_id_to_index:
                batch.add_request(state)
        batch.condense()
        for index, request in enumerate(wanted):
            if batch.req_ids[index] != request:
                batch.swap_states(index, batch.req_id_to_index[request])
        batch.refresh_metadata()
        for index, row in enumerate(rows):
            batch.num_computed_tokens_cpu[index] = row.num_computed
            batch.num_prompt_tokens[index] = row.prompt_len
            batch.num_tokens_no_spec[index] = runner.requests[row.request].num_tokens
        for request in self.setting.missing:
            runner.requests.pop(request, None)
        if self.setting.stale:
            for request in wanted:
                runner.model_intermediate_buffer.setdefault(request, {}).update(recording.hostile_fields())

    def fill_inputs(self, rows: Step, offsets: Sequence[int]) -> None:
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
                ids[start + index] = self.token(row, row.num_computed + index)

    def claimed(self, rows: Step) -> Step:
        """The rows with the spans that the scheduler claims."""
        return tuple(replace(row, span=self.setting.claimed_spans.get(row.request, row.span)) for row in rows)

    def _claimed_offsets(self, rows: Step, offsets: Sequence[int]) -> list[int]:
        claimed = self.setting.claimed_offsets
        own = [claimed.get(row.request, start) for row, start in zip(rows, offsets, strict=False)]
        return [*own, *offsets[len(rows) :]]

    # What a request is made of.

    def new_state(self, row: Row) -> Any:
        """vLLM's state of a request that arrives with this row."""
        from vllm.v1.worker.gpu_input_batch import CachedRequestState

        request = self.new_request(row)
        state = CachedRequestState(
            req_id=row.request, **request, generator=None, block_ids=([0],), output_token_ids=[], mm_features=[]
        )
        if request["prompt_embeds"] is not None:
            state.prompt_embeds_cpu = request["prompt_embeds"]
        return state

    def new_request(self, row: Row) -> dict[str, Any]:
        """A request as it was sent, under the names that vLLM's states have for its parts."""
        from vllm.sampling_params import SamplingParams

        seed = self.setting.seeds.get(row.request)
        extra = None if seed is None else dict.fromkeys(("tts_local_seed", "qwen3_tts_request_seed"), seed)
        embeds = None
        if row.request in self.setting.prompt_embeds:
            index = self.indices[row.request]
            embeds = torch.tensor([recording.prompt_embedding(index, place) for place in range(row.prompt_len)])
        return {
            "prompt_token_ids": self.prompt(row) if embeds is None else None,
            "prompt_embeds": embeds,
            "sampling_params": SamplingParams(max_tokens=9, seed=7, extra_args=extra),
            "num_computed_tokens": max(row.num_computed, 0),
        }

    def new_info(self, request: str) -> dict[str, Any]:
        """What a request's live buffer holds from its first step on."""
        group = "no dictionary" if request in self.setting.no_group else {recording.ARRIVED: request}
        info: dict[str, Any] = {"voice": "v", recording.MARK: group}
        return {**info, **({recording.NESTED: {"once": request}} if self.setting.nested else {})}

    def prompt(self, row: Row) -> list[int]:
        return [self.token(row, position) for position in range(row.prompt_len)]

    def token(self, row: Row, position: int) -> int:
        """The token id at a position of the row's request."""
        return recording.token(self.indices[row.request], position)


def scenario_bench(cls: type, scenario: Scenario, variant: Variant, device: torch.device) -> Bench:
    """A runner, or a model state, of ``cls`` around the recording model, for the steps of a scenario."""
    bench = StateBench if v2.is_model_state(cls) else Bench
    sizes = Sizes.of(scenario.steps)
    # Released code recognises a model by its class name.
    model = type(scenario.behaviour.class_name, (bench.model_class,), {})(
        scenario.behaviour,
        batched=variant.hook == "batched",
        mtp=variant.mtp,
        max_rows=sizes.requests,
        device=device,
    )
    made = bench(cls, model, variant, device, sizes, scenario.setting, scenario.indices)
    model.ids, model.buffer = made.inputs()
    return made


class StateBench(Bench):
    """A model state of Model Runner V2 around a model, and the runner's side of its steps; ``runner`` is the state.

    Real are the state with its constructor, buffers and methods, its intermediate buffer, vLLM's request states, and
    vLLM's input batch in its input buffers. Stand-ins take the place of what needs an engine or hardware:

    - the runner: rows go into request states and batch as its ``add_requests``, ``update_requests`` and
      ``prepare_inputs`` have it, but in the scenario's order, and without their Triton kernels, whose results no model
      state reads;
    - pinned memory that a device sees, which only CUDA has: vLLM's own buffers for platforms without it;
    - the dispatcher of captured graphs, and, in scenarios with padding, the captured graph.
    """

    unanswered = UNTOUCHED
    """Model Runner V2 embeds every token of the step before its hooks; so does the model here."""

    model_class = StateModel

    def make_runner(self, cls: type) -> Any:
        from vllm.v1.worker.gpu.input_batch import InputBuffers
        from vllm.v1.worker.gpu.states import RequestState

        # Inference tensors count no writes.
        with torch.inference_mode(mode=False):
            self.buffers = InputBuffers(self.sizes.requests, self.sizes.tokens, self.device)
        with _without_pinned_memory(self.device):
            self.requests = RequestState(
                max_num_reqs=self.sizes.requests,
                max_model_len=self.sizes.length,
                max_num_batched_tokens=self.sizes.tokens,
                num_speculative_steps=0,
                vocab_size=1 << 21,
                device=self.device,
            )
        self.slots: dict[str, int] = {}
        state: Any = cls(self._vllm_config(), self.model, None, self.device)
        state.phase_mode, state.phase_replay = self.variant.mode, "off"
        if self.variant.mtp and self.setting.padded:
            state._mtp_runner = captured(self.model.mtp)
        return state

    def _vllm_config(self) -> Any:
        from vllm.config import CUDAGraphMode, VllmConfig

        config = VllmConfig()
        config.scheduler_config.max_num_seqs = self.sizes.requests
        config.scheduler_config.max_num_batched_tokens = self.sizes.tokens
        config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        model_config = SimpleNamespace(
            max_model_len=self.sizes.length,
            dtype=torch.float32,
            get_inputs_embeds_size=lambda: HIDDEN,
            enable_prompt_embeds=False,
            uses_mrope=False,
            enforce_eager=True,
        )
        object.__setattr__(config, "model_config", model_config)
        return config

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        embeds = self.runner._static_inputs_embeds
        # A model without hooks has no embeddings buffer.
        return self.buffers.input_ids, torch.empty(0, HIDDEN) if embeds is None else embeds

    def mtp_inputs(self) -> list[torch.Tensor]:
        state = self.runner
        return [state._mtp_input_ids, state._mtp_input_embeds, state._mtp_hidden, state._mtp_text_step]

    def live(self) -> Mapping[str, dict[str, Any]]:
        return {request: self.runner.intermediate_buffer.buffers[slot] for request, slot in self.slots.items()}

    def update_requests(self, rows: Step) -> None:
        """Bring the request states to these rows: as the runner adds requests, and as it updates known ones."""
        requests, setting = self.requests, self.setting
        for row in rows:
            if row.request not in self.slots:
                self.add(row)
            slot = self.slots[row.request]
            requests.prompt_len.np[slot] = row.prompt_len
            requests.num_computed_tokens_np[slot] = row.num_computed
            if setting.stale:
                self.runner.intermediate_buffer.buffers[slot].update(recording.hostile_fields())
        for request in setting.missing:
            self.runner.remove_request(self.slots[request])
            requests.remove_request(request)

    def add(self, row: Row) -> None:
        from vllm_omni.core.sched.output import OmniNewRequestData

        # What is to be read again after a preemption: prompt and outputs.
        known = max(row.prompt_len, row.num_computed + row.span)
        data = OmniNewRequestData(
            req_id=row.request,
            **self.new_request(row),
            mm_features=[],
            pooling_params=None,
            block_ids=([0],),
            lora_request=None,
            prefill_token_ids=[self.token(row, position) for position in range(known)],
            additional_information=self.new_info(row.request),
        )
        self.requests.add_request(
            req_id=data.req_id,
            prompt_len=data.prompt_len,
            all_token_ids=data.prefill_token_ids,
            num_computed_tokens=data.num_computed_tokens,
            max_tokens=data.sampling_params.max_tokens,
        )
        self.slots[row.request] = self.requests.req_id_to_index[row.request]
        self.runner.add_request(self.slots[row.request], data)
        if row.request in self.setting.no_dictionary:
            self.runner.intermediate_buffer.buffers[self.slots[row.request]] = ["no dictionary"]

    def fill_inputs(self, rows: Step, offsets: Sequence[int]) -> None:
        ids = torch.empty(self.sizes.tokens, dtype=torch.int32)
        self._write_ids(ids, rows, offsets)
        self.buffers.input_ids.copy_(ids)
        self.buffers.query_start_loc[: len(offsets)] = torch.tensor(offsets, dtype=torch.int32)
        self.inputs()[1].fill_(UNTOUCHED)

    def preprocess(self, rows: Step, buffer_rows: int) -> Sequence[Any]:
        self.batch = self.input_batch(rows, buffer_rows)
        ids = None if self.setting.ids_absent else self.batch.input_ids
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "positions": self.batch.positions,
            "inputs_embeds": None,
            **self.runner.prepare_inputs(self.batch, self.requests),
        }
        self.runner.run_preprocess(self.batch, inputs, self.requests, self.dispatch)
        # Without ids the forward gets embeddings alone; what hooks return still lands in the batch's own.
        return self.batch.input_ids, inputs["inputs_embeds"]

    def postprocess(self, rows: Step) -> None:
        self.runner.run_postprocess(self.hidden, self.batch)

    def dispatch(self, rows: int) -> Any:
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

        padded = self.setting.padded
        mode = CUDAGraphMode.FULL if padded else CUDAGraphMode.NONE
        return BatchExecutionDescriptor(cg_mode=mode, num_tokens=padded or rows, num_reqs=padded or rows)

    def input_batch(self, rows: Step, buffer_rows: int) -> Any:
        from vllm.v1.worker.gpu.input_batch import InputBatch

        count, buffers, requests = len(rows), self.buffers, self.requests
        slots = np.array([self.slots[row.request] for row in rows], dtype=np.intp)
        spans = np.array([row.span for row in rows], dtype=np.int32)
        starts = np.concatenate([[0], np.cumsum(spans)]).astype(np.int32)
        progress, prefill_len = requests.num_computed_tokens_np[slots], requests.prefill_len.np[slots]
        prefilled = np.minimum(progress, prefill_len)
        slots_on_device = torch.from_numpy(slots).to(self.device)
        logits = torch.arange(count + 1, dtype=torch.int32, device=self.device)
        return InputBatch(
            req_ids=[row.request for row in rows],
            num_reqs=count,
            num_reqs_after_padding=count,
            idx_mapping=slots_on_device,
            idx_mapping_np=slots,
            expanded_idx_mapping=slots_on_device,
            expanded_local_pos=torch.zeros(count, dtype=torch.int32, device=self.device),
            num_scheduled_tokens=np.array([row.span for row in self.claimed(rows)], dtype=np.int32),
            num_tokens=int(spans.sum()),
            num_tokens_after_padding=buffer_rows,
            num_draft_tokens=0,
            num_draft_tokens_per_req=None,
            query_start_loc=buffers.query_start_loc[: count + 1],
            query_start_loc_np=np.array(self._claimed_offsets(rows, starts.tolist()), dtype=np.int32),
            seq_lens=buffers.seq_lens[:count],
            seq_lens_cpu_upper_bound=torch.from_numpy(progress + spans),
            dcp_local_seq_lens=None,
            num_computed_tokens_np=progress,
            prefill_len_np=prefill_len,
            num_computed_prefill_tokens_np=prefilled,
            is_prefilling_np=prefilled < prefill_len,
            has_prefill=bool((prefilled < prefill_len).any()),
            input_ids=buffers.input_ids[:buffer_rows],
            positions=buffers.positions[:buffer_rows],
            is_padding=buffers.is_padding[:buffer_rows],
            logits_indices=buffers.query_start_loc[1 : count + 1] - 1,
            cu_num_logits=logits,
            cu_num_logits_np=logits.cpu().numpy(),
            has_structured_output_reqs=False,
            prompt_lens=None,
        )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


def scheduler_output(rows: Step, *, reverse: bool = False) -> Any:
    """The scheduler's output for a step of these rows; ``reverse``: its dictionary lists them the other way round."""
    from vllm.v1.core.sched.output import SchedulerOutput

    output = SchedulerOutput.make_empty()
    scheduled = [(row.request, row.span) for row in rows]
    output.num_scheduled_tokens = dict(reversed(scheduled) if reverse else scheduled)
    output.total_num_scheduled_tokens = sum(row.span for row in rows)
    return output


def _accepted(method: Callable[..., Any], **keywords: Any) -> dict[str, Any]:
    """Those keywords that this release's method takes."""
    parameters = inspect.signature(method).parameters
    return {name: value for name, value in keywords.items() if name in parameters}


@functools.cache
def _made_by_its_init(cls: type, device: torch.device) -> Mapping[str, Any]:
    """What a runner's own ``__init__`` gives it on a tiny configuration; nothing where that cannot run here.

    So a newer release finds what it reads, whether or not this package has heard of it.
    """
    from vllm.config import set_current_vllm_config

    try:
        config = _tiny_config()
        _configure_ascend(config)
        with single_stage(), set_current_vllm_config(config):
            made: Mapping[str, Any] = vars(cls(config, device))
            return made
    except Exception:  # noqa: BLE001 - needs an engine or a device, as releases differ; what is missing then is named
        return {}


@functools.cache
def _tiny_config() -> Any:
    """vLLM's configuration for a model of one layer, which is never loaded."""
    from transformers import LlamaConfig
    from vllm.config import ModelConfig, VllmConfig
    from vllm.model_executor.models import ModelRegistry

    # A class at hand, for vLLM looks at others in a process of their own.
    ModelRegistry.register_model(Architecture.__name__, Architecture)
    layer: Any = {"hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 1}
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(architectures=[Architecture.__name__], vocab_size=64, **layer).save_pretrained(folder)
        config = VllmConfig(
            model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True)
        )
    # Asynchronous scheduling needs streams.
    config.scheduler_config.async_scheduling = False
    return config


class Architecture(torch.nn.Module):
    """What vLLM looks for in a model's class: the methods of one that makes text."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: Any) -> Any: ...

    def forward(self, input_ids: Any, positions: Any) -> Any: ...

    def compute_logits(self, hidden_states: Any) -> Any: ...


def _init_talker_mtp(runner: Any) -> None:
    """Let the runner make its MTP buffers. Before 0.22 it does so where it loads its model, which is here already."""
    if hasattr(runner, "_init_talker_mtp"):
        runner._init_talker_mtp()
        return
    loads = (cls for cls in type(runner).__mro__ if cls.__module__.split(".")[0] in ("vllm", "vllm_ascend"))
    with mock.patch.object(next(cls for cls in loads if "load_model" in vars(cls)), "load_model"):
        runner.load_model()


def _configure_ascend(vllm_config: Any) -> None:
    """Set up vLLM-Ascend's own configuration, as its worker does before it makes a runner."""
    if "vllm_ascend" in sys.modules and importlib.util.find_spec("vllm_ascend.ascend_config") is not None:
        from vllm_ascend.ascend_config import init_ascend_config

        init_ascend_config(vllm_config)


def _input_batch(device: torch.device, sizes: Sizes) -> Any:
    from vllm.v1.worker.gpu_input_batch import InputBatch

    return InputBatch(
        **_accepted(
            InputBatch.__init__,
            max_num_reqs=sizes.requests,
            max_model_len=sizes.length,
            max_num_batched_tokens=sizes.tokens,
            device=device,
            pin_memory=False,
            vocab_size=1 << 21,
            block_sizes=[16],
            kernel_block_sizes=[16],
            max_num_blocks_per_req=[sizes.length // 16 + 1],
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
def single_stage() -> Iterator[None]:
    """A pipeline of one stage and one rank, for code that asks for its group outside an engine."""
    from vllm.distributed import parallel_state

    group = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1, rank_in_group=0, rank=0)
    group.all_reduce = lambda tensor: tensor
    names = [name for name in ("_PP", "_TP", "_DP", "_PCP", "_DCP") if hasattr(parallel_state, name)]
    before = {name: getattr(parallel_state, name) for name in names}
    for name in names:
        setattr(parallel_state, name, before[name] or group)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(parallel_state, name, value)


@contextlib.contextmanager
def _without_pinned_memory(device: torch.device) -> Iterator[None]:
    """vLLM's buffers for platforms without pinned memory, everywhere but on CUDA."""
    if device.type == "cuda":
        yield
        return
    with mock.patch("vllm.v1.worker.gpu.buffer_utils.is_uva_available", return_value=False):
        yield
