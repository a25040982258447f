# SPDX-License-Identifier: Apache-2.0
"""Writes into live buffers: merged as the released runner merges them, and copied in the call that stores them."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, UserDict, defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_npu_phase.buffers.base import BufferHelper
from omni_npu_phase.buffers.cpu import CpuBufferHelper
from omni_npu_phase.contract import IS_PREFILL, MTP_INPUTS, ContractError
from omni_npu_phase.step.live import LiveBuffers

CPU = torch.device("cpu")
RESIDENT = ("codes", "audio")

any_helper = pytest.mark.parametrize("make", [BufferHelper, CpuBufferHelper])


def _runner(cls: type = SimpleNamespace, *requests: str) -> Any:
    runner: Any = cls.__new__(cls)
    runner.requests = {request: SimpleNamespace() for request in requests or ("a",)}
    runner.model_intermediate_buffer = {}
    runner.model = SimpleNamespace(gpu_resident_buffer_keys={RESIDENT})
    return runner


def _store(runner: Any, updates: list[Any], make: type[BufferHelper] = CpuBufferHelper) -> None:
    """Each update on its own, for request a."""
    live = LiveBuffers(runner, make(CPU))
    for update in updates:
        with live:
            live.store(["a"], [update])


def _store_in(live: LiveBuffers, **updates: Any) -> None:
    """Each request's update, together."""
    with live:
        live.store(list(updates), list(updates.values()))


def _plain(value: Any) -> Any:
    """A value that compares by content."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), value.tolist())
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [type(value), *map(_plain, value)] if isinstance(value, (list, tuple)) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in inner for tensor in _tensors(part)]


tensor = st.builds(
    lambda shape, dtype, seed: (torch.arange(12).reshape(4, 3)[:shape, :2] + seed).to(dtype).squeeze(),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    st.integers(0, 5),
)
plain = st.one_of(st.none(), st.integers(0, 9), st.just("text"), st.just((1, 2)))
value = st.one_of(plain, tensor, st.lists(st.one_of(plain, tensor), max_size=3))
# As vLLM-Omni's own schema has it: layers of hidden states are one dictionary deeper.
deep = st.one_of(
    st.dictionaries(st.integers(0, 2), value, max_size=2),
    st.tuples(value, tensor),
    st.lists(st.tuples(tensor), max_size=2),
)
nested = st.dictionaries(st.sampled_from(["audio", "x", "y"]), st.one_of(value, deep), max_size=3)
update = st.builds(
    lambda values, groups: {**values, **groups},
    st.dictionaries(st.sampled_from(["p", "q"]), value, max_size=2),
    st.dictionaries(st.sampled_from(["codes", "meta"]), nested, max_size=2),
)


@any_helper
@given(updates=st.lists(update.filter(bool), max_size=5))
def test_merged_as_the_released_runner_merges(released: type, make: type[BufferHelper], updates: list[Any]) -> None:
    oracle, ours = _runner(released), _runner()
    for each in updates:
        oracle._update_intermediate_buffer("a", each)
    _store(ours, updates, make)
    assert _plain(ours.model_intermediate_buffer) == _plain(oracle.model_intermediate_buffer)
    mirrored = getattr(ours.requests["a"], "additional_information_cpu", None)
    assert mirrored is ours.model_intermediate_buffer.get("a")
    assert hasattr(oracle.requests["a"], "additional_information_cpu") == (mirrored is not None)


@any_helper
@given(updates=st.lists(update, max_size=4))
def test_stored_tensors_are_owned_and_contiguous(make: type[BufferHelper], updates: list[Any]) -> None:
    runner = _runner()
    _store(runner, updates, make)
    before = _plain(runner.model_intermediate_buffer)
    for handed_in in _tensors(updates):
        handed_in.logical_not_() if handed_in.dtype == torch.bool else handed_in.add_(1)
    assert _plain(runner.model_intermediate_buffer) == before
    assert all(stored.is_contiguous() for stored in _tensors(runner.model_intermediate_buffer))


def _reused(tensor: torch.Tensor) -> dict[str, Any]:
    """One tensor at every depth of an update."""
    group = {"y": tensor, "deep": {0: tensor}, "pair": (tensor, 1), "lists": [[tensor], tensor]}
    return {"x": tensor, "many": [tensor, (tensor,)], "at": {"meta": tensor}, "meta": group}


def test_a_tensor_may_be_filled_again_once_it_is_stored() -> None:
    """As for each row of a step, or by another thread: no end of a block of writes is waited for."""
    runner, reused = _runner(SimpleNamespace, "a", "b"), torch.zeros(1)
    live = LiveBuffers(runner, CpuBufferHelper(CPU))
    with live:
        for number, request in enumerate("ab"):
            live.store([request], [_reused(reused.fill_(number))])
            reused.fill_(9)
    for number, request in enumerate("ab"):
        stored = _tensors(runner.model_intermediate_buffer[request])
        assert [tensor.tolist() for tensor in stored] == [[number]] * len(_tensors(_reused(reused)))


def test_one_tensor_for_every_request_becomes_each_ones_own() -> None:
    runner, shared = _runner(SimpleNamespace, "a", "b"), torch.zeros(2)
    _store_in(LiveBuffers(runner, CpuBufferHelper(CPU)), a={"x": shared}, b={"x": shared})
    with torch.inference_mode():
        runner.model_intermediate_buffer["a"]["x"].fill_(1)
    assert runner.model_intermediate_buffer["b"]["x"].tolist() == [0, 0]
    assert shared.tolist() == [0, 0]


class _Pair(NamedTuple):
    left: Any
    right: Any


def test_containers_are_made_anew_only_where_a_tensor_lies_in_them() -> None:
    """A hook's own nested state stays its own (M9)."""
    runner, own = _runner(), {"counter": {"n": 1}}
    value = {"keep": own, "pair": _Pair(torch.ones(1), own), "plain": (1, own)}
    _store(runner, [{"meta": {"deep": value}}])
    stored = runner.model_intermediate_buffer["a"]["meta"]["deep"]
    assert stored is not value
    assert stored["keep"] is stored["pair"].right is own
    assert type(stored["pair"]) is _Pair
    assert stored["plain"] is value["plain"]


