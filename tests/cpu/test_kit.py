# SPDX-License-Identifier: Apache-2.0
"""Runners judged by ``pytest --pyargs omni_npu_phase.conformance``: what it says is what ``verify`` says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from omni_npu_phase.conformance import routing, verify
from omni_npu_phase.conformance.scenarios import BY_ID, SCENARIOS
from omni_npu_phase.contract import CLAUSES
from omni_npu_phase.settings import version_of
from tests.cpu.kit_sessions import PLUGIN, run_kit

if sys.version_info >= (3, 11):
    import tomllib

ROOT = Path(__file__).parents[2]
pytest_plugins = ["pytester"]
_FACTORIES = """
def raises():
    raise OSError("no device here")

def raises_in_lines():
    raise OSError("no device\\n\\n  here\\n")

def leaves():
    raise SystemExit(3)

def gives_nothing():
    return None

def gives_an_instance():
    return object()

def gives_another_class():
    return dict

def released():
    from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
    return GPUARModelRunner

def mixed():
    from omni_npu_phase import PhaseRoutingMixin
    return type("Mixed", (PhaseRoutingMixin, released()), {})

no_function = 7
"""


@pytest.fixture
def kit(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, released: type) -> Kit:
    """``released``: what sessions in this process import must stay imported after them."""
    (pytester.path / "runners.py").write_text(_FACTORIES, encoding="utf-8")
    return Kit(pytester, monkeypatch)


class Kit:
    """Sessions in an empty folder with a module of factories."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester, self.monkeypatch, self.folder = pytester, monkeypatch, pytester.path

    def run(self, *arguments: str) -> pytest.RunResult:
        return run_kit(self.pytester, self.monkeypatch, *arguments)

    def outcomes(self, *arguments: str) -> dict[str, str]:
        """Outcome by test id, from the session's JUnit file."""
        self.run(*arguments, "--junitxml=junit.xml")
        return {str(case.get("name")): _outcome(case) for case in self.cases()}

    def cases(self) -> list[ElementTree.Element]:
        return list(ElementTree.parse(self.folder / "junit.xml").iter("testcase"))

    def write(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text, encoding="utf-8")
        return name


def _outcome(case: ElementTree.Element) -> str:
    kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
    return kinds[0] if kinds else "passed"


def _ids(judgements: list[tuple[str, str, str]]) -> set[str]:
    return {f"test_clause[{'-'.join(parts)}]" for parts in judgements}


@pytest.mark.parametrize("mode", ["released", "mixin"])
def test_failures_are_those_of_verify(mode: verify.Mode, kit: Kit) -> None:
    scenarios = [BY_ID[name] for name in ("mutated-fields", "no-buffer", "new-ids", "e5-long", "many-decodes")]
    classes = verify.classes_for(mode, verify.load_runner("gpu-v1"))
    expected: dict[str, bool] = {}
    for scenario in scenarios:
        for variant in verify.variants(scenario, mode):
            case = verify.run_case(classes, mode, scenario, variant, "cpu")
            assert case is not None
            for each in case.judgements:
                tested = each.clause in scenario.shown(variant)
                if tested and CLAUSES[each.clause].tier in verify.DEFAULT_TIERS[mode]:
                    name = f"test_clause[{each.clause}-{scenario.id}-{variant.id}]"
                    expected[name] = expected.get(name, True) and each.holds
    chosen = " or ".join(f"-{scenario.id}-" for scenario in scenarios)
    found = kit.outcomes("--phase-runner", "gpu-v1", "--phase-mode", mode, f"-ktest_clause and ({chosen})")
    assert found == {name: "passed" if holds else "failure" for name, holds in expected.items()}
    assert ("failure" in found.values()) is (mode == "released")


def test_every_run_has_tests_of_the_clauses_it_is_about() -> None:
    for scenario in SCENARIOS:
        shown = [scenario.shown(variant) for variant in verify.variants(scenario, "mixin")]
        assert set(scenario.about) == {clause for clauses in shown for clause in clauses}
    assert {clause for scenario in SCENARIOS for clause in scenario.about} == set(CLAUSES)


@pytest.mark.parametrize(
    ("name", "chosen"), [("span-length-phase", "-tail-"), ("updates-of-the-neighbour", "-adjacent-")]
)
def test_a_broken_runner_fails_on_its_clauses(name: str, chosen: str, kit: Kit) -> None:
    # Only this test needs it.
    from tests.cpu.mutants import MUTANTS

    (mutant,) = [each for each in MUTANTS if each.name == name]
    with pytest.MonkeyPatch.context() as patch:
        calls = mutant.apply(patch)
        kit.outcomes("--phase-runner", "gpu-v1", "--phase-mode", "mixin", f"-k{chosen}")
    assert all(calls.values())
    against = {str(each.get("name")) for case in kit.cases() for each in case.iter("property")}
    assert against >= {f"seen.{clause}" for clause in mutant.caught_by}


