# SPDX-License-Identifier: Apache-2.0
"""Mutants: broken versions of the package, each with the clauses that must notice.

A guard is worth what it catches. A mutant changes functions, methods or properties of the package for as long as a test
runs; a replacement is called with the original first, and keeps what it must remember on the runner it breaks.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from omni_npu_phase.buffers.gather import Gathered

from omni_npu_phase import contract
from omni_npu_phase.buffers.base import BufferHelper
from omni_npu_phase.conformance.recording_model import NEW_IDS
from omni_npu_phase.contract import FIELDS, MTP_INPUTS, ContractError
from omni_npu_phase.step import plan, results
from omni_npu_phase.step import route as routing
from omni_npu_phase.step import v1 as mixin
from omni_npu_phase.step.live import StateWrites, live_info
from omni_npu_phase.step.mtp import TalkerMtp, mtp_inputs
from omni_npu_phase.step.plan import Run, StepPlan
from omni_npu_phase.step.results import BatchResult, Call, Deviations
from omni_npu_phase.step.v1 import PhaseRoutingMixin

_Phase, _Port = mixin._Phase, mixin._RunnerPort


@dataclass(frozen=True, slots=True)
class Change:
    """One attribute of the package, and what is called in its place: ``instead(original, *args, **keywords)``."""

    owner: type | ModuleType
    name: str
    instead: Callable[..., Any]

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A broken version of the package.

    ``caught_by``: clauses that must each have a failing judgement. ``raises``: names of the errors it ends steps in;
    any other is a mistake in the mutant and no evidence. ``also``: scenarios to run beside those about the clauses.
    """

    name: str
    caught_by: tuple[str, ...]
    breaks: str
    changes: tuple[Change, ...]
    raises: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    def apply(self, patch: pytest.MonkeyPatch) -> dict[str, int]:
        """Put every change in place until ``patch`` is undone; gives the number of calls of each, which goes up."""
        calls: dict[str, int] = {}
        for change in self.changes:
            _put(change, patch, calls)
        return calls


def _put(change: Change, patch: pytest.MonkeyPatch, calls: dict[str, int]) -> None:
    label = str(change)
    calls[label] = 0
    found = inspect.getattr_static(change.owner, change.name)
    original = found.fget if isinstance(found, property) else found

    @functools.wraps(original)
    def counted(*args: Any, **keywords: Any) -> Any:
        calls[label] += 1
        return change.instead(original, *args, **keywords)

    patch.setattr(change.owner, change.name, property(counted) if isinstance(found, property) else counted)


# The plan: lengths, phases, order.


def _replanned(alter: Callable[[Any, StepPlan], StepPlan]) -> Change:
    """The step's plan as ``alter(runner, plan)`` makes it."""
    return Change(mixin, "_plan", lambda original, runner, *rest: alter(runner, original(runner, *rest)))


def _phase_by_span(runner: Any, rows: StepPlan) -> StepPlan:
    one_token = [span == 1 for span in rows.spans]
    return replace(rows, prefill=[not one for one in one_token], eligible=one_token)


def _latched_decode(runner: Any, rows: StepPlan) -> StepPlan:
    decoded = runner.__dict__.setdefault("_seen_decoding", set())
    decoded |= {request for request, prefill in zip(rows.request_ids, rows.prefill, strict=True) if not prefill}
    return replace(rows, prefill=[request not in decoded for request in rows.request_ids])


def _latched_first_phase(runner: Any, rows: StepPlan) -> StepPlan:
    first = runner.__dict__.setdefault("_first_phase", {})
    pairs = zip(rows.request_ids, rows.prefill, strict=True)
    return replace(rows, prefill=[first.setdefault(request, prefill) for request, prefill in pairs])


def _progress_of_states(runner: Any, rows: StepPlan) -> StepPlan:
    progress = [runner.requests[request].num_computed_tokens for request in rows.request_ids]
    return replace(rows, num_computed=progress)


def _arrival_order(runner: Any, rows: StepPlan) -> StepPlan:
    return replace(rows, request_ids=[request for request in runner.requests if request in rows.request_ids])


def _scheduler_order(original: Any, runner: Any, scheduled: Any, buffer_rows: int) -> StepPlan:
    rows = original(runner, scheduled, buffer_rows)
    order = [rows.request_ids.index(request) for request in scheduled.num_scheduled_tokens]
    lists = ("request_ids", "prompt_lens", "num_computed", "spans", "offsets", "prefill", "eligible")
    return replace(rows, **{name: [getattr(rows, name)[row] for row in order] for name in lists})


def _crossing_is_decode(runner: Any, rows: StepPlan) -> StepPlan:
    lengths = zip(rows.prompt_lens, rows.num_computed, rows.spans, strict=True)
    return replace(rows, prefill=[p > c and not contract.Row(p, c, s).crosses for p, c, s in lengths])


def _replay_is_prefill(runner: Any, rows: StepPlan) -> StepPlan:
    replayed = [
        contract.Row(p, c, s).replays(runner.requests[request].num_tokens)
        for request, p, c, s in zip(rows.request_ids, rows.prompt_lens, rows.num_computed, rows.spans, strict=True)
    ]
    return replace(rows, prefill=[a or b for a, b in zip(rows.prefill, replayed, strict=True)])


