# SPDX-License-Identifier: Apache-2.0
"""What hooks return, held against the contract before anything of it is written (E5, E5b, E7, R4, R5).

Works on anything with a tensor's shape, dtype and device; imports no framework.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from omni_npu_phase.contract import MTP_INPUTS, ContractError
from omni_npu_phase.settings import Mode
from omni_npu_phase.step.plan import of_rows

logger = logging.getLogger(__name__)


class Deviations:
    """Results that the released runner tolerates: warned once per model in ``on``, an error in ``strict``."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self._warned: set[tuple[str, str, str | None, str]] = set()

    def report(self, model: object, kind: str, error: ContractError) -> None:
        """Raise ``error``, or log it if this ``kind`` was not yet logged for this model class, clause and hook."""
        if self.mode == "strict":
            raise error
        key = (type(model).__qualname__, error.clause, error.hook, kind)
        if key not in self._warned:
            self._warned.add(key)
            logger.warning("%s: %s Tolerated; said once.", key[0], error)


@dataclass(slots=True)
class Call:
    """One hook call, and the step's buffer its embeddings are meant for: floating, shape (buffer rows, hidden).

    ``rows``: which of ``request_ids`` the call is for. They are rows of the input batch, unless ``index`` says where
    in it each request is.
    """

    hook: str
    request_ids: Sequence[str]
    rows: Sequence[int]
    embeds: Any
    model: object
    deviations: Deviations
    index: Mapping[str, int] | None = None
    width: int = field(init=False)
    _kind: Any = field(init=False)
    _dtype: Any = field(init=False)
    _device: Any = field(init=False)

    def __post_init__(self) -> None:
        self.width = self.embeds.shape[-1]
        self._kind, self._dtype, self._device = type(self.embeds), self.embeds.dtype, self.embeds.device

    @property
    def requests(self) -> list[str]:
        """The call's own requests, in the order of its rows."""
        return list(of_rows(self.rows, self.request_ids))

    def error(self, clause: str, expected: str, actual: str) -> ContractError:
        requests = self.requests
        rows = self.rows if self.index is None else [self.index.get(request_id, -1) for request_id in requests]
        return ContractError(clause, hook=self.hook, requests=requests, rows=rows, expected=expected, actual=actual)

    def deviation(self, clause: str, kind: str, expected: str, actual: str) -> None:
        self.deviations.report(self.model, kind, self.error(clause, expected, actual))

    def fits(self, value: Any, shape: tuple[int, ...]) -> bool:
        """Whether a value is a tensor like the step's buffer: nothing more need be asked of such a one."""
        return (
            type(value) is self._kind
            and value.shape == shape
            and value.dtype == self._dtype
            and value.device == self._device
        )


_SCALAR_VALUES = _BATCH_VALUES = ("input_ids", "inputs_embeds", "updates")
_MTP_VALUES = ("inputs_embeds", "codes")
_BATCH_VALUES_WITH_MTP = ("input_ids", "inputs_embeds", "hidden_states", "text_step", "updates")


class ScalarResult(NamedTuple):
    """A scalar hook's result, checked: ``ids`` None or shape (rows,), ``embeds`` shape (rows, hidden)."""

    rows: int
    ids: Any
    embeds: Any
    updates: dict[Any, Any]
    mtp_inputs: tuple[Any, Any] | None


@dataclass(slots=True)
class BatchResult:
    """A batched hook's result, checked; ``hidden`` and ``text_step`` are None for a model without MTP (R4, R5)."""

    ids: Any
    embeds: Any
    hidden: Any
    text_step: Any
    updates: Sequence[Any]


