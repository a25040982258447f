# SPDX-License-Identifier: Apache-2.0
"""The released Qwen3-TTS talker with the tiny checkpoint, as the model kit takes it.

``--phase-model omni_npu_phase.speech.tiny_talker:under_test``; nothing may have imported vLLM before.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from omni_npu_phase.conformance.models.subject import ModelUnderTest, Request
from omni_npu_phase.speech import tiny_qwen3_tts
from omni_npu_phase.speech.prompts import Prompt
from omni_npu_phase.speech.talker_engine import prepare, talker_config

_PROMPTS = {
    "hello": Prompt("Hello world", "vivian", "english"),
    "rain": Prompt("The rain has ended.", "ryan", "english"),
    "by-frame": Prompt("Good morning", "vivian", "english", by_frame=True),
}
# Codes of the first codebook.
_OUTPUTS = (11, 1203, 77, 640, 1999, 5)


def under_test() -> ModelUnderTest:
    """The talker's real instance, loaded by vLLM's own model loader, on the CPU and without an engine."""
    prepare()
    folder = tiny_qwen3_tts.cached()
    model = _load(folder)
    import torch

    # The talker reads its prompt from the request's text; the ids only count.
    requests = {
        name: Request([1] * prompt.length(folder), _OUTPUTS, prompt.information) for name, prompt in _PROMPTS.items()
    }
    return ModelUnderTest(model, requests, int(model.talker_config.hidden_size), torch.bfloat16)


def _load(folder: Path) -> Any:
    config = talker_config(folder)
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.model_loader import get_model

    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as scratch:
        init_distributed_environment(1, 0, Path(scratch, "rendezvous").as_uri(), 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        return get_model(vllm_config=config)
