# SPDX-License-Identifier: Apache-2.0
"""``PhaseRoutingMixin``: the contract on a V1 runner of vLLM-Omni, whichever device it runs on."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import compress, count
from typing import Any

import torch

from omni_npu_phase import buffers
from omni_npu_phase.buffers.base import BufferHelper
from omni_npu_phase.buffers.gather import Gathered
from omni_npu_phase.contract import ContractError
from omni_npu_phase.releases import Runtime, UnsupportedRuntimeError, runtime_of
from omni_npu_phase.settings import Mode, chosen_mode
from omni_npu_phase.step import route as routing
from omni_npu_phase.step.live import StateWrites, live_info, live_infos
from omni_npu_phase.step.mtp import TalkerMtp, device_side, mtp_inputs
from omni_npu_phase.step.plan import Run, StepPlan, of_rows, plan_step
from omni_npu_phase.step.results import Call, Deviations
from omni_npu_phase.tracing import note_plan


class PhaseRoutingMixin:
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

    phase_mode: Mode | None = None

    # What is taken from the released runner.
    model: Any
    requests: Mapping[str, Any]
    model_intermediate_buffer: dict[str, dict[str, Any]]
    input_batch: Any
    input_ids: Any
    inputs_embeds: Any
    query_start_loc: Any

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # A wrong mode is refused when the class is made, not in a serving engine's first step.
        chosen_mode(cls.phase_mode)

    def _preprocess(self, scheduler_output: Any, num_input_tokens: int, intermediate_tensors: Any = None) -> Any:
        """One step up to the model forward; arguments and return values are the released runner's."""
        phase = _phase_of(self)
        released = super()._preprocess  # type: ignore[misc]
        if not phase.active:
            return released(scheduler_output, num_input_tokens, intermediate_tensors)

        # An unknown runner is refused before anything of the step has happened.
        runtime = phase.runtime
        plan = _plan(self, scheduler_output, num_input_tokens)
        note_plan(self, plan)
        model = self.model
        self.model, phase.plan = _HooksMasked(model), plan
        try:
            outputs = released(scheduler_output, num_input_tokens, intermediate_tensors)
            ids, embeds, *passed_through = _expect(outputs, runtime)
            if embeds is None:
                embeds = device_side(self.inputs_embeds)[:num_input_tokens]
                self._collect_additional_information_for_prefill(plan.spans)
        finally:
            self.model, phase.plan = model, None
        if ids is None:
            ids = device_side(self.input_ids)[:num_input_tokens]

        preprocess_batch = getattr(self.model, "preprocess_batch", None)
        if callable(preprocess_batch):
            preprocess_batch(
                req_ids=plan.request_ids, model_intermediate_buffer=self.model_intermediate_buffer, device=ids.device
            )
        with phase.writing() as writes:
            routing.route(plan, _RunnerPort(self, phase, plan, ids, embeds, writes))
        return (ids, embeds, *passed_through)

    def _collect_additional_information_for_prefill(self, num_scheduled_tokens_np: Any) -> None:
        """Overlay prompt embeddings on the prompt rows of the step; requests may lack prompt_token_ids (E1)."""
        phase = _phase_of(self)
        plan = phase.plan
        if plan is None:
            super()._collect_additional_information_for_prefill(num_scheduled_tokens_np)  # type: ignore[misc]
        else:
            embeds = device_side(self.inputs_embeds)
            _overlay_prompt_embeds(plan, self.requests, embeds, phase.helper(embeds.device))

    def _talker_mtp_forward(
        self, decode_req_ids: list[str], inputs_embeds: torch.Tensor, start_offsets: list[int] | None = None
    ) -> None:
        """Run MTP for decode requests whose inputs are in the MTP buffers, in this order (T1, T4 to T11).

        ``inputs_embeds``: floating, shape (buffer rows, hidden). ``start_offsets``: each request's row in it, looked up
        in the input batch when None.
        """
        phase = _phase_of(self)
        if phase.mode == "off":
            # 0.20 has no such parameter, and its callers give none.
            given = () if start_offsets is None else (start_offsets,)
            super()._talker_mtp_forward(decode_req_ids, inputs_embeds, *given)  # type: ignore[misc]
        elif decode_req_ids:
            index = self.input_batch.req_id_to_index
            if start_offsets is None:
                start_offsets = [int(self.query_start_loc.cpu[index[request_id]]) for request_id in decode_req_ids]
            rows = range(len(decode_req_ids))
            call = Call(
                routing.MTP_HOOK, decode_req_ids, rows, inputs_embeds, self.model, phase.deviations, index=index
            )
            with phase.writing() as writes:
                helper = phase.helper(inputs_embeds.device)
                TalkerMtp(self, phase.runtime, helper, writes).run(call, start_offsets)

    def _update_intermediate_buffer(self, req_id: str, upd: Any) -> None:
        """Merge one request's updates, from ``postprocess`` or payloads, into its live buffer (R8, T9).

        The runner-owned fields and MTP inputs among them are dropped, as they are from those of hooks (M9, E6).
        """
        phase = _phase_of(self)
        if phase.active:
            with phase.writing() as writes:
                writes.store_copies(req_id, routing.storable(upd))
        else:
            super()._update_intermediate_buffer(req_id, upd)  # type: ignore[misc]

    def _process_additional_information_updates(self, *args: Any, **kwargs: Any) -> None:
        """Postprocess by the released code; what its rows store reaches the host together."""
        phase = _phase_of(self)
        with phase.writing() if phase.active else nullcontext():
            super()._process_additional_information_updates(*args, **kwargs)  # type: ignore[misc]


