# SPDX-License-Identifier: Apache-2.0
"""How a scenario is run: a runner taken through its steps by its own methods, and what every step leaves behind."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from omni_npu_phase.conformance import recording_model as recording
from omni_npu_phase.conformance.bench import ROWS_BEHIND, Bench, scenario_bench, single_stage
from omni_npu_phase.conformance.recording_model import Log
from omni_npu_phase.conformance.scenarios import Row, Scenario, SetupError, Step, Variant
from omni_npu_phase.contract import FIELDS
from omni_npu_phase.releases import names_in


@dataclass(slots=True)
class StepRecord:
    """What one step left behind, beside the model's log. Tensors are host copies in float32 or int64."""

    rows: Step
    offsets: list[int]
    log: Log = field(default_factory=Log)
    returned_ids: list[int] | None = None
    embeds: list[list[float]] | None = None
    same_buffers: bool = True
    """Whether the tensors returned are the runner's own buffers, at their old addresses (R6)."""
    ids_written: bool = False
    codes: dict[str, list[int] | None] = field(default_factory=dict)
    """Each request's stored codes after the step, and those after everything the device wrote later (T9)."""
    codes_later: dict[str, list[int] | None] = field(default_factory=dict)
    last_later: dict[str, list[float] | None] = field(default_factory=dict)
    live: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Each request's live buffer as the model forward found it."""
    forward: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the model forward was handed of each live buffer, and the live buffers behind the step: with exact replay
    alone (X1)."""
    after: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class Recording:
    """A scenario run: its steps as far as they came, the error that ended it, and the warnings on the way."""

    scenario: Scenario
    variant: Variant
    device: str
    steps: list[StepRecord] = field(default_factory=list)
    error: BaseException | None = None
    untouched_by_error: bool = True
    """After an error: whether nothing of the refused rows was written since their hook returned."""
    warnings: list[str] = field(default_factory=list)
    fills_rows: bool = False
    """Whether the released runner lets ``preprocess_batch`` fill rows (M10)."""
    unanswered: float = 0.0
    """What an embedding row holds that its hook gave nothing for (E5): nothing of an older step."""
    indices: Mapping[str, int] = field(init=False)
    """The number of each request, by which token ids name it."""

    def __post_init__(self) -> None:
        self.indices = self.scenario.indices

    def token(self, row: Row, index: int = 0) -> int:
        return recording.token(self.indices[row.request], row.num_computed + index)


def run_scenario(cls: type, scenario: Scenario, variant: Variant, device: torch.device) -> Recording:
    """Run one scenario on a runner of ``cls``. What the runner raises in a step is recorded, not raised.

    Raises :class:`SetupError` where no runner of the class can be made, and where a step reads what only the runner's
    own ``__init__``, or an engine, sets.
    """
    fills_rows = "preprocess_batch_fills_rows" in names_in(cls.__mro__, "_maybe_run_batch_preprocess")
    record = Recording(scenario, variant, device.type, fills_rows=fills_rows)
    with _warnings_of_package(record.warnings), single_stage():
        try:
            bench = scenario_bench(cls, scenario, variant, device)
        except Exception as error:
            raise SetupError(f"cannot set up {cls.__qualname__}: {type(error).__name__}: {error}") from error
        record.unanswered = bench.unanswered
        drive = Drive(bench, record)
        try:
            with torch.inference_mode():
                for rows in scenario.steps:
                    drive.take_step(rows)
        except (Exception, SystemExit) as error:
            if missing := bench.missing(error):
                raise SetupError(f"{cls.__qualname__} cannot be judged here: {missing}") from error
            record.error = error
    return record


class Drive:
    """A bench that is taken through the steps of a scenario, and the record of it."""

    def __init__(self, bench: Bench, record: Recording) -> None:
        self.bench, self.record = bench, record
        bench.model.returning = self._remember

    def take_step(self, rows: Step) -> None:
        bench, short = self.bench, self.record.scenario.setting.buffer_short
        *offsets, total = bench.schedule(rows)
        buffer_rows = total - short if short else total + ROWS_BEHIND
        step = StepRecord(rows, offsets)
        bench.model.log = step.log
        self.record.steps.append(step)
        self._remember()
        ids, embeds = bench.inputs()
        ids_version, addresses = ids._version, (ids.data_ptr(), embeds.data_ptr())
        try:
            outputs = bench.preprocess(rows, buffer_rows)
        except Exception as error:
            self.record.untouched_by_error = self._untouched(step, getattr(error, "requests", ()))
            raise
        step.ids_written = ids._version != ids_version
        step.same_buffers = self._same_buffers(outputs, addresses)
        step.returned_ids = None if outputs[0] is None else outputs[0].tolist()
        step.embeds = None if outputs[1] is None else outputs[1].float().tolist()
        step.live = {request: recording.copy_info(info) for request, info in bench.live().items()}
        step.codes = {row.request: self.stored_codes(row.request) for row in rows}
        if self.record.scenario.setting.replay:
            step.forward = {
                row.request: recording.copy_info(info) for row, info in zip(rows, bench.forward, strict=True)
            }
        self._finish_step(rows, step)

    def _finish_step(self, rows: Step, step: StepRecord) -> None:
        """Postprocessing by the released code, then all device buffers written over, as a next step would."""
        bench = self.bench
        for row, start in zip(rows, step.offsets, strict=True):
            bench.hidden[start : start + row.span].fill_(self.record.indices[row.request])
        if self.record.scenario.behaviour.has_preprocess:
            bench.postprocess(rows)
        bench.model.scribble()
        bench.hidden.fill_(200)
        if self.record.scenario.setting.replay:
            # The released runner counts outputs in them.
            step.after = {request: _stored({**info, "generated_len": 0}) for request, info in bench.live().items()}
        for row in rows:
            step.codes_later[row.request] = self.stored_codes(row.request)
            info = bench.live().get(row.request, {})
            last = info.get("last", {}).get("hidden", info.get("hidden_states", {}).get("layers", {}).get(0))
            step.last_later[row.request] = None if last is None else last.float().reshape(-1).tolist()

    def stored_codes(self, request: str) -> list[int] | None:
        codes = self.bench.live().get(request, {}).get("codes", {}).get("audio")
        return None if codes is None else [int(value) for value in codes.reshape(-1).tolist()]

    def _remember(self) -> None:
        """Note what a runner may write to: where a step begins, and again whenever a hook returns.

        By then the runner has refreshed its keywords, and the hook has mutated what it wanted to.
        """
        self.remembered = self._contents()

    def _contents(self) -> _Contents:
        ids, embeds = self.bench.inputs()
        mtp_ids, *mtp_parts = self.bench.mtp_inputs() if self.record.variant.mtp else [torch.empty(0)]
        return _Contents(
            ids=ids.tolist(),
            embeds=embeds.float().tolist(),
            stored={request: _stored(info) for request, info in self.bench.live().items()},
            in_mtp=[
                [recording.place(int(token_id)) for token_id in mtp_ids.tolist()],
                *([recording.place_of(vector) for vector in part.float().tolist()] for part in mtp_parts),
            ],
        )

    def _untouched(self, step: StepRecord, named: Sequence[str]) -> bool:
        """Whether nothing was written of the rows that the error names, those of their hook call, and those behind it.

        Rows of earlier calls are not looked at: what their hooks returned may be written at any time.
        """
        before, now = self.remembered, self._contents()
        last = max((call.call for call in step.log.hooks), default=None)
        called = {call.place for call in step.log.hooks}
        refused = {call.place for call in step.log.hooks if call.call == last}
        if not refused & {recording.place(self.record.token(row)) for row in step.rows if row.request in named}:
            refused = set()
        for row, start in zip(step.rows, step.offsets, strict=True):
            own, span = recording.place(self.record.token(row)), slice(start, start + row.span)
            if own in called and own not in refused and row.request not in named:
                continue
            if now.ids[span] != before.ids[span] or now.embeds[span] != before.embeds[span]:
                return False
            known, found = (contents.stored.get(row.request, {}) for contents in (before, now))
            # Before the first hook, a runner may already have put keywords of its own into the buffer.
            if found != known and (last is not None or any(found.get(key) != known[key] for key in known)):
                return False
            for was, lies in zip(before.in_mtp, now.in_mtp, strict=True):
                if any(new == own != old for old, new in zip(was, lies, strict=True)):
                    return False
        return True

    def _same_buffers(self, outputs: Sequence[Any], addresses: tuple[int, int]) -> bool:
        if tuple(buffer.data_ptr() for buffer in self.bench.inputs()) != addresses:
            return False
        return all(
            tensor is None or tensor.data_ptr() == address
            for tensor, address in zip(outputs[:2], addresses, strict=True)
        )


@dataclass(frozen=True, slots=True)
class _Contents:
    """What a runner may write to, as it was at one time."""

    ids: list[int]
    embeds: list[list[float]]
    stored: dict[str, dict[str, Any]]
    """Each live buffer without the runner-owned fields, which may be refreshed at any time (M9)."""
    in_mtp: list[list[tuple[int, int]]]
    """Request and position that each row of each MTP input buffer names."""


def _stored(info: Any) -> dict[str, Any]:
    if not isinstance(info, dict):
        return {"no dictionary": _frozen(info)}
    return {key: _frozen(value) for key, value in info.items() if key not in FIELDS}


def _frozen(value: Any) -> Any:
    """A value that later writes into it do not change, and that compares as a whole."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: _frozen(inner) for key, inner in value.items()}
    return [_frozen(inner) for inner in value] if isinstance(value, (list, tuple)) else value


@contextlib.contextmanager
def _warnings_of_package(into: list[str]) -> Iterator[None]:
    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            into.append(record.getMessage())

    logger, handler = logging.getLogger("omni_npu_phase"), Collect(logging.WARNING)
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
