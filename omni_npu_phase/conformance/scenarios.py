# SPDX-License-Identifier: Apache-2.0
"""Scenarios: tables of steps, each row with its lengths and what it must show.

A row is written ``row(request, P, C, S, shows)`` in input-batch order. Rows that show :data:`MTP` are decode and go to
MTP in models that have one. A scenario runs once per combination of its hook kinds and MTP settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from omni_npu_phase import contract
from omni_npu_phase.settings import replays_exactly

Shows = contract.Phase | Literal["decode, MTP", "given back"]
PREFILL: Shows = "prefill"
TAIL: Shows = "prefill tail"
DECODE: Shows = "decode"
MTP: Shows = "decode, MTP"
GIVEN: Shows = "given back"
"""What a row shows that has no new part (X1)."""

Hook = Literal["scalar", "batched"]


@dataclass(frozen=True, slots=True)
class Row(contract.Row):
    """A scheduled row with its request, and what it must show."""

    request: str
    shows: Shows
    kept: int = 0
    """Leading tokens that are given back; the row shows what its new part is (X1, X2)."""
    anew: Literal["", "request", "prompt"] = ""
    """Whether its request, or the prompt of it, is another one from this step on (X3)."""

    @property
    def new(self) -> Row | None:
        """The row of its new part; None where there is none."""
        if self.kept == self.span:
            return None
        return replace(self, num_computed=self.num_computed + self.kept, span=self.span - self.kept, kept=0)


def row(
    request: str,
    prompt_len: int,
    num_computed: int,
    span: int,
    shows: Shows | None = None,
    kept: int = 0,
    anew: Literal["", "request", "prompt"] = "",
) -> Row:
    """A row; ``shows``: what it must show, in the tables of scenarios by hand, elsewhere as the contract says."""
    lengths = contract.Row(prompt_len, num_computed, span)
    shown = shows or (MTP if lengths.eligible else lengths.phase)
    return Row(prompt_len, num_computed, span, request, shown, kept, anew)


Step = tuple[Row, ...]


def step(*rows: Row) -> Step:
    return rows


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How the recording model acts. By default it conforms, and also offers what a runner must not take."""

    ids: Literal["same", "new"] = "same"
    """Token ids returned: the object given, or other ids as another integer dtype (R7)."""
    mtp_inputs: Literal["one_token", "every_row", "never"] = "one_token"
    """Which rows get ``mtp_inputs`` from the scalar hook; prefill rows among them must not be taken (T2, E6)."""
    updates: Literal["mark", "moves", "reused", "deep", "live", "given", "whole", "fields", "nothing"] = "mark"
    """Updates returned: a mark, or a new mark that moves on the last one (R8); a mark in a tensor that the model uses
    again, as it is, deep in dictionaries, lists and tuples, or also put into the live buffer and kept on the device; a
    mark in the memory of the token ids that the hook was given (T9); the whole keyword dictionary, or hostile copies of
    the runner-owned fields (M9)."""
    mutates: Literal["nothing", "fields", "nested"] = "nothing"
    """What a hook changes in the dictionaries it is handed: the fields, or a nested value it pops (M9)."""
    embeds: Literal["fresh", "in_place", "shifted", "in_mtp"] = "fresh"
    """Embeddings returned: a new tensor, the given slice filled in place, an overlapping view of it, or a new one, with
    hidden states that lie one row behind their place in the MTP's own input buffer (E8)."""
    fault: str | None = None
    """A malformed hook result, by its name in :data:`omni_npu_phase.conformance.recording_model.FAULTS` (E5, E5b)."""
    good_calls: int = 0
    """Hook calls of a step, from its first on, whose results are as they should be in spite of the fault."""
    preprocess_batch: Literal["absent", "records", "replaces", "claims"] = "absent"
    """The optional batch hook: records its call, replaces buffers, or writes the fields itself (M6, M10)."""
    fills: frozenset[str] = frozenset()
    """Requests whose rows that hook fills itself, where the runner gives it the step's buffers for that (M10)."""
    codes: Literal["rows", "none_later", "resident"] = "rows"
    """Codes from MTP: one row per request, none from its second call on (T11), or kept on the device."""
    validity: bool = False
    """Whether the model asks for a validity mark beside its codes."""
    seeds: Literal["unused", "per_row", "one_stream"] = "unused"
    """Whether MTP draws from request generators, and whether it accepts one per row in a call (T8)."""
    takes_infos: bool = False
    """Whether MTP asks for ``req_ids`` and ``req_infos``."""
    layers: bool = False
    """Whether ``postprocess`` stores its hidden state by layer, one dictionary deeper (T9)."""
    class_name: str = "RecordingModel"
    """Released code recognises one model by its class name."""
    has_preprocess: bool = True
    uncallable_hook: bool = False
    """Whether a model without batched hook has an attribute of its name (R2)."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What surrounds the rows: the runner's switches and the requests' states."""

    padded: int = 0
    """Rows a captured MTP graph is padded to; 0 for an MTP that is not captured (T10)."""
    prompt_embeds: frozenset[str] = frozenset()
    """Requests sent as prompt embeddings, without token ids (E1)."""
    ids_absent: bool = False
    """Whether the released input selection gives ``input_ids`` None (R10)."""
    multimodal: bool = False
    """Whether inputs go through the released multimodal path."""
    stale: bool = False
    """Whether the live buffers hold wrong fields before every step (M6)."""
    nested: bool = False
    """Whether every live buffer starts with a nested value to pop (M9)."""
    no_buffer: frozenset[str] = frozenset()
    """Requests that have no live buffer at first (M9)."""
    seeds: Mapping[str, int] = field(default_factory=dict)
    """MTP seeds by request (T8)."""
    no_dictionary: frozenset[str] = frozenset()
    """Requests whose live buffer is no dictionary (E9)."""
    no_group: frozenset[str] = frozenset()
    """Requests in whose live buffer a group that hooks update is no dictionary (E9)."""
    missing: frozenset[str] = frozenset()
    """Requests whose state is missing (E4)."""
    buffer_short: int = 0
    """Rows by which the step's buffer is shorter than its spans (E4)."""
    claimed_spans: Mapping[str, int] = field(default_factory=dict)
    """Spans by request that the scheduler claims instead of the rows' own (E4)."""
    claimed_offsets: Mapping[str, int] = field(default_factory=dict)
    """Offsets by request that the runner is given instead of the rows' own (E4)."""
    scheduled_reversed: bool = False
    """Whether the scheduler's dictionary lists requests in another order than the batch (M7)."""
    generation: bool = False
    """Whether the generation runner is driven instead of the autoregressive one."""
    replay: bool = False
    """Whether exact replay is switched on (X1 to X4)."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario. ``about`` are the clauses it was written for; others that its rows show are judged too.

    ``error`` is the clause of the error every run must end in, ``strict_error`` of the one in strict mode only;
    in ``on`` it is warned of.
    """

    id: str
    title: str
    about: tuple[str, ...]
    steps: tuple[Step, ...]
    hooks: tuple[Hook, ...] = ("scalar", "batched")
    mtp: tuple[bool, ...] = (True, False)
    behaviour: Behaviour = Behaviour()
    setting: Setting = Setting()
    error: str | None = None
    strict_error: str | None = None
    report: str | None = None

    @property
    def requests(self) -> tuple[str, ...]:
        """Request ids in order of arrival."""
        return tuple(dict.fromkeys(each.request for rows in self.steps for each in rows))

    @property
    def indices(self) -> Mapping[str, int]:
        """The number of each request, from 1 on, by which token ids name it."""
        return {request: index + 1 for index, request in enumerate(self.requests)}

    def shown(self, variant: Variant) -> tuple[str, ...]:
        """The clauses it was written for that this way of running it can show."""
        batched = variant.hook == "batched"
        needs = {"R3": batched, "R4": batched and not variant.mtp, "R5": batched and variant.mtp}
        return tuple(clause for clause in self.about if needs.get(clause, variant.mtp or not clause.startswith("T")))

    def warns(self, variant: Variant) -> tuple[str, ...]:
        """The clauses that a run warns of, once each."""
        if variant.mode == "strict":
            return ()
        odd = self.strict_error or ("E5" if self.behaviour.embeds == "shifted" else None)
        lacking = variant.mtp and self.lacks_mtp_inputs(variant)
        return tuple(dict.fromkeys([*([odd] if odd else []), *(["E7"] if lacking else [])]))

    def lacks_mtp_inputs(self, variant: Variant) -> bool:
        """Whether the model's fault leaves eligible rows without MTP inputs: the batched hook gives them apart."""
        fault = self.behaviour.fault
        return fault == "no_mtp_inputs" or (fault == "no_dictionary" and variant.hook == "scalar")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a scenario."""

    hook: Hook
    mtp: bool
    mode: str = "on"

    def __str__(self) -> str:
        return f"{self.hook} hook, {'MTP' if self.mtp else 'no MTP'}{', strict' if self.mode == 'strict' else ''}"

    @property
    def id(self) -> str:
        """The same in words that a test's name can hold: ``scalar-mtp``, or ``scalar`` where there is no MTP."""
        return "-".join([self.hook, *(["mtp"] if self.mtp else []), *(["strict"] if self.mode == "strict" else [])])


