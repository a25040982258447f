# SPDX-License-Identifier: Apache-2.0
"""Writes into the per-request intermediate buffer: merged as vLLM-Omni merges them, and owned (R8, T9)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from omni_npu_phase.buffers.base import BufferHelper
from omni_npu_phase.buffers.ownership import reachable

_LARGE = 1 << 12
"""Elements from which on a tensor is stored alone: a part keeps the whole block that it lies in alive."""
_SMALL = 1 << 12
"""Bytes of memory of which a tensor may be a part and still keep it alive."""
_PLAIN = frozenset((bool, int, float, str, type(None)))
"""Kinds of values in which there is no tensor: asked first, since most values are of them."""


def live_infos(runner: Any, request_ids: Sequence[str]) -> list[dict[str, Any]]:
    """The live buffers of requests, each made where it is missing (M9)."""
    live = runner.model_intermediate_buffer
    # An empty buffer is no missing one, but looks like it; live_info tells them apart.
    return [live.get(request_id) or live_info(runner, request_id) for request_id in request_ids]


def live_info(runner: Any, request_id: str) -> dict[str, Any]:
    """The live buffer of a request, made where it is missing (M9).

    It is mirrored to the request's state, where models written for older releases read it.
    """
    info: dict[str, Any] | None = runner.model_intermediate_buffer.get(request_id)
    if info is None:
        info = runner.model_intermediate_buffer[request_id] = {}
        runner.requests[request_id].additional_information_cpu = info
    return info


_Place: TypeAlias = "tuple[Any, Any, bool]"
"""Where a tensor was put in a live buffer: which dictionary or list, under which key or index, and whether it stays on
its device. A plain tuple: one is made for every tensor."""


@dataclass(slots=True)
class _Stored:
    """Tensors in live buffers, and the place of each."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    places: list[_Place] = field(default_factory=list)

    def add(self, tensor: torch.Tensor, place: _Place) -> None:
        self.tensors.append(tensor)
        self.places.append(place)

    def clear(self) -> None:
        self.tensors.clear()
        self.places.clear()


