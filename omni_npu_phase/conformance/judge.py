# SPDX-License-Identifier: Apache-2.0
"""The judge: holds a recording against what its rows must show, clause by clause.

A judgement is evidence for a clause: passed, or failed with what was seen. A clause that a run says nothing about gets
no judgement, and no T clause passes in a run in which MTP never ran for a row: it would pass because MTP was off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omni_npu_phase import contract
from omni_npu_phase.conformance import recording_model as recording
from omni_npu_phase.conformance.drive import Recording, StepRecord
from omni_npu_phase.conformance.recording_model import NEW_IDS, UNTOUCHED, HookCall, MtpCall
from omni_npu_phase.conformance.scenarios import DECODE, MTP, Row

_HANDLED_AS_RELEASED = (
    *("long", "short", "other_ids", "integer_embeds", "float_ids", "flat"),
    *("integer_mtp_inputs", "flat_text_step"),
)
"""Faults whose rows must end up as the released runner leaves them (E5, E5b)."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Evidence for or against one clause from one run; ``seen`` says what was wrong, and is empty when it holds.

    ``undecided``: the run could not be made, so ``seen`` is no evidence against the runner.
    """

    clause: str
    scenario: str
    variant: str
    seen: str = ""
    undecided: bool = False

    @property
    def holds(self) -> bool:
        return not self.seen


@dataclass(frozen=True, slots=True)
class _Placed:
    """A row of a step with where it lies, and its hook calls."""

    row: Row
    start: int
    token: int
    calls: list[HookCall]

    def __str__(self) -> str:
        return f"{self.row.request} ({self.row})"


def judge(run: Recording) -> list[Judgement]:
    """Every judgement that a run gives rise to."""
    findings = list(_judge_outcome(run))
    if run.error is None:
        findings += _judge_rows(run)
    scenario = run.scenario
    # What a malformed result or a refused step does to the other clauses is nobody's promise.
    every = {**contract.CLAUSES, **contract.REPLAY_CLAUSES}
    only = scenario.about if scenario.error or scenario.behaviour.fault else every
    mtp_ran = any(step.log.mtp for step in run.steps)
    return [
        Judgement(clause, scenario.id, str(run.variant), seen)
        for clause, seen in findings
        if clause in only and (seen or mtp_ran or not clause.startswith("T"))
    ]


Finding = tuple[str, str]


def _judge_outcome(run: Recording) -> Iterator[Finding]:
    """How the run ended: as the scenario says, or with an error that its own clauses answer for."""
    scenario = run.scenario
    strict = run.variant.mode == "strict"
    expected = scenario.error or (scenario.strict_error if strict else None)
    if expected is None:
        if run.error is not None:
            for clause in scenario.about:
                yield clause, f"raised {type(run.error).__name__}: {run.error}"
        elif scenario.strict_error is not None:
            yield scenario.strict_error, _warned(run, scenario.strict_error)
        return
    yield expected, _refused(run, expected)


def _warned(run: Recording, clause: str) -> str:
    own = [text for text in run.warnings if f"[{clause}]" in text]
    return "" if len(own) == 1 else f"{len(own)} warnings instead of one"


def _refused(run: Recording, clause: str) -> str:
    error = run.error
    if error is None:
        return "no error"
    if getattr(error, "clause", None) != clause:
        return f"raised {type(error).__name__}: {error}"
    if not run.untouched_by_error:
        return "wrote part of what it refused"
    log = run.steps[-1].log
    if clause == "E4" and (log.hooks or log.batch_hooks):
        return "called a hook before the error"
    named = all(request in str(error) for request in error.requests)  # type: ignore[attr-defined]
    return "" if named and error.requests else "the error names no request"  # type: ignore[attr-defined]


def _judge_rows(run: Recording) -> Iterator[Finding]:
    if not run.scenario.behaviour.has_preprocess:
        for step in run.steps:
            called = bool(step.log.hooks or step.log.batch_hooks)
            replaced = step.embeds is not None
            yield "R1", "called a hook" if called else "took the path of models with hooks" if replaced else ""
        return
    history = _History(run)
    for number, step in enumerate(run.steps):
        every = _place(run, step)
        placed = [each for each in every if each.row.request not in step.log.filled]
        before = f"step {number + 1}: "
        checks = (
            _fields(run, step, placed, history),
            _owned_fields(run, step, placed),
            _batch_hook(run, step, every),
            _hook_choice(run, step, placed),
            _writes(run, step, placed),
            _updates(run, step, placed, history),
            _mtp_batch(run, step, placed),
            _codes(run, step, placed, history),
            _special(run, step, placed),
        )
        for check in checks:
            for clause, seen in check:
                yield clause, before + seen if seen else ""
                # What holds of every row holds with exact replay, too.
                if run.scenario.setting.replay:
                    yield from ((own, f"{before}{clause}: {seen}" if seen else "") for own in run.scenario.about)
        for seen in _given_back(run, step, history):
            yield from ((own, before + seen if seen else "") for own in run.scenario.about)
        history.add(step)


class _History:
    """What earlier steps of a run leave a later one to be judged by."""

    def __init__(self, run: Recording) -> None:
        self.codes: dict[str, list[int] | None] = {}
        self.codes_later: dict[str, list[int] | None] = {}
        self.marks: dict[str, list[int | None]] = {}
        """The marks of each request's steps, behind two of none."""
        self.rows: dict[str, Row] = {}
        self.replayed: set[str] = set()
        """Requests of which a decode row was recomputed."""
        self.furthest: dict[str, int] = {}
        """How far each request ever was: a decode row at or before it is a replay."""
        self.handed: dict[tuple[int, int], tuple[int, list[float]]] = {}
        """Token id and embedding that the forward pass was last handed at each position of each request."""
        self.after: dict[str, dict[str, Any]] = {}
        self._replay, self._indices = run.scenario.setting.replay, run.indices
        self._streams = {
            request: torch.Generator(run.device).manual_seed(seed)
            for request, seed in run.scenario.setting.seeds.items()
        }

    def noise(self, request: str) -> int:
        """The next draw of a request's own stream, 0 for a request without seed."""
        stream = self._streams.get(request)
        return 0 if stream is None else recording.draw(stream)

    def add(self, step: StepRecord) -> None:
        for row, start in zip(step.rows, step.offsets, strict=True):
            new = self.rows[row.request] = row.new or row
            self.furthest[row.request] = max(new.num_computed, self.furthest.get(row.request, -1))
            if self._replay and step.embeds is not None and step.returned_ids is not None:
                for index in range(row.span):
                    position = self._indices[row.request], row.num_computed + index
                    self.handed[position] = step.returned_ids[start + index], step.embeds[start + index]
        self.codes_later.update(step.codes_later)
        self.after = step.after


