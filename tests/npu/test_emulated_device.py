# SPDX-License-Identifier: Apache-2.0
"""The emulated Ascend device: it keeps torch_npu's rules, finds what a host does wrong, and fails where it must.

Run as a script, this file prints what unmodified torch_npu does under each rule, for one of the tests to compare.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from omni_npu_phase import emulated_ascend
from omni_npu_phase.conformance import verify
from omni_npu_phase.emulated_ascend import Counts, Device, EmulationError, library
from omni_npu_phase.settings import CACHE_VARIABLE

if importlib.util.find_spec("torch_npu") is None:
    pytest.skip("torch_npu is not installed; the emulated device needs it", allow_module_level=True)

ROOT = Path(__file__).parents[2]
POISON, STALE = 0xFB, 0xEE
SYNCED_UPLOAD = {"h2d_sync": 1, "stream_syncs": 1}
SYNCED_READ = {"d2h_sync": 1, "stream_syncs": 1}


def _run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options]
    settings = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=settings)


def _before(folder: Path) -> str:
    """A PYTHONPATH in which `folder` comes first."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="module", autouse=True)
def activated(pytestconfig: pytest.Config) -> Device:
    if pytestconfig.getoption("--device") != "emulated":
        pytest.skip("about the emulated device, which --device emulated brings")
    return emulated_ascend.activate()


@pytest.fixture
def npu(activated: Device) -> Iterator[Device]:
    """The device with nothing in flight, before and after."""
    import torch

    torch.npu.synchronize()
    yield activated
    torch.npu.synchronize()


# ---- torch_npu's rules ----------------------------------------------------------------------------------------------


class Bench:
    """Tensors on every side, made without kernels so that unmodified torch_npu can make them too."""

    def __init__(self) -> None:
        import torch

        self.host = torch.ones(4)
        self.host_index = torch.tensor([0, 2])
        self.pinned = torch.ones(4).pin_memory()
        self.pinned_ints = torch.arange(4, dtype=torch.int32).pin_memory()
        self.npu = torch.empty(4, device="npu")
        self.npu.copy_(self.host)
        self.pair = torch.empty(2, device="npu")
        self.pair.copy_(self.host[:2])
        self.index = torch.empty(2, dtype=torch.int64, device="npu")
        self.index.copy_(self.host_index)
        self.short_index = self.index.to(torch.int32)
        self.mask = torch.empty(4, dtype=torch.bool, device="npu")
        self.mask.copy_(self.host > 0)
        self.host_generator = torch.Generator()
        self.kept: list[Any] = []
        torch.npu.synchronize()

    def keep(self, tensor: Any) -> None:
        """Freeing a pinned tensor with a copy on its way records an event, which is not the rule's."""
        self.kept.append(tensor)


def _rules() -> dict[str, tuple[Callable[[Bench], Any], dict[str, Any]]]:
    import torch

    embedding = torch.nn.functional.embedding
    refused, wrong_dtype = {"error": "RuntimeError"}, {"error": "IndexError"}
    return {
        "upload pageable": (lambda b: b.npu.copy_(b.host), SYNCED_UPLOAD),
        "upload pageable, non_blocking": (
            lambda b: b.npu.copy_(b.host, non_blocking=True),
            {"h2d_async": 1, "stream_syncs": 1},
        ),
        "upload pinned": (lambda b: b.npu.copy_(b.pinned), SYNCED_UPLOAD),
        "upload pinned, non_blocking": (lambda b: b.npu.copy_(b.pinned, non_blocking=True), {"h2d_async": 1}),
        "upload pinned slice, non_blocking": (
            lambda b: b.npu[1:3].copy_(b.pinned[1:3], non_blocking=True),
            {"h2d_async": 1},
        ),
        "upload pinned with a cast, non_blocking": (
            lambda b: b.npu.copy_(b.pinned_ints, non_blocking=True),
            {"h2d_async": 1, "stream_syncs": 1},
        ),
        "upload to()": (lambda b: b.host.to("npu"), SYNCED_UPLOAD),
        "upload torch.tensor": (lambda b: torch.tensor([1, 2], device="npu"), SYNCED_UPLOAD),
        "upload torch.tensor of a scalar": (lambda b: torch.tensor(1, device="npu"), SYNCED_UPLOAD),
        "read cpu()": (lambda b: b.npu.cpu(), SYNCED_READ),
        "read to(cpu), non_blocking": (lambda b: b.keep(b.npu.to("cpu", non_blocking=True)), {"d2h_async": 1}),
        "read into pageable, non_blocking": (
            lambda b: b.host.copy_(b.npu, non_blocking=True),
            {"d2h_async": 1, "stream_syncs": 1},
        ),
        "read into pinned": (lambda b: b.pinned.copy_(b.npu), SYNCED_READ),
        "read into pinned, non_blocking": (lambda b: b.pinned.copy_(b.npu, non_blocking=True), {"d2h_async": 1}),
        "read into pinned with a cast, non_blocking": (
            lambda b: b.pinned_ints.copy_(b.npu, non_blocking=True),
            {"d2h_async": 1, "stream_syncs": 1},
        ),
        "read item": (lambda b: b.npu[0].item(), SYNCED_READ),
        "read tolist": (lambda b: b.npu.tolist(), SYNCED_READ),
        "read bool": (lambda b: bool(b.npu[1]), SYNCED_READ),
        "read int": (lambda b: int(b.index[1]), SYNCED_READ),
        "move": (lambda b: b.pair.copy_(b.npu[1:3]), {"d2d_async": 1}),
        "move clone": (lambda b: b.npu.clone(), {"d2d_async": 1}),
        "index with a device index": (lambda b: b.npu[b.index], {}),
        "index with a host index": (lambda b: b.npu[b.host_index], SYNCED_UPLOAD),
        "index with a list": (lambda b: b.npu[[0, 2]], SYNCED_UPLOAD),
        "write at a host index": (lambda b: b.npu.__setitem__(b.host_index, b.pair), SYNCED_UPLOAD),
        "write host values": (lambda b: b.npu.index_put_((b.index,), b.host[:2]), refused),
        "index_copy_ with a host index": (lambda b: b.npu.index_copy_(0, b.host_index, b.pair), refused),
        "index_copy_ with an int32 index": (lambda b: b.npu.index_copy_(0, b.short_index, b.pair), wrong_dtype),
        "index_copy_ of a host source": (lambda b: b.npu.index_copy_(0, b.index, b.host[:2]), refused),
        "index_select with a host index": (lambda b: torch.index_select(b.npu, 0, b.host_index), refused),
        "embedding of host ids": (lambda b: embedding(b.host_index, b.npu.view(2, 2)), refused),
        "add a host tensor": (lambda b: b.npu + b.host, refused),
        "add a host scalar": (lambda b: b.npu + torch.tensor(1.0), {}),
        "cat with a host tensor": (lambda b: torch.cat([b.npu, b.host]), refused),
        "stack with a host tensor": (lambda b: torch.stack([b.npu, b.host]), refused),
        "where with a host tensor": (lambda b: torch.where(b.mask, b.npu, b.host), refused),
        "random with a host generator": (
            lambda b: torch.rand(2, device="npu", generator=b.host_generator),
            refused,
        ),
    }


