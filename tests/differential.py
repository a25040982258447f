# SPDX-License-Identifier: Apache-2.0
"""The released runner as oracle: the same random steps, and the same malformed results, on it and on the mixin.

Everything is drawn from a seed. A model's values follow from the token ids that it is given, and every tensor is its
own, so that the released runner is right wherever its results do not lie in memory that is written again.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from omni_npu_phase.conformance.bench import Bench, Sizes, single_stage
from omni_npu_phase.conformance.recording_model import UNTOUCHED
from omni_npu_phase.conformance.scenarios import Row, Step, Variant, row
from omni_npu_phase.contract import MTP_INPUTS

HIDDEN, CODES = 8, 3
REQUESTS = ("a", "b", "c", "d", "e", "f")
_SIZES = Sizes(tokens=64, length=96, requests=16, hidden=HIDDEN)
Fault = Callable[[tuple[Any, ...]], Any]


class Model:
    """Hooks with every kind of value that a hook may hand over; ``fault`` spoils the result of the call ``spoilt``."""

    has_preprocess = has_postprocess = True
    mtp_hidden_size = HIDDEN
    replace_runtime_additional_information = False
    gpu_resident_buffer_keys = frozenset({("codes", "audio"), ("state", "kept")})
    talker_mtp_accepts_per_row_generators = True

    def __init__(self, variant: Variant, device: torch.device) -> None:
        self.device, self.seed, self.calls, self.spoilt = device, 0, 0, -1
        self.fault: Fault = lambda result: result
        if variant.hook == "batched":
            self.preprocess_decode_batch = self._batch
        if variant.mtp:
            self.talker_mtp = self._mtp
        self._has_mtp = variant.mtp

    def preprocess(self, input_ids: torch.Tensor, input_embeds: torch.Tensor, **info: Any) -> Any:
        own = self._random(input_ids)
        updates = self._updates(own, info)
        if self._has_mtp and info["_omni_num_computed_tokens"] >= info["_omni_prompt_len"] and len(input_ids) == 1:
            updates[MTP_INPUTS] = (self._rows(own, 1), self._rows(own, 1))
        ids = input_ids if own.random() < 0.5 else (input_ids + 1).to(own.choice([torch.int32, torch.int64]))
        embeds = self._rows(own, len(input_ids)) + (input_embeds if own.random() < 0.3 else 0)
        return self._spoilt((ids, embeds, updates))

    def _batch(self, input_ids: torch.Tensor, req_infos: list[dict[str, Any]]) -> Any:
        own = self._random(input_ids)
        count = len(req_infos)
        updates = [self._updates(own, info) for info in req_infos]
        ids = input_ids if own.random() < 0.5 else input_ids + 1
        parts = [self._rows(own, count) for _ in range(3 if self._has_mtp else 1)]
        return self._spoilt((ids, *parts, updates))

    def _mtp(self, ids: Any, embeds: Any, hidden: Any, text: Any, **keywords: Any) -> Any:
        generators = keywords.get("generators") or [keywords.get("generator")] * len(ids)
        drawn = [
            None if each is None else torch.randint(99, (1,), generator=each, device=each.device) for each in generators
        ]
        noise = [0 if each is None else int(each) for each in drawn]
        codes = torch.stack([ids.long(), (hidden + text).sum(1).long(), torch.tensor(noise).to(ids.device)], dim=1)
        return embeds + 2 * hidden + 3 * text, codes

    def postprocess(self, hidden_states: torch.Tensor, **info: Any) -> dict[str, Any]:
        return {"last": {"hidden": hidden_states[-1:].clone()}}

    def _random(self, ids: torch.Tensor) -> random.Random:
        return random.Random(f"{self.seed} {ids.tolist()}")

    def _rows(self, own: random.Random, count: int) -> torch.Tensor:
        values = [[own.randrange(-64, 64) / 4 for _ in range(HIDDEN)] for _ in range(count)]
        return torch.tensor(values).reshape(count, HIDDEN).to(self.device)

    def _updates(self, own: random.Random, info: dict[str, Any]) -> dict[str, Any]:
        known = info.get("state", {}).get("count", 0)

        def tensor() -> torch.Tensor:
            return torch.full((own.randrange(1, 4),), own.randrange(99)).to(self.device)

        values: dict[str, Any] = {
            "count": known + 1, "kept": tensor(), "x": tensor(), "list": [tensor(), 1, "text"], "none": None,
            "deep": {0: tensor(), "pair": (tensor(), 2)},
        }  # fmt: skip
        chosen = {name: value for name, value in values.items() if own.random() < 0.6}
        flat = {"top": own.choice([1, "text", None, tensor(), [tensor()], (tensor(),)])}
        return own.choice([{"state": chosen}, {"state": chosen, **flat}, flat, {}])

    def _spoilt(self, result: tuple[Any, ...]) -> Any:
        self.calls += 1
        return self.fault(result) if self.calls - 1 == self.spoilt else result


# Malformed results.


def _tensor_faults(own: random.Random, value: torch.Tensor) -> Any:
    return own.choice(
        [
            lambda: value[0],
            lambda: value[:1],
            lambda: value[-1:],
            lambda: value[:0],
            lambda: value[:-1],
            lambda: value[..., :1],
            lambda: value[..., :-1],
            lambda: torch.cat([value, value]),
            lambda: torch.cat([value, value], dim=-1),
            lambda: value.unsqueeze(0),
            lambda: value.unsqueeze(1),
            lambda: value.unsqueeze(-1),
            lambda: value.reshape(-1),
            lambda: value.t() if value.ndim == 2 else value.reshape(1, -1),
            lambda: value.to(own.choice([torch.int64, torch.int32, torch.float64, torch.bfloat16, torch.bool])),
            lambda: value.reshape(-1)[0],
            lambda: torch.empty_like(value, device="meta"),
            lambda: value.to("cpu"),
            lambda: value.to(torch.complex64),
            lambda: value.clone().requires_grad_() if value.is_floating_point() else value.float(),
            lambda: value.flip(0).t().contiguous().t() if value.ndim == 2 else value.flip(0),
            lambda: None,
            lambda: value.tolist(),
            lambda: value.cpu().numpy(),
            # As ids, MTP would be given the number and the step's own buffer nothing.
            lambda: 3 if value.is_floating_point() else "text",
            lambda: "text",
        ]
    )()


def _update_faults(own: random.Random, value: Any) -> Any:
    if isinstance(value, list):
        return own.choice(
            [
                lambda: value[:-1],
                lambda: [*value, {}],
                lambda: tuple(value),
                lambda: iter(value),
                lambda: None,
                lambda: [None, *value[1:]],
                lambda: ["text", *value[1:]],
                lambda: dict(enumerate(value)),
            ]
        )()
    pair = value.get(MTP_INPUTS)
    if pair is not None and own.random() < 0.75:
        parts = list(pair)
        which = own.randrange(2)
        parts[which] = _tensor_faults(own, parts[which])
        other = own.choice([tuple(parts)] * 6 + [parts, torch.ones(2, HIDDEN), pair[:1], (*pair, 1), None])
        return {**value, MTP_INPUTS: other}
    without = {key: inner for key, inner in value.items() if key != MTP_INPUTS}
    return own.choice([None, [], "text", without, torch.ones(2), [(1, 2)]])


def fault_of(own: random.Random) -> Fault:
    """One way to spoil a hook's result: one or two of its parts, their number, or all of it."""
    seed = own.random()

    def spoil(result: tuple[Any, ...]) -> Any:
        draw = random.Random(seed)
        if draw.random() < 0.12:
            return draw.choice([None, result[:-1], (*result, None), list(result), iter(result), 5, {}, result[0]])
        values = list(result)
        for _ in range(draw.choice([1, 1, 2])):
            which = draw.randrange(len(values))
            if isinstance(values[which], torch.Tensor):
                values[which] = _tensor_faults(draw, values[which])
            elif isinstance(values[which], (dict, list)) and which == len(values) - 1:
                values[which] = _update_faults(draw, values[which])
        return tuple(values)

    return spoil