def _place(run: Recording, step: StepRecord) -> list[_Placed]:
    """The rows of a step that hooks are called for: of one with something given back, its new part (X2)."""
    placed = []
    for scheduled, start in zip(step.rows, step.offsets, strict=True):
        row = scheduled.new
        if row is not None:
            token = run.token(row)
            calls = [call for call in step.log.hooks if call.place == recording.place(token)]
            placed.append(_Placed(row, start + scheduled.kept, token, calls))
    return placed


def _given_back(run: Recording, step: StepRecord, history: _History) -> Iterator[str]:
    """What is wrong with the tokens that were given back, and with the requests of which all were (X1)."""
    seen = [recording.place(token_id) for call in step.log.hooks for token_id in call.token_ids]
    seen += [recording.place(token_id) for call in step.log.mtp for token_id in tokens_in_mtp(run, step, call)]
    for row, start in zip(step.rows, step.offsets, strict=True):
        index, told = run.indices[row.request], f"{row.request} ({row})"
        forward = step.forward.get(row.request, {})
        for offset in range(row.kept):
            place = index, row.num_computed + offset
            yield f"{told}: a hook or MTP was called for position {place[1]}" if place in seen else ""
            found = (step.returned_ids or [])[start + offset], (step.embeds or [])[start + offset]
            yield "" if found == history.handed[place] else f"{told}: position {place[1]} was given something else"
        codes = forward.get("codes", {}).get("audio")
        if row.kept and codes is not None:
            yield "" if len(codes) == row.span else f"{told}: the forward pass finds {len(codes)} rows of codes"
            yield f"{told}: codes of given tokens are sent on again" if bool(codes[: row.kept].any()) else ""
        if row.new is None:
            kept = step.after[row.request] == history.after[row.request]
            yield "" if kept else f"{told}: its live buffer was changed"
            fields = {name: forward.get(name) for name in contract.FIELDS}
            yield "" if fields == row.fields else f"{told}: the forward pass reads {fields}"