def released_classes(cls: type, mixin: type = PhaseRoutingMixin) -> tuple[type, ...]:
    """The classes behind ``mixin`` in method resolution order; all of them where it is not among them."""
    mro = cls.__mro__
    return mro[mro.index(mixin) + 1 :] if mixin in mro else mro


@dataclass(slots=True)
class _Phase:
    """What the mixin keeps on its runner between steps."""

    runner: Any
    mode: Mode
    deviations: Deviations
    plan: StepPlan | None = None
    """The step's plan while the released code runs, which then sees a model without hooks."""
    collecting: threading.local = field(default_factory=threading.local)
    """``writes``: those of the step or postprocess under way. An output thread may postprocess beside a step."""
    helpers: dict[torch.device, BufferHelper] = field(default_factory=dict)
    _runtime: Runtime | None = None

    @property
    def active(self) -> bool:
        """Whether routing is ours: without per-row hooks the runner's own path is untouched (R1)."""
        if self.mode == "off":
            return False
        return self.plan is not None or bool(getattr(self.runner.model, "has_preprocess", False))

    @property
    def runtime(self) -> Runtime:
        if self._runtime is None:
            self._runtime = runtime_of(released_classes(type(self.runner)))
        return self._runtime

    def helper(self, device: torch.device) -> BufferHelper:
        if device not in self.helpers:
            self.helpers[device] = buffers.for_device(device)
        return self.helpers[device]

    def writing(self) -> _Writing:
        """A block whose writes into live buffers are complete when the outermost one ends, also in an error."""
        return _Writing(self)


class _Writing:
    """The writes of the block under way in this thread, of which only the outermost block is the owner."""

    def __init__(self, phase: _Phase) -> None:
        self._phase = phase
        self._writes: StateWrites | None = None

    def __enter__(self) -> StateWrites:
        phase = self._phase
        outer: StateWrites | None = getattr(phase.collecting, "writes", None)
        if outer is not None:
            return outer
        writes = StateWrites(phase.runner, phase.helper(_device_of(phase.runner)))
        self._writes = phase.collecting.writes = writes
        return writes

    def __exit__(self, *error: object) -> None:
        if self._writes is not None:
            self._phase.collecting.writes = None
            self._writes.finish()


def _device_of(runner: Any) -> torch.device:
    for name in ("inputs_embeds", "talker_mtp_inputs_embeds"):
        buffer = getattr(runner, name, None)
        if buffer is not None:
            return device_side(buffer).device
    return torch.device(runner.device)


def _phase_of(runner: Any) -> _Phase:
    phase: _Phase | None = runner.__dict__.get("_omni_npu_phase")
    if phase is None:
        mode = chosen_mode(runner.phase_mode)
        phase = runner.__dict__["_omni_npu_phase"] = _Phase(runner, mode, Deviations(mode))
    return phase


