# SPDX-License-Identifier: Apache-2.0
"""The recorder: steps are put into a ring on the step's thread, and written to a file by another."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from omni_npu_phase import contract
from omni_npu_phase.releases import v2
from omni_npu_phase.step.plan import StepPlan
from omni_npu_phase.tracing import schema

# vLLM shows what is logged under its own name.
logger = logging.getLogger("vllm.omni_npu_phase")

RING_STEPS = 1024
"""Steps that wait to be written; more push the oldest out, and its number is missing in the file."""
FLUSH_SECONDS = 0.25
"""How often what waits is written: as much is lost when a process is killed."""
_PAUSE_SECONDS = 0.0005
_EPOCH = time.time_ns() - time.perf_counter_ns()
"""What makes a reading of the clock a time since the epoch."""

Integers = npt.NDArray[np.integer[Any]]


@dataclass(slots=True)
class Observed:
    """One step as it was seen, before anything is made of it. Arrays have shape (rows,) in input-batch order."""

    number: int
    began: int
    """By ``time.perf_counter_ns``; a step begins when its inputs begin to be prepared."""
    request_ids: Sequence[str]
    prompt_lens: Integers
    num_computed: Integers
    spans: Integers | Mapping[str, int]
    """By row, or by request id."""
    offsets: Integers
    buffer_rows: int
    known: Integers | None = None
    """Tokens that each request has, sampled ones too: what a row reads of them again is a replay."""
    calls: list[tuple[str, Sequence[Any], Sequence[Any] | None]] = field(default_factory=list)
    """Hook calls in order: the hook, its request ids, and what each was told."""
    mtp: list[tuple[Sequence[Any], Sequence[int] | None]] = field(default_factory=list)
    """MTP calls in order: request ids, and their offsets."""
    filled: Sequence[Any] = ()
    """Requests whose rows ``preprocess_batch`` filled itself."""
    given: Mapping[str, int] = field(default_factory=dict)
    """How many leading tokens of requests exact replay gave back."""
    plan: StepPlan | None = None
    ended: int = 0
    error: str | None = None


class Recorder:
    """Writes one runner's steps into a file that is made with the first of them.

    ``header`` is asked for with the first step, on its thread: later a runner may be taken apart. A file that cannot be
    written ends the recording with one warning; nothing is raised into the engine.
    """

    def __init__(self, folder: Path, header: Callable[[], schema.Header]) -> None:
        self.folder = folder
        self.path: Path | None = None
        self.stopped = False
        """Whether nothing is recorded any more: closed, or the file could not be written."""
        self._describe = header
        self._header: schema.Header | None = None
        self._ring: deque[Observed] = deque(maxlen=RING_STEPS)
        self._file: TextIO | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._pid = os.getpid()
        self._infers_scalar = False
        # atexit alone would not do: forked workers of multiprocessing end without it.
        self._at_exit = Finalize(None, _close, args=(self._pid, self._finish), exitpriority=100)

    def add(self, step: Observed) -> None:
        """Take a step that has ended, on the step's thread; :meth:`flush` is called for one that ended in an error."""
        self._ring.append(step)
        if self._header is None:
            self._begin()
        if step.error is not None:
            self.flush()

    def _begin(self) -> None:
        try:
            self._header = self._describe()
            threading.Thread(target=self._write_on, name="omni-npu-phase trace", daemon=True).start()
        except Exception as error:  # noqa: BLE001 - a trace must not stop an engine
            self.fail("cannot begin a trace", error)

    def flush(self) -> None:
        """Write what waits, now and in this thread."""
        self._drain(pause=0.0)

    def close(self) -> None:
        """Write what waits and close the file. May be called again."""
        self._at_exit()

    def fail(self, what: str, error: Exception) -> None:
        """End the recording, saying why once."""
        if not self.stopped:
            self.stopped = True
            self._ring.clear()
            logger.warning(
                "omni-npu-phase: %s (%s: %s). The trace ends here, the engine goes on.",
                what,
                type(error).__name__,
                error,
            )

    def _write_on(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS) and not self.stopped:
            # In small bites: the step's thread must not wait for the interpreter's lock.
            self._drain(pause=_PAUSE_SECONDS)

    def _drain(self, pause: float) -> None:
        with self._lock:
            try:
                while self._ring and not self.stopped:
                    step = self._ring.popleft()
                    file = self._opened()
                    file.write(_line(described(step, infer_scalar=self._infers_scalar)))
                    if pause:
                        time.sleep(pause)
                if self._file is not None and not self.stopped:
                    self._file.flush()
            except OSError as error:
                self.fail(f"cannot write {self.path or self.folder}", error)
            except Exception as error:  # noqa: BLE001 - a step that cannot be described must not stop an engine
                self.fail("cannot describe a step", error)

    def _finish(self) -> None:
        self._closing.set()
        self._drain(pause=0.0)
        self.stopped = True
        with self._lock:
            try:
                if self._file is not None:
                    self._file.close()
            except OSError:
                # What could not be written was said when it failed.
                logger.debug("omni-npu-phase: %s was not closed", self.path)

    def _opened(self) -> TextIO:
        if self._file is None:
            header = self._header
            assert header is not None
            self.folder.mkdir(parents=True, exist_ok=True)
            self.path, self._file = _new_file(self.folder, header.file_stem)
            self._infers_scalar = header.preprocess and not header.hooks
            self._file.write(_line(header.as_json()))
        return self._file


