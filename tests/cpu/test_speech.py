# SPDX-License-Identifier: Apache-2.0
"""``omni-npu-phase validate``: the whole pipeline, and the two runs that it must not believe."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
import wave
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from omni_npu_phase.speech import engine
from omni_npu_phase.speech.engine import EngineError, EngineRun, EngineSpec
from omni_npu_phase.speech.prompts import Prompt
from omni_npu_phase.speech.report import AUDIO_TOLERANCE, Report
from omni_npu_phase.speech.validate import BadInputError, Options, budgets, validate
from omni_npu_phase.testing import tiny_qwen3_tts


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_qwen3_tts.cached()


class Engines:
    """The real engines; each is started once, whichever test asks first."""

    def __init__(self) -> None:
        self._runs: dict[tuple[EngineSpec, str], EngineRun] = {}

    def __call__(
        self, spec: EngineSpec, advance: Callable[[str], None], accept: Callable[[list[int]], None]
    ) -> EngineRun:
        # The guard has no part in an unchunked run: no span of a prompt is one token long there.
        key = spec, os.environ.get("PYTHONPATH", "") if spec.budget else ""
        if key not in self._runs:
            self._runs[key] = engine.run(spec, advance, accept)
        accept(self._runs[key].prompt_lens)
        return self._runs[key]


@pytest.fixture(scope="module")
def engines() -> Engines:
    return Engines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speech")


@pytest.fixture(scope="module")
def spoken(model: Path, engines: Engines, folder: Path) -> Report:
    return validate(Options(model, folder), run_engine=engines)


def test_chunked_speech_is_unchunked_speech(spoken: Report) -> None:
    assert spoken.summary().splitlines() == [
        "equal: chunked prefill speaks the same codes, frame by frame, and the same audio"
    ]
    for comparison in spoken.comparisons:
        tail = comparison.tail
        assert tail is not None
        assert (tail.computed, tail.span) == (tail.prompt_len - 1, 1)
        assert tail.unchanged
        assert not tail.seen_by_mtp
        assert tail.codes is None
        assert len(comparison.chunked.codes) == 39


def test_the_report_has_what_was_promised(spoken: Report, folder: Path) -> None:
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert report["verdict"] == "equal"
    assert report["codes_equal"] is True
    assert report["tails_observed"] is True
    assert report["first_difference"] is None
    assert report["frames"] == 78
    assert report["audio"]["tolerance"] == AUDIO_TOLERANCE
    assert report["audio"]["equal"] is True
    assert report["audio"]["samples"] == [39 * tiny_qwen3_tts.SAMPLES_PER_FRAME] * 2
    assert report["runtime"]["packages"]["vllm-omni"]
    assert all(seconds > 0 for seconds in report["timings"]["unchunked"]["first_audio_seconds"])
    assert (folder / "speech.png").read_bytes().startswith(b"\x89PNG")
    assert "| Hello world | 22 | 7 | (22, 21, 1) | 39 | equal |" in (folder / "report.md").read_text(encoding="utf-8")
    with wave.open(str(folder / "prompt-1-chunked.wav")) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32767
        assert file.getframerate() == tiny_qwen3_tts.SAMPLE_RATE
    assert np.abs(samples - spoken.comparisons[0].chunked_speech.audio).max() < 1e-4


def test_audio_of_the_tiny_checkpoint_is_heard(spoken: Report) -> None:
    for comparison in spoken.comparisons:
        audio = comparison.unchunked_speech.audio
        assert np.isfinite(audio).all()
        assert 0.05 < audio.std() < 0.3
        assert np.abs(audio).max() < 1


SPAN_GUARD = """
from dataclasses import replace
from omni_npu_phase import mixin

def install():
    planned = mixin.plan_step
    def by_span(*arguments, **keywords):
        plan = planned(*arguments, **keywords)
        one = [span == 1 for span in plan.spans]
        return replace(plan, prefill=[not alone for alone in one], eligible=one)
    mixin.plan_step = by_span