@pytest.mark.parametrize(
    "part",
    [lambda: torch.zeros(1 << 12)[:4], lambda: torch.zeros(4, 4).t(), lambda: torch.zeros(4, requires_grad=True) * 2],
    ids=["a small part of a large one", "not contiguous", "of a graph"],
)
def test_what_is_stored_is_contiguous_memory_of_its_own(part: Any) -> None:
    runner = _runner()
    _store(runner, [{"x": part()}])
    stored = runner.model_intermediate_buffer["a"]["x"]
    assert stored.is_contiguous()
    assert stored.untyped_storage().nbytes() == stored.nbytes
    assert not stored.requires_grad


def test_tensors_with_an_element_in_common_become_each_requests_own() -> None:
    runner = _runner(SimpleNamespace, "a", "b")
    with torch.inference_mode():
        views = torch.zeros(3).unfold(0, 2, 1).unbind()
        _store_in(LiveBuffers(runner, CpuBufferHelper(CPU)), a={"x": views[0]}, b={"x": views[1]})
        a, b = (runner.model_intermediate_buffer[request]["x"] for request in "ab")
        a.fill_(1)
    assert b.tolist() == [0, 0]


def test_a_large_value_ends_with_its_request() -> None:
    runner = _runner(SimpleNamespace, "a", "b")
    prompts = torch.zeros(2, 1 << 15)
    _store_in(LiveBuffers(runner, CpuBufferHelper(CPU)), a={"prompt": prompts[0]}, b={"prompt": prompts[1]})
    stored = [info["prompt"] for info in runner.model_intermediate_buffer.values()]
    assert [tensor.untyped_storage().nbytes() for tensor in stored] == [4 << 15] * 2


def test_none_overwrites() -> None:
    runner = _runner()
    _store(runner, [{"x": torch.ones(1), "meta": {"y": torch.ones(1), "z": 1}}, {"x": None, "meta": {"y": None}}])
    assert runner.model_intermediate_buffer["a"] == {"x": None, "meta": {"y": None, "z": 1}}


