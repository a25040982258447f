# SPDX-License-Identifier: Apache-2.0
"""What a model's hooks do wrong, or cannot be seen to do right: the walks of each hook, read by the rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from omni_npu_phase import contract
from omni_npu_phase.lint.hooks import DECIDING, hooks_of, stored_later
from omni_npu_phase.lint.observed import (
    CHUNK,
    CROSSING,
    DECODE,
    LAST,
    LONG_DECODE,
    MIDDLE,
    ROWS,
    TAIL,
    WHOLE,
    Event,
    Observed,
    Test,
)
from omni_npu_phase.lint.rules import SEVERITIES, Finding, Severity
from omni_npu_phase.lint.source import Method, Model, UnreadableError
from omni_npu_phase.lint.values import Place, Value
from omni_npu_phase.lint.walk import Walk

_DECIDES = "decides between prefill and decode"
Answer = Literal["decides by the fields", "needs no phase", "decides by span", "breaks the contract", "cannot tell"]


@dataclass(frozen=True, slots=True)
class Judged:
    """A class with hooks, what was found in them, and which fields they read."""

    model: Model
    hooks: tuple[str, ...]
    findings: tuple[Finding, ...]
    reads: frozenset[str]
    by_phase: tuple[Place, ...]
    """Tests by which the hooks tell the phase from the fields."""
    file: Path
    """Where its first hook is written: its own file, or a base's."""

    @property
    def verdict(self) -> Severity | Literal["clean"]:
        """``unknown`` before ``fallback``: what cannot be told is not right while the runner keeps the contract."""
        severities = {found.severity for found in self.findings}
        order: Sequence[Severity] = ("error", "unknown", "fallback")
        return next((each for each in order if each in severities), "clean")

    @property
    def answer(self) -> tuple[Answer, str]:
        """The verdict in words, and what it rests on."""
        if self.verdict in ("error", "unknown"):
            gravest = [found for found in self.findings if found.severity == self.verdict]
            by_span = [found for found in gravest if found.rule == "span-phase"]
            reason = "; ".join(f"{found.message} (line {found.line})" for found in by_span or gravest)
            if self.verdict == "unknown":
                return "cannot tell", reason
            return "decides by span" if by_span else "breaks the contract", reason
        beside = sorted(
            {f"{found.rule} (line {found.line})" for found in self.findings if found.severity == "fallback"}
        )
        more = f"; beside it {', '.join(beside)}" if beside else ""
        lines = sorted({place.key[1] for place in self.by_phase})
        if lines:
            return "decides by the fields", f"line{'s' * (len(lines) > 1)} {', '.join(map(str, lines))}{more}"
        if contract.NUM_COMPUTED in self.reads:
            return "decides by the fields", f"it goes by the runner's progress{more}"
        return "needs no phase", f"what it returns is made of the row's own tokens{more}"


def judge(model: Model) -> Judged | None:
    """Follow a class's hooks; None where it has none.

    Raises :class:`~omni_npu_phase.lint.source.UnreadableError` for code that is nested beyond Python's own limit.
    """
    hooks = list(hooks_of(model))
    if not any(kind in DECIDING for kind, _ in hooks):
        return None
    try:
        walked = [_walked(model, kind, method) for kind, method in hooks]
    except RecursionError as error:
        raise UnreadableError(f"{model.source.path}: {model.name} is nested too deeply to be followed") from error
    advanced = {name for seen in walked for each in (seen.with_fields, seen.without) for name in each.advanced}
    stored = {name for seen in walked for name in seen.with_fields.stored} | set(stored_later(model))
    found: dict[tuple[str, int, int, str], Finding] = {}
    reads: set[str] = set()
    by_phase: dict[tuple[str, int, int], Place] = {}
    for seen in walked:
        seen.advanced.update(advanced)
        seen.stored.update(stored)
        if seen.kind in DECIDING:
            reads |= seen.with_fields.reads
            by_phase |= {place.key: place for place in seen.by_phase}
        for finding in (each for rule in RULES_IN_CODE for each in rule(seen)):
            place = (finding.path, finding.line, finding.column, finding.rule)
            known = found.get(place)
            if known is None or SEVERITIES.index(finding.severity) < SEVERITIES.index(known.severity):
                found[place] = finding
    names = tuple(dict.fromkeys(method.node.name for _, method in hooks))
    if any(each.severity == "error" for each in found.values()):
        found = {place: each for place, each in found.items() if each.severity != "unknown"}
    return Judged(
        model, names, tuple(sorted(found.values())), frozenset(reads), tuple(by_phase.values()), hooks[0][1].source.path
    )


