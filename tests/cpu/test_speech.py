# SPDX-License-Identifier: Apache-2.0
"""``omni-npu-phase validate``: the whole pipeline, and the two runs that it must not believe."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import wave
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from omni_npu_phase.speech import engine, output, picture, tiny_qwen3_tts
from omni_npu_phase.speech.engine import EngineError, EngineRun, EngineSpec
from omni_npu_phase.speech.prompts import Prompt
from omni_npu_phase.speech.report import AUDIO_TOLERANCE, Company, Report
from omni_npu_phase.speech.validate import BadInputError, Options, budgets, validate

from .engines import Engines

pytestmark = pytest.mark.xdist_group("engines")


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_qwen3_tts.cached()


@pytest.mark.usefixtures("spoken")
def test_progress_names_every_step_of_every_engine(told: list[str]) -> None:
    steps = ["importing vLLM-Omni", "starting", "ready"]
    assert told == [
        *(f"unchunked engine, {step}" for step in [*steps, *(f"request {index} of 3" for index in (1, 2, 3))]),
        *(f"chunked (7 tokens) engine, {step}" for step in [*steps, "request 1 of 2", "request 2 of 2"]),
    ]


def test_the_runner_of_each_engine_is_on_record(spoken: Report, speech_folder: Path) -> None:
    recorded = json.loads((speech_folder / "report.json").read_text(encoding="utf-8"))["runtime"]
    assert list(recorded["runners"]) == ["unchunked", "chunked (7 tokens)"]
    for (runner,) in recorded["runners"].values():
        assert (runner["mixin"], runner["mode"]) == ("PhaseRoutingMixin", "strict")
        assert runner["classes"][0] == "omni_npu_phase.platform.runner.CpuARModelRunner"
        released = runner["classes"].index("vllm_omni.worker.gpu_model_runner.OmniGPUModelRunner")
        assert runner["classes"].index("omni_npu_phase.step.v1.PhaseRoutingMixin") < released
        assert runner["batch_invariant"] is False
    assert recorded["VLLM_BATCH_INVARIANT"].startswith("0: ")
    for comparison in spoken.comparisons:
        for _, request in comparison.runs:
            assert {row.called_by for row in request.rows} == {"omni_npu_phase"}


def test_an_engine_without_the_mixin_proves_nothing(spoken: Report) -> None:
    (runner,) = spoken.runners["unchunked"]
    for other, reason in (
        (replace(runner, mixin=None), "ran omni_npu_phase.platform.runner.CpuARModelRunner without the mixin"),
        (replace(runner, mode="off"), "ran omni_npu_phase.platform.runner.CpuARModelRunner in mode off"),
    ):
        report = replace(spoken, runners={**spoken.runners, "unchunked": [other]})
        assert report.reasons == [f"the unchunked engine {reason}"]
        assert report.verdict == "proves nothing"
    report = replace(spoken, runners={**spoken.runners, "unchunked": []})
    assert report.unproven == ["no runner of the unchunked engine was observed"]


def test_hooks_that_others_called_prove_nothing(spoken: Report) -> None:
    first = spoken.comparisons[0]
    rows = [replace(row, called_by="vllm_omni") for row in first.chunked.rows]
    report = replace(spoken, comparisons=[replace(first, chunked=replace(first.chunked, rows=rows))])
    assert report.unproven == ["prompt 1: chunked: the talker's hooks were called by vllm_omni, not by the mixin"]


def test_a_baseline_that_was_chunked_proves_nothing(spoken: Report) -> None:
    first = spoken.comparisons[0]
    report = replace(spoken, comparisons=[replace(first, unchunked=first.chunked)])
    assert report.verdict == "proves nothing"
    assert report.reasons == ["prompt 1: the unchunked run read 7 + 7 + 7 + 1 tokens, not the prompt's 22 in one span"]
    audio = report.as_dict()["audio"]
    assert (report.as_dict()["codes_equal"], audio["equal"]) == (None, None)


def test_every_row_of_a_prompt_must_stay_as_it_is(spoken: Report) -> None:
    first = spoken.comparisons[0]
    for kind, request, step, row, clause in (
        ("chunked", first.chunked, 1, "the prompt row C=7 S=7", "R9"),
        ("chunked", first.chunked, 3, "the one-token tail", "T2"),
        ("unchunked", first.unchunked, 0, "the prompt row C=0 S=22", "R9"),
    ):
        for change, fault in (
            ({"unchanged": False}, f"the embedding of {row} did not reach the forward pass unchanged ({clause})"),
            ({"seen_by_mtp": True}, f"MTP was given {row} (T2)"),
        ):
            rows = [replace(each, **change) if each is request.rows[step] else each for each in request.rows]
            changed = replace(first, **{kind: replace(request, rows=rows)})  # type: ignore[arg-type]
            number = request.rows[step].step
            assert list(changed.faults()) == [f"{kind}, step {number}: {fault}"]


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


def test_the_report_has_what_was_promised(spoken: Report, speech_folder: Path) -> None:
    report = json.loads((speech_folder / "report.json").read_text(encoding="utf-8"))
    assert report["verdict"] == "equal"
    assert report["codes_equal"] is True
    assert report["tails_observed"] is True
    assert report["first_difference"] is None
    assert report["frames"] == 78
    assert report["audio"]["tolerance"] == AUDIO_TOLERANCE
    assert report["audio"]["equal"] is True
    assert report["audio"]["samples"] == [39 * tiny_qwen3_tts.SAMPLES_PER_FRAME] * 2
    assert report["runtime"]["packages"]["vllm-omni"]
    assert all(seconds > 0 for seconds in report["timings"]["engines"]["unchunked"]["first_audio_seconds"])
    assert (speech_folder / "speech.png").read_bytes().startswith(b"\x89PNG")
    markdown = (speech_folder / "report.md").read_text(encoding="utf-8")
    assert "| Hello world | 22 | 7 | (22, 21, 1) | 39 | equal |" in markdown
    assert (
        "| chunked (7 tokens) | omni_npu_phase.platform.runner.CpuARModelRunner | PhaseRoutingMixin | strict | off |"
        in markdown
    )
    assert not re.search(r"[{\[]'", markdown)
    with wave.open(str(speech_folder / "prompt-1-chunked.wav")) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32767
        assert file.getframerate() == tiny_qwen3_tts.SAMPLE_RATE
    assert np.abs(samples - spoken.comparisons[0].chunked_speech.audio).max() < 1e-4


def test_audio_of_the_tiny_checkpoint_is_heard(spoken: Report) -> None:
    for comparison in spoken.comparisons:
        audio = comparison.unchunked_speech.audio
        assert np.isfinite(audio).all()
        assert 0.05 < audio.std() < 0.3
        assert np.abs(audio).max() < 1


def test_codes_must_be_the_same_among_others(spoken: Report) -> None:
    """Two prompts that share their steps; a frame that the other one got is seen, and so is a batch of one."""
    alone = [comparison.unchunked for comparison in spoken.comparisons]
    among = [
        replace(request, rows=[replace(row, step=step) for step, row in enumerate(request.rows)]) for request in alone
    ]
    report = replace(spoken, company=Company(1, list(zip(alone, among, strict=True))))
    assert (report.verdict, report.as_dict()["company"]) == ("equal", {"others": 1, "codes_equal": True})
    first, second = among
    swapped = [
        replace(one, codes=other.codes) if one.step == 5 else one
        for one, other in zip(first.rows, second.rows, strict=False)
    ]
    wrong = Company(1, [(alone[0], replace(first, rows=swapped)), (alone[1], second)])
    assert replace(spoken, company=wrong).faults == [
        "prompt 1: among 1 other the codes differ from frame 4 on (R3, T5)"
    ]
    apart = replace(second, rows=[replace(row, step=row.step + 99) for row in second.rows])
    report = replace(spoken, company=Company(1, [(alone[0], first), (alone[1], apart)]))
    assert report.unproven == ["no two prompts were decoded in one step"]


# The first prompt's tail is taken for decode, as all spans of one token are; a row of the second prompt is altered.
BROKEN = """
from dataclasses import replace
from omni_npu_phase.step import v1 as mixin