def observe(rule: Callable[[Bench], Any]) -> dict[str, Any]:
    """The error raised, or the copies and waits made; a launch that finds no CANN kernel ends a rule in peace."""
    bench = Bench()
    counting = emulated_ascend.counting()
    try:
        rule(bench)
    except (RuntimeError, IndexError) as error:
        if "no kernel for the CANN operator" not in str(error):
            return {"error": type(error).__name__}
    seen = counting.snapshot().nonzero()
    return {k: v for k, v in seen.items() if not k.endswith("_bytes") and "alloc" not in k and k != "launches"}


def test_each_rule_of_torch_npu(npu: Device) -> None:
    rules = _rules()
    assert {name: observe(rule) for name, (rule, _) in rules.items()} == {
        name: want for name, (_, want) in rules.items()
    }


def test_unmodified_torch_npu_has_the_same_rules() -> None:
    done = _run("-m", __name__)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {name: want for name, (_, want) in _rules().items()}


def test_it_is_an_npu_and_no_cuda_device(npu: Device) -> None:
    import torch

    tensor = torch.zeros(2, device="npu")
    assert (tensor.is_cuda, tensor.device.type, torch.npu.is_available()) == (False, "npu", True)
    assert torch.npu.get_device_name() == "Ascend910B3"
    assert torch.npu.device_count() == 1


def test_pinned_memory_is_pinned(npu: Device) -> None:
    import torch

    pageable = torch.ones(4)
    assert not pageable.is_pinned()
    assert not torch.ones(4, device="npu").is_pinned()
    for pinned in (pageable.pin_memory(), torch.empty(4, pin_memory=True), torch.tensor([1, 2], pin_memory=True)):
        assert pinned.is_pinned()
        assert pinned[1:].is_pinned()
        assert pinned.device.type == "cpu"


def test_bytes_are_counted_by_direction(npu: Device) -> None:
    import torch

    host, pinned, on_npu = torch.ones(6), torch.ones(10).pin_memory(), torch.empty(10, device="npu")
    with npu.counting() as counting:
        on_npu[:6].copy_(host)
        on_npu.copy_(pinned, non_blocking=True)
        pinned[:3].copy_(on_npu[:3], non_blocking=True)
        on_npu[:2].copy_(on_npu[2:4])
        on_npu[0].item()
    counts = counting.counts
    assert (counts.h2d_bytes, counts.d2h_bytes, counts.d2d_bytes) == (24 + 40, 12 + 4, 8)
    assert (counts.h2d, counts.d2h, counts.d2d) == (2, 2, 1)


def test_stated_costs(npu: Device) -> None:
    import torch

    bench = Bench()
    mask = bench.npu > 0
    for act, want in (
        (lambda: bench.npu.index_copy_(0, bench.index, bench.pair), {}),
        (lambda: bench.npu[mask], {"stream_syncs": 1}),
        (lambda: mask.nonzero(), {"stream_syncs": 1}),
        (lambda: torch.masked_select(bench.npu, mask), {"stream_syncs": 1}),
        (lambda: torch.equal(bench.npu, bench.npu), {"d2h_sync": 1, "d2h_bytes": 1, "stream_syncs": 1}),
    ):
        with npu.counting() as counting:
            act()
        assert {k: v for k, v in counting.counts.nonzero().items() if k != "launches"} == want
        assert counting.counts.kernels == 1


