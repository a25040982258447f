# SPDX-License-Identifier: Apache-2.0
"""Every guard is caught: each mutant fails the clauses it breaks, and the package as it is fails none.

A mutant runs in the scenarios about its clauses, on the installed runner with the mixin; in every scenario where one of
its clauses has none of its own.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from omni_npu_phase.conformance import verify
from omni_npu_phase.conformance.drive import Recording, run_scenario
from omni_npu_phase.conformance.judge import Judgement, judge
from omni_npu_phase.conformance.scenarios import BY_ID, Scenario
from omni_npu_phase.contract import CLAUSES, REPLAY_CLAUSES, ContractError
from tests.cpu.mutants import MUTANTS, Mutant
from tests.cpu.mutants_v2 import MUTANTS_V2

# What runs here runs in other tests too, where it is counted; tracing would double the time.
pytestmark = pytest.mark.no_cover

_CPU = torch.device("cpu")
_SCENARIOS = tuple(BY_ID.values())
_CLAUSES = {**CLAUSES, **REPLAY_CLAUSES}
_ALL = (*MUTANTS, *MUTANTS_V2)
_BY_NAME = {mutant.name: mutant for mutant in _ALL}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What runs showed: failed judgements by clause, errors no scenario expects, and calls by changed attribute."""

    failed: dict[str, list[Judgement]] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    calls: dict[str, int] = field(default_factory=dict)


@functools.cache
def _runners(name: str) -> verify.RunnerClasses:
    return verify.classes_for("mixin", verify.load_runner(name))


def _runner_of(mutant: Mutant) -> str:
    return "gpu-v2" if mutant in MUTANTS_V2 else "gpu-v1"


def _runs(scenarios: Sequence[Scenario], runner: str) -> Iterator[Recording]:
    for scenario in scenarios:
        cls = _runners(runner).of(scenario)
        if cls is None:
            assert scenario.id in _runners(runner).cannot_show
            continue
        for variant in verify.variants(scenario, "mixin"):
            yield run_scenario(cls, scenario, variant, _CPU)


def _scenarios_for(mutant: Mutant) -> Sequence[Scenario]:
    wanted = set(mutant.caught_by)
    if not wanted <= {clause for scenario in _SCENARIOS for clause in scenario.about}:
        return _SCENARIOS
    return [scenario for scenario in _SCENARIOS if wanted & set(scenario.about) or scenario.id in mutant.also]


def _is_expected(run: Recording) -> bool:
    strict = run.scenario.strict_error if run.variant.mode == "strict" else None
    expected = run.scenario.error or strict
    return isinstance(run.error, ContractError) and run.error.clause == expected


def _observe(scenarios: Sequence[Scenario], runner: str, calls: dict[str, int]) -> Outcome:
    outcome = Outcome(calls=calls)
    for run in _runs(scenarios, runner):
        for judgement in judge(run):
            if not judgement.holds:
                outcome.failed.setdefault(judgement.clause, []).append(judgement)
        if run.error is not None and not _is_expected(run):
            outcome.errors[type(run.error).__name__] += 1
    return outcome


@functools.cache
def _outcome(name: str) -> Outcome:
    """The mutant's run, shared by its tests; nothing of it is left in place."""
    mutant = _BY_NAME[name]
    _runners(_runner_of(mutant))  # Found on the package as it is.
    with pytest.MonkeyPatch.context() as patch:
        calls = mutant.apply(patch)
        return _observe(_scenarios_for(mutant), _runner_of(mutant), calls)


def _is_evidence(judgement: Judgement, mutant: Mutant) -> bool:
    return bool(mutant.raises) or "raised " not in judgement.seen


every_mutant = pytest.mark.parametrize("mutant", _ALL, ids=lambda mutant: mutant.name)


@every_mutant
def test_mutant_fails_its_clauses(mutant: Mutant) -> None:
    outcome = _outcome(mutant.name)
    for clause in mutant.caught_by:
        evidence = [judgement for judgement in outcome.failed.get(clause, []) if _is_evidence(judgement, mutant)]
        assert evidence, f"{clause} did not notice that {mutant.breaks}; failed: {sorted(outcome.failed)}"


@every_mutant
def test_mutant_was_in_force(mutant: Mutant) -> None:
    """A change that is never reached proves nothing, nor does one that only breaks down."""
    outcome = _outcome(mutant.name)
    assert set(outcome.calls) == {str(change) for change in mutant.changes}
    assert all(outcome.calls.values()), outcome.calls
    assert set(outcome.errors) <= set(mutant.raises), outcome.errors


def test_names_are_unique() -> None:
    assert len(_BY_NAME) == len(_ALL)


def test_other_scenarios_exist() -> None:
    assert {scenario for mutant in _ALL for scenario in mutant.also} <= set(BY_ID)


@pytest.mark.parametrize("clause", _CLAUSES)
def test_clause_catches_a_mutant(clause: str) -> None:
    catches = [
        mutant.name
        for mutant in MUTANTS
        if clause in mutant.caught_by
        and any(_is_evidence(judgement, mutant) for judgement in _outcome(mutant.name).failed.get(clause, []))
    ]
    assert catches, f"no mutant shows what {clause} is worth: {_CLAUSES[clause].sentence}"


@pytest.mark.parametrize("runner", ["gpu-v1", "gpu-v2"])
def test_package_as_it_is_fails_no_clause(runner: str) -> None:
    for mutant in _ALL:
        _outcome(mutant.name)  # Whatever they changed must be back in place.
    outcome = _observe(_SCENARIOS, runner, {})
    assert not outcome.failed
    assert not outcome.errors