def install():
    planned, route = mixin.plan_step, mixin.route
    def by_span(*arguments, **keywords):
        plan = planned(*arguments, **keywords)
        one = [span == 1 for span in plan.spans]
        return replace(plan, prefill=[not alone for alone in one], eligible=one)
    def altered(plan, port):
        route(plan, port)
        if (plan.prompt_lens[0], plan.num_computed[0]) == (29, 7):
            port.embeds[plan.offsets[0]] += 1
    mixin.plan_step, mixin.route = by_span, altered
"""


@pytest.fixture(scope="module")
def broken(engines: Engines, spoken: Report, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is written of engines whose processes load a plugin that breaks the runner."""
    folder, output_folder = tmp_path_factory.mktemp("plugin"), tmp_path_factory.mktemp("broken")
    (folder / "broken_runner.py").write_text(BROKEN, encoding="utf-8")
    info = folder / "broken_runner-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-runner\nVersion: 0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nbroken = broken_runner:install\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
        report = validate(Options(tiny_qwen3_tts.cached(), output_folder), run_engine=engines)
    assert report.verdict == "different"
    written: dict[str, Any] = json.loads((output_folder / "report.json").read_text(encoding="utf-8"))
    return written


def test_a_guard_that_asks_for_the_span_is_heard(broken: dict[str, Any]) -> None:
    assert broken["codes_equal"] is False
    assert broken["tails_observed"] is True
    difference = broken["first_difference"]
    assert (difference["prompt"], difference["frame"]) == (1, 0)
    assert any(row.startswith("> step 3: P=22 C=21 S=1 tail") and "prefill=False" in row for row in difference["rows"])
    assert "prompt 1: chunked, step 3: MTP was given the one-token tail (T2)" in broken["reasons"]
    assert "prompt 1: the codes differ" in broken["reasons"]