# ---- results --------------------------------------------------------------------------------------------------------


def test_strided_copies_equal_those_of_the_cpu(npu: Device) -> None:
    import torch

    pick = random.Random(7)
    for _ in range(60):
        host = torch.arange(120, dtype=pick.choice([torch.float32, torch.int64, torch.float16, torch.bfloat16]))
        base = host.to("npu")

        def view(tensor: Any, seed: int) -> Any:
            choose = random.Random(seed)
            shaped = tensor.view(4, 5, 6).permute(choose.sample(range(3), 3))
            for axis in range(3):
                start = choose.randrange(shaped.shape[axis])
                shaped = shaped[(slice(None),) * axis + (slice(start, None, choose.choice([1, 2])),)]
            return shaped

        seed = pick.random()
        assert torch.equal(view(base, seed).cpu(), view(host, seed))
        assert torch.equal(view(base, seed).contiguous().cpu(), view(host, seed))
        assert torch.equal(view(base, seed).to(torch.int32).cpu(), view(host, seed).to(torch.int32))
        other = torch.zeros_like(host)
        target = other.to("npu")
        view(target, seed).copy_(view(base, seed))
        view(other, seed).copy_(view(host, seed))
        assert torch.equal(target.cpu(), other)
        view(target, seed).copy_(view(host, seed) + 1)
        view(other, seed).copy_(view(host, seed) + 1)
        assert torch.equal(target.cpu(), other)


def test_parts_equal_those_of_the_cpu(npu: Device) -> None:
    import torch

    host = torch.arange(120.0).view(4, 5, 6)
    on_npu = host.to("npu")
    with npu.counting() as counting:
        for axis, size in enumerate(host.shape):
            for start in range(size):
                part = on_npu.narrow(axis, start, size - start)
                assert torch.equal(part.contiguous().cpu(), host.narrow(axis, start, size - start))
            assert torch.equal(on_npu.transpose(axis, 0).contiguous().cpu(), host.transpose(axis, 0))
        on_npu.half()
    assert set(counting.counts.launches) == {"Slice", "Transpose", "Cast"}


def test_kernels_compute_what_the_cpu_computes(npu: Device) -> None:
    import torch

    functional = torch.nn.functional
    values = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    index = torch.tensor([5, 0, 2])

    def forward(x: Any, i: Any) -> list[Any]:
        out = torch.zeros_like(x)
        out.index_copy_(0, i, x[:3])
        out[i] += 1
        y = functional.linear(functional.layer_norm(x, (4,)), x[:4])
        return [
            out, y, x.softmax(-1), x.matmul(x.t()), torch.bmm(x[None], x.t()[None]), x.argmax(-1), x.mean(0), x.sum(),
            torch.cat([x, x]), torch.stack([x, x]), x.gather(0, i[None].expand(1, 3)), functional.embedding(i, x),
            torch.where(x > 0, x, -x), (x > 0).nonzero(), x[x > 0], (x > 0).any(-1), (x > 0).all(),
            x.scatter(0, i[None], 1.0), x.index_select(0, i), x.clamp(-1, 1).div(3).half().float(), x[1:, ::2].t(),
            torch.arange(3, device=x.device), torch.full((2,), 3, device=x.device), x.topk(2)[0], x.cumsum(0),
            x.repeat(2, 1), torch.zeros(2, device=x.device), torch.ones_like(x), x.eq(x[0]), x.index_add(0, i, x[:3]),
            functional.conv1d(x[None], x[None, :, :2]),
            functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], is_causal=True),
        ]  # fmt: skip

    # Outside it torch_npu answers for attention before a kernel is asked for.
    with torch.inference_mode():
        results = list(zip(forward(values.to("npu"), index.to("npu")), forward(values, index), strict=True))
    for ours, theirs in results:
        assert ours.device.type == "npu"
        torch.testing.assert_close(ours.cpu(), theirs)


def test_what_is_written_in_place_is_what_is_returned(npu: Device) -> None:
    import torch

    # Autograd, and torch's own methods, would return the argument whatever the kernel returns.
    with torch.inference_mode():
        tensor, out = torch.zeros(3, device="npu"), torch.empty(3, device="npu")
        assert torch.ops.aten.add_.Tensor(tensor, 1) is tensor
        assert torch.ops.aten.mul.out(tensor, tensor + 1, out=out) is out
        assert torch.ops.aten.zero_(tensor[1:]).data_ptr() == tensor[1:].data_ptr()
    assert (tensor.tolist(), out.tolist()) == ([1, 0, 0], [2, 2, 2])


