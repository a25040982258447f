# SPDX-License-Identifier: Apache-2.0
"""What the fused operators of a decoder in vLLM-Ascend compute, as functions of host tensors.

On an NPU each is one kernel outside aten. A model gives its result, and nothing of its cost or its rounding. Chunked
prefill is judged by comparing runs that cut the same tokens into other steps, so a model keeps two rules:

* It computes in float32 and rounds once. What a token gets depends on that token and on what it attends to, never on
  how many other tokens the step has: the same token gives the same bits in a step of one and of five hundred.
* Keys and values are written and read where the runner says, through slots and block tables. A wrong slot, length or
  table then gives wrong codes, as on the device.

Attention gets the tokens of all requests in one tensor ("TND": token, head, dimension). `actual_seq_lengths` says where
each request's queries end in it. Keys come from blocks of the cache, `actual_seq_lengths_kv` long, or stand in a tensor
like the queries. The mask is causal from the right: a request's last query sees every key, the one before it one less.

An option without a model is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

_MASK = (2048, 2048)
"""Shape of the mask that CANN wants beside `sparse_mode`; which keys are seen then follows from the lengths."""


def rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    wide = input.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * scale * gamma.float()).to(input.dtype), scale


def add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = (x1.float() + x2.float()).to(x1.dtype)
    return *rms_norm(total, gamma, epsilon), total


def add_rms_norm_bias(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _only("npu_add_rms_norm_bias", beta=(beta, None))
    return add_rms_norm(x1, x2, gamma, epsilon)


def swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, up = input.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


def mrope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str = "half",
    cache_mode: str = "default",
) -> tuple[torch.Tensor, torch.Tensor]:
    sections = any(mrope_section or ())
    modes = (rotary_mode, cache_mode)
    _only("npu_mrope", mrope_section=(sections, False), rotary_and_cache_mode=(modes, ("half", "default")))
    return _turned(query, positions, head_size, cos_sin_cache), _turned(key, positions, head_size, cos_sin_cache)


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool = True,
) -> None:
    _only("_npu_rotary_embedding", is_neox_style=(is_neox_style, True))
    for tensor in (query, key):
        tensor.copy_(_turned(tensor, positions, head_size, cos_sin_cache))


def scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    cache_mode: str | None = "PA_NZ",
    **more: Any,
) -> None:
    _only("npu_scatter_pa_kv_cache", more, cache_mode=(cache_mode, "Norm"))
    reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    # A padding token has a negative slot and is kept nowhere.
    kept = slot_indices >= 0
    slots = slot_indices[kept].long()
    for new, cache in ((key, key_cache), (value, value_cache)):
        # Keys and values may lie in the same blocks in turn, so the cache has no flat view.
        cache[slots // cache.shape[1], slots % cache.shape[1]] = new[kept].to(cache.dtype)


def fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    # Windows count in sparse mode 4 only; mode 3 has none.
    name = "npu_fused_infer_attention_score"
    _only(
        name, more, input_layout=(input_layout, "TND"), sparse_mode=(sparse_mode, 3), mask=(_shape(atten_mask), _MASK)
    )
    if actual_seq_lengths is None or actual_seq_lengths_kv is None:
        raise NotImplementedError(f"the emulated {name} has no model without lengths")
    heads = num_key_value_heads or num_heads
    result = torch.zeros_like(query)
    pieces = _keys_and_values(key, value, actual_seq_lengths_kv, block_table, heads, query.shape[-1])
    begin = 0
    for end, (keys, values) in zip(actual_seq_lengths, pieces, strict=False):
        for token in range(begin, end):
            seen = keys.shape[0] - (end - 1 - token)
            if seen > 0:
                result[token] = _attend(query[token], keys[:seen], values[:seen], scale)
        begin = end
    return result, torch.empty(0)


def fused_infer_attention_score_out(
    *operands: torch.Tensor, out: Sequence[torch.Tensor], workspace: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is captured: the result goes where it goes at every replay."""
    result, _ = fused_infer_attention_score(*operands, **options)
    out[0].copy_(result)
    return out[0], out[1]


def fused_infer_attention_score_workspace(*_: torch.Tensor, **__: Any) -> torch.Tensor:
    return torch.empty(0)


def fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    _only(
        "npu_fusion_attention",
        more,
        input_layout=(input_layout, "BNSD"),
        sparse_mode=(sparse_mode, 2),
        mask=(_shape(atten_mask), _MASK),
        key_shape=(_shape(key), _shape(query)),
        keep_prob=(keep_prob, 1.0),
        others=([pse, padding_mask, prefix, actual_seq_qlen, actual_seq_kvlen], [None] * 5),
    )
    result = torch.empty_like(query)
    for row, keys, values in zip(range(query.shape[0]), key.transpose(1, 2), value.transpose(1, 2), strict=True):
        for token in range(query.shape[2]):
            seen = token + 1
            result[row, :, token] = _attend(query[row, :, token], keys[:seen], values[:seen], scale)
    statistics = torch.zeros(*query.shape[:3], 8)
    return result, statistics, statistics.clone(), torch.empty(0, dtype=query.dtype), 0, 0, 0


def matmul_add_fp32(x: torch.Tensor, weight: torch.Tensor, C: torch.Tensor) -> None:  # noqa: N803 - its schema's name
    C.add_(x.float().t() @ weight.float())


MODELS: dict[str, Callable[..., Any]] = {
    "npu::npu_rms_norm": rms_norm,
    "npu::npu_add_rms_norm": add_rms_norm,
    "npu::npu_swiglu": swiglu,
    "npu::npu_mrope": mrope,
    "npu::npu_scatter_pa_kv_cache": scatter_pa_kv_cache,
    "npu::npu_fused_infer_attention_score": fused_infer_attention_score,
    "npu::npu_fused_infer_attention_score.out": fused_infer_attention_score_out,
    "npu::_npu_fused_infer_attention_score_get_max_workspace": fused_infer_attention_score_workspace,
    "npu::npu_fusion_attention": fusion_attention,
    "atb::_npu_matmul_add_fp32": matmul_add_fp32,
    "atb::_npu_reshape_and_cache": reshape_and_cache,
    "atb::_npu_rotary_embedding": rotary_embedding,
    "_C_ascend::npu_add_rms_norm_bias": add_rms_norm_bias,
}
"""By the name under which PyTorch's dispatcher knows each."""

SCHEMAS = {
    "_C_ascend::npu_add_rms_norm_bias": "(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, float epsilon=1e-6) "
    "-> (Tensor, Tensor, Tensor)",
}
"""Of the operators that vLLM-Ascend's compiled extension would define."""


def _keys_and_values(
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    block_table: torch.Tensor | None,
    heads: int,
    size: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What each request attends to, as (key, head, dimension)."""
    begin = 0
    for row, length in enumerate(lengths):
        if block_table is None:
            yield key[begin:length], value[begin:length]
            begin = length
        else:
            blocks = block_table[row, : -(-length // key.shape[1])].long()
            keys, values = (cache[blocks].reshape(-1, heads, size)[:length] for cache in (key, value))
            yield keys, values


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """One token: (head, dimension) against (key, key head, dimension)."""
    # Contiguous, because the order in which PyTorch adds up depends on the layout.
    keys, values = (part.float().transpose(0, 1).contiguous()[:, None] for part in (keys, values))
    grouped = query.float().reshape(keys.shape[0], -1, 1, query.shape[-1])
    weights = ((grouped * keys).sum(-1) * scale).softmax(-1)
    return (weights[..., None] * values).sum(-2).reshape(query.shape).to(query.dtype)


def _turned(tensor: torch.Tensor, positions: torch.Tensor, head_size: int, cos_sin_cache: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of whole heads: each half of a head with the other."""
    shapes = (positions.dim(), cos_sin_cache.shape[-1])
    _only("rotary embedding", position_rows_and_rotary_size=(shapes, (1, head_size)))
    cos, sin = (part[:, None] for part in cos_sin_cache[positions.long()].float().chunk(2, -1))
    one, other = tensor.reshape(tensor.shape[0], -1, head_size).float().chunk(2, -1)
    turned = torch.cat((one * cos - other * sin, other * cos + one * sin), -1)
    return turned.reshape(tensor.shape).to(tensor.dtype)


def _only(operator: str, more: Mapping[str, Any] | None = None, **options: tuple[Any, Any]) -> None:
    """Refuse an option that is not at the value that is modelled; one of ``more`` may not be set at all."""
    left_out = (None, 0, "", False)
    given = {name: _shape(value) or value for name, value in (more or {}).items()}
    given = {name: value for name, value in given.items() if value not in left_out}
    given |= {name: value for name, (value, modelled) in options.items() if value != modelled}
    if given:
        raise NotImplementedError(f"the emulated {operator} has no model of {given}")


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
