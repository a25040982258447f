# SPDX-License-Identifier: Apache-2.0
"""What a model's hooks must do with the contract's fields, as cases that drive them and say what was wrong.

A case is about one request. What it compares with is the model itself: its whole prompt in one step, its scalar hook,
its request alone. Importing this module loads no torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from omni_npu_phase import contract

if TYPE_CHECKING:
    import torch

    from omni_npu_phase.conformance.models.bench import ModelBench, Seen
    from omni_npu_phase.conformance.scenarios import Row

MakeBench: TypeAlias = "Callable[..., ModelBench]"
Chunks = Sequence[int]
_RANDOM_CHUNKINGS = 10


class NotShownError(Exception):
    """A model or its requests cannot show a case; the message says why."""


@dataclass(frozen=True, slots=True)
class ModelCase:
    """A case by its id. ``check`` gives what was wrong with a request, and nothing where all was right."""

    id: str
    sentence: str
    check: Callable[[MakeBench, str], Iterator[str]]

    def findings(self, make: MakeBench, request: str) -> Iterator[str]:
        """What was wrong with a request. What was asked of the model is finished behind it, as an engine would."""
        made: list[ModelBench] = []

        def tracked(**how: bool) -> ModelBench:
            made.append(make(**how))
            return made[-1]

        try:
            yield from self.check(tracked, request)
        finally:
            for bench in made:
                bench.finish()


# Driving.


def prompt(bench: ModelBench, request: str, chunks: Chunks) -> list[Seen]:
    """A request's prompt from C=0, alone, in chunks of these sizes."""
    seen, computed = [], 0
    for size in chunks:
        seen += bench.step(bench.row(request, computed, size))
        computed += size
    return seen


def decode(bench: ModelBench, request: str, first: int, steps: int) -> list[Seen]:
    """One-token decode steps, alone; ``first`` is the number of outputs already read."""
    length = bench.prompt_len(request)
    return [bench.step(bench.row(request, length + first + step, 1))[0] for step in range(steps)]


def whole(bench: ModelBench, name: str) -> tuple[str, torch.Tensor]:
    """A request that has read its whole prompt in one step, and its embeddings of shape (P, hidden)."""
    request = bench.arrive(name)
    (seen,) = prompt(bench, request, [bench.prompt_len(request)])
    return request, _embeds(seen)


def chunkings(length: int) -> Iterator[Chunks]:
    """Ways to cut a prompt: in two everywhere, the one-token tail first; token by token; and some at random."""
    for first in range(length - 1, 0, -1):
        yield first, length - first
    yield [1] * length
    source = random.Random(length)
    for _ in range(_RANDOM_CHUNKINGS):
        cuts = sorted(source.sample(range(1, length), source.randint(2, length - 1)))
        yield [stop - start for start, stop in zip([0, *cuts], [*cuts, length], strict=True)]


# Comparing.


def _embeds(seen: Seen) -> torch.Tensor:
    assert seen.embeds is not None
    return seen.embeds


def _apart(found: Any, wanted: Any, tolerance: float) -> bool:
    if found is None or wanted is None:
        return found is not wanted
    if found.shape != wanted.shape:
        return True
    return bool((found.double() - wanted.double()).abs().gt(tolerance).any())


def _is_slice(seen: Seen, reference: torch.Tensor, tolerance: float) -> Iterator[str]:
    """Whether a row holds the prompt's embeddings at its own progress."""
    start = seen.row.num_computed
    for index, row in enumerate(_embeds(seen)[: max(len(reference) - start, 0)]):
        if not _apart(row, reference[start + index], tolerance):
            continue
        others = [place for place, own in enumerate(reference) if not _apart(row, own, tolerance)]
        what = f"that of position {others[0]}" if others else "none of its prompt"
        yield f"{seen}: the embedding at position {start + index} is {what}"
        return


def _same_decode(found: Seen, wanted: Seen, tolerance: float, *, hidden: bool = True) -> Iterator[str]:
    """Whether two decode rows ask for the same; ``hidden``: also for the same hidden states."""
    if _apart(found.own, wanted.own, tolerance):
        yield f"{found}: another embedding"
    parts = (found.mtp_inputs or (None, None), wanted.mtp_inputs or (None, None))
    names = ("hidden states", "text step")
    for name, one, other in list(zip(names, *parts, strict=True))[0 if hidden else 1 :]:
        if _apart(one, other, tolerance):
            yield f"{found}: another {name} in mtp_inputs"