def test_random_numbers_follow_the_device_generator(npu: Device) -> None:
    import torch

    one, other = (torch.Generator(device="npu").manual_seed(3) for _ in range(2))
    first, second = (torch.rand(4, device="npu", generator=one) for _ in range(2))
    assert torch.equal(first, torch.rand(4, device="npu", generator=other))
    assert not torch.equal(first, second)
    state = one.get_state()
    drawn = torch.randn(4, device="npu", generator=one)
    one.set_state(state)
    assert torch.equal(drawn, torch.randn(4, device="npu", generator=one))
    with pytest.raises(RuntimeError, match="Expected a 'npu' device type for generator"):
        torch.rand(4, device="npu", generator=torch.Generator())
    torch.npu.manual_seed(5)
    default = torch.rand(4, device="npu")
    torch.npu.manual_seed(5)
    assert torch.equal(default, torch.rand(4, device="npu"))


# ---- hazards --------------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """One pinned buffer and one device buffer, and the streams between them."""

    pinned: Any
    on_npu: Any
    current: Any
    side: Any

    def upload(self) -> None:
        self.on_npu.copy_(self.pinned, non_blocking=True)

    def read(self) -> None:
        self.pinned.copy_(self.on_npu, non_blocking=True)


@pytest.fixture
def traffic(npu: Device) -> Traffic:
    import torch

    on_npu = torch.zeros(4, device="npu")
    return Traffic(torch.arange(4.0).pin_memory(), on_npu, torch.npu.current_stream(), torch.npu.Stream())


def _event() -> Any:
    import torch

    return torch.npu.Event()


def _on(stream: Any) -> Any:
    import torch

    return torch.npu.stream(stream)


def _poll(event: Any) -> None:
    while not event.query():
        pass


def _wait_stream(t: Traffic) -> None:
    t.upload()
    t.current.synchronize()


def _wait_event(t: Traffic) -> None:
    t.upload()
    event = _event()
    event.record()
    event.synchronize()


def _wait_by_polling(t: Traffic) -> None:
    t.upload()
    event = _event()
    event.record()
    _poll(event)


def _wait_device(t: Traffic) -> None:
    import torch

    t.upload()
    torch.npu.synchronize()


def _wait_through_another_stream(t: Traffic) -> None:
    t.upload()
    event = _event()
    event.record()
    t.side.wait_event(event)
    t.side.synchronize()


def _no_wait(t: Traffic) -> None:
    t.upload()


def _wait_for_the_wrong_stream(t: Traffic) -> None:
    with _on(t.side):
        t.upload()
    t.current.synchronize()


def _wait_for_an_early_event(t: Traffic) -> None:
    event = _event()
    event.record()
    t.upload()
    event.synchronize()


def _wait_for_an_event_of_another_stream(t: Traffic) -> None:
    with _on(t.side):
        t.upload()
    event = _event()
    event.record()
    event.synchronize()


def _only_the_device_waits(t: Traffic) -> None:
    t.upload()
    event = _event()
    event.record()
    t.side.wait_event(event)


def _ask_once(t: Traffic) -> None:
    t.upload()
    event = _event()
    event.record()
    event.query()


@pytest.mark.parametrize(
    ("wait", "enough"),
    [
        (_wait_stream, True),
        (_wait_event, True),
        (_wait_by_polling, True),
        (_wait_device, True),
        (_wait_through_another_stream, True),
        (_no_wait, False),
        (_wait_for_the_wrong_stream, False),
        (_wait_for_an_early_event, False),
        (_wait_for_an_event_of_another_stream, False),
        (_only_the_device_waits, False),
        (_ask_once, False),
    ],
)
def test_a_pinned_source_may_change_only_after_the_wait(
    wait: Callable[[Traffic], None], enough: bool, npu: Device, traffic: Traffic
) -> None:
    with npu.counting() as counting:
        wait(traffic)
        traffic.pinned.fill_(9)
    assert len(counting.hazards) == (0 if enough else 1)
    if enough:
        counting.assert_no_hazards()
    else:
        assert "source of a host-to-device copy of 16 bytes" in counting.hazards[0]
        with pytest.raises(AssertionError, match="changed before the copy was waited for"):
            counting.assert_no_hazards()
    # Nothing made the device fetch it before.
    early = wait in (_no_wait, _only_the_device_waits, _ask_once)
    assert traffic.on_npu.tolist() == ([9] * 4 if early else [0, 1, 2, 3])


def test_a_hazard_is_reported_once(npu: Device, traffic: Traffic) -> None:
    with npu.counting() as counting:
        traffic.upload()
        traffic.pinned.fill_(9)
        assert len(counting.hazards) == 1
        traffic.current.synchronize()
    assert len(counting.hazards) == 1


def test_a_read_before_the_wait_finds_poison(npu: Device, traffic: Traffic) -> None:
    import torch

    traffic.on_npu.fill_(5)
    with npu.counting() as counting:
        traffic.read()
        assert npu.copies_in_flight == 1
        assert set(traffic.pinned.view(torch.uint8).tolist()) == {POISON}
        assert emulated_ascend.check_host_read(traffic.pinned[2:3]) is False
        traffic.current.synchronize()
        assert emulated_ascend.check_host_read(traffic.pinned) is True
    assert npu.copies_in_flight == 0
    assert traffic.pinned.tolist() == [5, 5, 5, 5]
    assert len(counting.hazards) == 1
    assert "was read by the host" in counting.hazards[0]