# M: the fields.


def _fields(run: Recording, step: StepRecord, rows: Sequence[_Placed], history: _History) -> Iterator[Finding]:
    if len(rows) > 1:
        # When a batch is flushed beside other spans is another clause's matter (R4).
        for hook in ("scalar", "batched"):
            order = [call.token_ids[0] % NEW_IDS for call in step.log.hooks if call.hook == hook and call.token_ids]
            wanted = [placed.token for placed in rows if placed.token in order]
            yield "M7", "" if order == wanted else f"{hook} hooks saw rows in the order {_requests(run, order)}"
    for placed in rows:
        row = placed.row
        if len(placed.calls) != 1:
            yield "M1", f"{placed} got {len(placed.calls)} hook calls"
            continue
        info = placed.calls[0].info
        missing = [name for name in contract.FIELDS if name not in info]
        yield "M1", f"{placed} lacks {', '.join(missing)}" if missing else ""
        if missing:
            for clause in ("M3", "M4", "M5"):
                yield clause, f"{placed} lacks {', '.join(missing)}"
            continue
        wrong = [name for name, kind in contract.FIELD_TYPES.items() if type(info[name]) is not kind]
        yield "M2", f"{placed}: {wrong[0]} is a {type(info[wrong[0]]).__name__}" if wrong else ""
        prompt, computed, prefill = (info[name] for name in contract.FIELDS)
        right = (prompt, computed, prefill) == (row.prompt_len, row.num_computed, row.prefill)
        told = "" if right else f"{placed}: told P={prompt} C={computed} prefill={prefill}"
        if row.request not in run.scenario.setting.prompt_embeds:
            yield "M3", told if prompt != row.prompt_len else ""
        yield "M4", told if computed != row.num_computed else ""
        yield "M5", told if prefill != row.prefill else ""
        if run.scenario.setting.stale or run.scenario.behaviour.preprocess_batch in ("claims", "replaces"):
            yield "M6", told
        earlier = history.rows.get(row.request)
        if earlier is not None and (
            earlier.prompt_len != row.prompt_len
            or earlier.num_computed >= row.num_computed
            or earlier.prefill is not row.prefill
        ):
            yield "M8", told
        if row.prompt_len == 1 and row.num_computed == 0 and row.span == 1 and run.variant.mtp:
            yield "T3", told
        if row.crosses:
            yield "E2", told
        if row.request in run.scenario.setting.prompt_embeds:
            yield "E1", told or _overlaid(run, placed)
        if row.prompt_len <= row.num_computed <= history.furthest.get(row.request, -1):
            yield "E3", told


