# SPDX-License-Identifier: Apache-2.0
"""Options of the documents' tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("documents")
    group.addoption(
        "--installs", metavar="CHECKOUT", help="run blocks that install, too, in an empty environment and a copy of it"
    )
    group.addoption("--real", action="store_true", help="run commands whose output is recorded, too, and compare")
    group.addoption("--record", action="store_true", help="run them, and write docs/recorded anew")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "installs: makes an environment and installs into it")
    config.addinivalue_line("markers", "real: takes minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = {
        "installs": not config.getoption("--installs"),
        "real": not (config.getoption("--real") or config.getoption("--record")),
    }
    chosen = [
        item for item in items if not any(out and item.get_closest_marker(name) for name, out in left_out.items())
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
