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
from omni_npu_phase.contract import IS_PREFILL, NUM_COMPUTED, PROMPT_LEN, ContractError


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of the input batch, in its order, that are routed alike.

    A batched run is one call of the batched hook: one-token decode rows, at contiguous offsets (R4) unless they were
    gathered. The rows of any other run get a scalar call each (R2).
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

    def write_fields(self, rows: Sequence[int], infos: Sequence[dict[str, Any]]) -> None:
        """Write the runner-owned fields of rows (M1 to M5) into the dictionaries that belong to them."""
        prompt_lens, num_computed, prefill = self.prompt_lens, self.num_computed, self.prefill
        for row, info in zip(rows, infos, strict=True):
            info[PROMPT_LEN] = prompt_lens[row]
            info[NUM_COMPUTED] = num_computed[row]
            info[IS_PREFILL] = prefill[row]

    def runs(self, *, batched: bool, gathered: bool = False) -> Iterator[Run]:
        """The step's rows in row order; ``batched``: whether the model has a batched decode hook (R2, R4).

        ``gathered``: that hook takes all its rows of the step at once, wherever they lie, before any other row.
        """
        takes = self.eligible if batched else [False] * len(self)
        if gathered and any(takes):
            yield Run([row for row, taken in enumerate(takes) if taken], True)
            others = [row for row, taken in enumerate(takes) if not taken]
            if others:
                yield Run(others, False)
            return
        start = 0
        for row in range(1, len(self)):
            if takes[row] != takes[row - 1] or (takes[row] and self.offsets[row] != self.offsets[row - 1] + 1):
                yield Run(range(start, row), takes[start])
                start = row
        if len(self):
            yield Run(range(start, len(self)), takes[start])


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
    lengths = np.empty((4, len(request_ids)), dtype=np.int64)
    lengths[0], lengths[1], lengths[2], lengths[3] = prompt_lens, num_computed, spans, offsets
    prompt, computed, span, offset = lengths
    ends = offset + span
    if np.minimum.reduce(lengths, axis=None, initial=0) < 0 or np.maximum.reduce(ends, initial=0) > buffer_rows:
        _refuse(request_ids, prompt < 0, "a prompt length of at least 0", prompt)
        _refuse(request_ids, computed < 0, "a progress of at least 0", computed)
        _refuse(request_ids, span < 0, "a span of at least 0", span)
        _refuse(request_ids, offset < 0, "an offset of at least 0", offset)
        _refuse(request_ids, ends > buffer_rows, f"a span that ends within {buffer_rows} rows", ends)
    columns = lengths.tolist()
    return StepPlan(
        request_ids=request_ids,
        prompt_lens=columns[0],
        num_computed=columns[1],
        spans=columns[2],
        offsets=columns[3],
        prefill=contract.is_prefill(prompt, computed).tolist(),
        eligible=contract.is_mtp_eligible(prompt, computed, span).tolist(),
    )


def _refuse(request_ids: Sequence[str], wrong: npt.NDArray[np.bool_], expected: str, actual: Any) -> None:
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ContractError("E4", requests=[request_ids[row]], rows=[row], expected=expected, actual=str(actual[row]))
