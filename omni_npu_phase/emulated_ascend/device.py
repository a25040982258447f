# SPDX-License-Identifier: Apache-2.0
"""The emulated device of this process: putting it in place, and asking what was done with it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

from omni_npu_phase.emulated_ascend import library
from omni_npu_phase.emulated_ascend.errors import EmulationError

if TYPE_CHECKING:
    import torch

SUPPORTED_TORCH_NPU = frozenset({"2.10.0.post4", "2.13.0"})
"""Versions that the tests of the device were run with. Images carry the older one."""


@dataclass(frozen=True)
class Counts:
    """What the host asked of the device. A copy is counted once, as synchronous or as asynchronous."""

    h2d_sync: int = 0
    h2d_async: int = 0
    h2d_bytes: int = 0
    d2h_sync: int = 0
    d2h_async: int = 0
    d2h_bytes: int = 0
    d2d_sync: int = 0
    d2d_async: int = 0
    d2d_bytes: int = 0
    stream_syncs: int = 0
    device_syncs: int = 0
    event_syncs: int = 0
    event_waits: int = 0
    event_records: int = 0
    memsets: int = 0
    device_allocs: int = 0
    device_alloc_bytes: int = 0
    pinned_allocs: int = 0
    pinned_alloc_bytes: int = 0
    launches: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def h2d(self) -> int:
        return self.h2d_sync + self.h2d_async

    @property
    def d2h(self) -> int:
        return self.d2h_sync + self.d2h_async

    @property
    def d2d(self) -> int:
        return self.d2d_sync + self.d2d_async

    @property
    def host_syncs(self) -> int:
        """How often the host waited: for a stream, the device or an event. A stream waiting for an event is none."""
        return self.stream_syncs + self.device_syncs + self.event_syncs

    @property
    def kernels(self) -> int:
        return sum(self.launches.values())

    def nonzero(self) -> dict[str, Any]:
        """Only what happened, for messages."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name)}

    def __sub__(self, earlier: Counts) -> Counts:
        numbers = {name: getattr(self, name) - getattr(earlier, name) for name in _NUMBERS}
        launches = Counter(self.launches)
        launches.subtract(earlier.launches)
        return Counts(**numbers, launches=MappingProxyType({k: v for k, v in launches.items() if v}))


_NUMBERS = tuple(f.name for f in fields(Counts) if f.name != "launches")


