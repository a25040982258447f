# SPDX-License-Identifier: Apache-2.0
"""Mutants of the mixin for Model Runner V2, its four faults among them; what it shares with V1 is in ``mutants.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from omni_npu_phase.contract import MTP_INPUTS
from omni_npu_phase.releases import v2
from omni_npu_phase.step import v2 as model_state
from omni_npu_phase.step.plan import StepPlan
from omni_npu_phase.step.v2 import PhaseStateMixin, StatePort
from tests.cpu.mutants import Change, Mutant


def _one_token_rows(original: Any, *args: Any, **keywords: Any) -> StepPlan:
    plan: StepPlan = original(*args, **keywords)
    return replace(plan, eligible=[span == 1 for span in plan.spans])


def _phase_by_span(original: Any, *args: Any, **keywords: Any) -> StepPlan:
    plan: StepPlan = original(*args, **keywords)
    one_token = [span == 1 for span in plan.spans]
    return replace(plan, prefill=[not one for one in one_token], eligible=one_token)


class _AnyState:
    """Request states that know every request of the batch, in the slot that the batch names."""

    def __init__(self, req_states: Any, input_batch: Any) -> None:
        self._states = req_states
        self.req_id_to_index = dict(zip(input_batch.req_ids, input_batch.idx_mapping_np.tolist(), strict=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._states, name)


def _rows_unchecked(original: Any, state: Any, input_batch: Any, inputs: Any, req_states: Any, *rest: Any) -> None:
    for slot, request_id in zip(input_batch.idx_mapping_np.tolist(), input_batch.req_ids, strict=True):
        state.intermediate_buffer.buffers[slot].setdefault("req_id", request_id)
    original(state, input_batch, inputs, _AnyState(req_states, input_batch), *rest)


def _always_mtp(original: Any, port: Any, *args: Any) -> None:
    original(port, *args)
    port.mtp_width = port.embeds.shape[-1]


def _packed_from_behind(original: Any, port: Any, position: int, where: Any, parts: list[Any]) -> None:
    original(port, sum(port.plan.eligible) - position - len(parts[-1]), where, parts)


def _last_rows_only(original: Any, port: Any, rows: Sequence[int]) -> None:
    """MTP for the rows of the last hook call, as where batched and scalar rows are packed apart."""
    original(port, rows[-1:])


def _private_infos(original: Any, port: Any, rows: Sequence[int]) -> list[dict[Any, Any]]:
    return [dict(info) for info in original(port, rows)]


def _by_row(original: Any, req_states: Any) -> Any:
    # Slots are given out from the last one down, so rows are never slots.
    return original(req_states)[::-1].copy()


def _prefill_len(original: Any, req_states: Any) -> Any:
    return req_states.prefill_len.np


def _progress_after_the_step(original: Any, input_batch: Any) -> Any:
    return np.asarray(original(input_batch)) + input_batch.num_scheduled_tokens


def _released_mtp_call(original: Any, state: Any, *args: Any, **keywords: Any) -> Any:
    return super(PhaseStateMixin, state)._call_mtp_runner(*args, **keywords)


def _released_postprocess(original: Any, state: Any, *args: Any) -> None:
    super(PhaseStateMixin, state).run_postprocess(*args)


def _switched_off(original: Any, state: Any) -> Any:
    phase = original(state)
    phase.mode = "off"
    return phase


def _updates_of_neighbour(original: Any, port: Any, rows: Sequence[int], updates: Any) -> None:
    original(port, [(row + 1) % len(port.slots) for row in rows], updates)


def _one_row_further(original: Any, port: Any, where: slice, ids: Any, embeds: Any) -> None:
    original(port, where, ids, embeds)
    if embeds is not None:
        port.embeds[where.stop].copy_(embeds[-1])


def _inputs_stored(original: Any, port: Any, rows: Sequence[int], updates: Any) -> None:
    original(port, rows, updates)
    for info, update in zip(port.infos(rows), updates, strict=True):
        info.update({MTP_INPUTS: update[MTP_INPUTS]} if MTP_INPUTS in update else {})


def _deep_values_not_owned(original: Any, port: Any, rows: Sequence[int], updates: Any) -> None:
    original(port, rows, updates)
    for info, update in zip(port.infos(rows), updates, strict=True):
        for key, group in update.items():
            if isinstance(group, dict):
                info[key].update({name: value for name, value in group.items() if isinstance(value, (dict, tuple))})


# fmt: off
MUTANTS_V2: tuple[Mutant, ...] = (
    # The four faults.
    Mutant("v2-prefill-rows-to-mtp", ("T1", "T2", "T3"), "one-token rows go to MTP whatever their phase",
           (Change(model_state, "plan_of", _one_token_rows),)),
    Mutant("v2-phase-by-span", ("M5", "T2"), "the phase is guessed from the span",
           (Change(model_state, "plan_of", _phase_by_span),)),
    Mutant("v2-unknown-rows", ("E4",), "a row without request state is taken as its slot has it",
           (Change(PhaseStateMixin, "run_preprocess", _rows_unchecked),)),
    Mutant("v2-five-values", ("R4",), "every batched hook is unpacked as five values",
           (Change(StatePort, "__init__", _always_mtp),), raises=("ContractError",)),
    Mutant("v2-packed-otherwise", ("T4", "T5"), "MTP's packed rows are not in the order of its rows",
           (Change(StatePort, "fill_mtp", _packed_from_behind),)),
    Mutant("v2-packed-apart", ("T1", "T4"), "MTP runs for the rows of one hook call only",
           (Change(StatePort, "run_mtp", _last_rows_only),)),
    # What is taken from V2.
    Mutant("v2-private-infos", ("M9",), "hooks and forward see copies of the live buffers",
           (Change(StatePort, "infos", _private_infos),)),
    Mutant("v2-prompt-len-by-row", ("M3",), "prompt lengths of other slots", (Change(v2, "prompt_lens", _by_row),)),
    Mutant("v2-prefill-len", ("M3", "M5"), "the prompt length counts recomputed outputs",
           (Change(v2, "prompt_lens", _prefill_len),)),
    Mutant("v2-progress-after", ("M4", "T2"), "the progress counts the scheduled span",
           (Change(v2, "num_computed", _progress_after_the_step),)),
    Mutant("v2-aliasing-codes", ("T9",), "stored codes are rows of MTP's own output",
           (Change(PhaseStateMixin, "_call_mtp_runner", _released_mtp_call),)),
    Mutant("v2-aliasing-hidden", ("T9",), "what postprocess stores shares memory with the hidden states",
           (Change(PhaseStateMixin, "run_postprocess", _released_postprocess),)),
    Mutant("v2-rows-together", ("R6", "T11"), "seeded rows of a one-stream MTP are joined by the released loop",
           (Change(StatePort, "takes_rows_apart", lambda original, port, rows: False),)),
    Mutant("v2-updates-of-neighbour", ("R8",), "updates go to the next row's request",
           (Change(StatePort, "store_updates", _updates_of_neighbour),)),
    Mutant("v2-one-row-further", ("R6",), "a row behind each result is written too",
           (Change(StatePort, "write_rows", _one_row_further),)),
    Mutant("v2-inputs-stored", ("E6",), "mtp_inputs that are not consumed are stored with the request",
           (Change(StatePort, "store_updates", _inputs_stored),)),
    Mutant("v2-deep-updates", ("T9",), "what lies deep in an update is stored as it is",
           (Change(StatePort, "store_updates", _deep_values_not_owned),)),
    Mutant("v2-off", ("M9", "T2", "R4", "E4"), "the mixin does nothing",
           (Change(model_state, "phase_of", _switched_off),),
           raises=("RuntimeError", "ValueError", "AttributeError", "TypeError", "NotImplementedError", "IndexError")),
)
# fmt: on
"""Every mutant, the four faults first."""