def scalar_result(call: Call, raw: Any, *, span: int, given_ids: Any, mtp_width: int | None) -> ScalarResult:
    """Check what ``preprocess`` returned for one row of ``span`` tokens (E5).

    ``mtp_width`` is the hidden size of MTP inputs for a row that is eligible (T1), and None for any other (E6).

    Gives at most ``span`` rows. Ids that are absent, the object given, or of another length come back as None.
    """
    ids, embeds, updates = _values(call, "E5", raw, _SCALAR_VALUES)
    rows = span
    if not call.fits(embeds, (span, call.width)):
        _check_embeds(call, "E5", embeds)
        rows = min(span, embeds.shape[0])
        if embeds.shape[0] != span:
            call.deviation("E5", "rows", f"{span} embedding rows", f"{embeds.shape[0]}")
            embeds = embeds[:rows]
    if mtp_width is not None and rows == 0:
        raise call.error("E5", "an embedding row for MTP", "none")
    stored = updates
    if not isinstance(updates, dict):
        call.deviation("E5", "updates", "a dictionary of updates", type(updates).__name__)
        stored = {}
        # MTP inputs are taken from any mapping, though only a dictionary is stored.
        updates = updates if isinstance(updates, Mapping) else {}
    own_ids = None if ids is given_ids else _scalar_ids(call, ids, rows)
    inputs = None if mtp_width is None else _mtp_inputs(call, updates, mtp_width)
    return ScalarResult(rows, own_ids, embeds, stored, inputs)


def batch_result(call: Call, raw: Any, *, given_ids: Any, mtp_width: int | None) -> BatchResult:
    """Check what ``preprocess_decode_batch`` returned for a run of rows (E5b); ``mtp_width`` is None without MTP."""
    values = _values(call, "E5b", raw, _BATCH_VALUES if mtp_width is None else _BATCH_VALUES_WITH_MTP)
    ids, embeds, updates = values[0], values[1], values[-1]
    count = len(call.rows)
    if not call.fits(embeds, (count, call.width)):
        _check_embeds(call, "E5b", embeds)
        if embeds.shape[0] != count:
            raise call.error("E5b", f"{count} embedding rows", str(embeds.shape[0]))
    if ids is not given_ids:
        _check_ids(call, "E5b", ids)
        if ids.numel() != count:
            raise call.error("E5b", f"{count} token ids", str(ids.numel()))
    hidden = text_step = None
    if mtp_width is not None:
        hidden, text_step = values[2], values[3]
        for name, tensor in (("hidden_states", hidden), ("text_step", text_step)):
            if not call.fits(tensor, (count, mtp_width)):
                _check_rows(call, "E5b", name, tensor, (count, mtp_width))
    if isinstance(updates, (str, bytes, dict)) or not isinstance(updates, Iterable):
        raise call.error("E5b", "a sequence of updates, one per request", type(updates).__name__)
    updates = list(updates)
    if len(updates) != count:
        raise call.error("E5b", f"{count} updates", str(len(updates)))
    for index, update in enumerate(() if set(map(type, updates)) == {dict} else tuple(updates)):
        if not isinstance(update, dict):
            # It is ignored, and need not even have a truth value.
            updates[index] = {}
            call.deviation("E5b", "updates", "a dictionary of updates per request", type(update).__name__)
    return BatchResult(
        ids=None if ids is given_ids else ids if ids.ndim == 1 else ids.reshape(-1),
        embeds=embeds,
        hidden=hidden,
        text_step=text_step,
        updates=updates,
    )


def mtp_result(call: Call, raw: Any) -> tuple[Any, Any]:
    """Check what ``talker_mtp`` returned: embeddings with a row for each request at least (padding may follow, T10),
    and codes, or None for no codes (T11)."""
    embeds, codes = _values(call, "T4", raw, _MTP_VALUES)
    count = len(call.rows)
    if not call.fits(embeds, (count, call.width)):
        _check_embeds(call, "T4", embeds)
        if embeds.shape[0] < count:
            raise call.error("T4", f"at least {count} embedding rows", str(embeds.shape[0]))
        embeds = embeds[:count]
    if codes is None:
        return embeds, None
    if _is_tensor(codes) and codes.ndim:
        given = codes.shape[0]
    elif getattr(codes, "ndim", None) == 0 or not hasattr(codes, "__len__") or isinstance(codes, (str, Mapping)):
        raise call.error("T5", "codes with a row per request, or None", _kind(codes))
    else:
        call.deviation("T5", "kind", "codes as a tensor", _kind(codes))
        given = len(codes)
    if given < count:
        call.deviation("T5", "codes", f"at least {count} code rows", str(given))
    return embeds, codes[:count] if given > count else codes


