# SPDX-License-Identifier: Apache-2.0
"""The device these tests run on: CUDA's, where there is one. They need no vLLM.

``--device cuda`` asks for one, and a missing one is then an error; without the option the tests are skipped with one
line where there is none. ``--device cpu`` runs them on a stand-in, which shows that they run, and nothing of CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cuda.device import Device, Hardware, StandIn

UNUSABLE = 2
_DEVICE = pytest.StashKey[str]()
_NO_DEVICE = "no CUDA device here: not run"
_NOT_SHOWN = "only a CUDA device can show it"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cuda", "cpu"), help="where the tests of tests/cuda run")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hardware: only a CUDA device can show it")
    config.addinivalue_line("markers", "standin: only the stand-in can show it")
    asked = config.getoption("--device")
    if asked != "cpu" and not torch.cuda.is_available():
        if asked:
            pytest.exit(f"--device {asked}: PyTorch {torch.__version__} finds no CUDA device", returncode=UNUSABLE)
        return
    config.stash[_DEVICE] = asked or "cuda"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    device = config.stash.get(_DEVICE, None)
    for item in items:
        if device is None:
            item.add_marker(pytest.mark.skip(reason=_NO_DEVICE))
        elif item.get_closest_marker({"cpu": "hardware", "cuda": "standin"}[device]):
            item.add_marker(pytest.mark.skip(reason=_NOT_SHOWN))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.config.stash.get(_DEVICE, None) is None:
        terminalreporter.write_line(f"tests/cuda: {_NO_DEVICE}")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Hardware() if request.config.stash[_DEVICE] == "cuda" else StandIn()
    with made:
        yield made
