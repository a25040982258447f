# SPDX-License-Identifier: Apache-2.0
"""Whether code does something with a request, or only minds shapes, logs or refuses."""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence

from omni_npu_phase import contract
from omni_npu_phase.lint.operations import NUMBERS

_LOGGERS = frozenset({"logger", "logging", "log", "warnings", "print"})
_PLAIN = frozenset({"len", "bool", "isinstance", "range", "list", "tuple", "str", "getattr", "hasattr", "type"})


def touches(nodes: Sequence[ast.AST]) -> bool:
    """Whether code returns, reads or keeps a request's state, or calls the model's own methods."""
    return any(_touching(node) for node in nodes)


@functools.lru_cache(maxsize=100_000)
def _touching(node: ast.AST) -> bool:
    if isinstance(node, (ast.Raise, ast.Assert, ast.Pass)):
        return False
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and is_logger(node.value.func):
        return False
    if isinstance(node, (ast.Return, ast.Yield)):
        return True
    if isinstance(node, ast.Call):
        root = _root(node.func)
        if root == "self" or (isinstance(node.func, ast.Name) and root not in NUMBERS and root not in _PLAIN):
            return True
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop", "setdefault", "update"):
            return not (node.args and _is_field(node.args[0]))
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return not _is_field(node.slice)
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return True
    return any(_touching(child) for child in ast.iter_child_nodes(node))


def _is_field(node: ast.AST) -> bool:
    # Every row has these: to read one is to ask what the row is.
    return isinstance(node, ast.Constant) and node.value in contract.FIELDS


def is_logger(function: ast.AST) -> bool:
    """Whether a call only says something."""
    return _root(function) in _LOGGERS


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