def _difference(found: Any, wanted: Any, path: str = "") -> str:
    """The first place at which two stored values differ, or nothing."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        for key in dict.fromkeys([*wanted, *found]):
            if key not in found or key not in wanted:
                return f"{path}{key} is stored by one of them only"
            if inner := _difference(found[key], wanted[key], f"{path}{key}."):
                return inner
        return ""
    if hasattr(found, "dtype") and hasattr(wanted, "dtype"):
        same = found.dtype == wanted.dtype and not _apart(found, wanted, 0)
    else:
        same = type(found) is type(wanted) and (found is wanted or bool(found == wanted))
    return "" if same else f"{path.rstrip('.')} differs"


# The cases.


def _results(make: MakeBench, name: str) -> Iterator[str]:
    """A strict runner refuses odd results itself, with the clause."""
    for batched in (False, True):
        bench = make(batched=batched, strict=True)
        request = bench.arrive(name)
        length = bench.prompt_len(request)
        prompt(bench, request, [length - 1, 1])
        decode(bench, request, 0, 2)
        bench.step(bench.row(request, length + 2, 2))
    yield from ()


def _tail(make: MakeBench, name: str) -> Iterator[str]:
    bench = make()
    request, reference = whole(bench, name)
    tolerance, length = bench.subject.tolerance, len(reference)
    (wanted,) = decode(bench, request, 0, 1)
    chunked = bench.arrive(name)
    *_, tail = prompt(bench, chunked, [length - 1, 1])
    yield from _is_slice(tail, reference, tolerance)
    (first,) = decode(bench, chunked, 0, 1)
    yield from (f"after a tail, {told}" for told in _same_decode(first, wanted, tolerance))


def _chunks(make: MakeBench, name: str) -> Iterator[str]:
    bench = make()
    return in_chunks(lambda: bench, name, *chunkings(bench.prompt_len(bench.arrive(name))))


def in_chunks(make: MakeBench, name: str, *cuts: Chunks) -> Iterator[str]:
    """Whether a prompt in chunks, cut in each of these ways, and the decode step behind it are those of the whole."""
    bench = make()
    request, reference = whole(bench, name)
    (wanted,) = decode(bench, request, 0, 1)
    tolerance = bench.subject.tolerance
    if not any(_apart(row, reference[0], tolerance) for row in reference[1:]):
        yield "its prompt has one and the same embedding everywhere, so that no chunk can be wrong"
    for chunks in cuts:
        request = bench.arrive(name)
        told = [told for seen in prompt(bench, request, chunks) for told in _is_slice(seen, reference, tolerance)]
        (first,) = decode(bench, request, 0, 1)
        told += _same_decode(first, wanted, tolerance)
        if told:
            yield f"in chunks of {', '.join(map(str, chunks))}: {told[0]}"
        bench.finish(request)


def _cached(make: MakeBench, name: str) -> Iterator[str]:
    bench = make()
    _, reference = whole(bench, name)
    length = len(reference)
    for known in dict.fromkeys((length - 1, length // 2)):
        (seen,) = bench.step(bench.row(bench.arrive(name), known, length - known))
        yield from _is_slice(seen, reference, bench.subject.tolerance)


def _replay(make: MakeBench, name: str) -> Iterator[str]:
    bench = make()
    for chunks in ("whole", "with a tail"):
        request, reference = whole(bench, name)
        length = len(reference)
        decode(bench, request, 0, 2)
        again = prompt(bench, request, [length] if chunks == "whole" else [length - 1, 1])
        told = [told for seen in again for told in _is_slice(seen, reference, bench.subject.tolerance)]
        if told:
            yield f"read again after 2 outputs, {chunks}: {told[0]}"


def _crossing(make: MakeBench, name: str) -> Iterator[str]:
    """The rows of a crossing span that lie behind the prompt: each has an embedding, and none is an older step's."""
    from omni_npu_phase.conformance.recording_model import UNTOUCHED

    bench = make()
    request = bench.arrive(name)
    length = bench.prompt_len(request)
    (seen,) = bench.step(bench.row(request, 0, length + 2))
    if len(seen.own) < seen.row.span:
        yield f"{seen}: {len(seen.own)} embedding rows; nothing for positions {len(seen.own)} to {seen.row.span - 1}"
        return
    for position, embeds in enumerate(seen.own[length:], length):
        if bool((embeds == UNTOUCHED).all()):
            yield f"{seen}: the embedding at position {position} is what the runner's buffer held before the step"
            return


def _resume(how: str, make: MakeBench, name: str) -> Iterator[str]:
    """Whether a request goes on as if nothing had been, once its prompt and two outputs were read again."""
    bench = make()
    request, _ = whole(bench, name)
    length = bench.prompt_len(request)
    wanted = decode(bench, request, 0, 3)[-1]
    resumed, _ = whole(bench, name)
    decode(bench, resumed, 0, 2)
    if how == "as a crossing span":
        bench.step(bench.row(resumed, 0, length + 2))
    else:
        prompt(bench, resumed, [length])
        if how == "as one span":
            bench.step(bench.row(resumed, length, 2))
        else:
            decode(bench, resumed, 0, 2)
    (found,) = decode(bench, resumed, 2, 1)
    # Hidden states of outputs that are read again come from other embeddings than MTP's: no hook can help that.
    for told in _same_decode(found, wanted, bench.subject.tolerance, hidden=False):
        yield f"after 2 outputs were read again {how}, {told}"