def test_a_read_is_early_if_any_of_its_bytes_is(npu: Device, traffic: Traffic) -> None:
    traffic.pinned[2:].copy_(traffic.on_npu[2:], non_blocking=True)
    with npu.counting() as counting:
        assert npu.check_host_read(traffic.pinned[:2])
    counting.assert_no_hazards()
    assert not npu.check_host_read(traffic.pinned[::2])
    assert not npu.check_host_read(traffic.pinned.view(2, 2).t())
    assert npu.check_host_read(traffic.pinned[4:])


def test_a_read_after_the_wait_is_no_hazard(npu: Device, traffic: Traffic) -> None:
    traffic.on_npu.fill_(5)
    with npu.counting() as counting:
        traffic.read()
        _wait_event(traffic)
        assert npu.check_host_read(traffic.pinned)
    counting.assert_no_hazards()


def test_a_destination_may_not_be_written_before_the_wait(npu: Device, traffic: Traffic) -> None:
    with npu.counting() as counting:
        traffic.read()
        traffic.pinned[1] = 2
        traffic.current.synchronize()
    assert len(counting.hazards) == 1
    assert "was written by the host" in counting.hazards[0]


def test_the_device_reads_what_an_earlier_copy_of_the_stream_wrote(npu: Device, traffic: Traffic) -> None:
    import torch

    traffic.on_npu.fill_(5)
    landing = torch.zeros(4, device="npu")
    with npu.counting() as counting:
        traffic.read()
        landing.copy_(traffic.pinned, non_blocking=True)
        traffic.on_npu.fill_(6)
        traffic.read()
        traffic.current.synchronize()
    counting.assert_no_hazards()
    assert (landing.tolist(), traffic.pinned.tolist()) == ([5, 5, 5, 5], [6, 6, 6, 6])


def test_an_event_covers_only_what_was_issued_before_it(npu: Device, traffic: Traffic) -> None:
    import torch

    event = _event()
    traffic.on_npu.fill_(5)
    with npu.counting() as counting:
        traffic.read()
        event.record()
        traffic.on_npu.fill_(6)
        traffic.pinned[2:].copy_(traffic.on_npu[2:], non_blocking=True)
        event.synchronize()
        assert traffic.pinned[:2].tolist() == [5, 5]
        assert set(traffic.pinned[2:].view(torch.uint8).tolist()) == {POISON}
        traffic.current.synchronize()
    counting.assert_no_hazards()
    assert traffic.pinned.tolist() == [5, 5, 6, 6]


@pytest.mark.parametrize("ordered", [True, False])
def test_streams_that_share_pinned_bytes_need_an_event(ordered: bool, npu: Device, traffic: Traffic) -> None:
    with npu.counting() as counting:
        traffic.read()
        event = _event()
        event.record()
        with _on(traffic.side):
            if ordered:
                traffic.side.wait_event(event)
            traffic.upload()
        traffic.side.synchronize()
        traffic.current.synchronize()
    assert len(counting.hazards) == (0 if ordered else 1)
    assert all("nothing orders them" in hazard for hazard in counting.hazards)


def test_a_blocking_copy_reads_its_source_at_once(npu: Device, traffic: Traffic) -> None:
    """It waits for its own stream alone, so what another stream still has to deliver is not there yet."""
    with npu.counting() as counting:
        with _on(traffic.side):
            traffic.read()
        traffic.on_npu.copy_(traffic.pinned)
        traffic.side.synchronize()
    assert len(counting.hazards) == 1
    assert "was read by the host" in counting.hazards[0]


def test_pinned_memory_is_not_freed_under_a_copy(npu: Device, traffic: Traffic) -> None:
    cann = ctypes.CDLL("libascendcl.so")
    block = ctypes.c_void_p()
    assert cann.aclrtMallocHost(ctypes.byref(block), ctypes.c_size_t(16)) == 0
    with npu.counting() as counting:
        size = ctypes.c_size_t(16)
        to = ctypes.c_void_p(traffic.on_npu.data_ptr())
        assert cann.aclrtMemcpyAsync(to, size, block, size, 1, None) == 0
        assert cann.aclrtFreeHost(block) == 0
    assert len(counting.hazards) == 1
    assert "freed" in counting.hazards[0]


def test_torch_npu_keeps_a_pinned_block_while_it_is_in_use(npu: Device) -> None:
    import torch

    on_npu = torch.zeros(4, device="npu")
    source = torch.ones(4).pin_memory()
    address = source.data_ptr()
    with npu.counting() as counting:
        on_npu.copy_(source, non_blocking=True)
        del source
        recycled = torch.zeros(4).pin_memory()
    assert recycled.data_ptr() != address
    counting.assert_no_hazards()


# ---- counting -------------------------------------------------------------------------------------------------------


