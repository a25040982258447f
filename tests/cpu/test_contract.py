# SPDX-License-Identifier: Apache-2.0
"""The contract as code, held against its table and against docs/contract.md."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_npu_phase import contract
from omni_npu_phase.contract import CLAUSES, ContractError

DOCS = Path(__file__).parents[2] / "docs" / "contract.md"
TABLE = (
    (5, 0, 4, "prefill", False),
    (5, 4, 1, "prefill tail", False),
    (5, 5, 1, "decode", True),
    (5, 6, 1, "decode", True),
    (1, 0, 1, "prefill", False),
    (5, 5, 2, "decode", False),
)
EXTENDED = {"R10", "T8", "T9", "T10", "T11"}
lengths = st.integers(0, 12)


def _documented_rows(header: str) -> list[list[str]]:
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    start = lines.index(header) + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.parametrize(("prompt", "computed", "span", "phase", "eligible"), TABLE)
def test_table(prompt: int, computed: int, span: int, phase: str, eligible: bool) -> None:
    assert contract.phase_name(prompt, computed, span) == phase
    assert contract.is_prefill(prompt, computed) is phase.startswith("prefill")
    assert contract.is_mtp_eligible(prompt, computed, span) is eligible


def test_table_is_the_documented_one() -> None:
    rows = _documented_rows("| P | C | S | phase | MTP eligible |")
    found = [(int(p), int(c), int(s), phase, mtp.startswith("yes")) for p, c, s, phase, mtp in rows]
    assert found == list(TABLE)


@given(st.lists(st.tuples(lengths, lengths, lengths), min_size=1, max_size=8))
def test_a_step_is_its_rows(rows: list[tuple[int, int, int]]) -> None:
    prompt, computed, span = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    assert contract.is_prefill(prompt, computed).tolist() == [contract.is_prefill(p, c) for p, c, _ in rows]
    assert contract.is_mtp_eligible(prompt, computed, span).tolist() == [contract.is_mtp_eligible(*row) for row in rows]


@given(lengths, lengths, lengths)
def test_marks(prompt: int, computed: int, span: int) -> None:
    if contract.is_tail(prompt, computed, span):
        assert contract.phase_name(prompt, computed, span) == "prefill tail"
        assert not contract.is_mtp_eligible(prompt, computed, span)
    if contract.crosses(prompt, computed, span):
        assert span > 1
        assert contract.is_prefill(prompt, computed)
    if contract.is_replay(prompt, computed, span, known=computed + span + 1):
        assert not contract.is_prefill(prompt, computed)
    assert not contract.is_replay(prompt, computed, span, known=computed + span)


def test_registry() -> None:
    assert list(CLAUSES)[:3] == ["M1", "M2", "M3"]
    assert [clause_id for clause_id in CLAUSES if clause_id[0] == "E"] == [
        "E1", "E2", "E3", "E4", "E5", "E5b", "E6", "E7", "E8",
    ]  # fmt: skip
    assert [clause_id for clause_id in CLAUSES if clause_id[0] == "R"][-1] == "R10"
    assert len(CLAUSES) == 10 + 10 + 11 + 9
    for clause_id, clause in CLAUSES.items():
        assert clause.id == clause_id
        assert clause.tier == ("extended" if clause_id in EXTENDED or clause_id[0] == "E" else "required")
        assert clause.sentence.endswith(".")


def test_docs_and_registry_say_the_same() -> None:
    documented: dict[str, tuple[str, str]] = {}
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[1] in ("required", "extended"):
            documented[cells[0]] = (cells[1], cells[2])
    assert documented == {clause.id: (clause.tier, clause.sentence) for clause in CLAUSES.values()}


def test_docs_name_no_unknown_clause() -> None:
    named = set(re.findall(r"\b[MRTE]\d+b?\b", DOCS.read_text(encoding="utf-8")))
    assert named <= set(CLAUSES)


def test_documented_hooks_run() -> None:
    """The example in the docs slices a prompt by the progress it is told."""
    import torch

    code = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.S)
    namespace: dict[str, Any] = {}
    exec(code[0], namespace)
    talker = namespace["Talker"]()
    prompt = torch.arange(20.0).reshape(5, 4)
    info = {contract.IS_PREFILL: True, contract.NUM_COMPUTED: 4, "prompt": {"embeds": prompt}}
    _, embeds, updates = talker.preprocess(torch.tensor([9]), torch.zeros(1, 4), **info)
    assert torch.equal(embeds, prompt[4:5])
    assert updates == {}
    talker.embed = lambda ids: torch.ones(ids.shape[0], 4)
    state = {"state": {"hidden": torch.zeros(4), "text": torch.ones(4)}, contract.IS_PREFILL: False}
    assert set(talker.preprocess(torch.tensor([9]), torch.zeros(1, 4), **state)[2]) == {contract.MTP_INPUTS}
    ids = torch.tensor([1, 2])
    values = talker.preprocess_decode_batch(ids, [state, state])
    assert values[0] is ids
    assert [tuple(part.shape) for part in values[1:4]] == [(2, 4)] * 3


def test_error_says_who_and_what() -> None:
    error = ContractError("E5b", hook="hook", requests=["a", "b"], rows=[1, 2], expected="2 rows", actual="1")
    text = str(error)
    for part in ("[E5b]", "hook hook", "requests 'a', 'b'", "rows 1, 2", "expected 2 rows, got 1"):
        assert part in text
    assert CLAUSES["E5b"].sentence in text
    alone = str(ContractError("E4", requests=["a"], rows=[0], expected="x", actual="y"))
    assert alone.startswith("[E4] request 'a', row 0: ")


def test_error_crosses_processes() -> None:
    error = ContractError("E4", requests=["a"], rows=[3], expected="x", actual="y")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.clause, copy.hook, copy.requests, copy.rows, str(copy)) == ("E4", None, ("a",), (3,), str(error))
