# SPDX-License-Identifier: Apache-2.0
"""The route of one step: fields, hooks, writes, MTP. It knows rows and clauses; a port knows the runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from omni_npu_phase import results
from omni_npu_phase.contract import FIELDS, MTP_INPUTS
from omni_npu_phase.plan import Run, StepPlan
from omni_npu_phase.results import Call, Deviations

BATCHED_HOOK = "preprocess_decode_batch"
SCALAR_HOOK = "preprocess"
MTP_HOOK = "talker_mtp"
_NEVER_STORED = (*FIELDS, MTP_INPUTS)


class Port(Protocol):
    """What a route asks of its runner. ``rows`` are row numbers of the plan's input batch."""

    model: Any
    ids: Any
    """Integer tensor of shape (buffer rows,): the step's token ids."""
    embeds: Any
    """Floating tensor of shape (buffer rows, hidden): the step's input embeddings (R6)."""
    deviations: Deviations
    has_batched_hook: bool
    gathers: bool
    """Whether the batched hook takes all its rows of a step at once; it is not promised contiguous ones (R4) then."""
    mtp_width: int | None
    """Hidden size of the MTP inputs; None for a model without MTP."""

    def infos(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The live buffer of each row's request, made where it is missing (M9)."""
        ...

    def call_scalar(self, row: int, info: dict[str, Any], ids: Any, embeds: Any) -> Any:
        """Call the scalar hook with the row's slices (R9) and the release's own keywords."""
        ...

    def call_batch(self, run: Run, infos: list[dict[str, Any]], ids: Any) -> Any:
        """Call the batched hook for a run of decode rows (R3), with the release's own keywords."""
        ...

    def locate(self, run: Run) -> Any:
        """Where a batched run's tokens lie in the step's buffers: a slice, or an index where they are scattered."""
        ...

    def write_rows(self, where: Any, ids: Any, embeds: Any) -> None:
        """Write rows at a slice or index; ``ids`` None leaves the token ids as they are (R6, R7)."""
        ...

    def store_updates(self, rows: Sequence[int], updates: Sequence[Any]) -> None:
        """Merge each row's updates into its own request's live buffer (R8)."""
        ...

    def fill_mtp(self, position: int, hidden: Any, text_step: Any) -> None:
        """Put rows' hidden states and text step into the MTP batch from ``position`` on (T1)."""
        ...

    def run_mtp(self, rows: Sequence[int]) -> None:
        """Run MTP for these rows, write its embeddings at their offsets and store its codes (T4, T5)."""
        ...


def route(plan: StepPlan, port: Port) -> None:
    """Route every row of the step, in row order. Raises :class:`~omni_npu_phase.contract.ContractError`."""
    in_mtp: list[int] = []
    for run in plan.runs(batched=port.has_batched_hook, gathered=port.gathers):
        infos = port.infos(run.rows)
        _own_fields(plan, run.rows, infos)
        route_run = _route_batch if run.batched else _route_scalar
        in_mtp += route_run(plan, port, run, infos, len(in_mtp))
    # A hook may have had live buffers in hand; forward and postprocess still read the runner's values (M9).
    _own_fields(plan, range(len(plan)), port.infos(range(len(plan))))
    if in_mtp:
        port.run_mtp(in_mtp)


def _own_fields(plan: StepPlan, rows: Sequence[int], infos: list[dict[str, Any]]) -> None:
    """Write the fields over whatever the live buffers hold (M6)."""
    for row, info in zip(rows, infos, strict=True):
        info.update(plan.fields(row))


def _route_batch(plan: StepPlan, port: Port, run: Run, infos: list[dict[str, Any]], position: int) -> Sequence[int]:
    where = port.locate(run)
    ids = port.ids[where]
    if port.mtp_width is not None and isinstance(where, slice):
        # As released: ids of rows that go to MTP are gathered, and a hook may keep them.
        ids = ids.clone()
    call = _call(plan, port, BATCHED_HOOK, run.rows)
    raw = port.call_batch(run, infos, ids)
    result = results.batch_result(call, raw, given_ids=ids, mtp_width=port.mtp_width)
    if port.mtp_width is not None:
        port.fill_mtp(position, result.hidden, result.text_step)
    port.store_updates(run.rows, [storable(update) for update in result.updates])
    port.write_rows(where, result.ids, result.embeds)
    return run.rows if port.mtp_width is not None else ()


def _route_scalar(plan: StepPlan, port: Port, run: Run, infos: list[dict[str, Any]], position: int) -> Sequence[int]:
    row, start, span = run.start, plan.offsets[run.start], plan.spans[run.start]
    ids, embeds = port.ids[start : start + span], port.embeds[start : start + span]
    call = _call(plan, port, SCALAR_HOOK, [row])
    raw = port.call_scalar(row, infos[0], ids, embeds)
    result = results.scalar_result(
        call, raw, span=span, given_ids=ids, mtp_width=port.mtp_width if plan.eligible[row] else None
    )
    if result.mtp_inputs is not None:
        port.fill_mtp(position, *result.mtp_inputs)
    port.store_updates([row], [storable(result.updates)])
    port.write_rows(slice(start, start + result.embeds.shape[0]), result.ids, result.embeds)
    return run.rows if result.mtp_inputs is not None else ()


def _call(plan: StepPlan, port: Port, hook: str, rows: Sequence[int]) -> Call:
    return Call(
        hook=hook,
        requests=[plan.request_ids[row] for row in rows],
        rows=rows,
        embeds=port.embeds,
        model=port.model,
        deviations=port.deviations,
    )


def storable(update: Any) -> Any:
    """An update without what a hook may not store: runner-owned fields (M9) and MTP inputs (E6)."""
    if isinstance(update, dict) and any(name in update for name in _NEVER_STORED):
        return {key: value for key, value in update.items() if key not in _NEVER_STORED}
    return update