def _walked(model: Model, kind: str, method: Method) -> Seen:
    with_fields, without = Observed(), Observed()
    rows = ROWS if kind in ("preprocess", "postprocess") else (DECODE,)
    for row in rows:
        Walk(model, row, True, with_fields).hook(method, kind)
    # A hook that asks for no field does the same on a runner without them.
    for row in rows if with_fields.asked else ():
        Walk(model, row, False, without).hook(method, kind)
    return Seen(model, method, kind, with_fields, without)


@dataclass(frozen=True, slots=True)
class Seen:
    """The walks of one hook: with the three fields, as a conforming runner passes them, and without."""

    model: Model
    method: Method
    kind: str
    with_fields: Observed
    without: Observed
    advanced: set[str] = field(default_factory=set)
    """Names under which any hook of the model keeps something made from a span."""
    stored: set[str] = field(default_factory=set)
    """Names under which any hook of the model keeps anything."""

    @property
    def by_phase(self) -> list[Place]:
        """Tests by which the hook tells the phase from the fields."""
        return [test.place for test in self.with_fields.tests.values() if test.acts and _by_phase(test)]

    @property
    def uses_fields(self) -> bool:
        """Whether the hook tells its phase by the fields, or knows its progress."""
        return bool(self.by_phase) or contract.NUM_COMPUTED in self.with_fields.reads

    def finding(self, rule: str, severity: Severity, place: Place, message: str) -> Finding:
        path, line, column = place.key
        return Finding(path, line, column + 1, rule, severity, message, self.model.name)


def span_phase(seen: Seen) -> Iterator[Finding]:
    for test in _acting(seen.with_fields):
        if _by_span(test):
            text = f"`{test.place.code}` {_DECIDES}: a one-token tail of a prompt is taken for decode"
            yield seen.finding("span-phase", "error", test.place, text)
        elif _by_whole_prompt(test) and not seen.uses_fields:
            text = f"`{test.place.code}` {_DECIDES}: a chunk of a prompt is taken for decode"
            yield seen.finding("span-phase", "error", test.place, text)
    for test in _acting(seen.without):
        if _by_span(test):
            text = f"`{test.place.code}` {_DECIDES} where the runner passes no fields"
            yield seen.finding("span-phase", "fallback", test.place, text)


def _acting(observed: Observed) -> list[Test]:
    return [test for test in observed.tests.values() if test.acts]


def _by_span(test: Test) -> bool:
    """Chunks go one way; a prompt's one-token tail goes the other, as decode does."""
    known = test.of(CHUNK, MIDDLE, LAST, TAIL, DECODE)
    if known is None or test.mixed:
        return False
    chunk, middle, last, tail, decode = known
    return chunk == middle == last != tail == decode


def _by_whole_prompt(test: Test) -> bool:
    """Only a prompt that is scheduled whole goes one way; its chunks go the other, as decode does."""
    whole, *others = test.of(WHOLE, CHUNK, MIDDLE, LAST, TAIL, DECODE) or [None]
    return whole is not None and set(others) == {not whole}


def _by_phase(test: Test) -> bool:
    """A prompt's one-token tail goes the way of its other chunks, and decode does not."""
    middle, tail, decode = test.of(MIDDLE, TAIL, DECODE) or [None, None, None]
    return middle == tail != decode