def test_stored_tensors_that_come_back_are_copied_like_any_other() -> None:
    """A hook may have put its own tensor into its live buffer, and will fill it again."""
    runner = _runner()
    _store(runner, [{"x": torch.ones(1), "many": [torch.ones(1), 2], "codes": {"audio": torch.ones(2)}}])
    info = runner.model_intermediate_buffer["a"]
    own = info["x"], info["many"][0], info["codes"]["audio"]
    # As Covo, MiMo and Voxtral do: the whole dictionary, once as a copy and once the live buffer itself.
    _store(runner, [{**info}, info])
    assert info is runner.model_intermediate_buffer["a"]
    for tensor in own:
        tensor.zero_()
    assert sorted(tensor.tolist() for tensor in _tensors(info)) == [[1], [1], [1, 1]]


def test_list_items_are_kept_by_position() -> None:
    runner = _runner()
    _store(runner, [{"many": [torch.zeros(1)]}])
    stored = runner.model_intermediate_buffer["a"]["many"][0]
    _store(runner, [{"many": [torch.ones(1), stored, stored]}])
    many = runner.model_intermediate_buffer["a"]["many"]
    assert [item.item() for item in many] == [1, 0, 0]
    assert many[1] is not stored


def test_list_handed_in_stays_the_hooks_own() -> None:
    runner, own = _runner(), [1]
    _store(runner, [{"many": own}])
    own.append(2)
    assert runner.model_intermediate_buffer["a"]["many"] == [1]


def test_updates_reach_their_own_request() -> None:
    """Whether they are copied together or apart."""
    runner = _runner(SimpleNamespace, *"abc")
    live = LiveBuffers(runner, CpuBufferHelper(CPU))
    _store_in(live, b={"x": torch.tensor(2), "y": 5}, a={"x": torch.tensor(1)}, c={"x": torch.tensor(3.5)})
    stored = {request: float(info["x"]) for request, info in runner.model_intermediate_buffer.items()}
    assert stored == {"a": 1, "b": 2, "c": 3.5}
    assert runner.model_intermediate_buffer["b"]["y"] == 5


@pytest.mark.parametrize("values", [(torch.ones(1), 2), (1, torch.ones(1)), (torch.zeros(1), torch.ones(1))])
def test_of_requests_that_share_a_group_the_last_value_stays(values: tuple[Any, Any], released: type) -> None:
    """As released, which merges one request after the other."""
    left = []
    for runner in (_runner(released, "a", "b"), _runner(SimpleNamespace, "a", "b")):
        group: dict[str, Any] = {}
        runner.model_intermediate_buffer.update({request: {"meta": group} for request in "ab"})
        updates = [{"meta": {"x": value}} for value in values]
        if type(runner) is SimpleNamespace:
            LiveBuffers(runner, CpuBufferHelper(CPU)).store("ab", updates)
        else:
            for request, each in zip("ab", updates, strict=True):
                runner._update_intermediate_buffer(request, each)
        left.append(_plain(group))
    assert left[0] == left[1]


def test_what_is_the_runners_own_is_not_stored() -> None:
    runner = _runner()
    _store(runner, [{IS_PREFILL: True, MTP_INPUTS: (1, 2), "x": 1}, {IS_PREFILL: {"x": 1}}])
    assert runner.model_intermediate_buffer["a"] == {"x": 1}


# What is no dictionary (E9).


@pytest.mark.parametrize(
    ("known", "named", "actual"),
    [
        ([1], "its live buffer", "list"),
        ({"meta": "text"}, "'meta' in its live buffer", "str"),
        ({"meta": None}, "'meta'", "None"),
    ],
)
def test_what_is_no_dictionary_is_named_and_stops_nothing_else(known: Any, named: str, actual: str) -> None:
    runner = _runner(SimpleNamespace, "a", "b")
    runner.model_intermediate_buffer.update({"a": {"meta": {"y": 0}}, "b": known})
    live = LiveBuffers(runner, CpuBufferHelper(CPU))
    with pytest.raises(ContractError, match=f"expected {named}.* as a dictionary, got {actual}") as caught:
        _store_in(live, a={"meta": {"y": 1}, "x": 1}, b={"meta": {"y": 1}})
    assert (caught.value.clause, caught.value.requests) == ("E9", ("b",))
    assert runner.model_intermediate_buffer == {"a": {"meta": {"y": 0}}, "b": known}
    _store_in(live, a={"meta": {"y": 2}})
    assert runner.model_intermediate_buffer["a"] == {"meta": {"y": 2}}


