# SPDX-License-Identifier: Apache-2.0
"""Activation: the vLLM plugin that gives the mixins to the classes vLLM-Omni's workers build.

vLLM calls :func:`install` in every process, before it imports a worker (entry-point group ``vllm.general_plugins``).
Nothing heavy is imported then: a class gets its mixin when its module is imported, or at once if it already was.

A released class stays the object it is, under its own name: the mixin becomes a base of it, before those it has. So
whoever imported, derived from, patched or pickled the class has the one that workers build. ``super()`` in the mixin
must reach what the class itself defines under the mixin's names, and that moves to a class behind the mixin.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import inspect
import logging
import pkgutil
import sys
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from omni_npu_phase import __version__
from omni_npu_phase.releases import UnsupportedRuntimeError
from omni_npu_phase.releases.places import PLACES, V1, Family
from omni_npu_phase.settings import MODE_VARIABLE, TRACE_VARIABLE, chosen_mode, trace_folder
from omni_npu_phase.tracing import observer

# vLLM shows what is logged under its own name.
logger = logging.getLogger("vllm.omni_npu_phase")

_RELEASED_PACKAGES = ("vllm", "vllm_omni", "vllm_ascend", "omni_npu_phase")
_MODULES = frozenset(place.module for place in PLACES)
_given: dict[type, tuple[tuple[type, ...], dict[str, Any]]] = {}
"""Classes that were given the mixin, each with its released bases and with what moved behind the mixin."""
_made: dict[type, type] = {}
"""Classes that a platform named, and the same with the mixin."""
_said: set[str] = set()
"""Refusals in the log: a class has several names."""


def install() -> None:
    """Give the mixins to the classes that workers build, now and in modules imported later. May be called again.

    OMNI_NPU_PHASE=off installs nothing, and takes back what was installed. A class that is refused stays as it is and
    is named in a warning; with ``strict`` that is an error. Raises ValueError for another value of OMNI_NPU_PHASE, and
    with ``strict`` :class:`~omni_npu_phase.releases.UnsupportedRuntimeError`, here or where it is imported.
    """
    if chosen_mode() == "off":
        uninstall()
        logger.info("omni-npu-phase: %s=off, nothing is replaced", MODE_VARIABLE)
        if trace_folder() is None:
            return
    if trace_folder() is not None:
        logger.info("omni-npu-phase: %s, every runner is recorded into %s", TRACE_VARIABLE, trace_folder())
    with _refusals_logged():
        spec = importlib.util.find_spec("vllm_omni")
        if spec is None:
            logger.info("omni-npu-phase: vllm_omni is not installed, nothing is replaced")
            return
        _check_installed(list(spec.submodule_search_locations or ()))
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
    _give_to(_MODULES & set(sys.modules))


def uninstall() -> None:
    """Make the released classes again what they were. So are their runners then, and what is derived from them."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    observer.unwatch_instances()
    while _given:
        cls, (bases, own) = _given.popitem()
        cls.__bases__ = bases
        for name, value in own.items():
            if name not in vars(cls):
                setattr(cls, name, value)


def phase_runner(cls: type, family: Family = V1) -> type:
    """The class with the phase contract, for a platform that names its runners itself; made once per class.

    Returns ``cls`` where it has the mixin, where OMNI_NPU_PHASE is ``off``, and where it is refused, which is logged,
    or with ``strict`` raised as :class:`~omni_npu_phase.releases.UnsupportedRuntimeError`. The new class is called
    ``Phase`` and the name of ``cls``: give it that name in the module of ``cls``, where pickle looks for it.
    """
    with _refusals_logged():
        if cls not in _made and _is_to_have_it(cls, family):
            _made[cls] = _phased(cls, family, cls.__mro__)
    return cls if chosen_mode() == "off" else _made.get(cls, cls)


@contextmanager
def _refusals_logged() -> Iterator[None]:
    """Whatever goes wrong must not stop an engine, unless it was asked to."""
    try:
        yield
    except Exception as error:
        if chosen_mode() == "strict":
            raise
        kind = "" if isinstance(error, UnsupportedRuntimeError) else f"{type(error).__name__}: "
        reason = f"{kind}{error}"
        if reason not in _said:
            _said.add(reason)
            logger.warning("omni-npu-phase: %s. It stays as it is.", reason.rstrip("."))


def _check_installed(folders: Sequence[str]) -> None:
    for place in PLACES:
        file = Path(*place.module.split(".")[1:]).with_suffix(".py")
        if place.defines and any(Path(folder, file).is_file() for folder in folders):
            return
    raise UnsupportedRuntimeError(
        f"vllm_omni in {', '.join(folders) or 'no folder'} has none of the modules that define its runners: "
        "an unknown release, or half-installed"
    )


