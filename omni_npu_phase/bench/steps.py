# SPDX-License-Identifier: Apache-2.0
"""The same step of a runner, again and again, on the conformance bench: vLLM's own input batch, no engine."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from omni_npu_phase.bench.talker import Talker, Updates
from omni_npu_phase.conformance.bench import Bench, Sizes, scheduler_output, single_stage
from omni_npu_phase.conformance.scenarios import MTP, PREFILL, Hook, Row, Step, Variant, row, step

Mix = Literal["decode", "mixed"]
CHUNK = 512
"""Tokens of the prompt chunk in a mixed step."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of step: ``rows`` requests, each a decode row.

    In a ``mixed`` step the middle one is a prompt chunk of ``chunk`` tokens, so that the decode rows are scattered.
    ``resident``: codes stay on the device, as Qwen3-TTS's do. ``dtype``: that of every embedding.
    """

    rows: int
    hidden: int
    hook: Hook
    mix: Mix = "decode"
    updates: Updates = "toy"
    resident: bool = True
    dtype: torch.dtype = torch.bfloat16
    chunk: int = CHUNK

    @property
    def decodes(self) -> int:
        return self.rows - (self.mix == "mixed")

    def placed(self, number: int = 0) -> Step:
        """Its rows in batch order; with another ``number`` the chunk is longer, and offsets behind it are others."""
        rows = [row(f"r{index}", 2, 2 + index % 3, 1, MTP) for index in range(self.decodes)]
        if self.mix == "mixed":
            rows.insert(self.rows // 2, row("prompt", 4 * CHUNK, 0, self.chunk + number, PREFILL))
        return step(*rows)


class Steps(Bench):
    """A runner of ``cls`` that takes steps of a case."""

    def __init__(self, cls: type, case: Case, device: torch.device, kinds: int = 1) -> None:
        self._placed = tuple(case.placed(number) for number in range(kinds))
        longest = max(each.span for rows in self._placed for each in rows)
        before = case.rows // 2 if case.mix == "mixed" else case.decodes
        model = Talker(
            [run for run in (before, case.decodes - before) if run],
            case.hidden,
            case.hook,
            case.updates,
            device,
            chunk=longest if case.mix == "mixed" else 0,
            resident=case.resident,
            dtype=case.dtype,
        )
        sizes = Sizes.of(self._placed, case.hidden, case.dtype)
        super().__init__(cls, model, Variant(case.hook, True), device, sizes)
        self.schedule(self._placed[0])
        self.place(0)

    def token(self, row: Row, position: int) -> int:
        """Any token: the model goes by none."""
        return 1 + position

    def place(self, number: int) -> None:
        """Take the rows of a step of this kind next: the same requests at other offsets. Copies nothing."""
        rows = self._placed[number]
        starts = _starts(rows)
        self.runner.query_start_loc.np[: len(starts)] = starts
        self._scheduled, self._tokens = scheduler_output(rows), starts[-1]

    def prepare(self) -> None:
        """Let the model make what its hooks return in the next step."""
        self.model.begin_step()

    def take(self) -> None:
        """One step up to the model forward."""
        self.runner._preprocess(self._scheduled, self._tokens)


def _starts(rows: Step) -> list[int]:
    return [0, *itertools.accumulate(each.span for each in rows)]


@contextlib.contextmanager
def engineless() -> Iterator[None]:
    """What a step needs of its surroundings."""
    with single_stage(), torch.inference_mode():
        yield
