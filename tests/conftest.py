# SPDX-License-Identifier: Apache-2.0
"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

# Must be set before vLLM configures its logging at import.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Coverage rests while a test marked ``no_cover`` runs, in processes that it starts too, and then goes on."""
    measuring = None
    if item.get_closest_marker("no_cover"):
        from coverage import Coverage

        measuring = Coverage.current()
    if measuring is None:
        return (yield)
    measuring.stop()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("COVERAGE_")]:
                patch.delenv(name)
            return (yield)
    finally:
        measuring.start()
