# SPDX-License-Identifier: Apache-2.0
"""tests/cuda where there is no CUDA device: on the stand-in they run and hold, without it they say so in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cuda.device import count
from tests.fake_cuda import Counts

ROOT = Path(__file__).parents[2]
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")


def _run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=settings)


def _pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    return _run(sys.executable, "-m", "pytest", "tests/cuda", "-q", "-p", "no:cacheprovider", *arguments)


def test_they_run_on_the_stand_in() -> None:
    done = _pytest("--device", "cpu", "-rs")
    assert done.returncode == 0, done.stdout[-4000:]
    # Nothing but what says that it needs hardware is left out.
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("only a CUDA device can show it" in line for line in skipped)
    assert len(skipped) == 1
    assert " passed" in done.stdout.splitlines()[-1]


@no_cuda
def test_without_a_device_they_are_skipped_with_one_line() -> None:
    done = _pytest()
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-2] == "tests/cuda: no CUDA device here: not run"
    assert "passed" not in done.stdout


@no_cuda
def test_a_device_that_was_asked_for_is_missed() -> None:
    done = _pytest("--device", "cuda")
    assert done.returncode == 2
    assert "--device cuda: PyTorch" in done.stderr + done.stdout


@no_cuda
def test_the_script_says_in_one_line_why_it_cannot_run() -> None:
    for environment, reason in (
        ({}, "nothing to run on: PyTorch"),
        ({"PYTHON": "/no/such/python"}, "PYTHON=/no/such/python: No such file or directory"),
    ):
        done = _run(sys.executable, str(ROOT / "ci" / "test-cuda"), **environment)
        assert done.returncode == 2
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert reason in line


def test_a_profile_is_added_up() -> None:
    """Launches and waits of the block only; copies wherever the device comes to them."""

    def event(name: str, where: str, start: int, end: int) -> Any:
        return SimpleNamespace(
            name=name, device_type=SimpleNamespace(name=where), time_range=SimpleNamespace(start=start, end=end)
        )

    events = [
        event("cudaDeviceSynchronize", "CPU", 1, 2),
        event("counted", "CPU", 10, 50),
        event("cudaMemcpyAsync", "CPU", 11, 12),
        event("cudaLaunchKernel", "CPU", 13, 14),
        event("cudaLaunchKernelExC", "CPU", 15, 16),
        event("cudaEventSynchronize", "CPU", 20, 40),
        event("cudaStreamSynchronize", "CPU", 41, 42),
        event("cudaDeviceSynchronize", "CPU", 60, 80),
        event("counted", "CUDA", 15, 75),
        event("Memcpy HtoD (Pinned -> Device)", "CUDA", 20, 21),
        event("void at::native::vectorized_elementwise_kernel", "CUDA", 55, 56),
        event("Memcpy DtoH (Device -> Pinned)", "CUDA", 70, 71),
    ]
    counts = Counts()
    count(events, counts)
    assert counts == Counts(to_device=1, to_host=1, waits=2, kernels=2)