def _overlaid(run: Recording, placed: _Placed) -> str:
    row, call = placed.row, placed.calls[0]
    index = run.indices[row.request]
    prompt = [recording.prompt_embedding(index, position) for position in range(row.prompt_len)]
    by_name = call.info.get("prompt_embeds_cpu")
    if by_name is not None:
        # As V2 does it: the whole prompt, which the hook takes its rows from.
        given, wanted = by_name.tolist(), prompt
    else:
        behind = [[UNTOUCHED] * recording.HIDDEN] * row.span
        given, wanted = call.given, (prompt + behind)[row.num_computed : row.num_computed + row.span]
    return "" if given is None or given == wanted else f"{placed}: the hook was not given its prompt embeddings"


def _owned_fields(run: Recording, step: StepRecord, rows: Sequence[_Placed]) -> Iterator[Finding]:
    """The fields as forward and postprocess of the step read them, and nested state that hooks own (M9)."""
    for placed in rows:
        row, truth = placed.row, placed.row.fields
        live = step.live.get(row.request, {})
        for name, value in truth.items():
            if type(live.get(name)) is not type(value) or live[name] != value:
                yield "M9", f"{placed}: forward reads {name} as {live.get(name)!r}"
                break
        else:
            yield "M9", ""
        if run.scenario.setting.nested:
            kept = "once" in live.get(recording.NESTED, {})
            yield "M9", f"{placed}: a nested value the hook popped is back" if kept else ""
    # As text, for 1 is not True.
    logs = step.log.postprocess
    if step.log.filled and len(logs) == len(step.rows):
        logs = [log for row, log in zip(step.rows, logs, strict=True) if row.request not in step.log.filled]
    found = str([[log.get(name) for name in contract.FIELDS] for log in logs])
    wanted = str([list(placed.row.fields.values()) for placed in rows])
    yield "M9", "" if found == wanted else f"postprocess reads (P, C, is prefill) as {found}, not {wanted}"


def _batch_hook(run: Recording, step: StepRecord, rows: Sequence[_Placed]) -> Iterator[Finding]:
    if run.scenario.behaviour.preprocess_batch == "absent":
        return
    calls = step.log.batch_hooks
    wanted = [(0, [placed.row.request for placed in rows])] if rows else []
    yield "M10", "" if calls == wanted else f"preprocess_batch calls (hooks before, requests): {calls}"
    marked = all(call.info.get(recording.BATCH_MARK) == call.request_id for call in step.log.hooks)
    yield "M10", "" if marked else "a hook was not given the buffer that preprocess_batch left"
    if run.fills_rows and run.scenario.behaviour.fills:
        yield from _filled(run, step, rows)


def _filled(run: Recording, step: StepRecord, rows: Sequence[_Placed]) -> Iterator[Finding]:
    """Rows that preprocess_batch fills itself: it is given what it needs, and they get nothing else (M10)."""
    buffer = (0, len(step.embeds or []))
    wanted = {
        "input_ids": buffer,
        "inputs_embeds": buffer,
        "token_offsets": step.offsets,
        "num_scheduled_tokens": [row.span for row in step.rows],
        "num_computed_tokens": [row.num_computed for row in step.rows],
        "prompt_lens": [row.prompt_len for row in step.rows],
    }
    # As text, for NumPy's numbers are other types.
    right = str(step.log.layout) == str(wanted)
    yield "M10", "" if right else f"preprocess_batch was given {step.log.layout} to fill rows with"
    in_mtp = [token_id for call in step.log.mtp for token_id in tokens_in_mtp(run, step, call)]
    for placed in rows:
        if placed.row.request not in step.log.filled:
            continue
        tokens = [run.token(placed.row, index) for index in range(placed.row.span)]
        found = (step.embeds or [])[placed.start : placed.start + placed.row.span]
        live = step.live.get(placed.row.request, {})
        yield "M10", f"{placed} was filled, and got a hook" if placed.calls else ""
        yield "M10", f"{placed} was filled, and went to MTP" if placed.token in in_mtp else ""
        kept = found == [recording.filled_embedding(token_id) for token_id in tokens]
        yield "M10", "" if kept else f"{placed} was filled, and written over"
        refreshed = any(name in live for name in contract.FIELDS)
        yield "M10", f"{placed} was filled, and its fields were refreshed" if refreshed else ""


