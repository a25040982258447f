# SPDX-License-Identifier: Apache-2.0
"""Every guard has a broken runner that it catches, by the clause it stands for."""

from __future__ import annotations

import pytest
import torch

from omni_npu_phase.conformance import suite
from omni_npu_phase.conformance.driver import run_scenario
from omni_npu_phase.conformance.judge import Judgement, judge
from omni_npu_phase.conformance.scenarios import SCENARIOS
from omni_npu_phase.contract import CLAUSES
from tests.cpu.mutants import MUTANTS, Mutant


def _judgements(runner: type, clause: str) -> list[Judgement]:
    """The judgements on one clause from every scenario written about it, and from the mixed batches."""
    chosen = [case for case in SCENARIOS if clause in case.about or case.id in ("tail", "mixed", "adjacent-decodes")]
    return [
        judgement
        for case in chosen
        for variant in suite.variants(case, "mixin")
        for judgement in judge(run_scenario(runner, case, variant, torch.device("cpu")))
        if judgement.clause == clause
    ]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, mixed: type, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(judgement.holds for judgement in _judgements(mixed, mutant.clause))
    mutant.apply(monkeypatch)
    caught = [judgement for judgement in _judgements(mixed, mutant.clause) if not judgement.holds]
    assert caught, f"{mutant.name} survives {mutant.clause}"


def test_every_clause_catches_a_mutant() -> None:
    assert {mutant.clause for mutant in MUTANTS} == set(CLAUSES)


def test_mutant_names_are_unique() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
