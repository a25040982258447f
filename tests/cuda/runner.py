# SPDX-License-Identifier: Apache-2.0
"""A runner and a model of the fewest parts that the mixin needs, so that a step runs where there is no vLLM."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch

from omni_npu_phase import PhaseRoutingMixin
from omni_npu_phase.releases import Runtime

HIDDEN, CODES = 16, 8
PROMPT, MTP = 1.0, 100.0
"""What a hook adds to the embedding of a prompt row, and MTP to that of a decode row."""
Hook = Literal["batched", "scalar"]


class _Ungraphed(Runtime):
    """What a runner without vLLM has: MTP that no graph captured, and no context around it."""

    def mtp_graph(self, runner: Any, rows: int) -> tuple[Any, Any, int]:
        return None, None, rows

    def is_graph(self, runner: Any) -> bool:
        return False

    def eager(self) -> Any:
        return None

    def forward_context(self, vllm_config: Any, mode: Any, descriptor: Any) -> AbstractContextManager[None]:
        return nullcontext()


RUNTIME = _Ungraphed(release="0.30", vllm="", vllm_ascend=None)


@dataclass(frozen=True, slots=True)
class Row:
    request: str
    prompt: int
    computed: int
    span: int

    @property
    def decodes(self) -> bool:
        return self.computed >= self.prompt and self.span == 1


class Talker:
    """Hooks that name their rows, and an MTP that writes into the same memory in every step, as a replay does."""

    has_preprocess = True
    has_postprocess = False
    talker_mtp_output_key = ("codes", "audio")
    gpu_resident_buffer_keys = frozenset({("hidden_states", "last")})

    def __init__(self, hook: Hook, rows: int, device: torch.device) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.calls = 0
        self._ones = torch.ones(rows, HIDDEN, device=device)
        self._embeds = torch.zeros(rows, HIDDEN, device=device)
        self._codes = torch.zeros(rows, CODES, dtype=torch.int64, device=device)
        if hook == "batched":
            self.preprocess_decode_batch = self._batch

    def preprocess(self, input_ids: torch.Tensor, input_embeds: torch.Tensor, **info: Any) -> Any:
        self.told.append(("scalar", info))
        embeds = input_ids.unsqueeze(1).to(input_embeds.dtype) + self._ones[:1] * PROMPT
        one = self._ones[:1]
        return input_ids, embeds, {"mtp_inputs": (one, one), "hidden_states": {"last": embeds[-1]}}

    def _batch(self, input_ids: torch.Tensor, req_infos: list[dict[str, Any]]) -> Any:
        self.told += [("batched", dict(info)) for info in req_infos]
        own = self._ones[: len(req_infos)]
        embeds = input_ids.unsqueeze(1).to(own.dtype) + own * PROMPT
        return input_ids, embeds, own, own, [{"hidden_states": {"last": row}} for row in embeds]

    def talker_mtp(self, ids: Any, embeds: Any, hidden: Any, text: Any, **_: Any) -> tuple[Any, Any]:
        self.calls += 1
        count = ids.shape[0]
        torch.add(embeds, MTP, out=self._embeds[:count])
        torch.add(ids.unsqueeze(1), torch.zeros_like(self._codes[:count]), out=self._codes[:count])
        return self._embeds[:count], self._codes[:count]


class Released:
    """What the mixin leaves to a released runner: to select the step's inputs."""

    has_talker_mtp = True

    def __init__(self, model: Talker, rows: int, tokens: int, device: torch.device) -> None:
        self.model, self.device = model, device
        self.talker_mtp = model.talker_mtp
        self.requests: dict[str, Any] = {}
        self.model_intermediate_buffer: dict[str, dict[str, Any]] = {}
        self.input_batch = SimpleNamespace(
            req_ids=[], req_id_to_index={}, num_computed_tokens_cpu=np.zeros(rows, dtype=np.int32)
        )
        starts = torch.zeros(rows + 1, dtype=torch.int32)
        self.query_start_loc = SimpleNamespace(cpu=starts, np=starts.numpy())
        self.input_ids = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.inputs_embeds = torch.zeros(tokens, HIDDEN, device=device)
        self.talker_mtp_input_ids = torch.zeros(rows, dtype=torch.int32, device=device)
        self.talker_mtp_inputs_embeds, self.last_talker_hidden, self.text_step = (
            torch.zeros(rows, HIDDEN, device=device) for _ in range(3)
        )
        scheduler = SimpleNamespace(max_num_seqs=rows, max_num_batched_tokens=tokens)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(subtalker_sampling_params={}), scheduler_config=scheduler
        )
        self.max_num_reqs, self.max_num_tokens = rows, tokens

    def _preprocess(self, scheduler_output: Any, num_input_tokens: int, intermediate_tensors: Any = None) -> Any:
        return self.input_ids[:num_input_tokens], self.inputs_embeds[:num_input_tokens], None, None, {}, None

    def _maybe_attach_mimo_audio_req_infos(self, state: Any, infos: dict[str, Any], req_id: str) -> dict[str, Any]:
        return infos


class Runner(PhaseRoutingMixin, Released):
    """The mixin on it; :data:`RUNTIME` is its runtime."""

    def place(self, rows: Sequence[Row]) -> tuple[Any, int]:
        """Lay out a step, token ids counted from 1; returns what :meth:`_preprocess` takes."""
        starts = [0, *itertools.accumulate(row.span for row in rows)]
        for row in rows:
            self.requests.setdefault(row.request, SimpleNamespace(prompt_token_ids=[0] * row.prompt))
        self.input_batch.req_ids = [row.request for row in rows]
        self.input_batch.req_id_to_index = {row.request: index for index, row in enumerate(rows)}
        self.input_batch.num_computed_tokens_cpu[: len(rows)] = [row.computed for row in rows]
        self.query_start_loc.cpu[: len(starts)] = torch.tensor(starts, dtype=torch.int32)
        return SimpleNamespace(num_scheduled_tokens={row.request: row.span for row in rows}), starts[-1]