# R: routing.


def _hook_choice(run: Recording, step: StepRecord, rows: Sequence[_Placed]) -> Iterator[Finding]:
    has_batched = run.variant.hook == "batched"
    for placed in rows:
        row = placed.row
        if len(placed.calls) != 1:
            continue
        call = placed.calls[0]
        batchable = row.shows == MTP
        if has_batched:
            if batchable:
                clause = "R5" if run.variant.mtp else "R4"
                yield clause, "" if call.hook == "batched" else f"{placed} went to the scalar hook"
            else:
                yield "R2", "" if call.hook == "scalar" else f"{placed} went to the batched hook"
        else:
            yield "R2", "" if call.hook == "scalar" else f"{placed} went to a batched hook the model lacks"
        if call.hook == "scalar":
            yield "R9", _slices(run, placed)
        elif call.request_id is not None:
            same = call.request_id == row.request
            yield "R3", "" if same else f"{placed} was paired with the infos of {call.request_id}"
        yield "M1", "" if call.request_id == row.request else f"{placed} lacks its request_id"
    yield from _batches(run, step, rows)


def _slices(run: Recording, placed: _Placed) -> str:
    call, row = placed.calls[0], placed.row
    wanted = [run.token(row, index) for index in range(row.span)]
    if call.token_ids != wanted:
        return f"{placed} was given {len(call.token_ids)} token ids that are not its own"
    if call.offset is None:
        return f"{placed} was not given its slice of the embeddings"
    if call.offset != placed.start or call.given_shape != (row.span, recording.HIDDEN):
        return f"{placed} was given embeddings {call.given_shape} at row {call.offset} instead of {placed.start}"
    if call.ids_offset != placed.start:
        where = "in a copy" if call.ids_offset is None else f"at row {call.ids_offset}"
        return f"{placed} was given its token ids {where}, not at row {placed.start} of the runner's own buffer"
    return ""


def _batches(run: Recording, step: StepRecord, rows: Sequence[_Placed]) -> Iterator[Finding]:
    """Each batched call is adjacent rows, made before any later row's hook (R4)."""
    if run.variant.hook != "batched" or run.variant.mtp:
        return
    by_call: dict[int, list[int]] = {}
    for placed in rows:
        for call in placed.calls:
            by_call.setdefault(call.call, []).append(placed.start)
    for indices in by_call.values():
        adjacent = indices == list(range(indices[0], indices[0] + len(indices)))
        yield "R4", "" if adjacent else f"one batched call took rows {indices}"
    order = [min(by_call[number]) for number in sorted(by_call)]
    yield "R4", "" if order == sorted(order) else "a batch was flushed after a later span"


def _writes(run: Recording, step: StepRecord, rows: Sequence[_Placed]) -> Iterator[Finding]:
    """Embeddings and ids as the model forward finds them (R6, R7, R9, T2, T4, E8)."""
    behaviour = run.scenario.behaviour
    if step.embeds is None or step.returned_ids is None:
        yield ("R10" if run.scenario.setting.ids_absent else "R6"), "the model forward gets no embeddings or no ids"
        return
    yield "R6", "" if step.same_buffers else "the embeddings are not in the runner's own buffer"
    behind = _written_behind(step)
    yield "R6", f"rows {behind} behind the spans were written" if behind else ""
    mtp_ran = bool(step.log.mtp)
    without_ids = run.scenario.setting.ids_absent or run.scenario.setting.multimodal
    for placed in rows:
        row = placed.row
        if len(placed.calls) != 1:
            if without_ids:
                yield "R10", f"{placed}: no hook was given its token ids"
            continue
        wanted = _wanted_embeds(run, placed)
        found = step.embeds[placed.start : placed.start + row.span]
        wrong = "" if found == wanted else f"{placed}: wrong embeddings at row {placed.start}"
        if behaviour.fault is None:
            yield "R6", wrong
            yield ("R3" if placed.calls[0].hook == "batched" else "R9"), wrong
        if behaviour.embeds != "fresh":
            yield "E8", wrong
        if run.variant.mtp:
            if row.prefill and row.span == 1:
                yield "T2", wrong
            if row.shows == MTP and mtp_ran and any(other.row.prefill for other in rows):
                yield "T4", wrong
        if without_ids:
            yield "R10", wrong or _slices(run, placed) if placed.calls[0].hook == "scalar" else wrong
    yield from _ids(run, step, rows)


