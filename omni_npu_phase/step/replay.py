# SPDX-License-Identifier: Apache-2.0
"""Exact replay: what the forward pass was given of each request, kept by position and given back after a preemption.

vLLM frees the KV cache of a preempted request and reads all its tokens again from ``C = 0``. A model that keeps state
between frames cannot make the same embeddings again: its state stands where the preemption found it, and the codes of
earlier frames are gone. So the runner keeps the embeddings and token ids that it handed to the forward pass.

A row of a step has two parts. Its first tokens were all handed over before: they are given back, and no hook and no MTP
sees them (X1). The rest is new, and is routed as a row of its own (X2); often it is one decode token. A row without a
new part leaves nothing behind: its model is not asked, nothing is stored for it, and nothing is sent on. One exception
is asynchronous scheduling, which throws away what a step made for a request that it preempts meanwhile. That step's
last token is then sampled, and its frame sent on, once more.

Kept rows belong to a request state and to its prompt (X3). They lie in one pool on the device, in blocks of a fixed
number of tokens, so that a step copies once each way, however many rows it has.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from omni_npu_phase import buffers
from omni_npu_phase.contract import Row
from omni_npu_phase.step.plan import StepPlan, plan_step

logger = logging.getLogger(__name__)

BLOCK = 32
"""Tokens of a block."""


@dataclass(slots=True)
class Kept:
    """What is kept of one request: its first ``count`` tokens, in ``blocks`` of the pool."""

    state: Any
    prompt: Any
    prompt_len: int
    count: int = 0
    blocks: list[int] = field(default_factory=list)
    last: int = 0
    """Where in the pool its last block begins."""
    room: int = 0
    """Tokens that its blocks have room for."""
    drawn_from: Any = None
    """State of its token generator before the last draw."""

    def belongs_to(self, state: Any, prompt: Any, prompt_len: int, computed: int) -> bool:
        """Whether this is of the same request and prompt, and reaches up to its progress (X3)."""
        same = self.state is state and self.prompt is prompt and self.prompt_len == prompt_len
        return same and computed <= self.count

    def places(self, start: int, stop: int) -> list[int]:
        """Rows of the pool that hold its tokens from ``start`` on."""
        return [self.blocks[token // BLOCK] * BLOCK + token % BLOCK for token in range(start, stop)]


@dataclass(frozen=True, slots=True)
class Given:
    """A row of the step of which ``count`` leading tokens were given back."""

    row: Row
    count: int
    again: bool = False
    """Whether what the request made of its last token was thrown away, and is sent once more."""

    @property
    def whole(self) -> bool:
        return self.count == self.row.span

    @property
    def sent(self) -> int:
        """Its last tokens that are sent on: the new ones."""
        return 1 if self.again else self.row.span - self.count


class Replay:
    """The kept rows of one runner. ``limit``: bytes that its pool may take.

    In a step: :meth:`split`, :meth:`give_back`, the hooks of what is new, :meth:`keep`.
    """

    def __init__(self, runner: Any, device: torch.device, limit: int) -> None:
        self._runner = runner
        self._limit = limit
        # Tokens come from one place and go to another, and a helper knows one place at a time.
        self._read, self._write = buffers.for_device(device), buffers.for_device(device)
        self._kept: dict[str, Kept] = {}
        self._ids = self._embeds = torch.empty(0)
        self._free: list[int] = []
        self._warned = False
        self.given: dict[str, Given] = {}
        """Rows of the step under way, or else of the last one, with something given back."""

    @property
    def held_bytes(self) -> int:
        return self._ids.nbytes + self._embeds.nbytes

    @property
    def kept_tokens(self) -> dict[str, int]:
        """How many tokens are kept of each request."""
        return {request_id: own.count for request_id, own in self._kept.items()}

    def split(self, plan: StepPlan, buffer_rows: int) -> StepPlan:
        """The plan of what is new in a step; the rest is to be given back."""
        requests = self._runner.requests
        for request_id in [one for one in self._kept if one not in requests]:
            self._drop(request_id)
        self.given = {}
        if self._goes_on(plan):
            return plan
        counts = list(map(self._known, plan.request_ids, plan.prompt_lens, plan.num_computed, plan.spans))
        if not any(counts):
            return plan
        for row, count in enumerate(counts):
            if count:
                lengths = Row(plan.prompt_lens[row], plan.num_computed[row], plan.spans[row])
                request_id = plan.request_ids[row]
                again = count == lengths.span and lengths.end >= requests[request_id].num_tokens
                self.given[request_id] = Given(lengths, count, again)
        new = [row for row, count in enumerate(counts) if count < plan.spans[row] or not plan.spans[row]]
        return plan_step(
            [plan.request_ids[row] for row in new],
            [plan.prompt_lens[row] for row in new],
            [plan.num_computed[row] + counts[row] for row in new],
            [plan.spans[row] - counts[row] for row in new],
            [plan.offsets[row] + counts[row] for row in new],
            buffer_rows=buffer_rows,
        )

    def _goes_on(self, plan: StepPlan) -> bool:
        """Whether every row begins where what is kept of it ends, as in nearly every step."""
        owns = list(map(self._kept.get, plan.request_ids))
        return None not in owns and all(
            own.count == computed
            and own.prompt_len == length
            and own.state is state
            and own.prompt is state.prompt_token_ids is not None
            for own, computed, length, state in zip(
                cast("list[Kept]", owns),
                plan.num_computed,
                plan.prompt_lens,
                map(self._runner.requests.__getitem__, plan.request_ids),
                strict=True,
            )
        )

    def _known(self, request_id: str, prompt_len: int, computed: int, span: int) -> int:
        """How many leading tokens of a row are kept."""
        own, state = self._kept.get(request_id), self._runner.requests[request_id]
        prompt = getattr(state, "prompt_token_ids", None)
        if prompt is None:
            prompt = getattr(state, "prompt_embeds", None)
        if own is not None and own.belongs_to(state, prompt, prompt_len, computed):
            if own.count == computed:
                return 0
            # Where tokens were taken back that rows were kept of, others may come in their place.
            if own.count <= state.num_tokens:
                return min(own.count - computed, span)
        if own is not None:
            self._drop(request_id)
        if not computed:
            self._kept[request_id] = Kept(state, prompt, prompt_len)
        return 0

    def give_back(self, plan: StepPlan, ids: torch.Tensor, embeds: torch.Tensor) -> None:
        """Write what is given back of a step to its buffers; ``plan`` is that of the whole step."""
        places: list[int] = []
        tokens: list[int] = []
        for row, request_id in enumerate(plan.request_ids):
            given = self.given.get(request_id)
            if given is not None:
                own, start, offset = self._kept[request_id], plan.num_computed[row], plan.offsets[row]
                places += own.places(start, start + given.count)
                tokens += range(offset, offset + given.count)
                if given.again and own.drawn_from is not None:
                    own.state.generator.set_state(own.drawn_from)
        if places:
            source, target = self._read.rows(places), self._write.rows(tokens)
            self._write.put(embeds, target, self._embeds[source])
            self._write.put(ids, target, self._ids[source])

    def keep(self, plan: StepPlan, ids: torch.Tensor, embeds: torch.Tensor) -> None:
        """Keep what a step hands to the forward pass; ``plan`` is that of what is new."""
        for row, own in enumerate(map(self._kept.get, plan.request_ids)):
            if own is not None and own.room < (end := plan.num_computed[row] + plan.spans[row]):
                self._grow(plan.request_ids[row], own, end, ids, embeds)
        places: list[int] = []
        tokens: list[int] = []
        # Only now, since whoever needs room may have taken it from another row.
        owns = list(map(self._kept.get, plan.request_ids))
        for own, start, span, offset in zip(owns, plan.num_computed, plan.spans, plan.offsets, strict=True):
            if own is None or not span:
                continue
            own.count = start + span
            if span == 1:
                places.append(own.last + start % BLOCK)
                tokens.append(offset)
            else:
                places += own.places(start, start + span)
                tokens += range(offset, offset + span)
        if places:
            source, target = self._read.rows(tokens), self._write.rows(places)
            self._write.put(self._embeds, target, embeds[source])
            self._write.put(self._ids, target, ids[source])
        if getattr(self._runner, "use_async_scheduling", False):
            for own in owns:
                generator = None if own is None else getattr(own.state, "generator", None)
                if own is not None and generator is not None:
                    own.drawn_from = generator.get_state()

    def _grow(self, request_id: str, own: Kept, tokens: int, ids: torch.Tensor, embeds: torch.Tensor) -> None:
        """Give a request blocks for its first tokens, at the cost of the youngest where there is no more room."""
        while request_id in self._kept and own.room < tokens:
            if self._free or self._grow_pool(ids, embeds):
                own.blocks.append(self._free.pop())
                own.last, own.room = own.blocks[-1] * BLOCK, len(own.blocks) * BLOCK
                continue
            youngest = next(reversed(self._kept))
            self._drop(youngest)
            if not self._warned:
                self._warned = True
                mib = self._limit >> 20
                logger.warning("Request %r goes without exact replay: %d MiB are full. Said once.", youngest, mib)

    def _grow_pool(self, ids: torch.Tensor, embeds: torch.Tensor) -> bool:
        """Double the pool, as far as its limit goes; gives whether there is more room now."""
        token_bytes = embeds[:1].nbytes + ids[:1].nbytes
        have = len(self._embeds) // BLOCK if self._embeds.ndim > 1 else 0
        blocks = min(max(8, 2 * have), self._limit // (token_bytes * BLOCK))
        if blocks <= have:
            return False
        grown_embeds, grown_ids = embeds.new_empty(blocks * BLOCK, embeds.shape[1]), ids.new_empty(blocks * BLOCK)
        if have:
            grown_embeds[: have * BLOCK].copy_(self._embeds)
            grown_ids[: have * BLOCK].copy_(self._ids)
        self._embeds, self._ids = grown_embeds, grown_ids
        self._free += range(blocks - 1, have - 1, -1)
        return True

    def _drop(self, request_id: str) -> None:
        self._free += self._kept.pop(request_id).blocks
        if not self._kept:
            self._ids = self._embeds = torch.empty(0)
            self._free = []

    # What is sent on.

    def for_forward(self, infos: Sequence[dict[str, Any]], key: Any, name: str) -> list[dict[str, Any]]:
        """Live buffers as the forward pass and what it hands on may see them, in the order of the input batch.

        A model joins the codes of all rows, a row of codes a token. So a row with something given back has codes of
        zero before its new ones. A row without a new part is a copy: what is changed in it is not stored (X1).
        """
        request_ids = self._runner.input_batch.req_ids
        return [
            info if given is None else _for_forward(info, given, key, name)
            for info, given in zip(infos, map(self.given.get, request_ids), strict=True)
        ]

    def sent(self, request_ids: Sequence[str]) -> list[str]:
        """Those requests of a step that have something to send on."""
        return [one for one in request_ids if one not in self.given or self.given[one].sent]

    def silent(self) -> set[str]:
        """Requests of the step under way for which nothing is stored."""
        return {request_id for request_id, given in self.given.items() if given.whole}

    @contextmanager
    def only_new_sent(self) -> Iterator[None]:
        """Let the released code cut out of a step's outputs, for each request, the rows that are new."""
        runner, spans = self._runner, getattr(self._runner, "_omni_num_scheduled_tokens_np", None)
        if not self.given or spans is None:
            yield
            return
        starts = runner.query_start_loc
        on_host = starts.cpu() if callable(starts.cpu) else starts.cpu
        new_spans, new_starts = spans.copy(), on_host.clone()
        for row, request_id in enumerate(runner.input_batch.req_ids):
            given = self.given.get(request_id)
            if given is not None:
                new_spans[row] = given.sent
                new_starts[row] += given.row.span - given.sent
        runner._omni_num_scheduled_tokens_np, runner.query_start_loc = new_spans, _Starts(starts, new_starts)
        try:
            yield
        finally:
            runner._omni_num_scheduled_tokens_np, runner.query_start_loc = spans, starts


def _for_forward(info: dict[str, Any], given: Given, key: Any, name: str) -> dict[str, Any]:
    seen = dict(info)
    if given.whole:
        seen = {each: dict(value) if isinstance(value, dict) else value for each, value in info.items()}
        seen.update(given.row.fields)
    group = seen.get(key)
    codes = group.get(name) if isinstance(group, dict) else None
    if isinstance(codes, torch.Tensor) and codes.ndim:
        sent = min(given.sent, len(codes))
        blank = codes.new_zeros(given.row.span - sent, *codes.shape[1:])
        seen[key] = {**group, name: torch.cat([blank, codes[len(codes) - sent :]])}  # type: ignore[dict-item]
    return seen


class _Starts:
    """A step's row starts, of which the host half is another."""

    def __init__(self, starts: Any, on_host: torch.Tensor) -> None:
        self._starts = starts
        self.cpu = on_host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._starts, name)
