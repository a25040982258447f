# SPDX-License-Identifier: Apache-2.0
"""A folder with a Qwen3-TTS CustomVoice checkpoint: whether it is one, and the names it knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SPEECH_TOKENIZER = ("config.json", "model.safetensors")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``talker``: the talker's part of config.json. Names of speakers and languages are in lower case."""

    talker: Mapping[str, Any]

    @property
    def speakers(self) -> list[str]:
        return [name.lower() for name in self.talker["spk_id"]]

    @property
    def languages(self) -> list[str]:
        return [name.lower() for name in self.talker["codec_language_id"]]


def read(folder: Path) -> Checkpoint:
    """Look at the checkpoint in ``folder``, weights unread. Raises ValueError with what is wrong."""
    if not folder.is_dir():
        raise ValueError("it is a file, not a folder" if folder.exists() else "there is no such folder")
    try:
        configuration = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError("no Qwen3-TTS checkpoint, it has no config.json") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"config.json cannot be read: {error}") from error
    kind = configuration.get("model_type") if isinstance(configuration, dict) else None
    if kind != "qwen3_tts":
        raise ValueError(f"no Qwen3-TTS checkpoint, its model_type is {kind!r}")
    found = configuration.get("tts_model_type")
    if found != "custom_voice":
        raise ValueError(f"a CustomVoice checkpoint is needed, its tts_model_type is {found!r}")
    talker = configuration.get("talker_config")
    if not isinstance(talker, dict):
        raise ValueError("its config.json has no talker_config")
    for name in ("spk_id", "codec_language_id"):
        if not (isinstance(talker.get(name), dict) and talker[name]):
            raise ValueError(f"its talker_config names nothing under {name}")
    for name in _SPEECH_TOKENIZER:
        if not (folder / "speech_tokenizer" / name).is_file():
            raise ValueError(f"its speech tokenizer is missing: no speech_tokenizer/{name}")
    return Checkpoint(talker)
