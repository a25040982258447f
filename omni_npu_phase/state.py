# SPDX-License-Identifier: Apache-2.0
"""Writes into the per-request intermediate buffer: merged as vLLM-Omni merges them, and owned (R8, T9)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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


_Place = tuple[Any, Any]
"""A dictionary or list in a live buffer, and a key or index in it."""


def _whole(tensor: torch.Tensor) -> tuple[torch.Tensor]:
    return (tensor,)


def _rows(numbers: range, tensor: torch.Tensor) -> list[torch.Tensor]:
    # Slices, for there may be fewer rows than requests.
    return [tensor[row : row + 1] for row in numbers]


@dataclass(slots=True)
class _Piece:
    """A tensor that was handed in, and the places that its parts go to."""

    like: torch.Tensor
    """The tensor itself, whose contents may change as soon as it is packed; its shape and dtype are read later."""
    places: list[_Place]
    parts: Callable[[torch.Tensor], Sequence[torch.Tensor]] = _whole
    held: Sequence[torch.Tensor] = field(default_factory=tuple)
    """Owned device copies, one a place."""


class StateWrites:
    """The writes of one step into live buffers; what goes from the device to the host goes in one transfer.

    Every value is in its place when a method returns, so later hooks of the step see it. A device tensor bound for the
    host is there as an owned device copy, and :meth:`finish` puts the host copy wherever that still is: in its place,
    or in a buffer that has replaced the request's since.
    """

    def __init__(self, runner: Any, helper: BufferHelper) -> None:
        self._runner = runner
        self._helper = helper
        self._resident = getattr(runner.model, "gpu_resident_buffer_keys", ())
        self._leaving: list[tuple[torch.Tensor, list[_Piece]]] = []
        """Packed blocks that :meth:`finish` brings to the host."""
        self._written: dict[str, dict[str, Any]] = {}
        """The live buffer of each request when it was last written."""

    def store(self, request_ids: Sequence[str], updates: Sequence[Any]) -> None:
        """Merge each update dictionary into its own request's live buffer (R8).

        Nested dictionaries merge one level deep. A tensor under a ``(key, qualifier)`` pair of the model's
        ``gpu_resident_buffer_keys`` stays on its device as an owned copy; every other device tensor becomes an owned
        host copy. Updates that are empty or no dictionary, and requests without state, are passed over.
        """
        staying: list[_Piece] = []
        leaving: list[_Piece] = []
        for request_id, update in zip(request_ids, updates, strict=True):
            state = self._runner.requests.get(request_id)
            if state is None or not isinstance(update, dict) or not update:
                continue
            info = self._written[request_id] = live_info(self._runner, request_id)
            for key, value in update.items():
                if isinstance(value, dict):
                    nested = info.setdefault(key, {})
                    for qualifier, inner in value.items():
                        resident = (key, qualifier) in self._resident
                        self._place(nested, qualifier, inner, staying if resident else leaving, resident)
                else:
                    self._place(info, key, value, leaving, False)
            state.additional_information_cpu = info
        self._hold(staying, resident=True)
        self._hold(leaving, resident=False)

    def store_codes(
        self,
        request_ids: Sequence[str],
        key: tuple[Any, Any],
        codes: torch.Tensor,
        marks: Mapping[tuple[Any, Any], torch.Tensor],
    ) -> None:
        """Store row i of ``codes``, shape (rows, ...), with request i, beside element i of each of ``marks`` (T5).

        They stay where they are if the codes' key is resident, and a mark also if its own is.
        """
        staying: list[_Piece] = []
        leaving: list[_Piece] = []
        for name, column in {key: codes, **marks}.items():
            places: list[_Place] = []
            for request_id in request_ids:
                info = self._written[request_id] = live_info(self._runner, request_id)
                places.append((info.setdefault(name[0], {}), name[1]))
                self._runner.requests[request_id].additional_information_cpu = info
            piece = _Piece(column, places, partial(_rows, range(len(places))) if name == key else torch.unbind)
            resident = key in self._resident or name in self._resident
            if self._packs(column):
                (staying if resident else leaving).append(piece)
            else:
                kept = self._kept(column.clone(), resident)
                for (dest, place), part in zip(places, piece.parts(kept), strict=True):
                    dest[place] = part
        self._hold(staying, resident=True)
        self._hold(leaving, resident=False)

    def finish(self) -> None:
        """Bring what is still on the device to the host, to wherever nothing was written over it since."""
        leaving, self._leaving = self._leaving, []
        written, self._written = self._written, {}
        blocks = self._helper.fetch([block for block, _ in leaving])
        arrived: dict[int, torch.Tensor] = {}
        for (_, pieces), block in zip(leaving, blocks, strict=True):
            for piece, tensor in zip(pieces, self._unpacked(block, pieces), strict=True):
                for place, held, part in zip(piece.places, piece.held, piece.parts(tensor), strict=True):
                    # A small value must not keep a whole block of others alive for as long as its request lives.
                    arrived[id(held)] = part.clone()
                    _swap(*place, arrived)
        for request_id, info in written.items():
            replacement = self._runner.model_intermediate_buffer.get(request_id)
            if isinstance(replacement, dict) and replacement is not info:
                _swap_all(replacement, arrived)

    def _place(self, dest: dict[Any, Any], key: Any, value: Any, pieces: list[_Piece], resident: bool) -> None:
        if isinstance(value, torch.Tensor):
            self._place_tensor(dest, key, value, pieces, resident)
        elif isinstance(value, list):
            items = dest[key] = list(value)
            for index, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    self._place_tensor(items, index, item, pieces, False)
        else:
            dest[key] = value

    def _place_tensor(self, dest: Any, key: Any, value: torch.Tensor, pieces: list[_Piece], resident: bool) -> None:
        # Also what is stored there already: it may be a tensor that the hook put there and will fill again (T9).
        if self._packs(value):
            pieces.append(_Piece(value, [(dest, key)]))
        else:
            dest[key] = self._kept(value, resident)

    def _packs(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's bytes can go into a block: dense memory of the helper's device."""
        return (
            tensor.device == self._helper.device
            and tensor.layout is torch.strided
            and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        )

    def _kept(self, tensor: torch.Tensor, resident: bool) -> torch.Tensor:
        """A tensor that no block takes, as the released runner stores it: host memory elsewhere than here uncopied."""
        tensor = tensor.detach()
        if resident or tensor.is_meta:
            return tensor.clone()
        return tensor.to("cpu", copy=self._helper.device.type == "cpu").contiguous()

    def _hold(self, pieces: list[_Piece], resident: bool) -> None:
        """Put owned device copies in their places, where those of resident values stay."""
        if not pieces:
            return
        block = self._helper.pack([piece.like for piece in pieces])
        for piece, tensor in zip(pieces, self._unpacked(block, pieces), strict=True):
            piece.held = piece.parts(tensor)
            for (dest, key), part in zip(piece.places, piece.held, strict=True):
                dest[key] = part
        if not resident:
            self._leaving.append((block, pieces))

    def _unpacked(self, block: torch.Tensor, pieces: Sequence[_Piece]) -> list[torch.Tensor]:
        return self._helper.unpack(block, [piece.like for piece in pieces])


def _swap(dest: Any, key: Any, arrived: Mapping[int, torch.Tensor]) -> None:
    """Put a host copy in the place of the device tensor it was made from; anything else there stays."""
    if isinstance(dest, list) and key >= len(dest):
        return
    current = dest[key] if isinstance(dest, list) else dest.get(key)
    if id(current) in arrived:
        dest[key] = arrived[id(current)]


def _swap_all(info: dict[Any, Any], arrived: Mapping[int, torch.Tensor], nested: bool = True) -> None:
    """The same, throughout a live buffer: its values, their lists, and dictionaries one level deep, as merging goes."""
    for key, value in list(info.items()):
        _swap(info, key, arrived)
        if isinstance(value, dict) and nested:
            _swap_all(value, arrived, nested=False)
        elif isinstance(value, list):
            for index in range(len(value)):
                _swap(value, index, arrived)
