# SPDX-License-Identifier: Apache-2.0
"""The phase contract as code: the three fields, the phase of a row, and every clause by its id.

``P`` is the prompt length of a row, ``C`` its progress before the step, ``S`` its scheduled span. All three count
tokens. Needs the standard library alone, so that a model, a test or a log reader can import it anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

PROMPT_LEN = "_omni_prompt_len"
NUM_COMPUTED = "_omni_num_computed_tokens"
IS_PREFILL = "_omni_is_prefill"
FIELDS = (PROMPT_LEN, NUM_COMPUTED, IS_PREFILL)
"""Names of the runner-owned fields, each with its exact type in :data:`FIELD_TYPES` (M1, M2)."""

FIELD_TYPES: Mapping[str, type] = {PROMPT_LEN: int, NUM_COMPUTED: int, IS_PREFILL: bool}

MTP_INPUTS = "mtp_inputs"
"""Key under which a scalar hook hands an eligible row's (hidden states, text step) to the runner (T1, E6, E7)."""

Tier = Literal["required", "extended"]
Phase = Literal["prefill", "prefill tail", "decode"]
"""The phase of a row as the contract's table words it."""


@dataclass(frozen=True, slots=True)
class Row:
    """A scheduled row by its lengths, and what follows from them."""

    prompt_len: int
    num_computed: int
    """Progress before the step."""
    span: int
    """Tokens scheduled in the step."""

    @property
    def prefill(self) -> bool:
        """Prefill exactly while ``C < P`` (M5)."""
        return self.num_computed < self.prompt_len

    @property
    def decode(self) -> bool:
        return not self.prefill

    @property
    def eligible(self) -> bool:
        """Whether it may enter the MTP batch and the batched decode hook (R2, T1, T6)."""
        return self.decode and self.span == 1

    @property
    def tail(self) -> bool:
        """Whether it is the last token of a prompt that was begun in an earlier step (T2)."""
        return self.span == 1 and 0 < self.num_computed == self.prompt_len - 1

    @property
    def crosses(self) -> bool:
        """Whether its span begins inside the prompt and ends behind it (E2)."""
        return self.num_computed < self.prompt_len < self.end

    @property
    def end(self) -> int:
        """Progress after the step."""
        return self.num_computed + self.span

    @property
    def phase(self) -> Phase:
        return "decode" if self.decode else "prefill tail" if self.tail else "prefill"

    @property
    def fields(self) -> dict[str, int | bool]:
        """The runner-owned fields of the row (M3, M4, M5)."""
        return {PROMPT_LEN: self.prompt_len, NUM_COMPUTED: self.num_computed, IS_PREFILL: self.prefill}

    def replays(self, known: int) -> bool:
        """Whether it is a decode row that recomputes tokens of a request that has ``known`` tokens already (E3)."""
        return self.decode and self.end < known

    def __str__(self) -> str:
        return f"P={self.prompt_len} C={self.num_computed} S={self.span}"


@dataclass(frozen=True, slots=True)
class Clause:
    """One clause: its stable id, its sentence, and the tier by which a runner is judged."""

    id: str
    sentence: str
    tier: Tier


