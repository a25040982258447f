# SPDX-License-Identifier: Apache-2.0
"""The bench for a model's own hooks: the installed V1 runner with the mixin, and a watch on each hook.

Routing, buffers, MTP and what hooks store are the runner's; only the model forward is not run. In its place every row's
hidden states are what its hook returned for it, so that they depend on nothing but the row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any
from unittest import mock

import torch

from omni_npu_phase import contract
from omni_npu_phase.conformance.bench import Bench, Sizes, single_stage
from omni_npu_phase.conformance.models.subject import ModelUnderTest
from omni_npu_phase.conformance.scenarios import GIVEN, Row, Setting, SetupError, Step, Variant, row
from omni_npu_phase.settings import replays_exactly
from omni_npu_phase.step.mtp import output_key
from omni_npu_phase.step.route import BATCHED_HOOK, SCALAR_HOOK

_NUMBERS = count()


@dataclass(slots=True)
class Seen:
    """What a model did with one row. Tensors are copies on the host, made when its hook returned."""

    row: Row
    hook: str
    own: torch.Tensor
    """The hook's embeddings, of shape (span, hidden)."""
    update: Any
    """The hook's updates, without ``mtp_inputs``."""
    mtp_inputs: tuple[torch.Tensor, torch.Tensor] | None
    """Hidden states and text step, of shape (hidden,) each."""
    changed: Sequence[str]
    """Runner-owned fields that the hook changed in the live buffer it was handed."""
    embeds: torch.Tensor | None = None
    """What the model forward would get: MTP's embedding where the row went to MTP."""
    codes: Any = None

    def __str__(self) -> str:
        return str(self.row)