def _written_behind(step: StepRecord) -> list[int]:
    """Buffer rows that belong to no span and were written all the same."""
    spans = {start + index for row, start in zip(step.rows, step.offsets, strict=True) for index in range(row.span)}
    return [row for row, embeds in enumerate(step.embeds or []) if row not in spans and embeds[0] != UNTOUCHED]


def _wanted_embeds(run: Recording, placed: _Placed) -> list[list[float]]:
    row = placed.row
    offset = NEW_IDS if run.scenario.behaviour.ids == "new" else 0
    if run.variant.mtp and row.shows == MTP and not run.scenario.lacks_mtp_inputs(run.variant):
        return [_as_served(run, placed, recording.mtp_embedding(placed.token + offset))]
    batched = placed.calls[0].hook == "batched"
    rows = [recording.embedding(run.token(row, index), batched=batched) for index in range(row.span)]
    if run.scenario.behaviour.fault == "short" and row.span > 1:
        rows[-1] = [run.unanswered] * recording.HIDDEN
    if run.scenario.behaviour.embeds == "shifted" and row.span > 1:
        # The hook moved its rows down by one and gave all but the first; the last row of the span stays as it left it.
        rows[-1] = rows[-2]
    return rows


def _as_served(run: Recording, placed: _Placed, embedding: list[float]) -> list[float]:
    """What MTP makes of a text step that the last row of its batch gave for all."""
    if run.scenario.behaviour.fault != "flat_text_step":
        return embedding
    request, position = recording.place(run.token([row for row in run.scenario.steps[0] if row.shows == MTP][-1]))
    return [*embedding[:6], float(request), float(position % 64)]


def _ids(run: Recording, step: StepRecord, rows: Sequence[_Placed]) -> Iterator[Finding]:
    if run.scenario.behaviour.fault is not None:
        return
    new = run.scenario.behaviour.ids == "new"
    # The released scalar path copies a slice onto itself, which changes nothing; the clause is the batched hook's.
    if not new and all(call.hook == "batched" for call in step.log.hooks) and not any(row.kept for row in step.rows):
        yield "R7", "token ids were copied although the hooks returned them as given" if step.ids_written else ""
    for placed in rows:
        row = placed.row
        wanted = [run.token(row, index) + (NEW_IDS if new else 0) for index in range(row.span)]
        found = (step.returned_ids or [])[placed.start : placed.start + row.span]
        yield "R7", "" if found == wanted else f"{placed}: token ids are not what its hook returned"


