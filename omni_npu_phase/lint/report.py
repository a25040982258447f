# SPDX-License-Identifier: Apache-2.0
"""What lint says: for a reader, for a program, and as annotations of a pull request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from omni_npu_phase.lint.findings import Judged
from omni_npu_phase.lint.rules import SEVERITIES, Finding, Severity

SCHEMA = 1
_GITHUB: dict[Severity, str] = {"error": "error", "fallback": "warning", "unknown": "notice", "note": "notice"}


@dataclass(slots=True)
class Report:
    """Findings by file and line; ``ignored`` with the reasons given; ``unread``: what could not be read, and why."""

    findings: list[Finding] = field(default_factory=list)
    ignored: list[tuple[Finding, str]] = field(default_factory=list)
    models: list[Judged] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    files: int = 0

    def reaches(self, severity: Severity) -> bool:
        """Whether anything is as grave as that, or graver."""
        grave = SEVERITIES[: SEVERITIES.index(severity) + 1]
        return any(found.severity in grave for found in self.findings)

    def summary(self) -> str:
        counts = {severity: sum(each.severity == severity for each in self.findings) for severity in SEVERITIES}
        found = ", ".join(
            f"{count} {name}{'s' if count != 1 and name != 'unknown' else ''}" for name, count in counts.items()
        )
        ignored = f", {len(self.ignored)} ignored" if self.ignored else ""
        models = f"{len(self.models)} model{'s' if len(self.models) != 1 else ''} with hooks"
        return f"{found}{ignored}: {models} in {self.files} file{'s' if self.files != 1 else ''}"

    def to_text(self) -> str:
        lines: list[str] = []
        for found in self.findings:
            clause = f" [{found.clause}]" if found.clause else ""
            lines.append(
                f"{found.path}:{found.line}:{found.column}: {found.severity} {found.rule}{clause} {found.message}"
            )
            lines.append(f"    instead: {found.fix}")
        return "\n".join([*lines, self.summary()]) + "\n"

    def to_json(self) -> str:
        document = {
            "schema": SCHEMA,
            "findings": [as_dict(found) for found in self.findings],
            "ignored": [{**as_dict(found), "reason": reason} for found, reason in self.ignored],
            "models": [
                {"class": each.model.name, "hooks": each.hooks, "verdict": each.verdict, "reads": sorted(each.reads)}
                for each in self.models
            ],
            "files": self.files,
            "unread": self.unread,
        }
        return json.dumps(document, indent=2) + "\n"

    def to_github(self) -> str:
        return "".join(f"{line}\n" for line in self._annotations())

    def _annotations(self) -> Iterator[str]:
        for found in self.findings:
            title = f"{found.rule} ({found.clause})" if found.clause else found.rule
            where = {"file": found.path, "line": found.line, "col": found.column, "title": title}
            properties = ",".join(f"{name}={_property(str(value))}" for name, value in where.items())
            yield f"::{_GITHUB[found.severity]} {properties}::{_data(f'{found.message}. Instead: {found.fix}')}"


def as_dict(found: Finding) -> dict[str, Any]:
    """A finding for a program; ``line`` and ``column`` count from 1, ``clause`` is None for ignore comments."""
    return {**asdict(found), "clause": found.clause, "fix": found.fix}


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
