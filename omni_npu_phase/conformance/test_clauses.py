# SPDX-License-Identifier: Apache-2.0
"""The contract as tests of a runner: ``pytest --pyargs omni_npu_phase.conformance --phase-runner MODULE:FACTORY``."""

from __future__ import annotations

import pytest

from omni_npu_phase.conformance import verify
from omni_npu_phase.conformance.kit import Kit, Record, expect_nothing_against, kit_of, record_held, record_routing
from omni_npu_phase.conformance.scenarios import Scenario, Variant
from omni_npu_phase.contract import CLAUSES, REPLAY_CLAUSES

_KNOWN = {**CLAUSES, **REPLAY_CLAUSES}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    kit = kit_of(metafunc.config)
    if metafunc.function is test_clause:
        metafunc.parametrize(("clause", "scenario", "variant"), _clauses(kit))
    elif metafunc.function is test_run:
        runs = [pytest.param(*run, id=f"{run[0].id}-{run[1].id}") for run in kit.runs()]
        metafunc.parametrize(("scenario", "variant"), runs)
    elif metafunc.function is test_expected_failure:
        metafunc.parametrize("listed", kit.listed_clauses)


def _clauses(kit: Kit) -> list[object]:
    return [
        pytest.param(
            clause,
            scenario,
            variant,
            id=f"{clause}-{scenario.id}-{variant.id}",
            marks=getattr(pytest.mark, f"phase_{_KNOWN[clause].tier}"),
        )
        for scenario, variant in kit.runs()
        for clause in kit.clauses_of(scenario, variant)
    ]


@pytest.fixture
def case(kit: Kit, scenario: Scenario, variant: Variant, request: pytest.FixtureRequest, record: Record) -> verify.Case:
    """What the run shows; it is made once, by whichever test asks first."""
    clause = request.node.callspec.params.get("clause")
    if clause is not None:
        record(("clause", clause))
        record(("tier", _KNOWN[clause].tier))
    record(("scenario", scenario.id))
    record(("variant", str(variant)))
    case = kit.run(scenario.id, variant)
    if case is None:
        pytest.skip(kit.runner.cannot_show.get(scenario.id, "no generation runner was named"))
    undecided = [judgement.seen for judgement in case.judgements if judgement.undecided]
    if undecided and clause in (None, *scenario.about):
        pytest.fail(undecided[0], pytrace=False)
    return case


def test_clause(clause: str, case: verify.Case, kit: Kit, record: Record) -> None:
    """A clause, in one run of one scenario."""
    own = [judgement for judgement in case.judgements if judgement.clause == clause and not judgement.undecided]
    if not own:
        pytest.skip("the run ended before it showed this; tests of the scenario's own clauses say why")
    seen = [judgement.seen for judgement in own if not judgement.holds]
    expect_nothing_against({clause: seen[0]} if seen else {}, kit, record)


def test_run(scenario: Scenario, variant: Variant, case: verify.Case, kit: Kit, record: Record) -> None:
    """A run as a whole: nothing against any other clause that its rows show, and with the mixin the right routing."""
    tested = kit.clauses_of(scenario, variant)
    others = [
        judgement
        for judgement in reversed(case.judgements)
        if judgement.clause not in tested and _KNOWN[judgement.clause].tier in kit.tiers
    ]
    against = {judgement.clause: judgement.seen for judgement in others if not judgement.holds}
    record_held(sorted({judgement.clause for judgement in others} - against.keys()), record)
    if case.compared:
        record_routing(case.difference, record)
    if case.difference is not None:
        pytest.fail(f"routing is not what the table says: {case.difference}", pytrace=False)
    expect_nothing_against(against, kit, record)


def test_expected_failure(listed: str, kit: Kit) -> None:
    """A clause that is listed as an expected failure still fails in some run."""
    showing = 0
    for scenario, variant in kit.runs():
        case = kit.run(scenario.id, variant)
        own = [each for each in case.judgements if each.clause == listed] if case is not None else []
        if not all(each.holds for each in own):
            return
        showing += bool(own)
    pytest.fail(
        f"{listed} holds in all {showing} runs that show it; take it off the expected failures ({kit.xfails[listed]})",
        pytrace=False,
    )
