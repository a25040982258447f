# SPDX-License-Identifier: Apache-2.0
"""What a model's hooks do wrong: the walks of each hook, read by the rules."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omni_npu_phase import contract
from omni_npu_phase.lint.rules import SEVERITIES, Finding, Severity
from omni_npu_phase.lint.source import Method, Model, UnreadableError, statements_in
from omni_npu_phase.lint.trace import CHUNK, DECODE, LAST, LONG_DECODE, MIDDLE, ROWS, TAIL, WHOLE, Event, Test, Trace
from omni_npu_phase.lint.values import Place, Value
from omni_npu_phase.lint.walk import Walk

_KINDS = {
    "preprocess": "preprocess",
    "preprocess_decode_batch": "decode_batch",
    "preprocess_decode_batch_mrv2": "decode_batch",
    "preprocess_batch": "batch",
    "preprocess_batch_mrv2": "batch",
    "postprocess": "postprocess",
}
"""What the runner calls on a model, and how."""
_CUSTOM = {"set_custom_preprocess": "preprocess", "set_custom_postprocess": "postprocess"}
_DECIDING = {"preprocess", "decode_batch"}


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
    def verdict(self) -> str:
        """The gravest severity, or ``clean``; notes are no fault."""
        return next(
            (each for each in SEVERITIES[:2] if any(found.severity == each for found in self.findings)), "clean"
        )


def judge(model: Model) -> Judged | None:
    """Follow a class's hooks; None where it has none.

    Raises :class:`~omni_npu_phase.lint.source.UnreadableError` for code that is nested beyond Python's own limit.
    """
    hooks = list(_hooks(model))
    if not any(kind in _DECIDING for kind, _ in hooks):
        return None
    try:
        walked = [_walked(model, kind, method) for kind, method in hooks]
    except RecursionError as error:
        raise UnreadableError(f"{model.source.path}: {model.name} is nested too deeply to be followed") from error
    advanced = {name for seen in walked for trace in (seen.with_fields, seen.without) for name in trace.advanced}
    found: dict[tuple[str, int, int, str], Finding] = {}
    reads: set[str] = set()
    by_phase: dict[tuple[str, int, int], Place] = {}
    for seen in walked:
        seen.advanced.update(advanced)
        if seen.kind in _DECIDING:
            reads |= seen.with_fields.reads
            by_phase |= {place.key: place for place in seen.by_phase}
        for finding in (each for rule in RULES_IN_CODE for each in rule(seen)):
            place = (finding.path, finding.line, finding.column, finding.rule)
            known = found.get(place)
            if known is None or SEVERITIES.index(finding.severity) < SEVERITIES.index(known.severity):
                found[place] = finding
    names = tuple(dict.fromkeys(method.node.name for _, method in hooks))
    return Judged(
        model, names, tuple(sorted(found.values())), frozenset(reads), tuple(by_phase.values()), hooks[0][1].source.path
    )


def _hooks(model: Model) -> Iterator[tuple[str, Method]]:
    """Hooks by name, and methods that the class makes its hooks itself, each once."""
    named: dict[tuple[str, int], tuple[str, Method]] = {}
    for kind, name in (*_set_by(model), *((kind, name) for name, kind in _KINDS.items())):
        method = model.method(name) or _function(model, name)
        if method is not None and not method.is_stub and (kind != "preprocess" or _takes_tokens(method)):
            named.setdefault((kind, id(method.node)), (kind, method))
    yield from named.values()


def _function(model: Model, name: str) -> Method | None:
    """A function of the class's own file, which the class makes its hook."""
    source, cls = model.lineage[0]
    node = source.functions.get(name) if name not in _KINDS else None
    return None if node is None else Method(source, cls, node, free=True)