def test_a_prompt_row_that_a_runner_alters_is_seen(broken: dict[str, Any]) -> None:
    altered = [reason for reason in broken["reasons"] if "(R9)" in reason]
    fault = r"the embedding of the prompt row C=7 S=7 did not reach the forward pass unchanged \(R9\)"
    assert len(altered) == 1
    assert re.fullmatch(rf"prompt 2: chunked, step \d+: {fault}", altered[0])


def test_codes_that_ignore_the_prompt_prove_nothing(model: Path, engines: Engines, tmp_path: Path) -> None:
    def deaf(spec: EngineSpec, advance: Callable[[str], None], accept: Callable[[list[int]], None]) -> EngineRun:
        run = engines(spec, advance, accept)
        ranks = [[replace(row, codes=row.codes and [7] * len(row.codes)) for row in rank] for rank in run.ranks]
        return replace(run, ranks=ranks)

    report = validate(Options(model, tmp_path / "report"), run_engine=deaf)
    assert report.verdict == "proves nothing"
    assert "the codes do not depend on the prompt, so equal codes would show nothing" in report.summary()
    written = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    assert (written["codes_equal"], written["audio"]["equal"]) == (None, None)
    assert set(written["files"].values()) == {
        *(f"prompt-{index}-{kind}.wav" for index in (1, 2) for kind in ("chunked", "unchunked")),
        "speech.png",
    }
    assert all((tmp_path / "report" / name).stat().st_size > 1000 for name in written["files"].values())


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


