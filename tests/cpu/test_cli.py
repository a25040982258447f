# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints where, and how it exits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from omni_npu_phase import __version__
from omni_npu_phase.commands import console
from omni_npu_phase.commands.app import app
from omni_npu_phase.conformance.scenarios import SCENARIOS


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def _verify(*arguments: str) -> Result:
    return _run("verify", "--scenario", "mutated-fields", *arguments)


def test_help_teaches() -> None:
    assert "verify" in _run("--help").stdout
    text = " ".join(_run("verify", "--help").stdout.split())
    assert "Exit status" in text
    for option in ("--mode", "--runner", "--scenario", "--tier", "--xfail", "--list", "--format", "--output"):
        assert option in text


def test_version() -> None:
    assert _run("--version").stdout.strip() == __version__


def test_list_runs_nothing() -> None:
    result = _run("verify", "--list")
    assert result.exit_code == 0
    for case in SCENARIOS:
        assert case.id in result.stdout
    as_json = json.loads(_run("verify", "--list", "--format", "json").stdout)
    assert [case["id"] for case in as_json] == [case.id for case in SCENARIOS]
    one = _run("verify", "--list", "--scenario", "tail")
    assert "omni#4382" in one.stdout
    assert "mixed" not in one.stdout


@pytest.mark.parametrize(
    ("mode", "status"), [("released", 1), ("mixin", 0), ("both", 0)], ids=["released", "mixin", "both"]
)
def test_exit_status(mode: str, status: int) -> None:
    result = _verify("--mode", mode)
    assert result.exit_code == status
    assert ("As released: " in result.stdout) is (mode != "mixin")
    assert ("With PhaseRoutingMixin: " in result.stdout) is (mode != "released")


def test_tier() -> None:
    document = json.loads(_verify("--mode", "released", "--tier", "extended", "--format", "json").stdout)
    assert {clause["tier"] for clause in document["clauses"]} == {"extended"}


def test_formats() -> None:
    as_json = _verify("--format", "json")
    assert json.loads(as_json.stdout)["summary"]["mixin"]["fail"] == 0
    assert "loading" in as_json.stderr
    assert _verify("--format", "markdown").stdout.startswith("# Phase contract")


def test_further_files(tmp_path: Path) -> None:
    files = [tmp_path / f"report.{suffix}" for suffix in ("json", "md")]
    result = _verify(*(argument for file in files for argument in ("--also", str(file))))
    assert result.exit_code == 0
    assert "With PhaseRoutingMixin" in result.stdout
    as_json, as_markdown = (file.read_text(encoding="utf-8") for file in files)
    assert json.loads(as_json)["summary"]["mixin"]["fail"] == 0
    assert as_markdown.startswith("# Phase contract")


@pytest.mark.parametrize("name", ["table", "json"])
def test_output_file(name: str, tmp_path: Path) -> None:
    target = tmp_path / "report"
    result = _verify("--format", name, "--output", str(target))
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "M9" in target.read_text(encoding="utf-8")


def test_expected_failures(tmp_path: Path) -> None:
    known = tmp_path / "known"
    known.write_text("\ufeff# known\nM9: hooks may write the fields, omni#1 # seen\n", encoding="utf-8")
    result = _verify("--mode", "released", "--xfail", str(known))
    assert result.exit_code == 0
    assert "xfail" in result.stdout
    assert "omni#1" in result.stdout
    assert "seen" not in result.stdout.partition("hooks may write")[2].partition("With")[0]


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("--scenario", "nope"), "no scenario nope; see: omni-npu-phase verify --list"),
        (("--runner", "nope"), "a runner is gpu-v1, gpu-v2, npu-v1 or MODULE:CLASS"),
        (("--runner", "os:path"), "os:path is no class"),
        (("--xfail", "no/such/file"), "--xfail no/such/file: there is no such file"),
        (("--xfail", "."), "--xfail .: Is a directory"),
        (("--output", "no/such/folder/report"), "there is no folder no/such/folder"),
        (("--also", "no/such/folder/report.md"), "--also no/such/folder/report.md: there is no folder no/such/folder"),
        (("--also", "report.pdf"), "--also report.pdf: the suffix must be one of .json, .md"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], advice: str) -> None:
    result = _verify(*arguments)
    assert result.exit_code == 2
    assert advice in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("class Runner(", "cannot import own_runner: SyntaxError: "),
        ("raise RuntimeError('no licence')", "cannot import own_runner: RuntimeError: no licence"),
        ("raise ImportError('no\\n driver')", "cannot import own_runner: no driver."),
        ("import sys; sys.exit(0)", "cannot import own_runner: SystemExit: 0"),
        ("import os\nos.no_such_name", "cannot import own_runner: AttributeError: module 'os' has no"),
        ("", "own_runner has no Runner"),
        ("class Runner: pass", "own_runner:Runner is no V1 model runner of vLLM-Omni: it has no _preprocess"),
    ],
)
def test_runner_modules_of_the_current_folder(
    text: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_runner.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_runner", raising=False)
    result = _verify("--runner", "own_runner:Runner")
    sys.modules.pop("own_runner", None)
    assert result.exit_code == 2
    assert advice in result.stderr
    assert result.stdout == ""


def test_a_runner_that_has_the_mixin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mixed_runner.py").write_text(
        "from omni_npu_phase import PhaseRoutingMixin\n"
        "from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner\n"
        "class Runner(PhaseRoutingMixin, GPUARModelRunner): pass\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert _verify("--runner", "mixed_runner:Runner", "--mode", "mixin").exit_code == 0
    result = _verify("--runner", "mixed_runner:Runner", "--mode", "released")
    assert result.exit_code == 2
    assert "mixed_runner:Runner has PhaseRoutingMixin: judge it with --mode mixin" in result.stderr


def test_nothing_judged_is_no_success() -> None:
    result = _run("verify", "--scenario", "no-hooks", "--mode", "released", "--tier", "extended")
    assert result.exit_code == 2
    assert "nothing was judged" in result.stderr


def test_bad_option() -> None:
    assert _run("verify", "--format", "pdf").exit_code == 2


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    result = _verify("--output", str(tmp_path))
    assert result.exit_code == 2
    assert "this is a folder" in result.stderr


@pytest.mark.parametrize("error", [OSError("no space"), ValueError("a picture that cannot be drawn")])
def test_a_file_is_whole_or_as_it_was(error: Exception, tmp_path: Path) -> None:
    target = tmp_path / "trace.json"

    def half(path: Path) -> None:
        path.write_text("half", encoding="utf-8")
        raise error

    console.write_whole(target, lambda path: path.write_text("whole", encoding="utf-8"))
    with pytest.raises(typer.Exit if isinstance(error, OSError) else ValueError):
        console.write_whole(target, half)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    assert target.read_text(encoding="utf-8") == "whole"


@pytest.mark.parametrize("report_format", ["table", "json"])
def test_standard_output_that_is_full(report_format: str) -> None:
    command = [sys.executable, "-m", "omni_npu_phase", "verify", "--list", "--format", report_format]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 2
    assert "standard output: No space left on device" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_command_lines_libraries(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from omni_npu_phase.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install rich typer" in done.stderr


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "omni_npu_phase", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == __version__