def _set_by(model: Model) -> Iterator[tuple[str, str]]:
    """set_custom_preprocess(self.X), self.preprocess = self.X, setattr(self, "preprocess", self.X), preprocess = X."""
    for _, cls in model.lineage:
        for statement in statements_in(cls.body):
            node = statement.value if isinstance(statement, ast.Expr) else statement
            name, value = "", None
            if isinstance(node, ast.Call):
                called = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
                given = [*node.args, *(keyword.value for keyword in node.keywords)]
                if called in _CUSTOM and given:
                    name, value = _CUSTOM[called], given[0]
                elif called == "setattr" and len(given) == 3:
                    name, value = getattr(given[1], "value", ""), given[2]
            elif isinstance(node, ast.Assign):
                to, value = node.targets[0], node.value
                own = isinstance(to, ast.Name) and node in cls.body
                name = getattr(to, "id", "") if own else getattr(to, "attr", "")
            if name in _KINDS and value is not None:
                yield _KINDS[name], _named(value)


def _named(value: ast.expr) -> str:
    """The function that is meant, also where something is made of it: ``torch.compile(self.X)``."""
    while isinstance(value, ast.Call) and value.args:
        value = value.args[0]
    return getattr(value, "attr", "") or getattr(value, "id", "")


def _takes_tokens(method: Method) -> bool:
    """Whether a ``preprocess`` can be the runner's: image processors have methods of that name too."""
    arguments = method.node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    if any("ids" in name or "token" in name for name in names):
        return True
    return arguments.kwarg is not None and len(arguments.args) <= method.is_bound


def _walked(model: Model, kind: str, method: Method) -> Seen:
    with_fields, without = Trace(), Trace()
    rows = ROWS if kind in ("preprocess", "postprocess") else (DECODE,)
    for row in rows:
        Walk(model, row, True, with_fields).hook(method, kind)
    # A hook that asks for no field does the same on a runner without them.
    for row in rows if with_fields.asked else ():
        Walk(model, row, False, without).hook(method, kind)
    return Seen(model, kind, with_fields, without)


@dataclass(frozen=True, slots=True)
class Seen:
    """The walks of one hook: with the three fields, as a conforming runner passes them, and without."""

    model: Model
    kind: str
    with_fields: Trace
    without: Trace
    advanced: set[str] = field(default_factory=set)
    """Names under which any hook of the model keeps something made from a span."""

    @property
    def by_phase(self) -> list[Place]:
        """Tests by which the hook tells the phase from the fields."""
        return [test.place for test in self.with_fields.tests.values() if _by_phase(test)]

    @property
    def uses_fields(self) -> bool:
        """Whether the hook tells its phase by the fields, or knows its progress."""
        return bool(self.by_phase) or contract.NUM_COMPUTED in self.with_fields.reads

    def finding(self, rule: str, severity: Severity, place: Place, message: str) -> Finding:
        path, line, column = place.key
        return Finding(path, line, column + 1, rule, severity, message, self.model.name)


def span_phase(seen: Seen) -> Iterator[Finding]:
    for test in seen.with_fields.tests.values():
        if _by_span(test):
            yield seen.finding(
                "span-phase",
                "error",
                test.place,
                f"`{test.place.code}` decides between prefill and decode: a one-token tail of a prompt is taken for "
                "decode",
            )
        elif _by_whole_prompt(test) and not seen.uses_fields:
            text = f"`{test.place.code}` decides between prefill and decode: a chunk of a prompt is taken for decode"
            yield seen.finding("span-phase", "error", test.place, text)
    for test in seen.without.tests.values():
        if _by_span(test):
            yield seen.finding(
                "span-phase",
                "fallback",
                test.place,
                f"`{test.place.code}` decides between prefill and decode where the runner passes no fields",
            )


def _by_span(test: Test) -> bool:
    """Chunks go one way; a prompt's one-token tail goes the other, as decode does."""
    if not {row.name for row in (CHUNK, MIDDLE, LAST, TAIL, DECODE)} <= test.outcomes.keys():
        return False
    chunk, middle, last, tail, decode = (test.outcomes[row.name] for row in (CHUNK, MIDDLE, LAST, TAIL, DECODE))
    return chunk == middle == last != tail == decode


def _by_whole_prompt(test: Test) -> bool:
    """Only a prompt that is scheduled whole goes one way; its chunks go the other, as decode does."""
    outcomes = {row.name: test.outcomes.get(row.name) for row in (WHOLE, CHUNK, MIDDLE, LAST, TAIL, DECODE)}
    whole = outcomes.pop(WHOLE.name)
    return None not in (whole, *outcomes.values()) and set(outcomes.values()) == {not whole}


