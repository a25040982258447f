# SPDX-License-Identifier: Apache-2.0
"""Writes into the per-request intermediate buffer: merged as vLLM-Omni merges them, and owned (R8, T9)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omni_npu_phase.buffers.base import BufferHelper
from omni_npu_phase.buffers.ownership import reachable

_LARGE = 1 << 12
"""Elements from which on a tensor is stored alone: a part keeps the whole block that it lies in alive."""


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


@dataclass(slots=True)
class _Stored:
    """A tensor in a live buffer: in which dictionary or list, under which key or index, and whether it stays there."""

    dest: Any
    key: Any
    tensor: torch.Tensor
    resident: bool

    def replace(self, tensor: torch.Tensor) -> bool:
        """Put another in its place, unless something else was written there since; whether it was still there."""
        stayed = _at(self.dest, self.key) is self.tensor
        if stayed:
            self.dest[self.key] = tensor
        self.tensor = tensor
        return stayed


class StateWrites:
    """The writes of one step into live buffers; what goes from the device to the host goes in one transfer.

    Every value is in its place when a method returns, so later hooks of the step see it. A tensor is there as it was
    handed in, then as an owned copy: :meth:`own` copies what a hook can still reach, before the next one runs, and
    :meth:`settle` copies the rest, tensors alike together. :meth:`finish` puts host copies in the place of those that
    leave the device. A copy goes wherever its original still is: in its place, in another one of the same buffer, or in
    a buffer that has replaced the request's since.
    """

    def __init__(self, runner: Any, helper: BufferHelper) -> None:
        self._runner = runner
        self._helper = helper
        self._resident = getattr(runner.model, "gpu_resident_buffer_keys", ())
        self._new: list[_Stored] = []
        """Handed in since the last look at who can reach what."""
        self._waiting: list[_Stored] = []
        """Out of every hook's reach, or copied: what settling puts into blocks."""
        self._leaving: list[tuple[torch.Tensor, list[_Stored]]] = []
        """Blocks that :meth:`finish` brings to the host, each with the places of its rows."""
        self._written: dict[str, dict[str, Any]] = {}
        """The live buffer of each request when a tensor was first written to it."""

    def store(self, request_ids: Sequence[str], updates: Sequence[Any]) -> None:
        """Merge each update dictionary into its own request's live buffer (R8).

        Nested dictionaries merge one level deep. A tensor under a ``(key, qualifier)`` pair of the model's
        ``gpu_resident_buffer_keys`` stays on its device as an owned copy; every other device tensor becomes an owned
        host copy. Updates that are empty or no dictionary, and requests without state, are passed over.
        """
        for request_id, update in zip(request_ids, updates, strict=True):
            if not isinstance(update, dict) or not update:
                continue
            state = self._runner.requests.get(request_id)
            if state is None:
                continue
            info = self._runner.model_intermediate_buffer.get(request_id)
            if info is None:
                info = live_info(self._runner, request_id)
            known = len(self._new)
            for key, value in update.items():
                if isinstance(value, dict):
                    nested = info.setdefault(key, {})
                    for qualifier, inner in value.items():
                        if isinstance(inner, torch.Tensor):
                            self._place_tensor(nested, qualifier, inner, (key, qualifier) in self._resident)
                        elif isinstance(inner, list):
                            self._place_list(nested, qualifier, inner)
                        else:
                            nested[qualifier] = inner
                elif isinstance(value, torch.Tensor):
                    self._place_tensor(info, key, value, False)
                elif isinstance(value, list):
                    self._place_list(info, key, value)
                else:
                    info[key] = value
            if len(self._new) > known:
                self._written.setdefault(request_id, info)
            state.additional_information_cpu = info

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
        resident = key in self._resident
        owned = self._helper.snapshot(codes) if self._packs(codes) else self._kept(codes.clone(), resident)
        # Each request gets its row as a slice; where there are fewer rows, the others get empty ones.
        count = owned.shape[0]
        self._put_column(infos[:count], key, owned.unsqueeze(1), resident)
        for info in infos[count:]:
            info.setdefault(key[0], {})[key[1]] = self._kept(codes[:0], resident)
        for name, column in marks.items():
            stays = resident or name in self._resident
            self._put_column(infos, name, column if self._packs(column) else self._kept(column, stays), stays)
        if not self._helper.is_host:
            for request_id, info in zip(request_ids, infos, strict=True):
                self._written.setdefault(request_id, info)

    def _put_column(
        self, infos: Sequence[dict[str, Any]], name: tuple[Any, Any], column: torch.Tensor, resident: bool
    ) -> None:
        """Put element i of an owned column into live buffer i."""
        group, qualifier = name
        leaving = []
        leaves = not (resident or self._helper.is_host) and column.device == self._helper.device
        for info, part in zip(infos, column.unbind(), strict=True):
            dest = info.get(group)
            if dest is None:
                dest = info[group] = {}
            dest[qualifier] = part
            if leaves:
                leaving.append(_Stored(dest, qualifier, part, False))
        if leaving:
            self._leaving.append((column, leaving))

    def own(self) -> None:
        """Copy what the hook that just returned can still reach, which the next one might write over (T9).

        Nothing but live buffers may hold tensors of earlier updates when this is called.
        """
        new, self._new = self._new, []
        for stored in new:
            # Held by what is stored, and by the live buffer.
            if reachable(stored.tensor, held=2):
                stored.replace(self._helper.snapshot(stored.tensor))
                if stored.resident or self._helper.is_host:
                    continue
            self._waiting.append(stored)

    def settle(self) -> None:
        """Put owned copies in the places of all tensors handed in, in one device operation for each kind of them."""
        if not (self._waiting or self._new):
            return
        waiting, self._waiting, self._new = [*self._waiting, *self._new], [], []
        # They live until the end, so that none of the copies can have the identity of one.
        originals = [stored.tensor for stored in waiting]
        stayed = True
        for kind in _kinds(waiting):
            block = self._helper.join([stored.tensor for stored in kind])
            stayed &= _move(kind, block)
            if not (kind[0].resident or self._helper.is_host):
                self._leaving.append((block, kind))
        self._follow(originals, waiting, stayed)

    def finish(self) -> None:
        """Settle, then bring what leaves the device to the host."""
        self.settle()
        leaving, self._leaving = self._leaving, []
        if leaving:
            moved = [stored for _, kind in leaving for stored in kind]
            originals = [stored.tensor for stored in moved]
            stayed = True
            for (_, kind), block in zip(leaving, self._helper.fetch([block for block, _ in leaving]), strict=True):
                stayed &= _move(kind, block)
            self._follow(originals, moved, stayed)
        self._written.clear()

    def _follow(self, originals: Sequence[torch.Tensor], moved: Sequence[_Stored], stayed: bool) -> None:
        """Put copies also where hooks have put originals since: into buffers that replaced those which they were
        written to, and, unless all of them ``stayed`` in their places, elsewhere in the same."""
        live = self._runner.model_intermediate_buffer
        searched = [
            known
            for request_id, info in self._written.items()
            if (known := live.get(request_id)) is not info or not stayed
        ]
        if searched:
            copies = {id(tensor): stored.tensor for tensor, stored in zip(originals, moved, strict=True)}
            for info in searched:
                if isinstance(info, dict):
                    _swap_all(info, copies)

    def _place_list(self, dest: dict[Any, Any], key: Any, value: list[Any]) -> None:
        items = dest[key] = list(value)
        for index, item in enumerate(value):
            if isinstance(item, torch.Tensor):
                self._place_tensor(items, index, item, False)

    def _place_tensor(self, dest: Any, key: Any, value: torch.Tensor, resident: bool) -> None:
        # Also what is stored there already: it may be a tensor that the hook put there and will fill again (T9).
        if self._packs(value):
            dest[key] = value
            self._new.append(_Stored(dest, key, value, resident))
        else:
            dest[key] = self._kept(value, resident)

    def _packs(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor can go into a block with others: dense memory of the helper's device."""
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
        return tensor.to("cpu", copy=self._helper.is_host).contiguous()


def _kinds(handed: Sequence[_Stored]) -> Iterator[list[_Stored]]:
    """Tensors of one shape and dtype that go the same way. A large one is alone, so that it ends with its request."""
    kinds: dict[Any, list[_Stored]] = {}
    for stored in handed:
        tensor = stored.tensor
        if tensor.numel() > _LARGE:
            yield [stored]
        else:
            kinds.setdefault((tensor.dtype, tensor.shape, stored.resident), []).append(stored)
    yield from kinds.values()


def _move(kind: Sequence[_Stored], block: torch.Tensor) -> bool:
    """Put the rows of a block in the places of what they are copies of; whether all of these were still there."""
    stayed = True
    for stored, part in zip(kind, block.unbind(), strict=True):
        stayed &= stored.replace(part)
    return stayed


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
