# SPDX-License-Identifier: Apache-2.0
"""A static look at a model: how its hooks tell prefill from decode, read from its source without importing it.

A look shows what the code compares, not what it does with it. It can say that a model reads the phase fields, or that
it compares its span with one token and reads no field; everything else it cannot tell.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from omni_npu_phase.contract import IS_PREFILL, NUM_COMPUTED, PROMPT_LEN

Verdict = Literal["decides by the fields", "decides by span", "cannot tell", "has no hook"]

_HOOKS = ("preprocess", "preprocess_decode_batch")
_MODELS = "model_executor/models"
_SPAN_OF = ("input_ids", "input_embeds", "inputs_embeds")
"""Arguments of a hook whose length is the span."""


class UnknownModelError(ValueError):
    """There is no model to look at where one was asked for; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Look:
    """What the source of one class shows."""

    cls: str
    file: str
    verdict: Verdict
    reason: str


def look_at(model: str) -> list[Look]:
    """Look at a checkpoint's folder, or at MODULE or MODULE:CLASS; one look per class with a hook, or per class asked.

    A folder's ``config.json`` names the architecture, and the installed vLLM-Omni its class. Where that class has no
    hook, or the look cannot tell, its family's other classes are looked at too. Raises :class:`UnknownModelError`.
    """
    if Path(model).is_dir():
        return _look_at_checkpoint(Path(model))
    module, _, name = model.partition(":")
    source = _Source.of(module_file(module))
    looks = [_look(source, cls) for cls in ([name] if name else list(source.classes))]
    shown = looks if name else [look for look in looks if look.verdict != "has no hook"]
    return shown or [Look(module, str(source.path), "has no hook", "no class in it has a preprocess hook")]


def module_file(module: str) -> Path:
    """A module's file, found without importing any package of it. Raises :class:`UnknownModelError`."""
    top, *path = module.split(".")
    spec = importlib.util.find_spec(top) if top.isidentifier() else None
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for file in (Path(folder, *path).with_suffix(".py"), Path(folder, *path, "__init__.py")):
            if file.is_file():
                return file
    if spec is not None and not path and spec.origin:
        return Path(spec.origin)
    raise UnknownModelError(f"{module} is neither a folder nor an installed module")


def _look_at_checkpoint(folder: Path) -> list[Look]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architectures = config["architectures"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnknownModelError(f"{folder}: no config.json that names architectures ({error!r})") from error
    models = module_file("vllm_omni").parent / _MODELS
    known = _registered(models / "registry.py")
    missing = [name for name in architectures if name not in known]
    if missing or not architectures:
        raise UnknownModelError(f"{folder}: the installed vLLM-Omni has no architecture {', '.join(missing)}")
    looks = {}
    for name in architectures:
        package, module, cls = known[name]
        looks[module, cls] = own = _look(_Source.of(models / package / f"{module}.py"), cls)
        if own.verdict in ("has no hook", "cannot tell"):
            for other, module, cls in known.values():
                file = models / other / f"{module}.py"
                if other == package and file.is_file():
                    look = _look(_Source.of(file), cls)
                    if look.verdict != "has no hook":
                        looks[module, cls] = look
    return list(looks.values())


def _registered(registry: Path) -> dict[str, tuple[str, str, str]]:
    """Architectures with package, module and class, from the registry's own source."""
    for node in ast.parse(registry.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(to, ast.Name) and to.id == "_OMNI_MODELS" for to in node.targets
        ):
            return dict(ast.literal_eval(node.value))
    raise UnknownModelError(f"{registry} lists no models in a way this version of omni-npu-phase knows")


@dataclass(frozen=True, slots=True)
class _Source:
    """A file's classes and functions."""

    path: Path
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> _Source:
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError) as error:
            raise UnknownModelError(f"cannot read {path}: {error}") from error
        source = cls(path)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                source.classes[node.name] = node
            elif isinstance(node, ast.FunctionDef):
                source.functions[node.name] = node
        return source

    def methods(self, cls: str) -> dict[str, ast.FunctionDef]:
        """A class's methods and those of its bases in this file, nearest first."""
        node = self.classes[cls]
        found: dict[str, ast.FunctionDef] = {}
        for base in reversed(node.bases):
            if isinstance(base, ast.Name) and base.id in self.classes and base.id != cls:
                found |= self.methods(base.id)
        return found | {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}


