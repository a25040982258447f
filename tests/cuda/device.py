# SPDX-License-Identifier: Apache-2.0
"""What the tests ask of a CUDA device beside PyTorch: to count, to be busy, to capture. Hardware, and the stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tests import fake_cuda
from tests.fake_cuda import Counts

_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")
_COUNTED = "counted"
_BUSY_CYCLES = 100_000_000
"""About 50 ms: longer than the host needs for what a test does meanwhile."""


class Device(Protocol):
    torch: torch.device

    def counting(self) -> AbstractContextManager[Counts]:
        """Counts of a block, complete when it ends; nothing is under way when it begins."""
        ...

    def occupy(self) -> None:
        """Keep the device busy, so that whatever is asked for next is not done before the host goes on."""
        ...

    def captured(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Capture what ``work`` asks of the device, and return what replays it."""
        ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> None: ...


class Hardware:
    """A CUDA device; counts are the profiler's."""

    torch = torch.device("cuda:0")

    def __enter__(self) -> Hardware:
        torch.cuda.synchronize()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.cuda.synchronize()

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        counts = Counts()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            with record_function(_COUNTED):
                yield counts
            torch.cuda.synchronize()
        count(profiler.events(), counts)

    def occupy(self) -> None:
        torch.cuda._sleep(_BUSY_CYCLES)

    def captured(self, work: Callable[[], Any]) -> Callable[[], Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        replay: Callable[[], Any] = graph.replay
        return replay


class StandIn(fake_cuda.FakeCuda):
    """Every copy is late there, as if it were always busy."""

    torch = fake_cuda.DEVICE

    def counting(self) -> AbstractContextManager[Counts]:
        return fake_cuda.counting(self)

    def occupy(self) -> None:
        pass

    def captured(self, work: Callable[[], Any]) -> Callable[[], Any]:
        self.capturing = True
        try:
            work()
        finally:
            self.capturing = False
        return work


def count(events: Iterable[Any], counts: Counts) -> None:
    """Add up a profile: what was launched and waited for in the block that is counted, and every copy."""
    events = list(events)
    on_host = [event for event in events if event.device_type.name == "CPU"]
    block = next(event.time_range for event in on_host if event.name == _COUNTED)
    for event in on_host:
        if block.start <= event.time_range.start <= block.end:
            counts.waits += event.name in _WAITS
            counts.kernels += event.name.startswith(_LAUNCHES)
    for event in events:
        if event.device_type.name == "CUDA":
            # The device may come to a copy when the block has ended.
            counts.to_device += event.name.startswith("Memcpy HtoD")
            counts.to_host += event.name.startswith("Memcpy DtoH")
