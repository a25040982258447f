# SPDX-License-Identifier: Apache-2.0
"""Traces: real runners are watched and stay what they are; what is wrong with a runner shows in its trace."""

from __future__ import annotations

import csv
import errno
import json
import logging
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from omni_npu_phase import contract, plugin, tracing
from omni_npu_phase.commands.app import app
from omni_npu_phase.conformance import verify
from omni_npu_phase.conformance.bench import Bench, StateBench, scenario_bench, single_stage
from omni_npu_phase.conformance.drive import Recording, run_scenario
from omni_npu_phase.conformance.scenarios import BY_ID, MTP, Hook, Scenario, Variant, row
from omni_npu_phase.settings import TRACE_VARIABLE
from omni_npu_phase.step import v1 as mixin
from omni_npu_phase.step.mtp import device_side
from omni_npu_phase.step.plan import Run, StepPlan
from omni_npu_phase.step.route import BATCHED_HOOK
from omni_npu_phase.tracing import observer, recorder, schema
from omni_npu_phase.tracing.check import SHOWN, Check, check
from omni_npu_phase.tracing.compare import compare
from omni_npu_phase.tracing.perfetto import events
from omni_npu_phase.tracing.recorder import Observed, Recorder
from omni_npu_phase.tracing.schema import Header, Trace, TraceError

from .mutants import MUTANTS

