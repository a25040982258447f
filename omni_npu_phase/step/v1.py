# SPDX-License-Identifier: Apache-2.0
"""``PhaseRoutingMixin``: the contract on a V1 runner of vLLM-Omni, whichever device it runs on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import compress
from typing import Any

import torch

from omni_npu_phase.buffers.base import BufferHelper, Rows
from omni_npu_phase.contract import ContractError
from omni_npu_phase.releases import UnsupportedRuntimeError, runtime_of
from omni_npu_phase.settings import replay_bytes, replays_exactly
from omni_npu_phase.step.live import LiveBuffers
from omni_npu_phase.step.mtp import TalkerMtp, output_key
from omni_npu_phase.step.plan import Run, StepPlan, of_rows, plan_step
from omni_npu_phase.step.port import Phase, PhaseMixin, Port, device_side, known_phase, phase_of, released_classes
from omni_npu_phase.step.replay import Replay
from omni_npu_phase.step.results import Call
from omni_npu_phase.step.route import BATCHED_HOOK, MTP_HOOK, route


class PhaseRoutingMixin(PhaseMixin):
    """Gives a released V1 runner the phase contract; list it before the runner class.

    ``class Runner(PhaseRoutingMixin, GPUARModelRunner)`` is the whole use, and the same for the generation runner and
    for the NPU runners. Input selection, payloads, positions, encoders and pipeline parallelism stay with the released
    ``_preprocess``; hooks, embeddings, MTP and what hooks store are ours, so overrides of the released runner's
    ``_maybe_run_batch_preprocess`` and ``_store_value`` are not called. State is made on first use, so runners built
    without ``__init__`` work too.

    ``phase_mode`` is ``"on"``, ``"strict"`` or ``"off"``; None takes it from the environment variable OMNI_NPU_PHASE,
    and ``on`` where that is unset. Raises :class:`~omni_npu_phase.contract.ContractError` as the clauses say, and
    :class:`~omni_npu_phase.releases.UnsupportedRuntimeError` on first use with a runner it does not know.
    """

    # What is taken from the released runner.
    model: Any
    requests: Mapping[str, Any]
    model_intermediate_buffer: dict[str, dict[str, Any]]
    input_batch: Any
    input_ids: Any
    inputs_embeds: Any

    def _preprocess(self, scheduler_output: Any, num_input_tokens: int, intermediate_tensors: Any = None) -> Any:
        """One step up to the model forward; arguments and return values are the released runner's."""
        phase = phase_of(self)
        released = super()._preprocess  # type: ignore[misc]
        if not _is_active(self, phase):
            return released(scheduler_output, num_input_tokens, intermediate_tensors)

        # An unknown runner is refused before anything of the step has happened.
        tools = _tools_of(self, phase)
        plan = phase.plan = plan_of(self, scheduler_output, num_input_tokens)
        # The released code selects the step's inputs, payloads and positions, and calls no hooks.
        model, phase.selecting = self.model, True
        self.model = _HooksMasked(model)
        try:
            ids, embeds, *passed_through = released(scheduler_output, num_input_tokens, intermediate_tensors)
            selected = embeds is not None
            if not selected:
                embeds = device_side(self.inputs_embeds)[:num_input_tokens]
                self._collect_additional_information_for_prefill(plan.spans)
        finally:
            self.model, phase.selecting = model, False
        if ids is None:
            ids = device_side(self.input_ids)[:num_input_tokens]

        new = plan
        if tools.replay is not None:
            new = tools.replay.split(plan, num_input_tokens)
            tools.replay.give_back(plan, ids, embeds)
            plan = phase.plan = new
        preprocess_batch = getattr(self.model, "preprocess_batch", None)
        if callable(preprocess_batch) and plan.request_ids:
            fills_rows = tools.runtime.fills_rows and getattr(self.model, "preprocess_batch_fills_rows", False)
            filled = preprocess_batch(
                req_ids=plan.request_ids,
                model_intermediate_buffer=self.model_intermediate_buffer,
                device=ids.device,
                **(layout_of(plan, ids, embeds) if fills_rows else {}),
            )
            if fills_rows and filled:
                plan = phase.plan = plan.without(frozenset(filled))
        with tools.live:
            route(plan, RunnerPort(self, phase, plan, ids, embeds, selected=selected))
        if tools.replay is not None:
            tools.replay.keep(new, ids, embeds)
        return (ids, embeds, *passed_through)

    def _collect_additional_information_for_prefill(self, num_scheduled_tokens_np: Any) -> None:
        """Overlay prompt embeddings on the prompt rows of the step; requests may lack prompt_token_ids (E1)."""
        phase = phase_of(self)
        if phase.selecting and phase.plan:
            embeds = device_side(self.inputs_embeds)
            _overlay_prompt_embeds(phase.plan, self.requests, embeds, phase.helper(embeds.device))
        else:
            super()._collect_additional_information_for_prefill(num_scheduled_tokens_np)  # type: ignore[misc]

    def _talker_mtp_forward(
        self, decode_req_ids: list[str], inputs_embeds: torch.Tensor, start_offsets: list[int] | None = None
    ) -> None:
        """Run MTP for decode requests whose inputs are in the MTP buffers, in this order (T1, T4 to T11).

        ``inputs_embeds``: floating, shape (buffer rows, hidden). ``start_offsets``: each request's row in it, looked up
        in the input batch when None.
        """
        phase = phase_of(self)
        if phase.mode == "off":
            # 0.20 has no such parameter, and its callers give none.
            given = () if start_offsets is None else (start_offsets,)
            super()._talker_mtp_forward(decode_req_ids, inputs_embeds, *given)  # type: ignore[misc]
        elif decode_req_ids:
            index = self.input_batch.req_id_to_index
            if start_offsets is None:
                offsets = _starts(self, len(index))
                start_offsets = [offsets[index[request_id]] for request_id in decode_req_ids]
            call = Call(MTP_HOOK, decode_req_ids, index, inputs_embeds, self.model, phase.deviations)
            tools = _tools_of(self, phase)
            with tools.live:
                tools.mtp.run(call, start_offsets)

    def _update_intermediate_buffer(self, req_id: str, upd: Any) -> None:
        """Merge one request's updates, from ``postprocess`` or payloads, into its live buffer (R8, T9).

        The runner-owned fields and MTP inputs among them are dropped, as they are from those of hooks (M9, E6).
        """
        phase = phase_of(self)
        if not _is_active(self, phase):
            super()._update_intermediate_buffer(req_id, upd)  # type: ignore[misc]
        elif isinstance(upd, dict) and upd and req_id in self.requests:
            live = _tools_of(self, phase).live
            with live:
                live.store((req_id,), (upd,))

    def _process_additional_information_updates(self, *args: Any, **kwargs: Any) -> None:
        """Postprocess by the released code; what its rows store reaches the host together."""
        phase = phase_of(self)
        replay = _replay_of(self)
        if replay is not None and (silent := replay.silent()):
            wanted = kwargs.get("req_ids_filter")
            kwargs["req_ids_filter"] = set(self.requests if wanted is None else wanted) - silent
        with _tools_of(self, phase).live if _is_active(self, phase) else nullcontext():
            super()._process_additional_information_updates(*args, **kwargs)  # type: ignore[misc]

    # What is given back was sent on when it was new (X1).

    def _gather_runtime_additional_information(self) -> list[dict[str, Any]]:
        """The live buffers by the released code, as the forward pass is to see them."""
        infos: list[dict[str, Any]] = super()._gather_runtime_additional_information()  # type: ignore[misc]
        replay = _replay_of(self)
        return infos if replay is None else replay.for_forward(infos, *output_key(self.model))

    def sample_tokens(self, *args: Any, **keywords: Any) -> Any:
        """Sampling and outputs by the released code."""
        replay = _replay_of(self)
        with nullcontext() if replay is None else replay.only_new_sent():
            return super().sample_tokens(*args, **keywords)  # type: ignore[misc]

    def _resolve_pooler_payload_req_ids(self, req_ids: list[str]) -> tuple[str, list[str]]:
        """The requests with outputs for others by the released code."""
        kind, request_ids = super()._resolve_pooler_payload_req_ids(req_ids)  # type: ignore[misc]
        replay = _replay_of(self)
        return kind, request_ids if replay is None else replay.sent(request_ids)

    def _should_use_async_omni_output(self) -> bool:
        """Whether an output thread may build the step's outputs: not beside what tells it of given rows."""
        replay = _replay_of(self)
        return not (replay is not None and replay.given) and super()._should_use_async_omni_output()  # type: ignore[misc]


