# SPDX-License-Identifier: Apache-2.0
"""What a walk knows of a value in a hook: its Python value where it is known, and what it is made of."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from omni_npu_phase.lint.source import Function, Model, Source

UNKNOWN: Final = object()
Key = tuple[Any, ...]
"""A test of a hook: its node, behind the calls that lead to it."""


@dataclass(frozen=True, slots=True)
class Place:
    """A node of a file."""

    source: Source
    node: ast.AST

    @property
    def key(self) -> tuple[str, int, int]:
        return str(self.source.path), getattr(self.node, "lineno", 1), getattr(self.node, "col_offset", 0)

    @property
    def code(self) -> str:
        text = " ".join(ast.unparse(self.node).split())
        return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True, slots=True)
class Callee:
    """A function that can be followed, with what it is bound to."""

    source: Source
    node: Function
    owner: ast.ClassDef | None = None
    bound: Value | None = None
    scope: Any = None
    """The frame in which a nested function was defined."""


@dataclass(eq=False, slots=True)
class Value:
    """One value: what it is, as far as that is known, and what it is made of.

    ``const``: the Python value; ``elements``: of a tuple or list; ``items``: by key or attribute; ``each``: what
    iteration gives; ``shape``: sizes of a tensor's known leading dimensions; ``length_of``: it is the length of that.
    """

    const: Any = UNKNOWN
    elements: list[Value] | None = None
    items: dict[str, Value] | None = None
    each: Value | None = None
    shape: list[Value] | None = None
    instance: Model | None = None
    """The class of an object whose methods can be followed."""

    span: bool = False
    """Made from the step's tokens, or from their number."""
    state: bool = False
    """Made from what is kept for the request."""
    keys: frozenset[str] = frozenset()
    """The names under which that is kept."""
    keywords: bool = False
    """All the keywords that the runner passes to a hook."""
    live: bool = False
    """A dictionary of the runner itself, not a copy made for the call."""
    module: bool = False
    """An attribute of the model, perhaps a layer: calling it says nothing about the result."""
    part: bool = False
    """A slice, an entry or one row of something."""
    test: Place | None = None
    """Where the span was compared to make this."""
    place: Place | None = None
    key_places: dict[str, Place] = field(default_factory=dict)
    length_of: Value | None = None
    begun: frozenset[str] = frozenset()
    """A slice without an end, begun at counters of these names."""
    rest_of: frozenset[str] = frozenset()
    """What is left of the value kept under these names when the span is cut off its front."""

    fields: bool = False
    """Follows from the runner's progress, or from its phase."""
    chosen: frozenset[Key] = frozenset()
    """The tests under which it was made."""
    cut: bool = False
    """Rows up to where the prompt ends, even if the span goes beyond it."""
    measured: bool = False
    """Its length is compared with the span."""


def concrete(value: Value) -> Any:
    """The Python value, also of a tuple of known values; :data:`UNKNOWN` otherwise."""
    if value.const is not UNKNOWN:
        return value.const
    if value.elements is not None:
        parts = [concrete(each) for each in value.elements]
        if all(part is not UNKNOWN for part in parts):
            return tuple(parts)
    return UNKNOWN


def truth(value: Value) -> bool | None:
    """Whether a test takes the value as true; None where that is not known."""
    known = concrete(value)
    if known is not UNKNOWN:
        return bool(known)
    if value.elements is not None:
        return bool(value.elements)
    if value.instance is not None:
        return True
    return None


def derived(values: Iterable[Value]) -> Value:
    """Something unknown that is made from these."""
    parts = list(_flat(values))
    kept = [part for part in parts if part.state]
    rows = [part for part in parts if part.state or part.span]
    return Value(
        span=any(part.span for part in parts),
        state=bool(kept),
        keys=frozenset().union(*(part.keys for part in parts)),
        chosen=frozenset().union(*(part.chosen for part in parts)),
        fields=any(part.fields for part in parts),
        part=bool(kept) and all(part.part for part in kept),
        cut=bool(rows) and all(part.cut for part in rows),
        test=next((part.test for part in parts if part.test is not None), None),
    )


def entries(value: Value) -> list[Value] | None:
    """What iteration gives, where its number is known: the parts of a tuple, or the rows of a tensor."""
    if value.elements is not None or not value.shape or not isinstance(value.shape[0].const, int):
        return value.elements
    row = derived([value])
    row.shape, row.part = value.shape[1:], True
    return [row] * value.shape[0].const


def _flat(values: Iterable[Value], depth: int = 0) -> Iterable[Value]:
    for value in values:
        yield value
        if depth < 3:
            if value.elements is not None:
                yield from _flat(value.elements, depth + 1)
            elif value.items is not None and not value.keywords and not value.state:
                yield from _flat(value.items.values(), depth + 1)


def joined(one: Value, other: Value) -> Value:
    """Either of two values."""
    if one is other:
        return one
    same = type(one.const) is type(other.const) and one.const == other.const
    made = Value(const=one.const if same else UNKNOWN)
    if one.elements is not None and other.elements is not None and len(one.elements) == len(other.elements):
        made.elements = [joined(left, right) for left, right in zip(one.elements, other.elements, strict=True)]
    made.items = one.items if one.items is other.items else None
    if made.items is None and (one.items or other.items):
        made.items = _joined_items(one, other)
    if one.shape is not None and other.shape is not None:
        same = [concrete(size) for size in one.shape] == [concrete(size) for size in other.shape]
        made.shape = one.shape if same else None
    made.instance = one.instance if one.instance is other.instance else None
    made.each = one.each or other.each
    made.test, made.place = one.test or other.test, one.place or other.place
    made.key_places = {**one.key_places, **other.key_places}
    for name in ("span", "state", "live", "module"):
        setattr(made, name, getattr(one, name) or getattr(other, name))
    for name in ("fields", "cut", "keywords"):
        setattr(made, name, getattr(one, name) and getattr(other, name))
    for name in ("part", "measured"):
        setattr(made, name, made.state and all(getattr(each, name) for each in (one, other) if each.state))
    for name in ("keys", "chosen", "begun", "rest_of"):
        setattr(made, name, getattr(one, name) | getattr(other, name))
    return made


def _joined_items(one: Value, other: Value) -> dict[str, Value]:
    """By key; what is kept for the request may have any key."""
    items: dict[str, Value] = {}
    for key in {**(one.items or {}), **(other.items or {})}:
        sides = [(side.items or {}).get(key) for side in (one, other)]
        kept = [Value(state=True, keys=frozenset({key})) if side.state else None for side in (one, other)]
        left, right = (value or instead for value, instead in zip(sides, kept, strict=True))
        items[key] = joined(left, right) if left is not None and right is not None else left or right or Value()
    return items
