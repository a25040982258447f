# SPDX-License-Identifier: Apache-2.0
"""Routing: what a run did with every row, beside what the scenario's table says of it.

It is the same on every device, release and runner. How rows were grouped into calls is no part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omni_npu_phase import contract
from omni_npu_phase.conformance.drive import Recording, StepRecord
from omni_npu_phase.conformance.judge import tokens_in_mtp
from omni_npu_phase.conformance.recording_model import place
from omni_npu_phase.conformance.scenarios import MTP


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place at which a run was routed otherwise than its table says."""

    scenario: str
    variant: str
    where: str
    table: str
    run: str

    def __str__(self) -> str:
        return f"{self.scenario} ({self.variant}), {self.where}: the table says {self.table}, the run {self.run}"


def compare(run: Recording) -> Difference | None:
    """The first difference between a run and its table; None where there is none."""
    for where, wanted, found in _parts(run):
        # As text, for 1 is not True.
        if str(wanted) != str(found):
            return Difference(run.scenario.id, str(run.variant), where, str(wanted), str(found))
    return None


def _parts(run: Recording) -> Iterator[tuple[str, Any, Any]]:
    """Each part that is compared: where it is, what the table says, what the run did."""
    scenario, strict = run.scenario, run.variant.mode == "strict"
    error = scenario.error or (scenario.strict_error if strict else None)
    last = len(run.steps) - 1
    for number, step in enumerate(run.steps):
        refused = run.error is not None and number == last
        for where, wanted, found in _rows(run, step, refused=refused):
            yield f"step {number + 1}, {where}", wanted, found
    ended = run.error and f"an error of {getattr(run.error, 'clause', type(run.error).__name__)}"
    yield "the end", error and f"an error of {error}", ended
    yield "the end", len(scenario.steps) if error is None else len(run.steps), len(run.steps)
    yield "the warnings", list(scenario.warns(run.variant)), [_clauses_in(text) for text in run.warnings]


def _rows(run: Recording, step: StepRecord, *, refused: bool) -> Iterator[tuple[str, Any, Any]]:
    """The rows of a step: hook, what it was told, and place in MTP. A ``refused`` step ends before some of it."""
    in_mtp = [place(token_id) for call in step.log.mtp for token_id in tokens_in_mtp(run, step, call)]
    scenario, eligible = run.scenario, 0
    has_mtp = run.variant.mtp and scenario.behaviour.has_preprocess and not scenario.lacks_mtp_inputs(run.variant)
    for scheduled in step.rows:
        row = scheduled.new or scheduled
        own = place(run.token(row))
        calls = [call for call in step.log.hooks if call.place == own]
        if refused and not calls:
            continue
        told = [[_plain(call.info.get(name)) for name in contract.FIELDS] for call in calls]
        # Rows that preprocess_batch filled get nothing else (M10).
        hooked = scenario.behaviour.has_preprocess and row.request not in step.log.filled and scheduled.new is not None
        hook = "batched" if run.variant.hook == "batched" and row.shows == MTP else "scalar"
        where = f"{row.request} {row}"
        yield where, [hook] if hooked else [], [call.hook for call in calls]
        yield where, [list(row.fields.values())] if hooked else [], told
        if refused:
            continue
        enters = row.shows == MTP and has_mtp and hooked
        yield f"{where} in MTP", eligible if enters else None, in_mtp.index(own) if own in in_mtp else None
        eligible += enters


def _plain(value: Any) -> Any:
    # Other types are another answer, even where they are equal: NumPy's, and 1 for True.
    return value if type(value) in (int, bool) else repr(value)


def _clauses_in(warning: str) -> str:
    return " ".join(clause for clause in contract.CLAUSES if f"[{clause}]" in warning) or warning
