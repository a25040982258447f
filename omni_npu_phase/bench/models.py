# SPDX-License-Identifier: Apache-2.0
"""The models whose hooks are driven: talkers of the installed vLLM-Omni, made by their own constructors, and a toy.

Of a real model everything is the installed code: hooks, what they keep in a request's live buffer, embedding tables and
projections. Invented are the weights (random), the sizes apart from the embeddings' width (small vocabularies, no
decoder layers, since no forward pass is run), what requests say, and the talker MTP, which gives codes of the right
shape at once.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, get_args

from omni_npu_phase.conformance.scenarios import Hook

if TYPE_CHECKING:
    import torch

Updates = Literal["qwen3-tts", "moss-tts", "personaplex", "toy"]
_MODELS = "vllm_omni.model_executor.models"
_MODULES: Mapping[Updates, str] = {
    "qwen3-tts": f"{_MODELS}.qwen3_tts.qwen3_tts_talker",
    "moss-tts": f"{_MODELS}.moss_tts.modeling_moss_tts_talker",
    "personaplex": f"{_MODELS}.personaplex.personaplex_talker",
}
HOOKS: Mapping[Updates, Sequence[Hook]] = {
    "qwen3-tts": ("batched", "scalar"),
    "moss-tts": ("batched", "scalar"),
    "personaplex": ("scalar",),
    "toy": ("batched", "scalar"),
}
"""The hooks that each model has for decode rows."""
_VOCABULARY, _CODEBOOK = 1024, 256
# What the models' attention needs to be made at all; there are no layers that use it.
_ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 64}
_LONG_PROMPT = 4096
_TEXT = "All of them say these sixty letters, one letter with each frame."


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as it arrives: the length of its prompt in tokens, and its additional information."""

    length: int
    information: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Talker:
    """A model with hooks and a talker MTP, and the prompts of the requests that decode and of the one that is read."""

    model: Any
    groups: int
    """Codes of a frame."""
    short: Prompt
    long: Prompt


def available() -> list[Updates]:
    """The models that the installed vLLM-Omni has, by name, and the toy."""
    return [name for name in get_args(Updates) if name not in _MODULES or _found(_MODULES[name])]


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def talker(name: Updates, hidden: int, hook: Hook, resident: bool, dtype: torch.dtype, device: torch.device) -> Talker:
    """The model of this name with its talker MTP stood in for: a new toy, or the one instance of a real model.

    ``hook``: whether its batched hook is there. ``resident``: whether its codes stay on the device.
    """
    return (_made if name in _MODULES else _made.__wrapped__)(name, hidden, hook, resident, dtype, device)


@lru_cache(maxsize=4)
def _made(name: Updates, hidden: int, hook: Hook, resident: bool, dtype: torch.dtype, device: torch.device) -> Talker:
    import torch

    made = _MAKERS[name](hidden, dtype)
    model = made.model
    if isinstance(model, torch.nn.Module):
        generator = torch.Generator().manual_seed(7)
        for weight in model.requires_grad_(False).parameters():
            weight.normal_(std=0.02, generator=generator)
        model.to(device)
    if hook == "scalar":
        model.preprocess_decode_batch = None
    if not resident:
        model.gpu_resident_buffer_keys = model.gpu_resident_buffer_keys - {model.talker_mtp_output_key}
    model.talker_mtp = _mtp(made.groups, hidden, dtype, device)
    return made


