# SPDX-License-Identifier: Apache-2.0
"""Calls of a hook: the model's own functions are followed, Python's and tensors' are known by name."""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal

from omni_npu_phase import contract
from omni_npu_phase.lint import operations
from omni_npu_phase.lint.effects import is_logger
from omni_npu_phase.lint.expressions import Expressions, Frame, _named, copied
from omni_npu_phase.lint.source import Model
from omni_npu_phase.lint.values import UNKNOWN, Callee, Place, Value, derived, entries, joined

Flow = Literal["next", "return", "raise", "loop"]
"""How it goes on after a statement."""

_DEPTH = 8
_STATEMENTS = 20_000
"""Beyond these, calls are not followed any further."""
_CHANGING = frozenset(
    {"append", "add", "extend", "insert", "update", "setdefault", "pop", "remove", "discard", "clear"}
)
_TYPES: Mapping[str, type] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "dict": dict,
    "list": list,
    "tuple": tuple,
}


class Calls(Expressions):
    """Expressions with the calls among them."""

    @abstractmethod
    def _block(self, statements: Sequence[ast.stmt], frame: Frame) -> Flow:
        """Walk statements in order."""

    def _eval_call(self, node: ast.Call, frame: Frame) -> Value:
        place = Place(frame.source, node)
        holder = None
        if isinstance(node.func, ast.Attribute):
            if self._is_super(node.func.value):
                found = self.model.method(node.func.attr, after=frame.owner)
                function = self._bound(found, self.this) if found is not None else Value()
            else:
                holder = self._eval(node.func.value, frame)
                function = self._attribute(holder, node.func.attr, frame) if holder.shape is None else Value()
        else:
            function = self._eval(node.func, frame)
        given, named, unpacked = self._arguments(node, frame)
        chosen = function.chosen
        if isinstance(function.const, Callee):
            made = self._call(function.const, given, named, unpacked, (*frame.chain, id(node)))
            return self._chosen(made, chosen)
        if isinstance(function.const, Model):
            return self._made(function.const, given, named, unpacked, frame, node)
        if isinstance(node.func, ast.Name):
            built_in = self._builtin(node.func.id, given, named, frame, place)
            if built_in is not None:
                return built_in
        if isinstance(node.func, ast.Attribute) and holder is not None:
            known = self._method(node.func.attr, holder, given, named, frame, place)
            if known is not None:
                return known
            if is_logger(node.func):
                return Value()
            self._escaped([*given, *named.values()], frame)
            base = [Value(chosen=chosen)] if holder.module else [holder]
            return derived([*base, *given, *named.values(), *([unpacked] if unpacked else [])])
        if not is_logger(node.func):
            self._escaped([*given, *named.values()], frame)
        return derived([Value(chosen=chosen), *given, *named.values(), *([unpacked] if unpacked else [])])

    @staticmethod
    def _is_super(node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"

    def _arguments(self, node: ast.Call, frame: Frame) -> tuple[list[Value], dict[str, Value], Value | None]:
        given: list[Value] = []
        for each in node.args:
            value = self._eval(each.value if isinstance(each, ast.Starred) else each, frame)
            if isinstance(each, ast.Starred) and value.elements is not None:
                given += value.elements
            else:
                given.append(value)
        named: dict[str, Value] = {}
        unpacked: Value | None = None
        for keyword in node.keywords:
            value = self._eval(keyword.value, frame)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif value.keywords or value.items is None:
                unpacked = value
            else:
                named.update(value.items)
        return given, named, unpacked

    def _call(
        self,
        callee: Callee,
        given: Sequence[Value],
        named: Mapping[str, Value],
        unpacked: Value | None,
        chain: tuple[int, ...],
        top: bool = False,
    ) -> Value:
        everything = [*given, *named.values(), *([unpacked] if unpacked else [])]
        too_deep = len(self.stack) >= _DEPTH or callee.node in self.stack or self.statements > _STATEMENTS
        if too_deep and not top:
            return derived(everything)
        scope = callee.scope if isinstance(callee.scope, Frame) else None
        frame = Frame(callee.source, callee.owner, callee.node, chain, scope=scope)
        self._bind(callee, list(given), dict(named), unpacked, frame)
        if top:
            self.top = frame
        unsure, under = self.unsure, self.under
        self.stack.append(callee.node)
        try:
            if isinstance(callee.node, ast.Lambda):
                return self._eval(callee.node.body, frame)
            flow = self._block(callee.node.body, frame)
        finally:
            self.stack.pop()
            self.unsure, self.under = unsure, under
        if flow == "raise" and not frame.returned:
            raise operations.RaisedError
        returned = frame.returned or [Value(const=None)]
        result = returned[0]
        for value in returned[1:]:
            result = joined(result, value)
        return result

    def _bind(
        self, callee: Callee, given: list[Value], named: dict[str, Value], unpacked: Value | None, frame: Frame
    ) -> None:
        arguments = callee.node.args
        if callee.bound is not None:
            given.insert(0, callee.bound)
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults: dict[str, ast.expr] = {}
        first = len(positional) - len(arguments.defaults)
        defaults.update(
            {each.arg: default for each, default in zip(positional[first:], arguments.defaults, strict=True)}
        )
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            if default is not None:
                defaults[each.arg] = default
        for each in positional:
            if given:
                frame.env[each.arg] = given.pop(0)
        if arguments.vararg is not None:
            frame.env[arguments.vararg.arg] = Value(elements=given)
        outer = Frame(callee.source, callee.owner, callee.node, ())
        for each in (*positional, *arguments.kwonlyargs):
            name = each.arg
            if name in frame.env:
                continue
            if name in named:
                frame.env[name] = named.pop(name)
            elif unpacked is not None and name in contract.FIELDS:
                instead = self._eval(defaults[name], outer) if name in defaults else None
                frame.env[name] = self._field(name, instead, frame, Place(callee.source, each))
            elif unpacked is not None and unpacked.keywords:
                frame.env[name] = self._child(unpacked, name)
            elif name in defaults:
                frame.env[name] = self._eval(defaults[name], outer)
            else:
                frame.env[name] = Value() if unpacked is None else derived([unpacked])
        if arguments.kwarg is not None:
            rest = unpacked or Value(items={})
            if named:
                rest = copied(rest)
                rest.items = {**(rest.items or {}), **named}
            frame.env[arguments.kwarg.arg] = rest

    def _made(
        self,
        model: Model,
        given: Sequence[Value],
        named: Mapping[str, Value],
        unpacked: Value | None,
        frame: Frame,
        node: ast.Call,
    ) -> Value:
        """An object of a class of the package; a dataclass keeps its arguments by name."""
        made = Value(instance=model, items={})
        assert made.items is not None
        init = model.method("__init__")
        if init is not None:
            callee = Callee(init.source, init.node, init.cls, made)
            self._call(callee, given, named, unpacked, (*frame.chain, id(node)))
            return made
        names = [
            each.target.id
            for _, cls in model.lineage[::-1]
            for each in cls.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        ]
        made.items.update(dict(zip(names, given, strict=False)))
        made.items.update(named)
        return made

    def _builtin(
        self, name: str, given: Sequence[Value], named: Mapping[str, Value], frame: Frame, place: Place
    ) -> Value | None:
        if not given:
            return self._dict(Value(items={}), named, frame, place) if name == "dict" else None
        first = given[0]
        if name == "len":
            return operations.length(first)
        if name == "bool" or name in operations.NUMBERS:
            return operations.number(name, given)
        if name == "isinstance" and len(given) == 2:
            return self._is_instance(first, place, frame)
        if name in ("getattr", "hasattr") and len(given) >= 2:
            key = given[1].const
            if not isinstance(key, str):
                return self._any_of([], given[1], place.node, frame)
            if name == "getattr":
                chosen = given[1].chosen
                if given[1].span or given[1].fields:
                    chosen |= self._tested(place.node, given[1], key, frame, (True, True))
                return self._chosen(self._attribute(first, key, frame), chosen)
            if first.items is not None and key in first.items:
                return Value(const=True)
            return Value(state=first.state or first.module, keys=frozenset({_named(first, key)}))
        if name == "setattr" and len(given) == 3 and isinstance(given[1].const, str):
            self._store(first, given[1].const, given[2], place, frame)
            return Value(const=None)
        if name == "dict" and (first.keywords or first.items is not None):
            made = copied(first)
            made.items, made.live = dict(first.items or {}), False
            return self._dict(made, named, frame, place)
        if name in ("slice", "range") and len(given) >= 2:
            self._sliced(first, given[1], place, frame)
            return derived(given)
        if name in ("list", "tuple", "reversed", "sorted"):
            return copied(first) if name in ("list", "tuple") else derived(given)
        if name == "enumerate" or name == "zip":
            lists = [entries(each) for each in given]
            if None not in lists:
                rows = [list(row) for row in zip(*(each or [] for each in lists), strict=False)]
                if name == "enumerate":
                    rows = [[Value(const=at, span=first.span), *row] for at, row in enumerate(rows)]
                return Value(elements=[Value(elements=row) for row in rows])
            inner = [each.each or derived([each]) for each in given]
            return Value(each=Value(elements=[Value(), *inner] if name == "enumerate" else inner))
        return None

    def _dict(self, made: Value, named: Mapping[str, Value], frame: Frame, place: Place) -> Value:
        """``dict(...)``, as a display with the same keys."""
        for key, value in named.items():
            self._put(made, key, value, place, frame)
        made.items = {**(made.items or {}), **named}
        return made

    def _is_instance(self, value: Value, place: Place, frame: Frame) -> Value:
        call = place.node
        assert isinstance(call, ast.Call)
        kind = call.args[1]
        written = [ast.unparse(each) for each in (kind.elts if isinstance(kind, ast.Tuple) else [kind])]
        known = [_TYPES[name] for name in written if name in _TYPES]
        result = Value(state=value.state, keys=value.keys)
        if value.const is not UNKNOWN:
            if value.const is None or len(known) == len(written):
                result.const = isinstance(value.const, tuple(known))
            elif isinstance(value.const, tuple(known)):
                result.const = True
        else:
            kinds = ("Tensor",) if value.shape is not None else ("dict", "Mapping") if value.keywords else ()
            if any(name.endswith(kinds) for name in written if kinds):
                result.const = True
        return result

    def _method(
        self,
        name: str,
        holder: Value,
        given: Sequence[Value],
        named: Mapping[str, Value],
        frame: Frame,
        place: Place,
    ) -> Value | None:
        if name in _CHANGING and holder.state:
            self.observed.stored |= holder.keys
        if name in ("get", "pop", "setdefault", "__getitem__") and given:
            key = given[0]
            if name == "pop":
                self._removed(holder, key, place.node, frame)
            default: Value | None = Value(const=None) if name in ("get", "setdefault") else None
            default = named.get("default", given[1] if len(given) > 1 else default)
            if name == "setdefault" and isinstance(key.const, str) and default is not None:
                known = holder.items is not None and key.const in holder.items
                if not holder.keywords and not holder.state and not known:
                    self._store(holder, key.const, default, place, frame)
            return self._key(holder, key, default, frame, place)
        if name == "__setitem__" and len(given) == 2 and isinstance(given[0].const, str):
            self._store(holder, given[0].const, given[1], place, frame)
            return Value(const=None)
        if name == "update":
            self._update(holder, given, named, place, frame)
            return Value(const=None)
        if name in operations.OF_TENSORS and given and not (holder.state or holder.span or holder.shape):
            holder, given = given[0], given[1:]  # torch.numel(ids) is ids.numel()
        if name in operations.SIZES:
            return operations.size(name, holder, [*given, *named.values()])
        if name == "prod" and given:
            return operations.number(name, given)
        if name == "item" and holder.shape and holder.shape[0].const not in (1, UNKNOWN):
            raise operations.BrokenError
        if name in operations.SAME_ROWS and (number := operations.only_number(holder)) is not None:
            return number
        if name == "Size" and given and given[0].elements is not None:
            return Value(elements=given[0].elements)
        if name in operations.SAME_ROWS and (holder.shape is not None or name != "item"):
            made = derived([holder])
            made.shape, made.measured, made.begun = holder.shape, holder.measured, holder.begun
            made.elements = holder.elements
            return made
        if name in operations.RESHAPES:
            return operations.reshaped(name, holder, given)
        if name == "narrow" and len(given) == 3:
            _, start, length = given
            if start.keys and length.span:
                self._event("slice", place, frame, start, start.keys)
            return derived([holder, start, length])
        if name == "arange" and len(given) >= 2:
            self._sliced(given[0], given[1], place, frame)
        return None
