# SPDX-License-Identifier: Apache-2.0
"""What differs between vLLM-Omni releases. A runtime supplies names and values; it never decides.

:func:`runtime_of` finds the runtime that a runner class belongs to by what its code offers, not by a version string.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import logging
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import CodeType
from typing import Any, TypeAlias

from omni_npu_phase.settings import version_of

logger = logging.getLogger(__name__)

_NEWEST_FIRST = ("v0_30", "v0_28", "v0_26", "v0_24", "v0_22", "v0_20", "v0_20_npu")


class UnsupportedRuntimeError(RuntimeError):
    """No known runtime matches a runner class; the message lists what is missing or different."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A function that is called, and how.

    ``parameters`` are written as in a signature: those before ``"*"`` are given by position, in this order, those
    after it by name. None where released code makes the call. ``names`` are attributes, keywords and keys that are
    taken from the objects this function works on, so its code must name them.
    """

    parameters: tuple[str, ...] | None = None
    names: tuple[str, ...] = ()


HookRows: TypeAlias = "Iterable[tuple[dict[str, Any], str, int, int, Any]]"
"""Rows about to get a hook call: live buffer, request id, P, C and request state of each."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """Everything the mixin takes from one family of released runners."""

    name: str
    release: str
    """Major and minor version of the vLLM-Omni release that this was tested with."""
    methods: Mapping[str, Taken]
    """Methods of the released classes."""
    functions: Mapping[str, Taken]
    """Functions and classes of the installed packages, as ``module:name``."""
    preprocess_values: int
    """How many values the released ``_preprocess`` returns: token ids, embeddings, then what is passed through."""
    seed_key: str
    """Name of a request's own MTP seed in its sampling parameters' ``extra_args`` (T8)."""
    keywords: tuple[str, ...]
    """What hooks are told beside the three fields."""
    write_keywords: Callable[[HookRows], None]
    """Write ``keywords`` into the live buffers of rows."""
    attach_infos: Callable[[Any], Callable[[Any, dict[str, Any], str], dict[str, Any]]]
    """Of a runner, what gives a hook its infos: the live buffer, or the release's copy with more in it. (request state,
    live buffer, request id)"""
    mtp_graph: Callable[[Any, int], tuple[Any, Any, int]]
    """Graph mode, batch descriptor and padded size of an MTP batch. (runner, rows)"""
    is_graph: Callable[[Any], bool]
    """Whether the runner's MTP is wrapped for capture and replay. (runner)"""
    eager: Callable[[], Any]
    """The graph mode in which a wrapped MTP runs its model directly."""
    forward_context: Callable[[Any, Any, Any], AbstractContextManager[Any]]
    """The context MTP runs in: (vLLM configuration, graph mode, batch descriptor)."""

    def mismatches(self, released: Sequence[type]) -> list[str]:
        """What the classes and the installed packages lack or have otherwise, one line each; empty when all is there.

        ``released``: the classes of a runner in method resolution order.
        """
        return [
            *(line for name, taken in self.methods.items() for line in method_mismatches(released, name, taken)),
            *(line for name, taken in self.functions.items() for line in _function_mismatches(name, taken)),
            *(
                f"_preprocess returns {values} values, not {self.preprocess_values}"
                for values in sorted(values_returned(released, "_preprocess") - {self.preprocess_values})
            ),
        ]


def method_mismatches(released: Sequence[type], name: str, taken: Taken) -> Iterator[str]:
    """What a method of the classes lacks or has otherwise, a line each."""
    definitions = [vars(cls)[name] for cls in released if name in vars(cls)]
    if not definitions or not callable(definitions[0]):
        yield f"no method {name}"
        return
    yield from _call_mismatches(name, definitions[0], taken, bound=1)
    named = names_in(released, name)
    yield from (f"{name} names no {wanted}" for wanted in taken.names if wanted not in named)


def _function_mismatches(name: str, taken: Taken) -> Iterator[str]:
    label = name.replace(":", ".")
    try:
        function = pkgutil.resolve_name(name)
    except Exception as error:  # noqa: BLE001 - whatever a package raises on import, the list must stay complete
        yield f"no {label} ({error})"
        return
    if taken.parameters is None or isinstance(function, type):
        return
    # An unknown name of a platform is None, not missing.
    if not callable(function):
        yield f"no {label}"
    else:
        yield from _call_mismatches(label, function, taken)