class _Tools:
    """What the mixin makes for its runner on first use."""

    def __init__(self, runner: Any, phase: Phase) -> None:
        self.runtime = runtime_of(released_classes(type(runner)))
        # Released methods take the device of these buffers, and runners are driven without one of their own.
        buffer = getattr(runner, "inputs_embeds", getattr(runner, "talker_mtp_inputs_embeds", None))
        device = torch.device(runner.device) if buffer is None else device_side(buffer).device
        helper = phase.helper(device)
        self.live = LiveBuffers(runner, helper)
        self.replay = None
        if replays_exactly(runner.phase_replay):
            if getattr(runner, "speculative_config", None) is not None:
                raise UnsupportedRuntimeError("no exact replay: rows of rejected drafts would be given back")
            self.replay = Replay(runner, device, replay_bytes())
        self.mtp = TalkerMtp(runner, self.runtime, self.live, helper, self.replay)


def _tools_of(runner: Any, phase: Phase) -> _Tools:
    if phase.tools is None:
        phase.tools = _Tools(runner, phase)
    return phase.tools  # type: ignore[no-any-return]


def _replay_of(runner: Any) -> Replay | None:
    """The rows that a runner keeps; None where it keeps none, or has not begun."""
    phase = known_phase(runner)
    replay: Replay | None = None if phase is None or phase.tools is None else phase.tools.replay
    return replay