def _mtp(groups: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Callable[..., Any]:
    """A talker MTP that hands out the memory of its one result, as a captured graph does."""
    import torch

    embeds = torch.ones(4096, hidden, dtype=dtype, device=device)
    codes = (torch.arange(4096 * groups) % _CODEBOOK).reshape(4096, groups).to(device)

    def talker_mtp(input_ids: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        count = input_ids.shape[0]
        return embeds[:count], codes[:count]

    return talker_mtp


# The models.


def _qwen3_tts(hidden: int, dtype: torch.dtype) -> Talker:
    """The text is read frame by frame, so that every decode row takes a slice of text that its live buffer keeps."""
    from omni_npu_phase.speech import prompts, tiny_qwen3_tts
    from omni_npu_phase.standins import torchaudio

    # Its module imports torchaudio, for mel filters that neither a prompt without audio nor a decode step computes.
    torchaudio.install()
    folder = tiny_qwen3_tts.cached()
    config: Any = importlib.import_module(f"{_MODELS}.qwen3_tts.configuration_qwen3_tts")
    settings = config.Qwen3TTSConfig.from_pretrained(folder)
    talker = settings.talker_config
    talker.hidden_size, talker.num_hidden_layers = hidden, 0
    talker.code_predictor_config.num_hidden_layers = 0
    model = _constructed("qwen3-tts", "Qwen3TTSTalkerForConditionalGeneration", settings, dtype, model=str(folder))
    # Of the published models; read by hooks, and by nothing that is made above.
    talker.num_code_groups = 16
    short, long = (
        prompts.Prompt(text, "vivian", "english", by_frame)
        for text, by_frame in ((_TEXT, True), (_TEXT * (_LONG_PROMPT // len(_TEXT)), False))
    )
    return Talker(model, 16, *(Prompt(each.length(folder), each.information) for each in (short, long)))


def _moss_tts(hidden: int, dtype: torch.dtype) -> Talker:
    config: Any = importlib.import_module(f"{_MODELS}.moss_tts.configuration_moss_tts")
    settings = config.MossTTSLocalConfig(
        qwen3_config={"hidden_size": hidden, "num_hidden_layers": 0, "vocab_size": _VOCABULARY, **_ATTENTION},
        gpt2_config={"n_embd": 64, "n_layer": 1, "n_head": 2, "n_inner": 64},
        audio_vocab_size=_CODEBOOK,
        audio_pad_token_id=_CODEBOOK,
        audio_assistant_slot_token_id=1,
        im_end_token_id=2,
    )
    model = _constructed("moss-tts", "MossTTSLocalTalkerForGeneration", settings, dtype)
    return Talker(model, settings.n_vq, Prompt(8, {}), Prompt(_LONG_PROMPT, {}))


def _personaplex(hidden: int, dtype: torch.dtype) -> Talker:
    import torch

    config: Any = importlib.import_module(f"{_MODELS}.personaplex.configuration_personaplex")
    settings = config.PersonaPlexConfig(
        temporal_config={"hidden_size": hidden, "num_hidden_layers": 0, "vocab_size": _VOCABULARY, **_ATTENTION},
        depformer_config={"hidden_size": 64, "num_hidden_layers": 1, "card": _CODEBOOK, **_ATTENTION},
        text_vocab_size=_VOCABULARY,
        text_embedding_rows=_VOCABULARY + 1,
        audio_vocab_size=_CODEBOOK,
    )
    model = _constructed("personaplex", "PersonaPlexTalkerForConditionalGeneration", settings, dtype)

    def prompt(length: int) -> Prompt:
        frame = torch.ones(8, dtype=torch.int64)
        heard = {"pplex_user_codes": frame.repeat(256, 1), "pplex_silence_codes": frame}
        return Prompt(length, {"pplex_prefill_text": torch.ones(length, dtype=torch.int64), **heard})

    return Talker(model, model.dep_q, prompt(8), prompt(_LONG_PROMPT))


def _toy(hidden: int, dtype: torch.dtype) -> Talker:
    from omni_npu_phase.bench.toy import Toy

    return Talker(Toy(hidden, dtype), 16, Prompt(2, {}), Prompt(_LONG_PROMPT, {}))


_MAKERS: Mapping[Updates, Callable[[int, torch.dtype], Talker]] = {
    "qwen3-tts": _qwen3_tts,
    "moss-tts": _moss_tts,
    "personaplex": _personaplex,
    "toy": _toy,
}


def _constructed(name: Updates, class_name: str, settings: Any, dtype: torch.dtype, **more: Any) -> Any:
    """A model as its own constructor makes it, on the CPU; ``more`` belongs to vLLM's model config."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    of_model = SimpleNamespace(
        hf_config=settings, hf_text_config=settings.get_text_config(), dtype=dtype, head_dtype=dtype, **more
    )
    object.__setattr__(config, "model_config", of_model)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with set_current_vllm_config(config):
            return getattr(importlib.import_module(_MODULES[name]), class_name)(vllm_config=config)
    finally:
        torch.set_default_dtype(before)