def test_models_without_resident_keys() -> None:
    runner = _runner()
    runner.model = SimpleNamespace()
    _store(runner, [{"codes": {"audio": torch.ones(1)}}])
    assert runner.model_intermediate_buffer["a"]["codes"]["audio"].tolist() == [1]


# A device whose tensors are not on the host: which values leave it, and in how many transfers.


class _Elsewhere(BufferHelper):
    """Plays a device: meta tensors are its tensors, and host tensors are what comes from them."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))
        self.transfers = 0

    def fetch(self, blocks: Any) -> list[torch.Tensor]:
        self.transfers += bool(blocks)
        assert all(block.is_contiguous() and not block.requires_grad for block in blocks)
        return [torch.zeros(block.shape, dtype=block.dtype) for block in blocks]


def _on_device(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def test_what_leaves_the_device_leaves_in_one_transfer() -> None:
    runner, helper = _runner(SimpleNamespace, "a", "b"), _Elsewhere()
    live = LiveBuffers(runner, helper)
    resident, host = _on_device(2), torch.ones(1)
    with live:
        live.store(["a"], [{"x": _on_device(3), "codes": {"audio": resident}, "host": host}])
        # Inside a step's block of writes.
        _store_in(live, b={"meta": {"y": _on_device()}, "many": [_on_device(1), host]})
        assert helper.transfers == 0
    a, b = runner.model_intermediate_buffer["a"], runner.model_intermediate_buffer["b"]
    assert a["codes"]["audio"].device.type == "meta"
    assert a["codes"]["audio"] is not resident
    for stored, shape in ((a["x"], (3,)), (b["meta"]["y"], ()), (b["many"][0], (1,))):
        assert (stored.device, tuple(stored.shape)) == (CPU, shape)
    # What already is on the host stays there.
    assert a["host"].data_ptr() != b["many"][1].data_ptr() != host.data_ptr()
    assert helper.transfers == 1


def test_another_thread_transfers_what_it_stored_itself() -> None:
    """As an output thread that postprocesses while a step goes on."""
    runner, helper = _runner(SimpleNamespace, "a", "b"), _Elsewhere()
    live = LiveBuffers(runner, helper)
    with live:
        live.store(["a"], [{"x": _on_device(3)}])
        thread = threading.Thread(target=_store_in, args=(live,), kwargs={"b": {"x": _on_device(2)}})
        thread.start()
        thread.join()
        assert [str(runner.model_intermediate_buffer[request]["x"].device) for request in "ab"] == ["meta", "cpu"]
    assert runner.model_intermediate_buffer["a"]["x"].device == CPU
    assert helper.transfers == 2


def test_what_was_stored_before_an_error_leaves_the_device() -> None:
    runner = _runner()
    live = LiveBuffers(runner, _Elsewhere())
    with contextlib.suppress(KeyError), live:
        live.store(["a"], [{"x": _on_device(3)}])
        raise KeyError
    assert runner.model_intermediate_buffer["a"]["x"].device == CPU


def test_what_leaves_the_device_is_contiguous_and_of_no_graph() -> None:
    runner = _runner()
    live = LiveBuffers(runner, _Elsewhere())
    _store_in(live, a={"x": _on_device(2, 3).t(), "y": torch.empty(2, device="meta", requires_grad=True) * 2})
    assert [tuple(tensor.shape) for tensor in _tensors(runner.model_intermediate_buffer["a"])] == [(3, 2), (2,)]


def test_device_tensor_that_is_stored_leaves_unless_it_is_resident() -> None:
    runner, helper = _runner(), _Elsewhere()
    stray, resident = _on_device(1), _on_device(1)
    runner.model_intermediate_buffer["a"] = {"x": stray, "codes": {"audio": resident}}
    _store_in(LiveBuffers(runner, helper), a={"x": stray, "codes": {"audio": resident}})
    info = runner.model_intermediate_buffer["a"]
    assert info["x"].device == CPU
    assert (info["codes"]["audio"].device.type, info["codes"]["audio"] is resident) == ("meta", False)


def test_what_leaves_the_device_is_there_for_later_hooks_of_the_step() -> None:
    runner = _runner()
    live = LiveBuffers(runner, _Elsewhere())
    with live:
        live.store(["a"], [{"x": _on_device(3), "many": [_on_device(1)], "meta": {"y": _on_device(2)}}])
        info = runner.model_intermediate_buffer["a"]
        stored = sorted((tuple(tensor.shape), tensor.device.type) for tensor in _tensors(info))
    assert stored == [((1,), "meta"), ((2,), "meta"), ((3,), "meta")]


def test_what_a_hook_moves_or_takes_along_stays_on_the_device() -> None:
    """Nothing writes to the copy any more, and it is where the hook put it."""
    runner = _runner(SimpleNamespace, "a", "b")
    live = LiveBuffers(runner, _Elsewhere())
    with live:
        live.store("ab", [{"x": _on_device(3), "meta": {"y": _on_device(2)}, "z": _on_device(1)} for _ in "ab"])
        a, b = (runner.model_intermediate_buffer[request] for request in "ab")
        a["moved"] = a.pop("x")
        runner.model_intermediate_buffer["b"] = replaced = dict(b)
        replaced["meta"] = dict(b["meta"])
        live.store_codes("ab", ("codes", "other"), _on_device(2, 4), {})
    assert {key: str(a[key].device) for key in ("moved", "z")} == {"moved": "meta", "z": "cpu"}
    assert a["meta"]["y"].device == a["codes"]["other"].device == replaced["codes"]["other"].device == CPU
    assert [str(replaced[key].device) for key in "xz"] == ["meta"] * 2
    assert sorted(tuple(tensor.shape) for tensor in _tensors(replaced)) == [(1,), (1, 4), (2,), (3,)]


def test_a_hook_that_writes_over_a_value_on_its_way_keeps_what_it_wrote() -> None:
    runner = _runner()
    live = LiveBuffers(runner, _Elsewhere())
    with live:
        live.store(["a"], [{"x": _on_device(3), "y": _on_device(1), "many": [_on_device(1), _on_device(1)]}])
        info = runner.model_intermediate_buffer["a"]
        info["x"] = "own"
        del info["y"], info["many"][1]
    assert info["x"] == "own"
    assert "y" not in info
    assert [tensor.device for tensor in info["many"]] == [CPU]


class _Mapping(UserDict[Any, Any]):
    """A kind of mapping of a model's own."""