def test_what_has_no_test_of_its_own_fails_the_run(kit: Kit) -> None:
    """As released, without MTP, only what went wrong shows T9 in this scenario."""
    arguments = ["--phase-runner", "gpu-v1", "--phase-tier", "all", "-kreused-updates-scalar]"]
    found = kit.outcomes(*arguments)
    assert "test_clause[T9-reused-updates-scalar]" not in found
    assert found["test_run[reused-updates-scalar]"] == "failure"
    kit.write("known", "T9: stored tensors are not owned")
    assert kit.outcomes(*arguments, "--phase-xfail", "known")["test_run[reused-updates-scalar]"] == "skipped"


def test_a_run_that_is_routed_otherwise_fails(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    difference = routing.Difference("tail", "scalar hook, MTP", "step 1, a", "this", "that")
    monkeypatch.setattr(routing, "compare", lambda run: difference)
    report = kit.folder / "report.md"
    result = kit.run("--phase-runner", "gpu-v1", "--phase-mode", "mixin", "-k", "test_run and [tail-scalar-mtp",
                     "--phase-report", str(report))  # fmt: skip
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*routing is not what the table says: tail (scalar hook, MTP), step 1, a:*"])
    assert "routing differs from the scenarios' tables in 1 of 1 runs" in report.read_text(encoding="utf-8")


# Options, tiers, names, choosing.


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_pytest_finds_the_plugin_where_the_package_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"omni_npu_phase": PLUGIN}


@pytest.mark.parametrize("guide", ["runner.md", "vendor-ci.md"])
def test_guides_name_options_and_tests_that_there_are(guide: str, kit: Kit) -> None:
    text = (ROOT / "docs" / "guides" / guide).read_text(encoding="utf-8")
    known = kit.run("--help").stdout.str()
    for option in set(re.findall(r"--phase-[a-z]+", text)):
        assert option in known
    for name in set(re.findall(r"test_clause\[[^\]]+\]", text)):
        result = kit.run("--phase-runner", "gpu-v1", "--collect-only", "-q", "-k", name)
        assert name in result.stdout.str()
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / "docs" / "guides" / link).exists()


def test_tiers_are_marked_and_chosen(kit: Kit) -> None:
    def collected(*arguments: str) -> set[str]:
        result = kit.run("--phase-runner", "gpu-v1", "--collect-only", "-q", *arguments)
        return {match[1] for line in result.outlines if (match := re.search(r"test_clause\[(\w+)-", line))}

    required = {clause.id for clause in CLAUSES.values() if clause.tier == "required"}
    assert collected() == required
    assert collected("--phase-tier", "extended") == set(CLAUSES) - required
    assert collected("--phase-tier", "all") == set(CLAUSES)
    assert collected("--phase-mode", "mixin") == set(CLAUSES)
    assert collected("--phase-mode", "mixin", "-m", "phase_extended") == set(CLAUSES) - required
    assert collected("-k", "T2 and tail") == {"T2"}


