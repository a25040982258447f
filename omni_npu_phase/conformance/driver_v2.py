# SPDX-License-Identifier: Apache-2.0
"""The driver for Model Runner V2: a real model state, taken through a scenario by its own methods.

Real are the state with its constructor, buffers and methods, its intermediate buffer, vLLM's request states, and vLLM's
input batch in its input buffers. Stand-ins take the place of what needs an engine or hardware:

- the runner: rows go into request states and batch as its ``add_requests``, ``update_requests`` and ``prepare_inputs``
  have it, but in the scenario's order, and without their Triton kernels, whose results no model state reads;
- pinned memory that a device sees, which only CUDA has: vLLM's own buffers for platforms without it;
- the dispatcher of captured graphs, and, in scenarios with padding, the captured graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from omni_npu_phase.conformance import driver
from omni_npu_phase.conformance import model as recording
from omni_npu_phase.conformance.driver import UNTOUCHED
from omni_npu_phase.conformance.model import HIDDEN, VALIDITY, RecordingModel
from omni_npu_phase.conformance.scenarios import Row, Step


class StateModel(RecordingModel):
    """The recording model under the names that V2 has for what a model offers."""

    mtp_output_key = ("codes", "audio")
    mtp: Callable[..., Any]

    def __init__(self, *args: Any, mtp: bool, **keywords: Any) -> None:
        super().__init__(*args, mtp=mtp, **keywords)
        self.mtp_accepts_per_row_generators = self.talker_mtp_accepts_per_row_generators
        self.mtp_accepts_req_infos = self.talker_mtp_accepts_req_infos
        if self.behaviour.validity:
            self.mtp_validity_key = VALIDITY
        if mtp:
            self.mtp = self.talker_mtp
            # V2 must not go by the V1 name.
            del self.talker_mtp

    def embed_input_ids(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        """What V2 itself writes to a row before its hook, and what nothing else may have written to."""
        return torch.full((input_ids.shape[0], HIDDEN), UNTOUCHED).to(self.device)

    @staticmethod
    def get_mtp_seed(sampling_params: Any) -> int | None:
        return (sampling_params.extra_args or {}).get("tts_local_seed")


class StateBench(driver._Bench):
    """A model state of one class with what its ``run_preprocess`` needs, and the runner's side of a scenario.

    ``runner`` is the model state.
    """

    model_class = StateModel

    def _make_runner(self, cls: type) -> Any:
        from vllm.v1.worker.gpu.input_batch import InputBuffers
        from vllm.v1.worker.gpu.states import RequestState

        # Inference tensors count no writes.
        with torch.inference_mode(mode=False):
            self.buffers = InputBuffers(self.max_requests, self.max_tokens, self.device)
        with _without_pinned_memory(self.device):
            self.requests = RequestState(
                max_num_reqs=self.max_requests,
                max_model_len=self.max_len,
                max_num_batched_tokens=self.max_tokens,
                num_speculative_steps=0,
                vocab_size=1 << 21,
                device=self.device,
            )
        self.slots: dict[str, int] = {}
        state: Any = cls(self._vllm_config(), self.model, None, self.device)
        state.phase_mode = self.variant.mode
        if self.variant.mtp and self.scenario.setting.padded:
            state._mtp_runner = driver.captured(self.model.mtp)
        return state

    def _vllm_config(self) -> Any:
        from vllm.config import CUDAGraphMode, VllmConfig

        config = VllmConfig()
        config.scheduler_config.max_num_seqs = self.max_requests
        config.scheduler_config.max_num_batched_tokens = self.max_tokens
        config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        model_config = SimpleNamespace(
            max_model_len=self.max_len,
            dtype=torch.float32,
            get_inputs_embeds_size=lambda: HIDDEN,
            enable_prompt_embeds=False,
            uses_mrope=False,
            enforce_eager=True,
        )
        object.__setattr__(config, "model_config", model_config)
        return config

    def _inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        embeds = self.runner._static_inputs_embeds
        # A model without hooks has no embeddings buffer.
        return self.buffers.input_ids, torch.empty(0, HIDDEN) if embeds is None else embeds

    def _mtp_inputs(self) -> list[torch.Tensor]:
        state = self.runner
        return [state._mtp_input_ids, state._mtp_input_embeds, state._mtp_hidden, state._mtp_text_step]

    def _live(self) -> Mapping[str, dict[str, Any]]:
        return {request: self.runner.intermediate_buffer.buffers[slot] for request, slot in self.slots.items()}

    def _update_requests(self, rows: Step) -> None:
        """Bring the request states to these rows: as the runner adds requests, and as it updates known ones."""
        requests, setting = self.requests, self.scenario.setting
        for row in rows:
            if row.request not in self.slots:
                self._add(row)
            slot = self.slots[row.request]
            requests.prompt_len.np[slot] = row.prompt
            requests.num_computed_tokens_np[slot] = row.computed
            if setting.stale:
                self.runner.intermediate_buffer.buffers[slot].update(recording.hostile_fields())
        for request in setting.missing:
            self.runner.remove_request(self.slots[request])
            requests.remove_request(request)

    def _add(self, row: Row) -> None:
        from vllm_omni.core.sched.output import OmniNewRequestData

        # What is to be read again after a preemption: prompt and outputs.
        known = max(row.prompt, row.computed + row.span)
        data = OmniNewRequestData(
            req_id=row.request,
            **self._new_request(row),
            mm_features=[],
            pooling_params=None,
            block_ids=([0],),
            lora_request=None,
            prefill_token_ids=[self._token(row, position) for position in range(known)],
            additional_information=self._new_info(row.request),
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

    def _fill_inputs(self, rows: Step, offsets: Sequence[int]) -> None:
        ids = torch.empty(self.max_tokens, dtype=torch.int32)
        self._write_ids(ids, rows, offsets)
        self.buffers.input_ids.copy_(ids)
        self.buffers.query_start_loc[: len(offsets)] = torch.tensor(offsets, dtype=torch.int32)
        self._inputs()[1].fill_(UNTOUCHED)

    def _preprocess(self, rows: Step, buffer_rows: int) -> Sequence[Any]:
        self.batch = self._input_batch(rows, buffer_rows)
        ids = None if self.scenario.setting.ids_absent else self.batch.input_ids
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "positions": self.batch.positions,
            "inputs_embeds": None,
            **self.runner.prepare_inputs(self.batch, self.requests),
        }
        self.runner.run_preprocess(self.batch, inputs, self.requests, self._dispatch)
        # Without ids the forward gets embeddings alone; what hooks return still lands in the batch's own.
        return self.batch.input_ids, inputs["inputs_embeds"]

    def _postprocess(self, rows: Step) -> None:
        self.runner.run_postprocess(self.hidden, self.batch)

    def _dispatch(self, rows: int) -> Any:
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

        padded = self.scenario.setting.padded
        mode = CUDAGraphMode.FULL if padded else CUDAGraphMode.NONE
        return BatchExecutionDescriptor(cg_mode=mode, num_tokens=padded or rows, num_reqs=padded or rows)

    def _input_batch(self, rows: Step, buffer_rows: int) -> Any:
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
            num_scheduled_tokens=np.array([row.span for row in self._claimed(rows)], dtype=np.int32),
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


@contextlib.contextmanager
def _without_pinned_memory(device: torch.device) -> Iterator[None]:
    """vLLM's buffers for platforms without pinned memory, everywhere but on CUDA."""
    if device.type == "cuda":
        yield
        return
    with mock.patch("vllm.v1.worker.gpu.buffer_utils.is_uva_available", return_value=False):
        yield
