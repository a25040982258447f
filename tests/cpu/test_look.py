# SPDX-License-Identifier: Apache-2.0
"""The static look at models: what it says of the released ones, and of each way to tell a phase."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omni_npu_phase import look

MODELS = "vllm_omni.model_executor.models"
FIELDS, SPAN, UNCLEAR, NO_HOOK = "decides by the fields", "decides by span", "cannot tell", "has no hook"


@pytest.mark.parametrize(
    ("model", "verdict"),
    [
        ("qwen3_tts.qwen3_tts_talker:Qwen3TTSTalkerForConditionalGeneration", FIELDS),
        ("qwen3_omni.qwen3_omni:Qwen3OmniMoeForConditionalGeneration", FIELDS),
        ("voxcpm2.voxcpm2_talker:VoxCPM2TalkerForConditionalGeneration", FIELDS),
        ("voxtral_tts.voxtral_tts:VoxtralTTSForConditionalGeneration", FIELDS),
        ("breeze_tts_2.modeling_breeze:BreezeForConditionalGeneration", FIELDS),
        ("gepard.gepard_talker:GepardTalkerForConditionalGeneration", FIELDS),
        ("personaplex.personaplex_talker:PersonaPlexTalkerForConditionalGeneration", FIELDS),
        ("qwen2_5_omni.qwen2_5_omni:Qwen2_5OmniForConditionalGeneration", SPAN),
        ("fish_speech.fish_speech_slow_ar:FishSpeechSlowARForConditionalGeneration", SPAN),
        ("audio8_tts.audio8_tts_slow_ar:Audio8TTSSlowARForConditionalGeneration", SPAN),
        ("ming_tts.ming_tts:MingTTSForConditionalGeneration", SPAN),
        ("mimo_audio.mimo_audio:MiMoAudioForConditionalGeneration", SPAN),
        ("indextts2.indextts2_talker:IndexTTS2TalkerForConditionalGeneration", SPAN),
        ("moss_tts.modeling_moss_tts_talker:MossTTSDelayTalkerForGeneration", SPAN),
        ("glm_tts.glm_tts:GLMTTSForConditionalGeneration", SPAN),
        ("moss_tts.modeling_moss_tts_talker:MossTTSLocalTalkerForGeneration", UNCLEAR),
        ("covo_audio.covo_audio:CovoAudioForConditionalGeneration", UNCLEAR),
        ("qwen3_tts.qwen3_tts_code2wav:Qwen3TTSCode2Wav", NO_HOOK),
    ],
)
def test_released_models(model: str, verdict: str) -> None:
    (found,) = look.look_at(f"{MODELS}.{model}")
    assert found.verdict == verdict, found
    assert Path(found.file).is_file()


@pytest.mark.parametrize(
    ("body", "verdict", "lines"),
    [
        ("prefill = info['_omni_is_prefill']", FIELDS, "line 3"),
        ("prefill = info['_omni_num_computed_tokens'] < info['_omni_prompt_len']", FIELDS, "line 3"),
        ("prefill = info.get('_omni_is_prefill', len(input_ids) > 1)", FIELDS, "line 3"),
        ("start = info['_omni_num_computed_tokens']", UNCLEAR, ""),
        ("prefill = input_ids.shape[0] > 1", SPAN, "line 3"),
        ("prefill = len(input_ids) != 1", SPAN, "line 3"),
        ("prefill = input_embeds.size(0) >= 2", SPAN, "line 3"),
        ("n = int(input_ids.numel())\n        prefill = 1 < n", SPAN, "line 4"),
        (
            "prefill = info['_omni_is_prefill']\n        p = prefill or input_ids.shape[0] > 1",
            UNCLEAR,
            "overrule it (line 4)",
        ),
        ("prefill = info['codes'].shape[0] > 1", UNCLEAR, ""),
        ("prefill = input_ids.shape[0] > 0", UNCLEAR, ""),
        ("pass", UNCLEAR, ""),
    ],
)
def test_ways_to_tell_a_phase(
    body: str, verdict: str, lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(
        tmp_path, monkeypatch, f"class M:\n    def preprocess(self, input_ids, input_embeds, **info):\n        {body}\n"
    )
    (found,) = look.look_at("a_model:M")
    assert found.verdict == verdict, found
    assert lines in found.reason


def _write(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    (folder / "a_model.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize(
    "source",
    [
        "class M:\n def preprocess(self, input_ids): return self.a(input_ids)\n def a(self, input_ids): return {}",
        "class M:\n def preprocess(self, input_ids): return a(input_ids)\ndef a(input_ids): return {}",
        "class B:\n def a(self, input_ids): return {}\nclass M(B):\n def preprocess(self, ids): self.a(ids)",
        "class I:\n def of(input_ids): return {}\nclass M:\n def preprocess(self, input_ids): return I.of(input_ids)",
        "class M:\n def __init__(self): self.set_custom_preprocess(self.a)\n def a(self, input_ids): return {}",
        "class M:\n def __init__(self): self.preprocess = self.a\n def a(self, input_ids): return {}",
        "class M:\n def preprocess_decode_batch(self, input_ids): return {}",
    ],
    ids=["method", "function", "base", "another class", "custom", "assigned", "batched"],
)
def test_what_a_hook_reaches(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, monkeypatch, source.format("len(input_ids) == 1"))
    (found,) = look.look_at("a_model:M")
    assert found.verdict == SPAN


def test_what_no_hook_reaches_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "class M:\n def preprocess(self, input_ids): pass\n def b(self, input_ids): return len(input_ids) == 1\n"
    _write(tmp_path, monkeypatch, f"import a_module_that_is_nowhere\n{source}class N: pass\n")
    (found,) = look.look_at("a_model")
    assert (found.cls, found.verdict) == ("M", UNCLEAR)


BASE = "class B:\n def preprocess(self, input_ids): return self.a(input_ids)\n def a(self, input_ids): return {}\n"


@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        ("from a_base import B\nclass M(B): pass", SPAN),
        ("from a_base import B as C\nclass N(C): pass\nclass M(N): pass", SPAN),
        ("import a_base\nclass M(a_base.B): pass", SPAN),
        ("from .a_base import B\nclass M(B): pass", SPAN),
        ("from . import a_base\nclass M(a_base.B): pass", SPAN),
        ("from a_base import B as M", SPAN),
        ("import a_base\nclass M(a_base): pass", UNCLEAR),
        ("import torch\nclass M(torch.nn.Module): pass", NO_HOOK),
        ("from a_base import B\nclass M(B):\n def a(self, input_ids): pass", UNCLEAR),
        ("from a_base import C\nclass M(C): pass", UNCLEAR),
        ("from nowhere_at_all import C\nclass M(C): pass", UNCLEAR),
        ("class M(made()): pass", UNCLEAR),
        ("from torch import nn\nfrom typing import Generic\nclass M(nn.Module, Generic[int], object): pass", NO_HOOK),
        ("class M(N): pass\nclass N(M): pass", NO_HOOK),
        ("class M(M): pass", NO_HOOK),
        ("from a_model import M\nclass N(M): pass\nclass M(N): pass", NO_HOOK),
    ],
)
def test_hooks_are_inherited(source: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_base.py").write_text(BASE.format("len(input_ids) == 1"), encoding="utf-8")
    _write(tmp_path, monkeypatch, source)
    (found,) = look.look_at("a_model:M")
    assert found.verdict == verdict, found


def _checkpoint(folder: Path, *architectures: str) -> str:
    (folder / "config.json").write_text(json.dumps({"architectures": architectures}), encoding="utf-8")
    return str(folder)


def test_a_checkpoint_names_its_class(tmp_path: Path) -> None:
    (found,) = look.look_at(_checkpoint(tmp_path, "Qwen3TTSForConditionalGeneration"))
    assert (found.cls, found.verdict) == ("Qwen3TTSTalkerForConditionalGeneration", FIELDS)


def test_a_wrapper_stands_for_its_family(tmp_path: Path) -> None:
    found = {
        each.cls: each.verdict for each in look.look_at(_checkpoint(tmp_path, "MiniCPMO45OmniForConditionalGeneration"))
    }
    assert found["MiniCPMO45OmniForConditionalGeneration"] == UNCLEAR
    assert found["MiniCPMO45OmniTTSForConditionalGeneration"] == FIELDS


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nowhere.at_all", "nowhere.at_all is neither a folder nor an installed module"),
        ("no folder/at all", "is neither a folder nor an installed module"),
        (f"{MODELS}.qwen3_tts.qwen3_tts_talker:Missing", "has no class Missing"),
    ],
)
def test_what_is_not_there_is_named(model: str, message: str) -> None:
    with pytest.raises(look.UnknownModelError, match=message):
        look.look_at(model)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no config.json"),
        ("{", "no config.json"),
        ("{}", "architectures"),
        ('{"architectures": ["X"]}', "no arch.* X"),
        ('{"architectures": null}', "lists architectures"),
        ('{"architectures": "X"}', "lists architectures"),
        ('{"architectures": [1]}', "lists architectures"),
        ("[]", "names architectures"),
        ('"X"', "names architectures"),
    ],
)
def test_folders_that_are_no_checkpoints(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(look.UnknownModelError, match=message):
        look.look_at(str(tmp_path))