def _updates(run: Recording, step: StepRecord, rows: Sequence[_Placed], history: _History) -> Iterator[Finding]:
    behaviour = run.scenario.behaviour
    if behaviour.updates == "nothing" or behaviour.fault == "no_dictionary":
        return
    for placed in rows:
        if len(placed.calls) != 1:
            continue
        row = placed.row
        live = step.live.get(row.request, {})
        marks = live.get(recording.MARK, {})
        wanted = placed.calls[0].token_ids[-1]
        # What lies in a tensor of the model's own is read after the whole run, and must not be it.
        reused = behaviour.updates in ("reused", "deep", "live", "given")
        own = [marks.get("scalar")]
        if behaviour.updates == "deep":
            own = [*recording.tensors_in([marks.get(recording.DEEP), marks.get(recording.DEEP_ITEMS)]), *[None] * 5][:5]
        for clause, mark in (("R8", marks.get("token")), *(("T9" if reused else "R8", mark) for mark in own)):
            right = mark is not None and int(mark) == wanted
            yield clause, "" if right else f"{placed}: its buffer holds {mark} where its own update has {wanted}"
        merged = marks.get(recording.ARRIVED) == row.request
        yield "R8", "" if merged else f"{placed}: its update replaced the nested values that its buffer held"
        if behaviour.updates == "moves":
            known = history.marks.setdefault(row.request, [None, None])
            for info, last in ((placed.calls[0].info, known[-2]), (live, known[-1])):
                moved = info.get(recording.BEFORE, {}).get("token")
                yield "R8", "" if moved == last else f"{placed}: holds {moved}, not {last}: an update was merged twice"
            known.append(wanted)
        if not (row.shows == MTP and run.variant.mtp):
            leaked = contract.MTP_INPUTS in live or contract.MTP_INPUTS in placed.calls[0].info
            yield "E6", f"{placed}: its mtp_inputs were stored" if leaked else ""


# T: MTP.


def _mtp_batch(run: Recording, step: StepRecord, rows: Sequence[_Placed]) -> Iterator[Finding]:
    if not run.variant.mtp:
        return
    eligible = [placed for placed in rows if placed.row.shows == MTP]
    if run.scenario.lacks_mtp_inputs(run.variant):
        eligible = []
    one_stream = run.scenario.setting.seeds and run.scenario.behaviour.seeds == "one_stream"
    entered = [token_id for call in step.log.mtp for token_id in tokens_in_mtp(run, step, call)]
    wanted = [placed.token for placed in eligible]
    listing = f"MTP ran for {_requests(run, entered)}"
    if eligible:
        yield "T1", "" if entered == wanted else listing
        if run.scenario.behaviour.ids == "new":
            given = [token_id for call in step.log.mtp for token_id in call.token_ids]
            returned = all(placed.token + NEW_IDS in given for placed in eligible)
            yield "R7", "" if returned else "MTP was not given the token ids that the hooks returned"
        calls = len(step.log.mtp)
        if run.scenario.setting.seeds and not one_stream:
            yield "T8", "" if calls == 1 else f"{calls} MTP calls for {len(eligible)} rows"
    else:
        yield "T7", f"MTP was called {len(step.log.mtp)} times" if step.log.mtp else ""
    for placed in rows:
        row = placed.row
        inside = placed.token in entered
        told = f"{placed} went to MTP" if inside else ""
        if row.prefill and row.span == 1:
            yield "T2", told
            if row.prompt_len == 1:
                yield "T3", told
        if row.shows == DECODE:
            yield "T6", told
        if row.crosses:
            yield "E2", told


def tokens_in_mtp(run: Recording, step: StepRecord, call: MtpCall) -> list[int]:
    """Token ids of the rows of an MTP call, without padding: what a padded call holds behind its rows is anything."""
    rows = call.rows
    if rows == run.scenario.setting.padded:
        eligible = sum(row.shows == MTP for row in step.rows)
        # A runner that makes a call for each row has one row in each.
        rows = 1 if len(step.log.mtp) == eligible else eligible
    return [token_id % NEW_IDS for token_id in call.token_ids[:rows]]


