# SPDX-License-Identifier: Apache-2.0
"""``ci/test-npu`` in an image: its packages stay and come first, and it says why where nothing can be run."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "environment", raising=False)
    monkeypatch.delenv("PYTHON", raising=False)
    loader = importlib.machinery.SourceFileLoader("ci_test_npu", str(ROOT / "ci" / "test-npu"))
    found = importlib.util.spec_from_loader("ci_test_npu", loader)
    assert found is not None
    module = importlib.util.module_from_spec(found)
    loader.exec_module(module)
    return module


def _wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    info = f"{name}-{version}.dist-info"
    required = "".join(f"Requires-Dist: {need}\n" for need in needs)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheelhouse(tmp_path: Path) -> Path:
    """Wheels of a tool, of what it needs, and of a packaging that is newer than this environment's."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    _wheel(folder, "tool_of_tests", "1.0", "need-of-tool", "packaging>=20")
    _wheel(folder, "need_of_tool", "2.0")
    _wheel(folder, "packaging", "99.0")
    return folder


def test_only_what_the_image_lacks_is_installed(
    script: ModuleType, wheelhouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "NEEDED", ("tool_of_tests", "pytest"))
    script.install(sys.executable, wheelhouse, str(tmp_path / "extra"))
    assert {path.stem for path in (tmp_path / "extra").glob("*.py")} == {"tool_of_tests", "need_of_tool"}


def test_a_wheel_that_would_replace_a_package_of_the_image_is_refused(
    script: ModuleType, wheelhouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "NEEDED", ("demanding_tool",))
    _wheel(wheelhouse, "demanding_tool", "1.0", "packaging>=99")
    told = f"would replace the image's packaging {metadata.version('packaging')} by 99.0"
    with pytest.raises(script.UnusableError, match=told):
        script.install(sys.executable, wheelhouse, str(tmp_path / "extra"))
    assert not (tmp_path / "extra").exists()


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("no program", "PYTHON=no-such-python is no program"),
        ("no wheels", "--wheelhouse /nowhere is no folder"),
        ("no pytest", "has no pytest_of_nobody; give a folder of wheels with --wheelhouse"),
        ("no NPU", "no NPU: cannot import torch_npu (No module named 'torch_npu')"),
    ],
)
def test_why_nothing_could_be_run(
    case: str, told: str, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in ``summary.md``, with the versions of the image."""
    arguments = ["--wheelhouse", "/nowhere"] if case == "no wheels" else []
    if case == "no program":
        monkeypatch.setenv("PYTHON", "no-such-python")
    if case == "no pytest":
        monkeypatch.setattr(script, "NEEDED", ("pytest", "pytest_of_nobody"))
    monkeypatch.setattr(sys, "argv", ["ci/test-npu", "--output", str(tmp_path), *arguments])
    assert script.main() == 2
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert told in summary
    assert ("- vllm-omni: " in summary) is (case != "no program")


@pytest.mark.parametrize(
    ("tests", "clauses", "status", "told"),
    [
        (0, 0, 0, ["tests/npu: passed", "every clause holds", "unchanged"]),
        (1, 0, 1, ["tests/npu: FAILED", "every clause holds"]),
        (0, 1, 1, ["tests/npu: passed", "FAILED, see verify.md"]),
        (0, 2, 2, ["tests/npu: passed", "COULD NOT BE JUDGED"]),
        (2, 0, 2, ["could not run: pytest tests/npu ended with status 2"]),
    ],
)
def test_what_came_out(
    tests: int,
    clauses: int,
    status: int,
    told: list[str],
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(script, "run", lambda command, *_: tests if "pytest" in command else clauses)
    monkeypatch.setattr(script, "seen", lambda *_: "1 x Ascend910B3")
    monkeypatch.setattr(script, "missing", lambda *_: [])
    monkeypatch.setattr(script, "versions", lambda *_: {"vllm-ascend": "0.30.0rc2"})
    monkeypatch.setattr(sys, "argv", ["ci/test-npu", "--output", str(tmp_path)])
    assert script.main() == status
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "- vllm-ascend: 0.30.0rc2" in summary
    assert ("- devices: 1 x Ascend910B3" in summary) is (tests != 2)
    for part in told:
        assert part in summary