def _values(call: Call, clause: str, raw: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    if type(raw) is tuple and len(raw) == len(names):
        return raw
    expected = f"{len(names)} values ({', '.join(names)})"
    if isinstance(raw, (str, dict)) or _is_tensor(raw):
        raise call.error(clause, expected, _kind(raw))
    try:
        values = tuple(raw)
    except TypeError:
        raise call.error(clause, expected, _kind(raw)) from None
    if len(values) != len(names):
        raise call.error(clause, expected, f"{len(values)} values")
    return values


def _check_embeds(call: Call, clause: str, embeds: Any) -> None:
    if not _is_tensor(embeds):
        raise call.error(clause, "inputs_embeds as a tensor", _kind(embeds))
    if embeds.ndim != 2 or embeds.shape[1] != call.width:
        raise call.error(clause, f"inputs_embeds of shape (rows, {call.width})", _kind(embeds))
    if not embeds.dtype.is_floating_point:
        raise call.error(clause, "inputs_embeds of a floating dtype", _kind(embeds))
    _check_device(call, clause, "inputs_embeds", embeds)


def _check_ids(call: Call, clause: str, ids: Any) -> None:
    if not _is_tensor(ids):
        raise call.error(clause, "input_ids as a tensor", _kind(ids))
    if ids.dtype.is_floating_point or ids.dtype.is_complex or "bool" in str(ids.dtype):
        raise call.error(clause, "input_ids of an integer dtype", _kind(ids))
    _check_device(call, clause, "input_ids", ids)


def _check_rows(call: Call, clause: str, name: str, tensor: Any, shape: tuple[int, int]) -> None:
    if not _is_tensor(tensor) or tensor.shape != shape:
        raise call.error(clause, f"{name} of shape {shape}", _kind(tensor))
    if not tensor.dtype.is_floating_point:
        raise call.error(clause, f"{name} of a floating dtype", _kind(tensor))
    # The released runner copies these from the host too: models keep hidden states there.
    if tensor.device.type != "cpu":
        _check_device(call, clause, name, tensor)


def _check_device(call: Call, clause: str, name: str, tensor: Any) -> None:
    if tensor.device != call.embeds.device:
        raise call.error(clause, f"{name} on {call.embeds.device}", str(tensor.device))


def _scalar_ids(call: Call, ids: Any, rows: int) -> Any:
    if not _is_tensor(ids):
        call.deviation("E5", "ids", f"{rows} token ids", _kind(ids))
        return None
    if ids.numel() != rows:
        call.deviation("E5", "ids", f"{rows} token ids", str(ids.numel()))
        return None
    _check_ids(call, "E5", ids)
    return ids if ids.ndim == 1 else ids.reshape(-1)


def _mtp_inputs(call: Call, updates: Mapping[Any, Any], width: int) -> tuple[Any, Any] | None:
    pair, shape = updates.get(MTP_INPUTS), (1, width)
    if pair is None:
        call.deviation("E7", "missing", f"{MTP_INPUTS!r} in the updates of an eligible row", "none")
        return None
    if type(pair) is tuple and len(pair) == 2 and call.fits(pair[0], shape) and call.fits(pair[1], shape):
        return pair
    # One tensor that stacks the two unpacks like a pair of them.
    parts = tuple(pair) if isinstance(pair, (tuple, list)) or (_is_tensor(pair) and pair.ndim) else ()
    if len(parts) != 2 or not all(_is_tensor(part) for part in parts):
        raise call.error("E5", f"{MTP_INPUTS!r} as two tensors (hidden states, text step)", _kind(pair))
    for part in parts:
        if part.numel() != width:
            raise call.error("E5", f"{MTP_INPUTS!r} of {width} elements each", _kind(part))
    hidden, text_step = (part.reshape(shape) for part in parts)
    _check_rows(call, "E5", "hidden states", hidden, shape)
    _check_rows(call, "E5", "text step", text_step, shape)
    return hidden, text_step


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "device") and hasattr(value, "numel")


def _kind(value: Any) -> str:
    if _is_tensor(value):
        return f"{tuple(value.shape)} {value.dtype} on {value.device}"
    return type(value).__name__
