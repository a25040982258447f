# SPDX-License-Identifier: Apache-2.0
"""Models of the operators that a decoder launches: each against plain PyTorch, and on the emulated device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from omni_npu_phase.emulated_ascend import Device, engine, graphs, models
from omni_npu_phase.emulated_ascend.engine import compute_slot_mapping

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 8, 4
MASK = torch.ones(2048, 2048, dtype=torch.int8)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def test_norms() -> None:
    x, y, gamma = torch.randn(5, 16), torch.randn(5, 16), torch.randn(16)
    expected = functional.rms_norm(x + y, (16,), gamma, 1e-5)
    torch.testing.assert_close(models.rms_norm(x + y, gamma, 1e-5)[0], expected)
    for made, _, total in (models.add_rms_norm(x, y, gamma, 1e-5), models.add_rms_norm_bias(x, y, gamma, None, 1e-5)):
        torch.testing.assert_close(made, expected)
        assert torch.equal(total, x + y)


def test_a_result_has_the_dtype_of_what_was_given() -> None:
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    assert models.rms_norm(x, x[0])[0].dtype is models.swiglu(x).dtype is torch.bfloat16


def test_swiglu() -> None:
    x = torch.randn(5, 16)
    torch.testing.assert_close(models.swiglu(x), functional.silu(x[:, :8]) * x[:, 8:])


def test_rotary_embedding_turns_pairs_by_their_angle() -> None:
    positions = torch.tensor([3, 0, 9])
    angles = torch.arange(10)[:, None] * torch.rand(SIZE // 2)
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    query, key = torch.randn(3, HEADS * SIZE), torch.randn(3, KV_HEADS * SIZE)

    def turned(tensor: torch.Tensor) -> torch.Tensor:
        one, other = tensor.view(3, -1, SIZE).chunk(2, -1)
        pair = torch.complex(one, other) * torch.polar(torch.ones(3, 1, SIZE // 2), angles[positions][:, None])
        return torch.cat((pair.real, pair.imag), -1).view(tensor.shape)

    expected = turned(query), turned(key)
    torch.testing.assert_close(models.mrope(positions, query, key, cache, SIZE, mrope_section=[0, 0, 0]), expected)
    models.rotary_embedding(positions, query, key, SIZE, cache)
    torch.testing.assert_close((query, key), expected)


def test_keys_and_values_go_to_their_slots() -> None:
    key, value = torch.randn(3, KV_HEADS, SIZE), torch.randn(3, KV_HEADS, SIZE)
    # Keys and values in turn, block by block, as vLLM-Ascend lays them out.
    both = torch.zeros(5, 2, BLOCK, KV_HEADS, SIZE)
    slots = torch.tensor([9, -1, 2], dtype=torch.int32)
    models.scatter_pa_kv_cache(key, value, both[:, 0], both[:, 1], slots, cache_mode="Norm")
    assert torch.equal(both[2, 0, 1], key[0])
    assert torch.equal(both[0, 1, 2], value[2])
    assert both.count_nonzero() == 4 * KV_HEADS * SIZE


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(token, head, dimension), the last query seeing every key."""
    mask = torch.ones(query.shape[0], key.shape[0], dtype=torch.bool).tril(key.shape[0] - query.shape[0])
    parts = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return functional.scaled_dot_product_attention(*parts, attn_mask=mask, scale=0.3, enable_gqa=True)[0].transpose(
        0, 1
    )


