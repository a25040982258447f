# SPDX-License-Identifier: Apache-2.0
"""What the tests of runners and models share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from omni_npu_phase.conformance.kit import Kit, Record, kit_of


@pytest.fixture(scope="session")
def kit(request: pytest.FixtureRequest) -> Kit:
    return kit_of(request.config)


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """Notes a property of a test. As record_property, without its warning about newer formats of JUnit files."""
    return request.node.user_properties.append  # type: ignore[no-any-return]


@pytest.fixture(scope="session", autouse=True)
def _versions(kit: Kit, record_testsuite_property: Callable[[str, object], None]) -> None:
    for name, value in kit.session_properties().items():
        record_testsuite_property(name, value)
