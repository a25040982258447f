# SPDX-License-Identifier: Apache-2.0
"""What hooks return, checked before anything of it is written (E5, E5b, E7, R4, R5).

A result as the contract words it passes through unchanged. Any other one is laid out in memory of its own by the very
operation with which the released runner writes it. If that works, it is what will be written, and it is warned of once
per model; ``strict`` refuses it. If it fails, nothing was written, and the error names the clause.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Literal

from omni_npu_phase.contract import MTP_INPUTS, ContractError
from omni_npu_phase.settings import Mode

logger = logging.getLogger(__name__)
_Write = Literal["copy", "assign"]


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
    """One hook call for some requests, and the step's buffer its embeddings are meant for.

    ``embeds``: floating, shape (buffer rows, hidden). ``index``: where in the input batch each request is.
    """

    hook: str
    requests: Sequence[str]
    index: Mapping[str, int]
    embeds: Any
    model: object
    deviations: Deviations
    width: int = field(init=False)
    device: Any = field(init=False)

    def __post_init__(self) -> None:
        self.width, self.device = self.embeds.shape[-1], self.embeds.device

    def error(self, clause: str, expected: str, actual: str) -> ContractError:
        rows = [self.index.get(request_id, -1) for request_id in self.requests]
        return ContractError(
            clause, hook=self.hook, requests=self.requests, rows=rows, expected=expected, actual=actual
        )

    def deviation(self, clause: str, kind: str, expected: str, actual: str) -> None:
        self.deviations.report(self.model, kind, self.error(clause, expected, actual))

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

    def room(self, rows: int) -> Any:
        return self.embeds.new_empty(rows, self.width)

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, type(self.embeds))

    def fits(self, value: Any, shape: tuple[int, ...]) -> bool:
        """Whether a value is a floating tensor of this shape on the step's device: it needs a cast at most."""
        return (
            isinstance(value, type(self.embeds))
            and value.shape == shape
            and value.dtype.is_floating_point
            and value.device == self.device
        )

    def as_released(self, clause: str, name: str, place: Any, value: Any, write: _Write | None) -> Any:
        """What the released runner's ``write`` makes of a value in a new tensor, ``place``.

        ``write``: None where it takes nothing that does not fit. Warns; raises where ``strict`` is, or the value cannot
        be written.
        """
        dtype = "a floating" if place.is_floating_point() else "an integer"
        expected = f"{name} of shape {tuple(place.shape)} and {dtype} dtype on {place.device}"
        if write is None:
            raise self.error(clause, expected, _kind(value))
        try:
            if write == "copy":
                place.copy_(value)
            else:
                place[:] = value
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise self.error(clause, expected, _kind(value)) from error
        self.deviation(clause, name, expected, _kind(value))
        return place


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
    rows, inputs = span, None
    if not call.fits(embeds, (span, call.width)):
        rows, embeds = _scalar_embeds(call, embeds, span, mtp_width is not None)
    if mtp_width is not None:
        inputs = _mtp_inputs(call, updates, (1, mtp_width))
    if not isinstance(updates, dict):
        call.deviation("E5", "updates", "a dictionary of updates", type(updates).__name__)
        updates = {}
    return rows, None if ids is given_ids else _ids(call, "E5", ids, rows, given_ids), embeds, updates, inputs


def batch_result(
    call: Call, raw: Any, *, given_ids: Any, mtp_width: int | None
) -> tuple[Any, Any, Any, Any, Sequence[Any]]:
    """Check what ``preprocess_decode_batch`` returned for a run of rows (E5b); ``mtp_width`` is None without MTP.

    Gives token ids, shape (rows,), or None where none are to be written; embeddings, shape (rows, hidden); hidden
    states and text step, shape (rows, ``mtp_width``), both None without MTP (R4, R5); and one update per row.
    """
    count, hidden, text_step = len(call.requests), None, None
    if mtp_width is None:
        ids, embeds, updates = call.unpack("E5b", raw, "input_ids", "inputs_embeds", "updates")
    else:
        names = ("input_ids", "inputs_embeds", "hidden_states", "text_step", "updates")
        ids, embeds, hidden, text_step, updates = call.unpack("E5b", raw, *names)
        hidden = _mtp_rows(call, "E5b", "hidden_states", hidden, (count, mtp_width))
        text_step = _mtp_rows(call, "E5b", "text_step", text_step, (count, mtp_width))
    if not call.fits(embeds, (count, call.width)):
        # With MTP the released runner writes by index, and takes nothing else.
        rows = mtp_width is None and call.is_tensor(embeds) and embeds.ndim == 2 and len(embeds) == count
        embeds = call.as_released("E5b", "inputs_embeds", call.room(count), embeds, "copy" if rows else None)
    ids = None if ids is given_ids else _ids(call, "E5b", ids, count, given_ids)
    try:
        updates = list(updates)
    except TypeError:
        raise call.error("E5b", "a sequence of updates, one per request", type(updates).__name__) from None
    if len(updates) != count:
        raise call.error("E5b", f"{count} updates", str(len(updates)))
    for position, update in enumerate(updates):
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
    count = len(call.requests)
    shape = (count, call.width)
    if call.is_tensor(embeds) and embeds.ndim and len(embeds) > count:
        embeds = embeds[:count]
    if not call.fits(embeds, shape):
        fills = call.is_tensor(embeds) and embeds.ndim and (embeds.shape == shape or not exact)
        embeds = call.as_released("T4", "inputs_embeds", call.room(count), embeds, "copy" if fills else None)
    if codes is None:
        return embeds, None
    try:
        codes, given = codes[:count], len(codes)
    except (TypeError, LookupError):
        raise call.error("T5", "codes with a row per request, or None", _kind(codes)) from None
    if not call.is_tensor(codes):
        call.deviation("T5", "kind", "codes as a tensor", _kind(codes))
        codes = copy(codes)
    if given < count:
        call.deviation("T5", "codes", f"at least {count} code rows", str(given))
    return embeds, codes


