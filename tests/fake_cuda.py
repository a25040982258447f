# SPDX-License-Identifier: Apache-2.0
"""A CUDA device where there is none: host memory that is told apart, and copies that are late.

It stands where the hardware and its driver would: tensors asked for on ``cuda`` or in pinned memory are host tensors
that are remembered as such. A copy that does not block is done when the device gets to it: its source is read at the
next operation on the device, and the host sees what came back only after it has waited. So memory that is used again
too early, or read without a wait, holds the wrong values. What a device would refuse is an error here too.

It shows nothing of kernels, time or other streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cuda:1")
"""Not the current device: what is recorded on the current device's stream says nothing about this one's."""
_READS = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "equal", "__repr__")
_QUESTIONS = ("numel", "element_size", "dim", "size", "stride", "data_ptr", "is_contiguous", "untyped_storage")
_VIEWS = ("view", "detach", "split", "unbind", "__getitem__")
_GARBAGE = 0xA5


@dataclass(slots=True)
class Counts:
    """What was asked of the device."""

    to_device: int = 0
    to_host: int = 0
    waits: int = 0
    """Times the host waited for the device."""
    kernels: int = 0


@dataclass(slots=True)
class _Copy:
    dest: torch.Tensor
    source: torch.Tensor
    arrived: torch.Tensor | None = None
    """What the device has read and the host has not waited for."""


class FakeCuda(TorchFunctionMode):
    """The device; active as a context manager."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.capturing = False
        self.issued: list[_Copy] = []
        self.read = self.shown = 0
        """How many of the issued copies the device has come to, and the host knows to be done."""
        self._kinds: dict[int, str] = {}
        # Alive, so that no other storage gets its address.
        self._storages: list[Any] = []
        self._patches = ExitStack()

    def __enter__(self) -> FakeCuda:
        for name, value in (
            ("Event", lambda *_, **__: _Event(self)),
            ("current_stream", lambda device=None: torch.device(device or "cuda:0")),
            ("is_current_stream_capturing", lambda: self.capturing),
            ("synchronize", lambda *_: self.wait()),
        ):
            self._patches.enter_context(mock.patch.object(torch.cuda, name, value))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = (resolve_name(func) or getattr(func, "__name__", "")).removeprefix("torch.").removeprefix("Tensor.")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        kinds = {self._kind(tensor) for tensor in given}
        if name == "device.__get__":
            return DEVICE if kinds == {"device"} else func(*args, **kwargs)
        if name in ("is_cuda.__get__", "is_cpu.__get__"):
            return (kinds == {"device"}) == (name == "is_cuda.__get__")
        if name in ("to", "cpu", "cuda"):
            return self._to(func, name, args, kwargs)
        if name == "copy_":
            return self._copy(*args, **kwargs)
        if not given or name.startswith("new_"):
            return self._made(func, args, kwargs, kinds)
        if "device" not in kinds:
            return func(*args, **kwargs)
        if any(tensor.dim() and self._kind(tensor) != "device" for tensor in given):
            raise RuntimeError(f"{name}: all tensors must be on one device")
        return self._operation(name, func, args, kwargs, given)

    def wait(self, until: int | None = None) -> None:
        """The host waits for the copies issued so far, or the first ``until`` of them."""
        self._refuse_in_capture("a wait")
        self.counts.waits += 1
        until = len(self.issued) if until is None else until
        self.advance(until)
        self.show(until)

    def advance(self, until: int | None = None) -> None:
        """The device works through the copies that were issued."""
        until = len(self.issued) if until is None else until
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            for copy in self.issued[self.read : until]:
                if self._kind(copy.dest) == "device":
                    copy.dest.copy_(copy.source)
                else:
                    copy.arrived = copy.source.clone()
        self.read = max(self.read, until)

    def show(self, until: int) -> None:
        """The host knows that these copies are done, and sees what they brought."""
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            for copy in self.issued[self.shown : until]:
                if copy.arrived is not None:
                    copy.dest.copy_(copy.arrived)
        self.shown = max(self.shown, until)

    def _refuse_in_capture(self, what: str) -> None:
        if self.capturing:
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")

    def _kind(self, tensor: torch.Tensor) -> str:
        return self._kinds.get(tensor.untyped_storage()._cdata, "host")

    def _remember(self, tensor: torch.Tensor, kind: str) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._kinds:
            self._kinds[storage._cdata] = kind
            self._storages.append(storage)
        return tensor

    def _made(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], kinds: set[str]) -> Any:
        device = kwargs.get("device")
        on_device = kinds == {"device"} if device is None else torch.device(device).type == "cuda"
        if on_device:
            kwargs.pop("device", None)
        pinned = kwargs.pop("pin_memory", False)
        if pinned:
            self._refuse_in_capture("pinned memory")
        made = func(*args, **kwargs)
        if not isinstance(made, torch.Tensor):
            return made
        if pinned and made.numel():
            made.reshape(-1).view(torch.uint8).fill_(_GARBAGE)
        return self._remember(made, "device" if on_device else "pinned" if pinned else "host")

    def _to(self, func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        tensor, *rest = args
        told = [*rest, *kwargs.values(), *([] if name == "to" else [name])]
        like = [value for value in told if isinstance(value, torch.Tensor)]
        dtypes = [value for value in told if isinstance(value, torch.dtype)]
        dtype = (dtypes + [value.dtype for value in (*like, tensor)])[0]
        devices = [torch.device(value) for value in told if isinstance(value, str | torch.device)]
        here = self._kind(tensor)
        target = self._kind(like[0]) if like else here
        if devices:
            target = "device" if devices[0].type == "cuda" else "host"
        if here == target == "device":
            same = dtype == tensor.dtype and not kwargs.get("copy")
            return tensor if same else self._operation("to", torch.Tensor.to, (tensor, dtype), {"copy": True}, [tensor])
        if "device" not in (here, target) or (devices and devices[0].type not in ("cpu", "cuda")):
            return func(*args, **kwargs)
        # One side is pageable memory, so the host waits; a cast is done where the source is.
        self.advance()
        source = self._remember(tensor.to(dtype), here)
        return self._copy(self._remember(torch.empty(tensor.shape, dtype=dtype), target), source)

    def _copy(self, dest: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        kinds = (self._kind(dest), self._kind(source))
        if "device" not in kinds:
            return dest.copy_(source)
        if kinds == ("device", "device"):
            self.advance()
            self.counts.kernels += 1
            return dest.copy_(source)
        if dest.dtype != source.dtype:
            raise RuntimeError("copy_: this device does not cast while it copies to or from the host")
        if kinds[0] == "device":
            self.counts.to_device += 1
        else:
            self.counts.to_host += 1
        if not dest.numel():
            return dest
        self.issued.append(_Copy(dest, source))
        if not (non_blocking and "pinned" in kinds):
            self.wait()
        return dest

    def _operation(
        self, name: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], given: list[torch.Tensor]
    ) -> Any:
        if name in _READS:
            self.wait()
            return func(*args, **kwargs)
        asks = name in _QUESTIONS or name.endswith("__get__")
        if not asks and not (name in _VIEWS and len(given) == 1):
            self.advance()
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and self._kind(leaf) == "host"]
        for tensor in made:
            self._remember(tensor, "device")
        # Views and questions launch nothing.
        if made or "out" in kwargs or name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            self.counts.kernels += 1
        return result


class _Event:
    def __init__(self, device: FakeCuda) -> None:
        self._device = device
        self._after = 0

    def record(self, stream: Any = None) -> None:
        # Without a stream it is recorded on the current device's, where nothing was asked for.
        self._after = len(self._device.issued) if stream == DEVICE else 0

    def query(self) -> bool:
        self._device._refuse_in_capture("a query")
        if self._device.read < self._after:
            return False
        self._device.show(self._after)
        return True

    def synchronize(self) -> None:
        self._device.wait(self._after)


@contextmanager
def counting(device: FakeCuda) -> Iterator[Counts]:
    """What is asked of the device in a block; nothing is under way when it begins."""
    device.wait()
    device.counts = Counts()
    yield device.counts
    device.counts = Counts()
