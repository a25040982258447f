# SPDX-License-Identifier: Apache-2.0
"""``# omni-phase: ignore[rule] reason``: on a finding's line, or on a line of its own before it."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from omni_npu_phase.lint.rules import RULES, Finding

_COMMENT = re.compile(r"#\s*omni-phase:\s*(?P<word>\w+)\s*(?:\[(?P<rules>[^\]]*)\])?\s*(?P<reason>.*)")


@dataclass(slots=True)
class Ignore:
    """One comment: where it stands, which line and which rules it speaks of, and why."""

    line: int
    column: int
    of_line: int
    rules: tuple[str, ...]
    reason: str
    used: set[str] = field(default_factory=set)

    @property
    def acts(self) -> bool:
        return bool(self.rules and self.reason)


def ignores_in(text: str) -> list[Ignore]:
    """The comments of a Python text; what stands in a string is none."""
    found: list[Ignore] = []
    waiting: list[Ignore] = []
    code = frozenset({tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING})
    last_code = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            match = _COMMENT.match(token.string)
            if match is None:
                continue
            rules = tuple(name.strip() for name in (match["rules"] or "").split(",") if name.strip())
            if match["word"] != "ignore":
                rules = ()
            line, column = token.start
            found.append(Ignore(line, column + 1, line, rules, match["reason"].strip()))
            if last_code != line:
                waiting.append(found[-1])
        elif token.type not in code:
            last_code = token.end[0]
            for ignore in waiting:
                ignore.of_line = token.start[0]
            waiting = []
    return found


def apply(
    path: str, ignores: Sequence[Ignore], findings: Iterable[Finding]
) -> tuple[list[Finding], list[tuple[Finding, str]], list[Finding]]:
    """Findings that stay, those that are ignored with the reason, and findings about the comments themselves."""
    kept: list[Finding] = []
    ignored: list[tuple[Finding, str]] = []
    for finding in findings:
        by = [each for each in ignores if each.acts and each.of_line == finding.line and finding.rule in each.rules]
        for each in by:
            each.used.add(finding.rule)
        if by:
            ignored.append((finding, by[0].reason))
        else:
            kept.append(finding)
    about: list[Finding] = []
    for each in ignores:
        if not each.acts:
            what = "names no rule" if not each.rules else "gives no reason"
            text = f"this comment {what}, so it ignores nothing"
            about.append(Finding(path, each.line, each.column, "ignore-reason", "error", text, ""))
            continue
        for name in each.rules:
            if name not in each.used:
                text = f"there is no {name} to ignore here" if name in RULES else f"there is no rule {name}"
                about.append(Finding(path, each.line, each.column, "unused-ignore", "note", text, ""))
    return kept, ignored, about