def test_collecting_and_idle_sessions_import_nothing_heavy(tmp_path: Path) -> None:
    """Only pytest and NumPy are there, and without an option not even a module of the package is loaded."""
    code = f"""
import sys
for name in ("torch", "vllm", "vllm_omni", "typer", "rich"):
    sys.modules[name] = None
import pytest
open("test_own.py", "w").write("def test_own(): pass")
assert pytest.main(["-p", "{PLUGIN}", "-q", "test_own.py"]) == 0
print([name for name in sys.modules if name.startswith("omni_npu_phase.") or name == "numpy"])
arguments = ["-p", "{PLUGIN}", "-q", "--collect-only", "--pyargs", "omni_npu_phase.conformance"]
assert pytest.main([*arguments, "--phase-runner", "gpu-v1", "--phase-model", "any:model"]) == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    idle = re.search(r"^\[(.*)\]$", done.stdout, re.MULTILINE)
    assert idle is not None
    assert set(idle[1].replace("'", "").split(", ")) == {"omni_npu_phase.conformance", PLUGIN}
    assert "test_clause[T2-tail-scalar-mtp]" in done.stdout
    assert "test_model[request-tail]" in done.stdout or "test_model[tail-request]" in done.stdout


def test_ids_are_the_same_in_every_process(kit: Kit) -> None:
    def collected() -> list[str]:
        result = kit.run("--phase-runner", "gpu-v1", "--phase-mode", "mixin", "--collect-only", "-q")
        return [line for line in result.outlines if "::" in line]

    ids = collected()
    assert len(ids) == len(set(ids)) > 800
    assert collected() == ids


def test_first_failure_stops(kit: Kit) -> None:
    result = kit.run("--phase-runner", "gpu-v1", "-k", "M9-mutated-fields", "-x", "--phase-report", "report.md")
    result.assert_outcomes(failed=1, passed=2)
    # What was judged so far is not what there is.
    assert re.search(r"- judged: 3 of \d{3} ", (kit.folder / "report.md").read_text(encoding="utf-8"))


@pytest.mark.no_cover
def test_in_two_processes(pytester: pytest.Pytester) -> None:
    """Both collect. One runs what both found, and the report is written by a third, which runs nothing."""
    pytest.importorskip("xdist")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "xdist", "-p", PLUGIN, "-n", "2", "--dist", "loadfile",
         "-k-tail- or -mutated-fields-", "--pyargs", "omni_npu_phase.conformance",
         "--phase-runner", "gpu-v1", "--phase-report", "report.md"],
        cwd=pytester.path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "M9 fail in mutated-fields" in done.stdout
    assert "| M9 | required | fail | mutated-fields |" in (pytester.path / "report.md").read_text(encoding="utf-8")


# Expected failures.


def test_expected_failures(kit: Kit) -> None:
    kit.write("known", "M9: stored by hooks  # see upstream\nM10: never\n")
    arguments = ["--phase-runner", "runners:released", "--phase-xfail", "known"]
    found = kit.outcomes(*arguments, "-k", "M9-mutated-fields or test_expected_failure")
    assert found.pop("test_expected_failure[M9]") == "passed"
    # Strict: what is listed must fail somewhere.
    assert found.pop("test_expected_failure[M10]") == "failure"
    assert found == {
        "test_clause[M9-mutated-fields-scalar-mtp]": "passed",
        "test_clause[M9-mutated-fields-scalar]": "passed",
        "test_clause[M9-mutated-fields-batched-mtp]": "skipped",
        "test_clause[M9-mutated-fields-batched]": "skipped",
    }
    result = kit.run(*arguments, "-k", "M9-mutated-fields", "-rx")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["XFAIL *M9-mutated-fields-batched] - M9: stored by hooks"])
    assert kit.run(*arguments, "-k", "M9-mutated-fields", "--runxfail").ret == 1


def test_expected_failures_say_what_to_take_off(kit: Kit) -> None:
    kit.write("known", "M10: never")
    result = kit.run("--phase-runner", "gpu-v1", "--phase-xfail", "known", "-k", "test_expected_failure")
    result.stdout.fnmatch_lines(["M10 holds in all 16 runs that show it; take it off the expected failures (never)"])


@pytest.mark.parametrize("listed", ["", "replay: a case of models", "T9: a clause of another tier"])
def test_without_expected_failures_there_is_no_test_of_them(listed: str, kit: Kit) -> None:
    kit.write("known", listed)
    arguments = ["--phase-runner", "gpu-v1", "--phase-xfail", "known", "--collect-only", "-q"]
    assert kit.run(*arguments, "-k", "test_expected_failure").ret == pytest.ExitCode.NO_TESTS_COLLECTED


# What is written.


def test_properties_for_other_tools(kit: Kit) -> None:
    found = kit.outcomes("--phase-runner", "runners:released", "-k", "T2-tail-scalar-mtp or M9-mutated-fields-batched]")
    assert len(found) == 2
    document = ElementTree.parse(kit.folder / "junit.xml")
    session = {each.get("name"): each.get("value") for each in document.findall("./testsuite/properties/property")}
    assert session["vllm-omni"] == version_of("vllm-omni")
    assert session["torch"] == version_of("torch")
    assert (session["runner"], session["mode"], session["device"]) == ("runners:released", "released", "cpu")
    by_name = {case.get("name"): case for case in kit.cases()}
    properties = {
        name: {each.get("name"): each.get("value") for each in case.iter("property")} for name, case in by_name.items()
    }
    assert properties["test_clause[T2-tail-scalar-mtp]"] == {
        "clause": "T2",
        "tier": "required",
        "scenario": "tail",
        "variant": "scalar hook, MTP",
    }
    assert "forward reads" in str(properties["test_clause[M9-mutated-fields-batched]"]["seen.M9"])


def test_report(kit: Kit) -> None:
    """The same verdicts as verify's, in its own words, for the scenarios that were run."""
    result = kit.run("--phase-runner", "gpu-v1", "--phase-report", "report.md", "-kmutated-fields-")
    text = (kit.folder / "report.md").read_text(encoding="utf-8")
    wanted = verify.verify(
        verify.load_runner("gpu-v1"), ("released",), scenarios=[BY_ID["mutated-fields"]]
    ).to_markdown()
    tables = [[line for line in each.splitlines() if line.startswith(("|", "##"))] for each in (text, wanted)]
    assert tables[0] == tables[1]
    assert f"- packages.vllm-omni: {version_of('vllm-omni')}" in text
    assert re.search(r"- judged: \d+ of \d{3} \(a clause in a run counts as one\)", text)
    result.stdout.fnmatch_lines(["gpu-v1, released: * pass, * fail, * not applicable", "M9 fail in mutated-fields: *"])