class StateWrites:
    """The writes of one step into live buffers; what goes from the device to the host goes in one transfer.

    Every value is in its place when a method returns, so later hooks of the step see it. A tensor is there as it was
    handed in until :meth:`own` has looked at who can still reach it, before the next hook runs. One that nobody reaches
    is owned as it is; the others are copied, tensors alike together. :meth:`finish` puts host copies in the place of
    those that leave the device. Such a copy goes wherever its original still is: in its place, in another one of the
    same buffer, or in a buffer that has replaced the request's since.
    """

    def __init__(self, runner: Any, helper: BufferHelper) -> None:
        self._runner = runner
        self._helper = helper
        self._resident = getattr(runner.model, "gpu_resident_buffer_keys", ())
        self._new = _Stored()
        """Handed in since the last look at who can reach what."""
        self._waiting = _Stored()
        """Out of every hook's reach, and to leave the device."""
        self._leaving: list[tuple[torch.Tensor, _Stored]] = []
        """Blocks that :meth:`finish` brings to the host, each with the places of its rows."""
        self._written: dict[str, dict[str, Any]] = {}
        """The live buffer of each request when a tensor that leaves the device was first written to it."""

    def store(self, request_id: str, update: Any) -> None:
        """Merge an update dictionary into its request's live buffer (R8).

        Nested dictionaries merge one level deep. A tensor under a ``(key, qualifier)`` pair of the model's
        ``gpu_resident_buffer_keys`` stays on its device, owned; every other device tensor becomes an owned host copy.
        An update that is empty or no dictionary, and a request without state, are passed over.
        """
        if not isinstance(update, dict) or not update:
            return
        state = self._runner.requests.get(request_id)
        if state is None:
            return
        info = live_info(self._runner, request_id)
        for key, value in update.items():
            if isinstance(value, dict):
                nested = info.setdefault(key, {})
                for qualifier, inner in value.items():
                    if type(inner) in _PLAIN:
                        nested[qualifier] = inner
                    else:
                        self._place(nested, qualifier, inner, (key, qualifier) in self._resident)
            else:
                self._place(info, key, value, False)
        state.additional_information_cpu = info
        if not self._helper.is_host:
            self._written.setdefault(request_id, info)

    def store_copies(self, request_id: str, update: Any) -> None:
        """The same for an update that its maker still holds: it is copied before it is put in its place, where other
        threads may read it."""
        if isinstance(update, dict):
            update = {
                key: {inner: self._copied(own, (key, inner) in self._resident) for inner, own in value.items()}
                if isinstance(value, dict)
                else self._copied(value, False)
                for key, value in update.items()
            }
        self.store(request_id, update)
        del update
        self.own()

    def _copied(self, value: Any, resident: bool) -> Any:
        if isinstance(value, list):
            return [self._copied(item, False) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        return self._helper.snapshot(value) if self._packs(value) else self._kept(value, resident)

    def store_codes(
        self,
        request_ids: Sequence[str],
        key: tuple[Any, Any],
        codes: torch.Tensor,
        marks: Mapping[tuple[Any, Any], torch.Tensor],
    ) -> None:
        """Store row i of ``codes``, shape (rows, ...), with request i, beside element i of each of ``marks`` (T5).

        They stay where they are if the codes' key is resident, and a mark also if its own is. ``marks`` are handed
        over: they are not copied.
        """
        infos = live_infos(self._runner, request_ids)
        for request_id, info in zip(request_ids, infos, strict=True):
            self._runner.requests[request_id].additional_information_cpu = info
        if not self._helper.is_host:
            for request_id, info in zip(request_ids, infos, strict=True):
                self._written.setdefault(request_id, info)
        resident = key in self._resident
        owned = self._copied(codes, resident)
        # Each request gets its row as a slice; where there are fewer rows, the others get empty ones.
        count = owned.shape[0]
        if count:
            self._put_column(infos[:count], key, owned, owned.split_with_sizes([1] * count), resident)
        for info in infos[count:]:
            info.setdefault(key[0], {})[key[1]] = self._kept(codes[:0], resident)
        for name, marked in marks.items():
            stays = resident or name in self._resident
            column = marked if self._packs(marked) else self._kept(marked, stays)
            self._put_column(infos, name, column, column.unbind(), stays)

    def _put_column(
        self,
        infos: Sequence[dict[str, Any]],
        name: tuple[Any, Any],
        column: torch.Tensor,
        parts: Sequence[torch.Tensor],
        resident: bool,
    ) -> None:
        """Put each part of an owned column into its live buffer."""
        group, qualifier = name
        for info, part in zip(infos, parts, strict=True):
            info.setdefault(group, {})[qualifier] = part
        if not (resident or self._helper.is_host) and column.device == self._helper.device:
            places = [(info[group], qualifier, False) for info in infos]
            self._leaving.append((column, _Stored(list(parts), places)))

    def own(self) -> None:
        """Copy what the hook that just returned can still reach, which the next one might write over (T9).

        Nothing but live buffers may hold tensors of earlier updates when this is called.
        """
        new = self._new
        if not new.tensors:
            return
        # Held by what is new, and by the live buffer.
        reached = set(reachable(new.tensors, held=2))
        copied = _Stored()
        for position, (tensor, place) in enumerate(zip(new.tensors, new.places, strict=True)):
            stays = tensor.is_cpu or place[2]
            if position in reached or not (_is_whole(tensor) if stays else self._packs(tensor)):
                copied.add(tensor, place)
            elif not stays:
                self._waiting.add(tensor, place)
        new.clear()
        if copied.tensors:
            self._copy(copied)

    def finish(self) -> None:
        """Own what is new, then bring what leaves the device to the host."""
        self.own()
        if self._waiting.tensors:
            waiting, self._waiting = self._waiting, _Stored()
            self._leaving += [(self._block(kind.tensors), kind) for kind in _kinds(waiting)]
        if self._leaving:
            leaving, self._leaving = self._leaving, []
            blocks = self._helper.fetch([block for block, _ in leaving])
            for block, (_, stored) in zip(blocks, leaving, strict=True):
                self._move(stored, _parts(block, stored))
        self._written.clear()

    def _block(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tensors that nobody else reaches as one block. A single one need not be copied for that."""
        if len(tensors) > 1:
            return self._helper.join(tensors)
        return tensors[0].detach().contiguous().unsqueeze(0)

    def _copy(self, handed: _Stored) -> None:
        """Put owned copies in the places of tensors, in one device operation for each kind of them."""
        packed = _Stored()
        for tensor, place in zip(handed.tensors, handed.places, strict=True):
            if self._packs(tensor):
                packed.add(tensor, place)
            else:
                _replace(place, tensor, self._kept(tensor, place[2]))
        for kind in _kinds(packed):
            block = self._helper.join(kind.tensors)
            self._move(kind, block.unbind())
            if not (kind.places[0][2] or self._helper.is_host):
                self._leaving.append((block, kind))

    def _move(self, stored: _Stored, copies: Sequence[torch.Tensor]) -> None:
        """Put copies in the places of what is stored, and also where hooks have put the originals since: into buffers
        that replaced those which they were written to, and, unless all stayed in their places, elsewhere in the same.
        """
        originals, stored.tensors = stored.tensors, list(copies)
        stayed = True
        for place, original, copy in zip(stored.places, originals, copies, strict=True):
            stayed &= _replace(place, original, copy)
        live = self._runner.model_intermediate_buffer
        searched = [
            known
            for request_id, info in self._written.items()
            if (known := live.get(request_id)) is not info or not stayed
        ]
        if searched:
            by_original = {id(original): copy for original, copy in zip(originals, copies, strict=True)}
            for info in searched:
                if isinstance(info, dict):
                    _swap_all(info, by_original)

    def _place(self, dest: Any, key: Any, value: Any, resident: bool) -> None:
        """Put a value into a live buffer, or a list of values; tensors until :meth:`own` as they are."""
        # Also what is stored there already: it may be a tensor that the hook put there and will fill again (T9).
        if isinstance(value, torch.Tensor):
            self._new.add(value, (dest, key, resident))
        elif isinstance(value, list):
            items, value = value, list(value)
            for index, item in enumerate(items):
                if isinstance(item, torch.Tensor):
                    self._new.add(item, (value, index, False))
        dest[key] = value

    def _packs(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor can go into a block with others: dense memory of the helper's device."""
        return (
            tensor.device == self._helper.device
            and tensor.layout is torch.strided
            and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        )

    def _kept(self, tensor: torch.Tensor, resident: bool) -> torch.Tensor:
        """An owned copy of a tensor that no block takes."""
        tensor = tensor.detach()
        if resident or tensor.is_meta:
            return tensor.clone()
        return tensor.to("cpu", copy=True).contiguous()


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor that nobody else reaches can stay as it is: contiguous, in memory that is about its own."""
    memory = tensor.untyped_storage().nbytes()
    return tensor.is_contiguous() and not tensor.requires_grad and (memory <= _SMALL or memory == tensor.nbytes)


def _kinds(stored: _Stored) -> Iterable[_Stored]:
    """Tensors of one shape and dtype that go the same way. A large one is alone, so that it ends with its request."""
    kinds: dict[Any, _Stored] = {}
    for position, (tensor, place) in enumerate(zip(stored.tensors, stored.places, strict=True)):
        alone = position if tensor.numel() > _LARGE else None
        kinds.setdefault((tensor.dtype, tensor.shape, place[2], alone), _Stored()).add(tensor, place)
    return kinds.values()


def _replace(place: _Place, old: torch.Tensor, new: torch.Tensor) -> bool:
    """Put a tensor in the place of another, unless something else was written there since; whether it still was."""
    dest, key, _ = place
    stayed = _at(dest, key) is old
    if stayed:
        dest[key] = new
    return stayed


def _parts(block: torch.Tensor, stored: _Stored) -> Sequence[torch.Tensor]:
    """The rows of a block, each of the shape that is stored: without the first dimension, or with one row of it."""
    return block.unbind() if stored.tensors[0].ndim < block.ndim else block.split_with_sizes([1] * len(block))


def _at(dest: Any, key: Any) -> Any:
    """What is in a place now, None where nothing is."""
    if isinstance(dest, dict):
        return dest.get(key)
    try:
        # A list, or a model's own kind of mapping.
        return dest[key]
    except LookupError:
        return None


def _swap(dest: Any, key: Any, copies: Mapping[int, torch.Tensor]) -> None:
    """Put a copy in the place of its original; anything else there stays."""
    current = _at(dest, key)
    if id(current) in copies:
        dest[key] = copies[id(current)]


def _swap_all(info: dict[Any, Any], copies: Mapping[int, torch.Tensor], nested: bool = True) -> None:
    """The same, throughout a live buffer: its values, their lists, and dictionaries one level deep, as merging goes."""
    for key, value in list(info.items()):
        _swap(info, key, copies)
        if isinstance(value, dict) and nested:
            _swap_all(value, copies, nested=False)
        elif isinstance(value, list):
            for index in range(len(value)):
                _swap(value, index, copies)
