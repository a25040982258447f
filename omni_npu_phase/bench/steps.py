# SPDX-License-Identifier: Apache-2.0
"""Steps of a runner, one after the other and without an engine: its requests have read their prompts, and decode.

Everything a step leaves behind is there for the next one. Between two steps the driver does what an engine does:
the scheduler's side of the step, and what follows the model forward, whose hidden states are the same in every step.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from omni_npu_phase.bench import models
from omni_npu_phase.bench.models import Updates
from omni_npu_phase.conformance.bench import Bench, Sizes, scheduler_output, single_stage
from omni_npu_phase.conformance.scenarios import MTP, PREFILL, Hook, Row, Step, Variant, row

Mix = Literal["decode", "mixed"]
CHUNK = 512
"""Tokens of the prompt chunk in a mixed step."""
_LAP = {"decode": 48, "mixed": 6}
"""Steps until every request is put back to where its prompt ended, before its text or the long prompt ends."""
_HOOKS = ("preprocess_batch", "preprocess", "preprocess_decode_batch", "talker_mtp")


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of step: ``rows`` requests that decode, and in a ``mixed`` step one more in their middle.

    That one reads a chunk of ``chunk`` tokens of its prompt. ``hidden``: columns of an embedding, of type ``dtype``.
    ``updates``: whose hooks. ``resident``: whether codes stay on the device where the model would have it.
    """

    rows: int
    hidden: int
    hook: Hook
    mix: Mix = "decode"
    updates: Updates = "toy"
    resident: bool = True
    dtype: torch.dtype = torch.bfloat16
    chunk: int = CHUNK

    def talker(self, device: torch.device) -> models.Talker:
        """Its model, ready to be called."""
        return models.talker(self.updates, self.hidden, self.hook, self.resident, self.dtype, device)


class Steps(Bench):
    """A runner of ``cls`` with a case's requests, before a step: :meth:`take` it, :meth:`finish` it, and so on."""

    def __init__(self, cls: type, case: Case, device: torch.device, talker: models.Talker | None = None) -> None:
        self.case, self.talker = case, talker or case.talker(device)
        prompts = self._prompts()
        sizes = Sizes.of((prompts, self._rows(_LAP[case.mix])), case.hidden, case.dtype)
        super().__init__(cls, self.talker.model, Variant(case.hook, True), device, sizes)
        # Looked up in each call, so that who stands around the hooks stands around this too.
        self.runner.talker_mtp = lambda *inputs, **keywords: self.model.talker_mtp(*inputs, **keywords)
        self.hidden.normal_()
        self._place(prompts)
        self.take()
        self._leave()
        self._after_prompts = copy.deepcopy(self.runner.model_intermediate_buffer)
        self._number = 0
        self._prepare()

    def _prompts(self) -> Step:
        """Every short prompt as a whole, and the long one's first chunk."""
        length = self.talker.short.length
        return self._with_chunk([row(f"r{n}", length, 0, length, PREFILL) for n in range(self.case.rows)], 0)

    def _rows(self, number: int) -> Step:
        """The step of this number in a lap, from 1 on, in batch order."""
        length = self.talker.short.length
        decodes = [row(f"r{n}", length, length + number - 1, 1, MTP) for n in range(self.case.rows)]
        return self._with_chunk(decodes, number)

    def _with_chunk(self, rows: list[Row], number: int) -> Step:
        if self.case.mix == "mixed":
            size = self.case.chunk
            rows.insert(len(rows) // 2, row("prompt", self.talker.long.length, number * size, size, PREFILL))
        return tuple(rows)

    def _place(self, rows: Step) -> None:
        self.rows, self._tokens, self._scheduled = rows, self.schedule(rows)[-1], scheduler_output(rows)

    def take(self) -> None:
        """The step up to the model forward, which is what is measured."""
        self.runner._preprocess(self._scheduled, self._tokens)

    def finish(self) -> None:
        """All that lies between two steps."""
        self._leave()
        self._prepare()

    def _leave(self) -> None:
        """What follows the model forward: the model's outputs, and its postprocess hook."""
        if hasattr(self.model, "make_omni_output"):
            infos = self.runner._gather_runtime_additional_information()
            self.model.make_omni_output(self.hidden[: self._tokens], model_intermediate_buffer=infos)
        self.postprocess(self.rows)

    def _prepare(self) -> None:
        """The scheduler's side of the next step."""
        if self._number == _LAP[self.case.mix]:
            self._number = 0
            self.runner.model_intermediate_buffer = copy.deepcopy(self._after_prompts)
        self._number += 1
        self._place(self._rows(self._number))

    # What requests are made of.

    def token(self, row: Row, position: int) -> int:
        return 7

    def new_info(self, request: str) -> dict[str, Any]:
        prompt = self.talker.long if request == "prompt" else self.talker.short
        return copy.deepcopy(dict(prompt.information))


@contextlib.contextmanager
def around_hooks(model: Any, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Have ``around`` stand around every hook of a model, and around its talker MTP."""
    own = {name: vars(model)[name] for name in _HOOKS if name in vars(model)}
    hooks = {name: hook for name in _HOOKS if callable(hook := getattr(model, name, None))}
    for name, hook in hooks.items():
        setattr(model, name, around(hook))
    try:
        yield
    finally:
        for name in hooks:
            setattr(model, name, own[name]) if name in own else delattr(model, name)


@contextlib.contextmanager
def engineless() -> Iterator[None]:
    """What a step needs of its surroundings."""
    with single_stage(), torch.inference_mode():
        yield
