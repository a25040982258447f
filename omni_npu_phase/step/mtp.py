# SPDX-License-Identifier: Apache-2.0
"""The talker MTP step of a V1 runner: which calls are made, with which generators, and who gets what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from omni_npu_phase.buffers.base import BufferHelper
from omni_npu_phase.releases import Runtime
from omni_npu_phase.step import results
from omni_npu_phase.step.live import StateWrites, live_infos
from omni_npu_phase.step.results import Call

_SAMPLING = ("do_sample", "temperature", "top_k", "top_p")
_DEFAULT_OUTPUT_KEY = ("codes", "audio")


def device_side(buffer: Any) -> torch.Tensor:
    """The device tensor of a buffer: of vLLM's host/device pair, or the tensor itself."""
    tensor: torch.Tensor = getattr(buffer, "gpu", buffer)
    return tensor


def mtp_inputs(runner: Any) -> list[torch.Tensor]:
    """The MTP's input buffers, whole: token ids (rows,), embeddings, hidden states and text step (rows, hidden)."""
    names = ("talker_mtp_input_ids", "talker_mtp_inputs_embeds", "last_talker_hidden", "text_step")
    return [device_side(getattr(runner, name)) for name in names]


class TalkerMtp:
    """The MTP batch of one runner: its input buffers by row position, its calls, and its results.

    The buffers are the runner's own, at fixed addresses, so that a captured graph can be replayed on them.
    """

    def __init__(self, runner: Any, runtime: Runtime, helper: BufferHelper, writes: StateWrites) -> None:
        self._runner = runner
        self._runtime = runtime
        self._helper = helper
        self._writes = writes

    def run(self, call: Call, offsets: Sequence[int]) -> None:
        """Run MTP for the first ``len(offsets)`` rows of the input buffers, one per request of ``call``.

        The resulting embeddings land in ``call.embeds`` at ``offsets`` (T4), the codes in the live buffers (T5).
        """
        requests = call.requests
        generators = self._generators(requests)
        if (
            len(offsets) > 1
            and any(generators)
            and not getattr(call.model, "talker_mtp_accepts_per_row_generators", False)
        ):
            self._run_row_by_row(call, offsets, generators)
        else:
            self._run_once(call, offsets, generators)

    def _run_once(self, call: Call, offsets: Sequence[int], generators: Sequence[torch.Generator | None]) -> None:
        runner, runtime, count = self._runner, self._runtime, len(offsets)
        keywords = self._keywords(call, generators)
        mode, descriptor, padded = runtime.mtp_graph(runner, count)
        # A replay ignores keywords, and with them the request's own generator (T8).
        if not runtime.is_graph(runner) or "generator" in keywords or "generators" in keywords:
            mode, padded = runtime.eager(), count
        with runtime.forward_context(runner.vllm_config, mode, descriptor):
            raw = runner.talker_mtp(*(buffer[:padded] for buffer in mtp_inputs(runner)), **keywords)
        new_embeds, codes = results.mtp_result(call, raw)
        self._helper.put(call.embeds, self._helper.rows(offsets), new_embeds)
        if codes is not None:
            self._store_codes(call, codes)

    def _run_row_by_row(self, call: Call, offsets: Sequence[int], generators: Sequence[torch.Generator | None]) -> None:
        # A generator is one stream: shared by a batch, it would make a seeded request depend on its neighbours (T8).
        # Every call uses the first row, where a graph captured for one row finds its inputs.
        buffers = mtp_inputs(self._runner)
        first_rows = [self._helper.snapshot(buffer[:1]) for buffer in buffers]
        try:
            for row, offset in enumerate(offsets):
                for buffer in buffers if row else ():
                    buffer[:1].copy_(buffer[row : row + 1])
                alone = replace(call, rows=call.rows[row : row + 1])
                self._run_once(alone, [offset], generators[row : row + 1])
        finally:
            for buffer, first_row in zip(buffers, first_rows, strict=True):
                buffer[:1].copy_(first_row)

    def _store_codes(self, call: Call, codes: Any) -> None:
        key, requests = output_key(call.model), call.requests
        marks = {}
        validity = getattr(call.model, "talker_mtp_validity_key", None)
        if validity is not None:
            device = codes.device if isinstance(codes, torch.Tensor) else call.embeds.device
            marks[validity] = torch.ones(len(requests), dtype=torch.bool, device=device)
        if isinstance(codes, torch.Tensor):
            self._writes.store_codes(requests, key, codes, marks)
            return
        columns: dict[Any, Any] = {key: [copy(codes[row : row + 1]) for row in range(len(requests))], **marks}
        for row, request_id in enumerate(requests):
            for name, column in columns.items():
                self._writes.store(request_id, {name[0]: {name[1]: column[row]}})
        # Another call may make its codes in the same memory.
        self._writes.own()

    def _keywords(self, call: Call, generators: Sequence[torch.Generator | None]) -> dict[str, Any]:
        sampling = getattr(self._runner.vllm_config.model_config, "subtalker_sampling_params", None)
        sampling = sampling if isinstance(sampling, dict) else {}
        keywords: dict[str, Any] = {name: sampling.get(name) for name in _SAMPLING}
        if any(generators):
            if len(generators) == 1:
                keywords["generator"] = generators[0]
            else:
                keywords["generators"] = list(generators)
        if getattr(call.model, "talker_mtp_accepts_req_infos", False):
            # A model that reads the live buffers here finds in them what its hooks just returned.
            self._writes.finish()
            keywords["req_ids"] = list(call.requests)
            keywords["req_infos"] = live_infos(self._runner, call.requests)
        return keywords

    def _generators(self, request_ids: Sequence[str]) -> list[torch.Generator | None]:
        """Each request's own generator, None without a seed. They live as long as their request."""
        runner = self._runner
        known: dict[str, torch.Generator] = runner.__dict__.setdefault("_talker_mtp_generators", {})
        for request_id in [request_id for request_id in known if request_id not in runner.requests]:
            del known[request_id]
        states = map(runner.requests.__getitem__, request_ids)
        extras = [getattr(getattr(state, "sampling_params", None), "extra_args", None) for state in states]
        if not any(extras):
            return [None] * len(extras)
        device = device_side(runner.talker_mtp_input_ids).device
        generators: list[torch.Generator | None] = []
        for request_id, extra in zip(request_ids, extras, strict=True):
            seed = extra.get(self._runtime.seed_key) if isinstance(extra, dict) else None
            generator = None if seed is None else known.get(request_id)
            if seed is not None and (generator is None or generator.device != device):
                generator = known[request_id] = torch.Generator(device=device)
                generator.manual_seed(int(seed))
            generators.append(generator)
        return generators


def output_key(model: object) -> tuple[Any, Any]:
    """Where a model wants its codes, as (key, qualifier)."""
    key = getattr(model, "talker_mtp_output_key", _DEFAULT_OUTPUT_KEY)
    if not isinstance(key, tuple) or len(key) != 2:
        raise TypeError(f"talker_mtp_output_key must be a pair (key, qualifier), got {key!r}")
    return key
