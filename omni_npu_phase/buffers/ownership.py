# SPDX-License-Identifier: Apache-2.0
"""Whether anyone else can still write to a tensor that was handed in.

A hook may return the same tensor for every row and fill it anew for the next one, so what it returned must be copied
before it runs again. A tensor that nobody but its new holders can reach needs no copy for that.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

# Private to PyTorch, whose own graph trees rely on it. Without it every tensor counts as reachable.
_storage_references: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def reachable(tensor: torch.Tensor, held: int) -> bool:
    """Whether the memory of a tensor can be reached otherwise than by its holders, of which there are ``held``.

    ``held``: how many containers the caller knows to hold it. It must be called with an expression that takes the
    tensor from one of them: a variable would be one more holder.
    """
    if sys.getrefcount(tensor) != _UNHELD + held or _storage_references is None:
        return True
    # What another class puts around a tensor that is kept has no memory of its own. A weak reference is a way back as
    # long as anyone holds the tensor.
    if type(tensor) is not torch.Tensor or weakref.getweakrefcount(tensor):
        return True
    storage = tensor.untyped_storage()
    # Memory that PyTorch did not allocate itself, of an array or of a captured graph, cannot be resized.
    return (
        not storage.resizable()
        or sys.getrefcount(storage) != _OWN_VARIABLE
        or _storage_references(storage._cdata) != _OWN_STORAGE
    )


def _references(value: Any) -> int:
    return sys.getrefcount(value)


def _count_own() -> tuple[int, int]:
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    references = 0 if _storage_references is None else _storage_references(storage._cdata)
    return sys.getrefcount(storage), references


_UNHELD = _references(object())
"""What Python counts for a function's argument that nothing else holds."""
_OWN_VARIABLE, _OWN_STORAGE = _count_own()
"""What Python and PyTorch count for the storage of one tensor while it is looked at. Its object is the same for all."""
