# SPDX-License-Identifier: Apache-2.0
"""``PhaseStateMixin``: the contract on a model state of vLLM-Omni's Model Runner V2."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch

from omni_npu_phase.buffers.base import Rows
from omni_npu_phase.contract import ContractError
from omni_npu_phase.releases import UnsupportedRuntimeError, v2
from omni_npu_phase.settings import replays_exactly
from omni_npu_phase.step.live import NEVER_STORED, no_dictionary, owned_copy
from omni_npu_phase.step.plan import Run, StepPlan, plan_step
from omni_npu_phase.step.port import Phase, PhaseMixin, Port, phase_of, released_classes
from omni_npu_phase.step.route import route


class PhaseStateMixin(PhaseMixin):
    """Gives a released V2 model state the phase contract; list it before the state class.

    ``class State(PhaseStateMixin, OmniModelState)`` is the whole use. Input selection, the refresh of the static
    embeddings buffer, staging, MTP and what is stored stay with the released code; rows, fields and hooks are ours.

    Model Runner V2 has other names: a model has MTP if it has ``mtp``; ``preprocess_decode_batch_mrv2`` comes before
    ``preprocess_decode_batch``, and takes all decode rows of a step at once; ``preprocess_batch_mrv2`` gets the
    live buffers of the step's prefill rows, before the other hooks. These get copies of live buffers, without keys that
    are no strings. Rows of requests named ``_warmup_...`` get no hook.

    ``phase_mode`` is as on :class:`~omni_npu_phase.step.v1.PhaseRoutingMixin`. Raises
    :class:`~omni_npu_phase.contract.ContractError` as the clauses say, and
    :class:`~omni_npu_phase.releases.UnsupportedRuntimeError` on first use with a state it does not know.
    """

    # What is taken from the released state.
    model: Any
    has_preprocess: bool
    _stage_batched_preprocess_inputs: Callable[[list[int], torch.device], None]

    def run_preprocess(
        self,
        input_batch: Any,
        model_inputs: dict[str, Any],
        req_states: Any = None,
        mtp_batch_descriptor_dispatcher: Callable[[int], Any] | None = None,
    ) -> None:
        """One step up to the model forward, in ``model_inputs``' own tensors; arguments are the released state's."""
        phase = phase_of(self)
        released = super().run_preprocess  # type: ignore[misc]
        if phase.mode == "off" or not self.has_preprocess:
            released(input_batch, model_inputs, req_states, mtp_batch_descriptor_dispatcher)
            return

        v2.check(released_classes(type(self)))
        if replays_exactly(self.phase_replay):
            raise UnsupportedRuntimeError("no exact replay: Model Runner V2 forgets a request that is preempted")
        # In a step without rows the released code only selects ids and embeddings.
        no_rows = copy.copy(input_batch)
        no_rows.num_reqs = 0
        released(no_rows, model_inputs, req_states, mtp_batch_descriptor_dispatcher)
        embeds = model_inputs["inputs_embeds"]
        ids = model_inputs.get("input_ids")
        if ids is None:
            ids = input_batch.input_ids

        rows = _rows_with_hooks(self, phase, input_batch, req_states)
        if not rows:
            return
        plan = phase.plan = plan_of(input_batch, req_states, rows, buffer_rows=len(embeds))
        port = StatePort(self, phase, plan, input_batch, ids, embeds, mtp_batch_descriptor_dispatcher)
        self._stage_batched_preprocess_inputs(port.slots, embeds.device)
        preprocess_batch = getattr(self.model, "preprocess_batch_mrv2", None)
        prefill = [row for row in range(len(plan)) if plan.prefill[row]]
        if callable(preprocess_batch) and prefill:
            preprocess_batch(req_infos=port.infos(prefill), device=embeds.device)
        route(plan, port)

    # The released code owns what it stores by copying it to the host. From the host nothing is copied there, nor what
    # lies deeper in an update (T9).

    def _call_mtp_runner(self, *args: Any, **keywords: Any) -> Any:
        """MTP by the released code."""
        phase = phase_of(self)
        embeds, codes = super()._call_mtp_runner(*args, **keywords)  # type: ignore[misc]
        if phase.mode != "off" and isinstance(codes, torch.Tensor) and codes.is_cpu:
            codes = phase.helper(codes.device).snapshot(codes)
        return embeds, codes

    def run_postprocess(self, hidden_states: torch.Tensor, input_batch: Any) -> None:
        """Postprocess by the released code."""
        phase = phase_of(self)
        if phase.mode != "off":
            hidden_states = phase.helper(hidden_states.device).snapshot(hidden_states)
        super().run_postprocess(hidden_states, input_batch)  # type: ignore[misc]


def _rows_with_hooks(state: Any, phase: Phase, input_batch: Any, req_states: Any) -> list[int]:
    """Rows of the input batch whose requests get hooks: none of the warm-up, and none without a live buffer.

    Raises E4 for a row whose request state, or a length of it, is unknown.
    """
    slots_by_id = getattr(req_states, "req_id_to_index", {})
    prompt_lens, progress = v2.prompt_lens(req_states), v2.num_computed(input_batch)
    rows = []
    for row in range(input_batch.num_reqs):
        slot, request_id = int(input_batch.idx_mapping_np[row]), input_batch.req_ids[row]
        live = state.intermediate_buffer.buffers[slot]
        if not isinstance(live, MutableMapping):
            raise no_dictionary(request_id, "its live buffer", live)
        live_id = live.get("req_id")
        if str(live_id).startswith(v2.WARMUP):
            continue
        missing = (
            "a request state" if slots_by_id.get(request_id) != slot
            else "a prompt length on the host" if prompt_lens is None
            else "a progress on the host, one per row" if progress is None or len(progress) != input_batch.num_reqs
            else ""
        )  # fmt: skip
        if missing:
            raise ContractError("E4", requests=[request_id], rows=[row], expected=missing, actual="none")
        if live_id is None:
            error = ContractError("E4", requests=[request_id], rows=[row], expected="a live buffer", actual="none")
            phase.deviations.report(state.model, "live buffer", error)
        else:
            rows.append(row)
    return rows


def plan_of(input_batch: Any, req_states: Any, rows: list[int], buffer_rows: int) -> StepPlan:
    """The step's plan from the current input batch and request states (M3, M4, M7, E4)."""
    return plan_step(
        [input_batch.req_ids[row] for row in rows],
        v2.prompt_lens(req_states)[input_batch.idx_mapping_np[rows]],
        v2.num_computed(input_batch)[rows],
        input_batch.num_scheduled_tokens[rows],
        input_batch.query_start_loc_np[rows],
        buffer_rows=buffer_rows,
    )