CPU = torch.device("cpu")
HEADER = Header(
    stage=0, replica=0, dp=0, pp=0, tp=0, pid=7, runner="a.Runner", family="v1", mixin=False, model="Model",
    preprocess=True, batched=True, gathers=False, mtp=True, hooks=True, version="0.1.0",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Traced:
    run: Recording
    trace: Trace

    @property
    def check(self) -> Check:
        return check([self.trace])


@contextmanager
def _recorded(folder: Path, *, hooks: bool) -> Iterator[list[Recorder]]:
    """Every runner that the conformance bench makes has a recorder."""
    made: list[Recorder] = []
    with pytest.MonkeyPatch.context() as patch:
        for bench in (Bench, StateBench):
            released = bench.make_runner

            def make(self: Any, cls: type, released: Callable[..., Any] = released) -> Any:
                runner = released(self, cls)
                made.append(tracing.record(runner, folder, hooks=hooks))
                return runner

            patch.setattr(bench, "make_runner", make)
        yield made


def _traced(
    folder: Path, cls: type, scenario: str | Scenario, hook: Hook = "batched", mtp: bool = True, *, hooks: bool = True
) -> Traced:
    case = BY_ID[scenario] if isinstance(scenario, str) else scenario
    with _recorded(folder, hooks=hooks) as made:
        run = run_scenario(cls, case, Variant(hook, mtp), CPU)
    (own,) = made
    own.close()
    assert own.path is not None
    return Traced(run, schema.read(own.path))


def _cli(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


# What is recorded.


def _leaves_mtp_out(scenario: Scenario) -> bool:
    return scenario.behaviour.fault in ("no_mtp_inputs", "no_dictionary")


@pytest.mark.parametrize("name", ["gpu-v1", "gpu-v2"])
def test_a_trace_says_what_rows_show(name: str, tmp_path: Path) -> None:
    """In every scenario, each row's lengths, phase and place in MTP are those that the scenario is written with."""
    runner = verify.classes_for("mixin", verify.load_runner(name))
    for scenario in BY_ID.values():
        cls = runner.of(scenario)
        if cls is None:
            continue
        variant = next(iter(verify.variants(scenario, "mixin")))
        result = _traced(tmp_path, cls, scenario, variant.hook, variant.mtp)
        steps = list(result.trace.steps())
        assert len(steps) == len(result.run.steps)
        for found, recorded in zip(steps, result.run.steps, strict=True):
            for got, wanted in zip(found.rows, recorded.rows, strict=True):
                assert (got.request, got.num_computed, got.given) == (wanted.request, wanted.num_computed, wanted.kept)
                assert got.span == scenario.setting.claimed_spans.get(wanted.request, wanted.span)
                if got.span == wanted.span and wanted.num_computed >= 0:
                    assert (got.prompt_len, got.phase) == (wanted.prompt_len, wanted.phase)
                if found.error is None and result.trace.header.mtp and not _leaves_mtp_out(scenario):
                    assert got.seen_by_mtp is (wanted.shows == MTP), (scenario.id, str(got))
        assert (steps[-1].error is None) is (result.run.error is None)
        assert result.check.findings == [] or _leaves_mtp_out(scenario), scenario.id


@pytest.mark.parametrize("hooks", [True, False])
def test_given_rows_are_marked(hooks: bool, mixed: type, tmp_path: Path) -> None:
    """Of a row with something given back, hooks and MTP are those of its new part; a whole one has none."""
    traced = _traced(tmp_path, mixed, "given-back-seeded", "scalar", hooks=hooks)
    assert traced.check.findings == []
    whole, part = (next(row for row in step.rows if row.given) for step in list(traced.trace.steps())[4:6])
    assert (whole.given, whole.hook, whole.mtp, whole.told) == (4, None, None, None)
    assert (part.given, part.hook, part.mtp, part.told) == (2, "scalar", 0, [3, 6, False])
    shown = _cli("show", traced.trace.path).output
    assert "given 4" in shown.replace("\n", " ")
    assert json.loads(_cli("show", traced.trace.path, "--format", "json").stdout)["rows"][-4]["given"] == 2


@pytest.mark.parametrize("hook", ["scalar", "batched"])
@pytest.mark.parametrize("hooks", [True, False])
def test_a_released_runner_is_watched_alike(
    hook: Hook, hooks: bool, released: type, mixed: type, tmp_path: Path
) -> None:
    for scenario in ("table", "mixed", "many-decodes", "swapped", "replay", "crossing", "seeded-rows"):
        theirs, ours = (_traced(tmp_path, cls, scenario, hook, hooks=hooks) for cls in (released, mixed))
        assert theirs.run.error is None
        assert (theirs.trace.header.mixin, ours.trace.header.mixin) == (False, True)
        assert theirs.check.findings == ours.check.findings == []
        result = compare(theirs.trace, ours.trace)
        assert result.difference is None
        assert result.same_rows == sum(len(rows) for rows in BY_ID[scenario].steps)


def test_marks(mixed: type, tmp_path: Path) -> None:
    marked = {
        name: [
            (each.num_computed, each.crosses, each.replay)
            for each_step in _traced(tmp_path, mixed, name).trace.steps()
            for each in each_step.rows
            if each.request == "a"
        ]
        for name in ("replay", "crossing")
    }
    assert marked["crossing"] == [(3, True, False), (7, False, False)]
    # Positions 5 and 6 were computed before the preemption too (E3).
    assert [replay for _, _, replay in marked["replay"]] == [False, False, False, False, True, True]


def _replays(trace: Trace) -> list[tuple[int, bool]]:
    return [(each.num_computed, each.replay) for step in trace.steps() for each in step.rows]


def test_an_id_that_comes_again_is_another_request(mixed: type, tmp_path: Path) -> None:
    """With another prompt, or with cached tokens: nothing is replayed, and its progress does not jump."""
    lengths = ((5, 0, 5), (5, 5, 1), (5, 6, 1), (4, 0, 4), (4, 4, 1), (20, 16, 4), (20, 20, 1))
    result = _traced(tmp_path, mixed, Scenario("again", "", (), tuple((row("a", *each),) for each in lengths)))
    assert result.check.findings == []
    assert result.check.judged["M4"]
    assert not any(replay for _, replay in _replays(result.trace))


def test_rejected_drafts_are_no_replay(mixed: type, tmp_path: Path) -> None:
    """P4, C5 S3, C6 S3, C7 S1: both times the drafts of the span are rejected. Read again, the same rows are."""
    with single_stage(), torch.inference_mode():
        lengths = ((4, 4, 1), (4, 5, 3), (4, 6, 3), (4, 7, 1), (4, 5, 1), (4, 6, 1), (4, 7, 1))
        steps = tuple((row("a", *each),) for each in lengths)
        bench = scenario_bench(mixed, Scenario("drafts", "", (), steps), Variant("scalar", True), CPU)
        own = tracing.record(bench.runner, tmp_path)
        for rows in steps:
            # What the request has when the step begins: one token more than was computed, at the furthest.
            known = max(bench.sampled.get("a", 0), rows[0].num_computed + 1)
            bench.update_requests(rows)
            state = bench.runner.requests["a"]
            del state.output_token_ids[known - rows[0].prompt_len :]
            bench.runner.input_batch.num_tokens_no_spec[0] = state.num_tokens
            bench.sampled["a"] = known
            bench.fill_inputs(rows, [0, rows[0].span])
            bench.preprocess(rows, rows[0].span)
        own.close()
    (trace,) = schema.find(tmp_path)
    assert [replay for _, replay in _replays(trace)] == [False, False, False, False, True, True, False]


def test_the_replica_of_a_stage_is_in_the_header(mixed: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas of a stage are traced into one folder; ranks are compared within a replica, folders replica by
    replica."""
    found = []
    for replica in ("0", "1"):
        monkeypatch.setenv("VLLM_OMNI_REPLICA_ID", replica)
        found.append(_traced(tmp_path / "one", mixed, ("tail", "table")[int(replica)]).trace)
    assert [trace.header.replica for trace in found] == [0, 1]
    alone = _cli("compare", tmp_path / "one")
    assert (alone.exit_code, "no two ranks of one replica" in " ".join(alone.stderr.split())) == (2, True)
    for trace in found:
        steps = trace.path.read_text(encoding="utf-8").splitlines(keepends=True)[1:]
        for folder, header in (("one", replace(trace.header, tp=1)), ("two", replace(trace.header, pid=9))):
            path = tmp_path / folder / f"{header.file_stem}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(header.as_json()) + "\n" + "".join(steps), encoding="utf-8")
    ranks = _cli("compare", tmp_path / "one")
    assert (ranks.exit_code, ranks.stdout.count("the same in")) == (0, 2), ranks.output
    for trace in found:
        (tmp_path / "one" / f"{replace(trace.header, tp=1).file_stem}.jsonl").unlink()
    both = _cli("compare", tmp_path / "one", tmp_path / "two")
    assert (both.exit_code, both.stdout.count("the same in")) == (0, 2), both.output


def test_a_trace_of_schema_1_is_read(tmp_path: Path) -> None:
    header = {name: value for name, value in HEADER.as_json().items() if name != "replica"}
    path = _write(tmp_path / "old.jsonl", _line(0, _decode()), header={**header, "schema": 1})
    assert schema.read(path).header == HEADER


def test_no_prompt_and_no_audio(mixed: type, tmp_path: Path) -> None:
    result = _traced(tmp_path, mixed, "mixed")
    _, *lines = map(json.loads, result.trace.path.read_text().splitlines())
    assert {key for line in lines for key in line} == {"step", "time", "took", "buffer", "rows"}
    # Lengths and offsets only: this model's token ids are above 4096, and its embeddings and codes are lists.
    numbers = [value for line in lines for values in line["rows"] for value in values if type(value) is int]
    assert max(numbers) < 16
    nested = [value for line in lines for values in line["rows"] for value in values if isinstance(value, list)]
    assert all(len(told) == len(contract.FIELDS) for told in nested)


def test_a_stage_without_hooks(released: type, tmp_path: Path) -> None:
    result = _traced(tmp_path, released, "no-hooks", "scalar", False)
    assert not result.trace.header.preprocess
    assert {each.hook for each_step in result.trace.steps() for each in each_step.rows} == {None}
    assert result.check.judged["R1"] == result.check.steps > 0
    assert result.check.holds


# Watching changes nothing.


@pytest.mark.parametrize("hooks", [True, False])
@pytest.mark.parametrize("scenario", ["mixed", "e5b-two-values", "seeded-rows", "missing-state", "returned-fields"])
def test_results_and_errors_pass_through(
    scenario: str, hooks: bool, released: type, mixed: type, tmp_path: Path
) -> None:
    for cls in (released, mixed):
        watched = _traced(tmp_path, cls, scenario, hooks=hooks).run
        bare = run_scenario(cls, BY_ID[scenario], Variant("batched", True), CPU)
        assert type(watched.error) is type(bare.error)
        assert str(watched.error) == str(bare.error)
        assert _results(watched) == _results(bare)


def _results(run: Recording) -> list[tuple[Any, ...]]:
    """Which rows each hook and MTP took, and what was written and stored."""
    return [
        (
            [(call.hook, call.token_ids) for call in step.log.hooks],
            [call.token_ids for call in step.log.mtp],
            step.returned_ids,
            step.embeds,
            step.codes,
        )
        for step in run.steps
    ]


def test_a_step_that_ends_in_an_error_is_on_disk_at_once(mixed: type, tmp_path: Path) -> None:
    with _recorded(tmp_path, hooks=False) as made:
        run = run_scenario(mixed, BY_ID["e5b-two-values"], Variant("batched", True), CPU)
    assert run.error is not None
    assert made[0].path is not None
    (last,) = schema.read(made[0].path).steps()
    assert last.error == "ContractError E5b"


def test_recording_ends_and_begins_again(mixed: type, tmp_path: Path) -> None:
    bench = _bench(mixed, 2)
    hooks = {name: value for name, value in vars(bench.model).items() if callable(value)}
    first = tracing.record(bench.runner, tmp_path)
    assert tracing.record(bench.runner, tmp_path) is first
    bench.step()
    first.close()
    first.close()
    bench.step()
    second = tracing.record(bench.runner, tmp_path)
    bench.step()
    second.close()
    assert first.path != second.path
    assert [len(list(trace.steps())) for trace in schema.find(tmp_path)] == [1, 1]
    vars(bench.runner)[observer.OBSERVER].detach()
    assert not {"_preprocess", "_talker_mtp_forward"} & set(vars(bench.runner))
    assert {name: value for name, value in vars(bench.model).items() if callable(value)} == hooks


def test_the_header_is_of_the_first_step(mixed: type, tmp_path: Path) -> None:
    """What an engine takes apart at its end, before anything was written, is not missing."""
    bench = _bench(mixed, 2)
    own = tracing.record(bench.runner, tmp_path)
    bench.step()
    bench.runner.has_talker_mtp = False
    bench.model.has_preprocess = False
    own.close()
    (trace,) = schema.find(tmp_path)
    assert (trace.header.mtp, trace.header.preprocess, trace.header.mixin) == (True, True, True)


def test_a_model_that_is_taken_away_is_let_go(mixed: type, tmp_path: Path) -> None:
    bench, other = _bench(mixed, 2), _bench(mixed, 2)
    own_hook, new_hook = bench.model.preprocess_decode_batch, other.model.preprocess_decode_batch
    own = tracing.record(bench.runner, tmp_path)
    bench.step()
    assert bench.model.preprocess_decode_batch is not own_hook
    bench.runner.model = other.model
    bench.step()
    assert bench.model.preprocess_decode_batch is own_hook
    assert other.model.preprocess_decode_batch is not new_hook
    own.close()
    (trace,) = schema.find(tmp_path)
    assert [each.rows[1].hook for each in trace.steps()] == ["batched", "batched"]
    assert not any(each.strays for each in trace.steps())


def test_an_observer_that_fails_ends_the_recording_only(released: type, tmp_path: Path) -> None:
    bench = _bench(released, 2)
    own = tracing.record(bench.runner, tmp_path)

    def serve() -> None:
        for _ in range(3):
            bench.step()

    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(bench.runner.input_batch, "num_prompt_tokens")
        said = _said(own, serve)
    assert own.path is None
    assert said == [
        "omni-npu-phase: cannot observe GPUARModelRunner (AttributeError: 'InputBatch' object has no "
        "attribute 'num_prompt_tokens'). "
        "The trace ends here, the engine goes on."
    ]


# What it costs, counted.


class _Stepping:
    """A runner with decode rows that can be stepped again and again, whose model does nothing."""

    def __init__(self, cls: type, rows: int, hook: Hook) -> None:
        self.rows = tuple(row(f"r{index}", 3, 5, 1, MTP) for index in range(rows))
        scenario = Scenario("steps", "", (), (self.rows,))
        self._bench = scenario_bench(cls, scenario, Variant(hook, True), CPU)
        self._bench.update_requests(self.rows)
        self.runner, self.model = self._bench.runner, self._bench.model

    def step(self) -> None:
        self._bench.fill_inputs(self.rows, range(len(self.rows)))
        with single_stage(), torch.inference_mode():
            self._bench.preprocess(self.rows, len(self.rows))


def _bench(cls: type, rows: int, hook: Hook = "batched") -> _Stepping:
    with single_stage():
        return _Stepping(cls, rows, hook)


def _operations(bench: _Stepping, folder: str) -> int:
    """Byte codes that a step executes in files of a folder, in this thread."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if folder not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        bench.step()
    finally:
        sys.settrace(None)
    return count


TRACING = str(Path(tracing.__file__).parent)


@pytest.mark.parametrize("hook", ["scalar", "batched"])
@pytest.mark.parametrize("kind", ["released", "mixed"])
def test_no_python_for_each_row_on_the_step_s_thread(
    hook: Hook, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    counts = []
    for rows in (2, 64):
        bench = _bench(request.getfixturevalue(kind), rows, hook)
        own = tracing.record(bench.runner, tmp_path)
        bench.step()
        counts.append(_operations(bench, TRACING))
        own.close()
    assert counts[0] == counts[1] > 0


def test_the_count_would_see_work_for_each_row(released: type, tmp_path: Path) -> None:
    counts = []
    for rows in (2, 64):
        bench = _bench(released, rows, "scalar")
        own = tracing.record(bench.runner, tmp_path, hooks=True)
        bench.step()
        counts.append(_operations(bench, TRACING))
        own.close()
    assert counts[1] > counts[0]


def test_nothing_when_off(released: type, mixed: type) -> None:
    """A released runner has nothing of it; the mixin asks once a step, whatever the rows, and allocates nothing."""
    bench = _bench(released, 64)
    bench.step()
    assert _operations(bench, TRACING) == 0
    counts = []
    for rows in (2, 64):
        bench = _bench(mixed, rows)
        bench.step()
        counts.append(_operations(bench, TRACING))
    assert counts[0] == counts[1] < 20
    tracemalloc.start()
    try:
        bench.step()
        made = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, TRACING + "/*")])
    finally:
        tracemalloc.stop()
    assert made.statistics("filename") == []


def _observed(number: int, rows: int = 1) -> Observed:
    numbers = np.arange(rows)
    return Observed(number, 0, [f"r{row}" for row in range(rows)], numbers, numbers, numbers, numbers, 9)


def test_memory_is_bounded_and_a_gap_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "FLUSH_SECONDS", 3600)
    own = Recorder(tmp_path, lambda: HEADER)
    own.add(_observed(0))
    own.flush()
    for number in range(1, recorder.RING_STEPS + 6):
        own.add(_observed(number))
    assert len(own._ring) == recorder.RING_STEPS
    own.close()
    (trace,) = schema.find(tmp_path)
    assert len(list(trace.steps())) == 1 + recorder.RING_STEPS
    assert trace.notes == [f"{trace.path.name} lacks 5 steps before step 6"]


