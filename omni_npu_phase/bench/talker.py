# SPDX-License-Identifier: Apache-2.0
"""A talker whose hooks and MTP hand out what was made beforehand, so that only the runner's work is left to measure."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal

import torch

from omni_npu_phase.conformance.scenarios import Hook
from omni_npu_phase.contract import IS_PREFILL, MTP_INPUTS
from omni_npu_phase.standins import torchaudio

Updates = Literal["toy", "talker"]
CODES = ("codes", "audio")
CODEBOOKS = 16
_VOCABULARY = 2048


class Talker:
    """A model with every hook of a talker and nothing behind them.

    ``updates``: ``toy``, none; or ``talker``, those that the installed Qwen3-TTS itself returns for such rows.
    ``resident``: whether codes stay on the device, as Qwen3-TTS's do. Embeddings have ``hidden`` columns; a step has
    ``runs`` of so many decode rows each, and a prompt chunk of up to ``chunk`` tokens.
    """

    has_preprocess = has_postprocess = True
    talker_mtp_graph_safe = False
    requires_raw_input_tokens = False
    talker_mtp_output_key = CODES

    def __init__(
        self,
        runs: Sequence[int],
        hidden: int,
        hook: Hook,
        updates: Updates,
        device: torch.device,
        *,
        chunk: int = 0,
        resident: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.mtp_hidden_size, self.dtype = hidden, dtype
        rows = sum(runs)
        self.gpu_resident_buffer_keys = {
            ("hidden_states", "last"),
            ("hidden_states", "trailing_text"),
            *([CODES] if resident else []),
        }
        self.hidden = torch.ones(rows, hidden, device=device, dtype=dtype)
        self.codes = torch.arange(rows * CODEBOOKS, device="cpu").reshape(rows, CODEBOOKS).to(device)
        self.rows_of = self.hidden.unsqueeze(1).unbind()
        self.updates: list[dict[str, Any]] = [{}] * rows
        self._chunk: tuple[Any, ...] = (None, torch.ones(chunk, hidden, device=device, dtype=dtype), {})
        if updates == "talker":
            source = Qwen3Tts(hidden, device, dtype)
            self.updates = (
                [update for run in runs for update in source.batched(run)]
                if hook == "batched"
                else [source.scalar() for _ in range(rows)]
            )
            if chunk:
                # Made on the host: the emulated device has no kernel for some of it.
                made = Qwen3Tts(hidden, torch.device("cpu"), dtype).chunk(chunk)
                self._chunk = tuple(_each_tensor(part, lambda tensor: tensor.to(device)) for part in made)
        self._scalar = hook == "scalar"
        if hook == "batched":
            self.preprocess_decode_batch = self._batch
        self.begin_step()

    def begin_step(self) -> None:
        """Make what the hooks of the next step return: tensors that nobody else holds, as hooks make them."""
        self._updates = _anew(self.updates)
        self._of_chunk: dict[str, Any] = _fresh(self._chunk[-1])
        self._of_rows: list[tuple[Any, ...]] = []
        if self._scalar:
            for own, update in zip(self.rows_of, self._updates, strict=True):
                self._of_rows.append((own.clone(), {MTP_INPUTS: (own.clone(), own.clone()), **update}))
            self._updates.clear()
        # Rows are taken from the end.
        self._of_rows.reverse()

    @property
    def frame_marks(self) -> list[torch.Tensor]:
        """The device scalar in each row's update that says whether its frame is valid; before 0.30 there is none."""
        marks = [update.get("meta", {}).get("codec_frame_valid") for update in self.updates]
        return [mark for mark in marks if mark is not None]

    def preprocess(self, input_ids: torch.Tensor, input_embeds: torch.Tensor, **info: Any) -> Any:
        if info[IS_PREFILL]:
            ids, embeds, _ = self._chunk
            # Kept by nobody else, as what a hook has just made.
            update, self._of_chunk = self._of_chunk, {}
            return input_ids if ids is None else ids[: input_ids.shape[0]], embeds[: input_ids.shape[0]], update
        return input_ids, *self._of_rows.pop()

    def _batch(self, input_ids: torch.Tensor, req_infos: list[dict[str, Any]]) -> Any:
        count = len(req_infos)
        updates, self._updates = self._updates[:count], self._updates[count:]
        return input_ids, self.hidden[:count], self.hidden[:count], self.hidden[:count], updates

    def talker_mtp(self, ids: torch.Tensor, embeds: Any, hidden: Any, text: Any, **_: Any) -> Any:
        count = ids.shape[0]
        return self.hidden[:count], self.codes[:count]

    def postprocess(self, hidden_states: torch.Tensor, **_: Any) -> dict[str, Any]:
        return {"hidden_states": {"last": hidden_states[-1:]}}


