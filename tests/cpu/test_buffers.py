# SPDX-License-Identifier: Apache-2.0
"""Buffer helpers: rows, copies under any overlap, owned results; the same rules for every helper.

Those of devices that work while the host goes on are held to them on a stand-in for a CUDA device, whose copies are
late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_npu_phase import buffers
from omni_npu_phase.buffers import base
from omni_npu_phase.buffers.base import BufferHelper
from omni_npu_phase.buffers.cpu import CpuBufferHelper
from omni_npu_phase.buffers.cuda import CudaBufferHelper
from omni_npu_phase.buffers.staging import StagedBufferHelper
from tests import fake_cuda

CPU = torch.device("cpu")
HELPERS = {
    BufferHelper: CPU,
    CpuBufferHelper: CPU,
    CudaBufferHelper: fake_cuda.DEVICE,
    StagedBufferHelper: fake_cuda.DEVICE,
}
Make: TypeAlias = Callable[[], BufferHelper]
DTYPES = [torch.bool, torch.int64, torch.bfloat16, torch.float32, torch.float64, torch.uint8]

offsets_of_rows = st.lists(st.integers(0, 9), max_size=10, unique=True)
contiguous_rows = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda ends: list(range(min(ends), max(ends))))
located = st.one_of(offsets_of_rows, contiguous_rows)


@pytest.fixture(scope="module", params=HELPERS, ids=lambda helper: helper.__name__)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    device = HELPERS[request.param]
    with nullcontext() if device == CPU else fake_cuda.FakeCuda():
        yield lambda: request.param(device)


def _rows(device: torch.device, count: int = 10, width: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(count * width, device=device).reshape(count, width).to(dtype)


# Locating rows.


@given(offsets=located)
def test_rows_select_the_offsets(make: Make, offsets: list[int]) -> None:
    helper = make()
    rows = helper.rows(offsets)
    assert torch.arange(10, device=helper.device)[rows].tolist() == offsets
    contiguous = offsets == list(range(offsets[0], offsets[0] + len(offsets))) if offsets else True
    assert isinstance(rows, slice) == contiguous
    if isinstance(rows, torch.Tensor):
        assert rows.dtype == torch.int64
        assert rows.shape == (len(offsets),)


def test_rows_just_located_are_not_staged_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    helper, staged = make(), []
    stage = helper._stage
    monkeypatch.setattr(helper, "_stage", lambda values: staged.append(values) or stage(values))
    first = helper.rows([4, 1])
    assert helper.rows((4, 1)) is first
    assert helper.rows(range(3)) == slice(0, 3)
    helper.rows([1, 4])
    helper.rows(list(range(200, 0, -1)))
    assert [values[:2] for values in staged] == [[4, 1], [1, 4], [200, 199]]
    assert helper.rows([]) == slice(0, 0)


# Copies.


@given(offsets=located, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_put_is_assignment_by_index(make: Make, offsets: list[int], dtype: torch.dtype) -> None:
    helper = make()
    dest, source = _rows(helper.device, dtype=dtype), 100 + _rows(helper.device, len(offsets))
    wanted = dest.clone()
    wanted[offsets] = source.to(dtype)
    address = dest.data_ptr()
    helper.put(dest, helper.rows(offsets), source)
    assert torch.equal(dest, wanted)
    assert dest.data_ptr() == address


@given(offsets=located, start=st.integers(0, 9), step=st.integers(1, 3))
def test_put_from_its_own_buffer(make: Make, offsets: list[int], start: int, step: int) -> None:
    helper = make()
    dest = _rows(helper.device)
    source = dest[start::step][: len(offsets)]
    offsets = offsets[: source.shape[0]]
    source = source[: len(offsets)]
    wanted = dest.clone()
    wanted[offsets] = source.clone()
    helper.put(dest, helper.rows(offsets), source)
    assert torch.equal(dest, wanted)


@pytest.mark.parametrize(
    ("rows", "source"),
    [
        (slice(0, 4), slice(1, 5)),
        (slice(1, 5), slice(0, 4)),
        (slice(0, 4), slice(4, 8)),
        (slice(2, 6), slice(2, 6)),
    ],
    ids=["up", "down", "apart", "itself"],
)
def test_overlap_in_every_direction(make: Make, rows: slice, source: slice) -> None:
    helper = make()
    dest = _rows(helper.device)
    wanted = dest.clone()
    wanted[rows] = dest[source].clone()
    helper.put(dest, rows, dest[source])
    assert torch.equal(dest, wanted)


def test_columns_and_transposes_of_the_buffer(make: Make) -> None:
    helper = make()
    dest = _rows(helper.device, 3, 3)
    wanted = dest.t().clone()
    helper.put(dest, slice(0, 3), dest.t())
    assert torch.equal(dest, wanted)


def test_put_onto_itself_writes_nothing(make: Make) -> None:
    helper = make()
    dest = _rows(helper.device)
    version = dest._version
    helper.put(dest, slice(2, 5), dest[2:5])
    assert dest._version == version
    # The same memory under another dtype or stride is no copy of itself.
    helper.put(dest, slice(0, 3), dest[:3].view(torch.int32))
    assert dest._version > version


def test_copy_casts_in_place(make: Make) -> None:
    helper = make()
    dest = torch.zeros(2, 3, dtype=torch.bfloat16, device=helper.device)
    address = dest.data_ptr()
    for device in (helper.device, CPU):
        helper.copy(dest.zero_(), _rows(device, 2))
        assert torch.equal(dest, _rows(helper.device, 2).bfloat16())
    assert dest.data_ptr() == address


def test_a_host_tensor_may_change_once_it_was_copied(make: Make) -> None:
    """In however many copies: the device has read none of them when the host goes on."""
    helper = make()
    dests = [torch.zeros(4, device=helper.device) for _ in range(9)]
    source = torch.zeros(4)
    for number, dest in enumerate(dests):
        helper.copy(dest, source.fill_(number))
    source.fill_(-1)
    assert [dest.tolist() for dest in dests] == [[float(number)] * 4 for number in range(9)]


# Results.


def test_snapshot_is_owned_and_contiguous(make: Make) -> None:
    helper = make()
    source = _rows(helper.device, 4, 4).t().requires_grad_()
    snapshot = helper.snapshot(source)
    assert snapshot.is_contiguous()
    assert not snapshot.requires_grad
    before = snapshot.clone()
    with torch.no_grad():
        source.fill_(9)
    assert torch.equal(snapshot, before)


tensors = st.builds(
    lambda shape, dtype, transposed: (
        torch.randint(0, 2, shape).to(dtype).t()
        if transposed and len(shape) == 2
        else torch.randint(0, 2, shape).to(dtype)
    ),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.sampled_from(DTYPES),
    st.booleans(),
)


@given(blocks=st.lists(tensors, max_size=5))
def test_fetched_blocks_are_on_the_host_in_memory_of_their_own(make: Make, blocks: list[torch.Tensor]) -> None:
    helper = make()
    wanted = [block.clone().contiguous() for block in blocks]
    fetched = helper.fetch([helper.snapshot(block.to(helper.device)) for block in blocks])
    for block, copy in zip(wanted, fetched, strict=True):
        assert (copy.device, copy.dtype, copy.shape) == (CPU, block.dtype, block.shape)
        assert copy.is_contiguous()
        assert copy.untyped_storage().nbytes() == block.nbytes
        assert torch.equal(copy, block)


# Choice by device.


@pytest.mark.parametrize(
    ("device", "kind"), [("cpu", CpuBufferHelper), ("cuda", CudaBufferHelper), ("meta", BufferHelper)]
)
def test_helper_is_chosen_by_device_type(device: str, kind: type[BufferHelper]) -> None:
    with fake_cuda.FakeCuda() if device == "cuda" else nullcontext():
        helper = buffers.for_device(torch.device(device))
        assert type(helper) is kind
        assert helper.device.type == device
        assert buffers.for_device(torch.device(device)) is not helper


def test_base_helper_stages_on_its_device() -> None:
    rows = base.HELPER(torch.device("meta")).rows([3, 1])
    assert isinstance(rows, torch.Tensor)
    assert (rows.device.type, rows.dtype, rows.shape) == ("meta", torch.int64, (2,))


# What is put together.


@given(count=st.integers(1, 5), shape=st.lists(st.integers(0, 3), max_size=2), dtype=st.sampled_from(DTYPES))
def test_stacked_tensors_are_owned_rows_of_one_block(
    make: Make, count: int, shape: list[int], dtype: torch.dtype
) -> None:
    helper = make()
    group = [torch.full(shape, index % 2, dtype=dtype, device=helper.device) for index in range(count)]
    block = helper.stack(group)
    for tensor in group:
        tensor.fill_(1)
    assert block.shape == (count, *shape)
    assert block.is_contiguous()
    assert [part.unique().tolist() for part in block.unbind()] == [
        [index % 2] if part.numel() else [] for index, part in enumerate(block)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_copies_are_cast_in_place(make: Make, dtype: torch.dtype) -> None:
    helper = make()
    dests = [torch.zeros(1, 3, dtype=dtype, device=helper.device) for _ in range(3)]
    addresses = [dest.data_ptr() for dest in dests]
    helper.copy_all(
        dests, [_rows(where, 1) + number for number, where in enumerate((helper.device, CPU, helper.device))]
    )
    assert [dest[0].tolist() for dest in dests] == [[number, number + 1.0, number + 2.0] for number in range(3)]
    assert [dest.data_ptr() for dest in dests] == addresses


def test_several_copies_of_what_asks_for_a_derivative() -> None:
    """As a hook returns it where no inference mode is."""
    dests = [torch.zeros(2), torch.zeros(2)]
    CpuBufferHelper(CPU).copy_all(dests, [torch.ones(2, requires_grad=True) * 2, torch.ones(2)])
    assert [dest.tolist() for dest in dests] == [[2, 2], [1, 1]]