def test_a_group_that_is_a_mapping_of_the_models_own() -> None:
    runner, group, reused = _runner(), _Mapping(), torch.ones(1)
    runner.model_intermediate_buffer["a"] = {"meta": group}
    live = LiveBuffers(runner, CpuBufferHelper(CPU))
    with live:
        live.store(["a"], [{"meta": {"x": reused, "gone": reused}}])
        del group["gone"]
        reused.zero_()
    assert runner.model_intermediate_buffer["a"]["meta"] is group
    assert {key: value.tolist() for key, value in group.items()} == {"x": [1]}


def test_host_tensors_beside_device_tensors() -> None:
    """As released: a host tensor under a resident key is kept on the host, and codes may be made there."""
    runner, host = _runner(), torch.arange(2)
    live = LiveBuffers(runner, _Elsewhere())
    with live:
        live.store(["a"], [{"codes": {"audio": host}, "x": _on_device(1)}])
        live.store_codes(["a"], ("codes", "other"), host.reshape(1, 2), {("meta", "valid"): torch.tensor([True])})
        host.zero_()
    info = runner.model_intermediate_buffer["a"]
    assert info["codes"]["audio"].tolist() == [0, 1]
    assert info["codes"]["other"].tolist() == [[0, 1]]
    assert bool(info["meta"]["valid"])


def _unpackable() -> dict[str, torch.Tensor]:
    return {
        "conj": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.quint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]),
        "meta": torch.empty(2, device="meta"),
    }


