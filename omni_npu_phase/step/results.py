# SPDX-License-Identifier: Apache-2.0
"""What hooks return, checked before anything of it is written (E5, E5b, E7, R4, R5).

A result as the contract words it passes through unchanged. Any other one is laid out in memory of its own by the very
operation with which the released runner writes it. If that works, it is what will be written, and it is warned of once
per model; ``strict`` refuses it. If it fails, nothing was written, and the error names the clause.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from omni_npu_phase.contract import MTP_INPUTS, ContractError
from omni_npu_phase.settings import Mode
from omni_npu_phase.step.plan import of_rows

logger = logging.getLogger(__name__)


class Deviations:
    """Results that the released runner tolerates: warned of once per model in ``on``, an error in ``strict``."""

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
    kind: Any = field(init=False)
    dtype: Any = field(init=False)
    device: Any = field(init=False)

    def __post_init__(self) -> None:
        self.width = self.embeds.shape[-1]
        self.kind, self.dtype, self.device = type(self.embeds), self.embeds.dtype, self.embeds.device

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
        """Whether a value is a tensor like the step's buffer, of this shape: nothing more need be asked of it."""
        return (
            type(value) is self.kind
            and value.shape == shape
            and value.dtype is self.dtype
            and value.device == self.device
        )

    def unpack(self, clause: str, raw: Any, *names: str) -> Sequence[Any]:
        """The values of a result that should be ``len(names)`` of them."""
        if type(raw) is tuple and len(raw) == len(names):
            return raw
        expected = f"{len(names)} values ({', '.join(names)})"
        try:
            values = tuple(raw)
        except TypeError:
            raise self.error(clause, expected, _kind(raw)) from None
        if len(values) != len(names):
            raise self.error(clause, expected, f"{len(values)} values")
        return values

    def casts(self, value: Any, shape: tuple[int, ...]) -> bool:
        """Whether a value is a tensor of this shape and device that needs at most a cast from a floating dtype."""
        like = _is_tensor(value) and value.shape == shape and value.device == self.device
        return bool(like and value.dtype.is_floating_point)

    def as_released(
        self, clause: str, name: str, shape: tuple[int, ...], value: Any, write: _Write, like: Any = None
    ) -> Any:
        """What the released runner's ``write`` makes of a value in a tensor of ``shape``, like the step's embeddings.

        ``like``: another tensor to take dtype and device from. Warns; raises where ``strict`` is, or it cannot be
        written.
        """
        place = (self.embeds if like is None else like).new_empty(shape)
        expected = (
            f"{name} of shape {shape} and {'a floating' if like is None else 'an integer'} dtype on {place.device}"
        )
        try:
            write(place, value)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise self.error(clause, expected, _kind(value)) from error
        self.deviation(clause, name, expected, _kind(value))
        return place


_Write = Callable[[Any, Any], object]


def _copy(place: Any, value: Any) -> None:
    place.copy_(value)


def _assign(place: Any, value: Any) -> None:
    place[:] = value


def scalar_result(
    call: Call, raw: Any, *, span: int, given_ids: Any, mtp_width: int | None
) -> tuple[int, Any, Any, dict[Any, Any], tuple[Any, Any] | None]:
    """Check what ``preprocess`` returned for one row of ``span`` tokens (E5).

    ``mtp_width`` is the hidden size of MTP inputs for a row that is eligible (T1), and None for any other (E6).

    Gives the number of rows to write, at most ``span``; their token ids, shape (rows,), or None where none are to be
    written; their embeddings, shape (rows, hidden); the updates; and for an eligible row its hidden states and text
    step, shape (1, ``mtp_width``) each, or None where the hook gave none (E7).
    """
    ids, embeds, updates = call.unpack("E5", raw, "input_ids", "inputs_embeds", "updates")
    rows = span
    if not call.fits(embeds, (span, call.width)):
        rows, embeds = _odd_embeds(call, embeds, span, mtp_width is not None)
    stored = updates
    if not isinstance(updates, dict):
        call.deviation("E5", "updates", "a dictionary of updates", type(updates).__name__)
        # MTP inputs are taken from any mapping, though only a dictionary is stored.
        stored, updates = {}, updates if isinstance(updates, Mapping) else {}
    new_ids = None if ids is given_ids else _scalar_ids(call, ids, rows, given_ids)
    inputs = None if mtp_width is None else _mtp_inputs(call, updates, mtp_width)
    return rows, new_ids, embeds, stored, inputs


