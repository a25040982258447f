# SPDX-License-Identifier: Apache-2.0
"""The buffer helper: how routing moves rows, indices and results, correct on every device torch supports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch

Rows: TypeAlias = "slice | torch.Tensor"
"""Where rows lie in a buffer: a slice when contiguous, else a device index as :meth:`BufferHelper.rows` made it."""

# No dtype is wider, so a piece that begins at a multiple of it can be viewed as any.
_ALIGNMENT = 16


class BufferHelper:
    """Row copies, owned snapshots and result transfers on one device.

    No method keeps a reference to a tensor it was given, and none resizes or reallocates a destination (R6).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_host = device.type == "cpu"
        self._offsets: list[int] = []
        self._rows: Rows = slice(0, 0)
        self._padding = torch.zeros(_ALIGNMENT, dtype=torch.uint8, device=device)

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
        return torch.from_numpy(np.array(values, dtype=np.int64)).to(self.device, non_blocking=True)

    def copy(self, dest: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor of the same shape into ``dest``, from this device or the host, cast to its dtype.

        ``source`` may be the destination, or overlap it in any way (E8).
        """
        if not _same_memory(source, dest):
            self._write(dest, source.clone() if shares_storage(source, dest) else source)

    def _write(self, dest: torch.Tensor, source: torch.Tensor) -> None:
        dest.copy_(source, non_blocking=True)

    def copy_all(self, dests: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """The same for several tensors. No source may overlap a destination."""
        for dest, source in zip(dests, sources, strict=True):
            self._write(dest, source)

    def put(self, dest: torch.Tensor, rows: Rows, source: torch.Tensor) -> None:
        """Copy ``source`` to ``dest[rows]`` in place, cast to the buffer's dtype.

        ``source`` has the shape of ``dest[rows]`` and lies on the same device. It may be the destination, or overlap it
        in any way (E8).
        """
        if isinstance(rows, slice):
            self.copy(dest[rows], source)
        else:
            # index_copy_ refuses another dtype and reads its source while it writes.
            source = source.clone() if shares_storage(source, dest) else source
            dest.index_copy_(0, rows, source if source.dtype == dest.dtype else source.to(dest.dtype))

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        """An owned, contiguous copy on the same device: later writes to ``tensor`` do not reach it (T9)."""
        own = tensor.detach() if tensor.requires_grad else tensor
        # The memory format of a tensor that is no plain memory cannot be asked for, nor need it be.
        return own.clone() if own.is_contiguous() or not _packs(own) else own.contiguous()

    def stack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """One owned block, shape (tensors, ...), with a copy of every tensor (T9); all have one shape and dtype.

        One device operation however many there are; ``block.unbind()`` gives them back as views.
        """
        # Tensors of another memory format would be stacked in theirs.
        return torch.stack(list(tensors)).detach().contiguous()

    def fetch(self, blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Owned blocks of any shape and dtype as host memory, in order: one transfer and one wait for all of them."""
        packed = [block for block in blocks if _packs(block)]
        if len(packed) < 2:
            return [self._to_host(block) if _packs(block) else block.to("cpu") for block in blocks]
        # Each in memory of its own: what was fetched together need not live as long as the last of it.
        host = iter([part.clone() for part in _unpacked(self._to_host(self._pack(packed)), packed)])
        return [next(host) if _packs(block) else block.to("cpu") for block in blocks]

    def _pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """One block of bytes with a copy of every tensor, of any shape and dtype, in one device operation."""
        pieces: list[torch.Tensor] = []
        for tensor in tensors:
            piece = tensor.contiguous().reshape(-1).view(torch.uint8)
            pieces += [piece, self._padding[: -piece.numel() % _ALIGNMENT]]
        return torch.cat(pieces)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of this device as owned host memory, there when this returns: one transfer and one wait."""
        return tensor.to("cpu")


def _packs(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be packed with others, as bytes."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def _unpacked(block: torch.Tensor, like: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors of a packed block, in order and shaped as ``like``: views of it."""
    start = 0
    for tensor in like:
        size = tensor.numel() * tensor.element_size()
        yield block[start : start + size].view(tensor.dtype).reshape(tensor.shape)
        start += size + -size % _ALIGNMENT


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.device == b.device and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


HELPER = BufferHelper
