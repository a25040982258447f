# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen3-TTS CustomVoice checkpoint: the real architecture and special token ids, random weights, 4 MB.

It is no voice. It is made so that faults show: codes depend on the whole prompt and on every earlier frame, and the
audio is audible, so that it differs where codes differ. ``tests/cpu/test_tiny_qwen3_tts.py`` states what it must keep.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from math import ceil, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_npu_phase.settings import PLATFORM_VARIABLE, cache_folder

if TYPE_CHECKING:
    import torch

SEED = 1234
SPEAKERS = {"vivian": 3065, "ryan": 3061}
LANGUAGES = {"english": 2050, "chinese": 2055}
CODE_GROUPS = 4
"""Codes a frame; the published models have 16, at four times the cost of a step here."""
SAMPLE_RATE, SAMPLES_PER_FRAME = 24000, 1920

_HIDDEN, _INTERMEDIATE, _LAYERS = 64, 128, 2
# 32 is the least that vLLM's CPU attention takes.
_HEADS, _KV_HEADS, _HEAD_DIM = 2, 1, 32
# The pipeline stops at token 2150 whatever the checkpoint says, so the vocabulary cannot be smaller.
_VOCABULARY, _END_OF_SPEECH, _CODEBOOK = 3072, 2150, 2048
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")
# Scales of the weights. With the usual ones attention is nearly flat, so that codes ignore the prompt, and the codec
# fades to silence. The last two put the codec's output around 0 at a standard deviation of about 0.15.
_QUERY_KEY_NORM = 1.5
_EMBEDDING = 0.1
_LAYER_SCALE = 0.1
_LAST_CONVOLUTION = 0.0075
_LAST_BIAS = 0.01


def cached(seconds: float = 600, platform: str = "cpu") -> Path:
    """The checkpoint's folder, made on first use: in OMNI_NPU_PHASE_CACHE, or the user's cache folder.

    Raises RuntimeError with the reason where it cannot be made, within ``seconds``. The work is done in another
    process, which needs vLLM-Omni on ``platform``, as OMNI_NPU_PHASE_PLATFORM names it: where torch_npu is installed
    and CANN is not, only ``emulated_ascend`` can be imported. The caller's process stays as it is.
    """
    # What it is made from is part of its name: another maker makes another checkpoint.
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = Path(cache_folder(), f"tiny-qwen3-tts-{recipe}")
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch, folder.name)
            _make_elsewhere(made, seconds, platform)
            # Another process may have been faster, and made the same.
            with suppress(OSError):
                made.rename(folder)
    except OSError as error:
        raise RuntimeError(f"the cache folder {folder.parent} cannot be written: {error.strerror or error}") from error
    if not folder.is_dir():
        raise RuntimeError(f"the cache folder {folder.parent} cannot be written: {folder.name} is in the way")
    return folder


def _make_elsewhere(folder: Path, seconds: float, platform: str) -> None:
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(folder)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=seconds,
            # One platform only: vLLM-Ascend, where it is installed, would offer a second.
            env={**os.environ, PLATFORM_VARIABLE: platform, "VLLM_PLUGINS": f"omni_npu_phase_{platform}"},
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the tiny checkpoint was not made in {seconds:g} s, the timeout") from None
    if done.returncode != 0:
        status = done.returncode
        ended = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"said nothing, exit status {status}"
        said = done.stderr.strip().splitlines()
        reason = said[-1] if said and status > 0 else f"its maker {ended}"
        raise RuntimeError(f"the tiny checkpoint cannot be made: {reason}")


def make(folder: Path, seed: int = SEED) -> None:
    """Write the checkpoint into ``folder``, which must not exist. The same seed writes the same bytes."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    ids, vocabulary = _write_tokenizer(folder)
    _write_json(folder / "config.json", _configuration(ids, vocabulary))
    _write_json(folder / "generation_config.json", {"do_sample": False, "max_new_tokens": 8192})
    _write_tensors(folder / "model.safetensors", _talker(random, vocabulary))
    _write_speech_tokenizer(folder / "speech_tokenizer", random)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


def _write_tokenizer(folder: Path) -> tuple[dict[str, int], int]:
    """Bytes as tokens, but the two words that mark a turn; returns the ids by token, and the size rounded up."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: dict[tuple[str, str], None] = {}
    for word in ("assistant", "user"):
        for end in range(1, len(word)):
            merges[word[:end], word[end]] = None
            ids.setdefault(word[: end + 1], len(ids))
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIALS])
    make_fast: Any = PreTrainedTokenizerFast
    fast = make_fast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=131072
    )
    fast.save_pretrained(folder)
    return tokenizer.get_vocab(), ceil(tokenizer.get_vocab_size() / 32) * 32