def batch_result(
    call: Call, raw: Any, *, given_ids: Any, mtp_width: int | None
) -> tuple[Any, Any, Any, Any, Sequence[Any]]:
    """Check what ``preprocess_decode_batch`` returned for a run of rows (E5b); ``mtp_width`` is None without MTP.

    Gives token ids, shape (rows,), or None where none are to be written; embeddings, shape (rows, hidden); hidden
    states and text step, shape (rows, ``mtp_width``), both None without MTP (R4, R5); and one update per row.
    """
    count = len(call.rows)
    hidden = text_step = None
    if mtp_width is None:
        ids, embeds, updates = call.unpack("E5b", raw, "input_ids", "inputs_embeds", "updates")
    else:
        names = ("input_ids", "inputs_embeds", "hidden_states", "text_step", "updates")
        ids, embeds, hidden, text_step, updates = call.unpack("E5b", raw, *names)
        hidden = _mtp_rows(call, "E5b", "hidden_states", hidden, (count, mtp_width))
        text_step = _mtp_rows(call, "E5b", "text_step", text_step, (count, mtp_width))
    if not call.fits(embeds, (count, call.width)):
        embeds = _batch_embeds(call, embeds, count, exact=mtp_width is not None)
    if ids is given_ids:
        ids = None
    else:
        if not _is_tensor(ids) or ids.numel() != count:
            raise call.error("E5b", f"{count} token ids", str(ids.numel()) if _is_tensor(ids) else _kind(ids))
        ids = _ids(call, "E5b", ids if ids.ndim == 1 else ids.reshape(-1), count, given_ids)
    try:
        updates = list(updates)
    except TypeError:
        raise call.error("E5b", "a sequence of updates, one per request", type(updates).__name__) from None
    if len(updates) != count:
        raise call.error("E5b", f"{count} updates", str(len(updates)))
    for position, update in enumerate(() if set(map(type, updates)) == {dict} else updates):
        if not isinstance(update, dict):
            updates[position] = {}
            call.deviation("E5b", "updates", "a dictionary of updates per request", type(update).__name__)
    return ids, embeds, hidden, text_step, updates


def mtp_result(call: Call, raw: Any, *, exact: bool = True) -> tuple[Any, Any]:
    """Check what ``talker_mtp`` returned: embeddings with a row for each request at least (padding may follow, T10),
    and codes, or None for no codes (T11).

    ``exact``: the released runner writes these embeddings by index, and so takes no others than a row per request.
    """
    embeds, codes = call.unpack("T4", raw, "inputs_embeds", "codes")
    count = len(call.rows)
    if not call.fits(embeds, (count, call.width)):
        if not _is_tensor(embeds) or not embeds.ndim:
            raise call.error("T4", "inputs_embeds as a tensor", _kind(embeds))
        embeds, shape = embeds[:count], (count, call.width)
        if not call.casts(embeds, shape):
            if exact and embeds.shape != shape:
                raise call.error("T4", f"inputs_embeds of shape {shape}", _kind(embeds))
            embeds = call.as_released("T4", "inputs_embeds", shape, embeds, _copy)
    if codes is None:
        return embeds, None
    if _is_tensor(codes) and codes.ndim:
        given = codes.shape[0]
    elif (
        getattr(codes, "ndim", None) == 0
        or isinstance(codes, (str, Mapping, AbstractSet))
        or not hasattr(codes, "__len__")
    ):
        raise call.error("T5", "codes with a row per request, or None", _kind(codes))
    else:
        call.deviation("T5", "kind", "codes as a tensor", _kind(codes))
        given = len(codes)
    if given < count:
        call.deviation("T5", "codes", f"at least {count} code rows", str(given))
    return embeds, codes[:count] if given > count else codes


