# SPDX-License-Identifier: Apache-2.0
"""The contract as code: phases and eligibility, the registry of clauses, its documentation, and its error."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_npu_phase import contract
from omni_npu_phase.contract import CLAUSES, FIELDS, REPLAY_CLAUSES, ContractError, Row

DOCS = Path(__file__).resolve().parents[2] / "docs" / "contract.md"

# P, C, S, phase, MTP eligible.
TABLE = [
    (5, 0, 4, "prefill", False),
    (5, 4, 1, "prefill tail", False),
    (5, 5, 1, "decode", True),
    (5, 6, 1, "decode", True),
    (1, 0, 1, "prefill", False),
    (5, 5, 2, "decode", False),
]
EXTENDED = {"T8", "T9", "T10", "T11", "R10"} | {f"E{number}" for number in range(1, 10)} | {"E5b"}

lengths = st.integers(min_value=0, max_value=6)


# Phases.


@pytest.mark.parametrize(("prompt", "computed", "span", "phase", "eligible"), TABLE)
def test_table(prompt: int, computed: int, span: int, phase: str, eligible: bool) -> None:
    row = Row(prompt, computed, span)
    assert (row.phase, row.eligible, row.tail) == (phase, eligible, phase == "prefill tail")
    assert (row.prefill, row.decode) == (phase.startswith("prefill"), phase == "decode")
    assert list(row.fields.items()) == list(zip(FIELDS, (prompt, computed, row.prefill), strict=True))
    assert str(row) == f"P={prompt} C={computed} S={span}"


@given(lengths, lengths, lengths)
def test_what_follows_from_the_lengths_agrees(prompt: int, computed: int, span: int) -> None:
    row = Row(prompt, computed, span)
    assert row.prefill is not row.decode
    assert not (row.prefill and row.eligible)
    assert not row.tail or row.prefill
    assert not row.crosses or (row.prefill and span > 1)
    assert {name: type(value) for name, value in row.fields.items()} == contract.FIELD_TYPES


@pytest.mark.parametrize(
    ("prompt", "computed", "span", "crosses"),
    [(5, 3, 3, True), (5, 3, 2, False), (5, 5, 2, False), (5, 4, 2, True), (5, 0, 4, False), (0, 0, 3, False)],
)
def test_spans_that_cross_the_prompt_boundary(prompt: int, computed: int, span: int, crosses: bool) -> None:
    assert Row(prompt, computed, span).crosses is crosses


@pytest.mark.parametrize(
    ("prompt", "computed", "span", "known", "replays"),
    [
        (5, 5, 1, 8, True),
        (5, 7, 1, 8, False),
        (5, 6, 2, 8, False),
        (5, 6, 2, 9, True),
        (5, 4, 1, 8, False),
    ],
)
def test_replayed_rows(prompt: int, computed: int, span: int, known: int, replays: bool) -> None:
    assert Row(prompt, computed, span).replays(known) is replays


@pytest.mark.parametrize(
    ("computed", "span", "tail"), [(4, 1, True), (0, 1, False), (3, 1, False), (3, 2, False), (5, 1, False)]
)
def test_tails_of_a_prompt_of_five(computed: int, span: int, tail: bool) -> None:
    assert Row(5, computed, span).tail is tail


# The registry.


def test_clauses_are_in_contract_order() -> None:
    groups = {"M": 10, "R": 10, "T": 11, "E": 9}
    ids = [f"{group}{number}" for group, count in groups.items() for number in range(1, count + 1)]
    ids.insert(ids.index("E5") + 1, "E5b")
    assert list(CLAUSES) == ids
    assert all(clause.id == clause_id for clause_id, clause in CLAUSES.items())


def test_tiers() -> None:
    assert {clause.id for clause in CLAUSES.values() if clause.tier == "extended"} == EXTENDED
    assert {clause.tier for clause in CLAUSES.values()} == {"required", "extended"}


def test_each_clause_is_one_sentence() -> None:
    for clause in (*CLAUSES.values(), *REPLAY_CLAUSES.values()):
        assert re.fullmatch(r"\S.*[^.]\.", clause.sentence), clause
        assert ". " not in clause.sentence, clause
        assert "\n" not in clause.sentence, clause


def test_fields() -> None:
    assert contract.FIELDS == ("_omni_prompt_len", "_omni_num_computed_tokens", "_omni_is_prefill")
    assert {name: contract.FIELD_TYPES[name] for name in contract.FIELDS} == dict(
        zip(contract.FIELDS, (int, int, bool), strict=True)
    )


# The documentation says what the registry says.


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_documented_table_is_the_table() -> None:
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    start = lines.index("| P | C | S | phase | MTP eligible |")
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        prompt, computed, span, phase, eligible = _cells(line)
        assert eligible.split()[0] in ("yes", "no")
        rows.append((int(prompt), int(computed), int(span), phase, eligible == "yes"))
    assert rows == TABLE


def test_documented_clauses_are_the_registry() -> None:
    rows = re.findall(r"^\| ([MRTEX]\d+b?) \|(.*)\|$", DOCS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    documented = [(clause_id, *_cells(rest)) for clause_id, rest in rows]
    known = [*CLAUSES.values(), *REPLAY_CLAUSES.values()]
    assert documented == [(clause.id, clause.tier, clause.sentence) for clause in known]


def test_documentation_names_no_unknown_clause() -> None:
    named = set(re.findall(r"\b[MRTEX]\d+b?\b", DOCS.read_text(encoding="utf-8")))
    assert named == {*CLAUSES, *REPLAY_CLAUSES}


# The error.


def _error(**changes: object) -> ContractError:
    parts = {"hook": "preprocess", "requests": ["a"], "rows": [3], "expected": "4 rows", "actual": "9"}
    return ContractError("E5", **{**parts, **changes})  # type: ignore[arg-type]


def test_error_names_clause_hook_requests_rows_expected_and_actual() -> None:
    sentence = CLAUSES["E5"].sentence
    assert str(_error()) == f"[E5] hook preprocess, request 'a', row 3: expected 4 rows, got 9. ({sentence})"
    many = str(_error(hook=None, requests=["a", "b"], rows=[0, 2]))
    assert many == f"[E5] requests 'a', 'b', rows 0, 2: expected 4 rows, got 9. ({sentence})"


def test_error_survives_pickling() -> None:
    error = _error(requests=("a", "b"), rows=range(2))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is ContractError
    assert str(copy) == str(error)
    assert (copy.clause, copy.hook, copy.requests, copy.rows, copy.expected, copy.actual) == (
        "E5",
        "preprocess",
        ("a", "b"),
        (0, 1),
        "4 rows",
        "9",
    )


def test_error_is_what_released_runners_raise() -> None:
    """Of incomplete batched results they raise a ValueError, of others a RuntimeError."""
    assert isinstance(_error(), RuntimeError)
    assert isinstance(_error(), ValueError)


def test_error_of_an_unknown_clause_cannot_be_made() -> None:
    with pytest.raises(KeyError, match="X1"):
        ContractError("X1", requests=[], rows=[], expected="", actual="")
