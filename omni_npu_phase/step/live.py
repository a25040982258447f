# SPDX-License-Identifier: Apache-2.0
"""Live buffers: the dictionary a runner keeps for each request, and what hooks, ``postprocess`` and MTP store in it.

vLLM-Omni merges an update one level deep: ``{"meta": {"x": 1}}`` sets ``x`` and leaves the rest of the group ``meta``.
Two rules decide what becomes of a tensor in an update.

* It is copied in the call that stores it (T9). A hook may fill one tensor again for each row, return a slice of state
  that it keeps, or hand over memory that a graph writes to. Who else can reach the tensor does not matter. A container
  is built anew only where it holds a tensor, so a hook's own nested state stays its own (M9).
* A device tensor goes to the host, unless the model names its key in ``gpu_resident_buffer_keys``. What a step stores
  goes there in one transfer, at the end of the step's writes. Until then its copy on the device stands in its place.
  If a hook puts something else there meanwhile, that stays. A hook may also move the copy within its buffer, or
  replace the buffer; then the copy stays on the device, where the hook put it. Nothing writes to it any more.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from omni_npu_phase.buffers.base import BufferHelper
from omni_npu_phase.contract import FIELDS, MTP_INPUTS, ContractError

NEVER_STORED = frozenset((*FIELDS, MTP_INPUTS))
"""Keys of an update that are the runner's own, or handed to MTP alone (M9, E6)."""
_PLAIN = frozenset((bool, int, float, str, type(None)))
"""Kinds of values in which there is no tensor: asked first, since most values are of them."""
_LARGE = 1 << 12
"""Elements from which on a tensor is copied alone, since a part of a stack keeps the whole stack alive."""

Key: TypeAlias = "tuple[Any, Any]"
"""A group of the live buffer, and a name in it."""


@dataclass(slots=True)
class _Leaving:
    """A block on the device, whose parts stand under ``name`` in containers until it is on the host."""

    block: torch.Tensor
    parts: Sequence[torch.Tensor]
    containers: Sequence[Any]
    name: Any

    def arrive(self, host: torch.Tensor) -> None:
        hosts = (host,) if self.parts[0] is self.block else host.unbind()
        for container, part, arrived in zip(self.containers, self.parts, hosts, strict=True):
            try:
                stays = container[self.name] is part
            except LookupError:
                continue
            if stays:
                container[self.name] = arrived


class _Writes(threading.local):
    """The block of writes under way in one thread. An output thread may run postprocess beside a step."""

    def __init__(self) -> None:
        self.depth = 0
        self.leaving: list[_Leaving] = []


