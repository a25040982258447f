# SPDX-License-Identifier: Apache-2.0
"""Whether anyone else can still write to tensors that were handed in.

A hook may return the same tensor for every row and fill it anew for the next one, so what it returned must be copied
before it runs again. A tensor that nobody but its new holders can reach needs no copy: it is theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any
from weakref import getweakrefcount

import torch

# Private to PyTorch, whose own graph trees rely on the first. Without them every tensor counts as reachable.
_storage_references: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_tensor_references: Callable[[torch.Tensor], int] | None = getattr(torch.Tensor, "_use_count", None)


def reachable(tensors: Sequence[torch.Tensor], held: int) -> list[int]:
    """Positions of tensors whose memory can be reached otherwise than through these tensors and their holders.

    ``held``: how many containers hold each of them, ``tensors`` among these. The caller must have them in no variable,
    which would be one more. Tensors that divide a piece of memory among each other alone are not reachable.
    """
    if _storage_references is None or _tensor_references is None:
        return list(range(len(tensors)))
    found: list[int] = []
    sharing: dict[int, list[int]] = {}
    for position in range(len(tensors)):
        tensor = tensors[position]
        # Python counts its own holders, PyTorch those in C++: a graph, or an operator with a buffer of its own. What
        # another class puts around a tensor that is kept has no memory of its own. A weak reference is a way back as
        # long as anyone holds the tensor.
        if (
            sys.getrefcount(tensor) != _UNHELD + held
            or _tensor_references(tensor) != _OWN_TENSOR
            or type(tensor) is not torch.Tensor
            or tensor.layout is not torch.strided
            or getweakrefcount(tensor)
        ):
            found.append(position)
            continue
        storage = tensor.untyped_storage()
        # Memory that PyTorch did not allocate itself, of an array or of a captured graph, cannot be resized.
        if not storage.resizable() or sys.getrefcount(storage) != _OWN_VARIABLE:
            found.append(position)
        elif _storage_references(storage._cdata) != _OWN_STORAGE:
            sharing.setdefault(storage._cdata, []).append(position)
    for positions in sharing.values():
        storage = tensors[positions[0]].untyped_storage()
        others = _storage_references(storage._cdata) - _OWN_STORAGE - len(positions) + 1
        if others or _overlap([tensors[position] for position in positions]):
            found += positions
    return found


def _overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether some of these tensors may have an element in common."""
    if not all(map(torch.Tensor.is_contiguous, tensors)):
        return True
    largest = max(tensor.nbytes for tensor in tensors)
    begins = sorted(map(torch.Tensor.data_ptr, tensors))
    return any(after - before < largest for before, after in pairwise(begins))


def _references_of_first(values: Sequence[Any]) -> int:
    """What Python counts for the first of some values, looked at as above."""
    counts = []
    for position in range(len(values)):
        value = values[position]
        counts.append(sys.getrefcount(value))
    return counts[0]


def _count_own() -> tuple[int, int, int]:
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    references = 0 if _storage_references is None else _storage_references(storage._cdata)
    return 0 if _tensor_references is None else _tensor_references(tensor), sys.getrefcount(storage), references


_UNHELD = _references_of_first([object()]) - 1
"""What Python counts for a value that nothing but a variable holds while it is looked at."""
_OWN_TENSOR, _OWN_VARIABLE, _OWN_STORAGE = _count_own()
"""What PyTorch counts for a tensor that Python alone holds, and Python and PyTorch for the storage of one tensor while
it is looked at. Its object is the same for all."""