def _is_to_have_it(cls: type, family: Family) -> bool:
    """Whether a class gets the mixin now, which is logged. Raises UnsupportedRuntimeError for one that must not."""
    mixin = pkgutil.resolve_name(family.mixin)
    if chosen_mode() == "off":
        return False
    has_it = issubclass(cls, mixin)
    runtime = None if has_it else pkgutil.resolve_name(family.check)(cls.__mro__)
    _refuse_overrides(cls, mixin, family)
    if runtime is None:
        return False
    place = f"{mixin.__name__} is before {_path(cls)}, known as {runtime.name}"
    logger.info("omni-npu-phase %s (%s): %s", __version__, chosen_mode(), place)
    return True


def give(cls: type, family: Family = V1) -> None:
    """Make the mixin a base of a class, unless that has it or OMNI_NPU_PHASE is ``off``; uninstall() takes it back.

    Raises :class:`~omni_npu_phase.releases.UnsupportedRuntimeError` for a class that is refused, and changes nothing.
    """
    if not _is_to_have_it(cls, family):
        return
    own = {name: vars(cls)[name] for name in _answered(pkgutil.resolve_name(family.mixin)) if name in vars(cls)}
    for name, method in own.items():
        if "__class__" in inspect.unwrap(method).__code__.co_freevars:
            raise UnsupportedRuntimeError(f"{_path(cls)}.{name} calls super(), and so cannot move behind the mixin")
    bases, released = cls.__bases__, cls.__mro__
    behind = type(cls)(cls.__name__, bases, {**own, "__module__": cls.__module__, "__qualname__": cls.__qualname__})
    cls.__bases__ = (_phased(behind, family, released),)
    _given[cls] = (bases, own)
    for name in own:
        delattr(cls, name)


def _phased(cls: type, family: Family, released: tuple[type, ...]) -> type:
    """A class with the mixin before ``cls``, which looks at what is derived from it."""
    mixin = pkgutil.resolve_name(family.mixin)

    # The mixin comes first nonetheless; Python compares the layout of new bases with that of old ones by the first.
    class Phased(cls, mixin):  # type: ignore[misc, valid-type]
        _omni_npu_phase_released = released

        def __init_subclass__(cls, **keywords: Any) -> None:
            super().__init_subclass__(**keywords)
            with _refusals_logged():
                _refuse_overrides(cls, mixin, family)

    Phased.__name__ = Phased.__qualname__ = f"Phase{cls.__name__}"
    Phased.__module__, Phased.__doc__ = cls.__module__, f"{cls.__name__} with the phase contract."
    return Phased


def _answered(mixin: type) -> list[str]:
    """The methods of released classes that a mixin has too."""
    return [name for name, value in vars(mixin).items() if callable(value) and not name.startswith("__")]


def _refuse_overrides(cls: type, mixin: type, family: Family) -> None:
    """Refuse a class in which a third party's subclass, or patch, answers for what the mixin does."""
    overrides = [
        name
        for name in (*_answered(mixin), *family.bypassed)
        if any(package not in _RELEASED_PACKAGES for package in _packages_behind(getattr(cls, name, None)))
    ]
    if overrides:
        raise UnsupportedRuntimeError(
            f"{_path(cls)} overrides {', '.join(overrides)}, and so is responsible for the phase contract itself; "
            f"judge it with: omni-npu-phase verify --mode released --runner {cls.__module__}:{cls.__qualname__}"
        )


def _packages_behind(method: Any) -> Iterator[str]:
    """The packages whose code a method runs: its own, and those of what it wraps; torch's decorators count for none."""
    while method is not None:
        # functools.wraps copies __module__; a function's globals stay those of where it was written.
        module = getattr(method, "__globals__", {}).get("__name__") or getattr(method, "__module__", None) or ""
        package = module.partition(".")[0]
        if package != "torch":
            yield package
        method = getattr(method, "__wrapped__", None)


def _give_to(modules: Container[str]) -> None:
    # In the order of places: a class that is derived from another has the mixin from that one.
    for place in PLACES:
        if place.module not in modules:
            continue
        owner, name = _owner(sys.modules[place.module], place.name)
        cls = vars(owner).get(name)
        with _refusals_logged():
            if isinstance(cls, type):
                give(cls, place.family)
                if place.defines and trace_folder() is not None:
                    observer.watch_instances(cls)
            elif place.defines:
                raise UnsupportedRuntimeError(f"{place.module} has no class {place.name}")


def _owner(module: ModuleType, dotted: str) -> tuple[Any, str]:
    """What holds a name, and the name's last part; the module itself where the class between them is missing."""
    *path, name = dotted.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part, module)
    return owner, name


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Gives classes in a module their mixin right after it was imported, whoever else finds it."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in _MODULES:
            return None
        for finder in sys.meta_path:
            # As Python's own import passes over finders of the form it no longer knows.
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(fullname, path, target) if find_spec is not None else None
            if spec is not None and spec.loader is not None:
                spec.loader = _GivingLoader(spec.loader)
                return spec
        return None


class _GivingLoader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Who asks the module for its source must find its own loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _give_to({module.__name__})


_FINDER = _AfterImport()
