# SPDX-License-Identifier: Apache-2.0
"""The recording model: a deterministic model that writes down every call, and whose values name their row.

Every value it returns is a whole number below 257, exact in every dtype a runner may use, bfloat16 included. A token id
names its request and position, so a call shows which physical rows it got, whatever the runner says about them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from omni_npu_phase import contract
from omni_npu_phase.conformance.scenarios import Behaviour

HIDDEN = 8
CODES = 5
POSITIONS = 4096
UNTOUCHED = 100.0
"""What the input embeddings hold before every step, so that a write to a wrong row shows."""
NEW_IDS = 1 << 20
"""Added to every token id by a model that returns other ids."""
ARRIVED = "arrived"
"""Name of a nested value that a request arrives with, beside those that its updates bring."""
BATCH_MARK = "batch_hook"
BEFORE = "before"
DEEP, DEEP_ITEMS = "deep", "items"
"""Names of marks in which tensors lie deeper."""
MARK = "mark"
NESTED = "nested"
VALIDITY = ("meta", "valid")
_SCALAR, _BATCHED, _MTP, _HIDDEN, _TEXT, _FILLED = range(1, 7)


def token(request: int, position: int) -> int:
    """The token id of a position of a request, both counted from 0."""
    return 1 + request * POSITIONS + position


def place(token_id: int) -> tuple[int, int]:
    """Request and position of a token id, whether or not the model replaced it."""
    return divmod((token_id - 1) % NEW_IDS, POSITIONS)


def place_of(vector: Sequence[float]) -> tuple[int, int]:
    """Request and position of a vector that names its row."""
    return int(vector[0]), int(vector[1]) * 64 + int(vector[2])


def _vector(kind: int, token_id: int) -> list[float]:
    request, position = place(token_id)
    return [request, position // 64, position % 64, kind, 0, 0, 0, 1]


def embedding(token_id: int, *, batched: bool = False) -> list[float]:
    """What the hooks return for a token."""
    return _vector(_BATCHED if batched else _SCALAR, token_id)


def filled_embedding(token_id: int) -> list[float]:
    """What ``preprocess_batch`` writes for a token of a row that it fills itself."""
    return _vector(_FILLED, token_id)


def prompt_embedding(request: int, position: int) -> list[float]:
    """What a request sent as prompt embeddings holds at a position."""
    return [request, position // 64, position % 64, 9, 9, 9, 9, 9]


def mtp_embedding(token_id: int) -> list[float]:
    """What MTP returns for a row whose inputs all belong together."""
    request, position = place(token_id)
    return [request, position // 64, position % 64, _MTP, request, position % 64, request, position % 64]


def mtp_codes(token_id: int, noise: int = 0) -> list[int]:
    """The codes of a row whose MTP inputs all belong together; ``token_id`` is the id MTP was given."""
    request, position = place(token_id)
    return [request, position, request, request, noise]


def draw(generator: torch.Generator) -> int:
    """One draw of a request's own stream."""
    return int(torch.randint(1, 200, (1,), generator=generator, device=generator.device).item())


@dataclass(slots=True)
class HookCall:
    """One row's hook call: the hook, the rows' token ids, and what the row was told."""

    hook: str
    token_ids: list[int]
    info: dict[str, Any]
    request_id: Any
    offset: int | None = None
    """Buffer row at which the given embeddings slice begins, and its shape; None for hooks that get none."""
    ids_offset: int | None = None
    """Buffer row at which the given token ids begin; None for hooks that get a copy of them."""
    given_shape: tuple[int, ...] | None = None
    given: list[list[float]] | None = None
    call: int = 0
    """Number of the hook call within the step; rows of one batched call share it."""

    @property
    def place(self) -> tuple[int, int] | None:
        """Request and position of its first token; None for a call without token ids."""
        return place(self.token_ids[0]) if self.token_ids else None


@dataclass(slots=True)
class MtpCall:
    """One MTP call: the token ids of its rows, padding included, its keywords, and whether it returned codes."""

    token_ids: list[int]
    rows: int
    keywords: dict[str, Any]
    gave_codes: bool = True


