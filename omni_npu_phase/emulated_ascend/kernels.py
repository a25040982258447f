# SPDX-License-Identifier: Apache-2.0
"""The aten operators that the emulated device can run, each on CPU tensors that alias device memory.

These tables say which, and nothing beside them does:

* `OWN`: torch_npu's own code runs. It moves or describes memory, and launches only the CANN operators in
  `operators.py`.
* `PLAIN`, `RANDOM`, `INDEXED`, `LONG_INDEXED`, `READ_BACK`, `SIZED`: PyTorch's CPU kernel computes the result.
  torch_npu would call CANN, so its code around that call is replaced, and what a caller could notice of it is kept.
  'Measured' is what unmodified torch_npu does before it calls CANN; a test measures it again. 'Stated' is what its
  aclnn path has to do, which cannot run here:

  - a host tensor of one or more dimensions beside a device tensor is refused, a scalar is accepted (measured for
    `add`, `cat`, `stack`, `where`, `embedding`, `index_select` and `index_copy_`, stated for the others);
  - every operator is one launch (stated);
  - `LONG_INDEXED` refuses an index that is not int64 (measured);
  - `INDEXED` accepts a host index and uploads it, at a copy and a synchronisation (measured), but refuses host
    values (measured); a boolean mask costs one synchronisation (stated: its size must be known);
  - `READ_BACK` costs one copy to the host and one synchronisation (measured once, with kernels that do nothing);
  - `SIZED` costs one synchronisation (stated: the size of the result depends on the data);
  - a generator of another device is refused (measured). The random numbers themselves are neither the CPU's nor
    an NPU's: they are a function of the generator's seed and offset, and the offset advances.

* Every other aten operator raises NotImplementedError, even where torch_npu would fall back to the CPU.

Functions of `models.py` compute operators outside aten (`npu_*`). One without a function keeps torch_npu's code, and
fails at the first CANN operator that has no kernel.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from omni_npu_phase.emulated_ascend.models import MODELS, SCHEMAS
from omni_npu_phase.emulated_ascend.operators import host_view

OWN = frozenset(
    """
    _copy_from_and_resize _local_scalar_dense _pin_memory _reshape_alias _to_copy as_strided as_strided_ clone
    contiguous copy_ copy_memory_ empty empty_like empty_strided empty_with_format get_npu_format
    get_storage_size is_pinned is_set_to new_empty_strided record_stream resize_ resize_as_ set_ squeeze unfold
    unsafe_empty_with_format unsqueeze view view_as_complex view_as_real
    """.split()  # noqa: SIM905 - a table to read, not a list to edit
)

PLAIN = frozenset(
    """
    _log_softmax _softmax abs abs_ add add_ addbmm addcdiv addcdiv_ addcmul addcmul_ addmm addmm_ addmv all amax
    amin any arange argmax argmin argsort baddbmm bitwise_and bitwise_and_ bitwise_not bitwise_not_ bitwise_or
    bitwise_or_ bitwise_xor bitwise_xor_ bmm cat ceil ceil_ clamp clamp_ clamp_max clamp_max_ clamp_min
    clamp_min_ constant_pad_nd convolution cos cos_ cumprod cumsum div div_ dot embedding eq eq_ erf exp exp_ eye
    fill_ flip floor floor_ floor_divide floor_divide_ fmod fmod_ full gather ge ge_ gelu gt gt_ index_add
    index_select isclose isfinite isnan le le_ lerp linalg_vector_norm linspace log log1p log2 log_
    log_softmax logical_and logical_and_ logical_not logical_not_ logical_or logical_or_ logical_xor logsumexp
    lt lt_ masked_fill_ masked_scatter_ matmul max maximum mean min minimum mm mul mul_ mv nan_to_num
    native_group_norm native_layer_norm ne ne_ neg neg_ ones ones_like pow pow_ prod reciprocal reciprocal_ relu
    relu_ remainder remainder_ repeat roll round round_ rsqrt rsqrt_ rsub scatter scatter_ scatter_add
    scatter_add_ scatter_reduce sigmoid sigmoid_ sign silu silu_ sin sin_ softmax softplus sort sqrt sqrt_ stack
    scaled_dot_product_attention std sub sub_ sum take tanh tanh_ topk tril tril_ triu triu_ trunc var where zero_ zeros
    """.split()  # noqa: SIM905 - a table to read, not a list to edit
)

RANDOM = frozenset(
    ["bernoulli", "bernoulli_", "exponential_", "multinomial", "normal", "normal_", "random_", "uniform_"]
)
INDEXED = frozenset(["_index_put_impl_", "index", "index_put", "index_put_"])
READ_BACK = frozenset(["equal"])
SIZED = frozenset(["masked_select", "nonzero"])
LONG_INDEXED = frozenset(["index_copy", "index_copy_"])
_KNOWN = OWN | PLAIN | RANDOM | INDEXED | READ_BACK | SIZED | LONG_INDEXED

# A Philox offset counts in fours.
_OFFSET_STEP = 4


class Kernels:
    """The tables above, registered with PyTorch's dispatcher for as long as this object lives."""

    def __init__(self, launched: Callable[[str], None], before_each: Callable[[], None]) -> None:
        self._launched = launched
        self._before_each = before_each
        self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self._models = list(self._add_models())
        for name in _reaching_device():
            packet = name.partition(".")[0]
            if packet not in OWN:
                self._register(name, self._implementation(name, packet), "PrivateUse1")
        # torch_npu takes some operators apart for autograd before the device's kernel is asked for.
        for name in _registered("AutogradPrivateUse1"):
            if name.partition(".")[0] not in _KNOWN:
                self._register(name, _refusal(name), "AutogradPrivateUse1")

    def _register(self, name: str, implementation: Callable[..., Any], key: str) -> None:
        self._library.impl(name, implementation, key, allow_override=True)  # type: ignore[no-untyped-call]

    def _implementation(self, name: str, packet: str) -> Callable[..., Any]:
        tables = (
            (PLAIN, self._run),
            (RANDOM, self._run_random),
            (INDEXED, self._run_indexed),
            (LONG_INDEXED, self._run_long_indexed),
            (READ_BACK, self._run_read_back),
            (SIZED, self._run_sized),
        )
        run = next((run for table, run in tables if packet in table), None)
        if run is None:
            return _refusal(name)
        return _kernel(run, getattr(getattr(torch.ops.aten, packet), name.partition(".")[2] or "default"))

    def _add_models(self) -> Iterator[torch.library.Library]:
        for qualified, model in MODELS.items():
            namespace, name = qualified.split("::")
            library = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
            if qualified in SCHEMAS:
                library.define(f"{name}{SCHEMAS[qualified]}")  # type: ignore[no-untyped-call]
            kernel = _kernel(partial(self._run, name=qualified), model)
            library.impl(name, kernel, "PrivateUse1", allow_override=True)  # type: ignore[no-untyped-call]
            yield library

    def _run(self, operator: Any, args: Any, kwargs: Any, name: str = "") -> Any:
        self._before_each()
        name = name or str(operator)
        device = _device_of(name, (args, kwargs))
        given: list[tuple[torch.Tensor, torch.Tensor]] = []

        def to_host(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.device.type == "npu":
                view = host_alias(value)
                given.append((view, value))
                return view
            return torch.device("cpu") if isinstance(value, torch.device) else value

        def to_device(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            for view, tensor in given:
                if value is view:
                    return tensor
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            host_alias(made).copy_(value)
            return made

        host_args, host_kwargs = tree_map(to_host, (args, kwargs))
        result = operator(*host_args, **host_kwargs)
        self._launched(name)
        return tree_map(to_device, result)

    def _run_random(self, operator: Any, args: Any, kwargs: Any) -> Any:
        generator = kwargs.get("generator")
        device = _device_of(operator, (args, kwargs))
        return self._run(operator, args, {**kwargs, "generator": _host_generator(generator, device)})

    def _run_indexed(self, operator: Any, args: Any, kwargs: Any) -> Any:
        self_, indices, *rest = args
        # torch_npu keeps a tensor of the host on the host, whatever it is indexed with.
        on_device = [i if i is None or self_.device.type == "cpu" else i.to(self_.device) for i in indices]
        for index in on_device:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                _synchronize()
        return self._run(operator, (self_, on_device, *rest), kwargs)

    def _run_sized(self, operator: Any, args: Any, kwargs: Any) -> Any:
        _synchronize()
        return self._run(operator, args, kwargs)

    def _run_long_indexed(self, operator: Any, args: Any, kwargs: Any) -> Any:
        index = args[2]
        if index.dtype != torch.int64:
            raise IndexError(f"{operator} expects an int64 index, and was given {index.dtype}")
        return self._run(operator, args, kwargs)

    def _run_read_back(self, operator: Any, args: Any, kwargs: Any) -> Any:
        answer = self._run(operator, args, kwargs)
        on_device = torch.empty((), dtype=torch.bool, device=_device_of(operator, (args, kwargs)))
        host_alias(on_device).fill_(answer)
        return on_device.item()


def _kernel(run: Callable[..., Any], operator: Callable[..., Any]) -> Callable[..., Any]:
    """What PyTorch's dispatcher calls, with an operator's operands one by one."""
    return lambda *args, **kwargs: run(operator, args, kwargs)


def host_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same memory as a tensor of the emulated device, with what was on its way there."""
    _arrive()()
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    storage = tensor.untyped_storage()
    usable = storage.nbytes() // tensor.dtype.itemsize * tensor.dtype.itemsize
    flat = host_view(storage.data_ptr(), usable, tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@cache
def _arrive() -> Callable[[], Any]:
    arrive: Callable[[], Any] = ctypes.CDLL("libascendcl.so").emu_arrive
    return arrive


def _registered(key: str) -> set[str]:
    """Aten operators with a kernel of torch_npu's; it registers some names PyTorch does not know."""
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key(key))
    return {name for name in _operators() if f"aten::{name}" in registered}


def _reaching_device() -> set[str]:
    """Operators torch_npu has a kernel for, and those nothing but its fallback to the CPU would answer."""
    composite = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    unanswered = {
        name
        for name in _operators()
        if not any(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key) for key in composite)
    }
    return _registered("PrivateUse1") | unanswered


def _operators() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return [name[len("aten::") :] for name in names if name.startswith("aten::")]


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"the emulated Ascend device has no kernel for aten::{name}; add it to a table of {__name__} if the CPU "
            "kernel can stand in for it, or run this test elsewhere"
        )

    return refuse


def _device_of(operator: Any, values: Any) -> torch.device:
    device: torch.device | None = None
    on_host = False
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor):
            if value.device.type == "npu":
                device = value.device
            elif value.dim() > 0:
                on_host = True
        elif isinstance(value, torch.device) and value.type == "npu":
            device = value
    if on_host or device is None:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {operator} was given tensors on npu and cpu"
        )
    return device


def _host_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    if generator is None:
        generator = torch.npu.default_generators[device.index or 0]  # type: ignore[attr-defined]
    if generator.device.type != "npu":
        raise RuntimeError(f"Expected a 'npu' device type for generator but found '{generator.device.type}'")
    offset = generator.get_offset()
    generator.set_offset(offset + _OFFSET_STEP)
    seed = random.Random(f"{generator.initial_seed()} {offset}").getrandbits(63)
    return torch.Generator().manual_seed(seed)


def _synchronize() -> None:
    torch.npu.current_stream().synchronize()  # type: ignore[attr-defined]
