# SPDX-License-Identifier: Apache-2.0
"""The kit on the real 0.30 runner: with the mixin every clause holds, as released exactly the known ones do not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch

from omni_npu_phase.conformance import report as reports
from omni_npu_phase.conformance import verify
from omni_npu_phase.conformance.drive import SetupError, run_scenario
from omni_npu_phase.conformance.judge import Judgement, judge
from omni_npu_phase.conformance.report import Report, verdict
from omni_npu_phase.conformance.scenarios import BY_ID, GIVEN, MTP, REPLAY_SCENARIOS, SCENARIOS, Hook, Scenario, Variant
from omni_npu_phase.contract import CLAUSES, REPLAY_CLAUSES
from omni_npu_phase.releases import UnsupportedRuntimeError

CPU = torch.device("cpu")
# What the released 0.30 V1 runner does not keep; README.md says where in its source.
RELEASED_REQUIRED = {"M9", "R7"}
RELEASED_EXTENDED = {"T8", "T9", "E1", "E3", "E4", "E5", "E5b", "E6", "E7", "E8", "E9"}


Judged: TypeAlias = "dict[tuple[str, str], list[Judgement]]"
"""By mode and scenario."""


@pytest.fixture(scope="module")
def verified() -> tuple[Report, Judged]:
    """Every scenario in both modes, once: what ``verify`` reports, and what it was made of."""
    run_case, judged = verify.run_case, {}

    def kept(classes: verify.RunnerClasses, mode: verify.Mode, scenario: Scenario, *how: Any) -> Any:
        case = run_case(classes, mode, scenario, *how)
        judged.setdefault((mode, scenario.id), []).extend(case.judgements if case else ())
        return case

    runner, tiers = verify.load_runner("gpu-v1"), ("required", "extended")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "run_case", kept)
        report = verify.verify(runner, ("released", "mixin"), tiers={"released": tiers, "mixin": tiers})
        verify.verify(runner, ("mixin",), scenarios=REPLAY_SCENARIOS)
    return report, judged


@pytest.fixture
def both(verified: tuple[Report, Judged]) -> Report:
    return verified[0]


@pytest.mark.parametrize("scenario", BY_ID.values(), ids=lambda scenario: scenario.id)
def test_scenario(scenario: Scenario, verified: tuple[Report, Judged]) -> None:
    """Every judgement holds with the mixin, and the scenario says something about the clauses it is about."""
    judgements = verified[1]["mixin", scenario.id]
    assert [judgement for judgement in judgements if not judgement.holds] == []
    assert set(scenario.about) <= {judgement.clause for judgement in judgements}


@pytest.mark.parametrize("scenario", BY_ID.values(), ids=lambda scenario: scenario.id)
def test_rows_show_what_the_contract_says(scenario: Scenario) -> None:
    """The data of the scenarios is no second contract."""
    for row in (row for rows in scenario.steps for row in rows if row.num_computed >= 0):
        new = row.new
        assert row.shows == (GIVEN if new is None else MTP if new.eligible else new.phase)


def test_every_clause_has_evidence(both: Report) -> None:
    assert {result.id for result in both.of("mixin") if result.evidence} == set(CLAUSES)
    assert {result.status for result in both.of("mixin")} == {"pass"}


def test_released_runner(both: Report) -> None:
    failed = {result.id for result in both.of("released") if result.failed}
    assert failed == RELEASED_REQUIRED | RELEASED_EXTENDED
    by_id = {result.id: result for result in both.of("released")}
    assert set(by_id["M9"].scenarios) == {"returned-fields", "mutated-fields", "no-buffer"}
    assert "on CPU" in by_id["T9"].detail
    assert "on batched calls" in by_id["R7"].detail


def test_released_runner_that_replaces_nested_values(released: type) -> None:
    def replace_nested(self: Any, req_id: str, upd: Any) -> None:
        live = self.model_intermediate_buffer.get(req_id, {})
        for key in [key for key, value in (upd or {}).items() if isinstance(value, dict)]:
            live.pop(key, None)
        released._update_intermediate_buffer(self, req_id, upd)  # type: ignore[attr-defined]

    runner = type("Replaces", (released,), {"_update_intermediate_buffer": replace_nested})
    report = verify.verify(verify.RunnerClasses("x", runner), ("released",), scenarios=[BY_ID["tail"], BY_ID["mixed"]])
    assert "R8" in {result.id for result in report.clauses if result.failed}


def test_default_tiers() -> None:
    report = verify.verify(verify.load_runner("gpu-v1"), ("released", "mixin"), scenarios=[BY_ID["tail"]])
    assert {result.tier for result in report.of("released")} == {"required"}
    assert {result.tier for result in report.of("mixin")} == {"required", "extended"}


@pytest.mark.parametrize("scenario", [BY_ID["table"], BY_ID["mixed"]], ids=lambda scenario: scenario.id)
def test_no_clause_of_mtp_passes_because_mtp_was_off(scenario: Scenario, mixed: type) -> None:
    off = judge(run_scenario(mixed, scenario, Variant("scalar", False), CPU))
    assert not [judgement for judgement in off if judgement.clause.startswith("T")]
    rows = tuple(tuple(row for row in step if row.shows != MTP) for step in scenario.steps)
    idle = judge(run_scenario(mixed, replace(scenario, steps=rows), Variant("scalar", True), CPU))
    assert not [judgement for judgement in idle if judgement.clause.startswith("T")]


@pytest.mark.parametrize("hook", ["scalar", "batched"])
@pytest.mark.parametrize("scenario", ["mixed", "named-model", "request-ids", "nested-pop", "seeded-rows"])
def test_what_the_release_gives_hooks_stays(scenario: str, hook: Hook, released: type, mixed: type) -> None:
    """Keywords beyond the contract are the released runner's, in name, value and type, for hooks and for MTP."""
    ours, theirs = (run_scenario(cls, BY_ID[scenario], Variant(hook, True), CPU) for cls in (mixed, released))
    assert ours.error is None
    for one, other in zip(ours.steps, theirs.steps, strict=True):
        assert [(call.hook, _keywords(call.info)) for call in one.log.hooks] == [
            (call.hook, _keywords(call.info)) for call in other.log.hooks
        ]
        assert [_keywords(call.keywords) for call in one.log.mtp] == [
            _keywords(call.keywords) for call in other.log.mtp
        ]