def _codes(run: Recording, step: StepRecord, rows: Sequence[_Placed], history: _History) -> Iterator[Finding]:
    if not run.variant.mtp:
        return
    behaviour, setting = run.scenario.behaviour, run.scenario.setting
    for placed in rows:
        row = placed.row
        found, known = step.codes.get(row.request), history.codes.get(row.request)
        offset = NEW_IDS if behaviour.ids == "new" else 0
        wanted = known
        makes_codes = row.shows == MTP and not run.scenario.lacks_mtp_inputs(run.variant)
        none_made = behaviour.codes == "none_later" and not any(
            call.gave_codes and placed.token in tokens_in_mtp(run, step, call) for call in step.log.mtp
        )
        replayed = row.prompt_len <= row.num_computed <= history.furthest.get(row.request, -1)
        if makes_codes:
            # A replayed row may draw what it likes, as long as later ones do not see it.
            noise = found[-1] if replayed and found else history.noise(row.request)
            made = recording.mtp_codes(placed.token + offset, noise)
            wanted = known if none_made else made
        told = "" if found == wanted else f"{placed}: its codes are {found}, not {wanted}"
        if makes_codes and none_made:
            # Codes that changed since they were stored are another clause's matter.
            yield "T11", "" if found == history.codes_later.get(row.request) else told
        elif makes_codes:
            without_noise = "" if wanted is not None and found is not None and found[:-1] == wanted[:-1] else told
            # Codes that a second MTP call of the step wrote over were stored with the right request, but not owned.
            one_call = len(step.log.mtp) == 1
            yield ("T5" if one_call else "T9"), without_noise
            if setting.seeds and (one_call or not without_noise):
                yield "T8", told
                if row.request in history.replayed:
                    yield "E3", told
            if setting.padded and one_call:
                yield "T10", without_noise
            if behaviour.validity:
                valid = step.live.get(row.request, {}).get(recording.VALIDITY[0], {}).get(recording.VALIDITY[1])
                yield "T5", "" if valid is not None and bool(valid) else f"{placed}: its codes lack their validity mark"
        elif row.shows == MTP:
            yield ("E7" if behaviour.fault == "no_mtp_inputs" else "E5"), told
        elif known is None:
            yield ("T2" if row.prefill else "T6"), f"{placed} got codes {found}" if found is not None else ""
        if wanted is not None:
            later = step.codes_later.get(row.request)
            changed = f"{placed}: its stored codes became {later} with the next write to MTP's output (on {run.device})"
            yield "T9", "" if later == found else changed
        history.codes[row.request] = wanted
        if replayed:
            history.replayed.add(row.request)
    for index, placed in enumerate(rows):
        last = step.last_later.get(placed.row.request)
        own = float(run.indices[placed.row.request])
        kept = last == [own] * recording.HIDDEN
        seen = f"{placed}: what its postprocess stored changed with the device buffer (on {run.device})"
        yield "T9", "" if kept else f"{seen}, row {index}"


def _special(run: Recording, step: StepRecord, rows: Sequence[_Placed]) -> Iterator[Finding]:
    behaviour = run.scenario.behaviour
    if run.scenario.setting.padded and run.variant.mtp and step.embeds is not None:
        reached = _written_behind(step)
        yield "T10", f"padding reached rows {reached}" if reached else ""
    if behaviour.takes_infos and run.variant.mtp:
        for call in step.log.mtp:
            requests = call.keywords.get("req_ids")
            infos = call.keywords.get("req_infos") or []
            paired = [recording.request_of(info) for info in infos] == requests
            yield "T1", "" if requests and paired else f"MTP was given req_ids {requests} with other infos"
    if behaviour.fault in _HANDLED_AS_RELEASED and run.variant.mode == "on":
        clause = run.scenario.about[0]
        for placed in rows:
            wanted = _wanted_embeds(run, placed) if len(placed.calls) == 1 else None
            found = (step.embeds or [])[placed.start : placed.start + placed.row.span]
            ids = (step.returned_ids or [])[placed.start : placed.start + placed.row.span]
            kept = ids == [run.token(placed.row, index) for index in range(placed.row.span)]
            yield clause, "" if found == wanted and kept else f"{placed}: not handled as the clause says"
        reached = _written_behind(step)
        yield clause, f"rows {reached} behind the spans were written" if reached else ""


def _requests(run: Recording, token_ids: Sequence[int]) -> str:
    names = {index: request for request, index in run.indices.items()}
    return ", ".join(names.get(recording.place(token_id)[0], "no request") for token_id in token_ids) or "none"
