# SPDX-License-Identifier: Apache-2.0
"""Python files as they are written: classes, their bases also in other files, functions and constants. Nothing is
imported."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import sys
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

_HOOK_FREE = {"torch", "transformers", "vllm", *sys.stdlib_module_names}


class UnreadableError(ValueError):
    """A file, a module or a class that was asked for cannot be read; the message says which, and why."""


@dataclass(eq=False)
class Source:
    """A file's classes, functions, constants and imports."""

    path: Path
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)
    constants: dict[str, ast.expr] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Local names with the module, dots first where it is relative, and the name in it; "" for the module itself."""

    @functools.cached_property
    def packages(self) -> frozenset[str]:
        """Names that the package which the file is in may have."""
        return frozenset(parent.name for parent in self.path.parents)

    def found(self, written: str) -> tuple[Source, str] | None:
        """Where a name of another file is defined; None where what is there can have no hook.

        Raises :class:`UnreadableError`.
        """
        first, *rest = written.split(".")
        if first in self.imported and (rest or self.imported[first][1]):
            module, inner = self.imported[first]
            *packages, name = [part for part in (inner, *rest) if part]
            for package in packages:
                module += package if module.endswith(".") else f".{package}"
        elif hasattr(builtins, written):
            return None
        else:
            raise UnreadableError(f"{self.path} does not show where {written} is from")
        # Hooks are vLLM-Omni's own: what these bring has none.
        if module.partition(".")[0] in _HOOK_FREE:
            return None
        inside = module.lstrip(".")
        level = len(module) - len(inside)
        file = _file_in(self.path.parents[level - 1], inside) if level else self._absolute(module)
        source = read(file)
        if name in source.classes or name in source.functions or name in source.constants:
            return source, name
        if source.path == self.path or name not in source.imported:
            raise UnreadableError(f"{file} has no class {name}")
        return source.found(name)

    def _absolute(self, module: str) -> Path:
        """A module of the package that this file is in is found beside it, installed or not."""
        top, *path = module.split(".")
        for parent in self.path.parents:
            if parent.name == top and (parent / "__init__.py").is_file():
                return _file_in(parent, ".".join(path))
        if not path and self.path.with_name(f"{top}.py").is_file():
            return self.path.with_name(f"{top}.py")
        return module_file(module)


def read(path: Path) -> Source:
    """Parse a file, once until it changes. Raises :class:`UnreadableError`."""
    try:
        stat = path.stat()
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror}") from error
    return _parsed(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=512)
def _parsed(path: Path, changed: int, size: int) -> Source:
    try:
        with warnings.catch_warnings():
            # Odd escapes in a string are not what was asked about.
            warnings.simplefilter("ignore")
            tree = ast.parse(text_of(path))
    except SyntaxError as error:
        raise UnreadableError(f"{path}:{error.lineno or 1}: no Python: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UnreadableError(f"{path}: no Python: {error}") from error
    source = Source(path)
    for node in _of_module(tree.body):
        if isinstance(node, ast.ClassDef):
            source.classes[node.name] = node
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            source.functions[node.name] = node
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            source.constants[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
            source.constants[node.target.id] = node.value
    for inner in statements_in(tree.body):
        if isinstance(inner, ast.ImportFrom):
            module = "." * inner.level + (inner.module or "")
            source.imported.update({each.asname or each.name: (module, each.name) for each in inner.names})
        elif isinstance(inner, ast.Import):
            for each in inner.names:
                # "import a.b" binds a, and "import a.b as c" binds a.b.
                bound = each.name if each.asname else each.name.partition(".")[0]
                source.imported[each.asname or bound] = (bound, "")
    return source


def statements_in(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements with those inside them, to any depth."""
    for node in body:
        yield node
        for inside in (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            for name in ("body", "orelse", "finalbody"):
                yield from statements_in(getattr(inside, name, ()))


def _of_module(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """A module's statements, those under its conditions among them."""
    for node in statements:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _of_module(node.body)
            for handler in getattr(node, "handlers", ()):
                yield from _of_module(handler.body)
            yield from _of_module(getattr(node, "orelse", ()))


def text_of(path: Path) -> str:
    """A file's text in the encoding that it declares. Raises :class:`UnreadableError`."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (UnicodeDecodeError, SyntaxError) as error:
        raise UnreadableError(f"{path}: no Python text: {error}") from error
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror}") from error


def module_file(module: str) -> Path:
    """A module's file, found without importing any package of it. Raises :class:`UnreadableError`."""
    top, *path = module.split(".")
    spec = importlib.util.find_spec(top) if top.isidentifier() else None
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for file in (Path(folder, *path).with_suffix(".py"), Path(folder, *path, "__init__.py")):
            if file.is_file():
                return file
    if spec is not None and not path and spec.origin:
        return Path(spec.origin)
    raise UnreadableError(f"{module} is neither a folder nor an installed module")


def _file_in(folder: Path, module: str) -> Path:
    path = folder.joinpath(*module.split(".")) if module else folder
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    raise UnreadableError(f"{folder} has no module {module}")


@dataclass(frozen=True, slots=True)
class Model:
    """A class and everything that it inherits as far as sources show it, nearest first."""

    source: Source
    name: str
    lineage: tuple[tuple[Source, ast.ClassDef], ...]
    unknown: tuple[str, ...]
    """Bases that were not found, and why."""

    @classmethod
    def of(cls, source: Source, name: str) -> Model:
        """Raises :class:`UnreadableError` where there is no such class, here or imported."""
        if name not in source.classes:
            where = source.found(name) if name in source.imported else None
            if where is None or where[1] not in where[0].classes:
                raise UnreadableError(f"{source.path} has no class {name}")
            source, name = where
        lineage: list[tuple[Source, ast.ClassDef]] = []
        unknown: list[str] = []
        waiting = [(source, name)]
        while waiting:
            file, each = waiting.pop(0)
            node = file.classes[each]
            if any(node is known for _, known in lineage):
                continue
            lineage.append((file, node))
            for base in _bases(node):
                if base in file.classes:
                    waiting.append((file, base))
                    continue
                try:
                    there = file.found(base)
                except (UnreadableError, RecursionError) as error:
                    unknown.append(f"{base} ({error})")
                    continue
                if there is not None and there[1] in there[0].classes:
                    waiting.append(there)
        return cls(source, name, tuple(lineage), tuple(unknown))

    def method(self, name: str, after: ast.ClassDef | None = None) -> Method | None:
        """The nearest method of that name; with ``after``, the nearest behind that class, as ``super()`` finds it."""
        lineage = list(self.lineage)
        if after is not None:
            places = [place for place, (_, node) in enumerate(lineage) if node is after]
            lineage = lineage[places[0] + 1 :] if places else []
        for source, node in lineage:
            for each in node.body:
                if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) and each.name == name:
                    return Method(source, node, each)
        return None

    def declared(self, name: str) -> bool | None:
        """What the class, or its nearest base that says so, sets an attribute to; None where that is no bool."""
        for _, node in self.lineage:
            for each in node.body:
                targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    value = (
                        getattr(each.value, "value", None) if isinstance(each, (ast.Assign, ast.AnnAssign)) else None
                    )
                    return value if isinstance(value, bool) else None
        return None

    def methods(self) -> Iterator[Method]:
        for source, node in self.lineage:
            for each in node.body:
                if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield Method(source, node, each)


@dataclass(frozen=True, slots=True)
class Method:
    """A function in a class of a file."""

    source: Source
    cls: ast.ClassDef
    node: ast.FunctionDef | ast.AsyncFunctionDef
    free: bool = False
    """A function beside the class, which the class makes its hook."""

    @property
    def is_bound(self) -> bool:
        """Whether its first argument is the object."""
        return not self.free and "staticmethod" not in self.decorators

    @property
    def decorators(self) -> set[str]:
        return {ast.unparse(each).rpartition(".")[2] for each in self.node.decorator_list}

    @property
    def is_stub(self) -> bool:
        """Whether it only raises, or does nothing at all."""
        return all(
            isinstance(each, (ast.Raise, ast.Pass))
            or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
            for each in self.node.body
        )


def _bases(node: ast.ClassDef) -> list[str]:
    """Bases as they are written, without type arguments."""
    return [ast.unparse(base.value if isinstance(base, ast.Subscript) else base) for base in node.bases]