class ModelBench(Bench):
    """A runner of ``cls`` around the model. Every request that :meth:`arrive` names starts from nothing.

    ``batched``: whether the model is seen with its batched hook. ``strict``: whether the runner refuses what the
    released one tolerates.
    """

    def __init__(self, subject: ModelUnderTest, cls: type, *, batched: bool = True, strict: bool = False) -> None:
        self.subject, model = subject, subject.model
        self.batched = batched and callable(getattr(model, BATCHED_HOOK, None))
        self.names: dict[str, str] = {}
        has_mtp = callable(getattr(model, "talker_mtp", None))
        longest = max(len(request.prompt) + len(request.outputs) for request in subject.requests.values())
        sizes = Sizes(
            tokens=longest * len(subject.requests) + 8,
            length=longest + 8,
            hidden=subject.hidden_size,
            dtype=subject.dtype,
        )
        variant = Variant("batched", has_mtp, "strict" if strict else "on")
        super().__init__(cls, model, variant, torch.device(subject.device), sizes, Setting(replay=replays_exactly()))

    def arrive(self, name: str) -> str:
        """The id of a new request like the one of this name. No other of this process has it, as in an engine."""
        request_id = f"{name}-{next(_NUMBERS)}"
        self.names[request_id] = name
        return request_id

    def finish(self, *request_ids: str) -> None:
        """Finish these requests, or all: the model is told first, then the runner forgets them, as the released one."""
        finished = set(request_ids or self.names)
        if finished and hasattr(self.model, "on_requests_finished"):
            self.model.on_requests_finished(finished)
        for request_id in finished:
            del self.names[request_id]
            self.runner.input_batch.remove_request(request_id)
            self.runner.requests.pop(request_id, None)
            self.runner.model_intermediate_buffer.pop(request_id, None)

    def prompt_len(self, request_id: str) -> int:
        return len(self.subject.requests[self.names[request_id]].prompt)

    def row(self, request_id: str, computed: int, span: int) -> Row:
        return row(request_id, self.prompt_len(request_id), computed, span)

    def step(self, *rows: Row) -> list[Seen]:
        """One step of these rows, in this order.

        Raises whatever the model raises, ContractError (E5, E5b, E7), and SetupError where this bench's runner is not
        complete enough.
        """
        try:
            return self._step(rows)
        except Exception as error:
            if missing := self.missing(error):
                raise SetupError(f"{type(self.runner).__qualname__} cannot drive a model here: {missing}") from error
            raise

    def _step(self, rows: Step) -> list[Seen]:
        offsets = self.schedule(rows)
        seen: dict[str, Seen] = {}
        errors: list[Exception] = []
        with torch.inference_mode(), single_stage(), self._watched(rows, seen, errors):
            outputs = self.preprocess(rows, offsets[-1])
            for row, start in zip(rows, offsets, strict=False):
                embeds = outputs[1][start : start + row.span].to("cpu", copy=True)
                # No hook sees a row that was given back: its embeddings are the forward pass's.
                own = seen.setdefault(row.request, Seen(row, GIVEN, embeds, {}, None, ()))
                own.embeds = embeds
                key, qualifier = output_key(self.model)
                own.codes = copy.deepcopy(self.live()[row.request].get(key, {}).get(qualifier))
                given = own.own[: row.span]
                self.hidden[start : start + len(given)].copy_(given)
            self.postprocess(rows)
        if errors:
            # The released runner would log what postprocess raises, and go on.
            raise errors[0]
        return [seen[row.request] for row in rows]

    def stored(self, request_id: str) -> dict[str, Any]:
        """A request's live buffer as it is, without what the runner writes into it."""
        written = (*contract.FIELDS, *self._keywords())
        return {key: value for key, value in self.live()[request_id].items() if key not in written}

    def _keywords(self) -> Sequence[str]:
        from omni_npu_phase.releases import runtime_of
        from omni_npu_phase.step.port import released_classes

        return runtime_of(released_classes(type(self.runner))).keywords.split()

    # The scheduler's side of a row is that of its request.

    def token(self, row: Row, position: int) -> int:
        request = self.subject.requests[self.names[row.request]]
        tokens = [*request.prompt, *request.outputs]
        return tokens[position] if position < len(tokens) else tokens[-1]

    def new_info(self, request: str) -> dict[str, Any]:
        return copy.deepcopy(dict(self.subject.requests[self.names[request]].information))

    def new_request(self, row: Row) -> dict[str, Any]:
        from vllm.sampling_params import SamplingParams

        return {
            "prompt_token_ids": self.prompt(row),
            "prompt_embeds": None,
            "sampling_params": SamplingParams(temperature=0.0, max_tokens=self.sizes.length),
            "num_computed_tokens": row.num_computed,
        }

    # The watch.

    @contextmanager
    def _watched(self, rows: Step, seen: dict[str, Seen], errors: list[Exception]) -> Iterator[None]:
        by_request = {row.request: row for row in rows}

        def scalar(original: Callable[..., Any], *args: Any, **info: Any) -> Any:
            result = original(*args, **info)
            row = by_request[info["request_id"]]
            update = dict(result[-1]) if isinstance(result[-1], dict) else result[-1]
            inputs = update.pop(contract.MTP_INPUTS, None) if isinstance(update, dict) else None
            seen[row.request] = Seen(row, SCALAR_HOOK, _host(result[1]), update, _pair(inputs), ())
            return result

        def batch(original: Callable[..., Any], *args: Any, req_infos: Sequence[dict[str, Any]], **more: Any) -> Any:
            before = [{name: info[name] for name in contract.FIELDS} for info in req_infos]
            result = original(*args, req_infos=req_infos, **more)
            for index, (info, fields) in enumerate(zip(req_infos, before, strict=True)):
                changed = [name for name, value in fields.items() if info.get(name) is not value]
                row = by_request[info["request_id"]]
                inputs = (result[2][index], result[3][index]) if len(result) == 5 else None
                own = _host(result[1][index : index + 1])
                seen[row.request] = Seen(row, BATCHED_HOOK, own, result[-1][index], _pair(inputs), changed)
            return result

        def postprocess(original: Callable[..., Any], *args: Any, **info: Any) -> Any:
            try:
                return original(*args, **info)
            except Exception as error:  # noqa: BLE001 - raised where the step ends
                errors.append(error)
                return {}

        watches = {SCALAR_HOOK: scalar, BATCHED_HOOK: batch, "postprocess": postprocess}
        with ExitStack() as patches:
            for name, watch in watches.items():
                original = getattr(self.model, name, None)
                if callable(original):
                    patches.enter_context(mock.patch.object(self.model, name, _through(watch, original)))
            if not self.batched and hasattr(self.model, BATCHED_HOOK):
                patches.enter_context(mock.patch.object(self.model, BATCHED_HOOK, None))
            yield


def _through(watch: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **keywords: watch(original, *args, **keywords)


def _host(value: Any) -> torch.Tensor:
    # A result that is no tensor is refused by the runner, in words of its own.
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else torch.empty(0)


def _pair(inputs: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    if inputs is None or len(inputs) != 2:
        return None
    hidden, text_step = (_host(part).reshape(-1) for part in inputs)
    return hidden, text_step
