# SPDX-License-Identifier: Apache-2.0
"""Ask every process of an engine to record what passes the talker's boundary, and read the records.

Nothing is recorded unless OMNI_NPU_PHASE_OBSERVE names a folder. Then vLLM's model registry gives
:class:`~omni_npu_phase.speech.observed_talker.ObservedTalker` for the talker: the released model, whose methods run
unchanged and are written down. Each process writes two files: its rows, one line a step, and once what its runner is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omni_npu_phase import contract
from omni_npu_phase.settings import OBSERVE_VARIABLE

ARCHITECTURE = "Qwen3TTSTalkerForConditionalGeneration"


def install() -> None:
    """Entry point of vLLM's group ``vllm.general_plugins``."""
    if os.environ.get(OBSERVE_VARIABLE):
        from vllm_omni.model_executor.models.registry import OmniModelRegistry

        OmniModelRegistry.register_model(ARCHITECTURE, "omni_npu_phase.speech.observed_talker:ObservedTalker")


@dataclass(frozen=True, slots=True)
class Runner:
    """What called the model, asked in its own process while a step ran."""

    classes: list[str]
    """Names with their modules, in method resolution order; those of the model state follow under Model Runner V2."""
    mixin: str | None
    """The one of this package's mixins among them."""
    mode: str
    """The OMNI_NPU_PHASE that holds for this runner."""
    batch_invariant: bool
    """Whether vLLM's batch-invariant kernels were asked for."""


@dataclass(slots=True)
class Row:
    """One request in one step, as the model saw it."""

    request: str
    step: int
    hook: str
    called_by: str
    """The package whose code called the hook: this one where the mixin did."""
    span: int
    told: dict[str, Any]
    """The runner-owned fields that the hook was given, None where one was missing."""
    sliced_from: int | None
    """Where in its prompt the model took the row's embeddings from; None for a decode row."""
    unchanged: bool
    """Whether the hook's embeddings are what the forward pass got."""
    codes: list[int] | None
    """The frame that MTP made from this row."""
    seen_by_mtp: bool
    """Whether MTP made a frame from this row, or was given its embedding."""
    computed: int = 0
    """Progress before the step: what this request was scheduled in earlier steps. Added up here, not told."""
    prompt_len: int = 0
    seconds: float = 0.0
    """When the forward pass began, since the process started to record."""

    @property
    def lengths(self) -> contract.Row:
        """``P``, ``C`` and ``S``, with what follows from them."""
        return contract.Row(self.prompt_len, self.computed, self.span)


@dataclass(slots=True)
class Request:
    """What was recorded of one request."""

    prompt_len: int
    rows: list[Row] = field(default_factory=list)

    @property
    def codes(self) -> list[list[int]]:
        """Frames in order, each one code a codebook."""
        return [row.codes for row in self.rows if row.codes is not None]

    @property
    def tails(self) -> list[Row]:
        return [row for row in self.rows if row.lengths.tail]


def read(folder: Path) -> list[list[Row]]:
    """The rows in ``folder`` in order, one list for each process that recorded: one for every rank."""
    return [list(_rows(file)) for file in sorted(folder.glob("talker-*.jsonl"))]


def read_runners(folder: Path) -> list[Runner]:
    """The runners in ``folder``, one for each process that recorded, in the order of :func:`read`."""
    return [Runner(**json.loads(file.read_text(encoding="utf-8"))) for file in sorted(folder.glob("runner-*.json"))]


def _rows(file: Path) -> Iterator[Row]:
    for line in file.read_text(encoding="utf-8").splitlines():
        step = json.loads(line)
        for row in step["rows"]:
            yield Row(step=step["step"], seconds=step["seconds"], **row)


def by_request(rows: list[Row], prompt_lens: list[int]) -> list[Request]:
    """Rows by request, in the order in which requests first appear; ``prompt_lens`` in the same order.

    Raises ValueError where the number of requests differs.
    """
    requests: dict[str, Request] = {}
    lengths = iter(prompt_lens)
    for row in rows:
        request = requests.get(row.request)
        if request is None:
            request = requests[row.request] = Request(next(lengths, 0))
        row.prompt_len = request.prompt_len
        row.computed = sum(earlier.span for earlier in request.rows)
        request.rows.append(row)
    if len(requests) != len(prompt_lens):
        raise ValueError(f"{len(prompt_lens)} requests were sent, the model saw {len(requests)}")
    return list(requests.values())
