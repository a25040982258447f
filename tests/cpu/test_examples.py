# SPDX-License-Identifier: Apache-2.0
"""The examples do what their READMEs say, in their own folders."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cpu.kit_sessions import run_kit

pytest_plugins = ["pytester"]
EXAMPLES = Path(__file__).parents[2] / "examples"


def _commands(name: str) -> list[list[str]]:
    text = (EXAMPLES / name / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in re.findall(r"^    (pytest .*)$", text, re.MULTILINE)]


@pytest.mark.parametrize("name", ["out_of_tree_model", "out_of_tree_runner"])
def test_commands_of_the_readme(
    name: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, released: type
) -> None:
    for path in (EXAMPLES / name).iterdir():
        if path.is_file():
            (pytester.path / path.name).write_bytes(path.read_bytes())
    commands = _commands(name)
    assert commands
    for arguments in commands:
        few = ["-k", "tail or mutated or test_expected_failure"] if "--phase-runner" in arguments else []
        result = run_kit(pytester, monkeypatch, *arguments[2:], *few)
        assert result.ret == 0, result.stdout.str()
