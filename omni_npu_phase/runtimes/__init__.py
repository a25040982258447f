# SPDX-License-Identifier: Apache-2.0
"""What differs between vLLM-Omni releases. A runtime supplies names and values; it never decides.

:func:`runtime_of` finds the runtime that a runner class belongs to by what the class offers, not by a version string.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

_MODULES = ("omni_npu_phase.runtimes.v0_30", "omni_npu_phase.runtimes.v0_24")


class UnsupportedRuntimeError(RuntimeError):
    """No known runtime matches a runner class; the message lists, per runtime, what is missing or different."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """Everything the mixin takes from one family of released runners."""

    name: str
    methods: Mapping[str, tuple[str, ...]]
    """Methods the released class must have, each with the parameters it is called with."""
    preprocess_values: int
    """How many values the released ``_preprocess`` returns: token ids, embeddings, then what is passed through."""
    seed_key: str
    """Name of a request's own MTP seed in its sampling parameters' ``extra_args`` (T8)."""
    write_keywords: Callable[[dict[str, Any], str, int, int, Any], None]
    """Write the release's further hook keywords into a live buffer: (info, request id, P, C, request state)."""
    attach_infos: Callable[[Any, str, dict[str, Any]], dict[str, Any]]
    """What a hook gets: the live buffer, or the release's copy with more in it. (runner, request id, info)"""
    mtp_graph: Callable[[Any, int], tuple[Any, Any, int]]
    """Graph mode, batch descriptor and padded size of an MTP batch. (runner, rows)"""
    is_graph: Callable[[Any], bool]
    """Whether the runner's MTP is wrapped for capture and replay. (runner)"""
    eager: Callable[[], Any]
    """The graph mode in which a wrapped MTP runs its model directly."""
    forward_context: Callable[[Any, Any, Any], AbstractContextManager[Any]]
    """The context MTP runs in: (vLLM configuration, graph mode, batch descriptor)."""

    def mismatches(self, released: Sequence[type]) -> list[str]:
        """What the classes lack or have otherwise, one line each; empty when they are of this runtime."""
        return [line for name, wanted in self.methods.items() for line in _mismatch(released, name, wanted)]


def _mismatch(released: Sequence[type], name: str, wanted: tuple[str, ...]) -> list[str]:
    method = next((vars(cls)[name] for cls in released if name in vars(cls)), None)
    if not callable(method):
        return [f"no method {name}"]
    parameters = inspect.signature(method).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    missing = [parameter for parameter in wanted if parameter not in parameters]
    return [f"{name} takes no {', '.join(missing)}"] if missing else []


@cache
def runtime_of(released: tuple[type, ...]) -> Runtime:
    """The runtime of a released runner, given as the classes behind the mixin in method resolution order.

    Raises :class:`UnsupportedRuntimeError`.
    """
    refusals = []
    for module in _MODULES:
        runtime: Runtime = importlib.import_module(module).RUNTIME
        mismatches = runtime.mismatches(released)
        if not mismatches:
            return runtime
        refusals.append(f"{runtime.name}: {'; '.join(mismatches)}")
    raise UnsupportedRuntimeError(
        f"{released[0].__module__}.{released[0].__qualname__} is no runner that omni-npu-phase knows. "
        + " | ".join(refusals)
    )