"""


def _plugin(folder: Path, code: str) -> None:
    """A plugin that vLLM loads in every process that has ``folder`` on its path."""
    (folder / "broken_guard.py").write_text(code, encoding="utf-8")
    info = folder / "broken_guard-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-guard\nVersion: 0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nbroken = broken_guard:install\n", encoding="utf-8")


@pytest.fixture
def span_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _plugin(tmp_path, SPAN_GUARD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))


@pytest.mark.usefixtures("span_guard", "spoken")
def test_a_guard_that_asks_for_the_span_is_heard(model: Path, engines: Engines, tmp_path: Path) -> None:
    report = validate(Options(model, tmp_path / "report"), run_engine=engines)
    assert report.verdict == "different"
    written = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    assert written["codes_equal"] is False
    assert written["tails_observed"] is True
    difference = written["first_difference"]
    assert (difference["prompt"], difference["frame"]) == (1, 0)
    assert any(row.startswith("> step 3: P=22 C=21 S=1 tail") and "prefill=False" in row for row in difference["rows"])
    assert "prompt 1: MTP was given the tail (T2)" in written["reasons"]
    assert "prompt 1: the codes differ" in written["reasons"]


def test_codes_that_ignore_the_prompt_prove_nothing(model: Path, engines: Engines, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    deaf = tmp_path / "deaf"
    shutil.copytree(model, deaf)
    tensors = load_file(deaf / "model.safetensors")
    for name in tensors:
        if "codec_head" in name or "lm_head" in name:
            tensors[name].zero_()
    save_file(tensors, deaf / "model.safetensors", metadata={"format": "pt"})
    report = validate(Options(deaf, tmp_path / "report"), run_engine=engines)
    assert report.verdict == "proves nothing"
    assert "the codes do not depend on the prompt, so equal codes would show nothing" in report.summary()


def test_a_run_without_a_tail_proves_nothing(spoken: Report) -> None:
    unchunked = [replace(comparison, chunked=comparison.unchunked) for comparison in spoken.comparisons]
    report = replace(spoken, comparisons=unchunked)
    assert report.verdict == "proves nothing"
    assert "prompt 1: no one-token prefill tail was observed" in report.summary()


def test_audio_that_differs_is_a_difference(spoken: Report) -> None:
    first = spoken.comparisons[0]
    for audio, fault in (
        (first.chunked_speech.audio + np.float32(2 * AUDIO_TOLERANCE), "the audio differs by 0.002, more than 0.001"),
        (first.chunked_speech.audio[:-1], "the audio has 74879 and 74880 samples"),
        (np.zeros_like(first.chunked_speech.audio), "chunked audio is constant or silent"),
        (np.full_like(first.chunked_speech.audio, np.nan), "chunked audio is not finite"),
    ):
        changed = replace(first, chunked_speech=replace(first.chunked_speech, audio=audio))
        report = replace(spoken, comparisons=[changed])
        assert report.verdict == "different"
        assert f"prompt 1: {fault}" in report.faults


@pytest.mark.parametrize(
    ("prompt_lens", "expected"),
    [
        ([22], {3: [0]}),
        ([22, 29], {7: [0, 1]}),
        ([22, 30], {3: [0], 29: [1]}),
        ([3], {2: [0]}),
        ([10, 22, 30], {3: [0, 1], 29: [2]}),
    ],
)
def test_budgets_leave_a_tail_of_every_prompt(prompt_lens: list[int], expected: dict[int, list[int]]) -> None:
    assert budgets(prompt_lens) == expected
    for budget, indices in expected.items():
        assert all(prompt_lens[index] % budget == 1 for index in indices)


def test_budgets_that_leave_no_tail_are_refused() -> None:
    with pytest.raises(BadInputError, match=r"prompt 1 has 22 tokens, .*these budgets leave one: 3, 7, 21"):
        budgets([22], 8)
    with pytest.raises(BadInputError, match="no budget leaves a one-token tail"):
        budgets([2])


def _refusals(model: Path, folder: Path) -> list[tuple[Options, str]]:
    good = Options(model, folder / "report")
    no_model, other, base, mute = (folder / name for name in ("none", "other", "base", "mute"))
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "qwen3_tts", "tts_model_type": "base"}', encoding="utf-8")
    mute.mkdir()
    shutil.copy(model / "config.json", mute)
    file = folder / "file"
    file.touch()
    return [
        (replace(good, model=no_model), "there is no such folder"),
        (replace(good, model=folder), "no Qwen3-TTS checkpoint, it has no config.json"),
        (replace(good, model=other), "no Qwen3-TTS checkpoint, its model_type is 'llama'"),
        (replace(good, model=base), "a CustomVoice checkpoint is needed, its tts_model_type is 'base'"),
        (replace(good, model=mute), "its speech tokenizer is missing: no speech_tokenizer/config.json"),
        (replace(good, speaker="nobody"), "--speaker nobody: the checkpoint has ryan, vivian"),
        (replace(good, language="latin"), "--language latin: the checkpoint has chinese, english"),
        (replace(good, texts=(" ",)), "--text: the text is empty"),
        (replace(good, max_tokens=1), "--max-tokens 1: at least 2 are needed for one frame"),
        (replace(good, output=file), f"--output {file}: File exists"),
    ]


def test_what_cannot_run_is_refused_before_an_engine_starts(model: Path, tmp_path: Path) -> None:
    def no_engine(*_: object) -> EngineRun:
        raise AssertionError

    for options, message in _refusals(model, tmp_path):
        with pytest.raises(BadInputError, match=re.escape(message)):
            validate(options, run_engine=no_engine)


def test_a_full_disk_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5 << 20))
    with pytest.raises(BadInputError, match="no space, 5 MiB free of 64 MiB needed"):
        validate(Options(model, tmp_path))


MARK = "OMNI_NPU_PHASE_TEST"


@pytest.fixture
def left_over(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Asks for processes that this test started, whatever has become of their parents."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)

    def find() -> list[int]:
        found = []
        for process in psutil.process_iter(["status"]):
            with contextlib.suppress(psutil.Error):
                marked = process.environ().get(MARK) == mark and process.pid != os.getpid()
                if marked and process.info["status"] != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    return find


def test_the_command_says_one_line_and_leaves_no_process(tmp_path: Path, left_over: Callable[[], list[int]]) -> None:
    command = [sys.executable, "-m", "omni_npu_phase", "validate", "--budget", "8", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: --budget 8: prompt 1 has 22 tokens, ")
    assert "Traceback" not in done.stderr
    assert left_over() == []


def test_an_engine_that_dies_says_why(model: Path, tmp_path: Path, left_over: Callable[[], list[int]]) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "model.safetensors").write_bytes(b"no tensors")
    spec = EngineSpec("broken", str(broken), "cpu", (Prompt("Hello", "vivian", "english"),), 4, None)
    with pytest.raises(EngineError, match=r"^the broken engine failed: SafetensorError: .+") as caught:
        engine.run(spec)
    assert "\n" not in str(caught.value)
    assert "Traceback" in caught.value.log
    assert left_over() == []


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_a_device_that_is_not_there_is_named(device: engine.Device, model: Path) -> None:
    if getattr(torch, device, None) is not None and getattr(torch, device).is_available():
        pytest.skip(f"there is one: {device}")
    spec = EngineSpec("first", str(model), device, (Prompt("Hello", "vivian", "english"),), 4, None)
    with pytest.raises(EngineError, match=f"RuntimeError: --device {device}: PyTorch finds no such device"):
        engine.run(spec)


def test_an_engine_ends_when_its_parent_is_killed(tmp_path: Path, left_over: Callable[[], list[int]]) -> None:
    command = [sys.executable, "-m", "omni_npu_phase", "validate", "--output", str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(left_over()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    while left_over():
        assert time.monotonic() < deadline
        time.sleep(0.1)
