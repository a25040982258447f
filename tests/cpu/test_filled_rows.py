# SPDX-License-Identifier: Apache-2.0
"""Rows that ``preprocess_batch`` fills itself (M10): as 0.32 does it, and what notices when they are not left alone.

ci/matrix runs it on each release. On those before 0.32 the runner is one that says it lets the hook fill rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_npu_phase import PhaseRoutingMixin
from omni_npu_phase.conformance import routing
from omni_npu_phase.conformance.drive import run_scenario
from omni_npu_phase.conformance.judge import judge
from omni_npu_phase.conformance.scenarios import BY_ID, Hook, Variant
from omni_npu_phase.releases import names_in, runtime_of
from omni_npu_phase.step import v1
from omni_npu_phase.step.plan import Run, StepPlan
from omni_npu_phase.tracing.check import check
from tests.cpu.test_tracing import _traced as traced

_FLAG = "preprocess_batch_fills_rows"


@pytest.fixture
def filling(released: type, monkeypatch: pytest.MonkeyPatch) -> type:
    """The runner with the mixin, which lets ``preprocess_batch`` fill rows on every release."""
    cls = released
    if _FLAG not in names_in(released.__mro__, "_maybe_run_batch_preprocess"):

        class Filling(released):  # type: ignore[misc]
            def _maybe_run_batch_preprocess(self) -> bool:
                return self.model.preprocess_batch_fills_rows  # type: ignore[no-any-return]

        cls, known = Filling, replace(runtime_of(released.__mro__), fills_rows=True)
        monkeypatch.setattr(v1, "runtime_of", lambda classes: known)
    return type("FillingPhase", (PhaseRoutingMixin, cls), {})


def _seen(cls: type, variant: Variant) -> tuple[Any, dict[str, list[str]]]:
    """A run, and what failed in it by clause."""
    run = run_scenario(cls, BY_ID["batch-hook-fills"], variant, torch.device("cpu"))
    failed: dict[str, list[str]] = {}
    for judgement in judge(run):
        if not judgement.holds:
            failed.setdefault(judgement.clause, []).append(judgement.seen)
    return run, failed


@pytest.mark.parametrize("mtp", [True, False])
@pytest.mark.parametrize("hook", ["scalar", "batched"])
def test_filled_rows_are_left_alone(hook: Hook, mtp: bool, filling: type) -> None:
    run, failed = _seen(filling, Variant(hook, mtp))
    assert failed == {}
    assert run.error is None
    assert [sorted(step.log.filled) for step in run.steps] == [["f", "g"], ["f"], ["g"]]
    assert routing.compare(run) is None


@pytest.mark.parametrize("mtp", [True, False])
@pytest.mark.parametrize("hooks", [True, False])
def test_a_trace_says_which_rows_were_filled(hooks: bool, mtp: bool, filling: type, tmp_path: Path) -> None:
    """They got no hook call, and were not left out of MTP: nothing about them breaches M1 or T4."""
    result = traced(tmp_path, filling, "batch-hook-fills", "scalar", mtp, hooks=hooks)
    assert result.check.findings == []
    filled = [[row.request for row in step.rows if row.hook == "filled"] for step in result.trace.steps()]
    assert [sorted(rows) for rows in filled] == [["f", "g"], ["f"], ["g"]]
    result.trace.path.write_text(result.trace.path.read_text().replace('"filled"', "null" if hooks else '"scalar"'))
    assert {finding.clause for finding in check([result.trace]).findings} == (
        {"M1"} if hooks else {"T4"} if mtp else set()
    )


def test_a_runner_of_an_earlier_release_fills_none(released: type) -> None:
    run, failed = _seen(type("Mixed", (PhaseRoutingMixin, released), {}), Variant("batched", True))
    assert failed == {}
    assert any(step.log.filled for step in run.steps) == runtime_of(released.__mro__).fills_rows


def _order(original: Any, plan: Any, *given: Any) -> dict[str, Any]:
    return {**original(plan, *given), "token_offsets": sorted(plan.offsets, reverse=True)}


@pytest.mark.parametrize(
    ("owner", "name", "instead", "seen"),
    [
        (StepPlan, "without", lambda original, plan, filled: plan, "f (P=4 C=6 S=1) was filled, and got a hook"),
        (StepPlan, "without", lambda original, plan, filled: plan, "written over"),
        (StepPlan, "without", lambda original, plan, filled: plan, "fields were refreshed"),
        (StepPlan, "without", lambda original, plan, filled: plan, "went to MTP"),
        (v1, "layout_of", lambda original, *given: {}, "preprocess_batch was given {}"),
        (v1, "layout_of", _order, "preprocess_batch was given"),
    ],
)
def test_a_broken_runner_is_caught(
    owner: Any, name: str, instead: Callable[..., Any], seen: str, filling: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: instead(original, *given))
    _, failed = _seen(filling, Variant("batched", True))
    assert any(seen in each for each in failed["M10"]), failed


def test_a_batch_ends_at_a_filled_row(filling: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without MTP a batched call takes adjacent rows only (R4): a filled row between two of them ends it."""
    monkeypatch.setattr(StepPlan, "runs", lambda plan, **how: [Run(range(len(plan)), True)] if len(plan) else [])
    _, failed = _seen(filling, Variant("batched", False))
    assert any("one batched call took rows" in seen for seen in failed["R4"]), failed
