# SPDX-License-Identifier: Apache-2.0
"""A guest in someone's image: what importing loads, and what installing needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "vllm", "vllm_omni", "torch_npu", "vllm_ascend", "typer", "rich", "transformers")


def _python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LIGHT = (
    "omni_npu_phase",
    "omni_npu_phase.contract",
    "omni_npu_phase.step.plan",
    "omni_npu_phase.plugin",
    "omni_npu_phase.doctor",
    "omni_npu_phase.lint.checkpoint",
    "omni_npu_phase.lint.files",
    "omni_npu_phase.tracing",
    "omni_npu_phase.tracing.observer",
    "omni_npu_phase.tracing.check",
    "omni_npu_phase.conformance.scenarios",
    "omni_npu_phase.conformance.report",
    "omni_npu_phase.conformance.verify",
    "omni_npu_phase.conformance.pytest_plugin",
    "omni_npu_phase.conformance.kit",
    "omni_npu_phase.conformance.test_clauses",
    "omni_npu_phase.conformance.test_model",
)


def test_nothing_heavy_is_loaded() -> None:
    """By none of them, so by all of them: one process is enough, which ends at the first that loads something."""
    code = f"""
import importlib
import sys

for module in {LIGHT!r}:
    importlib.import_module(module)
    loaded = [name for name in {HEAVY!r} if name in sys.modules]
    if loaded:
        sys.exit(f"{{module}} loads {{loaded}}")
"""
    _python(code)


def test_the_contract_needs_the_standard_library_alone() -> None:
    code = (
        "import sys; before = set(sys.modules); import omni_npu_phase.contract;"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names);"
        "print(sorted(new))"
    )
    assert _python(code).strip() == "['omni_npu_phase']"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_numpy_is_the_only_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [requirement.partition(">")[0] for requirement in project["dependencies"]] == ["numpy"]


@pytest.mark.no_cover
def test_the_base_package_is_enough_for_the_mixin(tmp_path: Path) -> None:
    """Installed without dependencies, and without the command line's libraries, the mixin runs a step."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "omni_npu_phase", source / "omni_npu_phase", ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "--target", str(target), str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    code = f"""
import sys
sys.path.insert(0, {str(target)!r})
sys.modules["typer"] = sys.modules["rich"] = None
import omni_npu_phase, torch
assert omni_npu_phase.__file__.startswith({str(target)!r}), omni_npu_phase.__file__
from omni_npu_phase.conformance import drive, judge, scenarios
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner

class Runner(omni_npu_phase.PhaseRoutingMixin, GPUARModelRunner):
    pass

run = drive.run_scenario(Runner, scenarios.BY_ID["mixed"], scenarios.Variant("batched", True), torch.device("cpu"))
judgements = judge.judge(run)
assert judgements and all(judgement.holds for judgement in judgements), run.error
print("held", len(judgements))
"""
    assert "held" in _python(code, VLLM_LOGGING_LEVEL="ERROR", PYTHONPATH="")