def _plan(runner: Any, scheduler_output: Any, buffer_rows: int) -> StepPlan:
    """The step's plan from the current input batch and request states (M3, M4, M7, E1, E4)."""
    request_ids = list(runner.input_batch.req_ids)
    requests, scheduled = runner.requests, scheduler_output.num_scheduled_tokens
    states = _of_each(request_ids, requests, "a request state")
    spans = list(map(int, _of_each(request_ids, scheduled, "a scheduled span")))
    rows = len(request_ids)
    return plan_step(
        request_ids,
        _prompt_lens(request_ids, states),
        runner.input_batch.num_computed_tokens_cpu[:rows],
        spans,
        runner.query_start_loc.np[:rows],
        buffer_rows=buffer_rows,
    )


def _of_each(request_ids: Sequence[str], known: Mapping[str, Any], what: str) -> list[Any]:
    try:
        return [known[request_id] for request_id in request_ids]
    except KeyError:
        row = next(row for row, request_id in enumerate(request_ids) if request_id not in known)
        raise ContractError("E4", requests=[request_ids[row]], rows=[row], expected=what, actual="none") from None


def _prompt_lens(request_ids: Sequence[str], states: Sequence[Any]) -> list[int]:
    try:
        return [len(state.prompt_token_ids) for state in states]
    except (AttributeError, TypeError):
        return list(map(_prompt_len, count(), request_ids, states))


def _prompt_len(row: int, request_id: str, state: Any) -> int:
    token_ids = getattr(state, "prompt_token_ids", None)
    rows = getattr(state, "num_prompt_tokens", None) if token_ids is None else len(token_ids)
    if rows is None:
        expected = "prompt_token_ids, or a number of prompt embedding rows"
        raise ContractError("E4", requests=[request_id], rows=[row], expected=expected, actual="neither")
    return int(rows)


def _expect(outputs: Any, runtime: Runtime) -> Any:
    if not isinstance(outputs, tuple) or len(outputs) != runtime.preprocess_values:
        raise UnsupportedRuntimeError(
            f"{runtime.name}: _preprocess returns {runtime.preprocess_values} values there, "
            f"here it returned {len(outputs) if isinstance(outputs, tuple) else type(outputs).__name__}"
        )
    return outputs


def _overlay_prompt_embeds(
    plan: StepPlan, requests: Mapping[str, Any], embeds: torch.Tensor, helper: BufferHelper
) -> None:
    for row in compress(range(len(plan)), plan.prefill):
        request_id = plan.request_ids[row]
        prompt_embeds = getattr(requests[request_id], "prompt_embeds_cpu", None)
        if prompt_embeds is None:
            continue
        start, computed = plan.offsets[row], plan.num_computed[row]
        rows = min(plan.spans[row], plan.prompt_lens[row] - computed)
        own = prompt_embeds[computed : computed + rows]
        if tuple(own.shape) != (rows, embeds.shape[-1]):
            expected = f"prompt embeddings of shape {(rows, embeds.shape[-1])} from position {computed}"
            raise ContractError(
                "E1", requests=[request_id], rows=[row], expected=expected, actual=str(tuple(own.shape))
            )
        helper.copy(embeds[start : start + rows], own)