def _anew(updates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same for the updates of many rows, of which those that share memory still do: a hook cuts them from one."""
    return copy.deepcopy(updates)


def _fresh(value: Any) -> Any:
    """A copy in tensors of its own, which a hook makes anew in every call."""
    return _each_tensor(value, torch.clone)


def _each_tensor(value: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _each_tensor(inner, make) for key, inner in value.items()}
    return make(value) if isinstance(value, torch.Tensor) else value


class Qwen3Tts:
    """What the hooks of the installed Qwen3-TTS return for rows in the middle of their text."""

    def __init__(self, hidden: int, device: torch.device, dtype: torch.dtype) -> None:
        cls: Any = _talker_class()
        self._talker = talker = object.__new__(cls)
        torch.nn.Module.__init__(talker)
        talker._embedding_dtype, talker._codebook_vocab_size = dtype, _VOCABULARY
        talker._tts_pad_embed = torch.zeros(1, hidden, device=device, dtype=dtype)
        talker.embed_input_ids = lambda ids: torch.zeros(ids.shape[0], 1, hidden, device=device, dtype=dtype)
        talker.talker_config = SimpleNamespace(codec_pad_id=0, num_code_groups=CODEBOOKS)
        self._hidden, self._device, self._dtype = hidden, device, dtype

    def batched(self, rows: int) -> list[dict[str, Any]]:
        """Updates of a batched call."""
        ids = torch.arange(rows).to(self._device)
        result = self._talker.preprocess_decode_batch(input_ids=ids, req_infos=[self._info() for _ in range(rows)])
        updates: list[dict[str, Any]] = result[-1]
        return updates

    def scalar(self) -> dict[str, Any]:
        """Updates of a scalar call for one decode row, without its MTP inputs."""
        ids = torch.zeros(1, dtype=torch.int64).to(self._device)
        updates: Mapping[str, Any] = self._talker.preprocess(ids, None, **{IS_PREFILL: False, **self._info()})[-1]
        return {key: value for key, value in updates.items() if key != MTP_INPUTS}

    def chunk(self, tokens: int) -> tuple[Any, ...]:
        """The whole result of a scalar call for a later chunk of a prompt."""
        prompt = torch.ones(tokens, self._hidden, dtype=self._dtype)
        info = {**self._info(), "embed": {"prefill": prompt}, IS_PREFILL: True}
        ids = torch.zeros(tokens, dtype=torch.int32).to(self._device)
        result: tuple[Any, ...] = self._talker.preprocess(ids, None, **info)
        return result

    def _info(self) -> dict[str, Any]:
        ones = torch.ones(8, self._hidden, device=self._device, dtype=self._dtype)
        return {
            "text": ["text"],
            "hidden_states": {"last": ones[0], "trailing_text": ones},
            "meta": {"talker_text_offset": 1},
        }


@cache
def _talker_class() -> type:
    # Its module imports torchaudio, for mel filters that no decode step computes.
    torchaudio.install()
    module = importlib.import_module("vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_talker")
    talker: type = module.Qwen3TTSTalkerForConditionalGeneration
    return talker