class LiveBuffers:
    """The live buffers of one runner, whose own dictionaries are looked up anew in every call.

    ``with live:`` makes a block of writes. When the outermost block of a thread ends, also in an error, what leaves the
    device is on the host.
    """

    def __init__(self, runner: Any, helper: BufferHelper) -> None:
        self._runner = runner
        self._helper = helper
        self._writes = _Writes()

    def __enter__(self) -> None:
        self._writes.depth += 1

    def __exit__(self, *error: object) -> None:
        self._writes.depth -= 1
        if not self._writes.depth:
            self.transfer()

    def of(self, request_ids: Sequence[str]) -> list[Any]:
        """The live buffers of requests, each made where it is missing (M9).

        Raises :class:`~omni_npu_phase.contract.ContractError` (E9) for one that is no dictionary.
        """
        live = self._runner.model_intermediate_buffer
        infos = list(map(live.get, request_ids))
        for row, info in enumerate(infos):
            if info is None:
                infos[row] = live[request_ids[row]] = {}
                # Models written for older releases read it there.
                self._runner.requests[request_ids[row]].additional_information_cpu = infos[row]
            elif type(info) is not dict and not isinstance(info, MutableMapping):
                raise no_dictionary(request_ids[row], "its live buffer", info)
        return infos

    def store(self, request_ids: Sequence[str], updates: Sequence[Mapping[Any, Any]]) -> None:
        """Merge each request's update into its live buffer (R8). Every request has a state.

        Tensors that several updates have under one key are copied together if they are small and of one shape and
        dtype. Runner-owned fields and MTP inputs are dropped (M9, E6). Raises
        :class:`~omni_npu_phase.contract.ContractError` (E9) for a group that is no dictionary; nothing is written then.
        """
        infos, resident = self.of(request_ids), self._resident
        columns: dict[Key, list[tuple[Any, Any]]] | None = None
        if len(infos) > 1:
            groups = [
                id(self._group(request_id, info, key))
                for request_id, info, update in zip(request_ids, infos, updates, strict=True)
                for key, value in update.items()
                if isinstance(value, dict) and value and key not in NEVER_STORED
            ]
            # Of requests that share a group the last one's value stays, of whatever kind.
            columns = {} if len(set(groups)) == len(groups) else None
        for request_id, info, update in zip(request_ids, infos, updates, strict=True):
            self._runner.requests[request_id].additional_information_cpu = info
            for key, value in update.items():
                if key in NEVER_STORED:
                    continue
                if not isinstance(value, dict):
                    self._place(info, key, value, False)
                    continue
                group = info.get(key)
                if type(group) is not dict:
                    # Where there is nothing to merge, anything may stand in the group's place.
                    group = self._group(request_id, info, key) if value else info.setdefault(key, {})
                for name, inner in value.items():
                    if type(inner) in _PLAIN:
                        group[name] = inner
                    elif columns is None:
                        self._place(group, name, inner, (key, name) in resident)
                    else:
                        columns.setdefault((key, name), []).append((group, inner))
        for (key, name), column in columns.items() if columns else ():
            containers, values = zip(*column, strict=True)
            block = self._stacked(values)
            if block is not None:
                self._put(block, containers, name, (key, name) in resident)
            else:
                for container, value in column:
                    self._place(container, name, value, (key, name) in resident)

    def store_codes(self, request_ids: Sequence[str], key: Key, codes: Any, marks: Mapping[Key, torch.Tensor]) -> None:
        """Store row i of ``codes``, shape (rows, ...), with request i, beside element i of each of ``marks`` (T5).

        A request beyond the last row of codes gets none. ``marks`` are handed over, not copied; they stay on the device
        where the codes do.
        """
        infos, resident = self.of(request_ids), key in self._resident
        groups, *marked = (
            [self._group(request_id, info, group) for request_id, info in zip(request_ids, infos, strict=True)]
            for group, _ in (key, *marks)
        )
        for request_id, info in zip(request_ids, infos, strict=True):
            self._runner.requests[request_id].additional_information_cpu = info
        if isinstance(codes, torch.Tensor) and len(codes) == len(groups):
            # Each request's is a row, not its element.
            self._put(self._helper.snapshot(codes).unsqueeze(1), groups, key[1], resident)
        else:
            for row, group in enumerate(groups):
                self._place(group, key[1], codes[row : row + 1], resident)
        for (mark_key, mark), mark_groups in zip(marks.items(), marked, strict=True):
            self._put(mark, mark_groups, mark_key[1], resident or mark_key in self._resident)

    def transfer(self) -> None:
        """Bring what leaves the device to the host now, in one transfer and one wait."""
        leaving = self._writes.leaving
        if leaving:
            self._writes.leaving = []
            for each, host in zip(leaving, self._helper.fetch([each.block for each in leaving]), strict=True):
                each.arrive(host)

    def _group(self, request_id: str, info: Any, key: Any) -> Any:
        """A group of a live buffer, made where it is missing."""
        group = info.setdefault(key, {})
        if type(group) is not dict and not isinstance(group, MutableMapping):
            raise no_dictionary(request_id, f"{key!r} in its live buffer", group)
        return group

    @property
    def _resident(self) -> Any:
        # Nothing leaves the host.
        model = None if self._helper.is_host else getattr(self._runner, "model", None)
        return getattr(model, "gpu_resident_buffer_keys", ())

    def _stacked(self, values: Sequence[Any]) -> torch.Tensor | None:
        """Small tensors of one shape and dtype as rows of a new block; None for any others."""
        first = values[0]
        try:
            # Of different dtypes a stack would be made nonetheless.
            alike = first.layout is torch.strided and {value.dtype for value in values} == {first.dtype}
            return self._helper.stack(values) if alike and first.numel() <= _LARGE else None
        except (AttributeError, RuntimeError, TypeError):
            return None

    def _place(self, container: Any, name: Any, value: Any, resident: bool) -> None:
        """Put a value under ``name`` of a container, owned."""
        if isinstance(value, torch.Tensor):
            container[name] = owned = self._helper.snapshot(value)
            if not self._helper.is_host:
                self._leave(owned, (owned,), (container,), name, resident)
        elif isinstance(value, list):
            container[name] = items = list(value)
            for index, item in enumerate(items):
                if isinstance(item, torch.Tensor):
                    self._place(items, index, item, False)
                else:
                    items[index] = owned_copy(item, self._helper)
        else:
            container[name] = owned_copy(value, self._helper)

    def _put(self, block: torch.Tensor, containers: Sequence[Any], name: Any, resident: bool) -> None:
        """Put each element of an owned block under ``name`` of its container."""
        parts = block.unbind()
        for container, part in zip(containers, parts, strict=True):
            container[name] = part
        self._leave(block, parts, containers, name, resident)

    def _leave(self, block: torch.Tensor, parts: Any, containers: Sequence[Any], name: Any, resident: bool) -> None:
        """Have a block leave the device, if it is on one and not resident."""
        if not (self._helper.is_host or resident or block.is_cpu):
            self._writes.leaving.append(_Leaving(block, parts, containers, name))


def owned_copy(value: Any, helper: BufferHelper, within: tuple[int, ...] = ()) -> Any:
    """A value whose tensors, at any depth, are copies on the same device; the value itself if there is none in it.

    The released runner leaves these on their device too. A container keeps its kind. ``within``: the containers around
    it, for one may hold itself.
    """
    if isinstance(value, torch.Tensor):
        return helper.snapshot(value)
    if not isinstance(value, (dict, list, tuple)) or id(value) in within:
        return value
    keys = list(value) if isinstance(value, dict) else range(len(value))
    copies = {key: owned_copy(value[key], helper, (*within, id(value))) for key in keys}
    if all(own is value[key] for key, own in copies.items()):
        return value
    if isinstance(value, tuple):
        make = getattr(type(value), "_make", type(value))
        return make(list(copies.values()))
    copied = copy(value)
    for key, own in copies.items():
        copied[key] = own
    return copied


def no_dictionary(request_id: str, what: str, value: Any) -> ContractError:
    actual = type(value).__name__
    return ContractError("E9", requests=[request_id], rows=[], expected=f"{what} as a dictionary", actual=actual)
