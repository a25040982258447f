# SPDX-License-Identifier: Apache-2.0
"""What a hook's expressions are for one row, and what it keeps under which names."""

from __future__ import annotations

import ast
import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from omni_npu_phase import contract
from omni_npu_phase.contract import Row
from omni_npu_phase.lint import operations
from omni_npu_phase.lint.effects import touches
from omni_npu_phase.lint.observed import Event, Observed, Outcome, Test
from omni_npu_phase.lint.source import Method, Model, Source, UnreadableError
from omni_npu_phase.lint.values import UNKNOWN, Callee, Key, Place, Value, concrete, derived, entries, joined, truth


@dataclass(slots=True)
class Frame:
    """A function that is being walked."""

    source: Source
    owner: ast.ClassDef | None
    node: ast.AST
    chain: tuple[int, ...]
    env: dict[str, Value] = field(default_factory=dict)
    scope: Frame | None = None
    returned: list[Value] = field(default_factory=list)
    shared: set[str] = field(default_factory=set)
    """Names that it declares global or nonlocal."""


class Expressions(ABC):
    """The expressions of a hook, for one row. ``fields``: whether the runner passes the three fields."""

    def __init__(self, model: Model, row: Row, fields: bool, observed: Observed) -> None:
        self.row = row
        self.fields = fields
        self.observed = observed
        self.this = Value(instance=model, items={}, module=True)
        self.model = model
        self.top: Frame | None = None
        self.unsure = 0
        self.statements = 0
        self.asked = 0
        self.stack: list[ast.AST] = []
        self.under: frozenset[Key] = frozenset()

    @abstractmethod
    def _call(
        self,
        callee: Callee,
        given: Sequence[Value],
        named: Mapping[str, Value],
        unpacked: Value | None,
        chain: tuple[int, ...],
    ) -> Value:
        """Follow a call."""

    def _tested(
        self,
        node: ast.AST,
        test: Value,
        outcome: Outcome,
        frame: Frame,
        touches: tuple[bool, bool],
        followed: bool = True,
    ) -> frozenset[Key]:
        key = (self.fields, *frame.chain, id(node))
        place = test.test or Place(frame.source, getattr(node, "test", node))
        seen = self.observed.tests.setdefault(key, Test(place, touches, followed))
        if seen.outcomes.setdefault(self.row, outcome) != outcome:
            seen.outcomes[self.row] = None
            seen.mixed = True
        if outcome is None or seen.mixed:
            seen.made_of.append(test)
        return frozenset({key})

    def _chosen(self, value: Value, tests: frozenset[Key] | None = None) -> Value:
        """The same value, made under these tests, or under those that lead here."""
        tests = self.under if tests is None else tests
        if tests <= value.chosen or value is self.this:
            return value
        if value.items is None and (value.state or value.instance is not None):
            value.items = {}  # what is stored in one is stored in the other
        made = copied(value)
        made.chosen = value.chosen | tests
        if value.elements is not None:
            made.elements = [self._chosen(each, tests) for each in value.elements]
        return made

    def _escaped(self, values: Sequence[Value], frame: Frame) -> None:
        """A phase that goes where it is not followed decides there."""
        for value in values:
            if isinstance(value.const, bool) and (value.fields or value.test is not None):
                place = value.test or Place(frame.source, frame.node)
                self._tested(place.node, value, value.const, frame, (True, True), followed=False)
            elif value.elements is not None:
                self._escaped(value.elements, frame)
            elif value.items is not None and value.instance is None and not value.state:
                self._escaped(list(value.items.values()), frame)

    def _event(
        self,
        kind: str,
        place: Place | None,
        frame: Frame,
        value: Value,
        keys: frozenset[str] = frozenset(),
    ) -> None:
        where = place or Place(frame.source, frame.node)
        self.observed.events.append(Event(kind, where, self.row, not self.unsure, value, keys, self.under))

    def _removed(self, holder: Value, key: Value, node: ast.AST, frame: Frame) -> None:
        if holder.live and key.const in contract.FIELDS:
            self._event("runner-field", Place(frame.source, node), frame, Value(const=key.const))

    def _sliced(self, lower: Value, upper: Value, place: Place, frame: Frame) -> None:
        counters = lower.keys & upper.keys if lower.keys else frozenset()
        if counters and upper.span:
            self._event("slice", place, frame, lower, counters)

    def _assign(self, target: ast.expr, value: Value, frame: Frame) -> None:
        if isinstance(target, ast.Name):
            frame.env[target.id] = self._chosen(value)
            if target.id in frame.shared:
                self._escaped([value], frame)
        elif isinstance(target, (ast.Tuple, ast.List)):
            known = entries(value)
            starred = [at for at, each in enumerate(target.elts) if isinstance(each, ast.Starred)]
            if known is not None and starred:
                first, last = starred[0], len(known) - (len(target.elts) - 1 - starred[0])
                known = [*known[:first], Value(elements=known[first:last], span=value.span), *known[last:]]
            if known is not None and len(known) == len(target.elts):
                for each, part in zip(target.elts, known, strict=True):
                    self._assign(each, part, frame)
            elif value.shape is not None and known is not None:
                raise operations.BrokenError
            else:
                for each in target.elts:
                    self._assign(each, value.each or derived([value]), frame)
        elif isinstance(target, ast.Starred):
            self._assign(target.value, value, frame)
        elif isinstance(target, ast.Subscript):
            holder = self._eval(target.value, frame)
            key = self._eval(target.slice, frame)
            if isinstance(key.const, str):
                self._store(holder, key.const, value, Place(frame.source, target), frame)
            elif holder.module or holder.state:
                self._kept(holder.keys, value)
                self._escaped([value], frame)
        elif isinstance(target, ast.Attribute):
            self._store(self._eval(target.value, frame), target.attr, value, Place(frame.source, target), frame)

    def _store(self, holder: Value, key: str, value: Value, place: Place, frame: Frame) -> None:
        self._put(holder, key, value, place, frame)
        value = self._chosen(value)
        if holder.state or holder.instance is not None:
            self._escaped([value], frame)
        if holder.items is None:
            holder.items = {}
        if self.unsure and (holder.state or holder.instance is not None):
            value = joined(holder.items.get(key, Value(state=True, keys=frozenset({key}))), value)
        holder.items[key] = value
        holder.key_places[key] = place

    def _put(self, holder: Value, key: str, value: Value, place: Place, frame: Frame) -> None:
        """Note what is kept under a name: for the request, in the model, or in a dictionary of the hook's own."""
        self._kept(frozenset({_named(holder, key)}), value)
        if key in contract.FIELDS and not holder.module and holder.instance is None:
            self._event("runner-field" if holder.state else "field-key", place, frame, Value(const=key))
        if key in value.rest_of:
            self._event("consumed", place, frame, value, frozenset({key}))
        if key == contract.MTP_INPUTS and value.const is not None:
            self._event("mtp", place, frame, value)

    def _kept(self, keys: frozenset[str], value: Value) -> None:
        self.observed.stored |= keys
        if value.span:
            self.observed.advanced |= keys

    def _update(
        self, holder: Value, given: Sequence[Value], named: Mapping[str, Value], place: Place, frame: Frame
    ) -> None:
        for each in given:
            for key, value in (each.items or {}).items() if not each.keywords else ():
                self._store(holder, key, value, each.key_places.get(key, place), frame)
        for key, value in named.items():
            self._store(holder, key, value, place, frame)

    def _eval(self, node: ast.expr, frame: Frame) -> Value:
        method: Callable[[Any, Frame], Value] | None = getattr(self, _method_for(type(node).__name__), None)
        if method is not None:
            return method(node, frame)
        inner = [self._eval(each, frame) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
        return derived(inner)

    def _eval_constant(self, node: ast.Constant, frame: Frame) -> Value:
        return Value(const=node.value)

    def _eval_name(self, node: ast.Name, frame: Frame) -> Value:
        scope: Frame | None = frame
        while scope is not None:
            if node.id in scope.env:
                return scope.env[node.id]
            if node.id in scope.shared:
                return Value(state=True, keys=frozenset({node.id}))
            scope = scope.scope
        return self._global(frame.source, node.id)

    def _global(self, source: Source, name: str) -> Value:
        if name in source.functions:
            return Value(const=Callee(source, source.functions[name]))
        if name in source.classes:
            return Value(const=Model.of(source, name))
        if name in source.constants:
            try:
                return Value(const=ast.literal_eval(source.constants[name]))
            except (ValueError, SyntaxError):
                return self._eval_folded(source, name)
        if name in source.imported:
            module, inner = source.imported[name]
            own = {"IS_PREFILL": contract.IS_PREFILL, "NUM_COMPUTED": contract.NUM_COMPUTED}
            own |= {"PROMPT_LEN": contract.PROMPT_LEN, "MTP_INPUTS": contract.MTP_INPUTS}
            if module == contract.__name__ and inner in own:
                return Value(const=own[inner])
            if self._near(source, module):
                try:
                    there = source.found(name)
                except (UnreadableError, RecursionError):
                    there = None
                if there is not None:
                    return self._global(*there)
        return Value()

    def _eval_folded(self, source: Source, name: str) -> Value:
        """A constant that is written as an expression, of strings put together for example."""
        written = source.constants[name]
        if any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(written)):
            return Value()
        if isinstance(written, (ast.BinOp, ast.Lambda, ast.Name)):
            return self._eval(written, Frame(source, None, written, ()))
        return Value()

    @staticmethod
    def _near(source: Source, module: str) -> bool:
        """Whether a module belongs to the package that the file is in."""
        return module.startswith(".") or module.partition(".")[0] in source.packages

    def _eval_tuple(self, node: ast.Tuple | ast.List, frame: Frame) -> Value:
        if any(isinstance(each, ast.Starred) for each in node.elts):
            return derived(self._eval(each, frame) for each in node.elts)
        return Value(elements=[self._eval(each, frame) for each in node.elts], place=Place(frame.source, node))

    _eval_list = _eval_tuple

    def _eval_dict(self, node: ast.Dict, frame: Frame) -> Value:
        made = Value(items={}, place=Place(frame.source, node))
        assert made.items is not None
        for key, inner in zip(node.keys, node.values, strict=True):
            value = self._eval(inner, frame)
            if key is None:
                if value.keywords:
                    made.keywords, made.state, made.items = True, True, {**(value.items or {}), **made.items}
                else:
                    made.items.update(value.items or {})
                    made.key_places.update(value.key_places)
                continue
            name = self._eval(key, frame).const
            if not isinstance(name, str):
                made.items[repr(name)] = value
                continue
            place = Place(frame.source, key)
            self._put(made, name, value, place, frame)
            made.items[name] = value
            made.key_places[name] = place
        return made

    def _eval_dictcomp(self, node: ast.DictComp, frame: Frame) -> Value:
        return derived([self._eval(each.iter, frame) for each in node.generators])

    def _eval_listcomp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, frame: Frame) -> Value:
        saved = dict(frame.env)
        over = [self._eval(each.iter, frame) for each in node.generators]
        known = entries(over[0])
        if len(over) == 1 and not node.generators[0].ifs and known is not None and len(known) <= 16:
            parts: list[Value] = []
            for part in known:
                self._assign(node.generators[0].target, part, frame)
                parts.append(self._eval(node.elt, frame))
            frame.env = saved
            return Value(elements=parts, span=over[0].span)
        for each, values in zip(node.generators, over, strict=True):
            self._assign(each.target, values.each or derived([values]), frame)
        inner = self._eval(node.elt, frame)
        frame.env = saved
        return derived([*over, inner])

    _eval_setcomp = _eval_generatorexp = _eval_listcomp

    def _eval_joinedstr(self, node: ast.JoinedStr, frame: Frame) -> Value:
        parts = [self._eval(each, frame) for each in node.values]
        result = derived(parts)
        if all(part.const is not UNKNOWN for part in parts):
            result.const = "".join(str(part.const) for part in parts)
        return result

    def _eval_formattedvalue(self, node: ast.FormattedValue, frame: Frame) -> Value:
        value = self._eval(node.value, frame)
        return derived([value]) if node.format_spec is not None or node.conversion != -1 else value

    def _eval_lambda(self, node: ast.Lambda, frame: Frame) -> Value:
        return Value(const=Callee(frame.source, node, frame.owner, None, frame))

    def _eval_namedexpr(self, node: ast.NamedExpr, frame: Frame) -> Value:
        value = self._eval(node.value, frame)
        self._assign(node.target, value, frame)
        return value

    def _eval_await(self, node: ast.Await, frame: Frame) -> Value:
        return self._eval(node.value, frame)

    def _eval_ifexp(self, node: ast.IfExp, frame: Frame) -> Value:
        test = self._eval(node.test, frame)
        outcome = truth(test)
        key = self._tested(node, test, outcome, frame, (touches([node.orelse]), touches([node.body])))
        if outcome is not None:
            value = self._eval(node.body if outcome else node.orelse, frame)
        else:
            self.unsure += 1
            value = joined(self._eval(node.body, frame), self._eval(node.orelse, frame))
            self.unsure -= 1
        if test.span and value.test is None:
            value = copied(value)
            value.span, value.test = True, test.test
        return self._chosen(value, key)

    def _eval_boolop(self, node: ast.BoolOp, frame: Frame) -> Value:
        """Python's own, with a third outcome: what is not known decides nothing, a later operand may."""
        values: list[Value] = []
        stops = isinstance(node.op, ast.Or)
        for each in node.values:
            value = self._eval(each, frame)
            outcome = truth(value)
            values.append(value)
            if outcome is stops:
                break
        outcomes = [truth(value) for value in values]
        if outcomes[-1] is stops:
            if None not in outcomes:
                return self._tagged(values[-1], values)
            return self._tagged(Value(const=stops), values)
        open_ones = [value for value, outcome in zip(values, outcomes, strict=True) if outcome is None]
        if not open_ones:
            return self._tagged(values[-1], values)
        result = functools.reduce(joined, open_ones)
        return self._tagged(result, values)

    @staticmethod
    def _tagged(value: Value, parts: Sequence[Value]) -> Value:
        made = derived(parts)
        if made.fields and not value.fields:
            value = copied(value)
            value.fields = True
        if not made.span or (value.span and value.test is not None):
            return value
        value = copied(value)
        value.span, value.test = True, value.test or made.test
        return value

    def _eval_unaryop(self, node: ast.UnaryOp, frame: Frame) -> Value:
        value = self._eval(node.operand, frame)
        result = derived([value])
        if isinstance(node.op, ast.Not):
            outcome = truth(value)
            result.const = UNKNOWN if outcome is None else not outcome
        elif isinstance(value.const, (int, float)):
            signs: Mapping[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.Invert: operator.invert}
            result.const = signs.get(type(node.op), operator.pos)(value.const)
        return result

    def _eval_binop(self, node: ast.BinOp, frame: Frame) -> Value:
        left, right = self._eval(node.left, frame), self._eval(node.right, frame)
        if isinstance(node.op, ast.BitOr) and (left.items is not None or right.items is not None):
            made = Value(items={**(left.items or {}), **(right.items or {})}, place=Place(frame.source, node))
            made.keywords = left.keywords or right.keywords
            made.state = made.keywords
            made.key_places = {**left.key_places, **right.key_places}
            if made.keywords:
                self._update(made, [right] if left.keywords else [left], {}, Place(frame.source, node), frame)
            return made
        return operations.binary(node.op, left, right)

    def _eval_compare(self, node: ast.Compare, frame: Frame) -> Value:
        sides = [self._eval(each, frame) for each in (node.left, *node.comparators)]
        outcomes = [
            self._compared(op, left, right) for op, left, right in zip(node.ops, sides, sides[1:], strict=False)
        ]
        result = derived(sides)
        if False in outcomes:
            result.const = False
        elif None not in outcomes:
            result.const = True
        if result.span and result.test is None:
            result.test = Place(frame.source, node)
        if result.span:
            for side in sides:
                if side.length_of is not None:
                    side.length_of.measured = True
        return result

    def _compared(self, op: ast.cmpop, left: Value, right: Value) -> bool | None:
        one, other = concrete(left), concrete(right)
        if isinstance(op, (ast.In, ast.NotIn)):
            if one in contract.FIELDS and other is UNKNOWN:
                self.asked += 1
                self.observed.asked = True
                return self.fields is isinstance(op, ast.In)
            if one is UNKNOWN or other is UNKNOWN:
                return None
        if isinstance(op, (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)) and None in (one, other):
            value = right if one is None else left
            known = one if value is left else other
            if known is UNKNOWN and not (value.shape or value.elements is not None):
                return None
            same = known is None
            return same if isinstance(op, (ast.Is, ast.Eq)) else not same
        if one is UNKNOWN or other is UNKNOWN:
            return None
        try:
            return bool(operations.COMPARISONS[type(op)](one, other))
        except TypeError as error:
            if None in (one, other):
                raise operations.BrokenError from error
            return None

    def _eval_attribute(self, node: ast.Attribute, frame: Frame) -> Value:
        return self._attribute(self._eval(node.value, frame), node.attr, frame)

    def _attribute(self, holder: Value, name: str, frame: Frame) -> Value:
        if name in ("device", "dtype", "is_cuda"):
            return Value()
        if name == "ndim":
            return operations.size("dim", holder, ())
        if name == "shape":
            if holder.shape is not None:
                return Value(elements=holder.shape)
            return Value(span=holder.span, each=operations.length(holder))
        if holder.items is not None and name in holder.items:
            return holder.items[name]
        if name in contract.FIELDS and not holder.module:
            return self._field(name, None, frame, Place(frame.source, frame.node))
        model = holder.instance or (holder.const if isinstance(holder.const, Model) else None)
        if model is not None:
            found = model.method(name)
            if found is not None:
                return self._bound(found, holder)
            for source, cls in model.lineage:
                for each in cls.body:
                    if isinstance(each, ast.Assign) and any(getattr(to, "id", None) == name for to in each.targets):
                        return self._eval(each.value, Frame(source, cls, each, ()))
            if holder is self.this:
                return self._child(holder, name, module=True)
            return derived([holder])
        if holder.module:
            return self._child(holder, name, module=True)
        if holder.state and not holder.keywords:
            return self._child(holder, name)
        return derived([holder])

    def _bound(self, method: Method, holder: Value) -> Value:
        bound: Value | None = holder
        if "staticmethod" in method.decorators:
            bound = None
        elif "classmethod" in method.decorators:
            bound = Value(const=holder.instance or holder.const)
        elif isinstance(holder.const, Model):
            bound = None
        callee = Callee(method.source, method.node, method.cls, bound)
        if method.decorators & {"property", "cached_property"} and holder.instance is not None:
            return self._call(callee, [], {}, None, ())
        return Value(const=callee)

    @staticmethod
    def _child(holder: Value, name: str, module: bool = False) -> Value:
        if holder.items is None:
            holder.items = {}
        keys = frozenset({_named(holder, name)})
        return holder.items.setdefault(name, Value(state=True, keys=keys, module=module))

    def _key(self, holder: Value, key: Value, default: Value | None, frame: Frame, place: Place) -> Value:
        name = key.const
        if name in contract.FIELDS and (holder.items is None or name not in holder.items):
            return self._field(name, default, frame, place)
        if isinstance(name, str):
            by_span = key.span or key.fields
            tests = self._tested(place.node, key, name, frame, (True, True)) if by_span else frozenset()
            if holder.items is not None and name in holder.items:
                return self._chosen(holder.items[name], tests)
            if holder.state or holder.keywords:
                return self._chosen(self._child(holder, name), tests)
            if holder.items is not None:
                return default or Value()
        if holder.items is not None and not holder.state:
            tests = key.chosen
            if (key.span or key.fields) and name is not UNKNOWN:
                outcome = repr(name) in holder.items and repr(name)
                tests |= self._tested(place.node, key, outcome, frame, (True, True))
            if repr(name) in holder.items or name is not UNKNOWN:
                return self._chosen(holder.items.get(repr(name), default or Value()), tests)
            return self._any_of([*holder.items.values()], key, place.node, frame)
        if holder.each is not None:
            return holder.each
        return derived([holder])

    def _any_of(self, values: Sequence[Value], key: Value, node: ast.AST, frame: Frame) -> Value:
        """What an unknown key or name chooses among these."""
        chosen = self._tested(node, key, None, frame, (True, True))
        return self._chosen(functools.reduce(joined, values) if values else Value(), chosen | key.chosen)

    def _field(self, name: str, default: Value | None, frame: Frame, place: Place) -> Value:
        if default is not None and default.const not in (UNKNOWN, None) and not default.span:
            self._event("field-default", place, frame, Value(const=name))
        self.asked += 1
        self.observed.asked = True
        if self.fields:
            self.observed.reads.add(name)
            return Value(const=self.row.fields[name], fields=name != contract.PROMPT_LEN)
        if default is None:
            raise operations.BrokenError
        return default

    def _eval_subscript(self, node: ast.Subscript, frame: Frame) -> Value:
        holder = self._eval(node.value, frame)
        place = Place(frame.source, node)
        if isinstance(node.slice, ast.Slice):
            return self._slice(holder, node.slice, place, frame)
        if isinstance(node.slice, ast.Tuple) and node.slice.elts and isinstance(node.slice.elts[0], ast.Slice):
            return self._slice(holder, node.slice.elts[0], place, frame)
        key = self._eval(node.slice, frame)
        tests = key.chosen
        if holder.elements is not None and isinstance(key.const, int) and (key.span or key.fields):
            tests |= self._tested(node, key, key.const, frame, (True, True))
        if holder.elements is not None and isinstance(key.const, int) and -len(holder.elements) <= key.const:
            if key.const < len(holder.elements):
                return self._chosen(holder.elements[key.const], tests)
            return Value()
        if holder.elements and key.const is UNKNOWN:
            return self._any_of(holder.elements, key, node, frame)
        known = holder.items is not None and not (holder.state and not holder.keywords)
        if isinstance(key.const, str) or known or holder.each is not None:
            return self._key(holder, key, None, frame, place)
        part = derived([holder, Value(span=key.span, fields=key.fields, chosen=key.chosen)])
        part.keys |= key.keys
        part.part = holder.part or isinstance(key.const, int) or key.span
        return part

    def _slice(self, holder: Value, node: ast.Slice, place: Place, frame: Frame) -> Value:
        lower = self._eval(node.lower, frame) if node.lower is not None else Value(const=0)
        upper = self._eval(node.upper, frame) if node.upper is not None else None
        if node.lower is None and upper is None:
            return holder
        bounds = [lower] if upper is None else [lower, upper]
        if holder.elements is not None and all(isinstance(each.const, int) for each in bounds):
            return Value(elements=holder.elements[lower.const : None if upper is None else upper.const])
        result = derived([Value(span=each.span, fields=each.fields, chosen=each.chosen) for each in (*bounds, holder)])
        result.state, result.keys, result.part = holder.state, holder.keys, True
        result.measured = holder.measured
        if holder.state:
            result.cut = holder.cut or (lower.fields and (upper is None or upper.span or upper.fields))
        else:
            result.cut = holder.cut or (upper is not None and upper.fields)
        result.shape = _cut(holder.shape, lower, upper)
        if upper is None:
            result.begun = lower.keys if not lower.span else frozenset()
            if lower.span and not lower.keys:
                result.rest_of = holder.keys
        else:
            self._sliced(lower, upper, place, frame)
            if holder.begun and upper.span:
                self._event("slice", place, frame, holder, holder.begun)
        return result


@functools.cache
def _method_for(kind: str) -> str:
    return f"_eval_{kind.lower()}"


def _cut(shape: list[Value] | None, lower: Value, upper: Value | None) -> list[Value] | None:
    """The shape of a slice of known length."""
    ends = (lower.const, None if upper is None else upper.const)
    if not shape or not isinstance(shape[0].const, int) or not all(isinstance(end, int | None) for end in ends):
        return None
    return [Value(const=len(range(shape[0].const)[slice(*ends)]), span=True), *shape[1:]]


def _named(holder: Value, name: str) -> str:
    """The name under which something is kept: attributes of the model apart from keys of a request."""
    return f"self.{name}" if holder.module or holder.instance is not None else name


def copied(value: Value) -> Value:
    return replace(value, key_places=dict(value.key_places))
