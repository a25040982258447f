# SPDX-License-Identifier: Apache-2.0
"""Sessions of ``pytest --pyargs omni_npu_phase.conformance`` inside a test."""

from __future__ import annotations

import pytest

# A session in this process forgets the modules that it imported, but not where packages hold on to them.
from omni_npu_phase.conformance import drive, judge, kit  # noqa: F401
from omni_npu_phase.conformance.models import bench, cases, subject  # noqa: F401

PLUGIN = "omni_npu_phase.conformance.pytest_plugin"


def run_kit(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> pytest.RunResult:
    """One session in this process, in the pytester's folder, with no plugin but this package's."""
    # The environment's own plugins would be in some sessions and not in others.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return pytester.runpytest_inprocess(
        *("-p", PLUGIN, "-p", "no:cacheprovider", "--pyargs", "omni_npu_phase.conformance"), *arguments
    )