def span_beside_phase(seen: Seen) -> Iterator[Finding]:
    for test in seen.with_fields.tests.values():
        middle, tail, decode, long = test.of(MIDDLE, TAIL, DECODE, LONG_DECODE) or [None] * 4
        does_something = any(test.touches) if middle is None else test.touches[bool(middle)]
        if decode not in (long, tail, middle) and does_something:
            text = f"`{test.place.code}` takes a decode span of several tokens for prefill, whatever its phase"
            yield seen.finding("span-beside-phase", "fallback", test.place, text)


def progress_phase(seen: Seen) -> Iterator[Finding]:
    # Where the phase is known, a first or a last chunk may well be treated in a way of its own; and after the forward
    # pass a prompt's last chunk is what decode is: a row that is sampled.
    if seen.kind != "preprocess" or seen.by_phase or contract.IS_PREFILL in seen.with_fields.reads:
        return
    for test in seen.with_fields.tests.values():
        if all(test.touches) and test.followed and _by_progress(test):
            text = f"`{test.place.code}` {_DECIDES}: a prompt's last chunk is taken for decode"
            yield seen.finding("progress-phase", "error", test.place, text)


def _by_progress(test: Test) -> bool:
    """A prompt's first chunk goes one way; its last, of whatever length, goes the other, as decode does."""
    first, last, tail, decode = test.of(CHUNK, LAST, TAIL, DECODE) or [None] * 4
    return first is not None and first != last == tail == decode


def own_counter(seen: Seen) -> Iterator[Finding]:
    grave: Severity = "fallback" if seen.uses_fields else "error"
    both: Sequence[tuple[Observed, Severity]] = ((seen.with_fields, grave), (seen.without, "fallback"))
    for observed, severity in both:
        for event in _of(observed, "slice", "consumed"):
            names = event.keys if event.kind == "consumed" else _counted(event.keys, seen)
            if event.row.prefill and names:
                how = "is consumed from its front" if event.kind == "consumed" else f"begins at {_names(names)}"
                yield seen.finding(
                    "own-counter",
                    severity,
                    event.place,
                    f"`{event.place.code}` {how}, which the model counts on itself: after a preemption, or with "
                    "cached progress, it is another part of the prompt than the runner scheduled",
                )


def _counted(keys: frozenset[str], seen: Seen) -> frozenset[str]:
    """Those that the model advances itself; others are the runner's, or do not move."""
    return keys & seen.advanced


def runner_field(seen: Seen) -> Iterator[Finding]:
    for event in _of(seen.with_fields, "runner-field"):
        yield seen.finding("runner-field", "error", event.place, f"{event.value.const} is the runner's to write")
    if seen.kind == "decode_batch":
        for event in _of(seen.with_fields, "field-key"):
            yield seen.finding("runner-field", "error", event.place, f"{event.value.const} is the runner's to write")
    for event in _of(seen.with_fields, "return"):
        updates = _updates(seen.kind, event.value)
        for name in contract.FIELDS:
            if updates is not None and not updates.keywords and name in (updates.items or {}):
                place = updates.key_places.get(name, event.place)
                yield seen.finding("runner-field", "error", place, f"the hook returns {name}, which is the runner's")


def whole_prompt(seen: Seen) -> Iterator[Finding]:
    if seen.kind != "preprocess":
        return
    of_decode = {event.place.key for event in _of(seen.with_fields, "return") if not event.row.prefill}
    for event in _of(seen.with_fields, "return"):
        rows = _rows(event.value)
        if event.row not in (CHUNK, MIDDLE) or rows is None:
            continue
        named = any("prompt" in key or "prefill" in key for key in rows.keys)
        only_here = event.certain or event.place.key not in of_decode
        if rows.span or rows.part or rows.fields or not rows.state or not (only_here or named):
            continue
        if rows.measured:
            text = "the whole prompt is returned, its length compared with the span: a chunk of it is refused"
            yield seen.finding("whole-prompt", "note", event.place, text)
        else:
            text = "rows of the whole prompt are returned for a chunk; the runner writes the first rows again and again"
            yield seen.finding("whole-prompt", "error", event.place, text)


