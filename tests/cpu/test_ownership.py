# SPDX-License-Identifier: Apache-2.0
"""Whether anyone else can reach a tensor: every way in which a hook may keep one that it returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from omni_npu_phase.buffers.ownership import reachable

from omni_npu_phase.buffers import ownership

_KEPT = torch.zeros(1, 4)
_ARRAY = np.zeros((1, 4), dtype=np.float32)
_HELD: list[Any] = []


def _kept_in(container: Any) -> torch.Tensor:
    _HELD.append(container)
    inner = container[0] if isinstance(container, (list, tuple)) else container["meta"]["x"]
    tensor: torch.Tensor = inner
    return tensor


def _weakly_kept() -> torch.Tensor:
    tensor = torch.ones(2)
    _HELD.append(weakref.ref(tensor))
    return tensor


def _of_kept_storage() -> torch.Tensor:
    tensor = torch.ones(2)
    _HELD.append(tensor.untyped_storage())
    return torch.empty(0).set_(_HELD[-1])


def _saved_by_a_graph() -> torch.Tensor:
    """Held in C++ alone."""
    with torch.inference_mode(False), torch.enable_grad():
        tensor = torch.ones(2)
        _HELD.append(tensor * torch.ones(2, requires_grad=True))
    return tensor


class _Around(torch.Tensor):
    """A tensor of another class around one that is kept: it has no memory of its own."""

    @staticmethod
    def __new__(cls, kept: torch.Tensor) -> _Around:
        around: _Around = torch.Tensor._make_wrapper_subclass(cls, kept.shape, dtype=kept.dtype)  # type: ignore[attr-defined]
        return around

    def __init__(self, kept: torch.Tensor) -> None:
        self.kept = kept

    @classmethod
    def __torch_dispatch__(cls, *given: Any, **named: Any) -> Any:
        raise NotImplementedError


FRESH: dict[str, Callable[[], torch.Tensor]] = {
    "new": lambda: torch.ones(1, 4),
    "copy": lambda: _KEPT.clone(),
    "scalar": lambda: torch.tensor(True),
}
KEPT: dict[str, Callable[[], torch.Tensor]] = {
    "the same tensor": lambda: _KEPT,
    "a slice": lambda: _KEPT[:1],
    "another view": lambda: _KEPT.reshape(4),
    "detached": lambda: _KEPT.detach(),
    "in a list": lambda: _kept_in([torch.ones(2)]),
    "in a tuple": lambda: _kept_in((torch.ones(2),)),
    "in nested dictionaries": lambda: _kept_in({"meta": {"x": torch.ones(2)}}),
    "memory of an array": lambda: torch.from_numpy(_ARRAY),
    "memory from elsewhere": lambda: torch.from_dlpack(_ARRAY),
    "known by a weak reference": _weakly_kept,
    "memory of a storage that is kept": _of_kept_storage,
    "saved by a graph": _saved_by_a_graph,
    "around a kept tensor": lambda: _Around(_KEPT),
    "one row of many that are kept": lambda: _kept_in([torch.ones(3, 2)])[1:2],
}


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("make", FRESH.values(), ids=FRESH)
def test_nobody_reaches_a_new_tensor(make: Callable[[], torch.Tensor], inference: bool) -> None:
    with torch.inference_mode(inference):
        row = [make()]
        alone = reachable(row, held=1)
        live = {"x": row[0]}
        shared, counted = reachable(row, held=1), reachable(row, held=2)
    assert (alone, shared, counted, len(live)) == ([], [0], [], 1)


def _parts(count: int) -> list[torch.Tensor]:
    return list(torch.ones(4, 3)[:count].unbind())


def test_memory_that_tensors_share_with_each_other_alone_is_theirs() -> None:
    with torch.inference_mode():
        rows = _parts(4)
        assert reachable(rows, held=1) == []
        some = _parts(4)
        kept = some.pop(1)
        assert reachable(some, held=1) == [0, 1, 2]
        mixed = [torch.ones(2), *_parts(2), kept[:1], torch.zeros(2)]
        assert reachable(mixed, held=1) == [3]


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("make", KEPT.values(), ids=KEPT)
def test_what_is_kept_is_reachable(make: Callable[[], torch.Tensor], inference: bool) -> None:
    with torch.inference_mode(inference):
        row = [make()]
        found = reachable(row, held=1)
    assert found == [0]


@pytest.mark.parametrize("count", ["_storage_references", "_tensor_references"])
def test_without_pytorchs_count_everything_is_reachable(count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, count, None)
    row = [torch.ones(1)]
    assert reachable(row, held=1) == [0]
