# SPDX-License-Identifier: Apache-2.0
"""Writes into the per-request intermediate buffer: merged as vLLM-Omni merges them, and owned (R8, T9)."""

from __future__ import annotations

from collections.abc import Sequence
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


def store_updates(runner: Any, request_ids: Sequence[str], updates: Sequence[Any], helper: BufferHelper) -> None:
    """Merge each update dictionary into its own request's live buffer; all device tensors go to the host at once.

    Nested dictionaries merge one level deep. A tensor under a ``(key, qualifier)`` pair of the model's
    ``gpu_resident_buffer_keys`` stays on its device as an owned snapshot; every other tensor of the helper's device
    becomes an owned host copy. A tensor that already is the stored value, where it belongs, is left alone. Updates that
    are empty or no dictionary, and requests without state, are passed over.
    """
    resident = getattr(runner.model, "gpu_resident_buffer_keys", ())
    writes = _Writes(helper)
    for request_id, update in zip(request_ids, updates, strict=True):
        state = runner.requests.get(request_id)
        if state is None or not isinstance(update, dict) or not update:
            continue
        info = live_info(runner, request_id)
        for key, value in update.items():
            if isinstance(value, dict):
                nested = info.setdefault(key, {})
                for qualifier, inner in value.items():
                    writes.place(nested, qualifier, inner, resident=(key, qualifier) in resident)
            else:
                writes.place(info, key, value, resident=False)
        state.additional_information_cpu = info
    writes.finish()


class _Writes:
    """Collects the device tensors of one store so that they travel together."""

    def __init__(self, helper: BufferHelper) -> None:
        self._helper = helper
        self._slots: list[tuple[Any, Any]] = []
        self._tensors: list[torch.Tensor] = []

    def place(self, dest: dict[Any, Any], key: Any, value: Any, *, resident: bool) -> None:
        if isinstance(value, torch.Tensor):
            self._place_tensor(dest, key, value, dest.get(key), resident)
        elif isinstance(value, list):
            known = dest.get(key)
            kept = known if isinstance(known, list) else []
            dest[key] = items = list(value)
            for index, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    self._place_tensor(items, index, item, kept[index] if index < len(kept) else None, False)
        else:
            dest[key] = value

    def _place_tensor(self, dest: Any, key: Any, value: torch.Tensor, stored: Any, resident: bool) -> None:
        if value is stored and (resident or value.device.type == "cpu"):
            return
        if resident:
            dest[key] = self._helper.snapshot(value)
        elif value.device.type == "cpu" and self._helper.device.type != "cpu":
            dest[key] = value.detach().contiguous()
        else:
            self._slots.append((dest, key))
            self._tensors.append(value)

    def finish(self) -> None:
        for (dest, key), copy in zip(self._slots, self._helper.to_host(self._tensors), strict=True):
            dest[key] = copy