class StatePort(Port):
    """The V2 model state as the route sees it."""

    def __init__(
        self, state: Any, phase: Phase, plan: StepPlan, batch: Any, ids: Any, embeds: Any, dispatcher: Any
    ) -> None:
        super().__init__(phase, plan, state.model, ids, embeds)
        self._state = state
        self._batch = batch
        self._dispatcher = dispatcher
        self.index = {request_id: row for row, request_id in enumerate(batch.req_ids)}
        self.slots = [int(batch.idx_mapping_np[self.index[request_id]]) for request_id in plan.request_ids]
        self.has_batched_hook = callable(state._decode_preprocess)
        self.gathers = callable(getattr(self.model, v2.GATHERING_HOOK, None))
        self._resident: Any = getattr(self.model, "gpu_resident_buffer_keys", set())
        if getattr(self.model, "mtp", None) is not None:
            self.mtp_width = embeds.shape[-1]
            self._hidden, self._text_step = (embeds.new_empty(sum(plan.eligible), self.mtp_width) for _ in range(2))

    def infos(self, rows: Sequence[int]) -> list[Any]:
        live = self._state.intermediate_buffer.buffers
        return [live[self.slots[row]] for row in rows]

    def call_scalar(self, row: int, info: Any, ids: torch.Tensor, embeds: torch.Tensor) -> Any:
        return self.model.preprocess(ids, embeds, **_named(info))

    def call_batch(self, run: Run, infos: Sequence[Any], ids: torch.Tensor) -> Any:
        raw = self._state._decode_preprocess(
            input_ids=ids, input_embeds=self.embeds[self.locate(run)], req_infos=[_named(info) for info in infos]
        )
        if self.mtp_width is None and isinstance(raw, tuple) and len(raw) == 5 and self.deviations.mode != "strict":
            # Models without MTP had to return five values to the released state, which always unpacks five.
            return raw[0], raw[1], raw[4]
        return raw

    def store_updates(self, rows: Sequence[int], updates: Sequence[Any]) -> None:
        slots = [self.slots[row] for row in rows]
        # The released code takes out of the dictionaries what it has stored, and a hook may have returned live ones.
        own = [
            {
                key: dict(value) if isinstance(value, dict) else value
                for key, value in owned_copy(update, self.helper).items()
                if key not in NEVER_STORED
            }
            for update in updates
        ]
        if len(rows) > 1:
            self._state._write_batched_gpu_preprocess_updates(slots, own, self._resident)
        for slot, update in zip(slots, own, strict=True):
            self._state.intermediate_buffer.update(slot, update, self._resident)

    def fill_mtp(self, position: int, where: Rows, parts: list[torch.Tensor]) -> None:
        _, embeds, hidden, text_step = parts
        stop = position + hidden.shape[0]
        self.helper.copy(self._hidden[position:stop], hidden)
        self.helper.copy(self._text_step[position:stop], text_step)
        # The released MTP step reads ids and embeddings from the step's own buffers, of which the others may be a part.
        self.helper.put(self.embeds, where, embeds)

    def run_mtp(self, rows: Sequence[int]) -> None:
        # A generator is one stream (T8). The released loop over rows joins their results, which may lie in the same
        # memory (T9) and be no codes for some (T11).
        size = 1 if self.takes_rows_apart(rows) else len(rows)
        for start in range(0, len(rows), size):
            some = slice(start, start + size)
            packed = self._hidden[some], self._text_step[some]
            batch = [(self.index[self.plan.request_ids[row]], self.plan.offsets[row], packed) for row in rows[some]]
            self._state._run_batched_mtp(
                batch, self.ids, self.embeds, self._batch, self._resident, self._dispatcher, prepacked_mtp_inputs=packed
            )

    def takes_rows_apart(self, rows: Sequence[int]) -> bool:
        """Whether some row has its own generator, and MTP takes neither one per row nor noise drawn before."""
        state = self._state
        if getattr(self.model, "mtp_accepts_per_row_generators", False):
            return False
        if state._is_mtp_graph_runner() and state._mtp_sample_uniforms is not None:
            return False
        return any(
            state._get_mtp_generator(info["req_id"], info.get("sampling_params"), self.ids.device) is not None
            for info in self.infos(rows)
        )


def _named(info: dict[Any, Any]) -> dict[str, Any]:
    return {key: value for key, value in info.items() if isinstance(key, str)}