def crossing_span(seen: Seen) -> Iterator[Finding]:
    if seen.kind != "preprocess":
        return
    for event in _of(seen.with_fields, "return"):
        rows = _rows(event.value)
        if event.row is not CROSSING or rows is None or not rows.cut or rows.measured:
            continue
        tests = [seen.with_fields.tests[key] for key in event.under | rows.chosen]
        if not any(_beside_fields(test) and test.made_of[0].span for test in tests):
            text = "a span that goes beyond the prompt gets the prompt's rows only; for the others nothing is returned"
            yield seen.finding("crossing-span", "fallback", event.place, text)


def cannot_tell(seen: Seen) -> Iterator[Finding]:
    if seen.kind != "preprocess":
        return
    tests = seen.with_fields.tests
    if seen.with_fields.broken:
        where = Place(seen.method.source, seen.method.node)
        lost = ", ".join(f"C={row.num_computed} S={row.span}" for row in ROWS if row in seen.with_fields.broken)
        text = f"the hook cannot be followed to its end for P={CHUNK.prompt_len} and {lost}"
        yield seen.finding("cannot-tell", "unknown", where, text)
        return
    for event in _of(seen.with_fields, "return"):
        rows = _rows(event.value) or event.value
        above = [test for way in (rows.chosen, event.under) for key, test in tests.items() if key in way]
        if rows.fields or any(_by_phase(test) or _beside_fields(test) for test in above):
            continue
        guess = next(
            (test for test in reversed(above) if any(_kept(each, seen) or each.span for each in test.made_of)), None
        )
        if guess is not None:
            text = f"`{guess.place.code}` chooses what the hook returns, and the runner's fields do not"
            yield seen.finding("cannot-tell", "unknown", guess.place, text)
            return
        if _kept(rows, seen):
            text = "what is returned is made of what is kept for the request, and no field of the runner chooses it"
            yield seen.finding("cannot-tell", "unknown", event.place, text)
            return


def _rows(value: Value) -> Value | None:
    """The embeddings among what a hook returns; None where it is not seen."""
    return value.elements[1] if value.elements is not None and len(value.elements) in (3, 5) else None


def _beside_fields(test: Test) -> bool:
    """A field decides, compared with what is known to the model only."""
    return bool(test.made_of) and all(each.fields for each in test.made_of)


def _kept(value: Value, seen: Seen) -> bool:
    """Whether a value is made of what is kept for the request, or of what a hook of the model stores in the model."""
    return value.state and (
        not value.keys or any(not key.startswith("self.") or key in seen.stored for key in value.keys)
    )


def mtp_in_prefill(seen: Seen) -> Iterator[Finding]:
    of_decode = {event.place.key for event in _of(seen.with_fields, "mtp") if not event.row.prefill}
    for event in _of(seen.with_fields, "mtp"):
        if event.row in (CHUNK, MIDDLE) and (event.certain or event.place.key not in of_decode):
            text = f"{contract.MTP_INPUTS} are handed out for a prefill row, which never enters MTP"
            yield seen.finding("mtp-in-prefill", "fallback", event.place, text)


def returned_keywords(seen: Seen) -> Iterator[Finding]:
    for event in _of(seen.with_fields, "return"):
        updates = _updates(seen.kind, event.value)
        if updates is not None and updates.keywords:
            text = "all the hook's keywords are returned as updates, the runner's fields among them"
            yield seen.finding("returned-keywords", "note", event.place, text)


def field_default(seen: Seen) -> Iterator[Finding]:
    for event in _of(seen.with_fields, "field-default"):
        text = f"a default for {event.value.const} hides a runner that does not pass it"
        yield seen.finding("field-default", "note", event.place, text)


RULES_IN_CODE: tuple[Callable[[Seen], Iterator[Finding]], ...] = (
    span_phase,
    span_beside_phase,
    progress_phase,
    own_counter,
    runner_field,
    whole_prompt,
    crossing_span,
    cannot_tell,
    mtp_in_prefill,
    returned_keywords,
    field_default,
)


def _of(observed: Observed, *kinds: str) -> Iterable[Event]:
    return [event for event in observed.events if event.kind in kinds]


def _updates(kind: str, value: Value) -> Value | None:
    if kind == "postprocess":
        return value
    return value.elements[-1] if value.elements else None


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
