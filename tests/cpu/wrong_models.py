# SPDX-License-Identifier: Apache-2.0
"""Broken talkers, each with the cases of the model kit that must notice: the example's talker with one mistake."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from examples.out_of_tree_model.toy_talker import ToyTalker, under_test
from omni_npu_phase.conformance.models.cases import CASES
from omni_npu_phase.conformance.models.subject import ModelUnderTest
from omni_npu_phase.contract import FIELDS, IS_PREFILL, MTP_INPUTS, NUM_COMPUTED, PROMPT_LEN


class DecidesBySpan(ToyTalker):
    """One token is a decode step."""

    def preprocess(self, input_ids: torch.Tensor, input_embeds: Any, **info: Any) -> Any:
        info[IS_PREFILL] = len(input_ids) > 1
        # What would be there if this were a decode step.
        info.setdefault("talker", {"hidden": torch.zeros(1, self.mtp_hidden_size)})
        return super().preprocess(input_ids, input_embeds, **info)


class SlicesByItsOwnCounter(ToyTalker):
    """The prompt is sliced from where the last slice ended."""

    def preprocess(self, input_ids: torch.Tensor, input_embeds: Any, **info: Any) -> Any:
        if not info[IS_PREFILL]:
            return super().preprocess(input_ids, input_embeds, **info)
        start = info.get("counter", 0)
        ids, embeds, updates = super().preprocess(input_ids, input_embeds, **{**info, NUM_COMPUTED: start})
        return ids, embeds, {**updates, "counter": start + len(input_ids)}


class ReturnsTheWholePrompt(ToyTalker):
    """Whatever the chunk is."""

    def preprocess(self, input_ids: torch.Tensor, input_embeds: Any, **info: Any) -> Any:
        ids, embeds, updates = super().preprocess(input_ids, input_embeds, **info)
        return ids, self.text[info["phrase"]] if info[IS_PREFILL] else embeds, updates


class AnswersWithThePromptOnly(ToyTalker):
    """A span that goes beyond the prompt gets the prompt's rows, and no more."""

    def preprocess(self, input_ids: torch.Tensor, input_embeds: Any, **info: Any) -> Any:
        ids, embeds, updates = super().preprocess(input_ids, input_embeds, **info)
        return ids, embeds[: info[PROMPT_LEN] - info[NUM_COMPUTED]] if info[IS_PREFILL] else embeds, updates


class ReturnsWhatItWasGiven(ToyTalker):
    """A span that goes beyond the prompt gets, behind it, the rows that lay in the runner's buffer."""

    def preprocess(self, input_ids: torch.Tensor, input_embeds: Any, **info: Any) -> Any:
        ids, embeds, updates = super().preprocess(input_ids, input_embeds, **info)
        inside = info[PROMPT_LEN] - info[NUM_COMPUTED]
        return ids, torch.cat([embeds[:inside], input_embeds[inside:]]) if info[IS_PREFILL] else embeds, updates


class IgnoresItsPrompt(ToyTalker):
    """Whatever is read, no two places differ: nothing would show."""

    def preprocess(self, input_ids: torch.Tensor, input_embeds: Any, **info: Any) -> Any:
        ids, embeds, updates = super().preprocess(input_ids, input_embeds, **info)
        return ids, torch.zeros_like(embeds) if info[IS_PREFILL] else embeds, updates


class CountsDecodeCalls(ToyTalker):
    """The text moves on with every call of a decode hook, rewound when a prompt begins."""

    by_tokens = False

    def preprocess(self, input_ids: torch.Tensor, input_embeds: Any, **info: Any) -> Any:
        ids, embeds, updates = super().preprocess(input_ids, input_embeds, **info)
        if not info[IS_PREFILL] and (len(input_ids) == 1 or self.by_tokens):
            updates = {**updates, "calls": info.get("calls", 0) + len(input_ids)}
        return ids, embeds, updates

    def preprocess_decode_batch(self, *, input_ids: torch.Tensor, req_infos: Sequence[dict[str, Any]]) -> Any:
        *parts, _ = super().preprocess_decode_batch(input_ids=input_ids, req_infos=req_infos)
        return (*parts, [{"calls": info.get("calls", 0) + 1} for info in req_infos])

    def _mtp_inputs(self, info: dict[str, Any]) -> Any:
        return super()._mtp_inputs({**info, NUM_COMPUTED: info[PROMPT_LEN] + info.get("calls", 0)})


class CountsDecodeTokens(CountsDecodeCalls):
    """The same with every token of them."""

    by_tokens = True


class CountsBehindThePrompt(CountsDecodeCalls):
    """The text moves on with the tokens of a prefill span that lie behind the prompt."""

    def preprocess(self, input_ids: torch.Tensor, input_embeds: Any, **info: Any) -> Any:
        ids, embeds, updates = super().preprocess(input_ids, input_embeds, **info)
        behind = info[NUM_COMPUTED] + len(input_ids) - info[PROMPT_LEN]
        if info[IS_PREFILL] and behind > 0:
            updates = {**updates, "calls": info.get("calls", 0) + behind}
        return ids, embeds, updates


class BatchesInAnotherWay(ToyTalker):
    """The batched hook embeds as a prompt does."""

    def preprocess_decode_batch(self, *, input_ids: torch.Tensor, req_infos: Sequence[dict[str, Any]]) -> Any:
        ids, _, *parts = super().preprocess_decode_batch(input_ids=input_ids, req_infos=req_infos)
        return ids, self.text[input_ids], *parts


