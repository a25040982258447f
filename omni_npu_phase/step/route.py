# SPDX-License-Identifier: Apache-2.0
"""The route of one step: fields, hooks, writes, MTP. It knows rows and clauses; a port knows the runner.

What a hook hands over is copied before its call's routing ends (T9): first its updates, of which the embeddings may be
a part, then its embeddings. So no later hook, and no write of this step, can change what was stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import add
from typing import Any

from omni_npu_phase.step import results
from omni_npu_phase.step.plan import Run, StepPlan, of_rows
from omni_npu_phase.step.port import Port

BATCHED_HOOK = "preprocess_decode_batch"
SCALAR_HOOK = "preprocess"
MTP_HOOK = "talker_mtp"


def route(plan: StepPlan, port: Port) -> None:
    """Route every row of the step, in row order. Raises :class:`~omni_npu_phase.contract.ContractError`."""
    in_mtp: list[int] = []
    for run in plan.runs(batched=port.has_batched_hook, gathered=port.gathers):
        route_run = _route_batch if run.batched else _route_rows
        route_run(plan, port, run, in_mtp)
    # A hook may have had live buffers in hand; forward and postprocess still read the runner's values (M9).
    every_row = range(len(plan))
    plan.write_fields(every_row, port.infos(every_row))
    if in_mtp:
        port.run_mtp(in_mtp)


def _route_batch(plan: StepPlan, port: Port, run: Run, in_mtp: list[int]) -> None:
    infos = port.infos_for_hooks(run.rows)
    # Right before the hook, over whatever the live buffers hold (M6).
    plan.write_fields(run.rows, infos)
    where = port.locate(run)
    given = port.lend_ids(where)
    raw = port.call_batch(run, infos, given)
    call = port.hook_call(BATCHED_HOOK, run.rows)
    ids, embeds, hidden, text_step, updates = results.batch_result(call, raw, given_ids=given, mtp_width=port.mtp_width)
    port.store_updates(run.rows, updates)
    if port.mtp_width is None:
        port.write_rows(where, ids, embeds)
    else:
        # The ids lent to it may have been changed in place: MTP is given what the hook left.
        port.fill_mtp(len(in_mtp), where, [given if ids is None else ids, embeds, hidden, text_step])
        port.write_rows(where, ids, None)
        in_mtp.extend(run.rows)


def _route_rows(plan: StepPlan, port: Port, run: Run, in_mtp: list[int]) -> None:
    call = port.hook_call(SCALAR_HOOK, run.rows)
    infos = port.infos_for_hooks(run.rows)
    for row, info, ids, embeds in zip(run.rows, infos, *_slices(plan, port, run.rows), strict=True):
        alone, call.requests = range(row, row + 1), (plan.request_ids[row],)
        plan.write_fields(alone, (info,))
        raw = port.call_scalar(row, info, ids, embeds)
        width = port.mtp_width if plan.eligible[row] else None
        rows, new_ids, new_embeds, updates, mtp_inputs = results.scalar_result(
            call, raw, span=plan.spans[row], given_ids=ids, mtp_width=width
        )
        if updates:
            port.store_updates(alone, (updates,))
        where = slice(plan.offsets[row], plan.offsets[row] + rows)
        if mtp_inputs is None:
            port.write_rows(where, new_ids, new_embeds)
        else:
            port.fill_mtp(len(in_mtp), where, [ids if new_ids is None else new_ids, new_embeds, *mtp_inputs])
            if new_ids is not None:
                port.write_rows(where, new_ids, None)
            in_mtp.append(row)
        if rows < plan.spans[row] and new_embeds.data_ptr() not in _addresses(embeds):
            # A hook that returns a part of its slice has written the rest in place.
            start, end = where.stop, plan.offsets[row] + plan.spans[row]
            port.embeds[max(start, plan.offsets[row] + port.selected(row)) : end].zero_()


def _addresses(slice_: Any) -> range:
    return range(slice_.data_ptr(), slice_.data_ptr() + slice_.numel() * slice_.element_size())


def _slices(plan: StepPlan, port: Port, rows: Sequence[int]) -> tuple[Iterable[Any], Iterable[Any]]:
    """Each row's own token ids and embeddings (R9), in one operation each where the rows are adjacent."""
    starts, spans = of_rows(rows, plan.offsets), of_rows(rows, plan.spans)
    ends = list(map(add, starts, spans))
    if starts[1:] == ends[:-1]:
        where = slice(starts[0], ends[-1])
        return port.ids[where].split_with_sizes(spans), port.embeds[where].split_with_sizes(spans)
    own = list(map(slice, starts, ends))
    return map(port.ids.__getitem__, own), map(port.embeds.__getitem__, own)
