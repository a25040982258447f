# SPDX-License-Identifier: Apache-2.0
"""Golden traces: what CPU makes today, checked by hand where the contract has a table, and compared row by row."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_npu_phase import contract
from omni_npu_phase.conformance import parity, verify
from omni_npu_phase.conformance.drive import run_scenario
from omni_npu_phase.conformance.report import Parity, Report
from omni_npu_phase.conformance.scenarios import BY_ID, SCENARIOS, Hook, Variant

CPU = torch.device("cpu")
# Row, (P, C, is prefill), batched hook allowed, position in MTP: the contract's table, by hand.
TABLE = [
    ("a P=5 C=0 S=4", [5, 0, True], False, None),
    ("b P=5 C=4 S=1", [5, 4, True], False, None),
    ("c P=5 C=5 S=1", [5, 5, False], True, 0),
    ("d P=5 C=6 S=1", [5, 6, False], True, 1),
    ("e P=1 C=0 S=1", [1, 0, True], False, None),
    ("f P=5 C=5 S=2", [5, 5, False], False, None),
]


@pytest.fixture(scope="module")
def fresh() -> dict[str, str]:
    return dict(parity.golden_files())


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.id)
def test_golden_file_is_what_cpu_makes(scenario: Any, fresh: dict[str, str]) -> None:
    path = Path(parity.__file__).parent / "golden" / f"{scenario.id}.json"
    assert path.read_text(encoding="utf-8") == fresh[f"{scenario.id}.json"]


def test_no_golden_file_without_a_scenario() -> None:
    folder = Path(parity.__file__).parent / "golden"
    assert {path.stem for path in folder.iterdir()} == {*BY_ID, "shown"}


def test_clauses_shown_are_what_cpu_shows(fresh: dict[str, str]) -> None:
    path = Path(parity.__file__).parent / "golden" / "shown.json"
    assert path.read_text(encoding="utf-8") == fresh["shown.json"]


@pytest.mark.parametrize("hook", ["scalar", "batched"])
def test_the_table_by_hand(hook: Hook) -> None:
    own = parity.golden(BY_ID["table"])[str(Variant(hook, True))]
    (rows,) = own["steps"]
    assert own["ended"] == "as planned"
    for row, (title, told, batchable, position) in zip(rows, TABLE, strict=True):
        assert row["row"] == title
        assert row["told"] == [told]
        assert row["hook"] == ("batched" if hook == "batched" and batchable else "scalar")
        assert row["mtp"] == position
        assert (row["codes"] is not None) is (position is not None)
    assert [row["at"] for row in rows] == [0, 4, 5, 6, 7, 8]


def _run(cls: type, scenario: str = "tail") -> Any:
    return run_scenario(cls, BY_ID[scenario], Variant("batched", True), CPU)


def test_the_same_run_is_no_difference(mixed: type) -> None:
    assert parity.compare(_run(mixed)) is None
    assert parity.compare(_run(mixed, "seeded-rows")) is None


def test_a_difference_says_where(mixed: type) -> None:
    run = _run(mixed)
    (call,) = run.steps[1].log.hooks
    call.info[contract.IS_PREFILL] = False
    difference = parity.compare(run)
    assert difference is not None
    text = str(difference)
    assert "tail (batched hook, MTP), step 2, row 0" in text
    assert '"told": [[5, 4, true]]' in text
    assert '"told": [[5, 4, false]]' in text


def test_other_endings_differ(mixed: type) -> None:
    run = _run(mixed)
    run.error = RuntimeError("x")
    difference = parity.compare(run)
    assert difference is not None
    assert difference.where == "the end"
    run.steps.pop()
    run.error = None
    difference = parity.compare(run)
    assert difference is not None
    assert (difference.where, difference.here) == ("step 4, row 0", "no such row")


@pytest.mark.parametrize("change", ["lost", "again", "other"])
def test_other_warnings_differ(change: str, mixed: type) -> None:
    run = run_scenario(mixed, BY_ID["e5-long"], Variant("scalar", True), CPU)
    assert parity.compare(run) is None
    (own,) = run.warnings
    run.warnings = {"lost": [], "again": [own, own], "other": ["no clause's own"]}[change]
    difference = parity.compare(run)
    assert difference is not None
    assert (difference.where, difference.golden) == ("the warnings", '["E5"]')
    assert difference.here == {"lost": "[]", "again": '["E5", "E5"]', "other": '["no clause"]'}[change]


@pytest.mark.parametrize("value", [3.5, -3.0, float("nan"), float("inf"), 2.0**40])
def test_other_values_differ(value: float, mixed: type) -> None:
    run = _run(mixed)
    embeds = run.steps[3].embeds
    assert embeds is not None
    embeds[0][3] = value
    difference = parity.compare(run)
    assert difference is not None
    assert difference.where == "step 4, row 0"
    shown = {3.5: "3.5", -3.0: "-3", float("inf"): '"inf"', 2.0**40: "1099511627776"}.get(value, '"nan"')
    assert f'"embeds": [[1, 0, 6, {shown}, 1, 6, 1, 6]]' in difference.here
    assert difference.golden == difference.here.replace(shown, "3", 1)


def test_unknown_variants_and_scenarios(mixed: type) -> None:
    run = _run(mixed)
    run.variant = replace(run.variant, mode="strict")
    difference = parity.compare(run)
    assert difference is not None
    assert difference.golden.startswith("no such variant; make it with:")
    run.scenario = replace(BY_ID["tail"], id="nowhere")
    difference = parity.compare(run)
    assert difference is not None
    assert difference.golden.startswith("there is no golden/nowhere.json; make it with:")


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("", "is no JSON (Expecting value"),
        ('{"batched hook, MTP": ', "is no JSON (Expecting value"),
        ("[]", "holds no traces"),
        ('{"batched hook, MTP": []}', "holds no traces"),
        ('{"batched hook, MTP": {"ended": "as planned", "steps": []}}', "holds no traces"),
        ('{"batched hook, MTP": {"ended": "", "warned": [], "steps": [{}]}}', "holds no traces"),
    ],
)
def test_a_golden_file_of_something_else_differs(
    text: str, seen: str, mixed: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "golden").mkdir()
    (tmp_path / "golden" / "tail.json").write_text(text, encoding="utf-8")
    monkeypatch.setattr(parity.resources, "files", lambda _: tmp_path)
    difference = parity.compare(_run(mixed))
    assert difference is not None
    assert difference.golden.startswith(f"golden/tail.json {seen}")


def test_wrong_types_show() -> None:
    assert parity._plain(torch.tensor(3)) == "tensor(3)"
    assert parity._plain(True) is True


def test_a_difference_fails_the_mixin(monkeypatch: pytest.MonkeyPatch) -> None:
    made = parity.trace
    monkeypatch.setattr(parity, "trace", lambda run: {**made(run), "ended": "otherwise"})
    report = verify.verify(verify.load_runner("gpu-v1"), ("released", "mixin"), scenarios=[BY_ID["tail"]])
    assert report.parity is not None
    assert len(report.parity.differences) == report.parity.compared == 4
    assert not report.passed("mixin")
    assert "routing differs from the golden traces in 4 of 4 runs" in report.to_markdown()


def test_only_the_mixin_is_compared() -> None:
    report = verify.verify(verify.load_runner("gpu-v1"), ("released",), scenarios=[BY_ID["tail"]])
    assert report.parity is None
    assert Report({}, (), Parity(3)).passed("mixin")


@pytest.mark.parametrize(("stale", "status"), [(False, 0), (True, 1)])
def test_check(
    stale: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(parity, "golden_files", lambda: iter([("tail.json", "{}\n")]))
    monkeypatch.setattr(parity.resources, "files", lambda _: tmp_path)
    monkeypatch.setattr(sys, "argv", ["parity", "--write"])
    assert parity.main() == 0
    assert (tmp_path / "golden" / "tail.json").read_text(encoding="utf-8") == "{}\n"
    if stale:
        (tmp_path / "golden" / "gone.json").write_text("{}", encoding="utf-8")
        (tmp_path / "golden" / "tail.json").write_text('{"row": 1}\n', encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["parity", "--check"])
    assert parity.main() == status
    said = capsys.readouterr().err
    assert ("stale: gone.json, tail.json" in said) is stale
    assert ('--- golden/tail.json\n+++ tail.json as made now\n@@ -1 +1 @@\n-{"row": 1}\n+{}\n' in said) is stale
    monkeypatch.setattr(sys, "argv", ["parity", "--write"])
    parity.main()
    assert not (tmp_path / "golden" / "gone.json").exists()