# The end of a process, and of a disk.


_PROCESS = """
import multiprocessing, os, signal, sys, time
from pathlib import Path

import numpy as np

from omni_npu_phase.tracing.recorder import Observed, Recorder
from omni_npu_phase.tracing.schema import Header

def serve(how):
    if how == "terminated":
        # As vLLM's workers answer SIGTERM.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    recorder = Recorder(Path({folder!r}), lambda: Header(**{header!r}))
    for number in range(3):
        ones = np.ones(1, int)
        recorder.add(Observed(number, 0, ["r"], ones, ones, ones, ones, 9))
    # Nobody waits for what a killed process leaves: its writer has written by then, some time after each step.
    while how == "killed" and sum(file.read_text().count("\\n") for file in Path({folder!r}).glob("*.jsonl")) < 4:
        time.sleep(0.01)
    if how in ("terminated", "killed"):
        os.kill(os.getpid(), signal.SIGTERM if how == "terminated" else signal.SIGKILL)
        time.sleep(9)
    if how == "raises":
        raise RuntimeError

if __name__ == "__main__":
    how, start = {how!r}, {start!r}
    if start is None:
        serve(how)
    else:
        process = multiprocessing.get_context(start).Process(target=serve, args=(how,))
        process.start()
        process.join()
"""


