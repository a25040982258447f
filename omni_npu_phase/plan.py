# SPDX-License-Identifier: Apache-2.0
"""One step's rows, computed once: lengths, phases, offsets, and how rows are grouped into hook calls.

A plan is pure: it is made from lengths and offsets, holds no tensor and no runner, and is the same for every runner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from omni_npu_phase import contract
from omni_npu_phase.contract import ContractError


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of the input batch, in its order, that one hook call takes.

    A batched run is one-token decode rows, at contiguous offsets (R4) unless they were gathered; every other run is a
    single row (R2).
    """

    rows: Sequence[int]
    batched: bool

    @property
    def start(self) -> int:
        return self.rows[0]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of one step in input-batch order (M7). Every list has one entry per row; counts are in tokens.

    Entries are Python ints and bools, because hooks receive them as they are (M2).
    """

    request_ids: Sequence[str]
    prompt_lens: list[int]
    num_computed: list[int]
    spans: list[int]
    offsets: list[int]
    prefill: list[bool]
    eligible: list[bool]

    def __len__(self) -> int:
        return len(self.request_ids)

    def fields(self, row: int) -> dict[str, int | bool]:
        """The runner-owned fields of a row (M1 to M5)."""
        return {
            contract.PROMPT_LEN: self.prompt_lens[row],
            contract.NUM_COMPUTED: self.num_computed[row],
            contract.IS_PREFILL: self.prefill[row],
        }

    def runs(self, *, batched: bool, gathered: bool = False) -> Iterator[Run]:
        """Hook calls of the step in row order; ``batched``: whether the model has a batched decode hook (R2, R4).

        ``gathered``: that hook takes all its rows of the step at once, wherever they lie, before any other row.
        """
        if not self.request_ids:
            return
        if batched and gathered:
            decodes = [row for row, eligible in enumerate(self.eligible) if eligible]
            if decodes:
                yield Run(decodes, True)
            yield from (Run(range(row, row + 1), False) for row, eligible in enumerate(self.eligible) if not eligible)
            return
        offsets = np.asarray(self.offsets)
        takes = np.asarray(self.eligible) & batched
        joins = takes[1:] & takes[:-1] & (offsets[1:] == offsets[:-1] + 1)
        starts = [0, *(np.flatnonzero(~joins) + 1).tolist()]
        for start, stop in zip(starts, [*starts[1:], len(self)], strict=True):
            yield Run(range(start, stop), bool(takes[start]))


def plan_step(
    request_ids: Sequence[str],
    prompt_lens: npt.ArrayLike,
    num_computed: npt.ArrayLike,
    spans: npt.ArrayLike,
    offsets: npt.ArrayLike,
    *,
    buffer_rows: int,
) -> StepPlan:
    """Classify every row of a step.

    All four arrays have shape (rows,) and any integer dtype; ``offsets`` are rows of the step's input buffer, which
    has ``buffer_rows`` rows. Raises :class:`ContractError` (E4) for a negative length or a span outside the buffer.
    """
    prompt, computed, span, offset = (
        np.asarray(values, dtype=np.int64).reshape(-1) for values in (prompt_lens, num_computed, spans, offsets)
    )
    _refuse(request_ids, prompt < 0, "a prompt length of at least 0", prompt)
    _refuse(request_ids, computed < 0, "a progress of at least 0", computed)
    _refuse(request_ids, span < 0, "a span of at least 0", span)
    _refuse(request_ids, offset < 0, "an offset of at least 0", offset)
    _refuse(request_ids, offset + span > buffer_rows, f"a span that ends within {buffer_rows} rows", offset + span)
    return StepPlan(
        request_ids=request_ids,
        prompt_lens=prompt.tolist(),
        num_computed=computed.tolist(),
        spans=span.tolist(),
        offsets=offset.tolist(),
        prefill=contract.is_prefill(prompt, computed).tolist(),
        eligible=contract.is_mtp_eligible(prompt, computed, span).tolist(),
    )


def _refuse(request_ids: Sequence[str], wrong: npt.NDArray[np.bool_], expected: str, actual: Any) -> None:
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ContractError("E4", requests=[request_ids[row]], rows=[row], expected=expected, actual=str(actual[row]))
