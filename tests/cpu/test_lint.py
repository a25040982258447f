# SPDX-License-Identifier: Apache-2.0
"""Lint: small models for each rule, and the models of two releases as they were judged by reading."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from omni_npu_phase.commands.app import app
from omni_npu_phase.contract import CLAUSES
from omni_npu_phase.lint import expressions, files, findings, hooks, ignores, operations, values, walk
from omni_npu_phase.lint.files import lint
from omni_npu_phase.lint.findings import judge
from omni_npu_phase.lint.observed import ROWS, Observed
from omni_npu_phase.lint.report import Report
from omni_npu_phase.lint.rules import RULES, SEVERITIES
from omni_npu_phase.lint.source import Method, Model, Source, UnreadableError, module_file, read
from omni_npu_phase.lint.walk import Walk
from tests.cpu.lint_cases import CASES, SPAN, UNKNOWN, Case

JUDGED = json.loads((Path(__file__).parent / "lint_models.json").read_text(encoding="utf-8"))["releases"]


def _linted(folder: Path, **sources: str) -> Report:
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    return lint([folder])


def _found(report: Report) -> frozenset[str]:
    return frozenset(f"{each.rule} {each.severity}" for each in report.findings)


# ---- small models


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    """The models of the cases, by the case's name; each is parsed once."""
    folder = tmp_path_factory.mktemp("cases")
    for number, case in enumerate(CASES):
        (folder / f"m{number}.py").write_text(case.source, encoding="utf-8")
    return {case.name: read(folder / f"m{number}.py") for number, case in enumerate(CASES)}


def _found_in(file: Source) -> frozenset[str]:
    judged = [found for name in file.classes if (found := judge(Model.of(file, name))) is not None]
    return frozenset(f"{each.rule} {each.severity}" for one in judged for each in one.findings)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_small_models(case: Case, parsed: dict[str, Source]) -> None:
    assert _found_in(parsed[case.name]) == case.found, case.source


def test_cases_have_names_of_their_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_every_rule_has_a_case() -> None:
    shown = {each for case in CASES for each in case.found}
    of_comments = {"ignore-reason", "unused-ignore"}
    for rule in RULES.values():
        if rule.id not in of_comments:
            assert {f"{rule.id} {severity}" for severity in rule.severities} <= shown
    assert {rule.clause for rule in RULES.values() if rule.clause} <= CLAUSES.keys()
    assert {severity for rule in RULES.values() for severity in rule.severities} == set(SEVERITIES)


def test_a_finding_says_where_and_what_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = "class M:\n    def preprocess(self, input_ids, **info):\n        many = input_ids.shape[0] > 1\n"
    (found,) = _linted(tmp_path, model=source + "        return self.a() if many else self.b()\n").findings
    assert (found.path, found.line, found.column, found.model) == ("model.py", 3, 16, "M")
    assert "`input_ids.shape[0] > 1`" in found.message
    assert (found.clause, found.fix) == ("M5", 'is_prefill = info["_omni_is_prefill"]')


PHASE = "info['_omni_is_prefill']"
_BASE = """
from typing import Any

class Base:
    def preprocess(self, input_ids, input_embeds, **info):
        return self.prefill(info) if self.many(input_ids, info) else self.decode(info)

    def many(self, ids, info):
        return TEST
"""