def _keywords(info: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords with their types; results of earlier steps are compared by the clauses."""
    results = ("mark", "codes", "last", "mtp_inputs", "req_infos")
    return {
        name: (type(value), None if "generator" in name else value)
        for name, value in info.items()
        if name not in results
    }


def test_public_reports_are_covered() -> None:
    covered = " ".join(case.report or "" for case in SCENARIOS)
    for number in ("4382", "5018", "4471", "4559", "2443", "5377", "2894", "2690", "3420", "4317", "42302", "7084",
                   "3004", "4889", "3476", "5846"):  # fmt: skip
        assert f"#{number}" in covered


def test_a_scenario_id_names_one_scenario() -> None:
    assert len(BY_ID) == len(SCENARIOS) + len(REPLAY_SCENARIOS)
    for case in BY_ID.values():
        assert set(case.about) <= set(REPLAY_CLAUSES if case.setting.replay else CLAUSES)


# Runners.


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("nothing", "a runner is gpu-v1, gpu-v2, npu-v1 or MODULE:CLASS"),
        ("no_such_module:Runner", "cannot import no_such_module"),
        ("collections:NoClass", "has no NoClass"),
        ("os:path", "is no class"),
        ("collections:OrderedDict", "is no V1 model runner of vLLM-Omni: it has no _preprocess"),
    ],
)
def test_runners_that_cannot_be_judged(name: str, advice: str) -> None:
    with pytest.raises(verify.NoRuntimeError, match=advice):
        verify.load_runner(name)


def test_missing_stack_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")

    monkeypatch.setattr(verify.importlib, "import_module", fail)  # type: ignore[attr-defined]
    with pytest.raises(verify.NoRuntimeError, match="Install vLLM-Omni"):
        verify.load_runner("gpu-v1")


def test_classes_by_mode(released: type, mixed: type) -> None:
    for given in (released, mixed):
        runner = verify.RunnerClasses("x", given)
        assert verify.classes_for("released", runner).autoregressive is released
        ours = verify.classes_for("mixin", runner).autoregressive
        assert "PhaseRoutingMixin" in [base.__name__ for base in ours.__mro__[: ours.__mro__.index(released)]]
    assert verify.classes_for("mixin", verify.RunnerClasses("x", mixed)).autoregressive is mixed


def test_the_mixin_is_not_put_on_an_unknown_runner() -> None:
    stranger = type("Stranger", (), dict.fromkeys(("_preprocess", "_talker_mtp_forward"), lambda self: None))
    with pytest.raises(UnsupportedRuntimeError, match="Stranger"):
        verify.classes_for("mixin", verify.RunnerClasses("x", stranger))


def test_a_runner_that_cannot_be_set_up_is_no_failure_of_the_contract(released: type) -> None:
    def broken(self: object, *args: object, **kwargs: object) -> None:
        raise OSError("no buffers here")

    runner = type("Broken", (released,), {"_make_buffer": broken})
    with pytest.raises(SetupError, match="cannot set up Broken: OSError: no buffers here"):
        run_scenario(runner, BY_ID["tail"], Variant("scalar", True), CPU)
    report = verify.verify(verify.RunnerClasses("x", runner), ("released",), scenarios=[BY_ID["tail"]])
    by_id = {result.id: result.status for result in report.clauses}
    assert by_id["M5"] == "error"
    assert by_id["M1"] == "not_applicable"
    assert not report.passed("released")


def test_generation_scenarios_need_a_generation_runner(mixed: type) -> None:
    report = verify.verify(verify.RunnerClasses("x", mixed), ("mixin",), scenarios=[BY_ID["generation-runner"]])
    assert {result.status for result in report.clauses} == {"not_applicable"}


# Reports.


def test_json(both: Report) -> None:
    document = json.loads(both.to_json())
    assert set(document) == {"schema", "runtime", "clauses", "summary", "parity"}
    assert document["schema"] == reports.SCHEMA
    assert set(document["runtime"]) >= {"packages", "device", "runner"}
    assert set(document["clauses"][0]) >= {"mode", "id", "tier", "status", "scenarios", "detail"}
    assert len(document["clauses"]) == 2 * len(CLAUSES)
    for mode in ("released", "mixin"):
        assert sum(document["summary"][mode].values()) == len(CLAUSES)


def test_markdown_keeps_its_columns() -> None:
    judgement = Judgement("M1", "tail", "scalar", "a | b")
    report = Report({"device": "cpu"}, (verdict("mixin", CLAUSES["M1"], [judgement]),))
    (row,) = [line for line in report.to_markdown().splitlines() if line.startswith("| M1")]
    assert row.replace("\\|", "").count("|") == 6


def test_expected_failures() -> None:
    against = [Judgement("M9", "tail", "scalar", "wrong")]
    assert verdict("released", CLAUSES["M9"], against).status == "fail"
    expected = verdict("released", CLAUSES["M9"], against, "known upstream")
    assert (expected.status, expected.failed) == ("xfail", False)
    assert "known upstream" in expected.detail
    stale = verdict("released", CLAUSES["M9"], [Judgement("M9", "tail", "scalar")], "known upstream")
    assert stale.status == "pass"
    assert "passes, though" in stale.detail


def test_xfail_files() -> None:
    assert reports.parse_xfails("# known\nM9: stored by hooks  # see upstream\n\nR7: copies\n") == {
        "M9": "stored by hooks",
        "R7": "copies",
    }
    for text, advice in (("M99: x", "no clause"), ("M9:", "no reason"), ("M9", "no reason"), ("M9: a\nM9: b", "twice")):
        with pytest.raises(ValueError, match=advice):
            reports.parse_xfails(text)


def test_released_runners_are_asked_only_what_their_release_knows(released: type) -> None:
    def _talker_mtp_forward(self: object, decode_req_ids: list[str], inputs_embeds: object) -> None:
        """0.20's knows neither infos nor marks nor a generator for each row."""

    older = type("Older", (released,), {"__module__": "vllm_omni.older", "_talker_mtp_forward": _talker_mtp_forward})
    asked = {name: BY_ID[name].behaviour for name in ("resident-codes", "request-ids", "seeded-rows")}
    known = {name: verify._asked_for(BY_ID[name], older).behaviour for name in asked}
    assert all(verify._asked_for(BY_ID[name], released).behaviour == asked[name] for name in asked)
    assert asked["resident-codes"].validity
    assert not known["resident-codes"].validity
    assert asked["request-ids"].takes_infos
    assert not known["request-ids"].takes_infos
    assert (asked["seeded-rows"].seeds, known["seeded-rows"].seeds) == ("per_row", "one_stream")


# What only a runner's own constructor, or an engine, sets.


def _needs(released: type, read: Any) -> verify.RunnerClasses:
    def _preprocess(self: Any, *args: Any, **keywords: Any) -> Any:
        read(self)
        return super(runner, self)._preprocess(*args, **keywords)  # type: ignore[misc]

    runner = type("Needs", (released,), {"_preprocess": _preprocess})
    return verify.RunnerClasses("x", runner)


@pytest.mark.parametrize(
    ("read", "told"),
    [
        (lambda self: self.something_only_an_engine_sets, "the runner has no something_only_an_engine_sets"),
        (lambda self: self.model_config.is_new_here, "has no is_new_here"),
        (lambda self: self.vllm_config.novel_config, "has no novel_config"),
    ],
)
@pytest.mark.parametrize("mode", ["released", "mixin"])
def test_what_no_bench_can_know_is_no_failed_clause(read: Any, told: str, mode: verify.Mode, released: type) -> None:
    report = verify.verify(_needs(released, read), (mode,), scenarios=[BY_ID["tail"]])
    assert {result.status for result in report.of(mode)} == {"error", "not_applicable"}
    assert "Needs cannot be judged here: " in report.undecided(mode)
    assert told in report.undecided(mode)


def test_what_a_runners_own_constructor_sets_is_there(released: type) -> None:
    """As a newer release has it: an attribute that no bench knows, set by ``__init__`` and read in every step."""

    class Newer(released):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            self.something_new = self.vllm_config.scheduler_config.max_num_seqs

        def _preprocess(self, *args: Any, **keywords: Any) -> Any:
            assert self.something_new > 0
            assert self.model_config.is_hybrid is False
            return super()._preprocess(*args, **keywords)

    report = verify.verify(verify.RunnerClasses("x", Newer), ("mixin",), scenarios=[BY_ID["tail"]])
    assert {result.status for result in report.clauses} == {"pass", "not_applicable"}


def test_an_attribute_of_something_else_is_the_runners_fault(released: type) -> None:
    report = verify.verify(_needs(released, lambda self: None.no_such), ("released",), scenarios=[BY_ID["tail"]])  # type: ignore[attr-defined]
    assert "fail" in {result.status for result in report.of("released")}
    assert not report.undecided("released")


def test_a_failed_clause_outranks_one_that_could_not_be_judged() -> None:
    judgements = [Judgement("M5", "tail", "scalar", "no x", undecided=True), Judgement("M5", "tail", "scalar", "wrong")]
    report = Report({}, (verdict("released", CLAUSES["M5"], judgements),))
    assert [result.status for result in report.clauses] == ["fail"]
    assert not report.undecided("released")
