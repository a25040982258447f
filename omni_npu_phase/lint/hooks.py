# SPDX-License-Identifier: Apache-2.0
"""Which methods of a class the runner calls, and what else of the class bears on them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from omni_npu_phase.lint.source import Method, Model, statements_in

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
DECIDING = frozenset({"preprocess", "decode_batch"})
"""Kinds of hooks whose embeddings the runner takes for a row."""


def hooks_of(model: Model) -> Iterator[tuple[str, Method]]:
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


def stored_later(model: Model) -> Iterator[str]:
    """Attributes that any method stores once the model is loaded."""
    for method in model.methods():
        for node in ast.walk(method.node) if method.node.name not in ("__init__", "load_weights") else ():
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and _is_self(node.value):
                yield f"self.{node.attr}"


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _takes_tokens(method: Method) -> bool:
    """Whether a ``preprocess`` can be the runner's: image processors have methods of that name too."""
    arguments = method.node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    if any("ids" in name or "token" in name for name in names):
        return True
    return arguments.kwarg is not None and len(arguments.args) <= method.is_bound