def _planned_on(**lengths: Callable[[Any, Any, Any], Any]) -> Change:
    """A plan on other lengths, each made from (prompt lengths, progress, spans) as arrays."""

    def instead(original: Any, ids: Any, prompt: Any, computed: Any, spans: Any, *rest: Any, **keywords: Any) -> Any:
        own = [np.asarray(values) for values in (prompt, computed, spans)]
        prompt = lengths["prompt"](*own) if "prompt" in lengths else prompt
        computed = lengths["computed"](*own) if "computed" in lengths else computed
        return original(ids, prompt, computed, spans, *rest, **keywords)

    return Change(mixin, "plan_step", instead)


def _first_prompt_lens(original: Any, ids: Any, states: Sequence[Any]) -> list[int]:
    now = zip(states, original(ids, states), strict=True)
    return [state.__dict__.setdefault("_first_prompt_len", length) for state, length in now]


def _without_embeds(original: Any, ids: Any, states: Sequence[Any]) -> list[int]:
    return [len(state.prompt_token_ids or ()) for state in states]


def _clamped(original: Any, ids: Any, prompt: Any, computed: Any, spans: Any, offsets: Any, **keywords: Any) -> Any:
    spans, offsets = (np.maximum(np.asarray(values), 0) for values in (spans, offsets))
    return original(ids, prompt, computed, spans, offsets, **keywords)


def _refuse_late(original: Any, rows: StepPlan, port: Any) -> None:
    original(rows, port)
    for row, request in enumerate(rows.request_ids):
        if rows.num_computed[row] < 0 or rows.offsets[row] + rows.spans[row] > len(port.embeds):
            raise ContractError("E4", requests=[request], rows=[row], expected="lengths in range", actual="others")


_NO_REFUSAL = Change(plan, "_refuse", lambda original, *args: None)


# The route: fields, which hook, what it gets.


