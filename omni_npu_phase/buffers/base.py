# SPDX-License-Identifier: Apache-2.0
"""The buffer helper: how routing moves rows, indices and results, correct on every device torch supports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

Rows: TypeAlias = "slice | torch.Tensor"
"""Where rows lie in a buffer: a slice when contiguous, else a device index as :meth:`BufferHelper.rows` made it."""


class BufferHelper:
    """Row copies, owned snapshots and result transfers on one device.

    No method keeps a reference to a tensor it was given, and none resizes or reallocates a destination (R6).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._offsets: list[int] = []
        self._rows: Rows = slice(0, 0)

    def rows(self, offsets: Sequence[int]) -> Rows:
        """Locate rows by their offsets, staging a device index only where they are scattered.

        ``offsets``: row numbers, in any order, without repeats. The index is int64 of shape (len(offsets),) on the
        helper's device; it stays valid until the next call with other offsets. Asking again for the offsets just
        located costs no upload, so a step locates its decode rows once.
        """
        wanted = list(offsets)
        if wanted != self._offsets or not wanted:
            start = wanted[0] if wanted else 0
            contiguous = wanted == list(range(start, start + len(wanted)))
            self._rows = slice(start, start + len(wanted)) if contiguous else self._stage(wanted)
            self._offsets = wanted
        return self._rows

    def _stage(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)

    def take(self, source: torch.Tensor, rows: Rows, out: torch.Tensor) -> None:
        """Copy ``source[rows]`` into ``out``, which has as many rows; casts to its dtype. Must not overlap."""
        if isinstance(rows, slice):
            out.copy_(source[rows])
        elif source.dtype == out.dtype:
            torch.index_select(source, 0, rows, out=out)
        else:
            out.copy_(source.index_select(0, rows))

    def put(self, dest: torch.Tensor, rows: Rows, source: torch.Tensor) -> None:
        """Copy ``source`` to ``dest[rows]`` in place, cast to the buffer's dtype.

        ``source`` has the shape of ``dest[rows]`` and lies on the same device. It may be the destination, or overlap it
        in any way (E8).
        """
        if isinstance(rows, slice):
            target = dest[rows]
            if _same_memory(source, target):
                return
            target.copy_(source.clone() if _shares_storage(source, dest) else source)
        else:
            # index_copy_ refuses another dtype and reads its source while it writes.
            source = source.clone() if _shares_storage(source, dest) else source
            dest.index_copy_(0, rows, source.to(dest.dtype))

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        """An owned, contiguous copy on the same device: later writes to ``tensor`` do not reach it (T9)."""
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Owned, contiguous host copies, in order, of tensors of any shape and dtype: one transfer, one wait (T9).

        The copies are views of one host block, which lives while any of them does.
        """
        # Widest dtype first keeps every piece aligned for the dtype it is viewed as.
        order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
        if not order:
            return []
        packed = torch.cat([tensors[i].detach().contiguous().reshape(-1).view(torch.uint8) for i in order])
        block = self._block_to_host(packed)
        copies: list[torch.Tensor] = [block] * len(tensors)
        start = 0
        for i in order:
            tensor = tensors[i]
            stop = start + tensor.numel() * tensor.element_size()
            copies[i] = block[start:stop].view(tensor.dtype).reshape(tensor.shape)
            start = stop
        return copies

    def _block_to_host(self, block: torch.Tensor) -> torch.Tensor:
        """The packed bytes as an owned host tensor, arrived."""
        return block.to("cpu")


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()


def _shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.device == b.device and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


HELPER = BufferHelper
