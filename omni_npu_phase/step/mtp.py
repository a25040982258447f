# SPDX-License-Identifier: Apache-2.0
"""The talker MTP step of a V1 runner: its input buffers, which calls are made, and who gets what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any, TypeAlias

import torch

from omni_npu_phase import contract
from omni_npu_phase.buffers.base import BufferHelper, shares_storage
from omni_npu_phase.releases import Runtime
from omni_npu_phase.step import results
from omni_npu_phase.step.live import LiveBuffers
from omni_npu_phase.step.port import device_side
from omni_npu_phase.step.replay import Replay
from omni_npu_phase.step.results import Call

_INPUTS = ("talker_mtp_input_ids", "talker_mtp_inputs_embeds", "last_talker_hidden", "text_step")
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p")
_DEFAULT_OUTPUT_KEY = ("codes", "audio")
_Generators: TypeAlias = "Sequence[torch.Generator | None]"


def mtp_inputs(runner: Any) -> list[torch.Tensor]:
    """The MTP's input buffers, whole: token ids (rows,), embeddings, hidden states and text step (rows, hidden)."""
    return [device_side(getattr(runner, name)) for name in _INPUTS]


class TalkerMtp:
    """The MTP batch of one runner.

    Its input buffers are the runner's own, at fixed addresses, so that a captured graph can be replayed on them.
    """

    def __init__(
        self, runner: Any, runtime: Runtime, live: LiveBuffers, helper: BufferHelper, replay: Replay | None = None
    ) -> None:
        self._runner = runner
        self._replay = replay
        self._runtime = runtime
        self._live = live
        self._helper = helper
        self._inputs: list[torch.Tensor] = []
        self._rows: list[list[torch.Tensor]] = []

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The input buffers as they are now."""
        inputs = mtp_inputs(self._runner)
        if not (self._inputs and all(map(is_, inputs, self._inputs))):
            self._inputs, self._rows = inputs, []
        return self._inputs

    def fill(self, position: int, count: int, parts: list[torch.Tensor]) -> None:
        """Copy token ids, shape (count,), and embeddings, hidden states and text step, shape (count, hidden) each, to
        rows from ``position`` on. They may be rows of the input buffers themselves."""
        if count == 1:
            # A slice costs as much as its copy: those of single rows are kept.
            while len(self._rows) <= position:
                row = len(self._rows)
                self._rows.append([buffer[row : row + 1] for buffer in self._inputs])
            self._helper.copy_all(self._rows[position], parts)
        else:
            # Rows of a buffer may be written over while they are read further on.
            apart = [part.clone() if any(map(partial(shares_storage, part), self._inputs)) else part for part in parts]
            self._helper.copy_all([buffer[position : position + count] for buffer in self._inputs], apart)

    def run(self, call: Call, offsets: Sequence[int]) -> None:
        """Run MTP for the first ``len(offsets)`` rows of the input buffers, one per request of ``call``.

        The resulting embeddings land in ``call.embeds`` at ``offsets`` (T4), the codes in the live buffers (T5).
        """
        generators = self._generators(call.requests)
        per_row = getattr(call.model, "talker_mtp_accepts_per_row_generators", False)
        if len(offsets) == 1 or per_row or not any(generators):
            self._run_once(call, offsets, generators, 0)
            return
        # A generator is one stream: shared by a batch, it would make a seeded request depend on its neighbours (T8).
        for row, offset in enumerate(offsets):
            alone = replace(call, requests=call.requests[row : row + 1])
            self._run_once(alone, [offset], generators[row : row + 1], row)

    def _run_once(self, call: Call, offsets: Sequence[int], generators: _Generators, first: int) -> None:
        """Run MTP for rows of the input buffers from ``first`` on."""
        runner, runtime, count = self._runner, self._runtime, len(offsets)
        # A wrong key is refused before anything of MTP's is written.
        keywords, key = self._keywords(call, generators), output_key(call.model)
        mode, descriptor, padded = runtime.mtp_graph(runner, count)
        # A replay ignores keywords, and with them the request's own generator (T8). It reads from the first row on.
        if first or any(generators) or not runtime.is_graph(runner):
            mode, padded = runtime.eager(), count
        # A replayed row repeats a draw that was made before, and leaves its generator where it was (E3).
        seeded = zip(call.requests, generators, strict=True) if any(generators) else ()
        replayed = [(one, one.get_state()) for request_id, one in seeded if one and self._is_replay(request_id)]
        try:
            with runtime.forward_context(runner.vllm_config, mode, descriptor):
                raw = runner.talker_mtp(*(buffer[first : first + padded] for buffer in self.inputs), **keywords)
        finally:
            for generator, state in replayed:
                generator.set_state(state)
        new_embeds, codes = results.mtp_result(call, raw, exact=list(offsets) != list(range(count)))
        self._helper.put(call.embeds, self._helper.rows(offsets), new_embeds)
        if codes is not None:
            mark = getattr(call.model, "talker_mtp_validity_key", None)
            device = codes.device if isinstance(codes, torch.Tensor) else call.embeds.device
            marks = {mark: torch.ones(count, dtype=torch.bool, device=device)} if mark is not None else {}
            self._live.store_codes(call.requests, key, codes, marks)

    def _keywords(self, call: Call, generators: _Generators) -> dict[str, Any]:
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
            self._live.transfer()
            keywords["req_ids"] = list(call.requests)
            keywords["req_infos"] = self._live.of(call.requests)
        return keywords

    def _generators(self, request_ids: Sequence[str]) -> _Generators:
        """Each request's own generator, None without a seed. They live as long as their request."""
        runner = self._runner
        known: dict[str, torch.Generator] = runner.__dict__.setdefault("_talker_mtp_generators", {})
        for request_id in [request_id for request_id in known if request_id not in runner.requests]:
            del known[request_id]
        states = map(runner.requests.__getitem__, request_ids)
        extras = [getattr(getattr(state, "sampling_params", None), "extra_args", None) for state in states]
        if not any(extras):
            return [None] * len(extras)
        device = self.inputs[0].device
        generators: list[torch.Generator | None] = []
        for request_id, extra in zip(request_ids, extras, strict=True):
            seed = extra.get(self._runtime.seed_key) if isinstance(extra, dict) else None
            generator = None if seed is None else known.get(request_id)
            if seed is not None and (generator is None or generator.device != device):
                generator = known[request_id] = torch.Generator(device=device)
                generator.manual_seed(int(seed))
            generators.append(generator)
        return generators

    def _is_replay(self, request_id: str) -> bool:
        batch, state = self._runner.input_batch, self._runner.requests[request_id]
        try:
            if self._replay is not None and request_id in self._replay.given:
                # It is the new part of its row that went to MTP (X2).
                return False
            computed = batch.num_computed_tokens_cpu[batch.req_id_to_index[request_id]]
            return bool(contract.Row(0, computed, 1).replays(state.num_tokens))
        except (AttributeError, KeyError, IndexError):
            # The released method needs none of these, and runners are driven without them.
            return False


def output_key(model: object) -> tuple[Any, Any]:
    """Where a model wants its codes, as (key, qualifier)."""
    key = getattr(model, "talker_mtp_output_key", _DEFAULT_OUTPUT_KEY)
    if not isinstance(key, tuple) or len(key) != 2:
        raise TypeError(f"talker_mtp_output_key must be a pair (key, qualifier), got {key!r}")
    return key