def _altered_fields(alter: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    def instead(original: Any, rows: StepPlan, numbers: Sequence[int], infos: Sequence[dict[str, Any]]) -> None:
        original(rows, numbers, infos)
        for info in infos:
            info.update(alter({name: info[name] for name in FIELDS}))

    return Change(StepPlan, "write_fields", instead)


def _numpy_scalars(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: np.bool_(value) if isinstance(value, bool) else np.int64(value) for name, value in fields.items()}


def _write_where_absent(original: Any, rows: StepPlan, numbers: Sequence[int], infos: list[dict[str, Any]]) -> None:
    for row, info in zip(numbers, infos, strict=True):
        own: dict[str, Any] = {}
        original(rows, [row], [own])
        for name, value in own.items():
            info.setdefault(name, value)


def _write_while_planning(runner: Any, rows: StepPlan) -> StepPlan:
    for row, request in enumerate(rows.request_ids):
        info = live_info(runner, request)
        info.update(zip(FIELDS, (rows.prompt_lens[row], rows.num_computed[row], rows.prefill[row]), strict=True))
    return rows


def _progress_for_postprocess(original: Any, runner: Any, *args: Any) -> None:
    for request in runner.input_batch.req_ids:
        live_info(runner, request).update({contract.NUM_COMPUTED: 99, contract.IS_PREFILL: None})
    original(runner, *args)


def _given(original: Any, port: Any, row: int) -> dict[str, Any]:
    port.__dict__.setdefault("_given", set()).add(row)
    info: dict[str, Any] = original(port, row)
    return info


def _live_only_once(original: Any, port: Any, rows: Sequence[int]) -> list[dict[str, Any]]:
    given = port.__dict__.setdefault("_given", set())
    again = given.issuperset(rows)
    given.update(rows)
    return [dict(info) if again else info for info in original(port, rows)]


_LIVE_ONLY_ONCE = Change(_Port, "info", _given), Change(_Port, "infos", _live_only_once)


def _bare(info: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in info.items() if name not in FIELDS}


def _infos_reversed(original: Any, port: Any, run: Run, infos: list[dict[str, Any]], ids: Any) -> Any:
    return port.model.preprocess_decode_batch(input_ids=ids, req_infos=infos[::-1])


def _without_ids(original: Any, port: Any, row: Any, infos: Any, ids: Any, *rest: Any) -> Any:
    # With prompt embeddings enabled, the released runner selects no token ids.
    return original(port, row, infos, None if port._runner.enable_prompt_embeds else ids, *rest)


def _runs_of(alter: Callable[[StepPlan], StepPlan]) -> Change:
    return Change(StepPlan, "runs", lambda original, rows, **how: original(alter(rows), **how))


def _inputs_left_without_mtp(original: Any, port: Any, row: int, info: dict[str, Any], *rest: Any) -> Any:
    raw = original(port, row, info, *rest)
    if port.mtp_width is None and MTP_INPUTS in (raw[-1] or ()):
        info[MTP_INPUTS] = raw[-1][MTP_INPUTS]
    return raw


def _one_token_rows(rows: StepPlan) -> StepPlan:
    return replace(rows, eligible=[span == 1 for span in rows.spans])


def _one_token_decodes(rows: StepPlan) -> list[bool]:
    return [span == 1 and not prefill for span, prefill in zip(rows.spans, rows.prefill, strict=True)]


def _batches_last(original: Any, rows: StepPlan, **how: bool) -> list[Run]:
    return sorted(original(rows, **how), key=lambda run: run.batched)


def _no_batches_beside_mtp(original: Any, rows: StepPlan, port: Any) -> None:
    port.has_batched_hook = port.has_batched_hook and port.mtp_width is None
    original(rows, port)


def _wider_batched_result(original: Any, call: Call, raw: Any, *, given_ids: Any, mtp_width: int | None) -> Any:
    return original(call, raw, given_ids=given_ids, mtp_width=call.embeds.shape[-1])


def _batch_hook_always(original: Any, runner: Any, *args: Any) -> Any:
    if not runner.model.has_preprocess and hasattr(runner.model, "preprocess_batch"):
        _call_batch_hook(runner, runner.model.preprocess_batch)
    return original(runner, *args)


def _call_batch_hook(runner: Any, hook: Any) -> None:
    buffers = runner.model_intermediate_buffer
    hook(req_ids=list(runner.input_batch.req_ids), model_intermediate_buffer=buffers, device=runner.device)


def _batch_hook_last(original: Any, runner: Any, *args: Any) -> Any:
    hook = vars(runner.model).pop("preprocess_batch", None)
    outputs = original(runner, *args)
    if hook is not None:
        _call_batch_hook(runner, hook)
        runner.model.preprocess_batch = hook
    return outputs


def _batch_hook_first(original: Any, runner: Any, *args: Any) -> Any:
    hook = vars(runner.model).pop("preprocess_batch", None)
    if hook is not None:
        _call_batch_hook(runner, hook)
    try:
        return original(runner, *args)
    finally:
        if hook is not None:
            runner.model.preprocess_batch = hook


def _batch_hook_again(original: Any, rows: StepPlan, port: Any) -> None:
    if hasattr(port.model, "preprocess_batch"):
        _call_batch_hook(port._runner, port.model.preprocess_batch)
    original(rows, port)


def _released_step(original: Any, runner: Any, *args: Any) -> Any:
    return super(PhaseRoutingMixin, runner)._preprocess(*args)


def _switched_off(original: Any, runner: Any) -> Any:
    phase = original(runner)
    phase.mode = "off"
    return phase


# What hooks return, and where it goes.


def _new_embeds(original: Any, runner: Any, *args: Any) -> Any:
    ids, embeds, *others = original(runner, *args)
    return (ids, None if embeds is None else embeds.clone(), *others)


def _forward_without_ids(original: Any, runner: Any, *args: Any) -> Any:
    ids, *others = original(runner, *args)
    return (None if runner.enable_prompt_embeds else ids, *others)


def _one_row_further(original: Any, port: Any, where: slice, ids: Any, embeds: Any) -> None:
    original(port, where, ids, embeds)
    if embeds is not None:
        port.embeds[where.stop].copy_(embeds[-1])


def _ids_always(original: Any, port: Any, where: slice, ids: Any, embeds: Any) -> None:
    original(port, where, port.ids[where].clone() if ids is None else ids, embeds)


def _updates_of_neighbour(original: Any, port: Any, rows: Sequence[int], updates: Any) -> None:
    original(port, [(row + 1) % len(port._plan) for row in rows], updates)


def _first_update_only(original: Any, port: Any, rows: Sequence[int], updates: Any) -> None:
    original(port, rows[:1], updates[:1])


def _updates_not_owned(original: Any, port: Any, rows: Sequence[int], updates: Any) -> None:
    for info, update in zip(port.infos(rows), updates, strict=True):
        for name, value in update.items():
            if isinstance(value, dict):
                info.setdefault(name, {}).update(value)
            else:
                info[name] = value


def _stored_left_alone(original: Any, port: Any, rows: Sequence[int], updates: Any) -> None:
    def new(known: Any, value: Any) -> Any:
        is_nested = isinstance(value, dict)
        return {key: own for key, own in value.items() if known.get(key) is not own} if is_nested else value

    pairs = zip(port.infos(rows), updates, strict=True)
    original(port, rows, [{key: new(info.get(key, {}), own) for key, own in each.items()} for info, each in pairs])


def _updates_twice(original: Any, port: Any, rows: Sequence[int], updates: Any) -> None:
    original(port, rows, updates)
    original(port, rows, updates)


def _updates_noted(original: Any, port: Any, rows: Sequence[int], updates: Any) -> None:
    original(port, rows, updates)
    port._runner.__dict__.setdefault("_noted_updates", []).append((port._plan, rows, updates))


def _noted_updates_again(original: Any, runner: Any, *args: Any) -> None:
    original(runner, *args)
    for rows, numbers, updates in runner.__dict__.pop("_noted_updates", ()):
        for row, update in zip(numbers, updates, strict=True):
            runner._update_intermediate_buffer(rows.request_ids[row], update)


def _nested_replaced(original: Any, port: Any, rows: Sequence[int], updates: Any) -> None:
    for info, update in zip(port.infos(rows), updates, strict=True):
        for name in [key for key, value in update.items() if isinstance(value, dict) and value is not info.get(key)]:
            info[name] = {}
    original(port, rows, updates)


def _uncallable_hook_taken(original: Any, rows: StepPlan, port: Any) -> None:
    port.has_batched_hook = hasattr(port.model, "preprocess_decode_batch")
    original(rows, port)


def _copied_backwards(original: Any, helper: Any, dest: torch.Tensor, rows: Any, source: torch.Tensor) -> None:
    # Over memory that it also reads, this order spreads the last row.
    target = dest[rows]
    for row in reversed(range(len(target))):
        target[row] = source[row]


def _whole_result(original: Any, call: Call, raw: Any, **keywords: Any) -> Any:
    result = original(call, raw, **keywords)
    return result._replace(rows=len(raw[1]), embeds=raw[1]) if len(raw[1]) > keywords["span"] else result


def _report(strict: bool, on: str) -> Change:
    """Deviations reported otherwise: whether ``strict`` raises them, and what ``on`` does with them."""

    def instead(original: Any, deviations: Deviations, model: Any, kind: str, error: ContractError) -> None:
        if (deviations.mode == "strict" and strict) or (deviations.mode == "on" and on == "raises"):
            raise error
        if on == "warns again":
            deviations._warned.clear()
        if on.startswith("warns"):
            original(Deviations("on") if deviations.mode == "strict" else deviations, model, kind, error)

    return Change(Deviations, "report", instead)


def _unchecked_batch(original: Any, call: Call, raw: Any, *, given_ids: Any, mtp_width: int | None) -> BatchResult:
    ids, embeds = raw[0], raw[1]
    hidden, text_step = (raw[2], raw[3]) if mtp_width is not None else (None, None)
    return BatchResult(None if ids is given_ids else ids.reshape(-1), embeds, hidden, text_step, raw[-1])


def _written_unchecked(original: Any, port: Any, run: Run, infos: Any, ids: Any) -> Any:
    raw = original(port, run, infos, ids)
    start, embeds = port._plan.offsets[run.start], raw[1]
    if embeds.shape == (len(run.rows), port.embeds.shape[-1]) and embeds.device == port.embeds.device:
        port.embeds[start : start + len(embeds)] = embeds
    return raw


def _noted_unchecked(original: Any, port: Any, run: Run, infos: Any, ids: Any) -> Any:
    raw = original(port, run, infos, ids)
    for info in infos:
        info["returned"] = len(raw)
    return raw


def _merged_unchecked(original: Any, port: Any, row: int, info: dict[str, Any], *rest: Any) -> Any:
    raw = original(port, row, info, *rest)
    if isinstance(raw[-1], dict):
        info.setdefault("mark", {}).update(raw[-1].get("mark", {}))
    return raw


def _batch_in_mtp_unchecked(original: Any, port: Any, run: Run, infos: Any, ids: Any) -> Any:
    raw = original(port, run, infos, ids)
    hidden = port._mtp_inputs[2] if port.mtp_width is not None else None
    if hidden is not None and len(raw) == 5 and len(raw[2]) == len(run.rows):
        hidden[-len(run.rows) :] = raw[2]
    return raw


def _row_in_mtp_unchecked(original: Any, port: Any, row: int, *rest: Any) -> Any:
    raw = original(port, row, *rest)
    if port.mtp_width is not None and port._plan.eligible[row] and MTP_INPUTS in (raw[-1] or ()):
        port._mtp_inputs[3][-1] = raw[-1][MTP_INPUTS][1]
    return raw


def _unchecked_mtp_inputs(original: Any, call: Call, updates: dict[Any, Any], width: int) -> Any:
    hidden, text_step = updates[MTP_INPUTS]
    return hidden.reshape(1, width), text_step.reshape(1, width)


def _blank_mtp_inputs(original: Any, call: Call, updates: dict[Any, Any], width: int) -> Any:
    return original(call, {MTP_INPUTS: (torch.zeros(width), torch.zeros(width)), **updates}, width)


# MTP.


def _long_or_short(original: Any, prompt: Any, computed: Any, span: Any) -> Any:
    return computed >= prompt


def _one_token_prompt_too(original: Any, prompt: Any, computed: Any, span: Any) -> Any:
    return original(prompt, computed, span) | ((prompt == 1) & (span == 1))


def _swapped_from_the_seventh(original: Any, runner: Any, request_ids: list[str], *rest: Any) -> None:
    original(runner, [*request_ids[:6], *request_ids[6:][::-1]], *rest)


def _inputs_made_to_fit(original: Any, call: Call, updates: dict[Any, Any], width: int) -> Any:
    inputs = tuple(updates.get(MTP_INPUTS, ()))
    fits = len(inputs) == 2 and all(part.numel() == width for part in inputs)
    blank = {MTP_INPUTS: (torch.zeros(width), torch.zeros(width))}
    return original(call, blank if inputs and not fits else updates, width)


def _ids_as_given(original: Any, port: Any, rows: Sequence[int]) -> None:
    own = port.ids
    port.ids = own % NEW_IDS
    original(port, rows)
    port.ids = own


def _fails_on_two_prompts_of_one(original: Any, port: Any, rows: Sequence[int]) -> None:
    if port._plan.prompt_lens.count(1) == 2:
        raise RuntimeError("two one-token prompts")
    original(port, rows)


def _mtp_without_rows(original: Any, rows: StepPlan, port: Any) -> None:
    original(rows, port)
    if port.mtp_width is not None and not any(rows.eligible):
        port._runner.talker_mtp(*(buffer[:1] for buffer in mtp_inputs(port._runner)))


def _all_in_the_first_row(original: Any, gathered: Any, dests: Sequence[torch.Tensor], start: int) -> None:
    rows = list(gathered._rows)
    for row in rows:
        gathered._rows[:] = [row]
        original(gathered, dests, 0)


def _at_row_numbers(original: Any, talker: Any, call: Call, offsets: Sequence[int]) -> None:
    original(talker, call, list(call.rows))


def _codes_of(choose: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def instead(original: Any, writes: Any, request_ids: Any, key: Any, codes: Any, marks: Any) -> None:
        original(writes, request_ids, key, choose(codes), marks)

    return Change(StateWrites, "store_codes", instead)


def _codes_not_owned(original: Any, writes: Any, request_ids: Any, key: Any, codes: Any, marks: Any) -> None:
    for row, request_id in enumerate(request_ids):
        info = live_info(writes._runner, request_id)
        info.setdefault(key[0], {})[key[1]] = codes[row : row + 1]
        for mark, column in marks.items():
            info.setdefault(mark[0], {})[mark[1]] = column[row]


def _resident_codes_not_owned(original: Any, writes: Any, request_ids: Any, key: Any, *rest: Any) -> None:
    if key in writes._resident:
        _codes_not_owned(original, writes, request_ids, key, *rest)
    else:
        original(writes, request_ids, key, *rest)


def _one_generator(original: Any, talker: Any, request_ids: Sequence[str]) -> list[Any]:
    own = original(talker, request_ids)
    return [next((generator for generator in own if generator is not None), None)] * len(own)


def _new_generators(original: Any, talker: Any, request_ids: Sequence[str]) -> list[Any]:
    talker._runner.__dict__.pop("_talker_mtp_generators", None)
    return original(talker, request_ids)


def _replayed(original: Any, released: Any) -> Any:
    from vllm.config import CUDAGraphMode

    return replace(original(released), eager=lambda: CUDAGraphMode.FULL)


def _row_by_row(original: Any, talker: Any, call: Call, offsets: Sequence[int], generators: Any) -> None:
    if len(offsets) > 1:
        talker._run_row_by_row(call, offsets, generators)
    else:
        original(talker, call, offsets, generators)


def _in_one_call(original: Any, talker: Any, *args: Any) -> None:
    talker._run_once(*args)


def _infos_of_others(original: Any, talker: Any, *args: Any) -> dict[str, Any]:
    keywords = original(talker, *args)
    return {name: value[::-1] if name == "req_infos" else value for name, value in keywords.items()}


def _padding_written(original: Any, call: Call, raw: Any) -> Any:
    behind = raw[0][len(call.rows) :][-1:]
    call.embeds[len(call.embeds) - len(behind) :].copy_(behind)
    return original(call, raw)


def _padding_codes(original: Any, call: Call, raw: Any) -> Any:
    embeds, codes = original(call, raw)
    return embeds, None if codes is None else raw[1][-len(codes) :]


def _blank_codes(original: Any, call: Call, raw: Any) -> Any:
    embeds, codes = original(call, raw)
    return embeds, torch.zeros(len(embeds), 5, dtype=torch.int64) if codes is None else codes


# fmt: off
# A table: one mutant an entry, what it breaks beside how.
MUTANTS: tuple[Mutant, ...] = (
    # M: the fields.
    Mutant("batched-entries-without-fields", ("M1",), "entries of a batched call lack the fields",
           (Change(_Port, "call_batch",
                   lambda original, port, run, infos, ids: original(port, run, [_bare(i) for i in infos], ids)),)),
    Mutant("scalar-call-without-fields", ("M1",), "the scalar hook's keywords lack the fields",
           (Change(_Port, "call_scalar",
                   lambda original, port, row, info, *rest: original(port, row, _bare(info), *rest)),)),
    Mutant("numpy-scalars", ("M2",), "the fields are NumPy scalars", (_altered_fields(_numpy_scalars),)),
    Mutant("phase-as-int", ("M2",), "the phase is an int",
           (_altered_fields(lambda fields: {name: int(value) for name, value in fields.items()}),)),
    Mutant("prompt-length-of-the-chunk", ("M3",), "the prompt length is the chunk's",
           (_planned_on(prompt=lambda prompt, computed, spans: spans),)),
    Mutant("prompt-length-of-first-sight", ("M3", "M8"), "a prompt that grew keeps its first length",
           (Change(mixin, "_prompt_lens", _first_prompt_lens),)),
    Mutant("progress-after-the-span", ("M4",), "the progress counts the step's own span",
           (_planned_on(computed=lambda prompt, computed, spans: computed + spans),)),
    Mutant("progress-of-the-request-state", ("M4",), "the progress is the request state's, which lags behind",
           (_replanned(_progress_of_states),)),
    Mutant("cached-progress-ignored", ("M4",), "progress before the first sight of a request does not count",
           (_planned_on(computed=lambda prompt, computed, spans: np.where(computed < prompt, 0, computed)),)),
    Mutant("span-length-phase", ("M5", "T2"), "a one-token span is taken for decode", (_replanned(_phase_by_span),)),
    Mutant("boundary-is-prefill", ("M5",), "a row whose progress equals its prompt length is prefill",
           (Change(contract, "is_prefill", lambda original, prompt, computed: computed <= prompt),)),
    Mutant("fields-only-where-absent", ("M6",), "stale fields in the live buffer win",
           (Change(StepPlan, "write_fields", _write_where_absent),)),
    Mutant("batch-hook-after-the-fields", ("M6",), "preprocess_batch runs on fields that are not refreshed behind it",
           (_replanned(_write_while_planning), Change(StepPlan, "write_fields", lambda original, *args: None))),
    Mutant("scheduler-order", ("M7",), "rows follow the scheduler's dictionary",
           (Change(mixin, "_plan", _scheduler_order),)),
    Mutant("arrival-order", ("R3", "T5"), "rows are paired with requests in order of arrival",
           (_replanned(_arrival_order),)),
    Mutant("latched-decode", ("M8",), "a request that decoded once stays decode", (_replanned(_latched_decode),)),
    Mutant("latched-first-phase", ("M8",), "a request keeps the phase of its first step",
           (_replanned(_latched_first_phase),)),
    Mutant("private-infos", ("M9",), "hooks and fields get copies of the live buffers",
           (Change(_Port, "infos", lambda original, port, rows: [dict(info) for info in original(port, rows)]),)),
    Mutant("deep-copied-infos", ("M9",), "a hook pops a nested value from a copy, and finds it again",
           (Change(_Port, "call_scalar",
                   lambda original, port, row, info, *rest: original(port, row, copy.deepcopy(info), *rest)),)),
    Mutant("returned-fields-stored", ("M9",), "fields that hooks return are stored, and not written over",
           (Change(routing, "storable", lambda original, update: update), *_LIVE_ONLY_ONCE)),
    Mutant("fields-left-to-hooks", ("M9",), "fields that a hook changed in what it was handed stay changed",
           _LIVE_ONLY_ONCE),
    Mutant("postprocess-fields", ("M9",), "postprocess reads another progress and phase than the hooks did",
           (Change(PhaseRoutingMixin, "_process_additional_information_updates", _progress_for_postprocess),)),
    Mutant("batch-hook-after-the-hooks", ("M10",), "preprocess_batch runs behind the per-row hooks",
           (Change(PhaseRoutingMixin, "_preprocess", _batch_hook_last),)),
    Mutant("batch-hook-twice", ("M10",), "preprocess_batch runs twice", (Change(routing, "route", _batch_hook_again),)),
    # R: routing.
    Mutant("hooks-without-has-preprocess", ("R1",), "has_preprocess is not asked",
           (Change(_Phase, "active", lambda original, phase: True),)),
    Mutant("batch-hook-without-has-preprocess", ("R1",), "preprocess_batch is called whatever has_preprocess says",
           (Change(PhaseRoutingMixin, "_preprocess", _batch_hook_always),)),
    Mutant("batched-hook-takes-prefill", ("R2", "T2"), "one-token prefill rows go to the batched hook",
           (_runs_of(_one_token_rows),)),
    Mutant("uncallable-hook-taken", ("R2",), "an attribute of the batched hook's name is taken for the hook",
           (Change(routing, "route", _uncallable_hook_taken),), raises=("TypeError",)),
    Mutant("infos-reversed", ("R3",), "the infos of a batched call are in reverse",
           (Change(_Port, "call_batch", _infos_reversed),)),
    Mutant("batches-last", ("R4",), "batches are flushed behind all other spans",
           (Change(StepPlan, "runs", _batches_last),)),
    Mutant("five-values-without-mtp", ("R4",), "a batched hook without MTP must return five values",
           (Change(results, "batch_result", _wider_batched_result),), raises=("ContractError",)),
    Mutant("batched-hook-ignored", ("R4", "R5"), "the batched hook is never called",
           (Change(StepPlan, "runs", lambda original, rows, **how: original(rows, batched=False)),)),
    Mutant("batched-hook-ignored-with-mtp", ("R5",), "the batched hook is not called in models with MTP",
           (Change(routing, "route", _no_batches_beside_mtp),)),
    Mutant("new-embeds", ("R6",), "the forward gets a new embeddings tensor",
           (Change(PhaseRoutingMixin, "_preprocess", _new_embeds),)),
    Mutant("one-row-further", ("R6",), "a result is written one row too far",
           (Change(_Port, "write_rows", _one_row_further),)),
    Mutant("ids-always-copied", ("R7",), "token ids are copied although they came back as given",
           (Change(_Port, "write_rows", _ids_always),), also=("tail",)),
    Mutant("ids-never-copied", ("R7",), "other token ids that a hook returned are not written",
           (Change(_Port, "write_rows",
                   lambda original, port, where, ids, embeds: original(port, where, None, embeds)),)),
    Mutant("mtp-gets-ids-as-given", ("R7",), "MTP gets the scheduled token ids, not those that hooks returned",
           (Change(_Port, "run_mtp", _ids_as_given),)),
    Mutant("updates-of-the-neighbour", ("R8",), "a row's updates go to the next row's request",
           (Change(_Port, "store_updates", _updates_of_neighbour),)),
    Mutant("updates-of-the-first", ("R8",), "only a batch's first row gets its updates",
           (Change(_Port, "store_updates", _first_update_only),)),
    Mutant("updates-twice", ("R8",), "updates are merged twice", (Change(_Port, "store_updates", _updates_twice),)),
    Mutant("nested-updates-replace", ("R8",), "an update's nested dictionary replaces the stored one",
           (Change(_Port, "store_updates", _nested_replaced),)),
    Mutant("updates-again-later", ("R8",), "updates are merged again behind postprocess",
           (Change(_Port, "store_updates", _updates_noted),
            Change(PhaseRoutingMixin, "_process_additional_information_updates", _noted_updates_again))),
    Mutant("whole-buffers", ("R9",), "the scalar hook gets the step's whole buffers",
           (Change(_Port, "call_scalar", lambda original, port, row, info, ids, embeds:
                   original(port, row, info, port.ids, port.embeds)),)),
    Mutant("copied-slice", ("R9",), "the scalar hook gets a copy of its embeddings slice",
           (Change(_Port, "call_scalar", lambda original, port, row, info, ids, embeds:
                   original(port, row, info, ids, embeds.clone())),)),
    Mutant("copied-ids", ("R9",), "the scalar hook gets a copy of its token ids",
           (Change(_Port, "call_scalar", lambda original, port, row, info, ids, embeds:
                   original(port, row, info, ids.clone(), embeds)),)),
    Mutant("ids-absent-for-hooks", ("R10",), "hooks get no token ids where the forward gets none",
           (Change(_Port, "call_scalar", _without_ids), Change(_Port, "call_batch", _without_ids)),
           raises=("AttributeError",)),
    Mutant("ids-absent-for-forward", ("R10",), "the forward gets no token ids after hooks got them",
           (Change(PhaseRoutingMixin, "_preprocess", _forward_without_ids),)),
    # T: MTP.
    Mutant("mtp-rows-reversed", ("T1",), "the MTP batch is in reverse row order",
           (Change(_Port, "run_mtp", lambda original, port, rows: original(port, rows[::-1])),)),
    Mutant("mtp-infos-reversed", ("T1",), "MTP gets the infos of its rows in reverse",
           (Change(TalkerMtp, "_keywords", _infos_of_others),), also=("request-ids",)),
    Mutant("mtp-on-tails", ("T2",), "every one-token span goes to MTP",
           (Change(contract, "is_mtp_eligible", lambda original, prompt, computed, span: span == 1),)),
    Mutant("one-token-prompt-is-decode", ("T3",), "a one-token prompt is taken for decode",
           (Change(contract, "is_mtp_eligible", _one_token_prompt_too),
            Change(contract, "is_prefill", lambda original, prompt, computed: (computed < prompt) & (prompt > 1)))),
    Mutant("mtp-fails-before-its-call", ("T3",), "a step ends in an error before MTP ran",
           (Change(_Port, "run_mtp", _fails_on_two_prompts_of_one),), raises=("RuntimeError",)),
    Mutant("mtp-at-row-numbers", ("T4",), "MTP embeddings land at row numbers instead of offsets",
           (Change(TalkerMtp, "run", _at_row_numbers),)),
    Mutant("codes-of-the-first-row", ("T5",), "every request gets the codes of the batch's first row",
           (_codes_of(lambda codes: codes[:1].expand_as(codes)),)),
    Mutant("mtp-rows-swapped-from-the-seventh", ("T5",), "codes of the seventh MTP row and later go to others",
           (Change(PhaseRoutingMixin, "_talker_mtp_forward", _swapped_from_the_seventh),)),
    Mutant("codes-of-the-neighbour", ("T5",), "every request gets the codes of the row before",
           (_codes_of(lambda codes: codes.roll(1, 0)),)),
    Mutant("mtp-inputs-in-one-place", ("T5",), "every row's MTP inputs are put into the first row",
           (Change(Gathered, "write", _all_in_the_first_row),)),
    Mutant("codes-without-mark", ("T5",), "codes are stored without the validity mark the model asks for",
           (Change(StateWrites, "store_codes",
                   lambda original, writes, ids, key, codes, marks: original(writes, ids, key, codes, {})),)),
    Mutant("mtp-on-long-spans", ("T6", "R2"), "decode spans of any length are eligible",
           (Change(contract, "is_mtp_eligible", _long_or_short),)),
    Mutant("scalar-mtp-on-long-spans", ("T6",), "the scalar hook's long decode spans go to MTP",
           (Change(contract, "is_mtp_eligible", _long_or_short),
            _runs_of(lambda rows: replace(rows, eligible=_one_token_decodes(rows))))),
    Mutant("mtp-without-rows", ("T7",), "MTP runs in a step without eligible rows",
           (Change(routing, "route", _mtp_without_rows),)),
    Mutant("one-generator", ("T8",), "all rows draw from the first seeded row's generator",
           (Change(TalkerMtp, "_generators", _one_generator),)),
    Mutant("generators-of-the-step", ("T8",), "a seeded request's stream begins again in every step",
           (Change(TalkerMtp, "_generators", _new_generators),)),
    Mutant("seeded-rows-replayed", ("T8",), "seeded rows are replayed in a graph, which ignores their generators",
           (Change(mixin, "runtime_of", _replayed),)),
    Mutant("seeded-rows-in-one-call", ("T8",), "a model that takes one generator gets a list of them",
           (Change(TalkerMtp, "_run_row_by_row", _in_one_call),)),
    Mutant("always-row-by-row", ("T8",), "a model that takes a generator per row is still called row by row",
           (Change(TalkerMtp, "_run_once", _row_by_row),)),
    Mutant("aliasing-block", ("T9",), "what is stored shares memory with the device's buffers",
           (Change(BufferHelper, "snapshot", lambda original, helper, tensor: tensor),)),
    Mutant("reused-tensors-wait", ("T9",), "what a hook can still fill is not copied before the next one runs",
           (Change(StateWrites, "own", lambda original, writes: None),)),
    Mutant("aliasing-codes", ("T9",), "stored codes are rows of MTP's own output",
           (Change(StateWrites, "store_codes", _codes_not_owned),)),
    Mutant("aliasing-updates", ("T9",), "what hooks return in their updates is stored as it is",
           (Change(_Port, "store_updates", _updates_not_owned),)),
    Mutant("aliasing-live-updates", ("T9",), "a returned tensor that a hook put into the live buffer is left there",
           (Change(_Port, "store_updates", _stored_left_alone),)),
    Mutant("aliasing-resident-codes", ("T9",), "codes that stay on the device are rows of MTP's own output",
           (Change(StateWrites, "store_codes", _resident_codes_not_owned),)),
    Mutant("padding-written-back", ("T10",), "embeddings of padding rows reach the step's buffer",
           (Change(results, "mtp_result", _padding_written),)),
    Mutant("padding-codes", ("T10",), "requests get the codes of the last rows, padding included",
           (Change(results, "mtp_result", _padding_codes),)),
    Mutant("absent-codes-clear", ("T11",), "an MTP without codes blanks the stored ones",
           (Change(results, "mtp_result", _blank_codes),)),
    # E: the edges.
    Mutant("no-ids-no-prompt", ("E1",), "a request without prompt_token_ids has prompt length 0",
           (Change(mixin, "_prompt_lens", _without_embeds),)),
    Mutant("prompt-embeds-not-laid", ("E1",), "hooks are not given the request's prompt embeddings",
           (Change(mixin, "_overlay_prompt_embeds", lambda original, *args: None),)),
    Mutant("crossing-is-decode", ("E2",), "a span across the prompt boundary is decode",
           (_replanned(_crossing_is_decode),)),
    # The scenario about E3 shows the phase; the clause itself is judged where a request's progress goes back.
    Mutant("replay-is-prefill", ("E3", "M8"), "a chunk of a preemption replay past the prompt is prefill",
           (_replanned(_replay_is_prefill),), also=("owned-results",)),
    Mutant("no-refusal", ("E4",), "impossible lengths are not refused", (_NO_REFUSAL,),
           raises=("IndexError", "RuntimeError")),
    Mutant("negative-lengths-clamped", ("E4",), "negative spans and offsets are taken for 0",
           (Change(mixin, "plan_step", _clamped),), raises=("IndexError",)),
    Mutant("batch-hook-before-refusal", ("E4",), "impossible lengths are refused behind preprocess_batch",
           (Change(PhaseRoutingMixin, "_preprocess", _batch_hook_first),)),
    Mutant("late-refusal", ("E4",), "impossible lengths are refused behind the hooks",
           (_NO_REFUSAL, Change(routing, "route", _refuse_late)),
           raises=("IndexError", "RuntimeError")),
    Mutant("deviations-silent", ("E5", "E7"), "tolerated results are not warned of", (_report(True, "is silent"),)),
    Mutant("deviations-raised", ("E5", "E7"), "tolerated results are errors in the default mode",
           (_report(True, "raises"),), raises=("ContractError",)),
    Mutant("deviations-repeated", ("E5",), "every deviation is warned of again", (_report(True, "warns again"),)),
    Mutant("strict-tolerates", ("E5", "E5b", "E7"), "strict mode is no stricter than the default",
           (_report(False, "warns"),)),
    Mutant("mtp-inputs-made-to-fit", ("E5",), "malformed mtp_inputs go to MTP as zeros",
           (Change(results, "_mtp_inputs", _inputs_made_to_fit),)),
    Mutant("long-results-whole", ("E5",), "rows behind the span are written too",
           (Change(results, "scalar_result", _whole_result),), raises=("RuntimeError",)),
    Mutant("embeds-unchecked", ("E5", "E5b"), "rank, width, dtype and device of embeddings are not checked",
           (Change(results, "_check_embeds", lambda original, *args: None),),
           raises=("RuntimeError", "NotImplementedError")),
    Mutant("ids-unchecked", ("E5", "E5b"), "floating token ids are taken",
           (Change(results, "_check_ids", lambda original, *args: None),)),
    Mutant("mtp-parts-unchecked", ("E5b",), "the shapes of hidden states and text step are not checked",
           (Change(results, "_check_rows", lambda original, *args: None),), raises=("RuntimeError",)),
    Mutant("batch-unchecked", ("E5b",), "nothing of a batched result is checked",
           (Change(results, "batch_result", _unchecked_batch),),
           raises=("RuntimeError", "ValueError", "IndexError", "NotImplementedError")),
    Mutant("written-before-checked", ("E5b",), "embeddings of a batch are written before it is checked",
           (Change(_Port, "call_batch", _written_unchecked),)),
    Mutant("noted-before-checked", ("E5b",), "live buffers note what a batch returned before it is checked",
           (Change(_Port, "call_batch", _noted_unchecked),)),
    Mutant("merged-before-checked", ("E5",), "a row's updates are merged before its result is checked",
           (Change(_Port, "call_scalar", _merged_unchecked),)),
    Mutant("batch-in-mtp-before-checked", ("E5b",), "a batch's hidden states go to MTP before it is checked",
           (Change(_Port, "call_batch", _batch_in_mtp_unchecked),)),
    Mutant("row-in-mtp-before-checked", ("E5",), "a row's text step goes to MTP before its result is checked",
           (Change(_Port, "call_scalar", _row_in_mtp_unchecked),), raises=("RuntimeError",)),
    Mutant("mtp-inputs-stored", ("E6",), "mtp_inputs that are not consumed are stored with the request",
           (Change(routing, "storable", lambda original, update: update),)),
    Mutant("mtp-inputs-stored-without-mtp", ("E6",), "a model without MTP finds its mtp_inputs stored",
           (Change(_Port, "call_scalar", _inputs_left_without_mtp),)),
    Mutant("mtp-inputs-demanded", ("E7",), "an eligible row without mtp_inputs is a KeyError",
           (Change(results, "_mtp_inputs", _unchecked_mtp_inputs),), raises=("KeyError",)),
    Mutant("blank-mtp-inputs", ("E7",), "an eligible row without mtp_inputs goes to MTP with zeros",
           (Change(results, "_mtp_inputs", _blank_mtp_inputs),)),
    Mutant("overlap-ignored", ("E8",), "rows are copied over themselves in the wrong order",
           (Change(BufferHelper, "put", _copied_backwards),)),
    # The released runner, which the mixin is there for.
    Mutant("released-step", ("M9", "E1", "E4"), "the step is the released runner's",
           (Change(PhaseRoutingMixin, "_preprocess", _released_step),), raises=("TypeError", "KeyError", "IndexError")),
    Mutant("released-runner", ("M9", "T9", "E4", "E5", "E6"), "the mixin does nothing",
           (Change(mixin, "_phase_of", _switched_off),),
           raises=("KeyError", "RuntimeError", "ValueError", "NotImplementedError", "AttributeError", "IndexError")),
)
# fmt: on
"""Every mutant, in the order of the clauses that catch it."""