@pytest.mark.parametrize(
    ("how", "start"),
    [("returns", None), ("raises", None), ("terminated", None), ("killed", None), ("returns", "fork"),
     ("terminated", "fork"), ("terminated", "spawn")],
)  # fmt: skip
def test_what_a_process_leaves(how: str, start: str | None, tmp_path: Path) -> None:
    script = tmp_path / "process.py"
    folder = tmp_path / "traces"
    process = _PROCESS.format(folder=str(folder), header=asdict(HEADER), how=how, start=start)
    script.write_text(process, encoding="utf-8")
    subprocess.run([sys.executable, str(script)], capture_output=True, check=False, timeout=240)
    (trace,) = schema.find(folder)
    assert [each.number for each in trace.steps()] == [0, 1, 2]


class _FullDisk:
    """A file on a disk that takes so many characters."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def write(self, text: str) -> None:
        self._file.write(text[: self._room])
        self._room -= len(text)
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _said(own: Recorder, act: Callable[[], object]) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    level = recorder.logger.level
    recorder.logger.addHandler(handler)
    recorder.logger.setLevel(logging.WARNING)
    try:
        act()
    finally:
        recorder.logger.removeHandler(handler)
        recorder.logger.setLevel(level)
    assert own.stopped
    return said


def test_a_disk_that_fills_up(mixed: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on with one warning, and what was written before is a trace."""
    new_file = recorder._new_file

    def small(folder: Path, stem: str) -> tuple[Path, Any]:
        path, file = new_file(folder, stem)
        return path, _FullDisk(file, 900)

    monkeypatch.setattr(recorder, "_new_file", small)
    bench = _bench(mixed, 3)
    own = tracing.record(bench.runner, tmp_path)

    def serve() -> None:
        for _ in range(6):
            bench.step()
            own.flush()
        own.close()

    (said,) = _said(own, serve)
    assert "No space left on device" in said
    assert "The trace ends here, the engine goes on." in said
    (trace,) = schema.find(tmp_path)
    written = len(list(trace.steps()))
    assert 0 < written < 6
    assert trace.notes == [f"{trace.path.name} ends in the middle of line {written + 2}, which is left out"]
    assert check([trace]).holds


