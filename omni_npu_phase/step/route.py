# SPDX-License-Identifier: Apache-2.0
"""The route of one step: fields, hooks, writes, MTP. It knows rows and clauses; a port knows the runner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Protocol

from omni_npu_phase.contract import FIELDS, MTP_INPUTS
from omni_npu_phase.step import results
from omni_npu_phase.step.plan import Run, StepPlan, of_rows
from omni_npu_phase.step.results import Call, Deviations

BATCHED_HOOK = "preprocess_decode_batch"
SCALAR_HOOK = "preprocess"
MTP_HOOK = "talker_mtp"
_NEVER_STORED = frozenset((*FIELDS, MTP_INPUTS))


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

    def info(self, row: int) -> dict[str, Any]:
        """The live buffer of a row's request, made where it is missing (M9)."""
        ...

    def infos(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Those of several rows."""
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

    def lend_ids(self, where: Any) -> Any:
        """The token ids at a slice or index for a batched hook, which may keep them where the released runner hands it
        a copy."""
        ...

    def write_rows(self, where: Any, ids: Any, embeds: Any) -> None:
        """Write rows at a slice or index; None leaves the token ids or the embeddings as they are (R6, R7)."""
        ...

    def store_updates(self, rows: Sequence[int], updates: Sequence[Any]) -> None:
        """Merge each row's updates into its own request's live buffer (R8)."""
        ...

    def fill_mtp(self, position: int, where: Any, embeds: Any, hidden: Any, text_step: Any) -> None:
        """Put rows at a slice or index into the MTP batch, from ``position`` on (T1).

        Their embeddings may wait for MTP's own before they get to the step's buffer (T4).
        """
        ...

    def gather_mtp(self, position: int, where: Any, embeds: Any, hidden: Any, text_step: Any) -> None:
        """The same for the next row of several that come one by one, and may be written together."""
        ...

    def own(self) -> None:
        """Copy whatever a hook handed over and can still reach: the next one may fill the same tensors (T9)."""
        ...

    def run_mtp(self, rows: Sequence[int]) -> None:
        """Run MTP for these rows, write its embeddings at their offsets and store its codes (T4, T5)."""
        ...


def route(plan: StepPlan, port: Port) -> None:
    """Route every row of the step, in row order. Raises :class:`~omni_npu_phase.contract.ContractError`."""
    in_mtp: Sequence[int] = ()
    for run in plan.runs(batched=port.has_batched_hook, gathered=port.gathers):
        route_run = _route_batch if run.batched else _route_rows
        rows = route_run(plan, port, run, len(in_mtp))
        in_mtp = [*in_mtp, *rows] if in_mtp else rows
    # A hook may have had live buffers in hand; forward and postprocess still read the runner's values (M9).
    every_row = range(len(plan))
    plan.write_fields(every_row, port.infos(every_row))
    if in_mtp:
        port.run_mtp(in_mtp)


def _route_batch(plan: StepPlan, port: Port, run: Run, position: int) -> Sequence[int]:
    infos = port.infos(run.rows)
    # Right before the hook, over whatever the live buffers hold (M6).
    plan.write_fields(run.rows, infos)
    where = port.locate(run)
    given = port.lend_ids(where)
    call = Call(BATCHED_HOOK, plan.request_ids, run.rows, port.embeds, port.model, port.deviations)
    raw = port.call_batch(run, infos, given)
    result = results.batch_result(call, raw, given_ids=given, mtp_width=port.mtp_width)
    if any(result.updates):
        port.store_updates(run.rows, list(map(storable, result.updates)))
    ids, embeds, hidden, text_step = result.ids, result.embeds, result.hidden, result.text_step
    # Owned before the next hook could write to it, and before the rows are written, of which it may be a part.
    del raw, result
    port.own()
    in_mtp = port.mtp_width is not None
    if in_mtp:
        port.fill_mtp(position, where, embeds, hidden, text_step)
    port.write_rows(where, ids, None if in_mtp else embeds)
    return run.rows if in_mtp else ()


def _route_rows(plan: StepPlan, port: Port, run: Run, position: int) -> Sequence[int]:
    call = Call(SCALAR_HOOK, plan.request_ids, run.rows, port.embeds, port.model, port.deviations)
    in_mtp: list[int] = []
    for row, ids, embeds in zip(run.rows, *_slices(plan, port, run.rows), strict=True):
        call.rows = rows = (row,)
        info = port.info(row)
        plan.write_fields(rows, (info,))
        width = port.mtp_width if plan.eligible[row] else None
        raw = port.call_scalar(row, info, ids, embeds)
        result = results.scalar_result(call, raw, span=plan.spans[row], given_ids=ids, mtp_width=width)
        where = slice(plan.offsets[row], plan.offsets[row] + result.rows)
        updates = storable(result.updates)
        if updates:
            port.store_updates(rows, (updates,))
        new_ids, new_embeds = result.ids, None
        if result.mtp_inputs is None:
            new_embeds = result.embeds
        else:
            port.gather_mtp(position + len(in_mtp), where, result.embeds, *result.mtp_inputs)
            in_mtp.append(row)
        # Owned before the next hook could write to it, and before the rows are written, of which it may be a part.
        del raw, result, updates
        port.own()
        if not (new_ids is None and new_embeds is None):
            port.write_rows(where, new_ids, new_embeds)
    return in_mtp


def _slices(plan: StepPlan, port: Port, rows: Sequence[int]) -> tuple[Iterable[Any], Iterable[Any]]:
    """Each row's own token ids and embeddings (R9), in one operation each where the rows are adjacent."""
    starts, spans = of_rows(rows, plan.offsets), of_rows(rows, plan.spans)
    *adjacent, stop = accumulate(spans, initial=starts[0])
    if starts == adjacent:
        where = slice(starts[0], stop)
        return port.ids[where].split_with_sizes(spans), port.embeds[where].split_with_sizes(spans)
    own = [slice(start, start + span) for start, span in zip(starts, spans, strict=True)]
    return map(port.ids.__getitem__, own), map(port.embeds.__getitem__, own)


def storable(update: Any) -> Any:
    """An update without what a hook may not store: runner-owned fields (M9) and MTP inputs (E6)."""
    if isinstance(update, dict) and not _NEVER_STORED.isdisjoint(update):
        return {key: value for key, value in update.items() if key not in _NEVER_STORED}
    return update
