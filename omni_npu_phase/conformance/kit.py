# SPDX-License-Identifier: Apache-2.0
"""A pytest session that judges a runner or a model: what is judged, what its tests found, and the report of it."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import pytest

from omni_npu_phase.conformance import verify
from omni_npu_phase.conformance.models.cases import CASES
from omni_npu_phase.conformance.models.subject import ModelUnderTest, load_model
from omni_npu_phase.conformance.report import Parity, Report, few, read_xfails, verdict
from omni_npu_phase.conformance.scenarios import BY_ID, Scenario, Variant, to_judge
from omni_npu_phase.contract import CLAUSES, REPLAY_CLAUSES, Clause, Tier

if TYPE_CHECKING:
    from omni_npu_phase.conformance.judge import Judgement
    from omni_npu_phase.conformance.models.bench import ModelBench
    from omni_npu_phase.conformance.verify import Mode

_RUNNER_TESTS, _MODEL_TESTS = "test_clauses.py", "test_model.py"
_SEEN = "seen."
_KNOWN = {**CLAUSES, **REPLAY_CLAUSES}
_ROUTING, _HELD = "routing", "held"
_NOTHING_NAMED = "name what to judge: --phase-runner MODULE:FACTORY, --phase-model MODULE:FACTORY, or both"
Loaded = TypeVar("Loaded")
Record = Callable[[tuple[str, object]], None]
"""Takes a property of a test, as (name, value)."""


class Kit:
    """What this session judges. Whatever stops it from judging ends the session with one line and status 2."""

    runner: verify.RunnerClasses
    classes: verify.RunnerClasses
    model: ModelUnderTest
    around: verify.RunnerClasses
    """The installed runner with the mixin, which drives the model."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.runner_name: str | None = config.getoption("phase_runner")
        self.model_name: str | None = config.getoption("phase_model")
        if self.runner_name is None and self.model_name is None:
            stop(_NOTHING_NAMED)
        self.mode: Mode = config.getoption("phase_mode")
        self.device_name: str = config.getoption("phase_device")
        tier = config.getoption("phase_tier")
        self.tiers: tuple[Tier, ...] = verify.DEFAULT_TIERS[self.mode]
        if tier is not None:
            self.tiers = ("required", "extended") if tier == "all" else (tier,)
        self.xfails = _read_xfails(config.getoption("phase_xfail"))
        self.report_file: Path | None = config.getoption("phase_report")
        if self.report_file is not None and not self.report_file.parent.is_dir():
            stop(f"--phase-report {self.report_file}: there is no folder {self.report_file.parent}")
        if self.report_file is not None and self.report_file.is_dir():
            stop(f"--phase-report {self.report_file}: this is a folder; name a file in it")
        for tier in ("required", "extended"):
            config.addinivalue_line("markers", f"phase_{tier}: a clause of the phase contract's {tier} tier")
        self.run = functools.cache(self._run)
        self._found: list[Mapping[str, Any]] = []

    # What there is to judge.

    def runs(self) -> Iterator[tuple[Scenario, Variant]]:
        """Every run of every scenario."""
        for scenario in to_judge():
            for variant in verify.variants(scenario, self.mode):
                yield scenario, variant

    def clauses_of(self, scenario: Scenario, variant: Variant) -> list[str]:
        """The clauses of the tiers asked for that a run has a test of: those it was written for."""
        return [clause for clause in scenario.shown(variant) if _KNOWN[clause].tier in self.tiers]

    @property
    def listed_clauses(self) -> list[str]:
        """Clauses of the tiers asked for that are listed as expected failures."""
        return [name for name in self.xfails if name in _KNOWN and _KNOWN[name].tier in self.tiers]

    @property
    def listed_cases(self) -> list[str]:
        """The same of the model kit's cases."""
        return [name for name in self.xfails if name in CASES]

    def _run(self, scenario_id: str, variant: Variant) -> verify.Case | None:
        return verify.run_case(self.classes, self.mode, BY_ID[scenario_id], variant, self.device)

    def bench(self, **how: bool) -> ModelBench:
        """The model on a bench of its own."""
        from omni_npu_phase.conformance.models.bench import ModelBench

        return ModelBench(self.model, self.around.autoregressive, **how)

    @property
    def request_names(self) -> list[str]:
        """The requests of the model; one without a name where it is not loaded, as sessions that only collect."""
        return ["request"] if self.config.getoption("collectonly") else list(self.model.requests)

    def session_properties(self) -> dict[str, str]:
        """What is judged, and on what: versions, mode, device and names."""
        runtime = verify.describe_runtime(self.around if self.runner_name is None else self.runner, self.device_name)
        names = {"runner": self.runner_name or "none", "model": self.model_name or "none"}
        return {**runtime["packages"], "mode": self.mode, "device": self.device_name, **names}

    # The session.

    def load(self) -> None:
        """Load what is judged, before anything is collected or written."""
        # As with python -m: a module of the current folder is found.
        sys.path.insert(0, str(self.config.invocation_params.dir))
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        # A model first: its factory may choose the platform, which is chosen when vLLM is imported.
        if self.model_name is not None:
            _say(f"loading {self.model_name}")
            self.model, self.around = _or_stop(self._load_model)
        if self.runner_name is not None:
            _say(f"loading {self.runner_name}")
            self.device, self.runner, self.classes = _or_stop(self._load_runner)

    def _load_model(self) -> tuple[ModelUnderTest, verify.RunnerClasses]:
        assert self.model_name is not None
        verify.prepare_device(self.device_name)
        model = load_model(self.model_name)
        runner = verify.load_runner("gpu-v1" if self.device_name == "cpu" else "npu-v1")
        return model, verify.classes_for("mixin", runner)

    def _load_runner(self) -> tuple[str, verify.RunnerClasses, verify.RunnerClasses]:
        assert self.runner_name is not None
        device = verify.prepare_device(self.device_name)
        runner = verify.load_runner(self.runner_name)
        if self.mode == "released" and verify.has_mixin(runner):
            stop(f"{self.runner_name} has PhaseRoutingMixin: judge it with --phase-mode mixin")
        return device, runner, verify.classes_for(self.mode, runner)

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """No tests of what was not named."""
        named = {_RUNNER_TESTS: self.runner_name, _MODEL_TESTS: self.model_name}
        ours = collection_path.parent == Path(__file__).parent
        return True if ours and named.get(collection_path.name, "") is None else None

    def pytest_pycollect_makeitem(self, collector: pytest.Collector, name: str) -> list[pytest.Item] | None:
        """No tests of expected failures where none are listed."""
        listed = {_RUNNER_TESTS: self.listed_clauses, _MODEL_TESTS: self.listed_cases}
        ours = collector.path.parent == Path(__file__).parent and name == "test_expected_failure"
        return [] if ours and not listed[collector.path.name] else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        ended = report.when == "call" or report.outcome != "passed"
        if ended and report.when != "teardown":
            told = any(name.startswith(_SEEN) for name, _ in report.user_properties)
            undecided = {"undecided": report.longreprtext} if report.outcome == "failed" and not told else {}
            skipped = report.outcome == "skipped" and not hasattr(report, "wasxfail")
            self._found.append({**dict(report.user_properties), **undecided, "skipped": skipped})

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if hasattr(self.config, "workerinput") or not self._found or self.report_file is None:
            return
        try:
            self.report_file.write_text(self._markdown(), encoding="utf-8")
        except OSError as error:
            stop(f"--phase-report {self.report_file}: {error.strerror}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._found:
            return
        terminalreporter.section("phase contract")
        for report in self._reports():
            for mode in report.modes:
                name = self.model_name if mode == "model" else self.runner_name
                terminalreporter.line(f"{name}, {mode}: {report.counts(mode)}")
                for clause, _, status, failing, seen in report.rows(mode):
                    if status not in ("pass", "not_applicable"):
                        terminalreporter.line(f"{clause} {status} in {few(failing)}: {seen}")
            if report.parity is not None:
                terminalreporter.line(f"With the mixin, {report.parity}")

    # The report.

    def _markdown(self) -> str:
        return "\n".join(report.to_markdown() for report in self._reports())

    def _reports(self) -> Iterator[Report]:
        if self.runner_name is not None:
            yield self._runner_report()
        if self.model_name is not None:
            yield self._model_report()

    def _model_report(self) -> Report:
        judgements = [judgement for found in self._found for judgement in _judgements(found, "case", "request")]
        results = []
        for case in CASES.values():
            own = [judgement for judgement in judgements if judgement.clause == case.id]
            absent = "not run, or the model cannot show it"
            result = verdict(
                "model", Clause(case.id, case.sentence, "required"), own, self.xfails.get(case.id), absent=absent
            )
            results.append(replace(result, tier="model", detail=result.detail or case.sentence))
        model = type(self.model.model)
        runtime = verify.describe_runtime(self.around, self.device_name)
        return Report(
            {**runtime, "model": self.model_name, "model class": f"{model.__module__}.{model.__qualname__}"},
            tuple(results),
        )

    def _runner_report(self) -> Report:
        judgements = [judgement for found in self._found for judgement in _judgements(found)]
        results = verify.clause_results(
            self.runner,
            self.mode,
            judgements,
            scenarios=to_judge(),
            tiers=self.tiers,
            xfails=self.xfails,
            device=self.device,
        )
        wanted = sum(len(self.clauses_of(*run)) for run in self.runs())
        decided = sum("clause" in found and not found["skipped"] for found in self._found)
        runtime = verify.describe_runtime(self.runner, self.device_name)
        compared = [found[_ROUTING] for found in self._found if _ROUTING in found]
        return Report(
            runtime={**runtime, "judged": f"{decided} of {wanted} (a clause in a run counts as one)"},
            clauses=tuple(results),
            parity=Parity(len(compared), tuple(filter(None, compared))) if self.mode == "mixin" else None,
        )


KIT = pytest.StashKey[Kit]()


def kit_of(config: pytest.Config) -> Kit:
    """The session's kit; a session that names nothing to judge ends here."""
    kit = config.stash.get(KIT, None)
    if kit is None:
        stop(_NOTHING_NAMED)
    return kit


def expect_nothing_against(seen: Mapping[str, str], kit: Kit, record: Record) -> None:
    """Fail a test by what was seen against clauses or cases; it is an expected failure if all of them are."""
    for name, text in seen.items():
        record((f"{_SEEN}{name}", text))
    told = "\n".join(f"{name}: {text}" for name, text in seen.items())
    if seen and all(name in kit.xfails for name in seen):
        pytest.xfail("; ".join(f"{name}: {kit.xfails[name]}" for name in seen))
    if seen:
        pytest.fail(told, pytrace=False)


def record_held(clauses: Sequence[str], record: Record) -> None:
    """Note the clauses that a run as a whole is evidence for."""
    record((_HELD, " ".join(clauses)))


def record_routing(difference: str | None, record: Record) -> None:
    """Note that a run's routing was held against its table, and how it differs."""
    record((_ROUTING, difference or ""))


def _judgements(found: Mapping[str, Any], what: str = "clause", where: str = "scenario") -> Iterator[Judgement]:
    """What one test says for or against clauses, or against cases."""
    from omni_npu_phase.conformance.judge import Judgement

    if where not in found or found["skipped"]:
        return
    place = found[where], found["variant"]
    against = {name.removeprefix(_SEEN): seen for name, seen in found.items() if name.startswith(_SEEN)}
    for clause, seen in against.items():
        yield Judgement(clause, *place, seen)
    for clause in found.get(_HELD, "").split():
        yield Judgement(clause, *place)
    if what in found and "undecided" in found:
        yield Judgement(found[what], *place, found["undecided"], undecided=True)
    elif what in found and not against:
        yield Judgement(found[what], *place)


def _read_xfails(path: Path | None) -> dict[str, str]:
    try:
        return read_xfails(path, {*_KNOWN, *CASES})
    except ValueError as error:
        stop(f"--phase-xfail {path}: {error}")


def _or_stop(load: Callable[[], Loaded]) -> Loaded:
    from omni_npu_phase.releases import UnsupportedRuntimeError

    try:
        # What a stack warns of while it is imported is no finding about the runner.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return load()
    except (verify.NoRuntimeError, UnsupportedRuntimeError) as error:
        stop(str(error))


def _say(text: str) -> None:
    sys.stderr.write(f"... {text}\n")


def stop(message: str) -> NoReturn:
    """End the session with one line and status 2."""
    pytest.exit(f"omni-npu-phase: {message}", returncode=2)
