# SPDX-License-Identifier: Apache-2.0
"""``ci/test`` and the coverage it asks for: what must fail it does, and nothing else goes uncounted."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def _coverage(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """coverage.py in ``folder`` with this project's configuration, of a package ``counted``."""
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8").replace('["omni_npu_phase"]', '["counted"]')
    (folder / "pyproject.toml").write_text(settings, encoding="utf-8")
    # The run that this test is part of may be measured itself.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "coverage", *arguments],
        cwd=folder,
        env={**variables, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("lines", "status"), [(896, 2), (900, 0)])
def test_too_little_coverage_fails(lines: int, status: int, tmp_path: Path) -> None:
    """89.6 % is less than 90 %, also where whole numbers are shown."""
    (tmp_path / "counted").mkdir()
    text = "a = 1\n" * (lines - 2) + "def never():\n" + "    a = 1\n" * (1000 - lines) + "b = 1\n"
    (tmp_path / "counted" / "__init__.py").write_text(text, encoding="utf-8")
    assert _coverage(tmp_path, "run", "-m", "counted.__init__").returncode == 0
    assert _coverage(tmp_path, "combine").returncode == 0
    report = _coverage(tmp_path, "report")
    assert report.returncode == status, report.stdout
    assert f"TOTAL{lines / 10:.1f}%" in report.stdout.replace(" ", "").replace(f"1000{1000 - lines}00", "")


_TESTS = """
import os, subprocess, sys
import pytest
import counted

@pytest.mark.no_cover
def test_that_fails():
    counted.rests()
    subprocess.run([sys.executable, "-c", "import counted; counted.rests_elsewhere()"], check=True)
    raise AssertionError

def test_after_it():
    counted.counts()
    subprocess.run([sys.executable, "-c", "import counted, os; counted.elsewhere(); os._exit(0)"], check=True)
"""
_COUNTED = """
def rests():
    a = 1

def counts():
    a = 1

def elsewhere():
    a = 1

def rests_elsewhere():
    a = 1
"""


@pytest.mark.parametrize("workers", [[], ["-p", "xdist", "-n", "1"]], ids=["one process", "workers"])
def test_coverage_goes_on_after_a_marked_test_that_fails(workers: list[str], tmp_path: Path) -> None:
    (tmp_path / "counted").mkdir()
    (tmp_path / "counted" / "__init__.py").write_text(_COUNTED, encoding="utf-8")
    (tmp_path / "test_counted.py").write_text(_TESTS, encoding="utf-8")
    options = ["-p", "tests.conftest", "-p", "xdist", "-p", "no:cacheprovider", "-c", os.devnull]
    done = _coverage(tmp_path, "run", "-m", "pytest", *options, *workers, "test_counted.py")
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert _coverage(tmp_path, "combine").returncode == 0
    (line,) = [line for line in _coverage(tmp_path, "report").stdout.splitlines() if line.startswith("counted")]
    assert line.split()[-2:] == ["3,", "12"], line


def test_tests_of_a_file_share_a_process(request: pytest.FixtureRequest) -> None:
    """pytest-xdist names the group where it knows it. Without groups, each process would make the same engines."""
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@test_gates")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``ci/test``, which runs its stages on loading unless it ends before."""
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    monkeypatch.setattr(sys, "argv", ["ci/test", "--help"])
    loader = importlib.machinery.SourceFileLoader("ci_test", str(ROOT / "ci" / "test"))
    found = importlib.util.spec_from_loader("ci_test", loader)
    assert found is not None
    module = importlib.util.module_from_spec(found)
    with pytest.raises(SystemExit):
        loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["ci/test"])
    ready = SimpleNamespace(ensure=lambda: "python", emulated_variables=lambda *_: {}, ROOT=ROOT)
    monkeypatch.setattr(module, "environment", ready)
    return module


STAGES = ("ruff check", "ruff format", "mypy", "tests/npu", "tests/cpu", "coverage combine", "coverage report")


@pytest.mark.parametrize("failing", [None, *STAGES])
def test_whichever_stage_fails_fails_the_whole(
    failing: str | None, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        ran.append(" ".join(command[2:]))
        return SimpleNamespace(returncode=3 if failing is not None and failing in ran[-1] else 0)

    monkeypatch.setattr(script.subprocess, "run", run)
    assert script.main() == (0 if failing is None else 3)
    assert all(any(stage in command for command in ran) for stage in STAGES)
    took = [line for line in capsys.readouterr().err.splitlines() if line.startswith("-- ")]
    assert len(took) == 6
    assert all(line.endswith(" s") for line in took)