def _is_active(runner: Any, phase: Phase) -> bool:
    """Whether routing is the mixin's: without per-row hooks the runner's own path is untouched (R1)."""
    if phase.mode == "off":
        return False
    # The released code may ask before it has a model.
    return phase.selecting or bool(getattr(getattr(runner, "model", None), "has_preprocess", False))


def plan_of(runner: Any, scheduler_output: Any, buffer_rows: int) -> StepPlan:
    """The step's plan from the current input batch and request states (M3, M4, M7, E1, E4)."""
    request_ids = list(runner.input_batch.req_ids)
    states = _of_each(request_ids, runner.requests, "a request state")
    spans = list(map(int, _of_each(request_ids, scheduler_output.num_scheduled_tokens, "a scheduled span")))
    rows = len(request_ids)
    return plan_step(
        request_ids,
        prompt_lens_of(request_ids, states),
        runner.input_batch.num_computed_tokens_cpu[:rows],
        spans,
        _starts(runner, rows),
        buffer_rows=buffer_rows,
    )


def layout_of(plan: StepPlan, ids: torch.Tensor, embeds: torch.Tensor) -> dict[str, Any]:
    """What ``preprocess_batch`` needs to fill rows itself (M10)."""
    return {
        "input_ids": ids,
        "inputs_embeds": embeds,
        "token_offsets": list(plan.offsets),
        "num_scheduled_tokens": list(plan.spans),
        "num_computed_tokens": list(plan.num_computed),
        "prompt_lens": list(plan.prompt_lens),
    }


def _starts(runner: Any, rows: int) -> list[int]:
    """Where each row begins in the step's buffers, from the host half of the pair that the released code reads."""
    starts = runner.query_start_loc.cpu
    return (starts() if callable(starts) else starts)[:rows].tolist()  # type: ignore[no-any-return]


def _of_each(request_ids: Sequence[str], known: Mapping[str, Any], what: str) -> list[Any]:
    try:
        return [known[request_id] for request_id in request_ids]
    except KeyError:
        row = next(row for row, request_id in enumerate(request_ids) if request_id not in known)
        raise ContractError("E4", requests=[request_ids[row]], rows=[row], expected=what, actual="none") from None


def prompt_lens_of(request_ids: Sequence[str], states: Sequence[Any]) -> list[int]:
    """The prompt length of each request (M3); of one without token ids, its number of prompt embedding rows (E1)."""
    try:
        return [len(state.prompt_token_ids) for state in states]
    except (AttributeError, TypeError):
        lengths = []
    for row, (request_id, state) in enumerate(zip(request_ids, states, strict=True)):
        token_ids = getattr(state, "prompt_token_ids", None)
        length = getattr(state, "num_prompt_tokens", None) if token_ids is None else len(token_ids)
        if length is None:
            expected = "prompt_token_ids, or a number of prompt embedding rows"
            raise ContractError("E4", requests=[request_id], rows=[row], expected=expected, actual="neither")
        lengths.append(int(length))
    return lengths