class _HooksMasked:
    """A model as it is, but without per-row hooks: what the released code sees while it selects the step's inputs."""

    has_preprocess = False

    def __init__(self, model: Any) -> None:
        object.__setattr__(self, "_model", model)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_model"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_model"), name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return object.__getattribute__(self, "_model")(*args, **kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # isinstance checks of the released code ask what the model is, not what stands before it.
        return type(object.__getattribute__(self, "_model"))


class _RunnerPort:
    """The V1 runner as the route sees it, for one step."""

    def __init__(
        self,
        runner: Any,
        phase: _Phase,
        plan: StepPlan,
        ids: torch.Tensor,
        embeds: torch.Tensor,
        writes: StateWrites,
    ) -> None:
        self._runner = runner
        self._plan = plan
        self._writes = writes
        self._requests = runner.requests
        self._write_keywords = phase.runtime.write_keywords
        self._attach_infos = phase.runtime.attach_infos(runner)
        self._helper = phase.helper(embeds.device)
        self.ids = ids
        self.embeds = embeds
        self.model = runner.model
        self.deviations = phase.deviations
        self.has_batched_hook = callable(getattr(self.model, routing.BATCHED_HOOK, None))
        self.gathers = False
        self._gathered = Gathered(self._helper)
        self._lent: torch.Tensor | None = None
        self.mtp_width: int | None = None
        if getattr(runner, "has_talker_mtp", False):
            self._mtp_inputs = mtp_inputs(runner)
            self.mtp_width = self._mtp_inputs[1].shape[-1]

    def info(self, row: int) -> dict[str, Any]:
        return live_info(self._runner, self._plan.request_ids[row])

    def infos(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        return live_infos(self._runner, of_rows(rows, self._plan.request_ids))

    def call_scalar(self, row: int, info: dict[str, Any], ids: torch.Tensor, embeds: torch.Tensor) -> Any:
        plan, request_id = self._plan, self._plan.request_ids[row]
        state = self._requests[request_id]
        self._write_keywords(((info, request_id, plan.prompt_lens[row], plan.num_computed[row], state),))
        keywords = self._attach_infos(state, info, request_id)
        return self.model.preprocess(input_ids=ids, input_embeds=embeds, **keywords)

    def call_batch(self, run: Run, infos: list[dict[str, Any]], ids: torch.Tensor) -> Any:
        plan, request_ids = self._plan, of_rows(run.rows, self._plan.request_ids)
        states = [self._requests[request_id] for request_id in request_ids]
        prompt_lens, num_computed = of_rows(run.rows, plan.prompt_lens), of_rows(run.rows, plan.num_computed)
        self._write_keywords(zip(infos, request_ids, prompt_lens, num_computed, states, strict=True))
        req_infos = list(map(self._attach_infos, states, infos, request_ids))
        return self.model.preprocess_decode_batch(input_ids=ids, req_infos=req_infos)

    def locate(self, run: Run) -> slice:
        start = self._plan.offsets[run.start]
        return slice(start, start + len(run.rows))

    def lend_ids(self, where: slice) -> torch.Tensor:
        # As released: those of rows that go to MTP are a copy, any others a slice of the step's own buffer.
        if self.mtp_width is None:
            return self.ids[where]
        if self._lent is None:
            self._lent = self._helper.lend(self.ids)
        return self._lent[where]

    def write_rows(self, where: slice, ids: torch.Tensor | None, embeds: torch.Tensor | None) -> None:
        if embeds is not None:
            self._helper.put(self.embeds, where, embeds)
        if ids is not None:
            self._helper.put(self.ids, where, ids)

    def store_updates(self, rows: Sequence[int], updates: Sequence[Any]) -> None:
        request_ids = self._plan.request_ids
        for row, update in zip(rows, updates, strict=True):
            self._writes.store(request_ids[row], update)

    def fill_mtp(self, position: int, where: slice, *parts: torch.Tensor) -> None:
        self._write_gathered(position)
        stop = position + where.stop - where.start
        for dest, part in zip(self._mtp_inputs[1:], parts, strict=True):
            self._helper.copy(dest[position:stop], part)

    def gather_mtp(self, position: int, where: slice, *parts: torch.Tensor) -> None:
        self._gathered.add(parts)

    def _write_gathered(self, position: int) -> None:
        """Write the rows gathered one by one, which end before ``position`` of the MTP batch."""
        if self._gathered:
            self._gathered.write(self._mtp_inputs[1:], position - len(self._gathered))

    def own(self) -> None:
        self._gathered.own()
        self._writes.own()

    def run_mtp(self, rows: Sequence[int]) -> None:
        self._write_gathered(len(rows))
        offsets = list(of_rows(rows, self._plan.offsets))
        self._helper.take(self.ids, self._helper.rows(offsets), out=self._mtp_inputs[0][: len(rows)])
        request_ids = list(of_rows(rows, self._plan.request_ids))
        self._runner._talker_mtp_forward(request_ids, self.embeds, offsets)