def _configuration(ids: dict[str, int], text_vocabulary: int) -> dict[str, Any]:
    decoder_layers = {
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "attention_bias": False,
        "use_sliding_window": False,
        "num_code_groups": CODE_GROUPS,
    }
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": "0b6",
        "tts_model_type": "custom_voice",
        "torch_dtype": "bfloat16",
        "assistant_token_id": ids["assistant"],
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_text_bos>"],
        "tts_eos_token_id": ids["<tts_text_eod>"],
        "talker_config": {
            **decoder_layers,
            "model_type": "qwen3_tts_talker",
            "vocab_size": _VOCABULARY,
            "max_position_embeddings": 32768,
            "rope_scaling": None,
            "sliding_window": None,
            "text_hidden_size": _HIDDEN,
            "text_vocab_size": text_vocabulary,
            "position_id_per_seconds": 13,
            "codec_eos_token_id": _END_OF_SPEECH,
            "codec_think_id": 2154,
            "codec_nothink_id": 2155,
            "codec_think_bos_id": 2156,
            "codec_think_eos_id": 2157,
            "codec_pad_id": 2148,
            "codec_bos_id": 2149,
            "codec_language_id": LANGUAGES,
            "spk_id": SPEAKERS,
            "spk_is_dialect": dict.fromkeys(SPEAKERS, False),
            "code_predictor_config": {
                **decoder_layers,
                "model_type": "qwen3_tts_talker_code_predictor",
                "vocab_size": _CODEBOOK,
                "max_position_embeddings": 65536,
            },
        },
    }


def _talker(random: np.random.Generator, text_vocabulary: int) -> dict[str, torch.Tensor]:
    """The talker and its code predictor, in bfloat16."""
    tensors: dict[str, torch.Tensor] = {}

    def normal(name: str, *shape: int, scale: float) -> None:
        tensors[f"talker.{name}"] = _normal(random, shape, scale).bfloat16()

    def linear(name: str, rows: int, columns: int) -> None:
        normal(f"{name}.weight", rows, columns, scale=1 / sqrt(columns))

    def constant(name: str, size: int, value: float) -> None:
        tensors[f"talker.{name}.weight"] = _normal(random, (size,), 0).add(value).bfloat16()

    def layers(name: str) -> None:
        for prefix in (f"{name}.layers.{index}" for index in range(_LAYERS)):
            linear(f"{prefix}.self_attn.q_proj", _HEADS * _HEAD_DIM, _HIDDEN)
            linear(f"{prefix}.self_attn.k_proj", _KV_HEADS * _HEAD_DIM, _HIDDEN)
            linear(f"{prefix}.self_attn.v_proj", _KV_HEADS * _HEAD_DIM, _HIDDEN)
            linear(f"{prefix}.self_attn.o_proj", _HIDDEN, _HEADS * _HEAD_DIM)
            constant(f"{prefix}.self_attn.q_norm", _HEAD_DIM, _QUERY_KEY_NORM)
            constant(f"{prefix}.self_attn.k_norm", _HEAD_DIM, _QUERY_KEY_NORM)
            linear(f"{prefix}.mlp.gate_proj", _INTERMEDIATE, _HIDDEN)
            linear(f"{prefix}.mlp.up_proj", _INTERMEDIATE, _HIDDEN)
            linear(f"{prefix}.mlp.down_proj", _HIDDEN, _INTERMEDIATE)
            constant(f"{prefix}.input_layernorm", _HIDDEN, 1)
            constant(f"{prefix}.post_attention_layernorm", _HIDDEN, 1)
        constant(f"{name}.norm", _HIDDEN, 1)

    normal("model.codec_embedding.weight", _VOCABULARY, _HIDDEN, scale=_EMBEDDING)
    normal("model.text_embedding.weight", text_vocabulary, _HIDDEN, scale=0.5)
    for projection in ("text_projection.linear_fc1", "text_projection.linear_fc2"):
        linear(projection, _HIDDEN, _HIDDEN)
        normal(f"{projection}.bias", _HIDDEN, scale=0.02)
    layers("model")
    linear("codec_head", _VOCABULARY, _HIDDEN)
    # Random speech has no end: requests end at their number of tokens.
    tensors["talker.codec_head.weight"][_END_OF_SPEECH] = 0
    layers("code_predictor.model")
    for group in range(CODE_GROUPS - 1):
        normal(f"code_predictor.model.codec_embedding.{group}.weight", _CODEBOOK, _HIDDEN, scale=_EMBEDDING)
        linear(f"code_predictor.lm_head.{group}", _CODEBOOK, _HIDDEN)
    return tensors


