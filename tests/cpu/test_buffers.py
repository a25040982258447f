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
from omni_npu_phase.buffers.ascend import AscendBufferHelper
from omni_npu_phase.buffers.base import BufferHelper
from omni_npu_phase.buffers.cpu import CpuBufferHelper
from omni_npu_phase.buffers.cuda import CudaBufferHelper
from tests import fake_cuda

CPU = torch.device("cpu")
HELPERS = {
    BufferHelper: CPU,
    CpuBufferHelper: CPU,
    CudaBufferHelper: fake_cuda.DEVICE,
    AscendBufferHelper: fake_cuda.DEVICE,
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


def test_cpu_helper_stages_into_one_array() -> None:
    helper = CpuBufferHelper(CPU)
    first = helper.rows([4, 1])
    assert isinstance(first, torch.Tensor)
    address = first.data_ptr()
    second = helper.rows([7, 2, 9])
    assert isinstance(second, torch.Tensor)
    assert second.data_ptr() == address
    many = list(range(300, 0, -2))
    assert torch.arange(301)[helper.rows(many)].tolist() == many


# Copies.


@given(offsets=located, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_take_is_indexing(make: Make, offsets: list[int], dtype: torch.dtype) -> None:
    helper = make()
    source = _rows(helper.device)
    out = torch.zeros(len(offsets), 3, dtype=dtype, device=helper.device)
    address = out.data_ptr()
    helper.take(source, helper.rows(offsets), out=out)
    assert torch.equal(out, source[offsets].to(dtype).reshape(out.shape))
    assert out.data_ptr() == address


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


@pytest.mark.parametrize("keep", [lambda lent: lent, lambda lent: lent[1:2], lambda lent: None])
def test_what_was_lent_and_kept_is_not_written_over(
    make: Make, keep: Callable[[torch.Tensor], torch.Tensor | None]
) -> None:
    helper = make()
    source = torch.arange(4, dtype=torch.int32, device=helper.device)
    first = helper.lend(source)
    kept, memory = keep(first), first.data_ptr()
    del first
    was = None if kept is None else kept.tolist()
    again = helper.lend(source.add_(10))
    assert again.tolist() == [10, 11, 12, 13]
    if kept is not None:
        assert kept.tolist() == was
    elif helper.is_host:
        # On the stand-in nobody can see who reaches a tensor.
        assert again.data_ptr() == memory
    assert helper.lend(torch.zeros(500, dtype=torch.int64, device=helper.device)).tolist() == [0] * 500


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


@given(groups=st.lists(st.lists(tensors, min_size=1, max_size=5), max_size=3))
def test_packed_tensors_come_back_on_the_host_and_owned(make: Make, groups: list[list[torch.Tensor]]) -> None:
    helper = make()
    groups = [[tensor.to(helper.device) for tensor in group] for group in groups]
    fetched = helper.fetch([helper.pack(group) for group in groups])
    back = [helper.unpack(block, group) for block, group in zip(fetched, groups, strict=True)]
    wanted = [[tensor.clone() for tensor in group] for group in groups]
    for group in groups:
        for tensor in group:
            tensor.zero_()
    for group, copies in zip(wanted, back, strict=True):
        for tensor, copy in zip(group, copies, strict=True):
            assert copy.device == CPU
            assert copy.dtype == tensor.dtype
            assert copy.is_contiguous()
            assert torch.equal(copy, tensor.cpu())


def test_writes_to_one_unpacked_tensor_stay_there(make: Make) -> None:
    helper = make()
    group = [torch.tensor(True), torch.ones(3, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int64)]
    group = [tensor.to(helper.device) for tensor in group]
    first, second, third = helper.unpack(helper.pack(group), group)
    second.fill_(5)
    assert first.item() is True
    assert third.tolist() == [1, 1]


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

on_the_host = pytest.mark.parametrize("kind", [BufferHelper, CpuBufferHelper])


@on_the_host
@given(count=st.integers(1, 5), shape=st.lists(st.integers(0, 3), max_size=2), dtype=st.sampled_from(DTYPES))
def test_joined_tensors_are_owned_rows_of_one_block(
    kind: type[BufferHelper], count: int, shape: list[int], dtype: torch.dtype
) -> None:
    helper = kind(CPU)
    group = [torch.full(shape, index % 2, dtype=dtype) for index in range(count)]
    block = helper.join(group)
    for tensor in group:
        tensor.fill_(1)
    assert block.shape == (count, *shape)
    assert [part.unique().tolist() for part in block.unbind()] == [
        [index % 2] if part.numel() else [] for index, part in enumerate(block)
    ]


@on_the_host
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_rows_are_cast_in_place(kind: type[BufferHelper], dtype: torch.dtype) -> None:
    dest = torch.zeros(4, 3, dtype=dtype)
    address = dest.data_ptr()
    for count in (1, 3):
        kind(CPU).gather([torch.full((1, 3), 1.0 + row) for row in range(count)], out=dest[:count])
        assert dest[:count, 0].tolist() == [1.0 + row for row in range(count)]
    kind(CPU).gather([torch.ones(1, 3, dtype=torch.float64), torch.ones(1, 3, dtype=torch.bfloat16)], out=dest[2:])
    assert dest[2:].eq(1).all()
    assert dest.data_ptr() == address


@on_the_host
def test_fetched_blocks_are_in_memory_of_their_own(kind: type[BufferHelper]) -> None:
    helper = kind(CPU)
    blocks = [torch.ones(2, dtype=torch.bool), torch.ones(3, 5, dtype=torch.int64)]
    fetched = helper.fetch(blocks)
    assert [block.untyped_storage().nbytes() for block in fetched] == [2, 120]
    assert all(torch.equal(*pair) for pair in zip(fetched, blocks, strict=True))


def test_a_host_tensor_becomes_an_owned_one_of_the_device() -> None:
    helper = base.HELPER(torch.device("meta"))
    assert helper.own(torch.ones(2)).device.type == "meta"
    own = torch.ones(2)
    assert base.HELPER(CPU).own(own).data_ptr() != own.data_ptr()