@pytest.mark.parametrize("run", ["chunked", "unchunked"])
def test_a_chunk_that_code2wav_was_sent_twice_is_named(run: str, spoken: Report) -> None:
    first, frame = spoken.comparisons[0], tiny_qwen3_tts.SAMPLES_PER_FRAME
    speech = first.chunked_speech
    twice = np.concatenate([speech.audio[: 38 * frame], speech.audio[26 * frame :]])

    def heard(audio: Any, **more: Any) -> Report:
        changed = replace(first, **{f"{run}_speech": replace(speech, audio=audio)}, **more)
        return replace(spoken, comparisons=[changed])

    report = heard(twice)
    assert report.verdict == "equal"
    assert f"- prompt 1: the {run} audio says frames 27 to 38 twice" in report.summary()
    assert report.as_dict()["notes"] == report.notes
    # What else is longer, or is not the other run's audio, is a difference as before.
    other = twice.copy()
    other[40 * frame] += np.float32(2 * AUDIO_TOLERANCE)
    codes = replace(first.chunked, rows=first.chunked.rows[:-1])
    for wrong in (heard(other), heard(twice[:-1]), heard(twice[frame:]), heard(twice, chunked=codes)):
        assert (wrong.verdict, wrong.notes) == ("different", [])


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
    custom_voice: dict[str, object] = {"model_type": "qwen3_tts", "tts_model_type": "custom_voice"}
    configurations = {
        "no-json": "{",
        "a-list": "[]",
        "no-talker": json.dumps(custom_voice),
        "no-voice": json.dumps({**custom_voice, "talker_config": {"spk_id": {}}}),
        "no-language": json.dumps({**custom_voice, "talker_config": {"spk_id": {"a": 1}}}),
    }
    for name, text in configurations.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(text, encoding="utf-8")
    (folder / "no-text" / "config.json").mkdir(parents=True)
    foreign = folder / "foreign"
    foreign.mkdir()
    (foreign / "report.json").write_text('{"schema": "other/1"}', encoding="utf-8")
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
        (replace(good, budget=1), "--budget 1: at least 2 tokens a step are needed, so that a one-token tail"),
        (replace(good, budget=0), "--budget 0: at least 2 tokens a step are needed"),
        (replace(good, output=file), f"--output {file}: File exists"),
        (replace(good, output=file / "below"), f"--output {file / 'below'}: Not a directory"),
        (replace(good, output=foreign), "the report.json there is not of this command; it would be overwritten"),
        (replace(good, model=folder / ("x" * 300)), ": File name too long"),
        (replace(good, model=file), "it is a file, not a folder"),
        (replace(good, model=folder / "no-json"), "config.json cannot be read: Expecting property name"),
        (replace(good, model=folder / "no-text"), "config.json cannot be read: [Errno 21] Is a directory"),
        (replace(good, model=folder / "a-list"), "no Qwen3-TTS checkpoint, its model_type is None"),
        (replace(good, model=folder / "no-talker"), "its config.json has no talker_config"),
        (replace(good, model=folder / "no-voice"), "its talker_config names nothing under spk_id"),
        (replace(good, model=folder / "no-language"), "its talker_config names nothing under codec_language_id"),
        (replace(good, texts=("\udce9",)), "--text: the text is not UTF-8"),
        (replace(good, timeout=0), "--timeout 0: a number of seconds above 0 is needed"),
    ]