@dataclass(slots=True)
class Log:
    """What the model saw in one step."""

    hooks: list[HookCall] = field(default_factory=list)
    mtp: list[MtpCall] = field(default_factory=list)
    batch_hooks: list[tuple[int, list[str]]] = field(default_factory=list)
    """Hook calls made before it, and request ids, for each call of ``preprocess_batch``."""
    layout: dict[str, Any] = field(default_factory=dict)
    """What ``preprocess_batch`` was given to fill rows with; of tensors their first row in the runner's, and length."""
    filled: frozenset[str] = frozenset()
    """Requests whose rows it filled."""
    postprocess: list[dict[str, Any]] = field(default_factory=list)
    calls: int = 0


class RecordingModel:
    """A model with every optional hook of the contract. ``ids`` and ``buffer`` are the runner's input buffers."""

    has_postprocess = True
    talker_mtp_graph_safe = True
    mtp_hidden_size = HIDDEN
    replace_runtime_additional_information = False
    preprocess_decode_batch: Any
    preprocess_batch: Any

    def __init__(self, behaviour: Behaviour, *, batched: bool, mtp: bool, max_rows: int, device: torch.device) -> None:
        self.behaviour = behaviour
        self.device = device
        self.log = Log()
        self.ids: torch.Tensor | None = None
        self.buffer: torch.Tensor | None = None
        self.returning: Callable[[], None] = lambda: None
        """Called whenever a per-row hook is about to return."""
        self.has_preprocess = behaviour.has_preprocess
        self._faulty_hook = "batched" if batched else "scalar"
        self._mtp = mtp
        self._mtp_calls = 0
        self.mtp_embeds = torch.zeros(max_rows, HIDDEN, device=device)
        self.mtp_codes = torch.zeros(max_rows, CODES, dtype=torch.int64, device=device)
        self.marks = torch.zeros(max_rows, dtype=torch.int64, device=device)
        if batched:
            self.preprocess_decode_batch = self._preprocess_decode_batch
        elif behaviour.uncallable_hook:
            self.preprocess_decode_batch = True
        if behaviour.preprocess_batch != "absent":
            self.preprocess_batch = self._preprocess_batch
            self.preprocess_batch_fills_rows = bool(behaviour.fills)
        if mtp:
            self.talker_mtp = self._talker_mtp
        self.talker_mtp_accepts_per_row_generators = behaviour.seeds == "per_row"
        self.talker_mtp_accepts_req_infos = behaviour.takes_infos
        self.gpu_resident_buffer_keys = {("codes", "audio"), VALIDITY} if behaviour.codes == "resident" else set()
        self._mtp_hidden: torch.Tensor | None = None
        """What MTP was given as hidden states last."""
        if behaviour.updates == "live":
            self.gpu_resident_buffer_keys.add((MARK, "scalar"))
        if behaviour.validity:
            self.talker_mtp_validity_key = VALIDITY

    # Hooks.

    def preprocess(self, input_ids: torch.Tensor, input_embeds: torch.Tensor | None, **info: Any) -> Any:
        token_ids = [int(value) for value in input_ids.reshape(-1).tolist()]
        call = HookCall("scalar", token_ids, copy_info(info), request_of(info), call=self.log.calls)
        if input_embeds is not None and self.buffer is not None:
            call.offset = _row_in(self.buffer, input_embeds)
            call.given_shape = tuple(input_embeds.shape)
            call.given = input_embeds.float().tolist()
        if self.ids is not None:
            call.ids_offset = _row_in(self.ids, input_ids)
        self.log.hooks.append(call)
        self.log.calls += 1
        if self.behaviour.mutates == "nested":
            info[NESTED].pop("once", None)
        return self._returned("scalar", self._scalar_result(input_ids, input_embeds, token_ids, info))

    def _scalar_result(
        self, input_ids: torch.Tensor, input_embeds: torch.Tensor | None, token_ids: list[int], info: dict[str, Any]
    ) -> tuple[Any, ...]:
        embeds = self._rows([embedding(token_id) for token_id in token_ids])
        updates = self._updates(token_ids[-1], info, input_ids[-1])
        one_token = len(token_ids) == 1
        offered = {"one_token": one_token, "every_row": True, "never": False}[self.behaviour.mtp_inputs]
        if offered and (self._mtp or self.behaviour.mtp_inputs == "every_row"):
            updates[contract.MTP_INPUTS] = (
                self._hidden(token_ids[-1:]),
                self._rows([_vector(_TEXT, token_ids[-1])]),
            )
        if self.behaviour.embeds == "in_place" and input_embeds is not None:
            input_embeds.copy_(embeds)
            embeds = input_embeds
        elif self.behaviour.embeds == "shifted" and input_embeds is not None and not one_token:
            # The runner must move these rows up by one, over themselves.
            input_embeds[1:].copy_(embeds[:-1])
            embeds = input_embeds[1:]
        return self._ids(input_ids), embeds, updates

    def _preprocess_decode_batch(self, input_ids: torch.Tensor, req_infos: Sequence[dict[str, Any]]) -> Any:
        token_ids = [int(value) for value in input_ids.reshape(-1).tolist()]
        updates = []
        for index, info in enumerate(req_infos):
            self.log.hooks.append(
                HookCall(
                    "batched",
                    token_ids[index : index + 1],
                    copy_info(info),
                    request_of(info),
                    call=self.log.calls,
                )
            )
            updates.append(self._updates(token_ids[index], info, input_ids[index], index))
            if self.behaviour.mutates == "nested":
                info[NESTED].pop("once", None)
            if self.behaviour.mutates == "fields":
                info.update(_HOSTILE)
        self.log.calls += 1
        embeds = self._rows([embedding(token_id, batched=True) for token_id in token_ids])
        hidden = self._hidden(token_ids)
        text_step = self._rows([_vector(_TEXT, token_id) for token_id in token_ids])
        ids = self._ids(input_ids)
        result = (ids, embeds, hidden, text_step, updates) if self._mtp else (ids, embeds, updates)
        return self._returned("batched", result)

    def _preprocess_batch(
        self,
        *,
        req_ids: Sequence[str],
        model_intermediate_buffer: dict[str, dict[str, Any]],
        device: torch.device,
        **layout: Any,
    ) -> set[str] | None:
        self.log.batch_hooks.append((self.log.calls, list(req_ids)))
        for request_id in req_ids:
            known = model_intermediate_buffer.setdefault(request_id, {})
            if self.behaviour.preprocess_batch == "replaces":
                model_intermediate_buffer[request_id] = {**known, BATCH_MARK: request_id}
            else:
                known[BATCH_MARK] = request_id
            if self.behaviour.preprocess_batch == "claims":
                known.update(_HOSTILE)
        if not layout:
            return None
        ids, embeds = layout["input_ids"], layout["inputs_embeds"]
        places = [
            None if own is None else _row_in(own, given) for own, given in ((self.ids, ids), (self.buffer, embeds))
        ]
        self.log.layout = {**layout, "input_ids": (places[0], len(ids)), "inputs_embeds": (places[1], len(embeds))}
        self.log.filled = self.behaviour.fills & set(req_ids)
        for request_id in self.log.filled:
            row = req_ids.index(request_id)
            start, span = layout["token_offsets"][row], layout["num_scheduled_tokens"][row]
            own = [filled_embedding(token_id) for token_id in ids[start : start + span].tolist()]
            embeds[start : start + span].copy_(self._rows(own))
            for name in contract.FIELDS:
                model_intermediate_buffer[request_id].pop(name, None)
        return set(self.log.filled)

    def _talker_mtp(
        self, ids: torch.Tensor, embeds: torch.Tensor, hidden: torch.Tensor, text_step: torch.Tensor, **keywords: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Results lie in buffers that the next call writes over, as a graph's do."""
        count = ids.shape[0]
        self.log.mtp.append(MtpCall([int(value) for value in ids.tolist()], count, keywords))
        self._mtp_calls += 1
        self._mtp_hidden = hidden
        host_ids, host_embeds, host_hidden, host_text = (part.cpu() for part in (ids, embeds, hidden, text_step))
        noise = self._noise(keywords, count)
        out, codes = [], []
        for index in range(count):
            request, position = place(int(host_ids[index]))
            own, past, text = host_embeds[index], host_hidden[index], host_text[index]
            out.append([*own[:3].tolist(), _MTP, past[0].item(), past[2].item(), text[0].item(), text[2].item()])
            mixed = request if int(own[0]) == request else 250
            codes.append([mixed, position, int(past[0]), int(text[0]), noise[index]])
        self.mtp_embeds[:count].copy_(torch.tensor(out, dtype=torch.float32).to(self.device))
        if self.behaviour.codes == "none_later" and self._mtp_calls > 1:
            self.log.mtp[-1].gave_codes = False
            return self.mtp_embeds[:count], None
        self.mtp_codes[:count].copy_(torch.tensor(codes, dtype=torch.int64).to(self.device))
        return self.mtp_embeds[:count], self.mtp_codes[:count]

    def postprocess(
        self, hidden_states: torch.Tensor, *, multimodal_outputs: Any = None, **info: Any
    ) -> dict[str, Any]:
        self.log.postprocess.append(copy_info(info))
        if self.behaviour.layers:
            return {"hidden_states": {"layers": {0: hidden_states[-1:]}}}
        return {"last": {"hidden": hidden_states[-1:]}}

    def embed_input_ids(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        """The model's own embeddings, which hooks replace."""
        return torch.full((input_ids.shape[0], HIDDEN), 3.0).to(self.device)

    # Parts.

    def scribble(self) -> None:
        """Write over the buffers that results lie in, as the next calls would (T9)."""
        self.mtp_embeds.fill_(200)
        self.mtp_codes.fill_(200)
        self.marks.fill_(200)

    def _ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids if self.behaviour.ids == "same" else input_ids.to(torch.int64) + NEW_IDS

    def _hidden(self, token_ids: list[int]) -> torch.Tensor:
        hidden, place = self._rows([_vector(_HIDDEN, token_id) for token_id in token_ids]), self._mtp_hidden
        if self.behaviour.embeds != "in_mtp" or place is None or len(place) <= len(hidden):
            return hidden
        return place[1 : 1 + len(hidden)].copy_(hidden)

    def _updates(self, token_id: int, info: dict[str, Any], given: torch.Tensor, row: int = 0) -> dict[str, Any]:
        if self.behaviour.updates == "nothing":
            return {}
        # As a talker marks its frames: a device scalar per row, which must reach the host or stay as its own.
        mark: dict[str, Any] = {MARK: {"token": token_id, "scalar": torch.tensor(token_id).to(self.device)}}
        if self.behaviour.updates in ("reused", "deep", "live"):
            mark[MARK]["scalar"] = self.marks[row].fill_(token_id)
        if self.behaviour.updates == "given":
            mark[MARK]["scalar"] = given
        if self.behaviour.updates == "deep":
            own = mark[MARK].pop("scalar")
            mark[MARK][DEEP] = {"by": {"dictionary": own}, "list": [0, [own]], "tuple": (own, 1)}
            mark[MARK][DEEP_ITEMS] = (own, {"item": own})
        if self.behaviour.updates == "live":
            info[MARK].update(mark[MARK])
            return {MARK: info[MARK]}
        if self.behaviour.updates == "moves":
            # The live mark, no copy: one merge hands on the mark of the step before, a second one the new mark.
            return {BEFORE: info.get(MARK, {}), **mark}
        if self.behaviour.updates == "whole":
            return {**info, **mark}
        return {**mark, **_HOSTILE} if self.behaviour.updates == "fields" else mark

    def _noise(self, keywords: Mapping[str, Any], count: int) -> list[int]:
        if "generators" in keywords and self.talker_mtp_accepts_per_row_generators:
            return [0 if generator is None else draw(generator) for generator in keywords["generators"]]
        if keywords.get("generator") is not None:
            return [draw(keywords["generator"]) for _ in range(count)]
        return [0] * count

    def _rows(self, rows: list[list[float]]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.float32).to(self.device)

    def _returned(self, hook: str, result: Any) -> Any:
        fault = self.behaviour.fault
        if fault is not None and hook == self._faulty_hook and self.log.calls > self.behaviour.good_calls:
            result = FAULTS[fault](hook, result)
        self.returning()
        return result


class StateModel(RecordingModel):
    """The recording model under the names that V2 has for what a model offers."""

    mtp_output_key = ("codes", "audio")
    mtp: Callable[..., Any]

    def __init__(self, *args: Any, mtp: bool, **keywords: Any) -> None:
        super().__init__(*args, mtp=mtp, **keywords)
        self.mtp_accepts_per_row_generators = self.talker_mtp_accepts_per_row_generators
        self.mtp_accepts_req_infos = self.talker_mtp_accepts_req_infos
        if self.behaviour.validity:
            self.mtp_validity_key = VALIDITY
        if mtp:
            self.mtp = self.talker_mtp
            # V2 must not go by the V1 name.
            del self.talker_mtp

    def embed_input_ids(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        """What V2 itself writes to a row before its hook, and what nothing else may have written to."""
        return torch.full((input_ids.shape[0], HIDDEN), UNTOUCHED).to(self.device)

    @staticmethod
    def get_mtp_seed(sampling_params: Any) -> int | None:
        return (sampling_params.extra_args or {}).get("tts_local_seed")


_HOSTILE = {contract.PROMPT_LEN: 77, contract.NUM_COMPUTED: torch.tensor(88), contract.IS_PREFILL: 1}


def hostile_fields() -> dict[str, Any]:
    """Wrong values of wrong types under the runner-owned names."""
    return dict(_HOSTILE)


def request_of(info: Mapping[str, Any]) -> Any:
    """The request id in what a hook was told: V1 runners call it ``request_id``, V2 states ``req_id``."""
    return info.get("request_id", info.get("req_id"))


def copy_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """A live buffer as it is now, nested dictionaries included."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in info.items()}


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in dictionaries, lists and tuples, at any depth."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in inner for tensor in tensors_in(part)]


def _row_in(buffer: torch.Tensor, given: torch.Tensor) -> int | None:
    """The row of a buffer at which a tensor begins; None for a tensor in other memory."""
    if given.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
        return None
    return (given.storage_offset() - buffer.storage_offset()) // buffer.stride(0)


def _replace(result: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    values = list(result)
    values[index] = value
    return tuple(values)


def _embeds(change: Callable[[torch.Tensor], Any]) -> Callable[[str, tuple[Any, ...]], Any]:
    return lambda hook, result: _replace(result, 1, change(result[1]))


def _long(embeds: torch.Tensor) -> torch.Tensor:
    return torch.cat([embeds, embeds])


def _no_mtp_inputs(hook: str, result: tuple[Any, ...]) -> Any:
    return _replace(result, -1, {key: value for key, value in result[-1].items() if key != contract.MTP_INPUTS})


def _mtp_inputs(change: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[str, tuple[Any, ...]], Any]:
    def fault(hook: str, result: tuple[Any, ...]) -> Any:
        inputs = result[-1].get(contract.MTP_INPUTS)
        return result if inputs is None else _replace(result, -1, {**result[-1], contract.MTP_INPUTS: change(*inputs)})

    return fault


def _no_dictionary(hook: str, result: tuple[Any, ...]) -> Any:
    return _replace(result, -1, None if hook == "scalar" else [None, *result[-1][1:]])


def _short(hook: str, result: tuple[Any, ...]) -> Any:
    # An eligible row without any row has nothing to hand to MTP, which is another matter.
    return result if len(result[1]) == 1 else _replace(result, 1, result[1][:-1])


FAULTS: Mapping[str, Callable[[str, tuple[Any, ...]], Any]] = {
    "short": _short,
    "long": _embeds(_long),
    "other_ids": lambda hook, result: _replace(result, 0, torch.cat([result[0], result[0]])),
    "no_dictionary": _no_dictionary,
    "no_mtp_inputs": _no_mtp_inputs,
    "wide_mtp_inputs": _mtp_inputs(lambda hidden, text_step: (hidden, torch.cat([text_step, text_step]))),
    "integer_mtp_inputs": _mtp_inputs(lambda hidden, text_step: (hidden, text_step.to(torch.int64))),
    "three_mtp_inputs": _mtp_inputs(lambda hidden, text_step: (hidden, text_step, text_step)),
    "flat": _embeds(lambda embeds: embeds[0] if len(embeds) == 1 else embeds),
    "wrong_rank": _embeds(lambda embeds: embeds.unsqueeze(0)),
    "wrong_width": _embeds(lambda embeds: embeds[:, :-1]),
    "integer_embeds": _embeds(lambda embeds: embeds.to(torch.int64)),
    "float_ids": lambda hook, result: _replace(result, 0, result[0].float()),
    "elsewhere": _embeds(lambda embeds: torch.empty_like(embeds, device="meta")),
    "two_values": lambda hook, result: result[:2],
    "six_values": lambda hook, result: (*result, *result)[:6],
    "few_updates": lambda hook, result: _replace(result, -1, result[-1][:-1]),
    "short_hidden": lambda hook, result: _replace(result, 2, result[2][:-1]),
    "flat_text_step": lambda hook, result: _replace(result, 3, result[3][-1]),
    "wide_text_step": lambda hook, result: _replace(result, 3, torch.cat([result[3], result[3]], dim=1)),
}
"""Malformed hook results by name: each takes the hook's kind and its good result (E5, E5b, E7)."""