def _next(rows: Step) -> Step:
    """The same requests in the step behind these rows."""
    return tuple(replace(each, num_computed=each.end) for each in rows)


_CHUNKED: tuple[Step, ...] = (
    step(row("a", 5, 0, 4, PREFILL)),
    step(row("a", 5, 4, 1, TAIL)),
    step(row("a", 5, 5, 1, MTP)),
    step(row("a", 5, 6, 1, MTP)),
)
_MIXED: Step = (
    row("pre", 9, 0, 3, PREFILL),
    row("dec", 4, 6, 1, MTP),
    row("tail", 5, 4, 1, TAIL),
    row("dec2", 3, 3, 1, MTP),
    row("dec3", 2, 7, 1, MTP),
    row("one", 1, 0, 1, PREFILL),
)
_DECODES: Step = (row("a", 3, 3, 1, MTP), row("b", 4, 6, 1, MTP), row("c", 2, 9, 1, MTP))
_MANY: Step = tuple(row(f"m{i}", 2 + i, 3 + 2 * i, 1, MTP) for i in range(10))
_MANY_SCATTERED: Step = (
    row("pre", 9, 0, 3, PREFILL),
    *_next(_MANY[4:]),
    row("tail", 5, 4, 1, TAIL),
    *_next(_MANY[1:4]),
    row("long", 3, 4, 2, DECODE),
    row("m0", 2, 4, 1, MTP),
)
_SCALAR_FAULT: tuple[Step, ...] = (
    step(row("p", 6, 0, 4, PREFILL), row("a", 3, 3, 1, MTP)),
    step(row("p", 6, 4, 2, PREFILL), row("a", 3, 4, 1, MTP)),
)
_BATCH_FAULT: tuple[Step, ...] = (
    step(row("p", 6, 0, 4, PREFILL), row("a", 3, 3, 1, MTP), row("b", 4, 6, 1, MTP), row("c", 2, 9, 1, MTP)),
)

