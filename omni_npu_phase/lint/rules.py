# SPDX-License-Identifier: Apache-2.0
"""What lint finds: each rule with its clause, what is wrong, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "fallback", "unknown", "note"]

SEVERITIES: Sequence[Severity] = ("error", "fallback", "unknown", "note")
"""Gravest first: a fault on every runner; right while the runner keeps the contract; not seen to be right;
worth knowing."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that lint finds. ``clause`` is None where the finding is about an ignore comment."""

    id: str
    clause: str | None
    severities: Sequence[Severity]
    finds: str
    fix: str


_ALL = (
    Rule(
        "span-phase",
        "M5",
        ("error", "fallback"),
        "the number of scheduled tokens decides between prefill and decode; fallback where it does so only without "
        "the fields",
        'is_prefill = info["_omni_is_prefill"]',
    ),
    Rule(
        "span-beside-phase",
        "M5",
        ("fallback",),
        "the number of scheduled tokens overrules the phase of a longer decode span",
        'let info["_omni_is_prefill"] decide alone',
    ),
    Rule(
        "progress-phase",
        "M5",
        ("error",),
        "the progress decides between prefill and decode, but not as the phase: a prompt's first chunk goes one way, "
        "and its last the other, as decode does",
        'is_prefill = info["_omni_is_prefill"]',
    ),
    Rule(
        "own-counter",
        "M4",
        ("error", "fallback"),
        "the prompt is sliced by a counter of the model's own, which stands wrong after a preemption and with cached "
        "progress; fallback where the hook reads the fields beside it",
        'start = info["_omni_num_computed_tokens"]; prompt[start : start + span]',
    ),
    Rule(
        "runner-field",
        "M9",
        ("error",),
        "a runner-owned field is stored, overridden or removed",
        "read the three fields and never write them; keep state of the model's own under names of its own",
    ),
    Rule(
        "whole-prompt",
        "R9",
        ("error", "note"),
        "the whole prompt is returned for a chunk of it; note where another length is refused with an error",
        'start = info["_omni_num_computed_tokens"]; return rows start to start + span',
    ),
    Rule(
        "crossing-span",
        "E5",
        ("fallback",),
        "a span that begins in the prompt and goes beyond it, as after a preemption, gets the prompt's rows only",
        "return a row for each of input_ids: what comes after the prompt's end has tokens too",
    ),
    Rule(
        "cannot-tell",
        "M5",
        ("unknown",),
        "what the hook returns does not visibly follow from the runner's fields: state of the model's own, or the "
        "tokens, choose it",
        'choose by info["_omni_is_prefill"], and slice from info["_omni_num_computed_tokens"]',
    ),
    Rule(
        "mtp-in-prefill",
        "E6",
        ("fallback",),
        "mtp_inputs are handed out for a prefill row: a conforming runner drops them, another one consumes them",
        "return mtp_inputs only where _omni_is_prefill is False and the span is one token",
    ),
    Rule(
        "returned-keywords",
        "M9",
        ("note",),
        "the hook returns all its keywords as updates, the runner's fields among them; the runner drops those",
        "return only what the hook has changed",
    ),
    Rule(
        "field-default",
        "M1",
        ("note",),
        "a default stands in for a field, so that a runner without it goes unnoticed",
        'info["_omni_is_prefill"] fails loudly where the field is missing',
    ),
    Rule(
        "ignore-reason",
        None,
        ("error",),
        "an ignore comment without rules or without a reason; it ignores nothing",
        "# omni-phase: ignore[rule] why this is right here",
    ),
    Rule(
        "unused-ignore",
        None,
        ("note",),
        "an ignore comment with nothing to ignore",
        "remove the comment",
    ),
)
RULES: Mapping[str, Rule] = {rule.id: rule for rule in _ALL}


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One finding. ``line`` and ``column`` count from 1; ``model`` is the class whose hook was followed there."""

    path: str
    line: int
    column: int
    rule: str
    severity: Severity
    message: str
    model: str

    @property
    def clause(self) -> str | None:
        return RULES[self.rule].clause

    @property
    def fix(self) -> str:
        return RULES[self.rule].fix
