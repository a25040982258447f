# SPDX-License-Identifier: Apache-2.0
"""What Python's operators and numbers, and tensors' sizes, make of values."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from omni_npu_phase.lint.values import UNKNOWN, Value, concrete, derived, truth


class BrokenError(Exception):
    """The walked code raises here: a field is missing, or a call does not fit."""


class RaisedError(BrokenError):
    """The walked code raises an error of its own."""


_ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.BitXor: operator.xor,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
COMPARISONS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
}
NUMBERS: Mapping[str, Callable[..., Any]] = {
    "prod": math.prod,
    "int": int,
    "float": float,
    "abs": abs,
    "min": min,
    "max": max,
    "sum": sum,
    "any": any,
    "all": all,
    "round": round,
    "str": str,
}

SAME_ROWS = frozenset(
    {"to", "clone", "detach", "contiguous", "cpu", "cuda", "npu", "pin_memory", "requires_grad_", "type", "type_as"}
    | {"long", "int", "float", "half", "bfloat16", "bool", "tolist", "numpy", "item"}
    | {"as_tensor", "asarray", "array", "atleast_1d", "tensor"}
)
"""Methods and functions that keep a tensor's rows."""
SIZES = frozenset({"size", "numel", "nelement", "__len__", "dim"})
RESHAPES = frozenset({"reshape", "view", "flatten", "unsqueeze", "squeeze", "expand"})
OF_TENSORS = SAME_ROWS | SIZES | RESHAPES | {"narrow"}


_LONG = (str, bytes, list, tuple)
_PLAIN = re.compile(r"(?:[^%]|%[sd])*")


def binary(op: ast.operator, left: Value, right: Value) -> Value:
    result = derived([left, right])
    one, other = concrete(left), concrete(right)
    # Texts and lists are put together only: repeated or formatted they can be of any length.
    grows = isinstance(one, _LONG) or isinstance(other, _LONG)
    plain = isinstance(op, ast.Mod) and isinstance(one, str) and _PLAIN.fullmatch(one) is not None
    known = one is not UNKNOWN and other is not UNKNOWN
    if known and type(op) in _ARITHMETIC and (isinstance(op, ast.Add) or plain or not grows):
        try:
            result.const = _ARITHMETIC[type(op)](one, other)
        except TypeError as error:
            if None in (one, other):
                raise BrokenError from error
        except (ArithmeticError, ValueError):
            pass
    return result


def length(value: Value) -> Value:
    if value.shape:
        return value.shape[0]
    if value.elements is not None:
        return Value(const=len(value.elements))
    return Value(span=value.span, state=value.state, keys=value.keys, length_of=value)


def number(name: str, given: Sequence[Value]) -> Value:
    result = derived(given)
    result.part = False
    if name in ("int", "float", "bool") and given[0].shape and given[0].shape[0].const not in (1, UNKNOWN):
        raise BrokenError
    if len(given) == 1:
        result.length_of = given[0].length_of
    values = [concrete(each) for each in given]
    if name == "bool" and len(given) == 1:
        outcome = truth(given[0])
        result.const = UNKNOWN if outcome is None else outcome
    elif all(value is not UNKNOWN for value in values):
        try:
            result.const = NUMBERS[name](*values)
        except TypeError as error:
            if None in values:
                raise BrokenError from error
        except ValueError:
            pass
    return result


def only_number(value: Value) -> Value | None:
    """The number that a tensor is made of, or that a list has alone; a tensor of it counts as the number."""
    if value.elements is not None and len(value.elements) == 1:
        return only_number(value.elements[0])
    return value if type(value.const) in (int, float) else None


def size(name: str, holder: Value, given: Sequence[Value]) -> Value:
    sizes = holder.shape
    if name == "dim":
        return Value() if sizes is None else Value(const=len(sizes), span=holder.span)
    if sizes is None or name == "__len__":
        return length(holder)
    if name == "size":
        if not given:
            return Value(elements=sizes)
        at = given[0].const
        return sizes[at] if isinstance(at, int) and -len(sizes) <= at < len(sizes) else Value()
    counts = [each.const for each in sizes]
    return Value(const=math.prod(counts), span=True) if all(isinstance(each, int) for each in counts) else Value()


_RESHAPES: Mapping[str, Callable[..., Any]] = {
    "reshape": lambda rows, *sizes: rows.reshape(sizes),
    "view": lambda rows, *sizes: rows.reshape(sizes),
    "flatten": np.ravel,
    "unsqueeze": np.expand_dims,
    "squeeze": np.squeeze,
}


def reshaped(name: str, holder: Value, given: Sequence[Value]) -> Value:
    """The same rows in another shape, as NumPy gives it where all sizes are known."""
    made = derived([holder, *given])
    sizes = [each.const for each in given]
    made.part = holder.part or (name in ("reshape", "view") and len(sizes) == 2 and sizes[0] == 1)
    known = [each.const for each in holder.shape or ()]
    if known and name in _RESHAPES and all(isinstance(each, int) for each in (*known, *sizes)):
        try:
            shape = _RESHAPES[name](np.empty(known, dtype=bool), *sizes).shape
        except ValueError as error:
            raise BrokenError from error
        made.shape = [Value(const=each, span=True) for each in shape]
    return made
