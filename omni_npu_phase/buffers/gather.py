# SPDX-License-Identifier: Apache-2.0
"""Rows that arrive one at a time and are written together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omni_npu_phase.buffers.base import BufferHelper
from omni_npu_phase.buffers.ownership import reachable


class Gathered:
    """Rows of the same few buffers, in order, until they are written in one device operation a buffer.

    A row is one tensor of shape (1, width) for each buffer, on the helper's device or the host.
    """

    def __init__(self, helper: BufferHelper) -> None:
        self._helper = helper
        self._rows: list[tuple[torch.Tensor, ...]] = []
        self._owned = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: tuple[torch.Tensor, ...]) -> None:
        self._rows.append(row)

    def own(self) -> None:
        """Copy what a hook can still reach of the rows added last, which the next one might write over.

        Nothing else may hold these rows when this is called.
        """
        rows, is_host = self._rows, self._helper.is_host
        while self._owned < len(rows):
            row = rows[self._owned]
            if reachable(row, held=1) or not (is_host or all(part.device == self._helper.device for part in row)):
                rows[self._owned] = tuple(map(self._helper.own, row))
            self._owned += 1

    def write(self, dests: Sequence[torch.Tensor], start: int) -> None:
        """Copy the rows to each buffer from row ``start`` on, cast to its dtype, and forget them."""
        self.own()
        for dest, column in zip(dests, zip(*self._rows, strict=True), strict=True):
            self._helper.gather(column, out=dest[start : start + len(column)])
        self._rows.clear()
        self._owned = 0