def _scalar_embeds(call: Call, embeds: Any, span: int, in_mtp: bool) -> tuple[int, Any]:
    """A row's embeddings that do not fit: how many rows of its span they fill, and with what."""
    if not call.is_tensor(embeds) or not embeds.ndim:
        raise call.error("E5", "inputs_embeds as a tensor with a row for each token", _kind(embeds))
    rows = min(span, len(embeds))
    if in_mtp and not rows:
        raise call.error("E5", "an embedding row for MTP", "none")
    if len(embeds) != span and embeds.shape[1:] == (call.width,):
        behind = "" if len(embeds) > span else ", and behind them what the runner has for the ids, or zeros"
        call.deviation("E5", "rows", f"{span} embedding rows", f"{len(embeds)}{behind}")
    if embeds.ndim > 1 or not in_mtp:
        embeds = embeds[:rows]
    if call.fits(embeds, (rows, call.width)):
        return rows, embeds
    # Into the MTP batch the released runner copies; into the step's buffer it assigns, which takes further shapes.
    return rows, call.as_released("E5", "inputs_embeds", call.room(rows), embeds, "copy" if in_mtp else "assign")


def _ids(call: Call, clause: str, ids: Any, count: int, given_ids: Any) -> Any:
    """Token ids as a tensor of shape (count,), of any integer dtype (R7); None for those of a row that are ignored."""
    if not call.is_tensor(ids) or ids.numel() != count:
        expected, actual = f"{count} token ids", str(ids.numel()) if call.is_tensor(ids) else _kind(ids)
        if clause == "E5b":
            raise call.error(clause, expected, actual)
        call.deviation(clause, "ids", expected, actual)
        return None
    ids = ids if ids.ndim == 1 else ids.reshape(-1)
    fractional = ids.dtype.is_floating_point or ids.dtype.is_complex or "bool" in str(ids.dtype)
    if (ids.dtype is given_ids.dtype or not fractional) and ids.device == given_ids.device:
        return ids
    return call.as_released(clause, "input_ids", given_ids.new_empty(count), ids, "assign")


def _mtp_inputs(call: Call, updates: Any, shape: tuple[int, int]) -> tuple[Any, Any] | None:
    """An eligible row's hidden states and text step, from any mapping, though only a dictionary is stored."""
    pair = updates.get(MTP_INPUTS) if isinstance(updates, (dict, Mapping)) else None
    if pair is None:
        call.deviation("E7", "missing", f"{MTP_INPUTS!r} in the updates of an eligible row", "none")
        return None
    hidden, text_step = call.unpack("E5", pair, "hidden states", "text step")
    if call.fits(hidden, shape) and call.fits(text_step, shape):
        return hidden, text_step
    hidden = _mtp_rows(call, "E5", "hidden states", hidden, shape)
    return hidden, _mtp_rows(call, "E5", "text step", text_step, shape)


def _mtp_rows(call: Call, clause: str, name: str, value: Any, shape: tuple[int, int]) -> Any:
    """Hidden states or a text step as rows of the MTP batch. They may lie on the host, where some models keep them."""
    on_host = call.is_tensor(value) and value.is_cpu and value.shape == shape and value.dtype.is_floating_point
    if on_host or call.fits(value, shape):
        return value
    return call.as_released(clause, name, call.embeds.new_empty(shape), value, "copy")


def _kind(value: Any) -> str:
    if hasattr(value, "dtype") and hasattr(value, "device"):
        return f"{tuple(value.shape)} {value.dtype} on {value.device}"
    return type(value).__name__
