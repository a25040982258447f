# SPDX-License-Identifier: Apache-2.0
"""A model's hooks as tests: ``pytest --pyargs omni_npu_phase.conformance --phase-model MODULE:FACTORY``.

Requests are known when the model is loaded, so a session that only collects has one test a case.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Iterator
from itertools import pairwise

import pytest

from omni_npu_phase.conformance.kit import Kit, Record, expect_nothing_against, kit_of
from omni_npu_phase.conformance.models.cases import CASES, NotShownError, in_chunks
from omni_npu_phase.conformance.scenarios import SetupError
from omni_npu_phase.contract import ContractError


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    kit = kit_of(metafunc.config)
    if metafunc.function is test_expected_failure:
        metafunc.parametrize("listed", kit.listed_cases)
        return
    if metafunc.function is test_model:
        metafunc.parametrize("case", CASES)
    metafunc.parametrize("request_name", kit.request_names)


def test_model(case: str, request_name: str, kit: Kit, record: Record) -> None:
    """A case of the model kit, for one request."""
    _note(case, request_name, kit, record)
    try:
        seen = first_seen(CASES[case].findings(kit.bench, request_name))
    except NotShownError as reason:
        pytest.skip(str(reason))
    except SetupError as reason:
        pytest.fail(str(reason), pytrace=False)
    expect_nothing_against({case: seen} if seen else {}, kit, record)


def _note(case: str, request_name: str, kit: Kit, record: Record) -> None:
    record(("case", case))
    record(("request", request_name))
    record(("variant", type(kit.model.model).__qualname__))


def first_seen(findings: Iterator[str]) -> str:
    """The first finding, or nothing; whatever the model raises is one. Raises NotShownError and SetupError."""
    try:
        return next(findings, "")
    except (NotShownError, SetupError):
        raise
    except ContractError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - whatever the model under test raises is its result
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"raised {type(error).__name__}: {error} ({where.filename}:{where.lineno})"


def test_any_chunks(request_name: str, kit: Kit, record: Record) -> None:
    """The case 'chunks' with chunks that hypothesis chooses, and the simplest that fail."""
    pytest.importorskip("hypothesis")
    from hypothesis import given, settings
    from hypothesis.strategies import integers, sets

    length = len(kit.model.requests[request_name].prompt)
    bench = functools.cache(kit.bench)
    seen = ""

    def is_the_whole_prompt(cuts: set[int]) -> None:
        nonlocal seen
        chunks = [stop - start for start, stop in pairwise([0, *sorted(cuts), length])]
        seen = first_seen(in_chunks(bench, request_name, chunks))
        assert not seen

    _note("chunks", request_name, kit, record)
    few = settings(max_examples=25, derandomize=True, database=None, deadline=None)
    with contextlib.suppress(AssertionError):
        few(given(sets(integers(1, length - 1)))(is_the_whole_prompt))()
    expect_nothing_against({"chunks": seen} if seen else {}, kit, record)


def test_expected_failure(listed: str, kit: Kit) -> None:
    """A case that is listed as an expected failure still fails for some request."""
    seen = []
    for request_name in kit.request_names:
        with contextlib.suppress(NotShownError):
            seen.append(first_seen(CASES[listed].findings(kit.bench, request_name)))
    if not any(seen):
        pytest.fail(
            f"{listed} holds for all {len(seen)} requests that show it; take it off the expected failures "
            f"({kit.xfails[listed]})",
            pytrace=False,
        )
