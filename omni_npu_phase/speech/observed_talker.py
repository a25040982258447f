# SPDX-License-Identifier: Apache-2.0
"""The released Qwen3-TTS talker, with what passes its boundary written down."""

from __future__ import annotations

import json
import os
import pkgutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import vllm.envs
from vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_talker import Qwen3TTSTalkerForConditionalGeneration

from omni_npu_phase import contract
from omni_npu_phase.releases.places import V1, V2
from omni_npu_phase.settings import OBSERVE_VARIABLE, chosen_mode
from omni_npu_phase.speech.observe import Runner
from omni_npu_phase.step import route as routing


class ObservedTalker(Qwen3TTSTalkerForConditionalGeneration):  # type: ignore[misc]
    """Calls the released methods and returns what they return. A step ends with its forward pass.

    It sees what the runner passes it, on any device and under either model runner, as long as the forward pass is not
    a replayed graph: engines that are observed run eagerly.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._file = Path(os.environ[OBSERVE_VARIABLE], f"talker-{os.getpid()}.jsonl")
        self._began = time.perf_counter()
        self._step = 0
        self._rows: list[dict[str, Any]] = []
        self._embeds: list[torch.Tensor | None] = []
        self._mtp_embeds: torch.Tensor | None = None
        self._frames: list[list[int]] = []

    def preprocess(self, input_ids: torch.Tensor, input_embeds: torch.Tensor | None, **info: Any) -> Any:
        result = super().preprocess(input_ids, input_embeds, **info)
        span = int(input_ids.shape[0])
        # The model stores where its next slice of the prompt begins.
        end = result[2].get("meta", {}).get("talker_prefill_offset")
        self._note(routing.SCALAR_HOOK, info, span, result[1], None if end is None else end - span)
        return result

    def preprocess_decode_batch(self, *, input_ids: torch.Tensor, req_infos: list[dict[str, Any]], **more: Any) -> Any:
        result = super().preprocess_decode_batch(input_ids=input_ids, req_infos=req_infos, **more)
        for info in req_infos:
            self._note(routing.BATCHED_HOOK, info, 1)
        return result

    def talker_mtp(self, input_ids: torch.Tensor, input_embeds: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given = input_embeds.detach().clone()
        embeds, codes = super().talker_mtp(input_ids, input_embeds, *args, **kwargs)
        self._mtp_embeds, self._frames = given, codes.tolist()
        return embeds, codes

    # Model Runner V2's name for it.
    mtp = talker_mtp

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **more: Any,
    ) -> Any:
        if self._rows:
            self._write_step(inputs_embeds)
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **more)

    def _note(
        self,
        hook: str,
        info: dict[str, Any],
        span: int,
        embeds: torch.Tensor | None = None,
        sliced_from: int | None = None,
    ) -> None:
        if not self._rows:
            # What warm-up calls left.
            self._mtp_embeds, self._frames = None, []
        # Two frames up is who called the hook.
        caller = sys._getframe(2).f_globals["__name__"].partition(".")[0]
        self._rows.append(
            {
                "request": info.get("request_id", info.get("req_id")),
                "hook": hook,
                "called_by": caller,
                "span": span,
                "told": {name: info.get(name) for name in contract.FIELDS},
                "sliced_from": sliced_from,
            }
        )
        self._embeds.append(None if embeds is None else embeds.detach().clone())

    def _write_step(self, inputs_embeds: torch.Tensor | None) -> None:
        frames = iter(self._frames)
        offset = 0
        for row, embeds in zip(self._rows, self._embeds, strict=True):
            end = offset + row["span"]
            # MTP replaces the embedding of a row that it serves; there is nothing to compare then.
            row["unchanged"] = (
                embeds is not None
                and inputs_embeds is not None
                and torch.equal(inputs_embeds[offset:end], embeds.to(inputs_embeds))
            )
            decode = row["span"] == 1 and row["told"][contract.IS_PREFILL] is False
            row["codes"] = next(frames, None) if decode else None
            row["seen_by_mtp"] = row["codes"] is not None or self._given_to_mtp(embeds)
            offset = end
        if self._step == 0:
            text = json.dumps(asdict(_runner_behind(sys._getframe())))
            self._file.with_name(f"runner-{os.getpid()}.json").write_text(text, encoding="utf-8")
        line = {"step": self._step, "seconds": time.perf_counter() - self._began, "rows": self._rows}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._step += 1
        self._rows, self._embeds = [], []

    def _given_to_mtp(self, embeds: torch.Tensor | None) -> bool:
        if embeds is None or self._mtp_embeds is None:
            return False
        width = embeds.shape[-1]
        given = self._mtp_embeds.reshape(-1, 1, width)
        return bool((given == embeds.reshape(1, -1, width).to(given)).all(-1).any())


def _runner_behind(frame: FrameType | None) -> Runner:
    """The runner of the worker that is running a step at ``frame``. Raises RuntimeError where there is none."""
    while frame is not None:
        runner = getattr(frame.f_locals.get("self"), "model_runner", None)
        if runner is not None:
            return _described(runner)
        frame = frame.f_back
    raise RuntimeError("no worker with a model runner is running this step")


def _described(runner: Any) -> Runner:
    # Under Model Runner V2 the contract is with the model's state.
    parts = [part for part in (runner, getattr(runner, "model_state", None)) if part is not None]
    mixins = [
        (mixin.__name__, chosen_mode(part.phase_mode))
        for part in parts
        for mixin in (pkgutil.resolve_name(family.mixin) for family in (V1, V2))
        if isinstance(part, mixin)
    ]
    name, mode = mixins[0] if mixins else (None, chosen_mode())
    classes = [f"{cls.__module__}.{cls.__qualname__}" for part in parts for cls in type(part).__mro__[:-1]]
    return Runner(classes, name, mode, bool(vllm.envs.VLLM_BATCH_INVARIANT))