@pytest.mark.parametrize("kind", _unpackable())
@pytest.mark.parametrize("group", ["codes", "meta"])
def test_tensors_that_are_no_plain_memory(released: type, kind: str, group: str) -> None:
    oracle, ours, value = _runner(released), _runner(), _unpackable()[kind]
    oracle._update_intermediate_buffer("a", {group: {"audio": value}})
    _store(ours, [{group: {"audio": value}}])
    stored, wanted = (runner.model_intermediate_buffer["a"][group]["audio"] for runner in (ours, oracle))
    assert repr(stored) == repr(wanted)
    assert kind == "meta" or stored.data_ptr() != value.data_ptr()


# Codes.


@pytest.mark.parametrize("resident", [True, False])
def test_codes_and_marks_reach_each_request(resident: bool) -> None:
    runner = _runner(SimpleNamespace, "a", "b")
    runner.model_intermediate_buffer["a"] = {"codes": {"other": 1}}
    key = RESIDENT if resident else ("codes", "elsewhere")
    codes, marks = torch.tensor([[1, 2], [3, 4]]), torch.tensor([True, False])
    live = LiveBuffers(runner, CpuBufferHelper(CPU))
    with live:
        live.store_codes(["a", "b"], key, codes, {("meta", "valid"): marks})
        codes.zero_()
    for request, wanted, valid in (("a", [[1, 2]], True), ("b", [[3, 4]], False)):
        info = runner.model_intermediate_buffer[request]
        assert info["codes"][key[1]].tolist() == wanted
        assert info["meta"]["valid"].shape == ()
        assert bool(info["meta"]["valid"]) is valid
        assert runner.requests[request].additional_information_cpu is info
    assert runner.model_intermediate_buffer["a"]["codes"]["other"] == 1


@pytest.mark.parametrize("mark_resident", [True, False])
def test_a_mark_stays_on_the_device_if_its_own_key_is_resident(mark_resident: bool) -> None:
    runner, mark = _runner(), ("meta", "valid")
    runner.model.gpu_resident_buffer_keys = {mark} if mark_resident else set()
    live = LiveBuffers(runner, _Elsewhere())
    with live:
        live.store_codes(["a"], ("codes", "elsewhere"), _on_device(1, 2), {mark: _on_device(1)})
    info = runner.model_intermediate_buffer["a"]
    assert info["codes"]["elsewhere"].device == CPU
    assert info["meta"]["valid"].device.type == ("meta" if mark_resident else "cpu")


@pytest.mark.parametrize("resident", [True, False])
def test_later_write_of_a_step_wins(resident: bool) -> None:
    runner = _runner()
    key = RESIDENT if resident else ("codes", "elsewhere")
    live = LiveBuffers(runner, CpuBufferHelper(CPU))
    with live:
        # A hook marks its frame as invalid, then MTP makes one.
        live.store(["a"], [{"meta": {"valid": torch.tensor(False)}}])
        live.store_codes(["a"], key, torch.ones(1, 2), {("meta", "valid"): torch.tensor([True])})
    assert bool(runner.model_intermediate_buffer["a"]["meta"]["valid"]) is True


def test_fewer_code_rows_than_requests() -> None:
    """As released: the requests behind them get empty codes."""
    runner = _runner(SimpleNamespace, "a", "b")
    LiveBuffers(runner, CpuBufferHelper(CPU)).store_codes(["a", "b"], ("codes", "elsewhere"), torch.ones(1, 2), {})
    stored = [runner.model_intermediate_buffer[request]["codes"]["elsewhere"].shape for request in ("a", "b")]
    assert stored == [(1, 2), (0, 2)]


@pytest.mark.parametrize("make", [CpuBufferHelper, _Elsewhere])
def test_no_code_rows_at_all(make: Any) -> None:
    runner = _runner(SimpleNamespace, "a", "b")
    helper = make() if make is _Elsewhere else make(CPU)
    live = LiveBuffers(runner, helper)
    with live:
        live.store_codes(["a", "b"], ("codes", "elsewhere"), torch.ones(0, 2, device=helper.device), {})
    assert [info["codes"]["elsewhere"].shape for info in runner.model_intermediate_buffer.values()] == [(0, 2)] * 2


