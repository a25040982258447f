# SPDX-License-Identifier: Apache-2.0
"""The trace file: a header line and one line a step, as docs/trace.md describes it; written here and read here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from omni_npu_phase import contract

FORMAT = "omni-npu-phase/trace"
SCHEMA = 2
"""Schema 1 had no replica, and no rows that ``preprocess_batch`` fills."""
COLUMNS = (
    *("request", "P", "C", "S", "at", "phase", "crosses", "replay"),
    *("hook", "call", "entry", "mtp", "mtp_at", "told"),
)
"""Names of a row's values, in their order in the file."""
NOT_SCHEDULED = -1
"""The span of a row that the scheduler gave none."""
BATCHED, SCALAR, MTP = "batched", "scalar", "mtp"
"""Hooks in ``hook`` and, with MTP, in strays."""
FILLED = "filled"
"""``hook`` of a row that ``preprocess_batch`` filled, and that gets no hook for that."""
_LONGEST_HEADER = 1 << 16


class TraceError(Exception):
    """A file is no trace, or none that this version reads; the message is one line."""


@dataclass(slots=True)
class Row:
    """One request in one step. ``P``, ``C`` and ``S`` are those of the input batch, whatever hooks were told."""

    request: str
    prompt_len: int
    num_computed: int
    span: int
    at: int
    """The row's offset in the step's input buffer."""
    phase: str
    crosses: bool = False
    replay: bool = False
    hook: str | None = None
    """``batched``, ``scalar`` or ``filled``; None where no call was seen."""
    call: int | None = None
    """Number of the hook call in the step; rows of one batched call share it. None for a scalar call not watched."""
    entry: int | None = None
    """Place among the rows of its hook call."""
    mtp: int | None = None
    """Position in the MTP batch."""
    mtp_at: int | None = None
    """The offset that MTP was given for it."""
    told: list[Any] | None = None
    """The three fields as the hook got them: None for one that was missing, ``"<type>"`` for one of another type."""
    given: int = 0
    """Leading tokens that exact replay gave back, which stand beside the rows in the file."""

    @property
    def new(self) -> Row | None:
        """The row of its new part, which hooks and MTP see; None where there is none."""
        if self.given and self.given == self.span:
            return None
        lengths = contract.Row(self.prompt_len, self.num_computed + self.given, self.span - self.given)
        return replace(
            self,
            num_computed=lengths.num_computed,
            span=lengths.span,
            at=self.at + self.given,
            phase=lengths.phase,
            crosses=lengths.crosses,
            given=0,
        )

    def as_json(self) -> list[Any]:
        return [getattr(self, name) for name in _ROW_FIELDS]

    @property
    def lengths(self) -> contract.Row:
        """``P``, ``C`` and ``S``, with what follows from them."""
        return contract.Row(self.prompt_len, self.num_computed, self.span)

    @property
    def seen_by_mtp(self) -> bool:
        return self.mtp is not None

    def __str__(self) -> str:
        return f"{self.request} ({self.lengths})"

    @property
    def named(self) -> dict[str, Any]:
        """The row's values under their names in the file."""
        return {**dict(zip(COLUMNS, self.as_json(), strict=True)), **({"given": self.given} if self.given else {})}


_ROW_FIELDS = tuple(each.name for each in fields(Row) if each.name != "given")
_INTEGER = (int,)
_PLACE = (int, type(None))
_KINDS: tuple[tuple[type, ...], ...] = (
    *((str,), _INTEGER, _INTEGER, _INTEGER, _INTEGER, (str,), (bool,), (bool,)),
    *((str, type(None)), _PLACE, _PLACE, _PLACE, _PLACE, (list, type(None))),
)
"""Types of a row's values, by column."""
_LONGEST_INTEGER = 63


@dataclass(frozen=True, slots=True)
class Stray:
    """An entry of a hook or MTP call that belongs to no row, or to one that has its entry already."""

    what: str
    place: int
    """Number of the hook call, or position in the MTP batch."""
    request: str | None


@dataclass(slots=True)
class Step:
    """One step: its number in its process, when it began (microseconds since the epoch) and how long it took."""

    number: int
    time: int
    took: int
    """Microseconds from the selection of inputs to the model's forward pass, which is not part of it."""
    buffer: int
    """Rows of the step's input buffer, padding included."""
    rows: list[Row]
    strays: list[Stray] = field(default_factory=list)
    error: str | None = None
    """The error it ended in: its type, with the clause of a ContractError."""


@dataclass(frozen=True, slots=True)
class Header:
    """Who wrote a trace."""

    stage: int
    replica: int
    """Which engine of the stage it is, where a stage has several."""
    dp: int
    pp: int
    tp: int
    pid: int
    runner: str
    """The runner's class, MODULE.NAME."""
    family: str
    """``v1`` for a runner, ``v2`` for a model state of Model Runner V2."""
    mixin: bool
    """Whether the phase mixin routes; what hooks were told is then what it plans."""
    model: str
    preprocess: bool
    """Whether the model has per-row hooks."""
    batched: bool
    """Whether it has a batched hook."""
    gathers: bool
    """Whether that hook takes all decode rows of a step at once, wherever they lie."""
    mtp: bool
    hooks: bool
    """Whether every hook call is recorded, with what it was told; otherwise only calls of the batched hook are."""
    version: str

    @property
    def file_stem(self) -> str:
        replica = f"-replica{self.replica}" if self.replica else ""
        return f"trace-stage{self.stage}{replica}-dp{self.dp}-pp{self.pp}-tp{self.tp}-pid{self.pid}"

    @property
    def title(self) -> str:
        replica = f" replica {self.replica}" if self.replica else ""
        return f"stage {self.stage}{replica} DP {self.dp} PP {self.pp} TP {self.tp}"

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "schema": SCHEMA, **asdict(self), "columns": list(COLUMNS)}


