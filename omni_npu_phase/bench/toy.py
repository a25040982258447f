# SPDX-License-Identifier: Apache-2.0
"""A model with every hook of a talker and nothing behind them: no state, no updates."""

from __future__ import annotations

from typing import Any

import torch

from omni_npu_phase.contract import IS_PREFILL, MTP_INPUTS


class Toy:
    """Hooks that return new tensors of ones, ``hidden`` wide."""

    has_preprocess = has_postprocess = True
    requires_raw_input_tokens = False
    talker_mtp_graph_safe = False
    talker_mtp_output_key = ("codes", "audio")
    gpu_resident_buffer_keys = frozenset({("codes", "audio"), ("hidden_states", "last")})
    preprocess_decode_batch: Any

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        self.mtp_hidden_size, self.dtype = hidden, dtype
        self.preprocess_decode_batch = self._batch

    def preprocess(self, input_ids: torch.Tensor, input_embeds: torch.Tensor, **info: Any) -> Any:
        updates = {} if info[IS_PREFILL] else {MTP_INPUTS: (self._ones(input_ids), self._ones(input_ids))}
        return input_ids, self._ones(input_ids), updates

    def _batch(self, input_ids: torch.Tensor, req_infos: list[dict[str, Any]]) -> Any:
        return input_ids, *(self._ones(input_ids) for _ in range(3)), [{} for _ in req_infos]

    def _ones(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.ones(ids.shape[0], self.mtp_hidden_size, dtype=self.dtype, device=ids.device)

    def postprocess(self, hidden_states: torch.Tensor, **_: Any) -> dict[str, Any]:
        return {"hidden_states": {"last": hidden_states[-1:]}}