def test_a_device_that_is_full(mixed: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    full = Path("/dev/full")
    monkeypatch.setattr(recorder, "_new_file", lambda *_: (full, full.open("w", encoding="utf-8")))
    bench = _bench(mixed, 1)
    own = tracing.record(bench.runner, tmp_path)
    (said,) = _said(own, lambda: (bench.step(), own.flush(), bench.step(), own.close()))
    assert "cannot write /dev/full (OSError: [Errno 28] No space left on device)" in said


def test_a_folder_that_is_a_file(mixed: type, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bench = _bench(mixed, 1)
    own = tracing.record(bench.runner, tmp_path / "file" / "traces")
    (said,) = _said(own, lambda: (bench.step(), own.flush(), bench.step(), own.flush()))
    assert "Not a directory" in said


# Broken runners: every clause that a trace can show is shown by one.


def _fields(plan: StepPlan, index: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    plan.write_fields([index], [fields])
    return fields


def _calls(plan: StepPlan, *, batched: bool) -> list[Run]:
    """Hook calls of the step: scalar rows one by one."""
    runs = plan.runs(batched=batched)
    return [one for run in runs for one in ([run] if run.batched else [Run([row], False) for row in run.rows])]


@dataclass(frozen=True, slots=True)
class Change:
    """How a third party's runner goes wrong; as it stands it keeps the contract."""

    fields: Callable[[StepPlan, int], dict[str, Any]] = _fields
    calls: Callable[[list[Run], StepPlan], list[Run]] = field(default=lambda runs, plan: runs)
    batched: Callable[[StepPlan], list[bool]] = field(default=lambda plan: plan.eligible)
    names: Callable[[list[str]], list[str]] = field(default=lambda ids: ids)
    in_mtp: Callable[[StepPlan], list[int]] = field(default=lambda plan: _where(plan.eligible))
    mtp_names: Callable[[list[str]], list[str]] = field(default=lambda ids: ids)
    offset: Callable[[int], int] = field(default=lambda offset: offset)
    refuses: bool = True
    always: bool = False
    """Whether it calls hooks of a model that wants none."""


def _where(values: Sequence[bool]) -> list[int]:
    return [index for index, value in enumerate(values) if value]


def _third_party(released: type, change: Change) -> type:
    """A runner that answers for the contract itself: hooks and MTP are called, what they return is left alone."""

    class ThirdParty(released):  # type: ignore[misc]
        def _preprocess(self, scheduler_output: Any, num_input_tokens: int, tensors: Any = None) -> Any:
            ids, embeds = device_side(self.input_ids), device_side(self.inputs_embeds)
            self._planned: set[str] = getattr(self, "_planned", set())
            if self.model.has_preprocess or change.always:
                try:
                    plan = mixin.plan_of(self, scheduler_output, num_input_tokens)
                except contract.ContractError:
                    if change.refuses:
                        raise
                else:
                    self._route(plan, ids, embeds)
            return ids[:num_input_tokens], embeds[:num_input_tokens], None, None, {}, None

        def _route(self, plan: StepPlan, ids: Any, embeds: Any) -> None:
            hook = getattr(self.model, BATCHED_HOOK, None)
            runs = _calls(replace(plan, eligible=change.batched(plan)), batched=callable(hook))
            for run in change.calls(runs, plan):
                names = change.names([plan.request_ids[index] for index in run.rows])
                infos = [
                    {"request_id": name, **change.fields(plan, index)}
                    for name, index in zip(names, run.rows, strict=True)
                ]
                start, stop = plan.offsets[run.rows[0]], plan.offsets[run.rows[-1]] + plan.spans[run.rows[-1]]
                if run.batched:
                    offsets = [plan.offsets[index] for index in run.rows]
                    self.model.preprocess_decode_batch(input_ids=ids[offsets], req_infos=infos)
                else:
                    self.model.preprocess(input_ids=ids[start:stop], input_embeds=embeds[start:stop], **infos[0])
            if self.has_talker_mtp:
                rows = change.in_mtp(plan)
                names = change.mtp_names([plan.request_ids[index] for index in rows])
                self._talker_mtp_forward(names, embeds, [change.offset(plan.offsets[index]) for index in rows])

        def _talker_mtp_forward(self, decode_req_ids: Any, inputs_embeds: Any, start_offsets: Any = None) -> None:
            pass

        def _gather_runtime_additional_information(self) -> None:
            pass

    return ThirdParty


def _by_span(plan: StepPlan, index: int) -> dict[str, Any]:
    return {**_fields(plan, index), contract.IS_PREFILL: plan.spans[index] > 1}


def _told(**other: Callable[[Any], Any]) -> Callable[[StepPlan, int], dict[str, Any]]:
    names = {"P": contract.PROMPT_LEN, "C": contract.NUM_COMPUTED, "prefill": contract.IS_PREFILL}
    return lambda plan, index: {
        **_fields(plan, index),
        **{names[key]: change(_fields(plan, index)[names[key]]) for key, change in other.items()},
    }


def _one_token(plan: StepPlan) -> list[bool]:
    return [span == 1 for span in plan.spans]


def _decodes(plan: StepPlan) -> list[bool]:
    return [not prefill for prefill in plan.prefill]


def _together(runs: list[Run], plan: StepPlan) -> list[Run]:
    """All decode rows in one batched call, wherever they lie."""
    first = next(index for index, run in enumerate(runs) if run.batched)
    rest = [run for run in runs if not run.batched]
    return [*rest[:first], Run(_where(plan.eligible), True), *rest[first:]]


_BREACHES: list[tuple[str, str, str, Hook, bool, Change]] = [
    ("M1", "was not told _omni_prompt_len", "mixed", "batched", True, Change(fields=lambda plan, index: {})),
    ("M1", "got no hook call", "mixed", "scalar", True, Change(calls=lambda runs, plan: runs[1:])),
    ("M1", "got another scalar hook call", "mixed", "scalar", True, Change(calls=lambda runs, plan: [*runs, runs[0]])),
    ("M2", "_omni_prompt_len is <int64>", "mixed", "scalar", True, Change(fields=_told(P=np.int64))),
    ("M2", "_omni_is_prefill is int", "mixed", "scalar", True, Change(fields=_told(prefill=int))),
    ("M3", "told P=10 C=0", "mixed", "scalar", True, Change(fields=_told(P=lambda value: value + 1))),
    ("M4", "told P=9 C=1", "mixed", "scalar", True, Change(fields=_told(C=lambda value: value + 1))),
    ("M5", "C=4 prefill=False", "tail", "scalar", True, Change(fields=_by_span)),
    ("M7", "scalar hooks were called in another order", "mixed", "scalar", True,
     Change(calls=lambda runs, plan: runs[::-1])),
    ("M8", "C=5 prefill=True", "tail", "scalar", True, Change(fields=_told(prefill=lambda value: True))),
    ("R1", "called for a model without hooks", "no-hooks", "scalar", False, Change(always=True)),
    ("R2", "is prefill tail and went to the batched hook", "mixed", "batched", True, Change(batched=_one_token)),
    ("R2", "is decode of 2 tokens and went to the batched hook", "long-decode-span", "batched", False,
     Change(batched=_decodes)),
    ("R3", "stranger is no row of the step", "mixed", "batched", True,
     Change(names=lambda ids: ["stranger" if name == "dec2" else name for name in ids])),
    ("R3", "entries in another order than the rows': dec3, dec2", "mixed", "batched", True,
     Change(names=lambda ids: ids[::-1])),
    ("R4", "one batched call took offsets [3, 5, 6]", "mixed", "batched", False, Change(calls=_together)),
    ("R4", "flushed after a later span", "mixed", "batched", False,
     Change(calls=lambda runs, plan: sorted(runs, key=lambda run: run.batched))),
    ("R4", "one-token decode row and went to scalar", "mixed", "batched", False,
     Change(batched=lambda plan: [False] * len(plan))),
    ("R5", "one-token decode row and went to scalar", "mixed", "batched", True,
     Change(batched=lambda plan: [False] * len(plan))),
    ("T1", "not in row order", "mixed", "batched", True, Change(in_mtp=lambda plan: _where(plan.eligible)[::-1])),
    ("T1", "in the MTP batch twice", "mixed", "batched", True, Change(in_mtp=lambda plan: _where(plan.eligible) * 2)),
    ("T1", "and no row of the step", "mixed", "batched", True, Change(mtp_names=lambda ids: ["stranger", *ids[1:]])),
    ("T2", "is prefill tail and went to MTP", "tail", "scalar", True,
     Change(in_mtp=lambda plan: _where(_one_token(plan)))),
    ("T3", "(P=1 C=0 S=1) is prefill and went to MTP", "one-token-prompts", "scalar", True,
     Change(in_mtp=lambda plan: _where(_one_token(plan)))),
    ("T4", "lies at 3, MTP was given 4", "mixed", "batched", True, Change(offset=lambda offset: offset + 1)),
    ("T4", "was left out of MTP", "mixed", "batched", True, Change(in_mtp=lambda plan: [])),
    ("T6", "is decode of 2 tokens and went to MTP", "long-decode-span", "scalar", True,
     Change(in_mtp=lambda plan: _where(_decodes(plan)))),
    ("T7", "in a step without eligible rows", "no-eligible-row", "scalar", True,
     Change(in_mtp=lambda plan: list(range(len(plan))))),
    ("E2", "C=3 prefill=False", "crossing", "scalar", True, Change(fields=_told(prefill=lambda value: False))),
    ("E2", "is prefill and went to MTP", "crossing", "scalar", True,
     Change(in_mtp=lambda plan: list(range(len(plan))))),
    ("E3", "C=5 prefill=True", "replay", "scalar", True, Change(fields=_told(prefill=lambda value: True))),
    ("E4", "went through the step", "outside-buffer", "scalar", True, Change(refuses=False)),
    ("E4", "went through the step", "negative-progress", "scalar", True, Change(refuses=False)),
]  # fmt: skip


@pytest.mark.parametrize(("clause", "seen", "scenario", "hook", "mtp", "change"), _BREACHES)
def test_a_broken_runner_is_found(
    clause: str, seen: str, scenario: str, hook: Hook, mtp: bool, change: Change, released: type, tmp_path: Path
) -> None:
    result = _traced(tmp_path, _third_party(released, change), scenario, hook, mtp).check
    own = [finding.seen for finding in result.findings if finding.clause == clause]
    assert any(seen in text for text in own), result.findings
    sound = _traced(tmp_path, _third_party(released, Change()), scenario, hook, mtp)
    assert sound.check.findings == []
    assert sound.check.judged[clause] or "another" in seen


def test_every_clause_has_a_runner_that_breaks_it() -> None:
    assert {clause for clause, *_ in _BREACHES} == set(SHOWN)


def test_progress_that_jumps(tmp_path: Path, mixed: type) -> None:
    first = replace(BY_ID["tail"], steps=BY_ID["tail"].steps[::2])
    result = _traced(tmp_path, mixed, first).check
    assert [(finding.clause, finding.seen) for finding in result.findings] == [
        ("M4", "a (P=5 C=5 S=1): its progress jumps from 4 to 5")
    ]


@pytest.mark.parametrize(
    ("name", "scenario", "clauses"),
    [
        ("span-length-phase", "tail", {"M5", "T2"}),
        ("latched-decode", "replay", {"M8"}),
        ("progress-of-the-request-state", "three-chunks", {"M4"}),
        ("batched-hook-takes-prefill", "mixed", {"R2", "T2"}),
        ("mtp-rows-reversed", "adjacent-decodes", {"T1"}),
    ],
)
def test_a_broken_mixin_is_found_without_watching_hooks(
    name: str, scenario: str, clauses: set[str], mixed: type, tmp_path: Path
) -> None:
    mutant = {mutant.name: mutant for mutant in MUTANTS}[name]
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch)
        result = _traced(tmp_path, mixed, scenario, hooks=False).check
    assert clauses <= {finding.clause for finding in result.findings}


# Files to read.


def _write(path: Path, *steps: dict[str, Any], header: dict[str, Any] | None = None) -> Path:
    lines = [HEADER.as_json() if header is None else header, *steps]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def _line(number: int, *rows: list[Any], **more: Any) -> dict[str, Any]:
    return {"step": number, "time": 1000 * number, "took": 5, "buffer": 64, "rows": list(rows), **more}


def _decode(request: str = "a", **other: Any) -> list[Any]:
    values = {"request": request, "P": 3, "C": 3, "S": 1, "at": 0, "phase": "decode", "crosses": False,
              "replay": False, "hook": "batched", "call": 0, "entry": 0, "mtp": 0, "mtp_at": 0,
              "told": [3, 3, False]}  # fmt: skip
    return list({**values, **other}.values())


_NEWER = {**HEADER.as_json(), "schema": schema.SCHEMA + 1}


@pytest.mark.parametrize("command", ["show", "check", "compare", "export"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"hello\n", "is no trace of omni-npu-phase"),
        (b"\x89PNG\r\n\x1a\n\x00\xff", "is no trace of omni-npu-phase"),
        (b"[" * 100000, "is no trace of omni-npu-phase"),
        (b'{"traceEvents": []}\n', "is no trace of omni-npu-phase"),
        (b'{"format": "omni-npu-phase/trace"}\n', "names no schema"),
        (json.dumps(_NEWER).encode() + b"\n", "has schema 3, this version reads up to 2: update omni-npu-phase"),
        (b'{"format": "omni-npu-phase/trace", "schema": 1}\n', "has a damaged header: stage, dp, pp"),
        (json.dumps(HEADER.as_json()).encode() + b"\nnonsense\n{}\n", "line 2: no step of a trace"),
        (json.dumps(HEADER.as_json()).encode() + b'\n{"step": 0}\n', "line 2: no step of a trace (KeyError: 'time')"),
        (json.dumps([HEADER.as_json()]).encode() + b"\n", "is no trace of omni-npu-phase"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(command: str, content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace-bad.jsonl"
    path.write_bytes(content)
    output = ["--output", tmp_path / "out.json"] if command == "export" else [path] if command == "compare" else []
    result = _cli(command, path, *output)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


_ODD: tuple[Any, ...] = (3, -1, "x", "\ud800", [], [1], {}, True, 1.5, 10**30)
"""Values of which no column takes more than some."""


@pytest.mark.parametrize("row_values", [[1, 2], "row", _decode(S=None), _decode(told=[1]), _decode(told=[1, 2, [3]])])
def test_a_damaged_row_is_named_by_its_line(row_values: Any, tmp_path: Path) -> None:
    path = _write(tmp_path / "trace.jsonl", _line(0, _decode()), _line(1, row_values))
    with pytest.raises(TraceError, match=r"trace\.jsonl, line 3: no step of a trace"):
        list(schema.read(path).steps())


@pytest.mark.parametrize("column", schema.COLUMNS)
def test_a_value_of_any_kind_is_shown_or_refused(column: str, tmp_path: Path) -> None:
    for value in _ODD:
        rows = _decode(**{column: value}), _decode("b", at=1, entry=1, mtp=1, mtp_at=1)
        _read_by_all(_write(tmp_path / "trace.jsonl", _line(0, *rows)))


@pytest.mark.parametrize("name", ["step", "time", "took", "buffer", "rows", "strays", "error"])
def test_a_step_of_any_kind_is_shown_or_refused(name: str, tmp_path: Path) -> None:
    for value in (*_ODD, [["mtp", 0]], [["mtp", "0", "a"]], [["mtp", 0, {}]]):
        _read_by_all(_write(tmp_path / "trace.jsonl", {**_line(0, _decode()), name: value}))


@pytest.mark.parametrize("name", HEADER.as_json())
def test_a_header_of_any_kind_is_shown_or_refused(name: str, tmp_path: Path) -> None:
    for value in (None, *_ODD):
        _read_by_all(_write(tmp_path / "trace.jsonl", _line(0, _decode()), header={**HEADER.as_json(), name: value}))


def _read_by_all(path: Path) -> None:
    """No command ends in a traceback, whatever the file holds."""
    out = path.with_name("out.json")
    commands: tuple[tuple[str | Path, ...], ...] = (
        ("show", path),
        ("check", path),
        ("compare", path, path),
        ("export", path, "--output", out),
    )
    for command in commands:
        result = _cli(*command)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        if result.exit_code == 2:
            assert "no step of a trace" in " ".join(result.stderr.split()) or "trace.jsonl" in result.stderr


def test_a_last_line_that_was_cut_off(tmp_path: Path) -> None:
    """As after a crash: what is whole is read, and a note says what is not."""
    path = _write(tmp_path / "trace.jsonl", _line(0, _decode()), _line(1, _decode(C=4, told=[3, 4, False])))
    text = path.read_bytes()
    for cut in (1, 7, 60):
        path.write_bytes(text[:-cut])
        trace = schema.read(path)
        assert [each.number for each in trace.steps()] == [0]
        assert trace.notes == ["trace.jsonl ends in the middle of line 3, which is left out"]
    for command in ("show", "check"):
        result = _cli(command, path)
        assert result.exit_code == 0
        assert "trace.jsonl ends in the middle of line 3, which is left out" in result.stdout


def test_missing_and_empty_places(tmp_path: Path) -> None:
    assert "No such file" in _cli("show", tmp_path / "nothing").stderr
    result = _cli("check", tmp_path)
    assert result.exit_code == 2
    assert "holds no trace-*.jsonl" in result.stderr
    result = _cli("check", _write(tmp_path / "trace-a.jsonl"))
    assert result.exit_code == 2
    assert "nothing was recorded that a clause could be judged by" in " ".join(result.stderr.split())


def test_the_schema_is_documented() -> None:
    """docs/trace.md has every name that is in a file, and the clauses that check judges."""
    text = (Path(__file__).parents[2] / "docs" / "trace.md").read_text(encoding="utf-8")
    step = recorder.described(_observed(0), infer_scalar=False)
    for name in (*HEADER.as_json(), *schema.COLUMNS, *step, "strays", "error"):
        assert f"`{name}`" in text, name
    assert f"schema {schema.SCHEMA}" in text
    listed = text.partition("`check` judges ")[2].partition(".")[0]
    assert {*SHOWN} == {"M1", "M2", "M3", "M4", "M5", "M7", "M8", "R1", "R2", "R3", "R4", "R5", "T1", "T2", "T3", "T4",
                        "T6", "T7", "E2", "E3", "E4"}  # fmt: skip
    assert listed == "M1 to M5, M7, M8, R1 to R5, T1 to T4, T6, T7 and E2 to E4"


# The commands.


@pytest.fixture
def mixed_trace(mixed: type, tmp_path: Path) -> Path:
    return _traced(tmp_path, mixed, "condensed").trace.path


def _shown(path: Path, *filters: str) -> list[tuple[int, str]]:
    result = _cli("show", path, "--format", "json", *filters)
    assert result.exit_code == 0, result.output
    return [(shown["step"], shown["request"]) for shown in json.loads(result.stdout)["rows"]]


def test_show(mixed_trace: Path) -> None:
    assert _shown(mixed_trace) == [(0, "a"), (0, "b"), (0, "c"), (0, "d"), (1, "d"), (1, "b"), (1, "c"), (2, "c")]
    assert _shown(mixed_trace, "--request", "b", "--request", "a") == [(0, "a"), (0, "b"), (1, "b")]
    assert _shown(mixed_trace, "--step", "1") == [(1, "d"), (1, "b"), (1, "c")]
    assert _shown(mixed_trace, "--step", "1-2", "--request", "c") == [(1, "c"), (2, "c")]
    assert _shown(mixed_trace, "--tail") == _shown(mixed_trace, "--phase", "tail") == [(0, "c")]
    assert _shown(mixed_trace, "--phase", "prefill") == [(0, "c")]
    assert len(_shown(mixed_trace, "--phase", "decode")) == 7
    table = _cli("show", mixed_trace, "--rows", "3").stdout
    assert "prefill tail" in table
    assert "5 more rows: choose by --request, --step, --phase or --tail, or give --rows" in table
    assert _cli("show", mixed_trace, "--step", "x").exit_code == 2


def test_the_picture(mixed_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is drawn by the code that draws validate's."""
    from omni_npu_phase.speech import picture as speech_picture
    from omni_npu_phase.tracing import picture

    assert speech_picture.draw_rows is picture.draw_rows
    drawn: list[tuple[str, int]] = []
    monkeypatch.setattr(picture, "draw_rows", lambda panel, rows, title: drawn.append((title, len(rows))))
    path = tmp_path / "rows.png"
    assert _cli("show", mixed_trace, "--plot", path).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert drawn == [("a", 1), ("b", 2), ("c", 3), ("d", 2)]
    for wrong, said in (("/no/such/folder/rows.png", "No such file"), ("/dev/full/rows.png", "Not a directory")):
        result = _cli("show", mixed_trace, "--plot", wrong)
        assert (result.exit_code, said in result.stderr) == (2, True)
    for wrong in ("rows.svg", "."):
        result = _cli("show", mixed_trace, "--plot", wrong)
        assert (result.exit_code, "a name that ends in .png" in result.stderr) == (2, True)
    result = _cli("show", mixed_trace, "--request", "nobody", "--plot", path)
    assert (result.exit_code, "no row to draw" in result.stderr) == (2, True)


def test_check(mixed_trace: Path, tmp_path: Path, released: type) -> None:
    result = _cli("check", mixed_trace)
    assert result.exit_code == 0
    assert "1 file, 3 steps: no breach" in result.stdout
    broken = _traced(tmp_path, _third_party(released, Change(fields=_by_span)), "tail").trace.path
    result = _cli("check", broken)
    assert result.exit_code == 1
    assert f"[M5] {broken.name}, step 1: a (P=5 C=4 S=1) was told P=5 C=4 prefill=False" in result.stdout
    document = json.loads(_cli("check", broken, "--format", "json").stdout)
    assert document["schema"] == "omni-npu-phase/trace-check/1"
    assert document["holds"] is False
    assert document["findings"][0]["request"] == "a"
    assert set(document["judged"]) == set(SHOWN)


def test_compare(mixed_trace: Path, mixed: type, tmp_path: Path) -> None:
    assert _cli("compare", mixed_trace, mixed_trace).exit_code == 0
    other = tmp_path / "other"
    scenario = BY_ID["condensed"]
    later = replace(scenario, steps=(*scenario.steps[:2], (replace(scenario.steps[2][0], num_computed=7),)))
    path = _traced(other, mixed, later).trace.path
    result = _cli("compare", mixed_trace, path)
    assert result.exit_code == 1
    assert "2 steps are the same, then step 2: row 0 differs in C 6 / 7" in result.stdout
    assert "c (P=5 C=6 S=1) at 0 decode, hook batched (call 0), MTP 0, told [5, 6, False]" in result.stdout
    shorter = _traced(other, mixed, replace(scenario, steps=scenario.steps[:2])).trace.path
    result = _cli("compare", shorter, mixed_trace)
    assert (result.exit_code, "only the second trace goes on" in result.stdout) == (1, True)
    document = json.loads(_cli("compare", shorter, mixed_trace, "--format", "json").stdout)
    assert [(each["same"], each["same_steps"]) for each in document] == [(False, 2)]


def test_requests_of_other_names_are_matched_by_order(tmp_path: Path) -> None:
    one = _write(tmp_path / "one.jsonl", _line(0, _decode("x"), _decode("y", at=1)))
    two = _write(tmp_path / "two.jsonl", _line(0, _decode("p"), _decode("q", at=1)))
    swapped = _write(tmp_path / "three.jsonl", _line(0, _decode("p"), _decode("p", at=1)))
    result = _cli("compare", one, two)
    assert result.exit_code == 0
    assert "requests are matched by the order in which they appear" in result.stdout
    assert _cli("compare", one, swapped).exit_code == 1


def test_ranks_must_be_the_same(tmp_path: Path) -> None:
    names = [replace(HEADER, tp=rank).file_stem + ".jsonl" for rank in range(2)]
    for rank, name in enumerate(names):
        _write(tmp_path / name, _line(0, _decode()), header=replace(HEADER, tp=rank).as_json())
    result = _cli("compare", tmp_path)
    assert result.exit_code == 0
    assert "the same in 1 steps, 1 rows" in " ".join(result.stdout.split())
    _write(tmp_path / names[1], _line(0, _decode(mtp=None)), header=replace(HEADER, tp=1).as_json())
    result = _cli("compare", tmp_path)
    assert (result.exit_code, "row 0 differs in mtp 0 / None" in result.stdout) == (1, True)
    (tmp_path / names[1]).rename(tmp_path / "trace-again.jsonl")
    _write(tmp_path / "trace-again.jsonl", _line(0, _decode()))
    result = _cli("compare", tmp_path)
    assert (result.exit_code, "keep one run in a folder" in " ".join(result.stderr.split())) == (2, True)
    (tmp_path / "trace-again.jsonl").unlink()
    result = _cli("compare", tmp_path)
    assert (result.exit_code, "no two ranks of one replica" in " ".join(result.stderr.split())) == (2, True)


def test_strays_and_errors_are_compared(tmp_path: Path) -> None:
    lines = [_line(0, _decode()), _line(0, _decode(), strays=[["mtp", 1, "b"]]), _line(0, _decode(), error="KeyError")]
    paths = [_write(tmp_path / f"{index}.jsonl", line) for index, line in enumerate(lines)]
    for path in paths[1:]:
        assert _cli("compare", paths[0], path).exit_code == 1


def test_perfetto(mixed_trace: Path, tmp_path: Path) -> None:
    """The trace event format: every event has its required members, and every track its name."""
    output = tmp_path / "trace.json"
    assert _cli("export", mixed_trace, "--perfetto", "--output", output).exit_code == 0
    document = json.loads(output.read_text(encoding="utf-8"))
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    made = document["traceEvents"]
    assert made == list(events([schema.read(mixed_trace)]))
    made = [each for each in made if each["pid"] == 1]
    names = {each["tid"]: each["args"]["name"] for each in made if each["name"] == "thread_name"}
    assert list(names.values()) == ["steps", "a", "b", "c", "d"]
    slices = [each for each in made if each["ph"] == "X"]
    assert {each["ph"] for each in made} == {"X", "M"}
    assert all(
        {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"} == set(each) and each["tid"] in names
        for each in slices
    )
    for track in names:
        own = sorted((each["ts"], each["dur"]) for each in slices if each["tid"] == track)
        assert all(start + took <= after for (start, took), (after, _) in pairwise(own))
    tails = [each for each in slices if each["name"] == "prefill tail"]
    assert [(names[each["tid"]], each["args"]["P"], each["args"]["C"]) for each in tails] == [("c", 5, 4)]
    full = _cli("export", mixed_trace, "--output", "/dev/full/out.json")
    assert (full.exit_code, "Not a directory" in full.stderr) == (2, True)
    for folder in (".", tmp_path):
        result = _cli("export", mixed_trace, "--output", folder)
        assert (result.exit_code, "this is a folder" in result.stderr) == (2, True)


def test_perfetto_shows_which_stage_is_late(tmp_path: Path) -> None:
    """A request leaves stage 0 at 3 ms, and its two streams begin in stage 1 at 9 ms; their steps are 1 ms apart."""
    for stage, replica, first in ((0, 0, 0), (1, 1, 9)):
        header = replace(HEADER, stage=stage, replica=replica)
        lines = [_line(number, _decode("a"), time=1000 * (first + number)) for number in range(4)]
        _write(tmp_path / f"{header.file_stem}.jsonl", *lines, header=header.as_json())
    made = list(events(schema.find(tmp_path)))
    own = [(each["name"], each["ts"], each["dur"]) for each in made if each["ph"] == "X" and each["pid"] == 3]
    assert own == [
        ("stage 0 replica 0", 0, 3005),
        ("waits for stage 1 replica 1", 3005, 5995),
        ("stage 1 replica 1", 9000, 3005),
    ]
    assert [each["args"].get("waited") for each in made if each.get("cat") == "row"] == [None, 995, 995, 995] * 2


def test_csv(mixed_trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.csv"
    assert _cli("export", mixed_trace, "--csv", "--output", output).exit_code == 0
    with output.open(encoding="utf-8", newline="") as file:
        listed = list(csv.DictReader(file))
    assert [(int(each["step"]), each["request"]) for each in listed] == _shown(mixed_trace)
    told = [(each["P"], each["C"], each["phase"], each[contract.IS_PREFILL], each["replica"]) for each in listed]
    assert told[2] == ("5", "4", "prefill tail", "True", "0")
    both = _cli("export", mixed_trace, "--csv", "--perfetto", "--output", output)
    assert (both.exit_code, "one of them" in both.stderr) == (2, True)


def test_what_is_no_file_is_written_to_and_stays(mixed_trace: Path, tmp_path: Path) -> None:
    """A pipe, or a device as /dev/stdout, is not replaced by a file; a link still leads where it led."""
    link, pipe = tmp_path / "link.json", tmp_path / "pipe.json"
    link.symlink_to(tmp_path / "there.json")
    assert _cli("export", mixed_trace, "--output", link).exit_code == 0
    assert link.is_symlink()
    written = (tmp_path / "there.json").read_bytes()
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        result = _cli("export", mixed_trace, "--output", pipe)
        if not pipe.is_fifo():
            reader.kill()
        read, _ = reader.communicate(timeout=60)
    assert result.exit_code == 0
    assert pipe.is_fifo()
    assert read == written


# Where a process is asked to write traces.


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path / "traces"))
    yield tmp_path / "traces"
    plugin.uninstall()


@pytest.mark.parametrize("mode", ["off", "on"])
def test_the_plugin_watches_every_runner(
    mode: str, asked: Path, released: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of classes derived from the released ones; these stay the classes they are."""
    from vllm_omni.worker import gpu_ar_model_runner

    monkeypatch.setenv("OMNI_NPU_PHASE", mode)
    before = vars(released)["__init__"]
    plugin.install()
    plugin.install()
    assert vars(released)["__init__"].__wrapped__ is before
    assert gpu_ar_model_runner.GPUARModelRunner is released
    assert issubclass(released, mixin.PhaseRoutingMixin) is (mode == "on")

    class Derived(gpu_ar_model_runner.GPUARModelRunner):  # type: ignore[misc]
        def _preprocess(self, *args: Any) -> Any:
            return "own"

        def _talker_mtp_forward(self, *args: Any) -> None:
            pass

    with monkeypatch.context() as patch:
        patch.setattr(observer, "_watched", {})
        patch.setattr(released, "__init__", lambda self: None)
        observer.watch_instances(released)
        runner = Derived()
    assert isinstance(vars(runner)[observer.OBSERVER], observer._RunnerObserver)
    plugin.uninstall()
    assert vars(released)["__init__"] is before


def test_the_plugin_watches_nothing_unless_asked(released: type) -> None:
    before = vars(released)["__init__"]
    plugin.install()
    try:
        assert vars(released)["__init__"] is before
    finally:
        plugin.uninstall()