_CLAUSES = """\
M1   Every per-row hook call, and every entry of a batched hook's req_infos, carries the three fields.
M2   The fields are exactly a Python int, a Python int and a Python bool.
M3   The prompt length is that of the current request state's prompt_token_ids.
M4   The progress is the row's entry of input_batch.num_computed_tokens_cpu before the span.
M5   A row is prefill exactly while its progress is below its prompt length.
M6   The fields are written every step, right before the row's hook is chosen, over whatever the state holds.
M7   Rows follow the current input batch, not arrival and not the scheduler's dictionary.
M8   The phase is not latched: a row is classified from its current lengths, in both directions.
M9   The fields are runner-owned: live in the request's buffer through forward and postprocess, copies dropped.
M10  preprocess_batch runs once per step, before the fields are written and before any per-row hook.
R1   Without has_preprocess no hook is called and the runner's own path is untouched.
R2   The batched decode hook takes callable, one-token decode rows only; every other row goes to preprocess.
R3   Entry i of a batched call, and of everything it returns, is one and the same physical row.
R4   Without talker_mtp the batched hook returns three values, for contiguous runs flushed before other spans.
R5   With talker_mtp the batched hook returns five values.
R6   Embeddings land in the runner's existing input buffer at each row's offset; its address stays.
R7   Token ids are copied back unless the hook returned the very object it was given.
R8   Each update dictionary is applied to its own request, once.
R9   preprocess gets exactly its own slices, and its result lands there and nowhere else.
R10+ With input_ids None the hooks still get the scheduled token ids.
T1   Only one-token decode rows enter the MTP batch, in row order.
T2   A prefill row never enters MTP: no codes, no consumed mtp_inputs, its embedding stays.
T3   A one-token prompt is a prefill row.
T4   Decode rows beside a prefill row still get their MTP embedding, each at its own offset.
T5   Codes are stored with exactly the request that produced them.
T6   A decode span longer than one token is not eligible for MTP.
T7   A step without eligible rows does not call MTP.
T8+  A request with its own seed gets the same codes whoever shares its batch.
T9+  Every tensor handed over is owned once its call is done with, at any depth: no later write reaches it.
T10+ Padding rows of a captured graph never reach a request.
T11+ An MTP that returns no codes leaves the stored codes alone.
E1+  Without prompt_token_ids the prompt length is the number of prompt embedding rows.
E2+  A span that crosses the prompt boundary is one prefill row and never enters MTP.
E3+  A one-token replay chunk past the prompt is decode, and its draw leaves the request's generator in place.
E4+  Negative lengths, spans that leave the buffer or overlap, and missing request states fail before any hook.
E5+  A scalar hook's odd result is written as released and warned of once; what cannot be written is an error.
E5b+ A batched hook's result that the released runner cannot write is an error, and nothing of it is written.
E6+  mtp_inputs of a row that is not eligible are dropped.
E7+  An eligible row without mtp_inputs keeps its embedding and gets no codes; warned once.
E8+  A hook result that aliases the runner's own buffer is copied correctly.
E9+  A live buffer, or one of its groups, that is no dictionary is an error that touches no other request.
"""


def _clause(line: str) -> Clause:
    name, sentence = line.split(maxsplit=1)
    return Clause(name.rstrip("+"), sentence, "extended" if name.endswith("+") else "required")


CLAUSES: Mapping[str, Clause] = {clause.id: clause for clause in map(_clause, _CLAUSES.splitlines())}
"""Every clause by id, in the contract's order: the one source of reports, docs checks and error messages."""

_REPLAY_CLAUSES = """\
X1+  A row whose positions were all handed over before gets the same again; no hook, MTP, draw or store is made for it.
X2+  A row that goes beyond what is kept is routed as the row of its new part.
X3+  Kept rows belong to one request and its prompt: another prompt, another request or a gap in them ends them.
X4+  Without the switch, and for a request that goes without, every other clause holds unchanged.
"""

REPLAY_CLAUSES: Mapping[str, Clause] = {clause.id: clause for clause in map(_clause, _REPLAY_CLAUSES.splitlines())}
"""The clauses of exact replay, by which a runner is judged only where that is switched on."""


class ContractError(RuntimeError, ValueError):
    """A step that breaks the contract, or would: what was expected of whom, and what was there instead.

    Attributes: ``clause`` (id), ``hook`` (its name, or None), ``requests`` (ids), ``rows`` (row numbers in the input
    batch), ``expected`` and ``actual`` (text). Also a ValueError, as released runners raise for a batch's results.
    """

    def __init__(
        self,
        clause: str,
        *,
        requests: Sequence[str],
        rows: Sequence[int],
        expected: str,
        actual: str,
        hook: str | None = None,
    ) -> None:
        self.clause = CLAUSES[clause].id
        self.hook = hook
        self.requests = tuple(requests)
        self.rows = tuple(rows)
        self.expected = expected
        self.actual = actual
        super().__init__(str(self))

    def __str__(self) -> str:
        who = f"hook {self.hook}, " if self.hook else ""
        many = "s" if len(self.requests) != 1 else ""
        requests = ", ".join(repr(request) for request in self.requests)
        rows = f", row{many} {', '.join(map(str, self.rows))}" if self.rows else ""
        return (
            f"[{self.clause}] {who}request{many} {requests}{rows}: "
            f"expected {self.expected}, got {self.actual}. ({CLAUSES[self.clause].sentence})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Engine cores send exceptions between processes; the default would lose the keyword arguments.
        named = ("hook", "requests", "rows", "expected", "actual")
        return partial(ContractError, **{name: getattr(self, name) for name in named}), (self.clause,)
