# SPDX-License-Identifier: Apache-2.0
"""Writes into the per-request intermediate buffer: merged as vLLM-Omni merges them, and owned (R8, T9)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from omni_npu_phase.buffers.base import BufferHelper


def live_info(runner: Any, request_id: str) -> dict[str, Any]:
    """The live buffer of a request, made where it is missing (M9).

    It is mirrored to the request's state, where models written for older releases read it.
    """
    info: dict[str, Any] | None = runner.model_intermediate_buffer.get(request_id)
    if info is None:
        info = runner.model_intermediate_buffer[request_id] = {}
        runner.requests[request_id].additional_information_cpu = info
    return info


@dataclass(slots=True)
class _Copy:
    """A device tensor handed in, and where its owned copy goes. Only its shape and dtype are read later."""

    like: torch.Tensor
    write: Callable[[torch.Tensor, int | None], None]


class StateWrites:
    """The writes of one step into live buffers; what goes from the device to the host goes in one transfer.

    Values that need no transfer are written at once, the others by :meth:`finish`. Every device tensor is copied when
    it is handed in, so a hook may use its memory again for the next row.
    """

    def __init__(self, runner: Any, helper: BufferHelper) -> None:
        self._runner = runner
        self._helper = helper
        self._resident = getattr(runner.model, "gpu_resident_buffer_keys", ())
        self._leaving: list[tuple[torch.Tensor, list[_Copy], int]] = []
        """Packed blocks on their way to the host, with the number of the call that handed them in."""
        self._calls = 0
        self._written_since: dict[tuple[int, Any], int] = {}
        """Slots written at once while blocks were on their way, by the number of the call."""

    def store(self, request_ids: Sequence[str], updates: Sequence[Any]) -> None:
        """Merge each update dictionary into its own request's live buffer (R8).

        Nested dictionaries merge one level deep. A tensor under a ``(key, qualifier)`` pair of the model's
        ``gpu_resident_buffer_keys`` stays on its device as an owned copy; every other tensor of the helper's device
        becomes an owned host copy. A tensor that already is the stored value, where it belongs, is left alone. Updates
        that are empty or no dictionary, and requests without state, are passed over.
        """
        self._calls += 1
        staying: list[_Copy] = []
        leaving: list[_Copy] = []
        for request_id, update in zip(request_ids, updates, strict=True):
            state = self._runner.requests.get(request_id)
            if state is None or not isinstance(update, dict) or not update:
                continue
            info = live_info(self._runner, request_id)
            for key, value in update.items():
                if isinstance(value, dict):
                    nested = info.setdefault(key, {})
                    for qualifier, inner in value.items():
                        resident = (key, qualifier) in self._resident
                        self._place(nested, qualifier, inner, staying if resident else leaving, resident)
                else:
                    self._place(info, key, value, leaving, False)
            state.additional_information_cpu = info
        if staying:
            self._write(self._helper.pack([copy.like for copy in staying]), staying)
        if leaving:
            self._leaving.append((self._helper.pack([copy.like for copy in leaving]), leaving, self._calls))

    def store_codes(
        self,
        request_ids: Sequence[str],
        key: tuple[Any, Any],
        codes: torch.Tensor,
        marks: Mapping[tuple[Any, Any], Any],
    ) -> None:
        """Store row i of ``codes``, shape (rows, ...), with request i, beside element i of each of ``marks`` (T5).

        They stay on the device if the codes' key is resident.
        """
        self._calls += 1
        columns = {key: codes, **marks}
        copies = [
            _Copy(column, partial(self._write_rows, request_ids, name, name == key)) for name, column in columns.items()
        ]
        block = self._helper.pack(list(columns.values()))
        if key in self._resident:
            self._write(block, copies)
        else:
            self._leaving.append((block, copies, self._calls))

    def finish(self) -> None:
        """Bring what is still on the device to the host, and write what nothing was written over since."""
        leaving, self._leaving = self._leaving, []
        blocks = self._helper.fetch([block for block, _, _ in leaving])
        for (_, copies, call), block in zip(leaving, blocks, strict=True):
            self._write(block, copies, call)
        self._written_since.clear()

    def _put(self, dest: Any, key: Any, value: Any, call: int | None = None) -> None:
        """Write a slot, at once or as part of an earlier ``call``; the later call wins."""
        slot = id(dest), key
        if call is None:
            if self._leaving:
                self._written_since[slot] = self._calls
            dest[key] = value
        elif self._written_since.get(slot, call) <= call:
            dest[key] = value

    def _place(self, dest: dict[Any, Any], key: Any, value: Any, copies: list[_Copy], resident: bool) -> None:
        if isinstance(value, torch.Tensor):
            self._place_tensor(dest, key, value, dest.get(key), copies, resident)
        elif isinstance(value, list):
            known = dest.get(key)
            kept = known if isinstance(known, list) else []
            items = list(value)
            self._put(dest, key, items)
            for index, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    self._place_tensor(items, index, item, kept[index] if index < len(kept) else None, copies, False)
        else:
            self._put(dest, key, value)

    def _place_tensor(
        self, dest: Any, key: Any, value: torch.Tensor, stored: Any, copies: list[_Copy], resident: bool
    ) -> None:
        if value is stored and (resident or value.device.type == "cpu"):
            return
        if value.device.type == "cpu" and self._helper.device.type != "cpu" and not resident:
            self._put(dest, key, value.detach().contiguous())
        else:
            copies.append(_Copy(value, partial(self._put, dest, key)))

    def _write(self, block: torch.Tensor, copies: Sequence[_Copy], call: int | None = None) -> None:
        owned = self._helper.unpack(block, [copy.like for copy in copies])
        for copy, tensor in zip(copies, owned, strict=True):
            # On the host a small value must not keep a whole block of others alive for as long as its request lives.
            copy.write(tensor.clone() if len(copies) > 1 and tensor.device.type == "cpu" else tensor, call)

    def _write_rows(
        self,
        request_ids: Sequence[str],
        key: tuple[Any, Any],
        keeps_row: bool,
        column: torch.Tensor,
        call: int | None = None,
    ) -> None:
        for row, request_id in enumerate(request_ids):
            info = live_info(self._runner, request_id)
            own = column[row : row + 1] if keeps_row else column[row]
            self._put(info.setdefault(key[0], {}), key[1], own, call)
            self._runner.requests[request_id].additional_information_cpu = info