# Steps.


def steps_of(own: random.Random) -> tuple[list[Step], dict[str, int]]:
    """Up to four steps of requests that begin anywhere and go on, in any order; and the seeds of some requests."""
    prompts = {request: own.randrange(1, 5) for request in REQUESTS}
    progress = {request: own.randrange(0, prompts[request] + 3) for request in REQUESTS}
    steps = []
    for _ in range(own.randrange(1, 5)):
        rows: list[Row] = []
        for request in own.sample(REQUESTS, own.randrange(1, len(REQUESTS) + 1)):
            span = own.choice([1, 1, 1, 1, 2, 3])
            rows.append(row(request, prompts[request], progress[request], span))
            progress[request] += span
        steps.append(tuple(rows))
    return steps, {request: own.randrange(99) for request in REQUESTS if own.random() < 0.2}


@dataclass(slots=True)
class Outcome:
    """What a run left: of every step what the forward gets, then every live buffer; the error, and the warnings."""

    left: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def without_older_steps(self) -> list[Any]:
        """What was left, with zeros where an embedding row is as it was before the step: no hook's, an older step's."""
        steps = [entry for entry in self.left if isinstance(entry, tuple)]
        older, zeros = [UNTOUCHED] * HIDDEN, [0.0] * HIDDEN
        rest = self.left[len(steps) :]
        return [(ids, [zeros if each == older else each for each in embeds]) for ids, embeds in steps] + rest