def test_counts_are_live_then_final(npu: Device, traffic: Traffic) -> None:
    import torch

    with emulated_ascend.counting() as counting:
        traffic.upload()
        assert counting.snapshot().h2d_async == 1
        with pytest.raises(EmulationError, match="still_counting"):
            _ = counting.counts
        traffic.on_npu.add_(1)
        torch.npu.synchronize()
        _event().record()
    traffic.upload()
    counts = counting.counts
    assert counts == Counts(
        h2d_async=1, h2d_bytes=16, device_syncs=1, event_records=1, launches={"aten.add_.Tensor": 1}
    )
    assert (counts.h2d, counts.d2h, counts.d2d, counts.host_syncs, counts.kernels) == (1, 0, 0, 1, 1)


def test_counts_nest_and_may_be_counted_again(npu: Device, traffic: Traffic) -> None:
    outer = npu.counting()
    with outer:
        traffic.upload()
        with npu.counting() as inner:
            traffic.upload()
        traffic.pinned.fill_(9)
    assert (inner.counts.h2d, outer.counts.h2d) == (1, 2)
    assert (len(inner.hazards), len(outer.hazards)) == (0, 2)
    with outer:
        traffic.current.synchronize()
    assert outer.counts == Counts(stream_syncs=1)
    assert outer.hazards == ()


def test_waits_of_the_host_and_of_the_device_are_counted_apart(npu: Device, traffic: Traffic) -> None:
    with npu.counting() as counting:
        event = _event()
        event.record()
        traffic.side.wait_event(event)
        event.synchronize()
    counts = counting.counts
    assert (counts.event_waits, counts.event_syncs, counts.event_records, counts.host_syncs) == (1, 1, 1, 1)


def test_allocations_are_counted_where_cann_makes_them(npu: Device) -> None:
    import torch

    with npu.counting() as counting:
        large = torch.empty(64 << 20, dtype=torch.uint8, device="npu")
        pinned = torch.empty(32 << 20, dtype=torch.uint8, pin_memory=True)
        assert large[-1].item() == STALE
    assert counting.counts.device_allocs == counting.counts.pinned_allocs == 1
    assert counting.counts.device_alloc_bytes >= large.nbytes
    assert counting.counts.pinned_alloc_bytes >= pinned.nbytes


# ---- what is not modelled -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["special_airy_ai", "lstm"])
def test_an_operator_outside_the_tables_is_named(name: str, npu: Device) -> None:
    import torch

    tensor = torch.zeros(1, 1, 4, 8, device="npu")
    acts: dict[str, Callable[[], Any]] = {
        "special_airy_ai": lambda: torch.special.airy_ai(tensor),
        "lstm": lambda: torch.nn.LSTM(8, 8).to("npu")(tensor[0]),
    }
    with torch.no_grad(), pytest.raises(NotImplementedError, match=name):
        acts[name]()


def test_a_cann_function_outside_the_model_is_named_where_torch_npu_looks(npu: Device) -> None:
    import torch

    first, second = (torch.npu.Event(enable_timing=True) for _ in range(2))
    first.record()
    second.record()
    with pytest.raises(RuntimeError, match="does not model the CANN function aclrtEventElapsedTime"):
        first.elapsed_time(second)
    with pytest.raises(EmulationError, match="aclrtEventElapsedTime") as caught:
        npu.raise_faults()
    assert caught.value.code == "unmodelled"


def test_a_cann_function_outside_the_model_is_named_where_torch_npu_does_not_look(npu: Device) -> None:
    import torch

    cann = ctypes.CDLL("libascendcl.so")
    with pytest.raises(EmulationError, match="aclrtProcessReport"), npu.counting():
        cann.aclrtProcessReport(0)
    cann.aclrtProcessReport(0)
    with pytest.raises(EmulationError, match="aclrtProcessReport"):
        torch.zeros(1, device="npu")
    npu.raise_faults()


def test_a_cann_operator_without_kernel_is_named(npu: Device) -> None:
    import torch_npu

    with pytest.raises(RuntimeError):
        torch_npu.npu_fast_gelu(Bench().npu)
    with pytest.raises(EmulationError, match="no kernel for the CANN operator FastGelu"):
        npu.raise_faults()


def test_a_kernel_that_refuses_its_operands_is_quoted_once(npu: Device) -> None:
    """As CANN would report it: to the caller, and not again to whoever uses the device next."""
    import torch

    narrow, wide = torch.zeros(1, 8, device="npu"), torch.ones(2, 8, device="npu")
    with npu.counting() as counting:
        with pytest.raises(RuntimeError, match=r"operator ViewCopy failed: RuntimeError: output with shape \[1, 8\]"):
            narrow.copy_(wide)
        assert narrow.tolist() == [[0] * 8]
        torch.zeros(1, device="npu")
    assert "ViewCopy" not in counting.counts.launches


def test_a_dtype_outside_the_model_is_named(npu: Device) -> None:
    import torch

    with pytest.raises(RuntimeError, match="aclDataType 35 is not modelled"):
        torch.empty(4, dtype=torch.float8_e5m2, device="npu").to(torch.float32)


def test_memory_is_told_by_its_address(npu: Device, traffic: Traffic) -> None:
    import torch

    cann = ctypes.CDLL("libascendcl.so")
    pageable = torch.ones(4)
    attributes = (ctypes.c_uint32 * 7)()
    kinds = []
    for tensor in (traffic.pinned, traffic.on_npu, pageable):
        assert cann.aclrtPointerGetAttributes(ctypes.c_void_p(tensor.data_ptr()), attributes) == 0
        kinds.append(attributes[1])
    assert kinds == [0, 1, 2]


