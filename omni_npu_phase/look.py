# SPDX-License-Identifier: Apache-2.0
"""A static look at a model: how its hooks tell prefill from decode, read from its source without importing it.

A look shows what the code compares, not what it does with it. It can say that a model reads the phase fields, or that
it compares its span with one token and reads no field; everything else it cannot tell.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from omni_npu_phase.contract import IS_PREFILL, NUM_COMPUTED, PROMPT_LEN

Verdict = Literal["decides by the fields", "decides by span", "cannot tell", "has no hook"]

_HOOKS = ("preprocess", "preprocess_decode_batch")
_MODELS = "model_executor/models"
_SPAN_OF = ("input_ids", "input_embeds", "inputs_embeds")
"""Arguments of a hook whose length is the span."""
_HOOK_FREE = {"torch", "transformers", "vllm", *sys.stdlib_module_names}


class UnknownModelError(ValueError):
    """There is no model to look at where one was asked for; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Look:
    """What the source of one class shows."""

    cls: str
    file: str
    verdict: Verdict
    reason: str
    registered: bool = False
    """Whether vLLM-Omni's registry names the class, or one of the module, as a model."""


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
    registered = _registered_in(source.path)
    shown = looks if name else [look for look in looks if look.verdict != "has no hook"]
    if not shown:
        reason = "no class in it has a preprocess hook"
        return [Look(module, str(source.path), "has no hook", reason, not registered.isdisjoint(source.classes))]
    return [replace(look, registered=look.cls in registered) for look in shown]


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
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise UnknownModelError(f"{folder}: no config.json that lists architectures by name, but {architectures!r}")
    models = module_file("vllm_omni").parent / _MODELS
    known = _registered(models / "registry.py")
    missing = [name for name in architectures if name not in known]
    if missing or not architectures:
        raise UnknownModelError(f"{folder}: the installed vLLM-Omni has no architecture {', '.join(missing)}")
    looks = {}
    for name in architectures:
        package, module, cls = known[name]
        own = replace(_look(_Source.of(models / package / f"{module}.py"), cls), registered=True)
        looks[module, cls] = own
        if own.verdict in ("has no hook", "cannot tell"):
            for other, module, cls in known.values():
                file = models / other / f"{module}.py"
                if other == package and file.is_file():
                    look = _look(_Source.of(file), cls)
                    if look.verdict != "has no hook":
                        looks[module, cls] = replace(look, registered=True)
    return list(looks.values())


def _registered_in(file: Path) -> set[str]:
    """Classes of a file that vLLM-Omni's registry names as models."""
    try:
        models = module_file("vllm_omni").parent / _MODELS
        known = _registered(models / "registry.py")
    except (UnknownModelError, OSError):
        return set()
    return {cls for package, module, cls in known.values() if models / package / f"{module}.py" == file}


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
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Local names with the module, dots first where it is relative, and the name in it; "" for the module itself."""

    @classmethod
    def of(cls, path: Path) -> _Source:
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError) as error:
            raise UnknownModelError(f"cannot read {path}: {error}") from error
        source = cls(path)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                source.classes[node.name] = node
            elif isinstance(node, ast.FunctionDef):
                source.functions[node.name] = node
        for inner in ast.walk(tree):
            if isinstance(inner, ast.ImportFrom):
                module = "." * inner.level + (inner.module or "")
                source.imported.update({each.asname or each.name: (module, each.name) for each in inner.names})
            elif isinstance(inner, ast.Import):
                for each in inner.names:
                    # "import a.b" binds a, and "import a.b as c" binds a.b.
                    bound = each.name if each.asname else each.name.partition(".")[0]
                    source.imported[each.asname or bound] = (bound, "")
        return source

    def lineage(self, cls: str) -> list[str]:
        """A class and its bases in this file, farthest first."""
        order: list[str] = []
        waiting = [cls]
        while waiting:
            name = waiting.pop(0)
            if name in self.classes and name not in order:
                order.append(name)
                waiting += self._bases(name)
        return order[::-1]

    def methods(self, cls: str) -> dict[str, ast.FunctionDef]:
        """A class's methods and those of its bases in this file, nearest first."""
        bodies = [self.classes[name].body for name in self.lineage(cls)]
        return {each.name: each for body in bodies for each in body if isinstance(each, ast.FunctionDef)}

    def bases_elsewhere(self, cls: str) -> list[str]:
        """Bases that this file does not define, as it writes them, without type arguments."""
        bases = [base for name in self.lineage(cls)[::-1] for base in self._bases(name)]
        return [base for base in bases if base not in self.classes]

    def _bases(self, cls: str) -> list[str]:
        written = self.classes[cls].bases
        return [ast.unparse(base.value if isinstance(base, ast.Subscript) else base) for base in written]

    def found(self, base: str) -> tuple[_Source, str] | None:
        """Where an imported class is defined; None where it can have no hook. Raises :class:`UnknownModelError`."""
        first, *rest = base.split(".")
        if first in self.imported and (rest or self.imported[first][1]):
            module, inner = self.imported[first]
            *packages, name = [part for part in (inner, *rest) if part]
            for package in packages:
                module += package if module.endswith(".") else f".{package}"
        elif hasattr(builtins, base):
            return None
        else:
            raise UnknownModelError(f"{self.path} does not show where {base} is from")
        # Hooks are vLLM-Omni's own: what these bring has none.
        if module.partition(".")[0] in _HOOK_FREE:
            return None
        inside = module.lstrip(".")
        level = len(module) - len(inside)
        file = _file_in(self.path.parents[level - 1], inside) if level else module_file(module)
        source = _Source.of(file)
        if name in source.classes:
            return source, name
        if source.path == self.path or name not in source.imported:
            raise UnknownModelError(f"{file} has no class {name}")
        return source.found(name)


def _file_in(folder: Path, module: str) -> Path:
    path = folder.joinpath(*module.split(".")) if module else folder
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    raise UnknownModelError(f"{folder} has no module {module}")


def _look(source: _Source, cls: str, overriding: frozenset[str] = frozenset()) -> Look:
    """``overriding``: methods that a class derived from this one, in another file, has of its own."""
    if cls not in source.classes:
        where = source.found(cls) if cls in source.imported else None
        if where is None:
            raise UnknownModelError(f"{source.path} has no class {cls}")
        return _look(*where, overriding)
    methods = source.methods(cls)
    hooks = [name for name in _HOOKS if name in methods] + _hooks_set_by(methods.values())
    if not hooks:
        return _look_at_bases(source, cls, overriding | methods.keys())
    reached = list(_reached(source, methods, hooks))
    overridden = sorted(overriding & {function.name for function in reached})
    if overridden:
        reason = f"{', '.join(overridden)}, which its hook uses, is overridden in another file"
        return Look(cls, str(source.path), "cannot tell", reason)
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


def _look_at_bases(source: _Source, cls: str, overriding: frozenset[str]) -> Look:
    """What a class without a hook in its own file inherits from other files."""
    unknown = []
    for base in source.bases_elsewhere(cls):
        try:
            where = source.found(base)
            look = _look(*where, overriding) if where else None
        except (UnknownModelError, RecursionError) as error:
            unknown.append(f"{base} ({error})")
            continue
        if look is not None and look.verdict != "has no hook":
            return Look(cls, look.file, look.verdict, f"inherits its hook from {base}, which {look.reason}")
    if unknown:
        reason = f"it may inherit a hook from {', '.join(unknown)}"
        return Look(cls, str(source.path), "cannot tell", reason)
    return Look(cls, str(source.path), "has no hook", "neither it nor its bases have a preprocess hook")


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
