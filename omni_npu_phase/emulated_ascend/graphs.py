# SPDX-License-Identifier: Apache-2.0
"""A model of `torch.npu.NPUGraph`: operators recorded at capture, and run again into the same memory at replay.

A captured graph is a list of kernels with the addresses they had. Nothing of Python runs at replay: an input is read
where it was, a result is written where it was, whoever holds that memory now. What follows from that is what goes wrong
in practice, and what the model shows: an input that was handed over in another tensor is not seen, a result that was
kept without a copy changes under its owner, and padding rows are computed along with the others.

Capture records every operator that reaches the dispatcher with its operands; the recorded tensors keep their memory
alive, as a graph's pool does. Replay calls each operator on the same operands again and copies what it makes into the
tensors it made at capture. A view made at capture still views the same memory, and needs no second call.

A task group is what vLLM-Ascend updates between two replays, the lengths that attention is given on the host. A graph
with such groups can be captured, and is not replayed.

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

    capturing: NPUGraph | None = None
    auto_dispatch_capture = False

    def __init__(self, *_: Any, **__: Any) -> None:
        self._recorder: _Recorder | None = None
        self.reset()

    def reset(self) -> None:
        self._calls: list[_Call] = []
        self.has_task_groups = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._recorder = _Recorder(self._calls)
        self._recorder.__enter__()  # type: ignore[no-untyped-call]
        NPUGraph.capturing = self

    def capture_end(self) -> None:
        assert self._recorder is not None
        NPUGraph.capturing = None
        self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def replay(self) -> None:
        if self.has_task_groups:
            raise NotImplementedError("the emulated Ascend device does not replay a graph with task groups (attention)")
        for call in self._calls:
            call.again()


def is_current_stream_capturing() -> bool:
    return NPUGraph.capturing is not None


def graph_task_group_begin(stream: Any) -> None:
    assert NPUGraph.capturing is not None
    NPUGraph.capturing.has_task_groups = True


def graph_task_group_end(stream: Any) -> None:
    """Returns no handle: what a group would be updated with is not modelled."""


def install() -> None:
    """Give `torch.npu` this model in place of its own graph, which needs CANN's."""
    for model in (NPUGraph, is_current_stream_capturing, graph_task_group_begin, graph_task_group_end):
        setattr(torch.npu, model.__name__, model)  # type: ignore[attr-defined]


class _Call:
    """One operator with its operands, and what it made at capture."""

    def __init__(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._operator, self._args, self._kwargs = operator, args, kwargs
        given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        # None where the result is an operand, or a view of one.
        self._made = [None if _memory(tensor) in given else tensor for tensor in _tensors(result)]

    def does_something(self) -> bool:
        schema = self._operator._schema
        return schema.is_mutable or schema.overload_name == "out" or any(made is not None for made in self._made)

    def again(self) -> None:
        results = _tensors(self._operator(*self._args, **self._kwargs))
        for made, result in zip(self._made, results, strict=True):
            if made is not None:
                made.copy_(result)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = calls

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a value is read on the host while a graph is captured")
        result = operator(*args, **(kwargs or {}))
        call = _Call(operator, args, kwargs or {}, result)
        if call.does_something():
            self.calls.append(call)
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
