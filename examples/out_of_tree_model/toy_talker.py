# SPDX-License-Identifier: Apache-2.0
"""A talker outside vLLM-Omni: the least that speaks, with every hook, and the factory that the model kit takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from omni_npu_phase.conformance.models.subject import ModelUnderTest, Request
from omni_npu_phase.contract import IS_PREFILL, MTP_INPUTS, NUM_COMPUTED, PROMPT_LEN

HIDDEN, VOCABULARY, CODEBOOKS = 16, 64, 4
Row = tuple[torch.Tensor, torch.Tensor]


class ToyTalker:
    """Reads a prompt of text, then one frame of audio a step, with a little more of the text in each."""

    has_preprocess = has_postprocess = True
    mtp_hidden_size = HIDDEN

    def __init__(self) -> None:
        self.text, self.audio = torch.randn(2, VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(7))

    def preprocess(self, input_ids: torch.Tensor, input_embeds: torch.Tensor | None, **info: Any) -> Any:
        """One row: ids (S,). Returns ids, embeddings (S, hidden), updates."""
        if info[IS_PREFILL]:
            return input_ids, self._prompt(input_ids, info), {}
        if len(input_ids) > 1:
            # Frames that are read again after a preemption; none of them goes to MTP.
            return input_ids, self.audio[input_ids], {}
        return input_ids, self.audio[input_ids], {MTP_INPUTS: self._mtp_inputs(info)}

    def preprocess_decode_batch(self, *, input_ids: torch.Tensor, req_infos: Sequence[dict[str, Any]]) -> Any:
        """Decode rows of one token: ids (rows,). Five values, for there is an MTP."""
        hidden, text_step = zip(*(self._mtp_inputs(info) for info in req_infos), strict=True)
        return input_ids, self.audio[input_ids], torch.cat(hidden), torch.cat(text_step), [{} for _ in req_infos]

    def talker_mtp(
        self, ids: torch.Tensor, embeds: torch.Tensor, hidden: torch.Tensor, text_step: torch.Tensor, **_: Any
    ) -> Row:
        """The frame's other codes: embeddings (rows, hidden) and codes (rows, codebooks)."""
        codes = torch.stack([((hidden + embeds) @ self.audio.roll(k, 0).T).argmax(-1) for k in range(CODEBOOKS)])
        return embeds + text_step + self.audio[codes].sum(0), codes.T

    def postprocess(self, hidden_states: torch.Tensor, **_: Any) -> dict[str, Any]:
        """What the next step's MTP reads."""
        return {"talker": {"hidden": hidden_states[-1:]}}

    def _prompt(self, input_ids: torch.Tensor, info: dict[str, Any]) -> torch.Tensor:
        # The place in the prompt is the runner's progress: it is right after a cache hit and in a replay too.
        start = info[NUM_COMPUTED]
        chunk = self.text[info["phrase"][start : start + len(input_ids)]]
        # A span may cross the end of the prompt; behind it are frames.
        return torch.cat([chunk, self.audio[input_ids[len(chunk) :]]])

    def _mtp_inputs(self, info: dict[str, Any]) -> Row:
        # So is the place in the text: a counter of decode calls would run ahead when frames are read again.
        phrase = info["phrase"]
        step = min(info[NUM_COMPUTED] - info[PROMPT_LEN], len(phrase) - 1)
        return info["talker"]["hidden"].reshape(1, HIDDEN), self.text[[phrase[step]]]


def under_test() -> ModelUnderTest:
    """What ``--phase-model toy_talker:under_test`` judges."""
    phrases = {"short": [3, 1, 4], "long": [2, 7, 1, 8, 2, 8, 1, 8]}
    requests = {name: Request(phrase, [9, 5, 33, 12, 20], {"phrase": phrase}) for name, phrase in phrases.items()}
    return ModelUnderTest(ToyTalker(), requests, HIDDEN, torch.float32)
