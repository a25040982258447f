# SPDX-License-Identifier: Apache-2.0
"""The jobs of ``ci/workflows`` are what GitHub and Buildkite read, and call what there is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_jsonschema import main as check
from click.testing import CliRunner

from omni_npu_phase.conformance import pytest_plugin

ROOT = Path(__file__).parents[2]
FILES = {"cpu": "github-workflows", "npu": "github-workflows", "npu-buildkite": "buildkite"}
OPTIONS = re.compile(r"--[a-z][a-z-]+")


def _text(name: str) -> str:
    return (ROOT / "ci" / "workflows" / f"{name}.yml").read_text(encoding="utf-8")


def _refusal(name: str, text: str, folder: Path) -> str:
    """What is wrong with a file, by the schema that the checker carries; empty where nothing is."""
    (folder / "job.yml").write_text(text, encoding="utf-8")
    result = CliRunner().invoke(check, ["--builtin-schema", f"vendor.{FILES[name]}", str(folder / "job.yml")])
    return "" if result.exit_code == 0 else result.output


def test_every_workflow_is_known() -> None:
    assert {path.stem for path in (ROOT / "ci" / "workflows").iterdir()} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_workflow_fits_its_schema(name: str, tmp_path: Path) -> None:
    assert _refusal(name, _text(name), tmp_path) == ""


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("cpu", "runs-on:", "run-on:"),
        ("npu", "    container:\n      image:", "    container:\n      picture:"),
        ("npu", "      - run: npu-smi", "      - runs: npu-smi"),
        ("npu-buildkite", "timeout_in_minutes: 30", "timeout_in_minutes: soon"),
        ("npu-buildkite", "        commands:", "        commands: 1\n        was:"),
    ],
)
def test_a_wrong_workflow_is_refused(name: str, right: str, wrong: str, tmp_path: Path) -> None:
    text = _text(name)
    assert right in text
    assert _refusal(name, text.replace(right, wrong, 1), tmp_path)


def _commands(found: Any) -> Iterator[str]:
    if isinstance(found, dict):
        for key, value in found.items():
            if key in ("run", "commands") and not isinstance(value, dict):
                yield from [value] if isinstance(value, str) else value
            else:
                yield from _commands(value)
    elif isinstance(found, list):
        for value in found:
            yield from _commands(value)


def test_commands_use_options_that_there_are() -> None:
    calls = [shlex.split(command) for name in FILES for command in _commands(yaml.safe_load(_text(name)))]
    kit = {word for call in calls if "omni_npu_phase.conformance" in call for word in call if "--phase-" in word}
    assert len(kit) == 4
    assert kit <= _options(pytest_plugin.__file__)
    scripts = [call for call in calls if any(word.startswith("ci/") for word in call)]
    assert len(scripts) == 3
    for call in scripts:
        (script,) = (word for word in call if word.startswith("ci/"))
        assert {word for word in call if word.startswith("--")} <= _options(ROOT / script)


def _options(file: str | Path) -> set[str]:
    return set(OPTIONS.findall(Path(file).read_text(encoding="utf-8")))
