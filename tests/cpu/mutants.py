# SPDX-License-Identifier: Apache-2.0
"""Mutants: broken versions of the package, each with the clauses that must notice.

A guard is worth what it catches. A mutant changes public functions and methods of the package, so that moving a private
one costs nothing here, for as long as a test runs. A replacement is called with the original first, and keeps what it
must remember on the runner, port or live buffers that it breaks.
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

from omni_npu_phase import contract
from omni_npu_phase.buffers.base import BufferHelper
from omni_npu_phase.conformance.recording_model import NEW_IDS
from omni_npu_phase.contract import FIELDS, MTP_INPUTS, ContractError
from omni_npu_phase.releases import Runtime
from omni_npu_phase.step import results
from omni_npu_phase.step import v1 as mixin
from omni_npu_phase.step.live import LiveBuffers
from omni_npu_phase.step.mtp import TalkerMtp, mtp_inputs
from omni_npu_phase.step.plan import Run, StepPlan
from omni_npu_phase.step.replay import Kept, Replay
from omni_npu_phase.step.results import Call, Deviations
from omni_npu_phase.step.v1 import PhaseRoutingMixin, RunnerPort


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
    return Change(mixin, "plan_of", lambda original, runner, *rest: alter(runner, original(runner, *rest)))


def _phase_by_span(runner: Any, rows: StepPlan) -> StepPlan:
    one_token = [span == 1 for span in rows.spans]
    return replace(rows, prefill=[not one for one in one_token], eligible=one_token)


def _boundary_is_prefill(runner: Any, rows: StepPlan) -> StepPlan:
    return replace(rows, prefill=[c <= p for p, c in zip(rows.prompt_lens, rows.num_computed, strict=True)])


def _one_token_prompt_is_decode(runner: Any, rows: StepPlan) -> StepPlan:
    prefill = [first and length > 1 for length, first in zip(rows.prompt_lens, rows.prefill, strict=True)]
    return replace(rows, prefill=prefill, eligible=_one_token_decodes(replace(rows, prefill=prefill)))


def _long_or_short(runner: Any, rows: StepPlan) -> StepPlan:
    return replace(rows, eligible=[not prefill for prefill in rows.prefill])


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


def _unrefused(original: Any, ids: Any, prompt: Any, computed: Any, spans: Any, offsets: Any, **keywords: Any) -> Any:
    prompt, computed, spans, offsets = (list(map(int, values)) for values in (prompt, computed, spans, offsets))
    prefill = [c < p for p, c in zip(prompt, computed, strict=True)]
    eligible = [s == 1 and not first for s, first in zip(spans, prefill, strict=True)]
    return StepPlan(ids, prompt, computed, spans, offsets, prefill, eligible)


def _refuse_late(original: Any, rows: StepPlan, port: Any) -> None:
    original(rows, port)
    for row, request in enumerate(rows.request_ids):
        if rows.num_computed[row] < 0 or rows.offsets[row] + rows.spans[row] > len(port.embeds):
            raise ContractError("E4", requests=[request], rows=[row], expected="lengths in range", actual="others")


_NO_REFUSAL = Change(mixin, "plan_step", _unrefused)


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
        info = runner.model_intermediate_buffer.setdefault(request, {})
        info.update(zip(FIELDS, (rows.prompt_lens[row], rows.num_computed[row], rows.prefill[row]), strict=True))
    return rows


def _progress_for_postprocess(original: Any, runner: Any, *args: Any) -> None:
    for request in runner.input_batch.req_ids:
        runner.model_intermediate_buffer[request].update({contract.NUM_COMPUTED: 99, contract.IS_PREFILL: None})
    original(runner, *args)


def _live_only_once(original: Any, port: Any, rows: Sequence[int]) -> list[dict[str, Any]]:
    given = port.__dict__.setdefault("_given", set())
    again = given.issuperset(rows)
    given.update(rows)
    return [dict(info) if again else info for info in original(port, rows)]


_LIVE_ONLY_ONCE = Change(RunnerPort, "infos", _live_only_once)


def _bare(info: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in info.items() if name not in FIELDS}


def _infos_reversed(original: Any, port: Any, run: Run, infos: list[dict[str, Any]], ids: Any) -> Any:
    return port.model.preprocess_decode_batch(input_ids=ids, req_infos=infos[::-1])


def _without_ids(original: Any, port: Any, row: Any, infos: Any, ids: Any, *rest: Any) -> Any:
    # With prompt embeddings enabled, the released runner selects no token ids.
    return original(port, row, infos, None if port.runner.enable_prompt_embeds else ids, *rest)


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


def _hooks_always(original: Any, runner: Any, *args: Any) -> Any:
    own, runner.model.has_preprocess = runner.model.has_preprocess, True
    try:
        return original(runner, *args)
    finally:
        runner.model.has_preprocess = own


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
        _call_batch_hook(port.runner, port.model.preprocess_batch)
    original(rows, port)


def _released_step(original: Any, runner: Any, *args: Any) -> Any:
    return super(PhaseRoutingMixin, runner)._preprocess(*args)


def _switched_off(original: Any, runner: Any) -> Any:
    phase = original(runner)
    phase.mode = "off"
    return phase


# Exact replay.


def _whole_plan(original: Any, replay: Any, plan: StepPlan, buffer_rows: int) -> StepPlan:
    original(replay, plan, buffer_rows)
    return plan


def _ids_left(original: Any, replay: Any, plan: StepPlan, ids: torch.Tensor, embeds: torch.Tensor) -> None:
    original(replay, plan, ids.clone(), embeds)


def _kept_early(original: Any, rows: StepPlan, port: Any) -> None:
    run_mtp = port.run_mtp

    def late(in_mtp: Sequence[int]) -> None:
        port.runner.__dict__["_before_mtp"] = port.embeds.clone()
        run_mtp(in_mtp)

    port.run_mtp = late
    original(rows, port)
    port.embeds.__dict__["_before_mtp"] = port.runner.__dict__.pop("_before_mtp", None)


def _kept_then(original: Any, replay: Any, rows: StepPlan, ids: torch.Tensor, embeds: torch.Tensor) -> None:
    before = embeds.__dict__.get("_before_mtp")
    original(replay, rows, ids, embeds if before is None else before)


def _one_off(original: Any, own: Kept, start: int, stop: int) -> list[int]:
    places = original(own, start, stop)
    return [max(place - 1, 0) for place in places]


def _long_new_parts(original: Any, replay: Any, plan: StepPlan, buffer_rows: int) -> StepPlan:
    new = original(replay, plan, buffer_rows)
    return replace(
        new,
        eligible=[
            one and request not in replay.given for one, request in zip(new.eligible, new.request_ids, strict=True)
        ],
    )


def _over_a_gap(original: Any, own: Kept, state: Any, prompt: Any, prompt_len: int, computed: int) -> bool:
    own.count = max(own.count, computed)
    return original(own, state, prompt, prompt_len, computed)


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
    original(port, [(row + 1) % len(port.plan) for row in rows], updates)


def _first_update_only(original: Any, port: Any, rows: Sequence[int], updates: Any) -> None:
    original(port, rows[:1], updates[:1])


def _updates_not_owned(original: Any, port: Any, rows: Sequence[int], updates: Any) -> None:
    for info, update in zip(port.infos(rows), updates, strict=True):
        for name, value in update.items():
            if isinstance(value, dict):
                info.setdefault(name, {}).update(value)
            else:
                info[name] = value


def _returned_fields_stored(original: Any, port: Any, rows: Sequence[int], updates: Any) -> None:
    original(port, rows, updates)
    for info, update in zip(port.infos(rows), updates, strict=True):
        info.update({name: update[name] for name in FIELDS if name in update})


def _inputs_stored(original: Any, port: Any, rows: Sequence[int], updates: Any) -> None:
    original(port, rows, updates)
    for info, update in zip(port.infos(rows), updates, strict=True):
        info.update({MTP_INPUTS: update[MTP_INPUTS]} if MTP_INPUTS in update else {})


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
    port.runner.__dict__.setdefault("_noted_updates", []).append((port.plan, rows, updates))


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
    return (len(raw[1]), result[1], raw[1], *result[3:]) if len(raw[1]) > keywords["span"] else result


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


def _unchecked_batch(original: Any, call: Call, raw: Any, *, given_ids: Any, mtp_width: int | None) -> Any:
    ids, embeds = raw[0], raw[1]
    hidden, text_step = (raw[2], raw[3]) if mtp_width is not None else (None, None)
    return None if ids is given_ids else ids.reshape(-1), embeds, hidden, text_step, raw[-1]


def _refused(original: Any, call: Call, clause: str, name: str, *rest: Any, **keywords: Any) -> Any:
    raise call.error(clause, f"{name} as the contract has it", "others")


def _zeros(original: Any, call: Call, *args: Any, **keywords: Any) -> Any:
    return original(call, *args, **keywords).zero_()


def _given_to_mtp(alter: Callable[[Any, int], Any]) -> Change:
    """The MTP inputs of an eligible row as ``alter(what the hook gave, width)`` makes them, before they are checked."""

    def instead(original: Any, call: Call, raw: Any, *, mtp_width: int | None, **keywords: Any) -> Any:
        if mtp_width is not None and isinstance(raw[-1], dict):
            raw = (*raw[:-1], {**raw[-1], MTP_INPUTS: alter(raw[-1], mtp_width)})
        return original(call, raw, mtp_width=mtp_width, **keywords)

    return Change(results, "scalar_result", instead)


def _written_unchecked(original: Any, port: Any, run: Run, infos: Any, ids: Any) -> Any:
    raw = original(port, run, infos, ids)
    start, embeds = port.plan.offsets[run.rows[0]], raw[1]
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
    hidden = mtp_inputs(port.runner)[2] if port.mtp_width is not None else None
    if hidden is not None and len(raw) == 5 and len(raw[2]) == len(run.rows):
        hidden[-len(run.rows) :] = raw[2]
    return raw


def _row_in_mtp_unchecked(original: Any, port: Any, row: int, *rest: Any) -> Any:
    raw = original(port, row, *rest)
    if port.mtp_width is not None and port.plan.eligible[row] and MTP_INPUTS in (raw[-1] or ()):
        mtp_inputs(port.runner)[3][-1] = raw[-1][MTP_INPUTS][1]
    return raw


def _blank(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, width), torch.zeros(1, width)


# MTP.


def _swapped_from_the_seventh(original: Any, runner: Any, request_ids: list[str], *rest: Any) -> None:
    original(runner, [*request_ids[:6], *request_ids[6:][::-1]], *rest)


def _made_to_fit(updates: dict[Any, Any], width: int) -> Any:
    inputs = updates.get(MTP_INPUTS)
    fits = inputs is None or (len(inputs) == 2 and all(part.numel() == width for part in inputs))
    return inputs if fits else _blank(width)


def _mtp_reversed(original: Any, port: Any, rows: Sequence[int]) -> None:
    for buffer in mtp_inputs(port.runner):
        buffer[: len(rows)] = buffer[: len(rows)].flip(0)
    original(port, rows[::-1])


def _ids_as_given(original: Any, runner: Any, *args: Any) -> None:
    mtp_inputs(runner)[0].remainder_(NEW_IDS)
    original(runner, *args)


def _fails_on_two_prompts_of_one(original: Any, port: Any, rows: Sequence[int]) -> None:
    if port.plan.prompt_lens.count(1) == 2:
        raise RuntimeError("two one-token prompts")
    original(port, rows)


def _mtp_without_rows(original: Any, rows: StepPlan, port: Any) -> None:
    original(rows, port)
    if port.mtp_width is not None and not any(rows.eligible):
        port.runner.talker_mtp(*(buffer[:1] for buffer in mtp_inputs(port.runner)))


def _at_row_numbers(original: Any, talker: Any, call: Call, offsets: Sequence[int], *rest: Any) -> None:
    original(talker, call, list(range(len(call.requests))), *rest)


def _codes_of(choose: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def instead(original: Any, live: Any, request_ids: Any, key: Any, codes: Any, marks: Any) -> None:
        original(live, request_ids, key, choose(codes), marks)

    return Change(LiveBuffers, "store_codes", instead)


def _codes_not_owned(original: Any, live: Any, request_ids: Any, key: Any, codes: Any, marks: Any) -> None:
    original(live, request_ids, key, codes, marks)
    for row, info in enumerate(live.of(request_ids)):
        info[key[0]][key[1]] = codes[row : row + 1]


def _codes_of_the_next_call(original: Any, live: Any, request_ids: Any, key: Any, codes: Any, marks: Any) -> None:
    """Codes copied together with those of the next MTP call, as where a block of writes ends with the step."""
    _codes_not_owned(original, live, request_ids, key, codes, marks)
    live.__dict__.setdefault("_held", []).append(lambda: original(live, request_ids, key, codes, marks))


def _resident_codes_not_owned(original: Any, runner: Any, request_ids: Sequence[str], *rest: Any) -> None:
    original(runner, request_ids, *rest)
    if ("codes", "audio") in runner.model.gpu_resident_buffer_keys:
        for row, request_id in enumerate(request_ids):
            runner.model_intermediate_buffer[request_id]["codes"]["audio"] = runner.model.mtp_codes[row : row + 1]


def _held_until_the_end(original: Any, live: Any, request_ids: Any, updates: Any) -> None:
    live.__dict__.setdefault("_held", []).append(lambda: original(live, list(request_ids), list(updates)))


def _held_are_stored(original: Any, live: Any, *error: Any) -> None:
    for store in live.__dict__.pop("_held", ()):
        store()
    original(live, *error)


def _deep_values_not_owned(original: Any, live: Any, request_ids: Any, updates: Any) -> None:
    original(live, request_ids, updates)
    for info, update in zip(live.of(request_ids), updates, strict=True):
        for key, group in update.items():
            if isinstance(group, dict):
                deep = {name: value for name, value in group.items() if isinstance(value, (dict, list, tuple))}
                info[key].update(deep)


def _updates_after_the_rows(original: Any, port: Any, rows: Sequence[int], updates: Any) -> None:
    port.__dict__.setdefault("_waiting", []).append((original, rows, updates))


def _rows_before_updates(original: Any, port: Any, *args: Any) -> None:
    original(port, *args)
    for store, rows, updates in port.__dict__.pop("_waiting", ()):
        store(port, rows, updates)


def _stored_before_refused(original: Any, live: Any, request_ids: Any, updates: Any) -> None:
    for request_id, update in zip(request_ids, updates, strict=True):
        original(live, (request_id,), (update,))


def _filled_backwards(original: Any, talker: Any, position: int, count: int, parts: Sequence[Any]) -> None:
    for buffer, part in zip(talker.inputs, parts, strict=True):
        _copied_backwards(None, None, buffer, slice(position, position + count), part)


def _made_anew(original: Any, port: Any, rows: Sequence[int]) -> Any:
    buffers = port.runner.model_intermediate_buffer
    for row in rows:
        if not isinstance(buffers.get(port.plan.request_ids[row]), dict):
            buffers[port.plan.request_ids[row]] = {}
    return original(port, rows)


def _one_generator(original: Any, runner: Any, request_ids: Sequence[str], *rest: Any) -> None:
    known = runner.__dict__.setdefault("_talker_mtp_generators", {})
    shared = known.setdefault("shared", torch.Generator().manual_seed(11))
    known.update(dict.fromkeys(request_ids, shared))
    original(runner, request_ids, *rest)


def _new_generators(original: Any, runner: Any, *args: Any) -> None:
    runner.__dict__.pop("_talker_mtp_generators", None)
    original(runner, *args)


def _full_graph(original: Any, runtime: Any) -> Any:
    from vllm.config import CUDAGraphMode

    return CUDAGraphMode.FULL


class _Claiming:
    """A model that claims to take a generator per row, or not, whatever is true."""

    def __init__(self, model: Any, per_row: bool) -> None:
        self.model, self.talker_mtp_accepts_per_row_generators = model, per_row

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def _claiming(per_row: bool) -> Change:
    def instead(original: Any, talker: Any, call: Call, *rest: Any) -> None:
        original(talker, replace(call, model=_Claiming(call.model, per_row)), *rest)

    return Change(TalkerMtp, "run", instead)


def _infos_of_others(original: Any, runner: Any, *args: Any) -> None:
    own = runner.talker_mtp
    runner.talker_mtp = lambda *inputs, req_infos=(), **keywords: own(*inputs, req_infos=req_infos[::-1], **keywords)
    original(runner, *args)
    runner.talker_mtp = own


def _padding_written(original: Any, call: Call, raw: Any, **keywords: Any) -> Any:
    behind = raw[0][len(call.requests) :][-1:]
    call.embeds[len(call.embeds) - len(behind) :].copy_(behind)
    return original(call, raw, **keywords)


def _padding_codes(original: Any, call: Call, raw: Any, **keywords: Any) -> Any:
    embeds, codes = original(call, raw, **keywords)
    return embeds, None if codes is None else raw[1][-len(codes) :]


def _blank_codes(original: Any, call: Call, raw: Any, **keywords: Any) -> Any:
    embeds, codes = original(call, raw, **keywords)
    return embeds, torch.zeros(len(embeds), 5, dtype=torch.int64) if codes is None else codes


# fmt: off
# A table: one mutant an entry, what it breaks beside how.
MUTANTS: tuple[Mutant, ...] = (
    # M: the fields.
    Mutant("batched-entries-without-fields", ("M1",), "entries of a batched call lack the fields",
           (Change(RunnerPort, "call_batch",
                   lambda original, port, run, infos, ids: original(port, run, [_bare(i) for i in infos], ids)),)),
    Mutant("scalar-call-without-fields", ("M1",), "the scalar hook's keywords lack the fields",
           (Change(RunnerPort, "call_scalar",
                   lambda original, port, row, info, *rest: original(port, row, _bare(info), *rest)),)),
    Mutant("numpy-scalars", ("M2",), "the fields are NumPy scalars", (_altered_fields(_numpy_scalars),)),
    Mutant("phase-as-int", ("M2",), "the phase is an int",
           (_altered_fields(lambda fields: {name: int(value) for name, value in fields.items()}),)),
    Mutant("prompt-length-of-the-chunk", ("M3",), "the prompt length is the chunk's",
           (_planned_on(prompt=lambda prompt, computed, spans: spans),)),
    Mutant("prompt-length-of-first-sight", ("M3", "M8"), "a prompt that grew keeps its first length",
           (Change(mixin, "prompt_lens_of", _first_prompt_lens),)),
    Mutant("progress-after-the-span", ("M4",), "the progress counts the step's own span",
           (_planned_on(computed=lambda prompt, computed, spans: computed + spans),)),
    Mutant("progress-of-the-request-state", ("M4",), "the progress is the request state's, which lags behind",
           (_replanned(_progress_of_states),)),
    Mutant("cached-progress-ignored", ("M4",), "progress before the first sight of a request does not count",
           (_planned_on(computed=lambda prompt, computed, spans: np.where(computed < prompt, 0, computed)),)),
    Mutant("span-length-phase", ("M5", "T2"), "a one-token span is taken for decode", (_replanned(_phase_by_span),)),
    Mutant("boundary-is-prefill", ("M5",), "a row whose progress equals its prompt length is prefill",
           (_replanned(_boundary_is_prefill),)),
    Mutant("fields-only-where-absent", ("M6",), "stale fields in the live buffer win",
           (Change(StepPlan, "write_fields", _write_where_absent),)),
    Mutant("batch-hook-after-the-fields", ("M6",), "preprocess_batch runs on fields that are not refreshed behind it",
           (_replanned(_write_while_planning), Change(StepPlan, "write_fields", lambda original, *args: None))),
    Mutant("scheduler-order", ("M7",), "rows follow the scheduler's dictionary",
           (Change(mixin, "plan_of", _scheduler_order),)),
    Mutant("arrival-order", ("R3", "T5"), "rows are paired with requests in order of arrival",
           (_replanned(_arrival_order),)),
    Mutant("latched-decode", ("M8",), "a request that decoded once stays decode", (_replanned(_latched_decode),)),
    Mutant("latched-first-phase", ("M8",), "a request keeps the phase of its first step",
           (_replanned(_latched_first_phase),)),
    Mutant("private-infos", ("M9",), "hooks and fields get copies of the live buffers",
           (Change(RunnerPort, "infos", lambda original, port, rows: [dict(info) for info in original(port, rows)]),)),
    Mutant("deep-copied-infos", ("M9",), "a hook pops a nested value from a copy, and finds it again",
           (Change(RunnerPort, "call_scalar",
                   lambda original, port, row, info, *rest: original(port, row, copy.deepcopy(info), *rest)),)),
    Mutant("returned-fields-stored", ("M9",), "fields that hooks return are stored, and not written over",
           (Change(RunnerPort, "store_updates", _returned_fields_stored), _LIVE_ONLY_ONCE)),
    Mutant("fields-left-to-hooks", ("M9",), "fields that a hook changed in what it was handed stay changed",
           (_LIVE_ONLY_ONCE,)),
    Mutant("postprocess-fields", ("M9",), "postprocess reads another progress and phase than the hooks did",
           (Change(PhaseRoutingMixin, "_process_additional_information_updates", _progress_for_postprocess),)),
    Mutant("batch-hook-after-the-hooks", ("M10",), "preprocess_batch runs behind the per-row hooks",
           (Change(PhaseRoutingMixin, "_preprocess", _batch_hook_last),)),
    Mutant("batch-hook-twice", ("M10",), "preprocess_batch runs twice", (Change(mixin, "route", _batch_hook_again),)),
    # R: routing.
    Mutant("hooks-without-has-preprocess", ("R1",), "has_preprocess is not asked",
           (Change(PhaseRoutingMixin, "_preprocess", _hooks_always),)),
    Mutant("batch-hook-without-has-preprocess", ("R1",), "preprocess_batch is called whatever has_preprocess says",
           (Change(PhaseRoutingMixin, "_preprocess", _batch_hook_always),)),
    Mutant("batched-hook-takes-prefill", ("R2", "T2"), "one-token prefill rows go to the batched hook",
           (_runs_of(_one_token_rows),)),
    Mutant("uncallable-hook-taken", ("R2",), "an attribute of the batched hook's name is taken for the hook",
           (Change(mixin, "route", _uncallable_hook_taken),), raises=("TypeError",)),
    Mutant("infos-reversed", ("R3",), "the infos of a batched call are in reverse",
           (Change(RunnerPort, "call_batch", _infos_reversed),)),
    Mutant("batches-last", ("R4",), "batches are flushed behind all other spans",
           (Change(StepPlan, "runs", _batches_last),)),
    Mutant("five-values-without-mtp", ("R4",), "a batched hook without MTP must return five values",
           (Change(results, "batch_result", _wider_batched_result),), raises=("ContractError",)),
    Mutant("batched-hook-ignored", ("R4", "R5"), "the batched hook is never called",
           (Change(StepPlan, "runs", lambda original, rows, **how: original(rows, batched=False)),)),
    Mutant("batched-hook-ignored-with-mtp", ("R5",), "the batched hook is not called in models with MTP",
           (Change(mixin, "route", _no_batches_beside_mtp),)),
    Mutant("new-embeds", ("R6",), "the forward gets a new embeddings tensor",
           (Change(PhaseRoutingMixin, "_preprocess", _new_embeds),)),
    Mutant("one-row-further", ("R6",), "a result is written one row too far",
           (Change(RunnerPort, "write_rows", _one_row_further),)),
    Mutant("ids-always-copied", ("R7",), "token ids are copied although they came back as given",
           (Change(RunnerPort, "write_rows", _ids_always),), also=("tail",)),
    Mutant("ids-never-copied", ("R7",), "other token ids that a hook returned are not written",
           (Change(RunnerPort, "write_rows",
                   lambda original, port, where, ids, embeds: original(port, where, None, embeds)),)),
    Mutant("mtp-gets-ids-as-given", ("R7",), "MTP gets the scheduled token ids, not those that hooks returned",
           (Change(PhaseRoutingMixin, "_talker_mtp_forward", _ids_as_given),)),
    Mutant("updates-of-the-neighbour", ("R8",), "a row's updates go to the next row's request",
           (Change(RunnerPort, "store_updates", _updates_of_neighbour),)),
    Mutant("updates-of-the-first", ("R8",), "only a batch's first row gets its updates",
           (Change(RunnerPort, "store_updates", _first_update_only),)),
    Mutant("updates-twice", ("R8",), "updates are merged twice",
           (Change(RunnerPort, "store_updates", _updates_twice),)),
    Mutant("nested-updates-replace", ("R8",), "an update's nested dictionary replaces the stored one",
           (Change(RunnerPort, "store_updates", _nested_replaced),)),
    Mutant("updates-again-later", ("R8",), "updates are merged again behind postprocess",
           (Change(RunnerPort, "store_updates", _updates_noted),
            Change(PhaseRoutingMixin, "_process_additional_information_updates", _noted_updates_again))),
    Mutant("whole-buffers", ("R9",), "the scalar hook gets the step's whole buffers",
           (Change(RunnerPort, "call_scalar", lambda original, port, row, info, ids, embeds:
                   original(port, row, info, port.ids, port.embeds)),)),
    Mutant("copied-slice", ("R9",), "the scalar hook gets a copy of its embeddings slice",
           (Change(RunnerPort, "call_scalar", lambda original, port, row, info, ids, embeds:
                   original(port, row, info, ids, embeds.clone())),)),
    Mutant("copied-ids", ("R9",), "the scalar hook gets a copy of its token ids",
           (Change(RunnerPort, "call_scalar", lambda original, port, row, info, ids, embeds:
                   original(port, row, info, ids.clone(), embeds)),)),
    Mutant("ids-absent-for-hooks", ("R10",), "hooks get no token ids where the forward gets none",
           (Change(RunnerPort, "call_scalar", _without_ids), Change(RunnerPort, "call_batch", _without_ids)),
           raises=("AttributeError",)),
    Mutant("ids-absent-for-forward", ("R10",), "the forward gets no token ids after hooks got them",
           (Change(PhaseRoutingMixin, "_preprocess", _forward_without_ids),)),
    # T: MTP.
    Mutant("mtp-rows-reversed", ("T1",), "the MTP batch is in reverse row order",
           (Change(RunnerPort, "run_mtp", _mtp_reversed),)),
    Mutant("mtp-infos-reversed", ("T1",), "MTP gets the infos of its rows in reverse",
           (Change(PhaseRoutingMixin, "_talker_mtp_forward", _infos_of_others),), also=("request-ids",)),
    Mutant("mtp-on-tails", ("T2",), "every one-token span goes to MTP",
           (_replanned(lambda runner, rows: _one_token_rows(rows)),)),
    Mutant("one-token-prompt-is-decode", ("T3",), "a one-token prompt is taken for decode",
           (_replanned(_one_token_prompt_is_decode),)),
    Mutant("mtp-fails-before-its-call", ("T3",), "a step ends in an error before MTP ran",
           (Change(RunnerPort, "run_mtp", _fails_on_two_prompts_of_one),), raises=("RuntimeError",)),
    Mutant("mtp-at-row-numbers", ("T4",), "MTP embeddings land at row numbers instead of offsets",
           (Change(TalkerMtp, "run", _at_row_numbers),)),
    Mutant("codes-of-the-first-row", ("T5",), "every request gets the codes of the batch's first row",
           (_codes_of(lambda codes: codes[:1].expand_as(codes)),)),
    Mutant("mtp-rows-swapped-from-the-seventh", ("T5",), "codes of the seventh MTP row and later go to others",
           (Change(PhaseRoutingMixin, "_talker_mtp_forward", _swapped_from_the_seventh),)),
    Mutant("codes-of-the-neighbour", ("T5",), "every request gets the codes of the row before",
           (_codes_of(lambda codes: codes.roll(1, 0)),)),
    Mutant("mtp-inputs-in-one-place", ("T5",), "every row's MTP inputs are put into the first row",
           (Change(TalkerMtp, "fill",
                   lambda original, talker, position, *rest: original(talker, 0, *rest)),)),
    Mutant("codes-without-mark", ("T5",), "codes are stored without the validity mark the model asks for",
           (Change(LiveBuffers, "store_codes",
                   lambda original, live, ids, key, codes, marks: original(live, ids, key, codes, {})),)),
    Mutant("mtp-on-long-spans", ("T6", "R2"), "decode spans of any length are eligible",
           (_replanned(_long_or_short),)),
    Mutant("scalar-mtp-on-long-spans", ("T6",), "the scalar hook's long decode spans go to MTP",
           (_replanned(_long_or_short),
            _runs_of(lambda rows: replace(rows, eligible=_one_token_decodes(rows))))),
    Mutant("mtp-without-rows", ("T7",), "MTP runs in a step without eligible rows",
           (Change(mixin, "route", _mtp_without_rows),)),
    Mutant("one-generator", ("T8",), "all rows draw from the first seeded row's generator",
           (Change(PhaseRoutingMixin, "_talker_mtp_forward", _one_generator),)),
    Mutant("generators-of-the-step", ("T8",), "a seeded request's stream begins again in every step",
           (Change(PhaseRoutingMixin, "_talker_mtp_forward", _new_generators),)),
    Mutant("seeded-rows-replayed", ("T8",), "seeded rows are replayed in a graph, which ignores their generators",
           (Change(Runtime, "eager", _full_graph),)),
    Mutant("seeded-rows-in-one-call", ("T8",), "a model that takes one generator gets a list of them",
           (_claiming(True),)),
    Mutant("always-row-by-row", ("T8",), "a model that takes a generator per row is still called row by row",
           (_claiming(False),)),
    Mutant("aliasing-block", ("T9",), "what is stored shares memory with the device's buffers",
           (Change(BufferHelper, "snapshot", lambda original, helper, tensor: tensor),)),
    Mutant("aliasing-codes", ("T9",), "stored codes are rows of MTP's own output",
           (Change(LiveBuffers, "store_codes", _codes_not_owned),)),
    Mutant("codes-copied-at-the-end", ("T9",), "codes are copied when all MTP calls of the step are done",
           (Change(LiveBuffers, "store_codes", _codes_of_the_next_call),
            Change(LiveBuffers, "__exit__", _held_are_stored))),
    Mutant("updates-copied-at-the-end", ("T9",), "what hooks hand over is copied when the step's writes are done",
           (Change(LiveBuffers, "store", _held_until_the_end), Change(LiveBuffers, "__exit__", _held_are_stored)),
           also=("reused-updates",)),
    Mutant("updates-behind-the-rows", ("T9",), "a row's embeddings and ids are written before its updates are copied",
           (Change(RunnerPort, "store_updates", _updates_after_the_rows),
            Change(RunnerPort, "write_rows", _rows_before_updates))),
    Mutant("aliasing-deep-updates", ("T9",), "what lies deep in an update is stored as it is",
           (Change(LiveBuffers, "store", _deep_values_not_owned),)),
    Mutant("aliasing-updates", ("T9",), "what hooks return in their updates is stored as it is",
           (Change(RunnerPort, "store_updates", _updates_not_owned),)),
    Mutant("aliasing-live-updates", ("T9",), "a returned tensor that a hook put into the live buffer is left there",
           (Change(RunnerPort, "store_updates", _stored_left_alone),)),
    Mutant("aliasing-resident-codes", ("T9",), "codes that stay on the device are rows of MTP's own output",
           (Change(PhaseRoutingMixin, "_talker_mtp_forward", _resident_codes_not_owned),)),
    Mutant("padding-written-back", ("T10",), "embeddings of padding rows reach the step's buffer",
           (Change(results, "mtp_result", _padding_written),)),
    Mutant("padding-codes", ("T10",), "requests get the codes of the last rows, padding included",
           (Change(results, "mtp_result", _padding_codes),)),
    Mutant("absent-codes-clear", ("T11",), "an MTP without codes blanks the stored ones",
           (Change(results, "mtp_result", _blank_codes),)),
    # E: the edges.
    Mutant("no-ids-no-prompt", ("E1",), "a request without prompt_token_ids has prompt length 0",
           (Change(mixin, "prompt_lens_of", _without_embeds),)),
    Mutant("prompt-embeds-not-laid", ("E1",), "hooks are not given the request's prompt embeddings",
           (Change(PhaseRoutingMixin, "_collect_additional_information_for_prefill", lambda original, *args: None),)),
    Mutant("crossing-is-decode", ("E2",), "a span across the prompt boundary is decode",
           (_replanned(_crossing_is_decode),)),
    # The scenario about E3 shows the phase; the clause itself is judged where a request's progress goes back.
    Mutant("replay-is-prefill", ("E3", "M8"), "a chunk of a preemption replay past the prompt is prefill",
           (_replanned(_replay_is_prefill),), also=("owned-results",)),
    Mutant("replay-draws-on", ("E3",), "a replayed row moves its request's generator on",
           (Change(contract.Row, "replays", lambda original, row, known: False),)),
    Mutant("no-refusal", ("E4",), "impossible lengths are not refused", (_NO_REFUSAL,),
           raises=("IndexError", "RuntimeError")),
    Mutant("negative-lengths-clamped", ("E4",), "negative spans and offsets are taken for 0",
           (Change(mixin, "plan_step", _clamped),), raises=("IndexError",)),
    Mutant("batch-hook-before-refusal", ("E4",), "impossible lengths are refused behind preprocess_batch",
           (Change(PhaseRoutingMixin, "_preprocess", _batch_hook_first),)),
    Mutant("late-refusal", ("E4",), "impossible lengths are refused behind the hooks",
           (_NO_REFUSAL, Change(mixin, "route", _refuse_late)),
           raises=("IndexError", "RuntimeError")),
    Mutant("deviations-silent", ("E5", "E7"), "tolerated results are not warned of", (_report(True, "is silent"),)),
    Mutant("deviations-raised", ("E5", "E7"), "tolerated results are errors in the default mode",
           (_report(True, "raises"),), raises=("ContractError",)),
    Mutant("deviations-repeated", ("E5",), "every deviation is warned of again", (_report(True, "warns again"),)),
    Mutant("strict-tolerates", ("E5", "E5b", "E7"), "strict mode is no stricter than the default",
           (_report(False, "warns"),)),
    Mutant("mtp-inputs-made-to-fit", ("E5",), "malformed mtp_inputs go to MTP as zeros",
           (_given_to_mtp(_made_to_fit),)),
    Mutant("long-results-whole", ("E5",), "rows behind the span are written too",
           (Change(results, "scalar_result", _whole_result),), raises=("RuntimeError",)),
    Mutant("unanswered-rows-stale", ("E5",), "rows that a hook gives nothing for keep an older step's embeddings",
           (Change(mixin.RunnerPort, "selected", lambda original, port, row: port.plan.spans[row]),)),
    Mutant("results-unchecked", ("E5", "E5b"), "every tensor is taken for one like the step's buffer",
           (Change(Call, "fits", lambda original, call, *args: True),),
           raises=("RuntimeError", "NotImplementedError", "AttributeError", "IndexError")),
    Mutant("odd-results-refused", ("E5", "E5b"), "what the released runner casts or broadcasts is an error",
           (Change(Call, "as_released", _refused),), raises=("ContractError",)),
    Mutant("odd-results-blank", ("E5", "E5b"), "what the released runner casts or broadcasts is written as zeros",
           (Change(Call, "as_released", _zeros),)),
    Mutant("batch-unchecked", ("E5b",), "nothing of a batched result is checked",
           (Change(results, "batch_result", _unchecked_batch),),
           raises=("RuntimeError", "ValueError", "IndexError", "NotImplementedError", "AttributeError")),
    Mutant("written-before-checked", ("E5b",), "embeddings of a batch are written before it is checked",
           (Change(RunnerPort, "call_batch", _written_unchecked),)),
    Mutant("noted-before-checked", ("E5b",), "live buffers note what a batch returned before it is checked",
           (Change(RunnerPort, "call_batch", _noted_unchecked),)),
    Mutant("merged-before-checked", ("E5",), "a row's updates are merged before its result is checked",
           (Change(RunnerPort, "call_scalar", _merged_unchecked),)),
    Mutant("batch-in-mtp-before-checked", ("E5b",), "a batch's hidden states go to MTP before it is checked",
           (Change(RunnerPort, "call_batch", _batch_in_mtp_unchecked),)),
    Mutant("row-in-mtp-before-checked", ("E5",), "a row's text step goes to MTP before its result is checked",
           (Change(RunnerPort, "call_scalar", _row_in_mtp_unchecked),), raises=("RuntimeError",)),
    Mutant("mtp-inputs-stored", ("E6",), "mtp_inputs that are not consumed are stored with the request",
           (Change(RunnerPort, "store_updates", _inputs_stored),)),
    Mutant("mtp-inputs-stored-without-mtp", ("E6",), "a model without MTP finds its mtp_inputs stored",
           (Change(RunnerPort, "call_scalar", _inputs_left_without_mtp),)),
    Mutant("mtp-inputs-demanded", ("E7",), "an eligible row without mtp_inputs is a KeyError",
           (_given_to_mtp(lambda updates, width: updates[MTP_INPUTS]),), raises=("KeyError",)),
    Mutant("blank-mtp-inputs", ("E7",), "an eligible row without mtp_inputs goes to MTP with zeros",
           (_given_to_mtp(lambda updates, width: updates.get(MTP_INPUTS, _blank(width))),)),
    Mutant("overlap-ignored", ("E8",), "rows are copied over themselves in the wrong order",
           (Change(BufferHelper, "put", _copied_backwards),)),
    Mutant("overlap-in-mtp-ignored", ("E8",), "rows of the MTP inputs are copied over themselves in the wrong order",
           (Change(TalkerMtp, "fill", _filled_backwards),)),
    Mutant("no-dictionary-replaced", ("E9",), "a live buffer that is no dictionary is thrown away for a new one",
           (Change(RunnerPort, "infos", _made_anew),)),
    Mutant("stored-one-by-one", ("E9",), "a batch's updates are stored up to the request that is refused",
           (Change(LiveBuffers, "store", _stored_before_refused),)),
    # Exact replay.
    Mutant("given-rows-hooked", ("X1", "X2"), "hooks are called for rows that were given back",
           (Change(Replay, "split", _whole_plan),)),
    Mutant("nothing-given-back", ("X1", "X2"), "given rows keep what the released code put there",
           (Change(Replay, "give_back", lambda original, replay, plan, ids, embeds: None),)),
    Mutant("ids-not-given-back", ("X1", "X2"), "given rows keep the scheduled token ids",
           (Change(Replay, "give_back", _ids_left),)),
    Mutant("kept-before-mtp", ("X1", "X2"), "decode rows are kept as hooks left them, before MTP",
           (Change(mixin, "route", _kept_early), Change(Replay, "keep", _kept_then))),
    Mutant("one-position-off", ("X1", "X2"), "what is kept is given back one position off",
           (Change(Kept, "places", _one_off),)),
    Mutant("resumed-as-long-span", ("X2",), "the new part of a row is routed as the whole row's span",
           (Change(Replay, "split", _long_new_parts),)),
    Mutant("frames-sent-again", ("X1", "X2"), "the forward pass finds the stored codes for given rows",
           (Change(Replay, "for_forward", lambda original, replay, infos, *key: infos),)),
    Mutant("given-rows-postprocessed", ("X1",), "postprocess stores for rows that were given back",
           (Change(Replay, "silent", lambda original, replay: set()),)),
    Mutant("kept-by-id", ("X3",), "rows are kept by request id, whatever its prompt",
           (Change(Kept, "belongs_to", lambda original, own, state, prompt, length, computed: computed <= own.count),)),
    Mutant("kept-over-a-gap", ("X3", "X4"), "rows are kept on behind a gap",
           (Change(Kept, "belongs_to", _over_a_gap),)),
    # The released runner, which the mixin is there for.
    Mutant("released-step", ("M9", "E1", "E4"), "the step is the released runner's",
           (Change(PhaseRoutingMixin, "_preprocess", _released_step),),
           raises=("TypeError", "KeyError", "IndexError", "RuntimeError")),
    Mutant("released-runner", ("M9", "T9", "E4", "E5", "E6"), "the mixin does nothing",
           (Change(mixin, "phase_of", _switched_off),),
           raises=("KeyError", "RuntimeError", "ValueError", "NotImplementedError", "AttributeError", "IndexError")),
)
# fmt: on
"""Every mutant, in the order of the clauses that catch it."""