def _close(pid: int, finish: Callable[[], None]) -> None:
    # A fork has the ring of its parent, who writes it.
    if os.getpid() == pid:
        finish()


def _new_file(folder: Path, stem: str) -> tuple[Path, TextIO]:
    number = 1
    while True:
        path = folder / f"{stem}{'' if number == 1 else f'-{number}'}.jsonl"
        try:
            return path, path.open("x", encoding="utf-8")
        except FileExistsError:
            number += 1


def _line(document: Mapping[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n"


def described(step: Observed, *, infer_scalar: bool) -> dict[str, Any]:
    """The step as its line in the file.

    ``infer_scalar``: calls of the scalar hook were not watched, so that rows which no batched call took are put down
    to it.
    """
    rows = _rows(step)
    by_request = {row.request: row for row in rows}
    strays: list[list[Any]] = []
    called: set[str] = set()
    for number, (hook, requests, told) in enumerate(step.calls):
        for index, request in enumerate(requests):
            row = by_request.get(request)
            if row is None or request in called:
                strays.append([hook, number, _text(request)])
                continue
            called.add(request)
            row.hook, row.call, row.entry = hook, number, index
            if told is not None:
                row.told = [_plain(value) for value in told[index]]
    for request in step.filled:
        if request in by_request and request not in called:
            by_request[request].hook = schema.FILLED
    if infer_scalar and step.error is None:
        for row in rows:
            given = row.given and row.given == row.span
            if row.hook is None and not given and not row.request.startswith(v2.WARMUP):
                row.hook = schema.SCALAR
    for position, (request, at) in enumerate(_mtp_entries(step)):
        row = by_request.get(request)
        if row is None or row.mtp is not None:
            strays.append([schema.MTP, position, _text(request)])
        else:
            row.mtp, row.mtp_at = position, at
    document: dict[str, Any] = {
        "step": step.number,
        "time": (step.began + _EPOCH) // 1000,
        "took": (step.ended - step.began) // 1000,
        "buffer": step.buffer_rows,
        "rows": [row.as_json() for row in rows],
    }
    if step.given:
        document["given"] = dict(step.given)
    if strays:
        document["strays"] = strays
    if step.error is not None:
        document["error"] = step.error
    return document


def _rows(step: Observed) -> list[schema.Row]:
    spans = step.spans
    if isinstance(spans, Mapping):
        by_row = [spans.get(request, schema.NOT_SCHEDULED) for request in step.request_ids]
    else:
        by_row = spans.tolist()
    told = {} if step.plan is None else {request: row for row, request in enumerate(step.plan.request_ids)}
    rows = []
    for request, prompt_len, num_computed, span, at, known in zip(
        step.request_ids,
        step.prompt_lens.tolist(),
        step.num_computed.tolist(),
        by_row,
        step.offsets.tolist(),
        repeat(0, len(step.request_ids)) if step.known is None else step.known.tolist(),
        strict=True,
    ):
        lengths = contract.Row(prompt_len, num_computed, span)
        row = schema.Row(
            *(request, prompt_len, num_computed, span, at),
            phase=lengths.phase,
            crosses=lengths.crosses,
            replay=lengths.replays(known),
            given=step.given.get(request, 0),
        )
        if step.plan is not None and request in told:
            fields: dict[str, Any] = {}
            step.plan.write_fields([told[request]], [fields])
            row.told = [_plain(value) for value in fields.values()]
        rows.append(row)
    return rows


def _mtp_entries(step: Observed) -> Iterator[tuple[Any, int | None]]:
    for requests, offsets in step.mtp:
        for index, request in enumerate(requests):
            yield request, None if offsets is None or index >= len(offsets) else int(offsets[index])


def _plain(value: Any) -> Any:
    """A field as JSON holds it; of a value of another type only the type, for a tensor would have to be waited for."""
    return value if value is None or type(value) in (int, bool) else f"<{type(value).__name__}>"


def _text(request: Any) -> str | None:
    return None if request is None else str(request)