_BETWEEN: tuple[Step, ...] = (step(*_BATCH_FAULT[0], row("q", 3, 0, 2, PREFILL)),)


def _scalar_fault(
    fault: str, title: str, *, error: bool, mtp: tuple[bool, ...] = (True, False), report: str | None = None
) -> Scenario:
    clause = "E7" if fault == "no_mtp_inputs" else "E5"
    return Scenario(
        f"{clause.lower()}-{fault.replace('_', '-')}",
        title,
        (clause,),
        _SCALAR_FAULT,
        hooks=("scalar",),
        mtp=mtp,
        behaviour=Behaviour(fault=fault),
        error=clause if error else None,
        strict_error=None if error else clause,
        report=report,
    )


def _batch_fault(fault: str, title: str, *, mtp: tuple[bool, ...] = (True, False), strict: bool = False) -> Scenario:
    return Scenario(
        f"e5b-{fault.replace('_', '-')}",
        title,
        ("E5b",),
        _BATCH_FAULT,
        hooks=("batched",),
        mtp=mtp,
        behaviour=Behaviour(fault=fault),
        error=None if strict else "E5b",
        strict_error="E5b" if strict else None,
    )


# fmt: off
# One line a step: the tables are to be read at a glance.
SCENARIOS: tuple[Scenario, ...] = (
    # The table of the contract, and prompts in pieces.
    Scenario("tail", "a prompt in two steps with a one-token tail, then decode", ("M5", "T1", "T2"), _CHUNKED,
             report="omni#4382"),
    Scenario("table", "every line of the contract's table in one batch", ("M5", "T1", "T2", "T3", "T6"),
             (step(row("a", 5, 0, 4, PREFILL), row("b", 5, 4, 1, TAIL), row("c", 5, 5, 1, MTP),
                   row("d", 5, 6, 1, MTP), row("e", 1, 0, 1, PREFILL), row("f", 5, 5, 2, DECODE)),)),
    Scenario("one-token-chunks", "a prompt read one token at a time", ("M5", "T2"),
             tuple(step(row("a", 4, c, 1, (PREFILL, PREFILL, PREFILL, TAIL, MTP)[c]), row("d", 2, 2 + c, 1, MTP))
                   for c in range(5))),
    Scenario("budget-short-by-one", "a budget one short of a long prompt", ("M4", "T2"),
             (step(row("a", 2049, 0, 2048, PREFILL)), step(row("a", 2049, 2048, 1, TAIL), row("d", 2, 2, 1, MTP)),
              step(row("a", 2049, 2049, 1, MTP), row("d", 2, 3, 1, MTP))), report="omni#2443"),
    Scenario("three-chunks", "offsets of a prompt in three chunks", ("M4", "R9"),
             (step(row("a", 10, 0, 6, PREFILL), row("d", 1, 1, 1, MTP)),
              step(row("a", 10, 6, 3, PREFILL), row("d", 1, 2, 1, MTP)),
              step(row("a", 10, 9, 1, TAIL), row("d", 1, 3, 1, MTP)), step(row("a", 10, 10, 1, MTP))),
             report="omni#5377"),
    Scenario("one-token-prompts", "one-token prompts beside decode rows", ("T3",),
             (step(row("a", 1, 0, 1, PREFILL), row("d", 4, 4, 1, MTP), row("b", 1, 0, 1, PREFILL)),
              step(row("a", 1, 1, 1, MTP), row("d", 4, 5, 1, MTP), row("b", 1, 1, 1, MTP)))),
    Scenario("frame-mid-prompt", "a model that emits a frame in the middle of its prompt", ("T2", "T7"),
             (step(row("a", 9, 0, 8, PREFILL), row("d", 2, 2, 1, MTP)), step(row("a", 9, 8, 1, TAIL))),
             behaviour=Behaviour(mtp_inputs="every_row"), report="omni#7084"),
    Scenario("no-eligible-row", "a step of prefill rows only", ("T7",),
             (step(row("a", 3, 3, 1, MTP)), step(row("b", 4, 0, 3, PREFILL), row("c", 6, 5, 1, TAIL)))),
    # Cached progress, first sight, long decode spans, boundary crossings.
    Scenario("cached-progress", "a prefix-cache hit at first sight", ("M4",),
             (step(row("a", 6, 4, 2, PREFILL), row("d", 2, 3, 1, MTP)), step(row("a", 6, 6, 1, MTP))),
             report="omni#4317, omni#4518"),
    Scenario("first-sight-at-tail", "a request first seen at C = P - 1", ("M4", "T2"),
             (step(row("a", 6, 5, 1, TAIL), row("d", 2, 3, 1, MTP)), step(row("a", 6, 6, 1, MTP)))),
    Scenario("long-decode-span", "decode spans of more than one token", ("T6", "R2"),
             (step(row("a", 5, 5, 2, DECODE), row("b", 3, 4, 1, MTP)),
              step(row("a", 5, 7, 1, MTP), row("b", 3, 5, 3, DECODE)))),
    Scenario("crossing", "a span across the prompt boundary", ("E2",),
             (step(row("a", 5, 3, 4, PREFILL), row("b", 3, 4, 1, MTP)), step(row("a", 5, 7, 1, MTP)))),
    Scenario("cfg-pair", "a CFG pair with unequal spans", ("R3", "T6"),
             (step(row("a.cond", 4, 4, 1, MTP), row("a.uncond", 3, 3, 2, DECODE)),
              step(row("a.cond", 4, 5, 1, MTP), row("a.uncond", 3, 5, 1, MTP))), report="omni#3004"),
    # Mixed batches and order.
    Scenario("mixed", "prefill, tail, one-token prompt and decode rows in one batch",
             ("R2", "R4", "R5", "R6", "R8", "T1", "T2", "T4"), (_MIXED,)),
    Scenario("mixed-reversed", "the same batch the other way round", ("R2", "R6", "T1", "T4"), (_MIXED[::-1],)),
    *(Scenario(f"mixed-rotated-{turn}", f"the same batch turned by {turn}", ("R2", "R6", "T1", "T4"),
               (_MIXED[turn:] + _MIXED[:turn],)) for turn in range(1, len(_MIXED))),
    Scenario("adjacent-decodes", "adjacent decode requests, each with its own codes", ("R3", "R8", "T5"),
             (_DECODES, _next(_DECODES)),
             report="omni#3420"),
    Scenario("many-decodes", "ten decode rows, adjacent and scattered", ("R3", "R8", "T1", "T4", "T5"),
             (_MANY, _MANY_SCATTERED)),
    Scenario("swapped", "decode rows swapped between steps", ("M7", "R3", "T5"),
             (step(row("a", 3, 3, 1, MTP), row("b", 4, 4, 1, MTP)),
              step(row("b", 4, 5, 1, MTP), row("a", 3, 4, 1, MTP))), report="omni#2690"),
    Scenario("moved-marks", "updates that move on what the last ones stored", ("R8",),
             (*_CHUNKED, _DECODES, _DECODES[::-1]), behaviour=Behaviour(updates="moves")),
    Scenario("uncallable-hook", "a batched hook's attribute that cannot be called", ("R2",), (_MIXED,),
             hooks=("scalar",), behaviour=Behaviour(uncallable_hook=True)),
    Scenario("scheduler-order", "a scheduler dictionary in another order than the batch", ("M7",),
             (_MIXED,), setting=Setting(scheduled_reversed=True)),
    Scenario("condensed", "requests finish, rows move up", ("M7", "T5"),
             (step(row("a", 3, 3, 1, MTP), row("b", 4, 4, 1, MTP), row("c", 5, 4, 1, TAIL), row("d", 2, 8, 1, MTP)),
              step(row("d", 2, 9, 1, MTP), row("b", 4, 5, 1, MTP), row("c", 5, 5, 1, MTP)),
              step(row("c", 5, 6, 1, MTP)))),
    Scenario("joins-and-leaves", "a request joins in front of a decoding one", ("M7", "T4"),
             (step(row("a", 3, 3, 1, MTP)), step(row("b", 6, 0, 5, PREFILL), row("a", 3, 4, 1, MTP)),
              step(row("b", 6, 5, 1, TAIL), row("a", 3, 5, 1, MTP)))),
    # Resume, preemption, replay, streaming.
    Scenario("resumed-decode-span", "a resumed decode span longer than its prompt", ("M5", "T6"),
             (step(row("a", 2, 4, 3, DECODE), row("d", 3, 3, 1, MTP)), step(row("a", 2, 7, 1, MTP))),
             report="omni#5018"),
    Scenario("resumed-after-preemption", "a resumed span of three rows is one scalar call", ("R9", "T6"),
             (step(row("a", 5, 7, 3, DECODE), row("d", 3, 3, 1, MTP)),), report="omni#4471, omni#4559"),
    Scenario("replay", "preemption: a prompt read again, past outputs recomputed", ("M8", "E3"),
             (step(row("a", 5, 5, 1, MTP), row("d", 3, 3, 1, MTP)), step(row("a", 5, 6, 1, MTP)),
              step(row("a", 5, 0, 4, PREFILL), row("d", 3, 4, 1, MTP)), step(row("a", 5, 4, 1, TAIL)),
              step(row("a", 5, 5, 1, MTP), row("d", 3, 5, 1, MTP)), step(row("a", 5, 6, 1, MTP)))),
    Scenario("replay-stale-offset", "a replay that begins again behind the request's old progress", ("M8",),
             (step(row("a", 27, 34, 1, MTP), row("d", 3, 3, 1, MTP)),
              step(row("a", 27, 0, 7, PREFILL), row("d", 3, 4, 1, MTP)))),
    Scenario("streaming-growth", "a streaming prompt grows: decode, prefill again, decode", ("M3", "M8"),
             (step(row("a", 4, 0, 4, PREFILL)), step(row("a", 4, 4, 1, MTP)), step(row("a", 9, 5, 3, PREFILL)),
              step(row("a", 9, 8, 1, TAIL), row("d", 3, 3, 1, MTP)), step(row("a", 9, 9, 1, MTP)))),
    # The state: stale, hostile, nested, replaced, absent.
    Scenario("stale-state", "wrong fields in the live buffers before every step", ("M6",), (*_CHUNKED, _MIXED),
             setting=Setting(stale=True)),
    Scenario("returned-fields", "a hook that returns the runner's fields as updates", ("M9",), (*_CHUNKED, _MIXED),
             behaviour=Behaviour(updates="fields")),
    Scenario("mutated-fields", "a hook that changes the fields in what it is handed", ("M9",), (_MIXED, _MIXED),
             behaviour=Behaviour(mutates="fields")),
    Scenario("nested-pop", "a hook that pops from a nested value", ("M9",), (_MIXED, _MIXED),
             behaviour=Behaviour(mutates="nested"), setting=Setting(nested=True)),
    Scenario("whole-dictionary", "a hook that returns its whole keyword dictionary", ("M9", "R8", "T5"),
             (*_CHUNKED, _DECODES, _DECODES), behaviour=Behaviour(updates="whole")),
    Scenario("no-updates", "hooks that return no updates", ("M9",), (*_CHUNKED, _MIXED),
             behaviour=Behaviour(updates="nothing")),
    Scenario("no-buffer", "requests without a live buffer", ("M9",), (_MIXED,),
             behaviour=Behaviour(updates="nothing"),
             setting=Setting(no_buffer=frozenset({"pre", "dec", "tail", "dec2", "dec3", "one"}))),
    Scenario("batch-hook", "preprocess_batch before all hooks", ("M10",), (*_CHUNKED, _MIXED),
             behaviour=Behaviour(preprocess_batch="records")),
    Scenario("batch-hook-replaces", "preprocess_batch replaces buffers", ("M10", "M6"), (*_CHUNKED, _MIXED),
             behaviour=Behaviour(preprocess_batch="replaces")),
    Scenario("batch-hook-claims", "preprocess_batch writes wrong fields", ("M6", "M10"), (*_CHUNKED, _MIXED),
             behaviour=Behaviour(preprocess_batch="claims")),
    Scenario("batch-hook-fills", "preprocess_batch fills rows itself", ("M10",),
             (step(row("a", 3, 3, 1, MTP), row("f", 4, 6, 1, MTP), row("b", 2, 9, 1, MTP), row("g", 9, 0, 3, PREFILL),
                   row("c", 5, 4, 1, TAIL)),
              step(row("f", 4, 7, 1, MTP)),
              step(row("g", 9, 3, 5, PREFILL), row("b", 2, 10, 1, MTP), row("a", 3, 4, 1, MTP))),
             behaviour=Behaviour(preprocess_batch="records", fills=frozenset({"f", "g"}))),
    # What hooks return.
    Scenario("new-ids", "hooks that return other token ids", ("R7",), (*_CHUNKED, _MIXED),
             behaviour=Behaviour(ids="new")),
    Scenario("in-place", "hooks that fill and return the slice they were given", ("E8",), (*_CHUNKED, _MIXED),
             behaviour=Behaviour(embeds="in_place")),
    Scenario("shifted-alias", "a hook result that overlaps the runner's buffer", ("E8",),
             (step(row("a", 8, 0, 6, PREFILL), row("d", 2, 2, 1, MTP)),), hooks=("scalar",),
             behaviour=Behaviour(embeds="shifted")),
    Scenario("in-mtp", "hidden states that overlap their place in the MTP's input buffer", ("E8",),
             (_MANY, _DECODES, _DECODES[::-1]), hooks=("batched",), mtp=(True,),
             behaviour=Behaviour(embeds="in_mtp")),
    Scenario("no-hooks", "a model without has_preprocess", ("R1",), (_MIXED,), mtp=(False,),
             behaviour=Behaviour(has_preprocess=False, preprocess_batch="records")),
    Scenario("ids-absent", "input selection that gives no token ids", ("R10",), (*_CHUNKED, _MIXED),
             setting=Setting(ids_absent=True)),
    Scenario("multimodal", "the multimodal input path", ("R10",), (*_CHUNKED, _MIXED),
             setting=Setting(multimodal=True)),
    Scenario("generation-runner", "the generation runner", ("M5", "R2", "T2"), (*_CHUNKED, _MIXED),
             setting=Setting(generation=True)),
    Scenario("request-ids", "every row carries its request id and the release's keywords", ("M1", "M2"), (_MIXED,),
             behaviour=Behaviour(takes_infos=True), report="omni#5846, omni#5290"),
    Scenario("named-model", "the model released code knows by its class name", ("M1", "M9"), (*_CHUNKED, _MIXED),
             behaviour=Behaviour(class_name="MiMoAudioForConditionalGeneration", updates="whole")),
    # MTP: seeds, ownership, padding, no codes.
    Scenario("seeded-rows", "seeded and unseeded rows share MTP calls", ("T8",),
             (_DECODES, step(_DECODES[1]), _DECODES[::-1]), mtp=(True,),
             behaviour=Behaviour(seeds="per_row"), setting=Setting(seeds={"a": 11, "c": 5}), report="omni#4889"),
    Scenario("seeded-one-stream", "seeded rows of a model that takes one generator", ("T8", "T9"),
             (_DECODES, step(_DECODES[1]), _DECODES[::-1]), mtp=(True,),
             behaviour=Behaviour(seeds="one_stream"), setting=Setting(seeds={"a": 11, "c": 5}), report="omni#3476"),
    Scenario("seeded-graph", "seeded rows of a captured MTP", ("T8", "T10"),
             (_DECODES, step(_DECODES[1]), _DECODES[::-1]), mtp=(True,),
             behaviour=Behaviour(seeds="per_row"), setting=Setting(seeds={"a": 11, "c": 5}, padded=8)),
    Scenario("seeded-one-stream-graph", "seeded rows of a captured MTP that takes one generator", ("T8", "T10"),
             (_DECODES, step(_DECODES[1]), _DECODES[::-1]), mtp=(True,),
             behaviour=Behaviour(seeds="one_stream"), setting=Setting(seeds={"a": 11, "c": 5}, padded=8)),
    Scenario("seeded-replay", "a preempted request's replayed rows do not move its seeded stream on", ("E3", "T8"),
             tuple(step(row("a", 5, c, s, PREFILL if c == 0 else MTP), *([row("d", 3, 3 + n, 1, MTP)] if n % 2 else []))
                   for n, (c, s) in enumerate(((0, 5), (5, 1), (6, 1), (0, 5), (5, 1), (6, 1), (7, 1), (8, 1)))),
             mtp=(True,), behaviour=Behaviour(seeds="per_row"), setting=Setting(seeds={"a": 5}),
             report="vllm-tt-plugin#52, omni#7681"),
    Scenario("owned-results", "MTP and hidden states in reused device buffers", ("T9",),
             (*_CHUNKED, _DECODES, _DECODES[::-1]), mtp=(True,)),
    Scenario("reused-updates", "updates in tensors that the model uses again", ("T9",),
             (*_CHUNKED, _DECODES, _DECODES[::-1]), behaviour=Behaviour(updates="reused")),
    Scenario("deep-updates", "the same deep in dictionaries, lists and tuples", ("T9",),
             (*_CHUNKED, _DECODES, _DECODES[::-1], _MIXED), behaviour=Behaviour(updates="deep"), report="omni#2830"),
    Scenario("deep-hidden-states", "hidden states that postprocess stores by layer", ("T9",),
             (*_CHUNKED, _DECODES, _MIXED), behaviour=Behaviour(layers=True), report="sglang-omni#908"),
    Scenario("given-updates", "updates in the memory of the token ids, which become others", ("T9",),
             (*_CHUNKED, _DECODES, _MIXED), behaviour=Behaviour(updates="given", ids="new")),
    Scenario("live-updates", "a live nested value, with a tensor that the model uses again, as update", ("T9",),
             (*_CHUNKED, _DECODES, _DECODES[::-1]), behaviour=Behaviour(updates="live")),
    Scenario("resident-codes", "codes kept on the device, with a validity mark", ("T5", "T9"),
             (*_CHUNKED, _DECODES, _DECODES[::-1]), mtp=(True,),
             behaviour=Behaviour(codes="resident", validity=True)),
    Scenario("padded-graph", "a captured MTP padded to eight rows", ("T10",), (*_CHUNKED, _MIXED, _DECODES),
             mtp=(True,), setting=Setting(padded=8)),
    Scenario("no-codes", "an MTP that returns no codes from its second call on", ("T11",),
             (_MIXED[::5], _DECODES, _next(_DECODES)),
             mtp=(True,), behaviour=Behaviour(codes="none_later", validity=True)),
    Scenario("no-codes-row-by-row", "an MTP called for each row that returns codes for the first alone", ("T11", "T8"),
             (_DECODES, _DECODES[::-1]), mtp=(True,), behaviour=Behaviour(codes="none_later", seeds="one_stream"),
             setting=Setting(seeds={"a": 11, "c": 5})),
    Scenario("offered-inputs", "mtp_inputs from every row", ("E6", "T2", "T6"),
             (*_CHUNKED, step(row("a", 5, 7, 2, DECODE), row("dec", 4, 5, 1, MTP)), _MIXED), hooks=("scalar",),
             behaviour=Behaviour(mtp_inputs="every_row")),
    # Edges. The models of refused steps have every hook that must not run (E4).
    Scenario("prompt-embeds", "a request sent as prompt embeddings", ("E1",),
             (step(row("a", 6, 0, 5, PREFILL), row("d", 2, 2, 1, MTP)), step(row("a", 6, 5, 1, TAIL)),
              step(row("a", 6, 6, 1, MTP), row("d", 2, 3, 1, MTP))),
             setting=Setting(prompt_embeds=frozenset({"a"})), report="vllm#42302"),
    Scenario("negative-progress", "a row with negative progress", ("E4",),
             (step(row("d", 2, 2, 1, MTP), row("a", 6, -1, 1, PREFILL)),),
             behaviour=Behaviour(preprocess_batch="records"), error="E4"),
    Scenario("outside-buffer", "a span that leaves the step's buffer", ("E4",),
             (step(row("d", 2, 2, 1, MTP), row("a", 6, 0, 4, PREFILL)),),
             behaviour=Behaviour(preprocess_batch="records"), setting=Setting(buffer_short=1), error="E4"),
    Scenario("negative-span", "a scheduled span of less than nothing", ("E4",),
             (step(row("d", 2, 2, 1, MTP), row("a", 6, 0, 4, PREFILL)),),
             behaviour=Behaviour(preprocess_batch="records"), setting=Setting(claimed_spans={"a": -1}), error="E4"),
    Scenario("negative-offset", "a span that begins before the step's buffer", ("E4",),
             (step(row("d", 2, 2, 1, MTP), row("a", 6, 0, 4, PREFILL)),),
             behaviour=Behaviour(preprocess_batch="records"), setting=Setting(claimed_offsets={"a": -1}), error="E4"),
    Scenario("offset-outside-buffer", "a span that begins behind the step's buffer", ("E4",),
             (step(row("d", 2, 2, 1, MTP), row("a", 6, 0, 4, PREFILL)),),
             behaviour=Behaviour(preprocess_batch="records"), setting=Setting(claimed_offsets={"a": 99}), error="E4"),
    Scenario("overlapping-spans", "two rows at one place of the step's buffer", ("E4",),
             (step(row("d", 2, 2, 1, MTP), row("a", 6, 6, 1, MTP)),),
             behaviour=Behaviour(preprocess_batch="records"), setting=Setting(claimed_offsets={"a": 0}), error="E4"),
    Scenario("missing-state", "a row without request state", ("E4",),
             (step(row("d", 2, 2, 1, MTP), row("a", 6, 0, 4, PREFILL)),),
             behaviour=Behaviour(preprocess_batch="records"), setting=Setting(missing=frozenset({"a"})), error="E4"),
    Scenario("no-dictionary", "a live buffer that is no dictionary", ("E9",),
             _BETWEEN,
             setting=Setting(no_dictionary=frozenset({"b"})), error="E9"),
    Scenario("no-group", "an update for a group that is no dictionary", ("E9",),
             _BETWEEN,
             setting=Setting(no_group=frozenset({"b"})), error="E9"),
    # E5: the scalar hook's odd results.
    _scalar_fault("short", "fewer rows than the span", error=False),
    _scalar_fault("long", "more rows than the span", error=False, report="omni#2894"),
    _scalar_fault("other_ids", "another number of ids", error=False),
    _scalar_fault("no_dictionary", "updates that are no dictionary", error=False),
    _scalar_fault("no_mtp_inputs", "an eligible row without mtp_inputs", error=False, mtp=(True,)),
    _scalar_fault("wide_mtp_inputs", "mtp_inputs of another width", error=True, mtp=(True,)),
    _scalar_fault("three_mtp_inputs", "mtp_inputs that are no pair", error=True, mtp=(True,)),
    _scalar_fault("wrong_rank", "embeddings of rank 3", error=True),
    _scalar_fault("wrong_width", "embeddings of another width", error=True),
    _scalar_fault("integer_embeds", "integer embeddings", error=False),
    _scalar_fault("float_ids", "floating token ids", error=False),
    _scalar_fault("flat", "an embedding without its row", error=False, mtp=(True,)),
    _scalar_fault("integer_mtp_inputs", "an integer text step", error=False, mtp=(True,)),
    _scalar_fault("elsewhere", "embeddings on another device", error=True),
    _scalar_fault("two_values", "two values", error=True),
    Scenario("e5-later-row", "an eligible row refused behind a good one", ("E5",), _SCALAR_FAULT, hooks=("scalar",),
             behaviour=Behaviour(fault="wrong_width", good_calls=1), error="E5"),
    # E5b: the batched hook's.
    _batch_fault("two_values", "a value missing"),
    _batch_fault("six_values", "a value too many"),
    _batch_fault("short", "a row missing"),
    _batch_fault("long", "a row too many"),
    _batch_fault("other_ids", "another number of ids"),
    _batch_fault("few_updates", "an update missing"),
    _batch_fault("wrong_rank", "embeddings of rank 3"),
    _batch_fault("wrong_width", "embeddings of another width"),
    _batch_fault("integer_embeds", "integer embeddings, which MTP's copy by index cannot take", mtp=(True,)),
    replace(_batch_fault("integer_embeds", "integer embeddings", mtp=(False,), strict=True), id="e5b-cast-embeds"),
    _batch_fault("float_ids", "floating token ids", strict=True),
    _batch_fault("elsewhere", "embeddings on another device"),
    _batch_fault("short_hidden", "hidden states of fewer rows", mtp=(True,)),
    _batch_fault("flat_text_step", "a text step without rows, for all", mtp=(True,), strict=True),
    _batch_fault("wide_text_step", "a text step of another width", mtp=(True,)),
    _batch_fault("no_dictionary", "an update that is no dictionary", strict=True),
    Scenario("e5b-later-batch", "a batch refused behind a good one", ("E5b",),
             (step(row("a", 3, 3, 1, MTP), row("b", 4, 6, 1, MTP), row("p", 6, 0, 4, PREFILL),
                   row("c", 2, 9, 1, MTP)),),
             hooks=("batched",), mtp=(False,), behaviour=Behaviour(fault="wrong_width", good_calls=2), error="E5b"),
)
# fmt: on
"""Every scenario, in the order reports show them."""