class Counting:
    """Counts and hazards from entering on. `snapshot` is live; `counts` is what it was when the block ended."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._start = device.counts()
        self._hazards_before = len(device.hazards)
        self._end: Counts | None = None
        self._hazards: tuple[str, ...] | None = None

    def __enter__(self) -> Counting:
        self._start = self._device.counts()
        self._hazards_before = len(self._device.hazards)
        self._end = self._hazards = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._end = self.snapshot()
        self._hazards = self._device.hazards[self._hazards_before :]
        if error is None:
            self._device.raise_faults()

    def snapshot(self) -> Counts:
        return self._device.counts() - self._start

    @property
    def counts(self) -> Counts:
        if self._end is None:
            raise EmulationError("still_counting", "counts are final when the block ends; ask snapshot() inside it")
        return self._end

    @property
    def hazards(self) -> tuple[str, ...]:
        return self._device.hazards[self._hazards_before :] if self._hazards is None else self._hazards

    def assert_no_hazards(self) -> None:
        _assert_none(self.hazards)


class Device:
    """The one emulated device of this process; `activate` makes it."""

    def __init__(self, cann: ctypes.CDLL, libraries: Path) -> None:
        self.libraries = libraries
        self._cann = cann
        self._launches: Counter[str] = Counter()
        self._faults_seen = 0
        for name, result, arguments in _FUNCTIONS:
            function = getattr(cann, name)
            function.restype, function.argtypes = result, arguments
        self._names = tuple(cann.emu_counter_name(i).decode() for i in range(cann.emu_counter_count()))
        if set(self._names) != set(_NUMBERS):
            raise EmulationError("load_failed", f"{libraries} counts {self._names}, not what this version reads")
        self._buffer = (ctypes.c_uint64 * len(self._names))()
        self._kernels: Any = None
        self._runner: Any = None

    def counts(self) -> Counts:
        """Totals since the process began."""
        self._cann.emu_counters(self._buffer)
        numbers = dict(zip(self._names, self._buffer, strict=True))
        return Counts(**numbers, launches=MappingProxyType(dict(self._launches)))

    def counting(self) -> Counting:
        return Counting(self)

    @property
    def hazards(self) -> tuple[str, ...]:
        """What the host got wrong so far, in order; a source already changed counts before anyone waits."""
        return tuple(self._cann.emu_hazard(i).decode() for i in range(self._cann.emu_hazard_count()))

    @property
    def faults(self) -> tuple[str, ...]:
        """Calls the device could not answer, whether or not the caller noticed."""
        return tuple(self._cann.emu_fault(i).decode() for i in range(self._cann.emu_fault_count()))

    @property
    def copies_in_flight(self) -> int:
        """Asynchronous copies of pinned memory the host has not waited for."""
        return int(self._cann.emu_in_flight())

    def assert_no_hazards(self) -> None:
        _assert_none(self.hazards)

    def check_host_read(self, tensor: torch.Tensor) -> bool:
        """Whether the host may read this tensor now; a copy still on its way into it is a hazard."""
        if tensor.device.type != "cpu":
            raise EmulationError("not_host", f"a tensor on {tensor.device} is not read by the host; copy it first")
        if tensor.numel() == 0:
            return True
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return not self._cann.emu_host_read(tensor.data_ptr(), (last + 1) * tensor.element_size())

    def raise_faults(self) -> None:
        """Raise for calls the device could not answer since the last time; each is raised once."""
        if self._cann.emu_fault_count() == self._faults_seen:
            return
        new = self.faults[self._faults_seen :]
        self._faults_seen += len(new)
        raise EmulationError("unmodelled", "; ".join(new))

    def _launched(self, name: str) -> None:
        self._launches[name] += 1

    def _connect(self, *, kernels: bool) -> None:
        from omni_npu_phase.emulated_ascend import graphs
        from omni_npu_phase.emulated_ascend.kernels import Kernels
        from omni_npu_phase.emulated_ascend.operators import kernel_runner

        self._runner = kernel_runner(self._launched)
        self._cann.emu_set_kernel_runner(self._runner)
        if kernels:
            self._kernels = Kernels(self._launched, self.raise_faults)
            graphs.install()


_FUNCTIONS: tuple[tuple[str, Any, list[Any]], ...] = (
    ("emu_counter_count", ctypes.c_int, []),
    ("emu_counter_name", ctypes.c_char_p, [ctypes.c_int]),
    ("emu_counters", None, [ctypes.POINTER(ctypes.c_uint64)]),
    ("emu_hazard_count", ctypes.c_size_t, []),
    ("emu_hazard", ctypes.c_char_p, [ctypes.c_size_t]),
    ("emu_fault_count", ctypes.c_size_t, []),
    ("emu_fault", ctypes.c_char_p, [ctypes.c_size_t]),
    ("emu_in_flight", ctypes.c_size_t, []),
    ("emu_host_read", ctypes.c_int, [ctypes.c_void_p, ctypes.c_size_t]),
    ("emu_set_kernel_runner", None, [ctypes.c_void_p]),
)

_active: tuple[Device, bool] | None = None


def activate(*, kernels: bool = True) -> Device:
    """Give this process an emulated Ascend device and import the real torch_npu on it.

    Must come before anything imports torch_npu. A second call returns the same device. With `kernels=False` aten
    operators keep torch_npu's code and fail where it calls CANN, which shows torch_npu's own rules.
    """
    global _active
    if _active is not None:
        device, with_kernels = _active
        if with_kernels != kernels:
            raise EmulationError(
                "already_active",
                f"this process has the device with kernels={with_kernels}; use another process for kernels={kernels}",
            )
        return device
    _check_process()
    version = _check_packages()
    _check_no_cann()
    os.environ["TASK_QUEUE_ENABLE"] = "0"
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    # The other kind of segments needs CANN's virtual memory.
    os.environ["PYTORCH_NPU_ALLOC_CONF"] = "expandable_segments:False"
    _check_no_other_device()
    libraries = library.build(version)
    device = Device(library.load(libraries), libraries)
    import torch_npu  # noqa: F401

    device._connect(kernels=kernels)
    device.raise_faults()
    _active = device, kernels
    return device


def active_device() -> Device:
    """The device `activate` made."""
    if _active is None:
        raise EmulationError("not_active", "this process has no emulated device; call activate() first")
    return _active[0]


def counting() -> Counting:
    """`Device.counting` of the active device."""
    return active_device().counting()


def check_host_read(tensor: torch.Tensor) -> bool:
    """`Device.check_host_read` of the active device."""
    return active_device().check_host_read(tensor)


def assert_no_hazards() -> None:
    """`Device.assert_no_hazards` of the active device."""
    active_device().assert_no_hazards()


def _assert_none(hazards: tuple[str, ...]) -> None:
    if hazards:
        raise AssertionError("the host used memory of copies it had not waited for:\n" + "\n".join(hazards))


def _check_process() -> None:
    if sys.platform != "linux":
        raise EmulationError("unsupported_platform", f"torch_npu runs on Linux only, this is {sys.platform}")
    if "torch_npu" in sys.modules:
        raise EmulationError(
            "imported_early",
            "torch_npu was imported before the emulated device was activated; activate() first, or set "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 if `import torch` brought it in",
        )
    queue = os.environ.get("TASK_QUEUE_ENABLE", "0")
    if queue != "0":
        raise EmulationError(
            "task_queue", f"TASK_QUEUE_ENABLE={queue} makes counts depend on a second thread; unset it or set it to 0"
        )


def _check_packages() -> str:
    known = " or ".join(sorted(SUPPORTED_TORCH_NPU))
    try:
        version = importlib.metadata.version("torch-npu")
    except importlib.metadata.PackageNotFoundError:
        raise EmulationError("torch_npu_missing", f"torch_npu is not installed; install torch-npu=={known}") from None
    if version not in SUPPORTED_TORCH_NPU:
        raise EmulationError("torch_npu_version", f"torch_npu is {version}; the emulated device knows {known} only")
    return version


def _check_no_cann() -> None:
    found = next((v for v in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME") if os.environ.get(v)), None)
    if found is not None:
        reason = f"{found}={os.environ[found]}"
    else:
        try:
            ctypes.CDLL("libascendcl.so")
        except OSError:
            return
        reason = "libascendcl.so can be loaded"
    raise EmulationError(
        "cann_present", f"this machine has CANN ({reason}); run on the real device, or without CANN in the environment"
    )


def _check_no_other_device() -> None:
    import torch

    # Both register the same setting of the allocator, and the second ends the process.
    if torch.version.cuda and torch.__version__.startswith("2.13."):
        raise EmulationError("cuda_build", f"torch {torch.__version__} is built for CUDA; install a CPU build of it")
    other = torch._C._get_privateuse1_backend_name()
    if other == "privateuseone":
        other = torch._C._get_accelerator().type
    if other != "cpu":
        raise EmulationError(
            "other_device",
            f"this process already has the device '{other}', and PyTorch cannot have two; use a process of its own, "
            "with a CPU build of torch",
        )