def test_fills_are_counted_and_stay_in_their_memory(npu: Device, traffic: Traffic) -> None:
    cann = ctypes.CDLL("libascendcl.so")
    address, size = ctypes.c_void_p(traffic.on_npu.data_ptr()), ctypes.c_size_t(16)
    traffic.on_npu.fill_(5)
    with npu.counting() as counting:
        assert cann.aclrtMemsetAsync(address, size, 0, size, None) == 0
    assert counting.counts == Counts(memsets=1)
    assert traffic.on_npu.tolist() == [0] * 4
    assert cann.aclrtMemset(address, ctypes.c_size_t(4), 0, size) != 0
    with pytest.raises(EmulationError, match="a fill of 16 bytes leaves the memory block"):
        npu.raise_faults()


def test_a_copy_outside_its_memory_fails(npu: Device, traffic: Traffic) -> None:
    cann = ctypes.CDLL("libascendcl.so")
    size = ctypes.c_size_t(1 << 40)
    address = ctypes.c_void_p(traffic.on_npu.data_ptr())
    assert cann.aclrtMemcpy(address, size, ctypes.c_void_p(traffic.pinned.data_ptr()), size, 1) != 0
    assert cann.aclrtMemcpy(address, ctypes.c_size_t(4), address, ctypes.c_size_t(4), 1) != 0
    with pytest.raises(EmulationError, match=r"leaves the memory block.*make it kind 3"):
        npu.raise_faults()


def test_every_function_torch_npu_links_against_is_answered(npu: Device) -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not installed")
    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    linked: set[str] = set()
    for path in (folder / "lib" / "libtorch_npu.so", folder / "lib" / "libtensorpipe.so"):
        listing = subprocess.run([nm, "-D", "--undefined-only", path], capture_output=True, text=True, check=True)
        linked |= {line.split()[-1] for line in listing.stdout.splitlines()}
    needed = {name for name in linked if name.startswith(("acl", "rt", "Msprof", "Hccl"))}
    cann = ctypes.CDLL("libascendcl.so")
    assert {"aclrtMemcpyAsync", "aclrtSynchronizeStream", "MsprofReportApi"} <= needed
    assert [name for name in sorted(needed) if not hasattr(cann, name)] == []


# ---- bad input ------------------------------------------------------------------------------------------------------


