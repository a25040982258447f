# SPDX-License-Identifier: Apache-2.0
"""What the documents say is so: commands run, quoted output is what is printed, links lead somewhere.

A comment before a block says what it needs, and nothing of it is seen on the page:

- ``<!-- file: NAME -->``: the block is the content of a file, for the commands that come after it;
- ``<!-- status: N -->``: the block's last command ends with that exit status;
- ``<!-- recorded: NAME -->``: what is quoted is part of ``docs/recorded/NAME.txt``, a real run of the
  command that stands there on its first line. ``--real`` runs that command and compares, ``--record`` writes it anew;
- ``<!-- installs -->``: runs in an empty environment with ``--installs CHECKOUT``, in a copy of that;
- ``<!-- runs -->``: Python that runs where vLLM-Omni is;
- ``<!-- named -->``: is only read: the command and its options exist. It needs a device, a checkpoint or a server.

``[...]`` in quoted output stands for any text. Every command of a ``console`` block is read, also those that run.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer
from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser

from omni_npu_phase import __version__, settings
from omni_npu_phase.commands.app import app
from omni_npu_phase.conformance import pytest_plugin

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "docs" / "recorded"
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/*/README.md")
    for path in ROOT.glob(pattern)
)
LANGUAGES = ("console", "python", "text", "yaml")
# "text" marks nothing that can be run; it is quoted from somewhere, or a file.
MARKS = ("file", "status", "recorded", "installs", "runs", "named")
_MARK = re.compile(r"<!-- (\w+)(?:: (.*?))? -->")
_BEFORE = re.compile(r"((?:<!-- [^>]* -->\s*?\n)+)\Z")
# Variables of vLLM, of Ascend's own scripts and of the environments in ci/.
FOREIGN = ("OMNI_NPU_PHASE_VENV",)


@dataclass
class Block:
    """A fenced block, and what the comments before it say."""

    document: str
    line: int
    language: str
    text: str
    marks: dict[str, str]

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def quotes(self) -> list[tuple[str, str]]:
        """Commands of a console block, each with the output that is quoted."""
        found: list[tuple[str, list[str]]] = []
        for line in self.text.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                assert found, f"{self.place}: a console block begins with a command: {line!r}"
                found[-1][1].append(line)
        return [(command, "\n".join(output).strip("\n")) for command, output in found]


@functools.cache
def blocks(document: str) -> tuple[Block, ...]:
    found: list[Block] = []

    def collect(language: str) -> Callable[[Example], None]:
        def one(example: Example) -> None:
            text = example.document.text
            before = _BEFORE.search(text[: example.region.start])
            marks = {name: value or "" for name, value in _MARK.findall(before.group(1) if before else "")}
            found.append(Block(document, example.line, language, str(example.parsed), marks))

        return one

    parsers = [CodeBlockParser(language, collect(language)) for language in LANGUAGES]
    for example in Document.parse(str(ROOT / document), *parsers).examples():
        example.evaluate()
    return tuple(found)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_says_what_it_is(document: str) -> None:
    """So that none goes unread."""
    fences = re.findall(r"^ *```(.*)$", (ROOT / document).read_text(encoding="utf-8"), re.MULTILINE)[::2]
    assert len(blocks(document)) == len(fences), f"a fence of another language than {LANGUAGES}: {fences}"
    for block in blocks(document):
        assert block.marks.keys() <= set(MARKS), block.place
        if block.language == "text":
            assert block.marks.keys() & {"file", "recorded"}, f"{block.place}: from where is this?"


# Links


def _anchors(path: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    source = ROOT / document
    for target in re.findall(r"\]\(([^)\s]+)\)", source.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        path = (source.parent / name).resolve() if name else source
        assert path.exists(), f"{document}: {target}"
        if anchor:
            assert anchor in _anchors(path), f"{document}: {target}"


# What is named exists


def _spoken(document: str) -> Iterator[tuple[str, str]]:
    """Every command of a document, in blocks and in the middle of a sentence, with its place."""
    for block in blocks(document):
        if block.language == "console":
            for command, _ in block.quotes:
                yield block.place, command
    text = (ROOT / document).read_text(encoding="utf-8")
    for command in re.findall(r"`((?:omni-npu-phase|ci/)[^`\n]*)`", re.sub(r"(?ms)^```.*?^```", "", text)):
        yield document, command


@functools.cache
def _help(script: str) -> str:
    return subprocess.run([sys.executable, ROOT / script, "--help"], capture_output=True, text=True, check=True).stdout


def _wrong(command: str) -> str | None:
    """What of a command does not exist."""
    words = [word for word in shlex.split(command, comments=True) if word != "..."]
    while words and re.fullmatch(r"\w+=.*", words[0]):
        variable = words.pop(0).partition("=")[0]
        if variable.startswith("OMNI_NPU_PHASE") and variable not in _variables():
            return f"nothing reads {variable}"
    first, *rest = words or [""]
    if first == "omni-npu-phase":
        return _wrong_argument(rest)
    if first.startswith("ci/"):
        if not (ROOT / first).exists():
            return f"there is no {first}"
        if not os.access(ROOT / first, os.X_OK) or (ROOT / first).is_dir():
            return None
        known = set(re.findall(r"--[a-z-]+", _help(first)))
        if first == "ci/verify":
            # It hands them on, as ci/test does to pytest.
            return _wrong_argument(["verify", *rest])
        if first == "ci/test":
            return None
    elif first == "pytest":
        known = _kit_options()
        rest = [word for word in rest if word.startswith("--phase")]
    else:
        return None
    unknown = [word for word in rest if word.startswith("--") and word.partition("=")[0] not in known]
    return f"{first} has no {unknown}" if unknown else None


def _wrong_argument(words: list[str]) -> str | None:
    command: Any = typer.main.get_command(app)
    # Of groups: a command by its name.
    while words and not words[0].startswith("-") and (below := getattr(command, "commands", None)):
        name, *words = words
        if name not in below:
            return f"there is no command {name}"
        command = below[name]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
    unknown = [word for word in words if re.match("--?[a-z]", word) and word.partition("=")[0] not in known]
    return f"{command.name} has no {unknown}" if unknown else None


def _kit_options() -> set[str]:
    found: set[str] = set()

    class Parser:
        def getgroup(self, *_: object) -> Parser:
            return self

        def addoption(self, name: str, **_: object) -> None:
            found.add(name)

        def addini(self, *_: object, **__: object) -> None: ...

    pytest_plugin.pytest_addoption(Parser())  # type: ignore[arg-type]
    return found


def _variables() -> set[str]:
    own = {value for name, value in vars(settings).items() if name.endswith("_VARIABLE")}
    return own | set(FOREIGN)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_is_named_exists(document: str) -> None:
    for place, command in _spoken(document):
        wrong = _wrong(command)
        assert wrong is None, f"{place}: {command}: {wrong}"
    named = re.findall(r"\bOMNI_NPU_PHASE(?:_[A-Z]+)*\b", (ROOT / document).read_text(encoding="utf-8"))
    assert set(named) <= _variables()


def test_the_readme_is_short_and_has_every_variable() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 140
    assert [name for name in sorted(_variables()) if f"`{name}" not in text] == []


def test_the_changelog_has_this_version() -> None:
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert first is not None
    assert first.group(1) == __version__


# What is quoted is printed


def matches(quoted: str, printed: str) -> bool:
    pattern = ".*?".join(re.escape(part) for part in quoted.split("[...]"))
    return re.fullmatch(pattern, printed, re.DOTALL) is not None


def _tidy(text: str) -> str:
    # Progress is a spinner in a terminal, and leaves nothing there.
    lines = [line.rstrip() for line in text.splitlines() if not line.startswith("... ")]
    return "\n".join(lines).strip("\n")


@dataclass
class Session:
    """A reader's terminal: a folder, the files that the document put there, and the environment of its own."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def put(self, block: Block) -> None:
        path = self.folder / block.marks["file"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")

    def run(self, command: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env={**os.environ, **self.variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, _tidy(done.stdout)

    def follow(self, block: Block) -> None:
        """Run the block's commands and compare."""
        *others, (last, _) = block.quotes
        expected = {**{command: 0 for command, _ in others}, last: int(block.marks.get("status") or 0)}
        for command, quoted in block.quotes:
            status, printed = self.run(command)
            # pip speaks of its index.
            said = command.startswith("pip ") or matches(quoted, printed)
            assert said, f"{block.place}: $ {command}\nprints:\n{printed}\nquoted:\n{quoted}"
            assert status == expected[command], f"{block.place}: $ {command} ends with status {status}:\n{printed}"


def _session(folder: Path) -> Session:
    # The command of the package that is tested, also where it is not installed as one.
    commands = folder / "bin"
    commands.mkdir()
    for name, module in (("omni-npu-phase", "-m omni_npu_phase"), ("pytest", "-m pytest"), ("python", "")):
        script = commands / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    work = folder / "work"
    work.mkdir()
    ours = {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "VLLM_LOGGING_LEVEL": "ERROR"}
    return Session(work, ours)


def _chosen(document: str, wanted: str | None) -> list[Block]:
    """Files, and the console blocks with that mark, or with none that says where they run."""
    places = {"recorded", "installs", "named"}
    return [
        block
        for block in blocks(document)
        if "file" in block.marks
        or (block.language == "console" and (block.marks.keys() & places == ({wanted} if wanted else set())))
    ]


def _documents(mark: str | None) -> list[str]:
    return [name for name in DOCUMENTS if any(block.language == "console" for block in _chosen(name, mark))]


def _follow(document: str, mark: str | None, session: Session) -> None:
    for block in _chosen(document, mark):
        if "file" in block.marks:
            session.put(block)
        else:
            session.follow(block)


@pytest.mark.parametrize("document", _documents(None))
def test_commands(document: str, tmp_path: Path) -> None:
    """What needs no vLLM."""
    _follow(document, None, _session(tmp_path))


@pytest.mark.installs
@pytest.mark.parametrize("document", _documents("installs"))
def test_commands_that_install(document: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """In a copy of the checkout, with an empty environment first on PATH."""
    session = _session(tmp_path)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    (tmp_path / "venv" / "bin" / "omni-npu-phase").unlink(missing_ok=True)
    session.variables["PATH"] = f"{tmp_path / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    session.variables["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "*-report")
    shutil.copytree(pytestconfig.getoption("--installs"), session.folder, ignore=ignored, dirs_exist_ok=True)
    _follow(document, "installs", session)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_is_python(document: str) -> None:
    for block in blocks(document):
        if block.language == "python":
            code = compile(block.text, block.place, "exec")
            if "runs" in block.marks and importlib.util.find_spec("vllm_omni"):
                exec(code, {})


def test_the_grid_is_that_of_its_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    grid = importlib.import_module("grid")
    docs = ROOT / "docs"
    found = json.loads((docs / "grid.json").read_text(encoding="utf-8"))
    assert grid.page(found) == (docs / "grid.md").read_text(encoding="utf-8"), "ci/matrix --docs writes both"


# What takes minutes is run by hand, and what it printed is kept


def _records() -> dict[str, Path]:
    return {path.stem: path for path in sorted(RECORDED.glob("*.txt"))}


def _printed(name: str) -> tuple[str, str]:
    command, _, printed = (RECORDED / f"{name}.txt").read_text(encoding="utf-8").partition("\n")
    return command.removeprefix("$ "), printed


RECORDS = _records()
QUOTED = [(document, block) for document in DOCUMENTS for block in blocks(document) if "recorded" in block.marks]


@pytest.mark.parametrize(("document", "block"), QUOTED, ids=[block.place for _, block in QUOTED])
def test_quoted_output_was_printed(document: str, block: Block) -> None:
    command, printed = _printed(block.marks["recorded"])
    if block.language == "console":
        ((asked, quoted),) = block.quotes
        assert asked == command, f"{block.place}: docs/recorded/{block.marks['recorded']}.txt is of another command"
    else:
        quoted = block.text.strip("\n")
    assert matches(f"[...]{quoted}[...]", _tidy(printed)), f"{block.place}: not in what {command} printed"


@pytest.mark.parametrize("name", RECORDS)
def test_a_recorded_run_is_quoted(name: str) -> None:
    assert any(block.marks["recorded"] == name for _, block in QUOTED)


@pytest.mark.real
@pytest.mark.parametrize("name", RECORDS)
def test_what_is_recorded_is_printed(name: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    command, _ = _printed(name)
    session = _session(tmp_path)
    if "tests/" in command:
        session.folder = ROOT
    _, printed = session.run(command)
    # A run is not about the machine it ran on.
    printed = printed.replace(sysconfig.get_path("purelib"), "SITE-PACKAGES").replace(str(ROOT), "CHECKOUT")
    if pytestconfig.getoption("--record"):
        RECORDS[name].write_text(f"$ {command}\n{printed}\n", encoding="utf-8")
        return
    for _, block in QUOTED:
        if block.marks["recorded"] == name:
            quoted = block.quotes[0][1] if block.language == "console" else block.text.strip("\n")
            assert matches(f"[...]{quoted}[...]", printed), f"{block.place}: $ {command}\nprints:\n{printed}"


# And these tests see it


@pytest.mark.parametrize(
    ("quoted", "printed", "equal"),
    [
        ("a\nb", "a\nb", True),
        ("a", "a\nb", False),
        ("a[...]", "a\nb", True),
        ("2 fail", "3 fail", False),
        ("[...]2 fail[...]", "24 pass, 2 fail\n", True),
    ],
)
def test_a_change_is_seen(quoted: str, printed: str, equal: bool) -> None:
    assert matches(quoted, printed) is equal


@pytest.mark.parametrize(
    "command",
    [
        "omni-npu-phase doctr",
        "omni-npu-phase doctor --modle DIR",
        "omni-npu-phase trace shwo sample",
        "ci/verfy",
        "ci/matrix --dcos",
        "OMNI_NPU_PHASE_TRACES=x vllm-omni serve DIR",
        "pytest --pyargs omni_npu_phase.conformance --phase-runer a:b",
    ],
)
def test_a_wrong_name_is_seen(command: str) -> None:
    assert _wrong(command) is not None
