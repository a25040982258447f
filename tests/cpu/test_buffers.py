# SPDX-License-Identifier: Apache-2.0
"""Every helper held to the same rules: rows land where they belong, results are owned, overlap is no trap."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_npu_phase import buffers
from omni_npu_phase.buffers.base import BufferHelper
from omni_npu_phase.buffers.cpu import CpuBufferHelper

CPU = torch.device("cpu")
HELPERS = (BufferHelper, CpuBufferHelper)
offsets_of_eight = st.lists(st.integers(0, 7), unique=True, max_size=8)


@pytest.fixture(params=HELPERS, ids=lambda cls: cls.__name__)
def helper(request: pytest.FixtureRequest) -> BufferHelper:
    made: BufferHelper = request.param(CPU)
    return made


def test_chosen_by_device_type() -> None:
    assert type(buffers.for_device(CPU)) is CpuBufferHelper
    assert type(buffers.for_device(torch.device("meta"))) is BufferHelper


def test_contiguous_rows_need_no_index(helper: BufferHelper) -> None:
    assert helper.rows([3, 4, 5]) == slice(3, 6)
    assert helper.rows([]) == slice(0, 0)
    assert helper.rows([6]) == slice(6, 7)


def test_scattered_rows_are_staged_once(helper: BufferHelper) -> None:
    first = helper.rows([5, 1])
    assert isinstance(first, torch.Tensor)
    assert first.dtype == torch.int64
    assert first.tolist() == [5, 1]
    assert helper.rows([5, 1]) is first
    assert list(helper.rows([2, 0, 7])) == [2, 0, 7]
    assert list(helper.rows(list(range(0, 400, 2)))) == list(range(0, 400, 2))


@pytest.mark.parametrize("cls", HELPERS)
@given(offsets=offsets_of_eight)
def test_put_and_take(cls: type[BufferHelper], offsets: list[int]) -> None:
    helper = cls(CPU)
    dest = torch.full((8, 2), -1.0)
    address = dest.data_ptr()
    source = torch.arange(2.0 * len(offsets)).reshape(-1, 2)
    helper.put(dest, helper.rows(offsets), source)
    for row in range(8):
        wanted = source[offsets.index(row)] if row in offsets else torch.full((2,), -1.0)
        assert torch.equal(dest[row], wanted)
    assert dest.data_ptr() == address
    out = torch.zeros(len(offsets), 2)
    helper.take(dest, helper.rows(offsets), out)
    assert torch.equal(out, source)


@pytest.mark.parametrize("offsets", [[1, 2], [2, 0]])
def test_dtypes_are_cast(helper: BufferHelper, offsets: list[int]) -> None:
    ids = torch.zeros(4, dtype=torch.int32)
    helper.put(ids, helper.rows(offsets), torch.tensor([7, 8], dtype=torch.int64))
    assert ids[offsets].tolist() == [7, 8]
    out = torch.zeros(2, dtype=torch.int64)
    helper.take(ids, helper.rows(offsets), out)
    assert out.tolist() == [7, 8]
    host = torch.zeros(2, dtype=torch.bfloat16)
    helper.copy(host, torch.tensor([1.0, 2.0]))
    assert host.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("cls", HELPERS)
@given(start=st.integers(0, 4), source=st.integers(0, 4), reverse=st.booleans())
def test_overlap(cls: type[BufferHelper], start: int, source: int, reverse: bool) -> None:
    """A result may be any part of the buffer it goes to (E8)."""
    helper = cls(CPU)
    dest = torch.arange(16.0).reshape(8, 2)
    expected = dest.clone()
    given_rows = dest[source : source + 4]
    offsets = list(range(start, start + 4))
    if reverse:
        offsets.reverse()
    expected[offsets] = given_rows.clone()
    helper.put(dest, helper.rows(offsets), given_rows)
    assert torch.equal(dest, expected)


def test_a_buffer_onto_itself_is_no_write(helper: BufferHelper) -> None:
    dest = torch.zeros(4, 2)
    version = dest._version
    helper.put(dest, slice(1, 3), dest[1:3])
    assert dest._version == version


def test_snapshot_is_owned(helper: BufferHelper) -> None:
    source = torch.arange(8.0).reshape(2, 4).t()
    copy = helper.snapshot(source)
    wanted = source.clone()
    source.fill_(0)
    assert torch.equal(copy, wanted)
    assert copy.is_contiguous()


def test_results_of_any_kind_come_back_owned(helper: BufferHelper) -> None:
    def make() -> list[torch.Tensor]:
        return [
            torch.tensor(True),
            torch.arange(3),
            torch.tensor([1.5], dtype=torch.bfloat16),
            torch.empty(0, 4),
            torch.arange(6.0).reshape(2, 3).t(),
            torch.tensor(2, dtype=torch.uint8),
            torch.arange(5, dtype=torch.int16),
            torch.zeros(3, dtype=torch.complex128),
        ]

    tensors = make()
    blocks = [helper.pack(tensors[:3]), helper.pack(tensors[3:])]
    for tensor in tensors:
        tensor.zero_()
    host = helper.fetch(blocks)
    copies = [*helper.unpack(host[0], tensors[:3]), *helper.unpack(host[1], tensors[3:])]
    for copy, wanted in zip(copies, make(), strict=True):
        assert copy.dtype == wanted.dtype
        assert copy.shape == wanted.shape
        assert torch.equal(copy, wanted)


def test_nothing_to_fetch(helper: BufferHelper) -> None:
    assert helper.fetch([]) == []


def test_one_block(helper: BufferHelper) -> None:
    (host,) = helper.fetch([helper.pack([torch.tensor([4, 5])])])
    assert helper.unpack(host, [torch.zeros(2, dtype=torch.int64)])[0].tolist() == [4, 5]