def _overlay_prompt_embeds(
    plan: StepPlan, requests: Mapping[str, Any], embeds: torch.Tensor, helper: BufferHelper
) -> None:
    for row in compress(range(len(plan)), plan.prefill):
        request_id, start, computed = plan.request_ids[row], plan.offsets[row], plan.num_computed[row]
        prompt_embeds = getattr(requests[request_id], "prompt_embeds_cpu", None)
        if prompt_embeds is not None:
            rows = min(plan.spans[row], plan.prompt_lens[row] - computed)
            place, own = embeds[start : start + rows], prompt_embeds[computed : computed + rows]
            if own.shape != place.shape:
                expected = f"prompt embeddings of shape {tuple(place.shape)} from position {computed}"
                actual = str(tuple(own.shape))
                raise ContractError("E1", requests=[request_id], rows=[row], expected=expected, actual=actual)
            helper.copy(place, own)


class _HooksMasked:
    """A model as it is, but without per-row hooks: what the released code sees while it selects the step's inputs."""

    has_preprocess = False

    def __init__(self, model: Any) -> None:
        vars(self)["_masked"] = model

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_masked"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._masked, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._masked(*args, **kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # isinstance checks of the released code ask what the model is, not what stands before it.
        return type(self._masked)


class RunnerPort(Port):
    """The V1 runner as the route sees it."""

    def __init__(
        self, runner: Any, phase: Phase, plan: StepPlan, ids: torch.Tensor, embeds: torch.Tensor, *, selected: bool
    ) -> None:
        super().__init__(phase, plan, runner.model, ids, embeds)
        self._selected = selected
        self.runner = runner
        tools = _tools_of(runner, phase)
        self._live, self._mtp = tools.live, tools.mtp
        self._write_keywords = tools.runtime.write_keywords
        self._attach_infos = runner._maybe_attach_mimo_audio_req_infos
        self._lent: torch.Tensor | None = None
        self.index = runner.input_batch.req_id_to_index
        self.has_batched_hook = callable(getattr(self.model, BATCHED_HOOK, None))
        if getattr(runner, "has_talker_mtp", False):
            self.mtp_width = self._mtp.inputs[1].shape[-1]

    def infos(self, rows: Sequence[int]) -> list[Any]:
        return self._live.of(of_rows(rows, self.plan.request_ids))

    def infos_for_hooks(self, rows: Sequence[int]) -> list[Any]:
        plan, infos, request_ids = self.plan, self.infos(rows), of_rows(rows, self.plan.request_ids)
        states = map(self.runner.requests.__getitem__, request_ids)
        prompt_lens, num_computed = of_rows(rows, plan.prompt_lens), of_rows(rows, plan.num_computed)
        self._write_keywords(zip(infos, request_ids, prompt_lens, num_computed, states, strict=True))
        return infos

    def call_scalar(self, row: int, info: Any, ids: torch.Tensor, embeds: torch.Tensor) -> Any:
        request_id = self.plan.request_ids[row]
        keywords = self._attach_infos(self.runner.requests[request_id], info, request_id)
        return self.model.preprocess(input_ids=ids, input_embeds=embeds, **keywords)

    def call_batch(self, run: Run, infos: Sequence[Any], ids: torch.Tensor) -> Any:
        request_ids = of_rows(run.rows, self.plan.request_ids)
        states = map(self.runner.requests.__getitem__, request_ids)
        req_infos = list(map(self._attach_infos, states, infos, request_ids))
        return self.model.preprocess_decode_batch(input_ids=ids, req_infos=req_infos)

    def selected(self, row: int) -> int:
        if self._selected:
            return super().selected(row)
        # Without embedding of ids, as text models go, a row has the prompt's embeddings that were sent, or none.
        sent = getattr(self.runner.requests[self.plan.request_ids[row]], "prompt_embeds_cpu", None)
        return 0 if sent is None else self.plan.prompt_lens[row] - self.plan.num_computed[row]

    def lend_ids(self, where: Rows) -> torch.Tensor:
        # As released: those of rows that go to MTP are a copy, any others a slice of the step's own buffer.
        if self.mtp_width is None:
            return super().lend_ids(where)
        if self._lent is None:
            self._lent = self.ids.clone()
        return self._lent[where]

    def store_updates(self, rows: Sequence[int], updates: Sequence[Any]) -> None:
        self._live.store(of_rows(rows, self.plan.request_ids), updates)

    def fill_mtp(self, position: int, where: Rows, parts: list[torch.Tensor]) -> None:
        self._mtp.fill(position, parts[0].shape[0], parts)

    def run_mtp(self, rows: Sequence[int]) -> None:
        offsets = list(of_rows(rows, self.plan.offsets))
        self.runner._talker_mtp_forward(list(of_rows(rows, self.plan.request_ids)), self.embeds, offsets)
