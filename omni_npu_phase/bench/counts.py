# SPDX-License-Identifier: Apache-2.0
"""Device operations of a step, as PyTorch dispatches them; the hooks' and MTP's own are not counted."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from omni_npu_phase.bench.steps import Case, Steps, around_hooks, engineless
from omni_npu_phase.contract import MTP_INPUTS


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators run while it is entered, by name.

    ``views`` gave the memory they were handed, and on a device none of them is a launch; ``work`` are all others,
    values read to the host among them. ``allocated`` counts those that gave memory of their own.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.views: Counter[str] = Counter()
        self.work: Counter[str] = Counter()
        self.allocated = 0
        self._paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is counted within."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._paused:
            name = func.overloadpacket.__name__
            written = name.endswith("_") or "out" in (kwargs or {})
            given = _memory(result)
            if given and given <= _memory(args) and not written:
                self.views[name] += 1
            else:
                self.work[name] += 1
                self.allocated += bool(given) and not written
        return result


def _memory(values: Any) -> set[int]:
    """The storages of all tensors in it."""
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}


@dataclass(frozen=True, slots=True)
class Counts:
    """One step: what the runner had run, and the tensors among the updates that hooks returned to it."""

    operations: Operations
    updates: int


def count_step(cls: type, case: Case) -> Counts:
    """Count one step on the CPU, after two that were alike."""
    with engineless():
        steps = Steps(cls, case, torch.device("cpu"))
        for _ in range(2):
            steps.take()
            steps.finish()
        return count(steps)


def count(steps: Steps) -> Counts:
    """Take the next step, and count it."""
    operations, updates = Operations(), 0

    def uncounted(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            nonlocal updates
            with operations.paused():
                result = hook(*args, **keywords)
            # MTP's result ends in its codes, that of the hook for a whole step is None.
            if isinstance(result, tuple) and not isinstance(result[-1], torch.Tensor):
                updates += _tensors(result[-1])
            return result

        return call

    with around_hooks(steps.model, uncounted), operations:
        steps.take()
    return Counts(operations, updates)


def _tensors(updates: Any) -> int:
    if isinstance(updates, dict):
        return sum(_tensors(value) for key, value in updates.items() if key != MTP_INPUTS)
    if isinstance(updates, list):
        return sum(map(_tensors, updates))
    return int(isinstance(updates, torch.Tensor))