class Driven:
    """One runner of a class, used for every seed."""

    def __init__(self, cls: type, variant: Variant, device: torch.device) -> None:
        self.model = Model(variant, device)
        indices = {request: number for number, request in enumerate(REQUESTS, 1)}
        with single_stage():
            self.bench = Bench(cls, self.model, variant, device, _SIZES, indices=indices)

    def run(self, seed: int, *, malformed: bool = False) -> Outcome:
        own, bench, model = random.Random(seed), self.bench, self.model
        runner = bench.runner
        steps, seeds = steps_of(own)
        for request in list(bench.runner.input_batch.req_id_to_index):
            runner.input_batch.remove_request(request)
        runner.input_batch.condense()
        for known in (runner.requests, runner.model_intermediate_buffer, bench.sampled):
            known.clear()
        runner.__dict__.pop("_talker_mtp_generators", None)
        for buffer in bench.mtp_inputs() if bench.variant.mtp else ():
            buffer.zero_()
        object.__setattr__(bench.setting, "seeds", seeds)
        model.seed, model.calls, model.spoilt = seed, 0, own.randrange(6) if malformed else -1
        model.fault = fault_of(own)
        # What is tolerated is said once a class of models.
        model.__class__ = type(f"Model{seed}", (Model,), {})
        outcome = Outcome()
        with single_stage(), _warned(outcome.warnings), torch.inference_mode():
            try:
                for rows in steps:
                    outcome.left.append(self._take(rows))
            except Exception as error:  # noqa: BLE001 - whatever the runner dies of is its result
                outcome.error = error
        outcome.left.append({request: _plain(info) for request, info in runner.model_intermediate_buffer.items()})
        return outcome

    def _take(self, rows: Step) -> Any:
        *offsets, total = self.bench.schedule(rows)
        ids, embeds, *_ = self.bench.preprocess(rows, total)
        left = ids[:total].tolist(), embeds[:total].tolist()
        for start, each in zip(offsets, rows, strict=True):
            self.bench.hidden[start : start + each.span].fill_(each.num_computed)
        self.bench.postprocess(rows)
        return left


def _plain(value: Any) -> Any:
    """A value that compares by content and kind. Released NPU runners leave it on the device."""
    if isinstance(value, torch.Tensor):
        content = None if value.device.type == "meta" else value.tolist()
        return "tensor", str(value.dtype), tuple(value.shape), content
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(_plain, value)]
    return value


@contextmanager
def _warned(into: list[str]) -> Iterator[None]:
    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            into.append(record.getMessage())

    logger, handler = logging.getLogger("omni_npu_phase"), Collect(logging.WARNING)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