def _replayed(
    name: str, title: str, about: tuple[str, ...], *steps: Step, setting: Setting = Setting(), **how: Any
) -> Scenario:
    return Scenario(name, title, about, steps, setting=replace(setting, replay=True), **how)


# fmt: off
REPLAY_SCENARIOS: tuple[Scenario, ...] = (
    _replayed("given-back", "a preempted request is read again in pieces, beside a decode row", ("X1",),
              step(row("a", 5, 0, 5, PREFILL), row("d", 2, 2, 1, MTP)),
              step(row("a", 5, 5, 1, MTP), row("d", 2, 3, 1, MTP)),
              step(row("d", 2, 4, 1, MTP), row("a", 5, 6, 1, MTP)), step(row("d", 2, 5, 1, MTP)),
              step(row("a", 5, 0, 4, GIVEN, 4), row("d", 2, 6, 1, MTP)),
              step(row("d", 2, 7, 1, MTP), row("a", 5, 4, 3, GIVEN, 3)),
              step(row("a", 5, 7, 1, MTP), row("d", 2, 8, 1, MTP))),
    _replayed("given-back-alone", "steps of given rows alone, token by token", ("X1",),
              step(row("a", 2, 0, 2, PREFILL)), *(step(row("a", 2, c, 1, MTP)) for c in (2, 3)),
              *(step(row("a", 2, c, 1, GIVEN, 1)) for c in range(4)), step(row("a", 2, 4, 1, MTP)),
              behaviour=Behaviour(ids="new", preprocess_batch="records")),
    _replayed("given-back-seeded", "seeded requests are preempted, and draw on from where they stood", ("X1", "X2"),
              step(row("a", 3, 0, 3, PREFILL), row("b", 2, 2, 1, MTP)),
              *(step(row("a", 3, 3 + n, 1, MTP), row("b", 2, 3 + n, 1, MTP)) for n in range(3)),
              step(row("b", 2, 6, 1, MTP), row("a", 3, 0, 4, GIVEN, 4)),
              step(row("a", 3, 4, 3, MTP, 2), row("b", 2, 7, 1, MTP)),
              step(row("b", 2, 8, 1, MTP), row("a", 3, 7, 1, MTP)),
              mtp=(True,), behaviour=Behaviour(seeds="per_row"), setting=Setting(seeds={"a": 5, "b": 7})),
    _replayed("resume", "kept rows and one new decode token in a span", ("X2",),
              step(row("a", 3, 0, 3, PREFILL), row("d", 2, 2, 1, MTP)),
              step(row("a", 3, 3, 1, MTP), row("d", 2, 3, 1, MTP)),
              step(row("d", 2, 4, 1, MTP)),
              step(row("d", 2, 5, 1, MTP), row("a", 3, 0, 5, MTP, 4), row("e", 2, 2, 1, MTP)),
              step(row("a", 3, 5, 1, MTP), row("e", 2, 3, 1, MTP), row("d", 2, 6, 1, MTP)),
              behaviour=Behaviour(ids="new")),
    _replayed("resume-prefill", "kept rows and the rest of a prompt, a tail or decode tokens in a span", ("X2",),
              step(row("a", 9, 0, 3, PREFILL), row("b", 5, 0, 4, PREFILL), row("c", 2, 0, 1, PREFILL)),
              step(row("c", 2, 1, 1, TAIL)),
              step(row("a", 9, 0, 7, PREFILL, 3), row("c", 2, 0, 4, DECODE, 2), row("b", 5, 0, 5, TAIL, 4)),
              step(row("b", 5, 5, 1, MTP), row("c", 2, 4, 1, MTP), row("a", 9, 7, 2, PREFILL)),
              step(row("c", 2, 0, 6, MTP, 5), row("a", 9, 9, 1, MTP))),
    _replayed("preempted-again", "a request is preempted while it is read again, and once more", ("X1", "X2"),
              step(row("a", 4, 0, 4, PREFILL)), step(row("a", 4, 4, 1, MTP)), step(row("a", 4, 0, 3, GIVEN, 3)),
              step(row("a", 4, 0, 2, GIVEN, 2)), step(row("a", 4, 2, 4, MTP, 3)), step(row("a", 4, 0, 7, MTP, 6)),
              step(row("a", 4, 7, 1, MTP))),
    _replayed("kept-of-another", "another prompt, another request of the same id, and a prompt that grew", ("X3",),
              step(row("a", 3, 0, 3, PREFILL), row("b", 4, 0, 4, PREFILL), row("g", 1, 0, 1, PREFILL)),
              step(row("a", 3, 3, 1, MTP), row("b", 4, 4, 1, MTP), row("g", 2, 1, 1, TAIL)),
              step(row("a", 3, 0, 3, PREFILL, anew="prompt"), row("b", 4, 0, 3, PREFILL, anew="request"),
                   row("g", 3, 2, 1, TAIL)),
              step(row("a", 3, 0, 4, MTP, 3), row("b", 4, 0, 4, TAIL, 3), row("g", 3, 0, 3, PREFILL)),
              step(row("g", 3, 0, 4, MTP, 3), row("b", 4, 0, 5, MTP, 4))),
    _replayed("kept-behind-a-gap", "progress beyond what is kept, as a prefix cache brings it", ("X3", "X4"),
              step(row("a", 9, 4, 2, PREFILL), row("b", 4, 0, 2, PREFILL)),
              step(row("a", 9, 6, 3, PREFILL), row("b", 4, 3, 1, TAIL)),
              step(row("a", 9, 9, 1, MTP), row("b", 4, 4, 1, MTP)),
              step(row("a", 9, 0, 4, PREFILL), row("b", 4, 1, 3, PREFILL)),
              step(row("a", 9, 0, 6, PREFILL, 4), row("b", 4, 0, 2, PREFILL)),
              step(row("b", 4, 1, 3, PREFILL, 1), row("a", 9, 6, 3, PREFILL))),
    _replayed("never-preempted", "requests that are never preempted", ("X4",), *_CHUNKED, _MIXED, _DECODES),
)
# fmt: on
"""The scenarios of exact replay, for runners that have it switched on."""


