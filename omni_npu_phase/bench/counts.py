# SPDX-License-Identifier: Apache-2.0
"""Device operations of a step, as PyTorch dispatches them; the hooks' and MTP's own are not counted."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from omni_npu_phase.bench.steps import Case, Steps, engineless

_VIEWS = frozenset(
    (
        *("alias", "as_strided", "detach", "expand", "lift_fresh", "narrow", "permute", "select", "slice", "split"),
        *("split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view"),
        "_reshape_alias",
    )
)
"""Operators that only describe memory; on a device none of them is a launch."""


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators run while it is entered, by name.

    ``views`` describe memory only; ``work`` are all others: copies, indexing, allocation. ``allocated`` counts the
    tensors in memory of their own that they gave, one for each operator that did not write into a tensor it was given.
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
            if name in _VIEWS:
                self.views[name] += 1
            else:
                self.work[name] += 1
                self.allocated += not (name.endswith("_") or "out" in (kwargs or {}))
        return result


@contextlib.contextmanager
def without_hooks(model: Any, operations: Operations) -> Iterator[None]:
    """Leave what a model does itself out of the count."""
    names = [name for name in ("preprocess", "preprocess_decode_batch", "talker_mtp") if hasattr(model, name)]
    before = {name: vars(model).get(name) for name in names}

    def uncounted(function: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            with operations.paused():
                return function(*args, **keywords)

        return call

    for name in names:
        setattr(model, name, uncounted(getattr(model, name)))
    try:
        yield
    finally:
        for name, own in before.items():
            delattr(model, name) if own is None else setattr(model, name, own)


def count_step(cls: type, case: Case) -> Operations:
    """The operations of one step on the CPU, after two that were alike."""
    operations = Operations()
    with engineless():
        steps = Steps(cls, case, torch.device("cpu"))
        # Bound when the runner is made.
        steps.runner.talker_mtp = lambda *inputs, **keywords: steps.model.talker_mtp(*inputs, **keywords)
        for _ in range(2):
            steps.prepare()
            steps.take()
        steps.prepare()
        with without_hooks(steps.model, operations), operations:
            steps.take()
    return operations