def _batched(make: MakeBench, name: str) -> Iterator[str]:
    scalar, batched = make(batched=False), make(batched=True)
    if not batched.batched:
        raise NotShownError("the model has no preprocess_decode_batch")
    tolerance = batched.subject.tolerance
    names = [name, *(other for other in batched.subject.requests if other != name)]
    requests = {bench: [whole(bench, each)[0] for each in names] for bench in (scalar, batched)}
    for step in range(3):
        rows = {
            bench: bench.step(*(bench.row(each, bench.prompt_len(each) + step, 1) for each in requests[bench]))
            for bench in (scalar, batched)
        }
        for index, (one, other) in enumerate(zip(rows[batched], rows[scalar], strict=True)):
            yield from (f"{names[index]}, {told} than by preprocess" for told in _same_decode(one, other, tolerance))
            if _apart(one.embeds, other.embeds, tolerance):
                yield f"{names[index]}, {one}: the model forward gets another embedding than by preprocess"
            stored = (bench.stored(requests[bench][index]) for bench in (batched, scalar))
            if told := _difference(next(stored), next(stored)):
                yield f"{names[index]}, {one}: {told} from what preprocess stores"


def _company(make: MakeBench, name: str) -> Iterator[str]:
    """A request beside others, in rows that change places, against the same one alone."""
    bench = make()
    others = [other for other in bench.subject.requests if other != name]
    if not others:
        raise NotShownError("there is one request only")
    alone, reference = whole(bench, name)
    length = len(reference)
    wanted = decode(bench, alone, 0, 2)
    decoding, _ = whole(bench, others[0])
    joining, request = bench.arrive(others[-1]), bench.arrive(name)
    tolerance, past = bench.subject.tolerance, bench.prompt_len(decoding)

    def beside(step: int, row: Row, *more: Row) -> Seen:
        rows = [bench.row(decoding, past + step, 1), row, *more]
        seen = bench.step(*(rows[::-1] if step % 2 else rows))
        return next(each for each in seen if each.row is row)

    chunk = beside(0, bench.row(request, 0, length - 1), bench.row(joining, 0, 2))
    yield from _is_slice(chunk, reference, tolerance)
    tail = beside(1, bench.row(request, length - 1, 1), bench.row(joining, 2, 1))
    yield from _is_slice(tail, reference, tolerance)
    for step, other in enumerate(wanted):
        found = beside(2 + step, bench.row(request, length + step, 1))
        yield from (f"beside other requests, {told}" for told in _same_decode(found, other, tolerance))


def _everything(make: MakeBench, name: str) -> Iterator[Seen]:
    """Rows of every phase, by both hooks."""
    for batched in (False, True):
        bench = make(batched=batched)
        request = bench.arrive(name)
        length = bench.prompt_len(request)
        yield from prompt(bench, request, [length - 1, 1])
        yield from decode(bench, request, 0, 2)
        yield from bench.step(bench.row(request, length + 2, 2))


def _owned(make: MakeBench, name: str) -> Iterator[str]:
    for seen in _everything(make, name):
        returned = [field for field in contract.FIELDS if isinstance(seen.update, Mapping) and field in seen.update]
        if returned:
            yield f"{seen}, {seen.hook}: returns {', '.join(returned)}"
        if seen.changed:
            yield f"{seen}, {seen.hook}: changes {', '.join(seen.changed)}"


def _offered(make: MakeBench, name: str) -> Iterator[str]:
    for seen in _everything(make, name):
        if seen.row.prefill and seen.mtp_inputs is not None:
            yield f"{seen}: returns mtp_inputs for a {seen.row.phase} row"


_ALL = (
    ModelCase("results", "hooks return what E5, E5b and E7 say for every span, scalar and batched", _results),
    ModelCase("tail", "a one-token prefill tail is a piece of the prompt, and no decode step", _tail),
    ModelCase("chunks", "a prompt in any chunks is the whole prompt, and so is what follows", _chunks),
    ModelCase("cached", "a prompt that begins behind cached tokens begins there", _cached),
    ModelCase("replay", "a prompt read again from C=0 is the prompt again", _replay),
    ModelCase("crossing", "a span across the prompt boundary has an embedding for each of its tokens", _crossing),
    ModelCase("resume", "outputs read again as one span move nothing on", partial(_resume, "as one span")),
    ModelCase(
        "resume-crossing",
        "a span across the prompt boundary moves nothing on",
        partial(_resume, "as a crossing span"),
    ),
    ModelCase(
        "resume-one-by-one",
        "outputs read again one by one move nothing on (E3)",
        partial(_resume, "one by one"),
    ),
    ModelCase("batched", "preprocess_decode_batch does for its rows what preprocess does", _batched),
    ModelCase("company", "a row does not depend on who shares its batch, nor on its place in it", _company),
    ModelCase("owned-fields", "runner-owned fields are neither returned nor changed", _owned),
    ModelCase("mtp-inputs", "prefill rows return no mtp_inputs", _offered),
)
CASES: Mapping[str, ModelCase] = {case.id: case for case in _ALL}
"""Every case, in the order reports show them."""