def _normal(random: np.random.Generator, shape: tuple[int, ...], scale: float) -> torch.Tensor:
    import torch

    # NumPy's stream does not depend on the processor's vector width, as torch's does.
    return torch.from_numpy(random.standard_normal(shape).astype(np.float32) * np.float32(scale))


def _write_speech_tokenizer(folder: Path, random: np.random.Generator) -> None:
    """The codec: a decoder that is heard, and an encoder that is only loaded."""
    from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import (
        configuration_qwen3_tts_tokenizer_v2 as configuration,
    )
    from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import modeling_qwen3_tts_tokenizer_v2 as modeling

    encoder = {
        "model_type": "mimi",
        "sampling_rate": SAMPLE_RATE,
        "audio_channels": 1,
        "hidden_size": 16,
        "num_filters": 4,
        "num_residual_layers": 1,
        "upsampling_ratios": [8, 6, 5, 4],
        "codebook_size": _CODEBOOK,
        "codebook_dim": 8,
        "vector_quantization_hidden_dimension": 8,
        "num_quantizers": CODE_GROUPS,
        "num_semantic_quantizers": 1,
        "upsample_groups": 16,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 8000,
        "sliding_window": 250,
        "use_causal_conv": True,
        "frame_rate": SAMPLE_RATE / SAMPLES_PER_FRAME,
    }
    decoder = {
        "codebook_size": _CODEBOOK,
        "codebook_dim": 16,
        "hidden_size": 16,
        "latent_dim": 16,
        "max_position_embeddings": 8000,
        "rope_theta": 10000,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attention_bias": False,
        "sliding_window": 72,
        "intermediate_size": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "num_hidden_layers": 1,
        "num_quantizers": CODE_GROUPS,
        "num_semantic_quantizers": 1,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "decoder_dim": 32,
        "attention_dropout": 0.0,
    }
    folder.mkdir()
    _write_json(
        folder / "config.json",
        {
            "architectures": ["Qwen3TTSTokenizerV2Model"],
            "model_type": "qwen3_tts_tokenizer_12hz",
            "dtype": "float32",
            "encoder_config": encoder,
            "decoder_config": decoder,
            "encoder_valid_num_quantizers": CODE_GROUPS,
            "input_sample_rate": SAMPLE_RATE,
            "output_sample_rate": SAMPLE_RATE,
            "decode_upsample_rate": SAMPLES_PER_FRAME,
            "encode_downsample_rate": SAMPLES_PER_FRAME,
        },
    )
    _write_json(
        folder / "preprocessor_config.json",
        {
            "feature_extractor_type": "EncodecFeatureExtractor",
            "feature_size": 1,
            "padding_side": "right",
            "padding_value": 0.0,
            "sampling_rate": SAMPLE_RATE,
            "return_attention_mask": True,
        },
    )
    made = configuration.Qwen3TTSTokenizerV2Config.from_pretrained(str(folder))
    tensors = {}
    for name, model in (
        ("decoder", modeling.Qwen3TTSTokenizerV2Decoder._from_config(made.decoder_config)),
        ("encoder", modeling.Qwen3TTSTokenizerV2Encoder._from_config(made.encoder_config)),
    ):
        for key, value in model.state_dict().items():
            tensors[f"{name}.{key}"] = _codec_weight(random, key, value)
    last = max(
        (key for key in tensors if key.startswith("decoder.decoder.") and key.endswith(".conv.weight")),
        key=lambda key: int(key.split(".")[2]),
    )
    tensors[last] *= _LAST_CONVOLUTION
    tensors[last.replace("weight", "bias")] += _LAST_BIAS
    _write_tensors(folder / "model.safetensors", tensors)


def _codec_weight(random: np.random.Generator, name: str, initial: torch.Tensor) -> torch.Tensor:
    """Weights that keep a signal's size; what the architecture starts with only where that is no weight."""
    if not initial.is_floating_point():
        return initial.clone()
    value = initial.float().contiguous().clone()
    if name.endswith("embedding_sum") or name.endswith("embed_sum"):
        # Zero at first, when every code would decode to the same vector.
        return _normal(random, tuple(value.shape), 1)
    if value.dim() >= 2:
        transposed = "transconv" in name.lower()
        return _normal(random, tuple(value.shape), 1 / sqrt(value.shape[0] * 2 if transposed else value[0].numel()))
    if name.endswith("bias"):
        return value.zero_()
    if name.endswith("gamma") or "layer_scale" in name:
        return value.fill_(_LAYER_SCALE)
    return value


if __name__ == "__main__":
    make(Path(sys.argv[1]))