def _call_mismatches(name: str, function: Callable[..., Any], taken: Taken, bound: int = 0) -> Iterator[str]:
    """What stands against calling a function as it is taken, after ``bound`` arguments that come by themselves."""
    if taken.parameters is None:
        return
    try:
        parameters = list(inspect.signature(function).parameters.values())[bound:]
    except (TypeError, ValueError) as error:
        yield f"{name} has no signature ({error})"
        return
    kinds = {parameter.kind for parameter in parameters}
    given = [wanted for wanted in taken.parameters if wanted != "*"]
    by_place = taken.parameters.index("*") if "*" in taken.parameters else len(given)
    named = {parameter.name: parameter for parameter in parameters if parameter.kind not in _OPEN}
    ordered = [parameter.name for parameter in parameters if parameter.kind in _PLACED]
    open_place, open_name = inspect.Parameter.VAR_POSITIONAL in kinds, inspect.Parameter.VAR_KEYWORD in kinds
    placed = [wanted for wanted in given[:by_place] if wanted not in named or wanted in ordered]
    missing = [
        wanted
        for place, wanted in enumerate(given)
        if wanted not in named and not (open_place if place < by_place else open_name)
    ]
    if missing:
        yield f"{name} takes no {', '.join(missing)}"
    elif any(found != wanted for found, wanted in zip(ordered, placed, strict=False)):
        yield f"{name} takes ({', '.join(ordered)}) in another order than ({', '.join(given[:by_place])})"
    by_name_only = [wanted for wanted in given[:by_place] if wanted in named and wanted not in ordered]
    if by_name_only:
        yield f"{name} takes {', '.join(by_name_only)} by name only"
    by_position_only = [
        wanted
        for wanted in given[by_place:]
        if wanted in named and named[wanted].kind is inspect.Parameter.POSITIONAL_ONLY
    ]
    if by_position_only:
        yield f"{name} takes {', '.join(by_position_only)} by position only"
    further = [
        parameter.name
        for parameter in named.values()
        if parameter.default is inspect.Parameter.empty and parameter.name not in given
    ]
    if further:
        yield f"{name} also needs {', '.join(further)}"


_PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def names_in(classes: Sequence[type], method: str) -> frozenset[str]:
    """Every attribute, keyword, variable and string that a method's code names, in vLLM-Omni and in overrides of it."""
    names: set[str] = set()
    for cls in classes:
        code = _code_of(cls, method)
        names.update(_names_of(code))
        # An override from elsewhere may leave the work to vLLM-Omni's method; what that replaces is not run.
        if code is not None and _is_vllm_omnis(cls):
            break
    return frozenset(names)


def values_returned(classes: Sequence[type], method: str) -> set[int]:
    """How many values vLLM-Omni's own method returns, where its code shows that: in tuples built for a return."""
    codes = (_code_of(cls, method) for cls in classes if _is_vllm_omnis(cls))
    code = next((code for code in codes if code is not None), None)
    return {
        built.arg
        for built, after in pairwise(dis.get_instructions(code) if code is not None else ())
        if built.opname == "BUILD_TUPLE" and after.opname == "RETURN_VALUE" and built.arg is not None
    }


def _code_of(cls: type, method: str) -> CodeType | None:
    return getattr(inspect.unwrap(vars(cls)[method]), "__code__", None) if method in vars(cls) else None


def _is_vllm_omnis(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "vllm_omni"


def _names_of(constant: Any) -> Iterator[str]:
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, CodeType):
        yield from (*constant.co_names, *constant.co_varnames)
        yield from _names_of(constant.co_consts)
    elif isinstance(constant, tuple):
        for part in constant:
            yield from _names_of(part)


def known_runtimes() -> list[Runtime]:
    """Every runtime, the newest release first."""
    return [importlib.import_module(f"{__name__}.{module}").RUNTIME for module in _NEWEST_FIRST]


@cache
def runtime_of(released: tuple[type, ...]) -> Runtime:
    """The runtime of a released runner, given as the classes behind the mixin in method resolution order.

    A release that was not tested but offers what a tested one does is accepted, and the log says so once. Raises
    :class:`UnsupportedRuntimeError` with everything in which the runner differs from the runtime it is most like.
    """
    mismatches = {}
    for runtime in known_runtimes():
        mismatches[runtime.name] = runtime.mismatches(released)
        if not mismatches[runtime.name]:
            say_untested(runtime.name, runtime.release)
            return runtime
    nearest = min(mismatches, key=lambda name: len(mismatches[name]))
    raise UnsupportedRuntimeError(
        f"{released[0].__module__}.{released[0].__qualname__} is no runner that omni-npu-phase knows. "
        f"It is most like {nearest}, but: {'; '.join(mismatches[nearest])}. Known: {', '.join(mismatches)}."
    )


def say_untested(name: str, release: str) -> None:
    """Note in the log that another release is installed than the one whose runtime ``name`` was found."""
    installed = version_of("vllm-omni")
    if installed is not None and re.findall(r"\d+", installed)[:2] != release.split("."):
        logger.warning(
            "vllm-omni %s is not among the releases this was tested with; its runner offers what that of %s does, "
            "and is treated alike.",
            installed,
            name,
        )
