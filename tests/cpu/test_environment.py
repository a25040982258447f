# SPDX-License-Identifier: Apache-2.0
"""``ci/environment.py`` removes only what it made itself."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "ci" / "environment.py"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, which would make ``tmp_path / "venv"``; it stops where it would install the first package."""
    found = importlib.util.spec_from_file_location("environment", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)

    def no_packages(*_: object) -> None:
        raise module.PreparationError("it would go on")

    monkeypatch.setattr(module, "_pip", no_packages)
    monkeypatch.setattr(module, "_step", no_packages)
    monkeypatch.setenv("OMNI_NPU_PHASE_VENV", str(tmp_path / "venv"))
    return module


def _said(environment: ModuleType, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        environment.ensure()
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()


def _of_another_checkout(folder: Path) -> None:
    """An environment as this script makes it, for another path."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch(mode=0o755)
    (folder / "omni-npu-phase.json").write_text(json.dumps({"environment": "x", "checkout": "y"}), encoding="utf-8")


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _linked(venv: Path) -> str:
    _of_another_checkout(venv.parent / "other")
    venv.symlink_to(venv.parent / "other")
    return "is a link"


def _linked_to_nothing(venv: Path) -> str:
    venv.symlink_to(venv.parent / "nowhere")
    return "is a link"


def _without_a_stamp(venv: Path) -> str:
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").write_text("version = 3.11.7\n", encoding="utf-8")
    return "was not made by this script"


def _a_file(venv: Path) -> str:
    venv.write_text("notes", encoding="utf-8")
    return "was not made by this script"


@pytest.mark.parametrize("place", [_linked, _linked_to_nothing, _without_a_stamp, _a_file])
def test_what_others_made_is_left_alone(
    place: Callable[[Path], str], environment: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    venv = tmp_path / "venv"
    reason = place(venv)
    before = _contents(tmp_path)
    (line,) = _said(environment, capsys)
    assert line.startswith(f"environment: failed: {venv} {reason}, so it is left alone: ")
    assert {**before, "venv.lock": b""} == _contents(tmp_path)


@pytest.mark.parametrize("made", [_of_another_checkout, Path.mkdir], ids=["its own", "an empty folder"])
def test_its_own_is_made_anew(
    made: Callable[[Path], None], environment: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / "venv")
    assert _said(environment, capsys)[-1] == "environment: failed: it would go on"
    assert list(_contents(tmp_path / "venv")) == ["omni-npu-phase.json"]


def test_the_one_that_runs_the_script_is_left_alone(
    environment: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _of_another_checkout(tmp_path / "venv")
    before = _contents(tmp_path / "venv")
    monkeypatch.setattr(environment.sys, "prefix", str(tmp_path / "venv"))
    assert "is to be made anew and runs this script" in _said(environment, capsys)[-1]
    assert _contents(tmp_path / "venv") == before


@pytest.mark.parametrize("link", ["overlays", "overlays/0.24"])
def test_a_linked_overlay_is_left_alone(
    link: str, environment: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, path = tmp_path / "other" / link, tmp_path / "venv" / link
    (other / "0.24").mkdir(parents=True)
    (other / "0.24" / "package.py").touch()
    path.parent.mkdir(parents=True)
    path.symlink_to(other)
    before = _contents(tmp_path / "other")
    with pytest.raises(environment.PreparationError, match=f"{path} is a link, so it is left alone"):
        environment._make_overlay(tmp_path / "venv", "0.24", "overlay 0.24")
    assert _contents(tmp_path / "other") == before