def to_judge() -> tuple[Scenario, ...]:
    """The scenarios by which a runner is judged: those of exact replay too where it is switched on."""
    return (*SCENARIOS, *REPLAY_SCENARIOS) if replays_exactly() else SCENARIOS


BY_ID: Mapping[str, Scenario] = {scenario.id: scenario for scenario in (*SCENARIOS, *REPLAY_SCENARIOS)}


class SetupError(RuntimeError):
    """No runner of a class could be made here, or none that is complete: this says nothing about the contract."""


_NO_BATCH_HOOK = "V2 has no preprocess_batch, and its preprocess_batch_mrv2 gets prefill rows only"
NOT_IN_V2: Mapping[str, str] = {
    "scheduler-order": "a V2 model state gets the input batch alone, without the scheduler's dictionary",
    "no-buffer": "in V2 a request has its live buffer as soon as it has its state",
    "batch-hook": _NO_BATCH_HOOK,
    "batch-hook-replaces": _NO_BATCH_HOOK,
    "batch-hook-claims": _NO_BATCH_HOOK,
    "batch-hook-fills": _NO_BATCH_HOOK,
    "multimodal": "V2 turns the multimodal input path off for models with hooks",
    "generation-runner": "the V2 generation runner calls no hooks",
    "named-model": "V2 knows no model by its class name",
    "seeded-replay": "in V2 a preempted request comes back as a new one, whose stream begins anew",
    "no-group": "a V2 state puts a new group in the place of what is no dictionary",
    **dict.fromkeys((each.id for each in REPLAY_SCENARIOS), "in V2 a preempted request comes back as a new one"),
}
"""Scenarios that a model state of Model Runner V2 cannot be in, each with the reason."""