@dataclass(slots=True)
class Trace:
    """A trace file that is read as it is gone through; only its header is held."""

    path: Path
    header: Header
    notes: list[str] = field(default_factory=list)
    """What is missing of the file; complete when :meth:`steps` has come to its end."""

    def steps(self) -> Iterator[Step]:
        """Every step in order. Raises :class:`TraceError` for a line that is damaged and not the last."""
        self.notes.clear()
        expected: int | None = None
        with self.path.open("rb") as file:
            file.readline(_LONGEST_HEADER)
            for number, line in enumerate(file, 2):
                if not line.endswith(b"\n"):
                    self.notes.append(f"{self.path.name} ends in the middle of line {number}, which is left out")
                    return
                step = _step(self.path, number, line)
                if expected is not None and step.number != expected:
                    self.notes.append(
                        f"{self.path.name} lacks {step.number - expected} steps before step {step.number}"
                    )
                expected = step.number + 1
                yield step


def read(path: Path) -> Trace:
    """Open a trace file. Raises :class:`TraceError` for what is none, and for a newer schema."""
    try:
        with path.open("rb") as file:
            line = file.readline(_LONGEST_HEADER)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError):
        raw = None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        what = "is empty" if not line else "is no trace of omni-npu-phase"
        raise TraceError(f"{path} {what}")
    schema = raw.get("schema")
    if type(schema) is not int or schema < 1:
        raise TraceError(f"{path} names no schema")
    if schema > SCHEMA:
        raise TraceError(f"{path} has schema {schema}, this version reads up to {SCHEMA}: update omni-npu-phase")
    raw = {"replica": 0, **raw} if schema == 1 else raw
    kinds = {each.name: each.type for each in fields(Header)}
    damaged = [name for name, kind in kinds.items() if type(raw.get(name)).__name__ != kind]
    if damaged or raw.get("columns") != list(COLUMNS) or not _is_text(line, raw):
        raise TraceError(f"{path} has a damaged header: {', '.join(damaged) or 'other columns, or no UTF-8'}")
    return Trace(path, Header(**{name: raw[name] for name in kinds}))


def find(path: Path) -> list[Trace]:
    """The trace in a file, or all in a folder by their names. Raises :class:`TraceError`, also where there is none."""
    if not path.is_dir():
        return [read(path)]
    files = sorted(path.glob("trace-*.jsonl"))
    if not files:
        raise TraceError(f"{path} holds no trace-*.jsonl")
    return [read(file) for file in files]


def _step(path: Path, number: int, line: bytes) -> Step:
    try:
        raw = json.loads(line)
        if not _is_text(line, raw):
            raise ValueError("no UTF-8")
        return Step(
            number=_value("step", raw["step"], _INTEGER),
            time=_value("time", raw["time"], _INTEGER),
            took=_value("took", raw["took"], _INTEGER),
            buffer=_value("buffer", raw["buffer"], _INTEGER),
            rows=_rows(raw["rows"], raw.get("given", {})),
            strays=[_stray(values) for values in raw.get("strays", ())],
            error=_value("error", raw.get("error"), (str, type(None))),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TraceError(f"{path}, line {number}: no step of a trace ({type(error).__name__}: {error})") from error


def _rows(values: Any, given: Any) -> list[Row]:
    rows = [_row(each) for each in values]
    for row in rows if given else ():
        row.given = _value("given", given.get(row.request, 0), _INTEGER)
    return rows


def _row(values: Any) -> Row:
    if not isinstance(values, list) or len(values) != len(COLUMNS):
        raise ValueError(f"a row has {len(COLUMNS)} values")
    row = Row(*map(_value, COLUMNS, values, _KINDS))
    if row.hook not in (None, BATCHED, SCALAR, FILLED):
        raise ValueError(f"hook is {row.hook!r}")
    if row.told is not None:
        if len(row.told) != len(contract.FIELDS):
            raise ValueError(f"told has {len(contract.FIELDS)} values")
        for told in row.told:
            _value("told", told, (int, bool, str, type(None)))
    return row


def _stray(values: Any) -> Stray:
    what, place, request = values
    return Stray(
        _value("stray", what, (str,)),
        _value("stray", place, _INTEGER),
        _value("stray", request, (str, type(None))),
    )


def _value(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    # Beyond 64 bits there are no lengths and no times.
    if type(value) not in kinds or (type(value) is int and value.bit_length() > _LONGEST_INTEGER):
        raise ValueError(f"{name} is {value!r:.40}")
    return value


def _is_text(line: bytes, raw: Any) -> bool:
    """Whether all of a line can be shown: JSON can name halves of a character, which no file can hold."""
    if b"\\ud" not in line.lower():
        return True
    try:
        json.dumps(raw, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def selected(
    step: Step,
    *,
    requests: Sequence[str] = (),
    steps: range | None = None,
    phase: str | None = None,
    tail: bool = False,
) -> list[Row]:
    """The rows of a step that all given filters let through; a phase is how its name begins."""
    if steps is not None and step.number not in steps:
        return []
    return [
        row
        for row in step.rows
        if (not requests or row.request in requests)
        and (phase is None or row.phase.startswith(phase))
        and (not tail or row.lengths.tail)
    ]
