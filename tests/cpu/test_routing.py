# SPDX-License-Identifier: Apache-2.0
"""Routing against the scenarios' tables: the same run is no difference, each kind of other routing is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from omni_npu_phase import contract
from omni_npu_phase.conformance import routing, verify
from omni_npu_phase.conformance.drive import Recording, run_scenario
from omni_npu_phase.conformance.report import Parity, Report
from omni_npu_phase.conformance.scenarios import BY_ID, Variant

CPU = torch.device("cpu")


def _run(cls: type, scenario: str = "mixed", hook: Any = "batched") -> Recording:
    return run_scenario(cls, BY_ID[scenario], Variant(hook, True), CPU)


def _told_otherwise(value: Any) -> Callable[[Recording], object]:
    return lambda run: run.steps[0].log.hooks[0].info.update({contract.IS_PREFILL: value})


@pytest.mark.parametrize(
    ("change", "where", "seen"),
    [
        (_told_otherwise(1), "step 1, ", "1]]"),
        (_told_otherwise(torch.tensor(True)), "step 1, ", "tensor(True)"),
        (lambda run: run.steps[0].log.hooks.pop(), "step 1, ", "the run []"),
        (lambda run: run.steps[0].log.hooks.append(run.steps[0].log.hooks[0]), "step 1, ", "'scalar', 'scalar'"),
        (lambda run: setattr(run.steps[0].log.hooks[0], "hook", "batched"), "step 1, ", "['batched']"),
        (lambda run: run.steps[0].log.mtp[0].token_ids.reverse(), " in MTP", "the run 2"),
        (lambda run: run.steps[0].log.mtp.clear(), " in MTP", "the run None"),
        (lambda run: setattr(run, "error", RuntimeError("x")), "the end", "an error of RuntimeError"),
        (lambda run: run.warnings.append("[E5] odd"), "the warnings", "['E5']"),
        (lambda run: run.warnings.append("no clause's own"), "the warnings", "no clause's own"),
    ],
)
def test_other_routing_differs(change: Callable[[Recording], object], where: str, seen: str, mixed: type) -> None:
    run = _run(mixed)
    assert routing.compare(run) is None
    change(run)
    difference = routing.compare(run)
    assert difference is not None
    assert where in difference.where
    assert seen in str(difference)
    assert str(difference).startswith("mixed (batched hook, MTP), ")


@pytest.mark.parametrize("change", ["lost", "again"])
def test_other_warnings_than_the_tables_differ(change: str, mixed: type) -> None:
    run = _run(mixed, "e5-long", "scalar")
    assert routing.compare(run) is None
    run.warnings *= {"lost": 0, "again": 2}[change]
    difference = routing.compare(run)
    assert difference is not None
    assert difference.where == "the warnings"


def test_a_step_too_few_differs(mixed: type) -> None:
    run = _run(mixed, "tail")
    run.steps.pop()
    difference = routing.compare(run)
    assert difference is not None
    assert difference.where == "the end"


def test_a_difference_fails_the_mixin(monkeypatch: pytest.MonkeyPatch) -> None:
    difference = routing.Difference("tail", "scalar hook", "the end", "this", "that")
    monkeypatch.setattr(routing, "compare", lambda run: difference)
    report = verify.verify(verify.load_runner("gpu-v1"), ("released", "mixin"), scenarios=[BY_ID["tail"]])
    assert report.parity is not None
    assert len(report.parity.differences) == report.parity.compared == 4
    assert not report.passed("mixin")
    assert "routing differs from the scenarios' tables in 4 of 4 runs" in report.to_markdown()


def test_only_the_mixin_is_compared() -> None:
    report = verify.verify(verify.load_runner("gpu-v1"), ("released",), scenarios=[BY_ID["tail"]])
    assert report.parity is None
    assert Report({}, (), Parity(3)).passed("mixin")