def _in_a_process(body: str, **environment: str) -> str:
    code = f"""
import sys
from omni_npu_phase import emulated_ascend
try:
    {body}
    print("done")
except emulated_ascend.EmulationError as error:
    print(error.code, error)
"""
    done = _run("-c", code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


ACTIVATE = "emulated_ascend.activate()"
TORCHVISION = "from omni_npu_phase.standins import torchvision as t; t.install()"
PRETEND = "import importlib.metadata as m; m.version = lambda name: (_ for _ in ()).throw(m.PackageNotFoundError(name))"


@pytest.mark.parametrize(
    ("body", "environment", "code", "says"),
    [
        (f"{PRETEND}; {ACTIVATE}", {}, "torch_npu_missing", "install torch-npu==2.1"),
        (f"import importlib.metadata as m; m.version = lambda n: '9.1'; {ACTIVATE}", {}, "torch_npu_version", "9.1"),
        (ACTIVATE, {"ASCEND_HOME_PATH": "/somewhere"}, "cann_present", "ASCEND_HOME_PATH=/somewhere"),
        (f"sys.modules['torch_npu'] = sys; {ACTIVATE}", {}, "imported_early", "activate() first"),
        (ACTIVATE, {"TASK_QUEUE_ENABLE": "1"}, "task_queue", "TASK_QUEUE_ENABLE=1"),
        (f"import torch; torch.utils.rename_privateuse1_backend('toy'); {ACTIVATE}", {}, "other_device", "'toy'"),
        (ACTIVATE, {"PATH": "/nowhere"}, "no_compiler", "install gcc or clang"),
        ("emulated_ascend.counting()", {}, "not_active", "call activate() first"),
        (f"sys.platform = 'win32'; {ACTIVATE}", {}, "unsupported_platform", "win32"),
    ],
)
def test_bad_surroundings_are_named(
    body: str, environment: dict[str, str], code: str, says: str, tmp_path: Path
) -> None:
    line = _in_a_process(body, CC="", OMNI_NPU_PHASE_CACHE=str(tmp_path), **environment)
    assert line.split()[0] == code
    assert says in line


def test_a_cann_that_can_be_loaded_is_left_alone(tmp_path: Path) -> None:
    compiler, _ = library.find_compiler()
    subprocess.run([compiler, "-shared", "-x", "c", os.devnull, "-o", tmp_path / "libascendcl.so"], check=True)
    line = _in_a_process(ACTIVATE, LD_LIBRARY_PATH=str(tmp_path))
    assert line.startswith("cann_present [cann_present] this machine has CANN (libascendcl.so can be loaded)")


def test_libraries_that_cannot_be_loaded_are_named(tmp_path: Path) -> None:
    directory = emulated_ascend.active_device().libraries
    shutil.copytree(directory, tmp_path / directory.name)
    (tmp_path / directory.name / "libhccl.so").write_text("no library")
    line = _in_a_process(ACTIVATE, OMNI_NPU_PHASE_CACHE=str(tmp_path))
    assert line.startswith("load_failed")
    assert f"delete {tmp_path / directory.name}" in line


def test_activation_does_not_change_its_mind(npu: Device) -> None:
    assert emulated_ascend.activate() is npu
    with pytest.raises(EmulationError) as caught:
        emulated_ascend.activate(kernels=False)
    assert caught.value.code == "already_active"


def test_only_host_tensors_are_read_by_the_host(npu: Device) -> None:
    with pytest.raises(EmulationError) as caught:
        npu.check_host_read(Bench().npu)
    assert caught.value.code == "not_host"


def test_a_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "picky"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo picky 1 && exit 0\necho "no such luck" >&2\nexit 3\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with pytest.raises(EmulationError, match="no such luck") as caught:
        library.build("2.13.0")
    assert caught.value.code == "compile_failed"
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(EmulationError, match=CACHE_VARIABLE) as caught:
        library.build("2.13.0")
    assert caught.value.code == "cache_unwritable"


def test_importing_it_loads_no_torch() -> None:
    loaded = "[name for name in sys.modules if 'torch' in name]"
    code = f"import sys; from omni_npu_phase import emulated_ascend; print({loaded})"
    done = _run("-c", code)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_on_hardware_these_tests_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text("class npu:\n    is_available = staticmethod(lambda: True)\n")
    done = _run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", "npu", __file__, PYTHONPATH=_before(tmp_path)
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ skipped in ", done.stdout, re.MULTILINE), done.stdout


# ---- the compiled libraries -----------------------------------------------------------------------------------------


BUILD = "from omni_npu_phase.emulated_ascend import library; print(library.build({version!r}))"


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    real, _ = library.find_compiler()
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo compiled >> {log}\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    built, compiled = [], []
    for version in ("2.13.0", "2.13.0", "2.13.1"):
        code = BUILD.format(version=version)
        done = _run("-c", code, CC=str(compiler), OMNI_NPU_PHASE_CACHE=str(tmp_path / "cache"))
        assert done.returncode == 0, done.stderr
        built.append(done.stdout)
        compiled.append(len(log.read_text().split()))
    assert built[0] == built[1] != built[2]
    assert 0 < compiled[0] == compiled[1] < compiled[2]


def test_processes_may_compile_at_the_same_time(tmp_path: Path) -> None:
    code = BUILD.format(version="2.13.0")
    environment = {**os.environ, CACHE_VARIABLE: str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
        for _ in range(4)
    ]
    answers = {process.communicate()[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0, 0, 0]
    assert answers == {str(path) for path in tmp_path.iterdir()}
    assert len(answers) == 1


# ---- stand-ins for packages -----------------------------------------------------------------------------------------


def test_a_torchvision_that_does_not_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    code = f"try:\n    {TORCHVISION}\nexcept ImportError as error:\n    print(error)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": _before(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "torchvision::nms does not exist" in done.stdout


def test_the_torchvision_stand_in_is_there_only_where_torchvision_is_not() -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    code = f"""
import importlib.util
missing = importlib.util.find_spec("torchvision") is None
{TORCHVISION}
{TORCHVISION}
from torchvision.transforms.v2 import functional
from transformers.utils.import_utils import is_torchvision_available
assert isinstance(functional, t.StandInModule) is missing
assert is_torchvision_available() is not missing
if missing:
    try:
        functional.resize
    except AttributeError as error:
        assert "torchvision stand-in has no torchvision.transforms.v2.functional.resize" in str(error), error
    else:
        raise SystemExit("it has resize")
"""
    done = _run("-c", code)
    assert done.returncode == 0, done.stderr


# ---- vLLM-Omni's runners --------------------------------------------------------------------------------------------


def test_both_npu_runner_classes_import(npu: Device) -> None:
    """To prepare the device again changes nothing."""
    pytest.importorskip("vllm_omni")
    pytest.importorskip("vllm_ascend")
    verify.prepare_device("emulated")
    from vllm_omni.platforms import current_omni_platform
    from vllm_omni.platforms.npu.worker.npu_ar_model_runner import NPUARModelRunner
    from vllm_omni.platforms.npu.worker.npu_generation_model_runner import NPUGenerationModelRunner

    for runner in (NPUARModelRunner, NPUGenerationModelRunner):
        names = [base.__name__ for base in runner.__mro__]
        assert names[1:3] == ["OmniNPUModelRunner", "OmniGPUModelRunner"]
        assert names[names.index("NPUModelRunner") + 1] == "GPUModelRunner"
    assert type(current_omni_platform).__name__ == "NPUOmniPlatform"


if __name__ == "__main__":
    emulated_ascend.activate(kernels=False)
    sys.stdout.write(json.dumps({name: observe(rule) for name, (rule, _) in _rules().items()}) + "\n")
