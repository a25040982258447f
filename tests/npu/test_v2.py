# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2 with its buffers on the NPU: the same clauses, and the same routing."""

from __future__ import annotations

from typing import Any

import pytest

from omni_npu_phase.conformance import verify


def test_every_clause_that_applies_holds(device: Any) -> None:
    try:
        state = verify.load_runner("gpu-v2")
    except verify.NoRuntimeError as error:
        pytest.skip(f"this release has no Model Runner V2: {error}")
    report = verify.verify(state, ("mixin",), device=device.type)
    assert {result.id: result.status for result in report.clauses if result.status != "pass"} == {
        "M10": "not_applicable"
    }
    assert report.parity is not None
    assert report.parity.differences == ()