class BatchStoresMore(ToyTalker):
    """The batched hook stores what the scalar one does not."""

    def preprocess_decode_batch(self, *, input_ids: torch.Tensor, req_infos: Sequence[dict[str, Any]]) -> Any:
        *parts, updates = super().preprocess_decode_batch(input_ids=input_ids, req_infos=req_infos)
        return (*parts, [{**update, "talker": {"batched": True}} for update in updates])


class MixesRows(ToyTalker):
    """A batch of two and more gets its text steps in another order."""

    def preprocess_decode_batch(self, *, input_ids: torch.Tensor, req_infos: Sequence[dict[str, Any]]) -> Any:
        ids, embeds, hidden, text_step, updates = super().preprocess_decode_batch(
            input_ids=input_ids, req_infos=req_infos
        )
        return ids, embeds, hidden, text_step.roll(1, 0), updates


class RemembersTheLastRow(ToyTalker):
    """The place in the prompt is kept in the model, for whichever request comes next."""

    place = 0

    def preprocess(self, input_ids: torch.Tensor, input_embeds: Any, **info: Any) -> Any:
        if info[IS_PREFILL]:
            self.place = 0 if info[NUM_COMPUTED] == 0 else self.place
            info[NUM_COMPUTED] = self.place if info[NUM_COMPUTED] else 0
        self.place += len(input_ids)
        return super().preprocess(input_ids, input_embeds, **info)


class LatchesById(ToyTalker):
    """What a request's first chunk was is remembered for good, by its id: later chunks begin where that one did."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, int] = {}

    def preprocess(self, input_ids: torch.Tensor, input_embeds: Any, **info: Any) -> Any:
        if info[IS_PREFILL]:
            ended = self.first.setdefault(info["request_id"], info[NUM_COMPUTED] + len(input_ids))
            info[IS_PREFILL] = info[NUM_COMPUTED] < ended
            info.setdefault("talker", {"hidden": torch.zeros(1, self.mtp_hidden_size)})
        return super().preprocess(input_ids, input_embeds, **info)


class ReturnsTheFields(ToyTalker):
    """The scalar hook hands the runner's fields back."""

    def preprocess(self, input_ids: torch.Tensor, input_embeds: Any, **info: Any) -> Any:
        ids, embeds, updates = super().preprocess(input_ids, input_embeds, **info)
        return ids, embeds, {**updates, **{name: info[name] for name in FIELDS}}


class ChangesTheFields(ToyTalker):
    """The batched hook counts its own progress in the live buffer."""

    def preprocess_decode_batch(self, *, input_ids: torch.Tensor, req_infos: Sequence[dict[str, Any]]) -> Any:
        result = super().preprocess_decode_batch(input_ids=input_ids, req_infos=req_infos)
        for info in req_infos:
            info[NUM_COMPUTED] += 1
        return result


class OffersInputsForThePrompt(ToyTalker):
    """Every scalar row gets MTP inputs."""

    def preprocess(self, input_ids: torch.Tensor, input_embeds: Any, **info: Any) -> Any:
        ids, embeds, updates = super().preprocess(input_ids, input_embeds, **info)
        row = torch.zeros(1, self.mtp_hidden_size)
        return ids, embeds, {MTP_INPUTS: (row, row), **updates}


class RaisesInPostprocess(ToyTalker):
    """The released runner logs it and goes on."""

    def postprocess(self, hidden_states: torch.Tensor, **_: Any) -> dict[str, Any]:
        raise KeyError("no place for hidden states")


@dataclass(frozen=True, slots=True)
class WrongModel:
    """A mistake, and the cases that notice it, no more and no fewer."""

    cls: type[ToyTalker]
    noticed_by: frozenset[str]

    def under_test(self) -> ModelUnderTest:
        return replace(under_test(), model=self.cls())


def _wrong(cls: type[ToyTalker], *cases: str) -> WrongModel:
    return WrongModel(cls, frozenset(cases))


WRONG_MODELS = (
    _wrong(DecidesBySpan, "tail", "chunks", "cached", "replay", "company", "mtp-inputs"),
    _wrong(SlicesByItsOwnCounter, "cached", "replay"),
    _wrong(ReturnsTheWholePrompt, "results", "tail", "chunks", "cached", "replay", "company", "crossing"),
    _wrong(AnswersWithThePromptOnly, "crossing"),
    _wrong(ReturnsWhatItWasGiven, "crossing"),
    _wrong(IgnoresItsPrompt, "chunks"),
    _wrong(CountsDecodeCalls, "resume-one-by-one"),
    _wrong(CountsDecodeTokens, "resume", "resume-one-by-one"),
    _wrong(CountsBehindThePrompt, "resume-crossing", "resume-one-by-one"),
    _wrong(BatchesInAnotherWay, "batched"),
    _wrong(BatchStoresMore, "batched"),
    _wrong(MixesRows, "batched", "company"),
    _wrong(RemembersTheLastRow, "cached", "company"),
    _wrong(LatchesById, "tail", "chunks", "company", "mtp-inputs"),
    _wrong(ReturnsTheFields, "owned-fields"),
    _wrong(ChangesTheFields, "owned-fields"),
    _wrong(OffersInputsForThePrompt, "mtp-inputs"),
    _wrong(RaisesInPostprocess, *CASES),
)


def decides_by_span() -> ModelUnderTest:
    """As ``--phase-model`` asks for it."""
    return WRONG_MODELS[0].under_test()
