# SPDX-License-Identifier: Apache-2.0
"""What is said: a text, its voice, and the length of the prompt that the talker makes of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_npu_phase.speech import checkpoint


@dataclass(frozen=True, slots=True)
class Prompt:
    """One text to speak. ``speaker`` and ``language`` are names of the checkpoint, in lower case."""

    text: str
    speaker: str
    language: str
    by_frame: bool = False
    """Whether the talker reads the text frame by frame, and not with its prompt."""

    @property
    def information(self) -> dict[str, Any]:
        """The request's ``additional_information`` as vLLM-Omni's Qwen3-TTS takes it."""
        return {
            "text": [self.text],
            "task_type": ["CustomVoice"],
            "speaker": [self.speaker],
            "language": [self.language.capitalize()],
            "instruct": [""],
            **({"non_streaming_mode": [False]} if self.by_frame else {}),
        }

    def length(self, model: Path) -> int:
        """The talker's prompt for this text, in tokens; the released model makes as many embeddings."""
        from vllm_omni.model_executor.models.qwen3_tts.prompt_embeds_builder import Qwen3TTSPromptEmbedsBuilder

        talker = checkpoint.read(model).talker
        return int(
            Qwen3TTSPromptEmbedsBuilder.estimate_prompt_len_from_additional_information(
                self.information,
                task_type="CustomVoice",
                tokenize_prompt=lambda text: _tokenizer(model)(text)["input_ids"],
                codec_language_id=talker["codec_language_id"],
                spk_is_dialect=talker.get("spk_is_dialect"),
            )
        )


@functools.cache
def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)