def test_what_is_copied_together_is_contiguous_whatever_its_memory_format() -> None:
    runner = _runner(SimpleNamespace, "a", "b")
    update = {"x": torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last)}
    _store_in(LiveBuffers(runner, CpuBufferHelper(CPU)), a=update, b=update)
    assert all(info["x"].is_contiguous() for info in runner.model_intermediate_buffer.values())


def test_a_live_buffer_is_made_once_and_mirrored() -> None:
    runner = _runner()
    live = LiveBuffers(runner, CpuBufferHelper(CPU))
    (info,) = live.of(["a"])
    assert live.of(["a"])[0] is info is runner.requests["a"].additional_information_cpu


def test_a_small_value_does_not_keep_a_large_one_alive() -> None:
    runner, memory = _runner(SimpleNamespace, "a", "b"), torch.zeros(1004)
    live = LiveBuffers(runner, CpuBufferHelper(CPU))
    _store_in(live, a={"prompt": memory[:1000]}, b={"speaker": memory[1000:]})
    assert runner.model_intermediate_buffer["b"]["speaker"].untyped_storage().nbytes() == 16


# What holds tensors keeps its kind, and what holds none stays the hook's own.


class _Named(NamedTuple):
    values: torch.Tensor
    name: str


@pytest.mark.parametrize(
    ("value", "of"),
    [
        (OrderedDict(b=torch.ones(1), a=1), lambda kept: kept.move_to_end("b") or kept["b"]),
        (defaultdict(list, x=torch.ones(1)), lambda kept: kept["new"] == [] and kept["x"]),
        (_Named(torch.ones(1), "n"), lambda kept: kept.values),
        (torch.topk(torch.ones(3), 1), lambda kept: kept.values),
    ],
    ids=["ordered", "default", "named tuple", "of an operator"],
)
def test_a_container_of_tensors_keeps_its_kind(value: Any, of: Any) -> None:
    runner = _runner()
    _store(runner, [{"s": {"q": value}}])
    kept = runner.model_intermediate_buffer["a"]["s"]["q"]
    assert type(kept) is type(value)
    for tensor in value.values() if isinstance(value, dict) else value:
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
    assert of(kept).tolist() == [1]


@pytest.mark.parametrize("where", ["group", "top"])
def test_a_list_in_a_list_stays_the_hooks_own(where: str) -> None:
    runner, turns = _runner(), [5]
    _store(runner, [{"s": {"turns": [turns]}} if where == "group" else {"turns": [turns]}])
    turns.append(6)
    info = runner.model_intermediate_buffer["a"]
    assert (info["s"] if where == "group" else info)["turns"] == [[5, 6]]


def test_a_value_that_holds_itself_is_stored() -> None:
    runner, own = _runner(), {"x": torch.ones(1)}
    own["me"] = own  # type: ignore[assignment]
    _store(runner, [{"s": {"q": own}}])
    kept = runner.model_intermediate_buffer["a"]["s"]["q"]
    own["x"].zero_()
    assert kept["x"].tolist() == [1]


@pytest.mark.parametrize("there", ["v", None])
def test_an_empty_group_leaves_what_is_there(there: Any, released: type) -> None:
    for runner in (_runner(), _runner(released)):
        runner.model_intermediate_buffer["a"] = {"voice": there}
        if type(runner) is SimpleNamespace:
            _store(runner, [{"voice": {}, "n": 1}])
        else:
            runner._update_intermediate_buffer("a", {"voice": {}, "n": 1})
        assert runner.model_intermediate_buffer["a"] == {"voice": there, "n": 1}


@pytest.mark.parametrize("rows", [0, 1])
def test_requests_behind_the_last_row_of_codes_get_theirs_on_the_host(rows: int) -> None:
    runner = _runner(SimpleNamespace, "a", "b")
    live = LiveBuffers(runner, _Elsewhere())
    with live:
        live.store_codes(["a", "b"], ("codes", "elsewhere"), _on_device(rows, 3), {})
    kept = [info["codes"]["elsewhere"] for info in runner.model_intermediate_buffer.values()]
    assert [(tensor.device, len(tensor)) for tensor in kept] == [(CPU, int(index < rows)) for index in range(2)]
