# SPDX-License-Identifier: Apache-2.0
"""The CANN operators that torch_npu's own copy, contiguous and clone code launches."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import torch

_MAX_DIMS = 16
_DONE, _NO_KERNEL, _REFUSED = 0, 1, 2

# aclDataType
_DTYPES = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int16,
    9: torch.int64,
    11: torch.float64,
    12: torch.bool,
    16: torch.complex64,
    17: torch.complex128,
    27: torch.bfloat16,
}


class Operand(ctypes.Structure):
    """`operand` of acl.c."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.c_int64 * _MAX_DIMS),
    ]


KERNEL_RUNNER = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.POINTER(Operand),
    ctypes.c_int,
    ctypes.POINTER(Operand),
    ctypes.c_void_p,
    ctypes.c_size_t,
)


def host_view(address: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """The elements in `size` bytes at `address`, as a flat CPU tensor over the same memory."""
    if size == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8).view(dtype)


def _flat(operand: Any) -> torch.Tensor:
    dtype = _DTYPES.get(operand.dtype)
    if dtype is None:
        raise NotImplementedError(f"the aclDataType {operand.dtype} is not modelled")
    return host_view(operand.data or 0, operand.size // dtype.itemsize * dtype.itemsize, dtype)


def _dense(operand: Any) -> torch.Tensor:
    shape = operand.shape[: operand.rank]
    return _flat(operand)[: math.prod(shape)].view(shape)


def _numbers(operand: Any) -> list[int]:
    numbers: list[int] = _dense(operand).tolist()
    return numbers


def _strided(base: Any, size: Any, stride: Any, offset: Any) -> torch.Tensor:
    return _flat(base).as_strided(_numbers(size), _numbers(stride), int(_dense(offset)))


def _cast(inputs: Any, outputs: Any) -> None:
    _dense(outputs[0]).copy_(_dense(inputs[0]))


def _as_strided(inputs: Any, outputs: Any) -> None:
    _dense(outputs[0]).copy_(_strided(*inputs[0:4]))


def _view_copy(inputs: Any, outputs: Any) -> None:
    _strided(*inputs[0:4]).copy_(_strided(*inputs[4:8]))


def _transpose(inputs: Any, outputs: Any) -> None:
    _dense(outputs[0]).copy_(_dense(inputs[0]).permute(_numbers(inputs[1])))


def _slice(inputs: Any, outputs: Any) -> None:
    part = _dense(inputs[0])
    for axis, (start, length) in enumerate(zip(_numbers(inputs[1]), _numbers(inputs[2]), strict=True)):
        part = part.narrow(axis, start, length)
    _dense(outputs[0]).copy_(part)


def _broadcast_to(inputs: Any, outputs: Any) -> None:
    target = _dense(outputs[0])
    target.copy_(_dense(inputs[0]).expand(target.shape))


OPERATORS: dict[str, Callable[[Any, Any], None]] = {
    "Cast": _cast,
    "Identity": _cast,
    "BroadcastTo": _broadcast_to,
    "AsStrided": _as_strided,
    "ViewCopy": _view_copy,
    "Transpose": _transpose,
    "Slice": _slice,
}


def kernel_runner(launched: Callable[[str], None]) -> Any:
    """The callback acl.c runs an operator with. The caller must keep it alive."""

    def run(name: bytes, inputs: int, in_: Any, outputs: int, out: Any, why: int, room: int) -> int:
        operator = OPERATORS.get(name.decode())
        if operator is None:
            return _NO_KERNEL
        # ctypes would print the exception and report success.
        try:
            operator([in_[i] for i in range(inputs)], [out[i] for i in range(outputs)])
        except Exception as error:  # noqa: BLE001 - nothing may leave a C callback; torch_npu raises the text
            text = f"the emulated kernel of the CANN operator {name.decode()} failed: {type(error).__name__}: {error}"
            message = text.encode()[: room - 1] + b"\0"
            ctypes.memmove(why, message, len(message))
            return _REFUSED
        launched(name.decode())
        return _DONE

    return KERNEL_RUNNER(run)