def test_what_cannot_run_is_refused_before_an_engine_starts(model: Path, tmp_path: Path) -> None:
    def no_engine(*_: object) -> EngineRun:
        raise AssertionError

    for options, message in _refusals(model, tmp_path):
        with pytest.raises(BadInputError, match=re.escape(message)):
            validate(options, run_engine=no_engine)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("OMNI_NPU_PHASE", "off", "OMNI_NPU_PHASE=off: the engines would run without the mixin"),
        ("OMNI_NPU_PHASE", "maybe", "phase_mode and OMNI_NPU_PHASE take off, on or strict, not 'maybe'"),
        ("VLLM_PLUGINS", "", "VLLM_PLUGINS leaves out omni_npu_phase, omni_npu_phase_observe, omni_npu_phase_cpu"),
        ("VLLM_PLUGINS", "omni_npu_phase_cpu,omni_npu_phase_observe", "VLLM_PLUGINS leaves out omni_npu_phase: "),
    ],
)
def test_an_environment_without_the_mixin_is_refused(
    variable: str, value: str, message: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(BadInputError, match=re.escape(message)):
        validate(Options(model, tmp_path))


@pytest.mark.parametrize(("named", "left"), [(None, {"omni_npu_phase_cpu", "others"}), ("ascend,others", {"others"})])
def test_engines_on_the_cpu_go_without_the_platform_of_vllm_ascend(
    named: str | None, left: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ("ascend", "vllm_ascend"), ("omni_npu_phase_cpu", "omni_npu_phase.platform"), ("others", "others")
    points = [metadata.EntryPoint(name, f"{module}:register", "vllm.platform_plugins") for name, module in made]
    monkeypatch.setattr(engine, "entry_points", lambda *, group: points)
    if named is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", named)
    assert set(engine.environment("cpu")["VLLM_PLUGINS"].split(",")) == left
    assert "VLLM_PLUGINS" not in engine.environment("npu")
    points.pop(0)
    assert "VLLM_PLUGINS" not in engine.environment("cpu")


def test_prompts_longer_than_the_model_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="with a prompt of 29 tokens, more than the model's 32768"):
        validate(Options(model, tmp_path, max_tokens=32740), run_engine=_Lengths([22, 29, 22]))


class _Lengths:
    """Stands for an engine whose prompts have these lengths; it is refused before it would start."""

    def __init__(self, prompt_lens: list[int]) -> None:
        self._prompt_lens = prompt_lens

    def __call__(self, _: EngineSpec, __: object, accept: Callable[[list[int]], None]) -> EngineRun:
        accept(self._prompt_lens)
        raise AssertionError


def _earlier_report(folder: Path) -> None:
    folder.mkdir()
    (folder / "report.json").write_text('{"schema": "omni-npu-phase/validate/1", "verdict": "equal"}', encoding="utf-8")
    for name in ("report.md", "speech.png", "prompt-1-chunked.wav", "prompt-3-unchunked.wav"):
        (folder / name).touch()
    (folder / "notes.txt").touch()


def test_no_earlier_report_survives_a_run_that_fails(model: Path, tmp_path: Path) -> None:
    def failing(*_: object) -> EngineRun:
        raise EngineError("no engine")

    good = Options(model, tmp_path / "report")
    for options, error in ((replace(good, texts=("",)), BadInputError), (good, EngineError)):
        _earlier_report(options.output)
        with pytest.raises(error):
            validate(options, run_engine=failing)
        assert [path.name for path in options.output.iterdir()] == ["notes.txt"]
        shutil.rmtree(options.output)


def test_an_empty_report_of_an_interrupted_run_is_removed(tmp_path: Path) -> None:
    (tmp_path / "report.json").touch()
    output.prepare(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_report_is_whole_or_absent(spoken: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(_: Report, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(picture, "draw", half)
    with pytest.raises(OSError, match="no space left"):
        output.write(spoken, tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".wav"}


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


@pytest.mark.no_cover
def test_the_command_says_one_line_and_leaves_no_process(tmp_path: Path, left_over: Callable[[], list[int]]) -> None:
    command = [sys.executable, "-m", "omni_npu_phase", "validate", "--budget", "8", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "... unchunked engine, importing vLLM-Omni" in done.stderr.splitlines()
    assert done.stderr.splitlines()[-1].startswith("error: --budget 8: prompt 1 has 22 tokens, ")
    assert "Traceback" not in done.stderr
    assert left_over() == []


@pytest.mark.no_cover
def test_an_engine_that_dies_says_why(model: Path, tmp_path: Path, left_over: Callable[[], list[int]]) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "model.safetensors").write_bytes(b"no tensors")
    spec = EngineSpec("broken", str(broken), "cpu", (Prompt("Hello", "vivian", "english"),), 4, None)
    with pytest.raises(EngineError, match=r"^the broken engine failed \(starting\): SafetensorError: .+") as caught:
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


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files; pytest's own are too deep for sockets in them."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)
    monkeypatch.setattr(tempfile, "tempdir", None)


def _left_in(scratch: Path) -> list[Path]:
    """What is left there, but for what torch keeps for later runs."""
    return [path for path in scratch.iterdir() if not path.name.startswith("torchinductor")]


def _wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _hello(model: Path, timeout: float = engine.TIMEOUT) -> EngineSpec:
    return EngineSpec("first", str(model), "cpu", (Prompt("Hello", "vivian", "english"),), 4, None, timeout)


@pytest.mark.no_cover
def test_an_engine_that_takes_too_long_is_ended(
    model: Path, left_over: Callable[[], list[int]], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = engine._said

    def begun(process: subprocess.Popen[bytes], timeout: float) -> Iterator[dict[str, Any]]:
        # The time is for what follows: nobody knows how long this machine takes to start Python.
        yield next(said(process, engine.TIMEOUT))
        yield from said(process, timeout)

    monkeypatch.setattr(engine, "_said", begun)
    message = r"the first engine failed \(importing vLLM-Omni\): it took longer than the timeout of 0.1 s"
    with pytest.raises(EngineError, match=message):
        engine.run(_hello(model, timeout=0.1))
    assert left_over() == []
    assert _left_in(scratch) == []


@pytest.mark.no_cover
def test_a_killed_engine_names_the_signal(model: Path, left_over: Callable[[], list[int]], scratch: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(engine.run, _hello(model))
        _wait_for(left_over)
        os.kill(left_over()[0], signal.SIGKILL)
        with pytest.raises(EngineError, match=r"^the first engine failed .*: it was ended by SIGKILL"):
            run.result()
    assert left_over() == []
    assert _left_in(scratch) == []


@pytest.mark.no_cover
def test_a_killed_stage_names_the_signal(model: Path, left_over: Callable[[], list[int]], scratch: Path) -> None:
    def stages() -> list[psutil.Process]:
        processes = [psutil.Process(number) for number in left_over()]
        return [process for process in processes if "spawn_main" in " ".join(process.cmdline())]

    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(engine.run, _hello(model))
        _wait_for(stages)
        stages()[0].kill()
        with pytest.raises(EngineError, match=r"^the first engine failed \(starting\): Stage.*_stage[01]_.* SIGKILL"):
            run.result()
    assert left_over() == []
    assert _left_in(scratch) == []


def test_no_temporary_folder_is_one_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null")
    with pytest.raises(EngineError, match=r"^the first engine failed: .*Not a directory"):
        engine.run(_hello(model))


@pytest.mark.no_cover
@pytest.mark.parametrize(("number", "processes"), [(signal.SIGINT, 2), (signal.SIGTERM, 4), (signal.SIGKILL, 2)])
def test_a_signal_leaves_nothing(
    number: signal.Signals, processes: int, tmp_path: Path, left_over: Callable[[], list[int]], scratch: Path
) -> None:
    _earlier_report(tmp_path / "report")
    command = [sys.executable, "-m", "omni_npu_phase", "validate", "--output", str(tmp_path / "report")]
    # Tests that a shell runs in the background inherit that SIGINT is ignored.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    # The command, the engine's first process, and with four also those of its stages.
    _wait_for(lambda: len(left_over()) >= processes)
    parent.send_signal(number)
    _, said = parent.communicate(timeout=240)
    if number is signal.SIGKILL:
        # The engine sees by itself that nobody waits for it.
        _wait_for(lambda: not left_over())
    else:
        assert parent.returncode == 2
        assert said.splitlines()[-1] == f"error: ended by {number.name}, without a report"
    assert left_over() == []
    assert _left_in(scratch) == []
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["notes.txt"]
