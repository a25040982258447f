# SPDX-License-Identifier: Apache-2.0
"""The device these tests run on: an Ascend NPU, or the emulated one, in a process of their own.

``--device npu`` and ``--device emulated`` ask for one, and a missing one is then an error. Without the option the tests
run where torch_npu finds an NPU, and are skipped with one line elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest

from omni_npu_phase.conformance import verify

UNUSABLE = 2
_DEVICE = pytest.StashKey[str]()
_NO_DEVICE = "no NPU here; --device emulated runs these without one"
_NOT_SHOWN = "not shown by emulation"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("npu", "emulated"), help="where the tests of tests/npu run")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hardware: only an Ascend NPU can show it")
    asked = config.getoption("--device")
    try:
        verify.prepare_device(asked or "npu")
    except verify.NoRuntimeError as error:
        if asked:
            pytest.exit(f"--device {asked}: {error}", returncode=UNUSABLE)
        return
    config.stash[_DEVICE] = asked or "npu"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    device = config.stash.get(_DEVICE, None)
    for item in items:
        if device is None:
            item.add_marker(pytest.mark.skip(reason=_NO_DEVICE))
        elif device == "emulated" and item.get_closest_marker("hardware"):
            item.add_marker(pytest.mark.skip(reason=_NOT_SHOWN))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line each what was skipped and why; pytest itself counts only."""
    skipped = terminalreporter.stats.get("skipped", [])
    if terminalreporter.config.stash.get(_DEVICE, None) is None:
        terminalreporter.write_line(f"tests/npu: {_NO_DEVICE}")
    for report in skipped:
        if isinstance(report.longrepr, tuple) and report.longrepr[2].endswith(_NOT_SHOWN):
            terminalreporter.write_line(f"{_NOT_SHOWN}: {report.nodeid}")


@pytest.fixture(scope="session")
def device() -> Any:
    import torch

    return torch.device("npu:0")


@pytest.fixture
def emulated(request: pytest.FixtureRequest) -> Any:
    """The emulated device, for tests that count; hardware has no such counters."""
    from omni_npu_phase import emulated_ascend

    if request.config.stash[_DEVICE] != "emulated":
        pytest.skip("counters are the emulated device's")
    return emulated_ascend.active_device()


@pytest.fixture(scope="session")
def runner() -> verify.RunnerClasses:
    """vLLM-Omni's own NPU runners, with the mixin."""
    return verify.classes_for("mixin", verify.load_runner("npu-v1"))
