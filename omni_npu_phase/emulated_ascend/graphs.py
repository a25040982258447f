# SPDX-License-Identifier: Apache-2.0
"""A model of `torch.npu.NPUGraph`: operators recorded at capture, and run again into the same memory at replay.

A captured graph is a list of kernels with the addresses they had. Nothing of Python runs at replay: an input is read
where it was, a result is written where it was, whoever holds that memory now. What follows from that is what goes wrong
in practice, and what the model shows: an input that was handed over in another tensor is not seen, a result that was
kept without a copy changes under its owner, and padding rows are computed along with the others.

Capture records every operator that reaches the dispatcher with its operands; the recorded tensors keep their memory
alive, as a graph's pool does. Replay calls each operator on the same operands again and copies what it makes into the
tensors it made at capture. A view made at capture still views the same memory, and needs no second call.

Other than on the device, capture computes too, and of what a graph cannot hold only a value that is read on the host
is refused. A copy from the host is recorded with the host tensor, and reads it anew at each replay, as the device does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NPUGraph:
    """What one capture recorded; `torch.npu.graph` begins and ends it."""

    capturing = False
    auto_dispatch_capture = False

    def __init__(self, *_: Any, **__: Any) -> None:
        self._calls: list[_Call] = []
        self._mode: _Recorder | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._mode = _Recorder(self._calls)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        NPUGraph.capturing = True

    def capture_end(self) -> None:
        assert self._mode is not None
        NPUGraph.capturing = False
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def replay(self) -> None:
        for call in self._calls:
            call.again()

    def reset(self) -> None:
        self._calls = []


def is_current_stream_capturing() -> bool:
    return NPUGraph.capturing


def install() -> None:
    """Give `torch.npu` this model in place of its own graph, which needs CANN's."""
    for model in (NPUGraph, is_current_stream_capturing):
        setattr(torch.npu, model.__name__, model)  # type: ignore[attr-defined]


class _Call:
    """One operator with its operands, and what it made at capture."""

    def __init__(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._operator, self._args, self._kwargs = operator, args, kwargs
        given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        # None where the result is an operand, or a view of one.
        self._made = [None if _memory(tensor) in given else tensor for tensor in _tensors(result)]

    def does_something(self) -> bool:
        return any(tensor is not None for tensor in self._made) or self._operator._schema.is_mutable

    def again(self) -> None:
        results = _tensors(self._operator(*self._args, **self._kwargs))
        for made, result in zip(self._made, results, strict=True):
            if made is not None:
                made.copy_(result)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a value is read on the host while a graph is captured")
        result = operator(*args, **(kwargs or {}))
        call = _Call(operator, args, kwargs or {}, result)
        if call.does_something():
            self._calls.append(call)
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
