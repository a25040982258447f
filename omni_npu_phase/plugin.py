# SPDX-License-Identifier: Apache-2.0
"""Activation: the vLLM plugin that puts the mixins before the classes vLLM-Omni's workers build.

vLLM calls :func:`install` in every process, before it imports a worker (entry-point group ``vllm.general_plugins``).
Nothing heavy is imported then: a class is replaced when its module is imported, or at once if it already was.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import pkgutil
import sys
from collections.abc import Iterator, Sequence
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
_made: dict[type, type] = {}
"""Released classes and the same with the mixin."""
_said: set[str] = set()
"""Refusals in the log: a class has several names."""


def install() -> None:
    """Put the mixins before the classes that workers build, now and in modules imported later. May be called again.

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
    for name in _MODULES & set(sys.modules):
        _replace_in(sys.modules[name])


def uninstall() -> None:
    """Put the released classes back wherever they are named.

    Runners that exist, and classes derived meanwhile, keep the mixin.
    """
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    observer.unwatch_instances()
    released = {made: cls for cls, made in _made.items()}
    for place in PLACES:
        if place.module in sys.modules:
            owner, name = _owner(sys.modules[place.module], place.name)
            current = vars(owner).get(name)
            if current in released:
                setattr(owner, name, released[current])


def phase_runner(cls: type, family: Family = V1) -> type:
    """The class with the phase contract, for a platform that names its runners itself; made once per class.

    Returns ``cls`` where it has the mixin, where OMNI_NPU_PHASE is ``off``, and where it is refused, which is logged,
    or with ``strict`` raised as :class:`~omni_npu_phase.releases.UnsupportedRuntimeError`.
    """
    if chosen_mode() == "off":
        return cls
    with _refusals_logged():
        mixin = pkgutil.resolve_name(family.mixin)
        if issubclass(cls, mixin):
            return cls
        if cls not in _made:
            runtime = pkgutil.resolve_name(family.check)(cls.__mro__)
            _refuse_overrides(cls, mixin, family)
            _made[cls] = _make(cls, mixin, family)
            place = f"{mixin.__name__} is before {_path(cls)}, known as {runtime.name}"
            logger.info("omni-npu-phase %s (%s): %s", __version__, chosen_mode(), place)
    return _made.get(cls, cls)


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


def _make(cls: type, mixin: type, family: Family) -> type:
    class Phased(mixin, cls):  # type: ignore[misc]
        def __init_subclass__(cls, **keywords: Any) -> None:
            super().__init_subclass__(**keywords)
            with _refusals_logged():
                _refuse_overrides(cls, mixin, family)

    Phased.__name__ = Phased.__qualname__ = f"Phase{cls.__name__}"
    Phased.__doc__ = f"{cls.__name__} with the phase contract."
    return Phased


def _refuse_overrides(cls: type, mixin: type, family: Family) -> None:
    """Refuse a class in which a third party's subclass, or patch, answers for what the mixin does."""
    answered = [name for name, value in vars(mixin).items() if callable(value) and not name.startswith("__")]
    overrides = [
        name
        for name in (*answered, *family.bypassed)
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


def _replace_in(module: ModuleType) -> None:
    for place in PLACES:
        if place.module != module.__name__:
            continue
        owner, name = _owner(module, place.name)
        current = vars(owner).get(name)
        if isinstance(current, type):
            if place.defines and trace_folder() is not None:
                observer.watch_instances(current)
            replacement = phase_runner(current, place.family)
            if replacement is not current:
                setattr(owner, name, replacement)
        elif place.defines:
            with _refusals_logged():
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
    """Replaces classes in a module right after it was imported, whoever else finds it."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in _MODULES:
            return None
        for finder in sys.meta_path:
            # As Python's own import passes over finders of the form it no longer knows.
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(fullname, path, target) if find_spec is not None else None
            if spec is not None and spec.loader is not None:
                spec.loader = _ReplacingLoader(spec.loader)
                return spec
        return None


class _ReplacingLoader(importlib.abc.Loader):
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
        _replace_in(module)


_FINDER = _AfterImport()