def _odd_embeds(call: Call, embeds: Any, span: int, in_mtp: bool) -> tuple[int, Any]:
    """Embeddings that are not like the step's buffer: how many rows of it they fill, and with what."""
    if not _is_tensor(embeds) or not embeds.ndim:
        raise call.error("E5", "inputs_embeds as a tensor with a row for each token", _kind(embeds))
    rows = min(span, embeds.shape[0])
    if in_mtp and not rows:
        raise call.error("E5", "an embedding row for MTP", "none")
    if embeds.shape[0] != span and embeds.shape[1:] == (call.width,):
        call.deviation("E5", "rows", f"{span} embedding rows", str(embeds.shape[0]))
    if embeds.ndim > 1 or not in_mtp:
        embeds = embeds[:rows]
    shape = (rows, call.width)
    if call.casts(embeds, shape):
        return rows, embeds
    # Into the MTP batch the released runner copies; into the step's buffer it assigns, which takes further shapes.
    return rows, call.as_released("E5", "inputs_embeds", shape, embeds, _copy if in_mtp else _assign)


def _batch_embeds(call: Call, embeds: Any, count: int, *, exact: bool) -> Any:
    """A batch's embeddings that are not like the step's buffer. ``exact``: the released runner writes them by index,
    and so takes no others than one floating row per request."""
    shape = (count, call.width)
    if call.casts(embeds, shape):
        return embeds
    if not _is_tensor(embeds) or embeds.ndim != 2 or embeds.shape[0] != count or exact:
        rows = _is_tensor(embeds) and embeds.ndim == 2 and embeds.shape[0] != count
        expected = f"inputs_embeds of shape {shape} and a floating dtype on {call.device}"
        raise call.error(
            "E5b", f"{count} embedding rows" if rows else expected, str(len(embeds)) if rows else _kind(embeds)
        )
    return call.as_released("E5b", "inputs_embeds", shape, embeds, _copy)


def _scalar_ids(call: Call, ids: Any, rows: int, given_ids: Any) -> Any:
    if not _is_tensor(ids) or ids.numel() != rows:
        call.deviation("E5", "ids", f"{rows} token ids", str(ids.numel()) if _is_tensor(ids) else _kind(ids))
        return None
    return _ids(call, "E5", ids, rows, given_ids)


def _ids(call: Call, clause: str, ids: Any, count: int, given_ids: Any) -> Any:
    """``count`` token ids as a tensor of shape (count,) on the step's device; any integer dtype passes (R7)."""
    dtype, device = ids.dtype, ids.device
    whole = dtype is given_ids.dtype or not (dtype.is_floating_point or dtype.is_complex or "bool" in str(dtype))
    if whole and device == given_ids.device:
        return ids if ids.ndim == 1 else ids.reshape(-1)
    return call.as_released(clause, "input_ids", (count,), ids, _assign, like=given_ids)


def _mtp_rows(call: Call, clause: str, name: str, value: Any, shape: tuple[int, int]) -> Any:
    """Hidden states or a text step as rows of the MTP batch. They may lie on the host, where some models keep them."""
    if call.fits(value, shape) or call.casts(value, shape):
        return value
    if _is_tensor(value) and value.is_cpu and value.shape == shape and value.dtype.is_floating_point:
        return value
    return call.as_released(clause, name, shape, value, _copy)


def _mtp_inputs(call: Call, updates: Mapping[Any, Any], width: int) -> tuple[Any, Any] | None:
    pair, shape = updates.get(MTP_INPUTS), (1, width)
    if pair is None:
        call.deviation("E7", "missing", f"{MTP_INPUTS!r} in the updates of an eligible row", "none")
        return None
    if type(pair) is tuple and len(pair) == 2 and call.fits(pair[0], shape) and call.fits(pair[1], shape):
        return pair
    hidden, text_step = call.unpack("E5", pair, "hidden states", "text step")
    return _mtp_row(call, "hidden states", hidden, shape), _mtp_row(call, "text step", text_step, shape)


def _mtp_row(call: Call, name: str, value: Any, shape: tuple[int, int]) -> Any:
    # A single row may come without its batch dimension, or with more of them.
    whole = _is_tensor(value) and value.numel() == shape[1]
    return _mtp_rows(call, "E5", name, value.reshape(shape) if whole else value, shape)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "device") and hasattr(value, "numel")


def _kind(value: Any) -> str:
    if _is_tensor(value):
        return f"{tuple(value.shape)} {value.dtype} on {value.device}"
    return type(value).__name__
