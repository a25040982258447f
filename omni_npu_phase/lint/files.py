# SPDX-License-Identifier: Apache-2.0
"""Which files are read, and what is found in all of them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from omni_npu_phase.lint import source
from omni_npu_phase.lint.findings import Judged, judge
from omni_npu_phase.lint.ignores import apply, ignores_in
from omni_npu_phase.lint.report import Report
from omni_npu_phase.lint.rules import Finding
from omni_npu_phase.lint.source import Model, UnreadableError

_HOOK = r"preprocess(_decode_batch)?(_mrv2)?"
_BASES = re.compile(r"class\s+\w+\s*\(([^)]*)\)")
_MENTIONS = re.compile(rf"def preprocess|set_custom_preprocess|\b{_HOOK} *=[^=]|[\"']{_HOOK}[\"']|omni-phase:")


def lint(paths: Sequence[Path], say: Callable[[str], None] = lambda text: None) -> Report:
    """Judge every class with a hook in files and folders.

    What cannot be read is listed in the report. Raises :class:`UnreadableError` for a path that is no Python file and
    no folder with one: there is nothing to report then.
    """
    report = Report()
    asked: dict[Path, bool] = {}
    for path in paths:
        asked |= dict.fromkeys(_files_of(path, report.unread), False) if path.is_dir() else {_file(path): True}
    texts = {path: text for path in asked if (text := _text(path, report.unread)) is not None}
    report.files = len(asked)
    # A large tree has few models: files that mention no hook are parsed only where they were asked for by name.
    chosen = [path for path, text in texts.items() if asked[path] or _MENTIONS.search(text)]
    bases = {path: set(re.findall(r"\w+", " ".join(_BASES.findall(text)))) for path, text in texts.items()}
    judged: dict[Path, list[Judged]] = {}
    while chosen:
        for path in chosen:
            say(f"following hooks: {_shown(path)}")
            judged[path] = _models_in(path, report.unread)
        names = {each.model.name for models in judged.values() for each in models}
        chosen = [path for path in texts.keys() - judged.keys() if not names.isdisjoint(bases[path])]
    report.models = [each for path in sorted(judged) for each in judged[path]]
    found = {(each.path, each.line, each.column, each.rule): each for model in report.models for each in model.findings}
    for name in sorted({each.path for each in found.values()} | {str(path) for path in texts}):
        here = [each for each in found.values() if each.path == name]
        text = texts.get(Path(name)) or source.text_of(Path(name))
        if not here and "omni-phase:" not in text:
            continue
        readable = Path(name) not in texts or Path(name) in judged
        kept, ignored, about = apply(name, ignores_in(text) if readable else [], here)
        report.findings += [_relative(each) for each in sorted([*kept, *about])]
        report.ignored += [(_relative(each), reason) for each, reason in ignored]
    return report


def _text(path: Path, unread: list[str]) -> str | None:
    try:
        return source.text_of(path)
    except UnreadableError as error:
        unread.append(str(error))
        return None


def _models_in(path: Path, unread: list[str]) -> list[Judged]:
    try:
        file = source.read(path)
        found = [judge(Model.of(file, name)) for name in file.classes]
    except UnreadableError as error:
        unread.append(str(error))
        return []
    return [judged for judged in found if judged is not None]


def _file(path: Path) -> Path:
    if not path.exists():
        raise UnreadableError(f"{path}: there is no such file or folder")
    if path.suffix != ".py" or not path.is_file():
        raise UnreadableError(f"{path}: this is no Python file (*.py) and no folder")
    return path.resolve()


def _files_of(folder: Path, unread: list[str]) -> list[Path]:
    found: list[Path] = []

    def failed(error: OSError) -> None:
        unread.append(f"{error.filename}: {error.strerror}")

    for where, folders, names in os.walk(folder.resolve(), onerror=failed):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        here = (Path(where, name) for name in sorted(names) if name.endswith(".py"))
        # A broken link is named as unread; a pipe would wait for its writer.
        found += [path for path in here if path.is_file() or path.is_symlink()]
    if not found and not unread:
        raise UnreadableError(f"{folder}: there is no Python file (*.py) in it")
    return found


def _shown(path: Path) -> str:
    """As seen from the current folder, where it lies in it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _relative(finding: Finding) -> Finding:
    return replace(finding, path=_shown(Path(finding.path)))
