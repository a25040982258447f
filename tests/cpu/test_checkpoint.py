# SPDX-License-Identifier: Apache-2.0
"""The static look at models: what it says of the released ones, and of each way to tell a phase."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omni_npu_phase.lint import checkpoint as look

MODELS = "vllm_omni.model_executor.models"
FIELDS, SPAN, UNCLEAR, NO_HOOK = "decides by the fields", "decides by span", "cannot tell", "has no hook"
NEEDS_NONE = "needs no phase"
BROKEN = "breaks the contract"


@pytest.mark.parametrize(
    ("model", "verdict"),
    [
        ("qwen3_tts.qwen3_tts_talker:Qwen3TTSTalkerForConditionalGeneration", FIELDS),
        ("moss_tts.modeling_moss_tts_talker:MossTTSLocalTalkerForGeneration", FIELDS),
        ("ming_tts.ming_tts:MingTTSForConditionalGeneration", SPAN),
        ("voxtral_tts.voxtral_tts:VoxtralTTSForConditionalGeneration", UNCLEAR),
        ("covo_audio.covo_audio:CovoAudioForConditionalGeneration", NEEDS_NONE),
        ("qwen3_tts.qwen3_tts_code2wav:Qwen3TTSCode2Wav", NO_HOOK),
    ],
)
def test_released_models(model: str, verdict: str) -> None:
    """One for each verdict; tests of lint hold every released model to what a reader found."""
    (found,) = look.look_at(f"{MODELS}.{model}")
    assert found.verdict == verdict, found
    assert Path(found.file).is_file()


@pytest.mark.parametrize(
    ("test", "verdict", "reason"),
    [
        ("info['_omni_is_prefill']", FIELDS, "line 3"),
        ("info['_omni_num_computed_tokens'] < info['_omni_prompt_len']", FIELDS, "line 3"),
        ("info.get('_omni_is_prefill', len(input_ids) > 1)", FIELDS, "line 3; beside it span-phase (line 3)"),
        ("info['_omni_num_computed_tokens']", BROKEN, "a prompt's last chunk is taken for decode (line 3)"),
        ("input_ids.shape[0] > 1", SPAN, "(line 3)"),
        ("info['_omni_is_prefill'] or input_ids.shape[0] > 1", FIELDS, "beside it span-beside-phase (line 3)"),
        ("info['codes'].shape[0] > 1", UNCLEAR, "`info['codes'].shape[0] > 1` chooses what the hook returns"),
        ("self.stage == 'talker'", NEEDS_NONE, "what it returns is made of the row's own tokens"),
    ],
)
def test_ways_to_tell_a_phase(
    test: str, verdict: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = "def preprocess(self, input_ids, input_embeds, **info):"
    _write(tmp_path, monkeypatch, f"class M:\n    {hook}\n        return self.a() if {test} else self.b()\n")
    (found,) = look.look_at("a_model:M")
    assert found.verdict == verdict, found
    assert reason in found.reason
    assert bool(found.findings) is (verdict in (SPAN, BROKEN, UNCLEAR) or "beside" in reason)


def test_another_fault_than_the_span(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "info['_omni_is_prefill'] = 1\n  return input_ids, 1, {}\n"
    _write(tmp_path, monkeypatch, f"class M:\n def preprocess(self, input_ids, **info):\n  {body}")
    (found,) = look.look_at("a_model:M")
    assert (found.verdict, found.reason) == (BROKEN, "_omni_is_prefill is the runner's to write (line 3)")


def _write(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    (folder / "a_model.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))


BASE = """
class B:
    def preprocess(self, input_ids): return self.one(input_ids) if self.a(input_ids) else self.many(input_ids)
    def a(self, input_ids): return len(input_ids) == 1
"""


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
        ("from a_base import B\nclass M(B):\n def a(self, input_ids): pass", NEEDS_NONE),
        ("from a_base import C\nclass M(C): pass", UNCLEAR),
        ("from nowhere_at_all import C\nclass M(C): pass", UNCLEAR),
        ("class M(made()): pass", UNCLEAR),
        ("from torch import nn\nfrom typing import Generic\nclass M(nn.Module, Generic[int], object): pass", NO_HOOK),
        ("class M(N): pass\nclass N(M): pass", NO_HOOK),
        ("class M(M): pass", NO_HOOK),
        ("from a_model import M\nclass N(M): pass\nclass M(N): pass", NO_HOOK),
        ("from typing import Any\nclass M(Any):\n def preprocess(self, images): return 1", NO_HOOK),
    ],
)
def test_hooks_are_inherited(source: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_base.py").write_text(BASE, encoding="utf-8")
    _write(tmp_path, monkeypatch, source)
    (found,) = look.look_at("a_model:M")
    assert found.verdict == verdict, found


def test_a_module_without_a_class_is_looked_at_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, monkeypatch, f"import a_module_that_is_nowhere\n{BASE}class N: pass\n")
    (found,) = look.look_at("a_model")
    assert (found.cls, found.verdict) == ("B", SPAN)
    _write(tmp_path, monkeypatch, "class N: pass\n")
    (found,) = look.look_at("a_model")
    assert (found.cls, found.verdict, found.registered) == ("a_model", NO_HOOK, False)


def test_a_file_that_is_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, monkeypatch, "class M(:\n")
    with pytest.raises(look.UnknownModelError, match=r"a_model.py:1: no Python"):
        look.look_at("a_model")


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
        (None, r"/config\.json: No such file or directory$"),
        (b"{", r"/config\.json is no JSON: Expecting property name .*$"),
        (b'"\xff"', r"/config\.json is no JSON: 'utf-8' codec can't decode byte 0xff .*$"),
        (b'{"architectures": ["X"]}', "no architecture X$"),
        *(
            (text, r"/config\.json lists no architectures by name$")
            for text in (
                *(b"{}", b"[]", b'"X"', b'{"architectures": null}', b'{"architectures": "X"}'),
                *(b'{"architectures": [1]}', b'{"architectures": []}'),
            )
        ),
    ],
)
def test_folders_that_are_no_checkpoints(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(look.UnknownModelError, match=message):
        look.look_at(str(tmp_path))