def _look(source: _Source, cls: str) -> Look:
    if cls not in source.classes:
        raise UnknownModelError(f"{source.path} has no class {cls}")
    methods = source.methods(cls)
    hooks = [name for name in _HOOKS if name in methods] + _hooks_set_by(methods.values())
    if not hooks:
        return Look(cls, str(source.path), "has no hook", "it has no preprocess hook in this file")
    reached = list(_reached(source, methods, hooks))
    fields = sorted({line for function in reached for line in _phase_read(function)})
    spans = sorted({line for function in reached for line in _span_compared(function, _span_names(reached))})
    mixed = sorted({line for function in reached for line in _phase_or_span(function, set(spans))})
    if fields and mixed:
        reason = f"reads the phase ({_lines(fields)}), and lets its span overrule it ({_lines(mixed)})"
        return Look(cls, str(source.path), "cannot tell", reason)
    if fields:
        beside = f"; it compares its span too, without the phase ({_lines(spans)})" if spans else ""
        return Look(cls, str(source.path), "decides by the fields", f"reads the phase ({_lines(fields)}){beside}")
    if spans:
        reason = f"compares its span with one token ({_lines(spans)}) and reads no phase field"
        return Look(cls, str(source.path), "decides by span", reason)
    return Look(
        cls, str(source.path), "cannot tell", f"{', '.join(hooks)} neither reads the phase nor compares its span"
    )


def _lines(numbers: Sequence[int]) -> str:
    return f"line{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _hooks_set_by(methods: Iterable[ast.FunctionDef]) -> list[str]:
    """Methods that the class makes its hook itself: set_custom_preprocess(self.X), or self.preprocess = self.X."""
    hooks = []
    for method in methods:
        for node in ast.walk(method):
            value = None
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "set_custom_preprocess" and node.args:
                value = node.args[0]
            elif isinstance(node, ast.Assign) and any(getattr(to, "attr", "") in _HOOKS for to in node.targets):
                value = node.value
            if isinstance(value, ast.Attribute) and getattr(value.value, "id", "") == "self":
                hooks.append(value.attr)
    return hooks


def _reached(source: _Source, methods: dict[str, ast.FunctionDef], hooks: Sequence[str]) -> Iterator[ast.FunctionDef]:
    """The hooks and what they call of their class and file."""
    seen: set[int] = set()
    waiting = [methods.get(name) for name in hooks]
    while waiting:
        function = waiting.pop()
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        yield function
        for call in ast.walk(function):
            called = call.func if isinstance(call, ast.Call) else None
            if isinstance(called, ast.Name):
                waiting.append(source.functions.get(called.id))
            elif isinstance(called, ast.Attribute) and _holder(called) == "self":
                waiting.append(methods.get(called.attr))
            elif isinstance(called, ast.Attribute) and _holder(called) in source.classes:
                waiting.append(source.methods(_holder(called)).get(called.attr))


def _phase_read(function: ast.FunctionDef) -> Iterator[int]:
    """Lines in which a hook's phase is read: as a key, or as an argument of its own."""
    named: dict[str, int] = {
        str(node.value if isinstance(node, ast.Constant) else node.id): node.lineno
        for node in ast.walk(function)
        if isinstance(node, (ast.Constant, ast.Name))
    }
    if IS_PREFILL in named:
        yield named[IS_PREFILL]
    elif NUM_COMPUTED in named and PROMPT_LEN in named:
        yield named[NUM_COMPUTED]


def _span_names(reached: Sequence[ast.FunctionDef]) -> set[str]:
    return {
        to.id
        for function in reached
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and _is_span(node.value)
        for to in node.targets
        if isinstance(to, ast.Name)
    }


def _span_compared(function: ast.FunctionDef, names: set[str]) -> Iterator[int]:
    """Lines in which a span is compared with one token."""
    for node in ast.walk(function):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            sides = (node.left, node.comparators[0])
            span = any(_is_span(side) or getattr(side, "id", None) in names for side in sides)
            if span and any(isinstance(side, ast.Constant) and side.value in (1, 2) for side in sides):
                yield node.lineno


def _phase_or_span(function: ast.FunctionDef, spans: set[int]) -> Iterator[int]:
    """Lines in which one condition joins the phase with a span that is compared there."""
    for node in ast.walk(function):
        if isinstance(node, ast.BoolOp):
            parts = list(ast.walk(node))
            phase = any("prefill" in getattr(part, "id", "") for part in parts)
            if phase and any(isinstance(part, ast.Compare) and part.lineno in spans for part in parts):
                yield node.lineno


def _is_span(node: ast.AST) -> bool:
    """``input_ids.shape[0]``, ``.size(0)``, ``.numel()`` and ``len(input_ids)``, perhaps made an int."""
    if isinstance(node, ast.Call):
        function = node.func
        if getattr(function, "id", "") == "int" and node.args:
            return _is_span(node.args[0])
        if getattr(function, "id", "") == "len" and node.args:
            return getattr(node.args[0], "id", "") in _SPAN_OF
        return getattr(function, "attr", "") in ("numel", "size") and _holder(function) in _SPAN_OF
    return (
        isinstance(node, ast.Subscript)
        and getattr(node.value, "attr", "") == "shape"
        and _holder(node.value) in _SPAN_OF
    )


def _holder(attribute: ast.AST) -> str:
    return getattr(getattr(attribute, "value", None), "id", "")