def _by_phase(test: Test) -> bool:
    """A prompt's one-token tail goes the way of its other chunks, and decode does not."""
    if not {row.name for row in (MIDDLE, TAIL, DECODE)} <= test.outcomes.keys():
        return False
    middle, tail, decode = (test.outcomes[row.name] for row in (MIDDLE, TAIL, DECODE))
    return middle == tail != decode


def span_beside_phase(seen: Seen) -> Iterator[Finding]:
    for test in seen.with_fields.tests.values():
        if not {row.name for row in (MIDDLE, TAIL, DECODE, LONG_DECODE)} <= test.outcomes.keys():
            continue
        middle, tail, decode, long = (test.outcomes[row.name] for row in (MIDDLE, TAIL, DECODE, LONG_DECODE))
        does_something = any(test.touches) if middle is None else test.touches[middle]
        if decode not in (long, tail, middle) and does_something:
            yield seen.finding(
                "span-beside-phase",
                "fallback",
                test.place,
                f"`{test.place.code}` takes a decode span of several tokens for prefill, whatever its phase",
            )


def progress_phase(seen: Seen) -> Iterator[Finding]:
    # Where the phase is known, a first or a last chunk may well be treated in a way of its own; and after the forward
    # pass a prompt's last chunk is what decode is: a row that is sampled.
    if seen.kind != "preprocess" or seen.by_phase or contract.IS_PREFILL in seen.with_fields.reads:
        return
    for test in seen.with_fields.tests.values():
        if all(test.touches) and test.followed and _by_progress(test):
            text = f"`{test.place.code}` decides between prefill and decode: a prompt's last chunk is taken for decode"
            yield seen.finding("progress-phase", "error", test.place, text)


def _by_progress(test: Test) -> bool:
    """A prompt's first chunk goes one way; its last, of whatever length, goes the other, as decode does."""
    if not {row.name for row in (CHUNK, LAST, TAIL, DECODE)} <= test.outcomes.keys():
        return False
    first, last, tail, decode = (test.outcomes[row.name] for row in (CHUNK, LAST, TAIL, DECODE))
    return first is not None and first != last == tail == decode


def own_counter(seen: Seen) -> Iterator[Finding]:
    grave: Severity = "fallback" if seen.uses_fields else "error"
    traces: Sequence[tuple[Trace, Severity]] = ((seen.with_fields, grave), (seen.without, "fallback"))
    for trace, severity in traces:
        for event in _of(trace, "slice", "consumed"):
            names = event.keys if event.kind == "consumed" else _counted(event.keys, seen)
            if event.row.is_prefill and names:
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
    of_decode = {event.place.key for event in _of(seen.with_fields, "return") if not event.row.is_prefill}
    for event in _of(seen.with_fields, "return"):
        parts = event.value.elements
        if event.row not in (CHUNK, MIDDLE) or parts is None or len(parts) not in (3, 5):
            continue
        rows = parts[1]
        named = any("prompt" in key or "prefill" in key for key in rows.keys)
        only_here = event.certain or event.place.key not in of_decode
        if rows.span or rows.part or not rows.state or not (only_here or named):
            continue
        if rows.checked:
            text = "the whole prompt is returned, and a chunk of it is refused with an error: it cannot run chunked"
            yield seen.finding("whole-prompt", "note", event.place, text)
        else:
            text = "rows of the whole prompt are returned for a chunk; the runner writes the first rows again and again"
            yield seen.finding("whole-prompt", "error", event.place, text)


def mtp_in_prefill(seen: Seen) -> Iterator[Finding]:
    of_decode = {event.place.key for event in _of(seen.with_fields, "mtp") if not event.row.is_prefill}
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
    mtp_in_prefill,
    returned_keywords,
    field_default,
)


def _of(trace: Trace, *kinds: str) -> Iterable[Event]:
    return [event for event in trace.events if event.kind in kinds]


def _updates(kind: str, value: Value) -> Value | None:
    if kind == "postprocess":
        return value
    return value.elements[-1] if value.elements else None


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