@pytest.mark.parametrize("paged", [True, False])
def test_attention_of_requests_side_by_side(paged: bool) -> None:
    spans, lengths = ([3, 1, 2], [7, 5, 2]) if paged else ([3, 1, 2], [3, 1, 2])
    query = torch.randn(sum(spans), HEADS, SIZE)
    keys = [torch.randn(length, KV_HEADS, SIZE) for length in lengths]
    values = [torch.randn(length, KV_HEADS, SIZE) for length in lengths]
    ends = torch.tensor(spans).cumsum(0).tolist()
    common: dict[str, Any] = {
        "atten_mask": MASK, "num_heads": HEADS, "num_key_value_heads": KV_HEADS, "scale": 0.3, "input_layout": "TND",
        "sparse_mode": 3, "actual_seq_lengths": ends,
    }  # fmt: skip
    if paged:
        table = torch.tensor([[4, 1], [0, 3], [2, 5]])
        cache = torch.full((2, 6, BLOCK, KV_HEADS, SIZE), torch.nan)
        for row, pair in enumerate(zip(keys, values, strict=True)):
            for which, tensor in enumerate(pair):
                for position, token in enumerate(tensor):
                    cache[which, table[row, position // BLOCK], position % BLOCK] = token
        made, _ = models.fused_infer_attention_score(
            query, cache[0], cache[1], **common, block_table=table, block_size=BLOCK, actual_seq_lengths_kv=lengths
        )
    else:
        made, _ = models.fused_infer_attention_score(
            query, torch.cat(keys), torch.cat(values), **common, actual_seq_lengths_kv=ends
        )
    expected = [_attention(*parts) for parts in zip(query.split(spans), keys, values, strict=True)]
    torch.testing.assert_close(made, torch.cat(expected))


def test_a_token_does_not_depend_on_the_others_of_its_step() -> None:
    query, key, value = (torch.randn(9, HEADS, SIZE).bfloat16() for _ in range(3))
    cache = [torch.zeros(3, BLOCK, HEADS, SIZE).bfloat16() for _ in range(2)]
    for tensor, kept in zip((key, value), cache, strict=True):
        kept.view(-1, HEADS, SIZE)[:9] = tensor
    common: dict[str, Any] = {"atten_mask": MASK, "num_heads": HEADS, "input_layout": "TND", "sparse_mode": 3}
    whole, _ = models.fused_infer_attention_score(
        query, key, value, **common, actual_seq_lengths=[9], actual_seq_lengths_kv=[9]
    )
    for begin, end in ((0, 4), (4, 8), (8, 9)):
        part, _ = models.fused_infer_attention_score(
            query[begin:end], *cache, **common, block_table=torch.arange(3)[None], block_size=BLOCK,
            actual_seq_lengths=[end - begin], actual_seq_lengths_kv=[end],
        )  # fmt: skip
        assert torch.equal(part, whole[begin:end])


def test_attention_of_the_code_predictor() -> None:
    query, key, value = (torch.randn(2, HEADS, 5, SIZE) for _ in range(3))
    made, *_ = models.fusion_attention(query, key, value, HEADS, "BNSD", atten_mask=MASK, scale=0.3, sparse_mode=2)
    expected = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3)
    torch.testing.assert_close(made, expected)


def test_matmul_add() -> None:
    x, weight, total = torch.randn(3, 4), torch.randn(3, 5), torch.ones(4, 5)
    models.matmul_add_fp32(x, weight, total)
    torch.testing.assert_close(total, x.t() @ weight + 1)


def test_an_option_without_a_model_is_named() -> None:
    x = torch.ones(2, HEADS, SIZE)
    for option, act in {
        "input_layout": lambda: models.fused_infer_attention_score(x, x, x),
        "softmax_lse_flag": lambda: models.fused_infer_attention_score(
            x, x, x, atten_mask=MASK, input_layout="TND", sparse_mode=3, softmax_lse_flag=True
        ),
        "without lengths": lambda: models.fused_infer_attention_score(
            x, x, x, atten_mask=MASK, input_layout="TND", sparse_mode=3
        ),
        "keep_prob": lambda: models.fusion_attention(x, x, x, HEADS, "BNSD", keep_prob=0.5),
        "beta": lambda: models.add_rms_norm_bias(x, x, x, x),
        "cache_mode": lambda: models.scatter_pa_kv_cache(x, x, x, x, x),
        "is_neox_style": lambda: models.rotary_embedding(x, x, x, SIZE, x, False),
        "mrope_section": lambda: models.mrope(x, x, x, x, SIZE, mrope_section=[1, 2, 3]),
        "position_rows": lambda: models.mrope(x, x, x, x, SIZE),
    }.items():
        with pytest.raises(NotImplementedError, match=option):
            act()


# On the device.


def test_the_dispatcher_finds_them(emulated: Device) -> None:
    import torch_npu

    x, gamma = torch.randn(3, 16), torch.randn(16)
    with emulated.counting() as counting:
        made, _ = torch_npu.npu_rms_norm(x.to("npu"), gamma.to("npu"))
        pair = torch.zeros(2, 3, BLOCK, KV_HEADS, SIZE, device="npu")
        key = torch.randn(2, KV_HEADS, SIZE).to("npu")
        torch_npu._npu_reshape_and_cache(key, key, pair[0], pair[1], torch.tensor([5, 0], dtype=torch.int32).to("npu"))
        assert torch.equal(pair[1, 1, 1].cpu(), key[0].cpu())
    assert torch.equal(made.cpu(), models.rms_norm(x, gamma)[0])
    assert counting.counts.launches["npu::npu_rms_norm"] == 1
    assert counting.counts.launches["atb::_npu_reshape_and_cache"] == 1


def test_an_atb_operator_without_a_model_is_named(emulated: Device) -> None:
    from omni_npu_phase.emulated_ascend import EmulationError

    x, scale = torch.ones(3, 8, device="npu"), torch.ones(1, device="npu")
    with pytest.raises(RuntimeError, match="QuantRmsNorm"):
        torch.ops.atb._npu_quant_rms_norm(x, x[0], x[0], scale, scale.to(torch.int8), x.to(torch.int8), 1e-6)
    with pytest.raises(EmulationError, match=r"CreateOperation.*RmsNormParam"):
        emulated.raise_faults()


def test_slots_follow_the_block_table(emulated: Device) -> None:
    table = torch.tensor([[7, 2, 0], [5, 0, 0]], dtype=torch.int32).to("npu")
    starts = torch.tensor([0, 3, 4], dtype=torch.int32).to("npu")
    positions = torch.tensor([3, 4, 5, 0]).to("npu")
    slots = torch.zeros(6, dtype=torch.int32, device="npu")
    common: dict[str, Any] = {"TOTAL_CP_WORLD_SIZE": 1, "PAD_ID": -1}
    kernel = engine._Kernel(compute_slot_mapping)
    kernel[(3,)](4, 6, starts, positions, table, table.stride(0), BLOCK, slots, **common)
    assert slots.tolist() == [31, 8, 9, 20, -1, -1]
    with pytest.raises(NotImplementedError, match="context parallelism"):
        compute_slot_mapping(4, 6, starts, positions, table, 3, BLOCK, slots, TOTAL_CP_WORLD_SIZE=2, PAD_ID=-1)


def test_a_replay_reads_and_writes_where_the_capture_did(emulated: Device) -> None:
    given, kept = torch.zeros(4, device="npu"), torch.zeros(4, device="npu")
    graph = torch.npu.NPUGraph()
    assert isinstance(graph, graphs.NPUGraph)
    with torch.npu.graph(graph, pool=torch.npu.graph_pool_handle()):
        assert torch.npu.is_current_stream_capturing()
        made = given * 2 + 1
        part = made[1:3]
        kept[:2].copy_(part)
    assert not torch.npu.is_current_stream_capturing()
    address, owned = made.data_ptr(), made.clone()
    for value in (3.0, 5.0):
        given.fill_(value)
        graph.replay()
        assert made.tolist() == [2 * value + 1] * 4
        assert (made.data_ptr(), part.tolist()) == (address, [2 * value + 1] * 2)
        assert kept.tolist() == [2 * value + 1] * 2 + [0, 0]
    # Another tensor is not the graph's input, and a copy is not its output.
    given = torch.full((4,), 9.0, device="npu")
    graph.replay()
    assert made.tolist() == [11.0] * 4
    assert owned.tolist() == [1.0] * 4


def test_a_value_read_during_capture_is_refused(emulated: Device) -> None:
    tensor = torch.ones(1, device="npu")
    with (
        pytest.raises(RuntimeError, match="read on the host while a graph is captured"),
        torch.npu.graph(torch.npu.NPUGraph()),
    ):
        tensor.item()