@pytest.mark.parametrize(
    ("base", "own", "found"),
    [
        ("len(ids) > 1", "from .base import Base\nclass M(Base): pass", {SPAN}),
        ("len(ids) > 1", "from pack.base import Base as B\nclass M(B): pass", {SPAN}),
        ("len(ids) > 1", "from . import base\nclass M(base.Base): pass", {SPAN}),
        (
            PHASE,
            "from .base import Base\nclass M(Base):\n    def many(self, ids, info): return len(ids) > 1",
            {SPAN},
        ),
        (
            PHASE,
            "from .base import Base\nfrom .help import many\n"
            "class M(Base):\n    def many(self, ids, info): return many(ids)",
            {SPAN},
        ),
        (
            "len(ids) > 1 and ids",
            "from .base import Base\nclass M(Base):\n    def many(self, ids, info): return ids.any()",
            {SPAN, UNKNOWN},
        ),
        (PHASE, "from .base import Base\nclass M(Base): pass", set()),
        (PHASE, "from torch import nn\nclass M(nn.Module):\n    def preprocess(self, input_ids): return 1", set()),
    ],
)
def test_other_files_of_the_package_are_followed(base: str, own: str, found: set[str], tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    help_ = "def many(ids):\n    return ids.numel() > 1\n"
    for name, source in {"__init__": "", "base": _BASE.replace("TEST", base), "help": help_}.items():
        (package / f"{name}.py").write_text(source, encoding="utf-8")
    (package / "own.py").write_text(own, encoding="utf-8")
    assert _found(lint([package])) == found
    # What a base of another file does is found there, also when only the derived class was asked for.
    assert (_found(lint([package / "own.py"])) == found) or "ids.any()" in own


# ---- real models, judged by reading


def _installed() -> Path | None:
    return module_file("vllm_omni").parent if metadata.version("vllm-omni") == "0.30.0" else None


def _release(version: str) -> Path:
    """The sources of a release: the installed one, or what lies ready to be laid over it."""
    overlay = Path(sys.prefix, "overlays", ".".join(version.split(".")[:2]), "vllm_omni")
    found = _installed() if version == "0.30.0" else overlay if overlay.is_dir() else None
    if found is None:
        pytest.skip(f"vLLM-Omni {version} is not here; ci/matrix makes {overlay.parent}")
    return found


@pytest.fixture(scope="module", params=sorted(JUDGED))
def released(request: pytest.FixtureRequest) -> tuple[list[dict[str, Any]], Path, Report]:
    root = _release(request.param)
    return JUDGED[request.param], root, lint([root])


def test_every_model_with_a_hook_was_read(released: tuple[list[dict[str, Any]], Path, Report]) -> None:
    """By their text alone, these files have a hook of the runner's or a class derived from one that has, and lint
    sees the same."""
    judged, root, report = released
    names = "|".join(each["class"] for each in judged)
    hook = re.compile(
        r"set_custom_preprocess\(self\.|def preprocess\(\s*self,\s*input_ids|def preprocess_decode_batch\("
        rf"|class \w+\([^)]*\b(?:{names})\b"
    )
    with_hooks = {path for path in root.rglob("*.py") if hook.search(path.read_text(encoding="utf-8"))}
    # What every model may derive from says that it has no hook.
    with_hooks.discard(root / "model_executor" / "custom_process_mixin.py")
    assert {root / each["path"] for each in judged} == with_hooks
    assert [each["class"] for each in judged if (root / each["path"]) not in with_hooks] == []
    assert sorted(each.model.name for each in report.models) == sorted(each["class"] for each in judged)


def test_verdicts_are_those_of_the_reader(released: tuple[list[dict[str, Any]], Path, Report]) -> None:
    judged, _, report = released
    assert {each.model.name: each.verdict for each in report.models} == {
        each["class"]: "unknown" if "cannot tell" in each else each["verdict"] for each in judged
    }


def test_findings_are_the_evidence(released: tuple[list[dict[str, Any]], Path, Report]) -> None:
    """Line by line: what was read is found, nothing else is, and what lint cannot tell or does not see is said."""
    judged, root, report = released
    # Lint names files from the current folder on, where they lie in it.
    found = {(str(Path(each.path).absolute()), each.line, each.rule) for each in report.findings}
    read_there = {
        (str(root / each["path"]), evidence["line"], evidence["rule"])
        for each in judged
        for evidence in each["evidence"]
        if evidence.get("seen", True)
    }
    read_there |= {
        (str(root / each["path"]), each["cannot tell"], "cannot-tell") for each in judged if "cannot tell" in each
    }
    unseen = {
        (str(root / each["path"]), evidence["line"], evidence["rule"])
        for each in judged
        for evidence in each["evidence"]
        if not evidence.get("seen", True)
    }
    assert found == read_there
    assert found.isdisjoint(unseen)


ANSWERS = {
    "error": {"decides by span", "breaks the contract"},
    "unknown": {"cannot tell"},
    "fallback": {"decides by the fields"},
    "clean": {"decides by the fields", "needs no phase"},
}
"""What doctor says of a model, by lint's verdict."""


def test_the_issue_of_a_verdict(released: tuple[list[dict[str, Any]], Path, Report]) -> None:
    """Models that read no field and decide by the span are errors; those that read the fields are none."""
    judged, _, report = released
    for each in report.models:
        if each.verdict == "error":
            assert not each.reads
        assert each.answer[0] in ANSWERS[each.verdict], each.answer
    assert all(len(each["reason"]) > 40 for each in judged)


# ---- the walk is Python's own arithmetic

_NUMBERS = st.deferred(
    lambda: st.one_of(
        st.sampled_from(
            ["len(input_ids)", "input_ids.shape[0]", "info['_omni_prompt_len']", "info['_omni_num_computed_tokens']"]
        ),
        st.integers(0, 10).map(str),
        st.tuples(_NUMBERS, st.sampled_from("+-*"), _NUMBERS).map(lambda each: f"({' '.join(each)})"),
        st.tuples(_NUMBERS, _NUMBERS).map(lambda each: f"min({', '.join(each)})"),
    )
)
_TESTS = st.deferred(
    lambda: st.one_of(
        st.just("info['_omni_is_prefill']"),
        st.tuples(_NUMBERS, st.sampled_from(["<", "<=", "==", "!=", ">", ">="]), _NUMBERS).map(" ".join),
        _TESTS.map(lambda each: f"(not {each})"),
        st.tuples(_TESTS, st.sampled_from(["and", "or"]), _TESTS).map(lambda each: f"({' '.join(each)})"),
        st.tuples(_TESTS, _TESTS, _TESTS).map(lambda each: f"({each[0]} if {each[1]} else {each[2]})"),
    )
)


@settings(max_examples=50)
@given(_TESTS)
def test_tests_give_what_python_gives(test: str) -> None:
    """For every row, whatever the test is made of."""
    source = f"class M:\n def preprocess(self, input_ids, **info):\n  if {test}:\n   return self.a()\n  return self.b()"
    (model,) = _models_of(source)
    trace = Observed()
    method = model.method("preprocess")
    assert method is not None
    for row in ROWS:
        Walk(model, row, True, trace).hook(method, "preprocess")
    (node,) = (each for each in ast.walk(method.node) if isinstance(each, ast.If))
    (seen,) = (each for key, each in trace.tests.items() if key[-1] == id(node))
    for row in ROWS:
        names = {"input_ids": _Ids(row.span), "info": row.fields}
        assert seen.outcomes[row] is bool(eval(test, names)), row


class _Ids:
    def __init__(self, length: int) -> None:
        self.shape = (length,)

    def __len__(self) -> int:
        return self.shape[0]


def _models_of(source: str) -> Iterator[Model]:
    tree = ast.parse(source)
    file = Source(Path("a_model.py"), classes={each.name: each for each in tree.body if isinstance(each, ast.ClassDef)})
    yield from (Model.of(file, name) for name in file.classes)


@given(st.text(alphabet="\n #[]ab:", max_size=40))
def test_ignore_comments_of_any_shape(text: str) -> None:
    source = f"x = 1  # omni-phase: ignore{text.replace(chr(10), ' ')}\n"
    (found,) = ignores.ignores_in(source)
    assert (found.line, found.of_line) == (1, 1)
    assert found.acts == bool(found.rules and found.reason)


# ---- ignoring

_GUESS = "class M:\n    def preprocess(self, input_ids, **info):\n{before}        if len(input_ids) > 1:{after}\n"
_GUESS += "            return self.a(info)\n        return self.b(info)\n"


IGNORES: list[tuple[str, str, set[str], int]] = [
    ("", "  # omni-phase: ignore[span-phase] the stage never chunks", set(), 1),
    ("        # omni-phase: ignore[span-phase] the stage never chunks\n", "", set(), 1),
    ("        # omni-phase: ignore[span-phase] never chunks\n        # another comment\n\n", "", set(), 1),
    ("", "  # omni-phase: ignore[own-counter, span-phase] never chunks", {"unused-ignore note"}, 1),
    ("", "  # omni-phase: ignore[span-phase]", {SPAN, "ignore-reason error"}, 0),
    ("", "  # omni-phase: ignore never chunks", {SPAN, "ignore-reason error"}, 0),
    ("", "  # omni-phase: ignore[] never chunks", {SPAN, "ignore-reason error"}, 0),
    ("", "  # omni-phase: ignored[span-phase] never chunks", {SPAN, "ignore-reason error"}, 0),
    ("", "  # omni-phase: ignore[own-counter] never chunks", {SPAN, "unused-ignore note"}, 0),
    ("", "  # omni-phase: ignore[no-such-rule] never chunks", {SPAN, "unused-ignore note"}, 0),
    ("        x = '# omni-phase: ignore[span-phase] in a string'\n", "", {SPAN}, 0),
    ("        # omni-phase: ignore[span-phase] too early\n        x = 1\n", "", {SPAN, "unused-ignore note"}, 0),
]


@pytest.mark.parametrize(("before", "after", "found", "ignored"), IGNORES)
def test_ignore_comments(before: str, after: str, found: set[str], ignored: int, tmp_path: Path) -> None:
    report = _linted(tmp_path, model=_GUESS.format(before=before, after=after))
    assert _found(report) == found
    assert len(report.ignored) == ignored
    for each, reason in report.ignored:
        assert (each.rule, "never" in reason) == ("span-phase", True)


@pytest.mark.parametrize(
    "mutant",
    [
        (ignores.Ignore, "acts", True),
        (ignores.Ignore, "acts", False),
        (ignores, "RULES", {}),
        (files, "apply", lambda path, comments, found: (list(found), [], [])),
        (files, "ignores_in", lambda text: []),
    ],
    ids=["any comment acts", "none acts", "no rule is known", "nothing is applied", "no comment is read"],
)
def test_mutants_of_ignoring_are_seen(
    mutant: tuple[Any, str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*mutant)
    wrong = 0
    for before, after, found, ignored in IGNORES:
        report = _linted(tmp_path, model=_GUESS.format(before=before, after=after))
        wrong += (_found(report), len(report.ignored)) != (found, ignored)
    told = _linted(tmp_path, model=_GUESS.format(before="", after="  # omni-phase: ignore[own-counter] why"))
    assert wrong or "there is no own-counter to ignore here" not in told.to_text()


def test_a_comment_without_a_model_is_unused(tmp_path: Path) -> None:
    assert _found(_linted(tmp_path, plain="x = 1  # omni-phase: ignore[span-phase] why\n")) == {"unused-ignore note"}


# ---- the command


def _lint(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["lint", *map(str, arguments)])


@pytest.fixture
def guessing(tmp_path: Path) -> Path:
    file = tmp_path / "model.py"
    file.write_text(_GUESS.format(before="", after=""), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("test", "fail_on", "status"),
    [
        ("len(input_ids) > 1", "error", 1),
        ("info.get('_omni_is_prefill', len(input_ids) > 1)", "error", 0),
        ("info.get('_omni_is_prefill', len(input_ids) > 1)", "fallback", 1),
        ("info.get('_omni_is_prefill', False)", "fallback", 0),
        ("info.get('codes')", "error", 0),
        ("info.get('codes')", "fallback", 0),
        ("info.get('codes')", "unknown", 1),
        ("info.get('codes')", "note", 1),
        ("info.get('_omni_is_prefill', len(input_ids) > 1)", "unknown", 1),
        ("info.get('_omni_is_prefill', False)", "unknown", 0),
        ("info.get('_omni_is_prefill', False)", "note", 1),
        ("info['_omni_is_prefill']", "note", 0),
    ],
)
def test_exit_status(test: str, fail_on: str, status: int, guessing: Path) -> None:
    guessing.write_text(guessing.read_text().replace("len(input_ids) > 1", test), encoding="utf-8")
    assert _lint(guessing, "--fail-on", fail_on).exit_code == status


def test_text(guessing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(guessing.parent)
    result = _lint("model.py")
    assert result.stdout.startswith("model.py:3:12: error span-phase [M5] `len(input_ids) > 1` decides")
    assert '    instead: is_prefill = info["_omni_is_prefill"]\n' in result.stdout
    assert result.stdout.endswith("1 error, 0 fallbacks, 0 unknown, 0 notes: 1 model with hooks in 1 file\n")
    assert "following hooks" in result.stderr


def test_json(guessing: Path) -> None:
    document = json.loads(_lint(guessing.parent, "--format", "json").stdout)
    (found,) = document["findings"]
    assert set(found) == {"path", "line", "column", "severity", "rule", "clause", "message", "fix", "model"}
    assert (found["line"], found["severity"], found["rule"], found["clause"]) == (3, "error", "span-phase", "M5")
    assert document["models"] == [{"class": "M", "hooks": ["preprocess"], "verdict": "error", "reads": []}]
    assert (document["schema"], document["files"], document["unread"], document["ignored"]) == (1, 1, [], [])


def test_github(guessing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = guessing.with_name("a,b.py")
    guessing.rename(named)
    monkeypatch.chdir(named.parent)
    (line,) = _lint("a,b.py", "--format", "github").stdout.splitlines()
    assert line.startswith("::error file=a%2Cb.py,line=3,col=12,title=span-phase (M5)::`len(input_ids) > 1` decides")


def test_what_cannot_be_told_is_said(guessing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every format, and with the test that chooses."""
    monkeypatch.chdir(guessing.parent)
    guessing.write_text(guessing.read_text().replace("len(input_ids) > 1", "info.get('codes') is None"))
    text = _lint("model.py").stdout
    assert text.startswith("model.py:3:12: unknown cannot-tell [M5] `info.get('codes') is None` chooses")
    assert text.endswith("0 errors, 0 fallbacks, 1 unknown, 0 notes: 1 model with hooks in 1 file\n")
    document = json.loads(_lint("model.py", "--format", "json").stdout)
    assert [each["severity"] for each in document["findings"]] == ["unknown"]
    assert [each["verdict"] for each in document["models"]] == ["unknown"]
    assert _lint("model.py", "--format", "github").stdout.startswith("::notice file=model.py,line=3,col=12")


def test_help_and_rules_teach() -> None:
    text = " ".join(_lint("--help").stdout.split())
    for words in (
        "Exit status",
        "--fail-on",
        "--rules",
        "--format",
        "omni-phase: ignore[rule] reason",
        "unknown means that lint cannot tell",
    ):
        assert words in text
    listed = "".join(_lint("--rules").stdout.split())
    for rule in RULES.values():
        assert rule.id in listed
        assert "".join(rule.fix.split())[:20] in listed


def _unreadable(folder: Path, content: bytes) -> Path:
    file = folder / "bad.py"
    file.write_bytes(content)
    return file


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"class M(:\n", "bad.py:1: no Python: "),
        (b"x = '\xff\xfe'\n", "bad.py: no Python text: "),
        (b"x = 1\0\n", "bad.py"),
        (
            b"class M:\n def preprocess(self, input_ids): return 1" + b"+1" * 700,
            "M is nested too deeply to be followed",
        ),
        (b"# coding: no-such-coding\n", "bad.py: no Python text: unknown encoding"),
    ],
)
def test_files_that_are_no_python(content: bytes, message: str, tmp_path: Path, guessing: Path) -> None:
    """Named, with the reason; what can be read is reported whole, and the status is 2."""
    bad = _unreadable(tmp_path, content)
    for arguments in ((bad,), (bad, guessing)):
        result = _lint(*arguments, "--format", "json")
        assert result.exit_code == 2
        assert message in "".join(result.stderr.splitlines())
        document = json.loads(result.stdout)
        assert len(document["unread"]) == 1
        assert len(document["findings"]) == len(arguments) - 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "nowhere: there is no such file or folder"),
        ("notes.txt", "notes.txt: this is no Python file (*.py) and no folder"),
        ("empty", "empty: there is no Python file (*.py) in it"),
    ],
)
def test_paths_without_python(
    name: str, message: str, tmp_path: Path, guessing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is reported of the others then: a mistyped path must not look like a clean run."""
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    result = _lint("model.py", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert _lint().exit_code == 2


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(folder: Any, onerror: Callable[[OSError], None] | None = None, **_: Any) -> Iterator[Any]:
        assert onerror is not None
        onerror(PermissionError(13, "Permission denied", str(folder)))
        yield from ()

    monkeypatch.setattr("omni_npu_phase.lint.files.os.walk", refused)
    result = _lint(tmp_path)
    assert result.exit_code == 2
    assert "Permission denied" in result.stderr


def test_links_to_nowhere_and_pipes(tmp_path: Path, guessing: Path) -> None:
    """The first is named; the second is no file, and is not waited for."""
    (tmp_path / "gone.py").symlink_to("nowhere.py")
    os.mkfifo(tmp_path / "pipe.py")
    result = _lint(tmp_path)
    assert result.exit_code == 2
    assert "gone.py: No such file or directory" in "".join(result.stderr.splitlines())
    assert "1 model with hooks in 2 files" in result.stdout


def test_hidden_folders_and_caches_are_left_out(tmp_path: Path) -> None:
    for name in (".venv", "__pycache__", "kept"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.py").write_text(_GUESS.format(before="", after=""), encoding="utf-8")
    (found,) = lint([tmp_path]).findings
    assert "kept" in found.path


def test_odd_code_is_walked_to_its_end(tmp_path: Path) -> None:
    """Recursion, deep nesting and everything else that is Python ends, and hides nothing."""
    source = """
class M:
    def preprocess(self, input_ids, input_embeds=None, *args, **info):
        global flag
        import os
        async def later(): yield 1
        class Inner: pass
        with open("x") as file, file as (a, b): pass
        for (i, j), *rest in enumerate(zip(info["a"], [1])): break
        else: pass
        while info["b"]: continue
        try: self.preprocess(input_ids, **info)
        except (A, B) as error: raise
        else: x = {**info["c"]}
        finally: del info["d"]
        x = [y for y in range(3) if y] + [*args]; z = {y: y for y in x}; w = {y for y in x}
        x = 1 / 0 if info["e"] else ~1 + -1 @ 2; x: int; x = f"{x!r:>{z}}" % (1 ** 2); lambda: (yield)
        match info["f"]:
            case {"a": 1} | [1, *_] | str(): pass
            case None: pass
            case int(n) if n > 1: pass
        a.b[0][1:2, ...] = c = d, *e = input_ids[1:], input_ids[..., None], 3
        "a" * 10_000_000_000_000; "%10000000000000d" % 1; b"" % 1; [1] * 10_000_000_000_000
        self.loop(input_ids); self.mutual(input_ids)
        nonlocal_ = print(input_ids) or await_
        if len(input_ids) > 1: return self.a(info)
        return self.b(info)
    def loop(self, ids): return self.loop(ids)
    def mutual(self, ids): return self.other(ids)
    def other(self, ids): return self.mutual(ids)
"""
    report = _linted(tmp_path, model=source)
    assert (_found(report), report.unread) == ({SPAN}, [])


# ---- mutants


def _mistakes(parsed: dict[str, Source]) -> Iterator[str]:
    """Cases that do not hold; cases of one kind stand together, so one of each kind comes first."""
    mixed = [case for first in range(17) for case in CASES[first::17]]
    return (case.name for case in mixed if _found_in(parsed[case.name]) != case.found)


def _without(rule: str) -> Callable[[pytest.MonkeyPatch], None]:
    kept = tuple(each for each in findings.RULES_IN_CODE if each.__name__.replace("_", "-") != rule)
    assert len(kept) == len(findings.RULES_IN_CODE) - 1
    return lambda patch: patch.setattr(findings, "RULES_IN_CODE", kept)


def _changed(where: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(where, name, value)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    **{f"without {rule}": _without(rule) for rule, known in RULES.items() if known.clause is not None},
    "any test of the span": _changed(findings, "_by_span", lambda test: len(set(test.outcomes.values())) > 1),
    "any test of the progress": _changed(findings, "_by_progress", lambda test: len(set(test.outcomes.values())) > 1),
    "no whole prompts": _changed(findings, "_by_whole_prompt", lambda test: False),
    "every branch matters": _changed(expressions, "touches", lambda nodes: True),
    "every statement matters": _changed(walk, "touches", lambda nodes: True),
    "no branch matters": _changed(walk, "touches", lambda nodes: False),
    "no runner without fields": _changed(
        findings, "_walked", lambda model, kind, method: _walked_with_fields(model, kind, method)
    ),
    "no calls are followed": _changed(walk.Walk, "_bound", lambda self, method, holder: values.Value()),
    "fields are not read": _changed(
        walk.Walk, "_field", lambda self, name, default, frame, place: default or values.Value()
    ),
    "nothing escapes": _changed(walk.Walk, "_escaped", lambda self, given, frame: None),
    "no length is compared with the span": _changed(operations, "length", lambda value: _unmeasured(value)),
    "nothing is kept for a request": _changed(findings, "_kept", lambda value, seen: False),
    "all is kept for a request": _changed(findings, "_kept", lambda value, seen: value.state),
    "no field decides beside a length": _changed(findings, "_beside_fields", lambda test: False),
    "no test is by the phase": _changed(findings, "_by_phase", lambda test: False),
    "no test chooses a value": _changed(walk.Walk, "_chosen", lambda self, value, tests=None: value),
    "nothing is stored outside hooks": _changed(findings, "stored_later", lambda model: ()),
    "every try asks": _changed(walk, "_asks", lambda error: True),
    "no try asks": _changed(walk, "_asks", lambda error: False),
    "no way returns": _changed(walk, "_returns", lambda node: False),
    "every way returns": _changed(walk, "_returns", lambda node: True),
    "no rows are counted": _changed(expressions, "entries", lambda value: value.elements),
    "an unknown key chooses nothing": _changed(
        walk.Walk, "_any_of", lambda self, given, key, node, frame: values.Value()
    ),
    "every name is a counter": _changed(findings, "_counted", lambda keys, seen: keys),
    "nothing is kept": _changed(walk.Walk, "_kept", lambda self, keys, value: None),
    "no slices": _changed(walk.Walk, "_sliced", lambda self, lower, upper, place, frame: None),
    "numbers are unknown": _changed(operations, "concrete", lambda value: values.UNKNOWN),
    "no hook is set by the class": _changed(hooks, "_set_by", lambda model: iter(())),
    "every preprocess is a hook": _changed(hooks, "_takes_tokens", lambda method: True),
    "all is certain": _changed(walk.Walk, "_maybe", lambda self, ways, frame: [way() for way in ways]),
}


def _walked_with_fields(model: Model, kind: str, method: Method) -> findings.Seen:
    trace = Observed()
    for row in ROWS:
        Walk(model, row, True, trace).hook(method, kind)
    return findings.Seen(model, method, kind, trace, Observed())


def _unmeasured(value: values.Value) -> values.Value:
    made = _LENGTH(value)
    made.length_of = None
    return made


_LENGTH = operations.length


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_seen(mutant: str, parsed: dict[str, Source], monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    assert next(_mistakes(parsed), None) is not None


def test_unreadable_sources_are_named() -> None:
    with pytest.raises(UnreadableError, match="neither a folder nor an installed module"):
        module_file("nowhere.at_all")