# What cannot be judged.


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--phase-runner", "runners:raises"], "runners:raises raised OSError: no device here"),
        (["--phase-runner", "runners:raises_in_lines"], "runners:raises_in_lines raised OSError: no device here"),
        (["--phase-model", "runners:raises_in_lines"], "runners:raises_in_lines raised OSError: no device here"),
        (["--phase-runner", "runners:leaves"], "runners:leaves raised SystemExit: 3"),
        (["--phase-runner", "runners:gives_nothing"], "runners:gives_nothing returned None, which is no class"),
        (["--phase-runner", "runners:gives_an_instance"], "returned a object, which is no class"),
        (["--phase-runner", "runners:gives_another_class"], "is no V1 model runner of vLLM-Omni"),
        (["--phase-runner", "runners:no_function"], "is no class and no function that returns one"),
        (["--phase-runner", "runners:absent"], "runners has no absent"),
        (["--phase-runner", "no_such_module:runner"], "cannot import no_such_module"),
        (["--phase-runner", "nothing"], "a runner is gpu-v1, gpu-v2, npu-v1 or MODULE:CLASS, not 'nothing'"),
        (["--phase-runner", "runners:mixed"], "judge it with --phase-mode mixin"),
        (["--phase-runner", "runners:released", "--phase-device", "npu"], "no NPU: "),
        (["--phase-runner", "gpu-v1", "--phase-xfail", "absent"], "--phase-xfail absent: there is no such file"),
        (["--phase-runner", "gpu-v1", "--phase-xfail", "runners.py"], "--phase-xfail runners.py: line 2"),
        (["--phase-runner", "gpu-v1", "--phase-report", "absent/report.md"], "there is no folder absent"),
        (["--phase-runner", "gpu-v1", "--phase-report", "."], "this is a folder"),
        (["--phase-model", "runners:raises"], "runners:raises raised OSError: no device here"),
        (["--phase-model", "runners:released"], "which is no ModelUnderTest"),
        ([], "name what to judge: --phase-runner MODULE:FACTORY, --phase-model MODULE:FACTORY, or both"),
    ],
)
def test_what_cannot_be_judged(
    arguments: list[str],
    told: str,
    kit: Kit,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One clear line, status 2, and nothing half-written."""
    before = sorted(path.name for path in kit.folder.iterdir())
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    # Not by the pytester, which expects that sessions begin.
    options = ["-p", PLUGIN, "-p", "no:cacheprovider", "--pyargs", "omni_npu_phase.conformance"]
    report = [] if "--phase-report" in arguments else ["--phase-report", "report.md"]
    assert pytest.main([*options, *arguments, *report, "--junitxml=junit.xml"]) == 2
    sys.modules.pop("runners", None)
    out, err = capfd.readouterr()
    (line,) = [line for line in (out + err).splitlines() if "omni-npu-phase: " in line]
    assert told in line
    assert "Traceback" not in out + err
    assert sorted(path.name for path in kit.folder.iterdir()) == before


def test_a_runner_that_cannot_be_set_up_is_an_error_of_its_own_clauses(kit: Kit) -> None:
    (kit.folder / "broken.py").write_text(
        "from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner\n"
        "class Broken(GPUARModelRunner):\n"
        "    def _make_buffer(self, *args, **keywords):\n"
        "        raise OSError('no buffers\\n  here')\n",
        encoding="utf-8",
    )
    found = kit.outcomes("--phase-runner", "broken:Broken", "--phase-report", "r.md", "-ktable-scalar-mtp]")
    assert {test: outcome for test, outcome in found.items() if outcome == "error"} == dict.fromkeys(
        _ids([(clause, "table", "scalar-mtp") for clause in BY_ID["table"].about]) | {"test_run[table-scalar-mtp]"},
        "error",
    )
    assert set(found.values()) == {"error"}
    (row,) = (line for line in (kit.folder / "r.md").read_text(encoding="utf-8").splitlines() if "| M5 |" in line)
    assert row.startswith("| M5 | required | error | table |")
    assert "OSError: no buffers here" in row


def test_scenarios_that_a_runner_cannot_be_in_are_skipped_with_the_reason(kit: Kit) -> None:
    result = kit.run("--phase-runner", "runners:released", "-k", "M5-generation-runner-scalar]", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * no generation runner was named"])
