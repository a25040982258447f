# SPDX-License-Identifier: Apache-2.0
"""Writes into live buffers: merged as the released runner merges them, and owned."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_npu_phase.buffers.base import BufferHelper
from omni_npu_phase.buffers.cpu import CpuBufferHelper
from omni_npu_phase.step.live import StateWrites, live_info

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
    writes = StateWrites(runner, make(CPU))
    for update in updates:
        writes.store("a", update)
        writes.finish()


def _plain(value: Any) -> Any:
    """A value that compares by content."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), value.tolist())
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for part in inner for tensor in _tensors(part)]


tensor = st.builds(
    lambda shape, dtype, seed: (torch.arange(12).reshape(4, 3)[:shape, :2] + seed).to(dtype).squeeze(),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    st.integers(0, 5),
)
plain = st.one_of(st.none(), st.integers(0, 9), st.just("text"), st.just((1, 2)))
value = st.one_of(plain, tensor, st.lists(st.one_of(plain, tensor), max_size=3))
nested = st.dictionaries(st.sampled_from(["audio", "x", "y"]), st.one_of(value, st.just({"deep": 1})), max_size=3)
update = st.builds(
    lambda values, groups: {**values, **groups},
    st.dictionaries(st.sampled_from(["p", "q"]), value, max_size=2),
    st.dictionaries(st.sampled_from(["codes", "meta"]), nested, max_size=2),
)
odd_update: st.SearchStrategy[Any] = st.one_of(st.sampled_from([None, {}, [], "text", 5]), st.just(torch.ones(2)))


@any_helper
@given(updates=st.lists(st.one_of(update, odd_update), max_size=5))
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


@pytest.mark.parametrize("copies", ["own", "finish"])
def test_tensors_are_copied_before_a_hook_can_fill_them_again(copies: str) -> None:
    runner = _runner()
    writes, reused = StateWrites(runner, CpuBufferHelper(CPU)), torch.tensor([1])
    writes.store("a", {"x": reused, "many": [reused]})
    getattr(writes, copies)()
    reused.fill_(2)
    writes.finish()
    info = runner.model_intermediate_buffer["a"]
    assert info["x"].tolist() == info["many"][0].tolist() == [1]


def _new(number: int) -> dict[str, Any]:
    return {"x": torch.full((2,), number)}


@pytest.mark.parametrize("kept", [False, True])
def test_only_what_somebody_else_can_reach_is_copied(kept: bool) -> None:
    """The rest is owned as it is; what is copied is copied together, and at once."""
    runner, helper, joined = _runner(SimpleNamespace, "a", "b"), CpuBufferHelper(CPU), []
    writes, join = StateWrites(runner, helper), helper.join
    helper.join = lambda tensors: joined.append(len(tensors)) or join(tensors)  # type: ignore[method-assign, func-returns-value]
    updates = [_new(number) for number in range(2)]
    pointers = [update["x"].data_ptr() for update in updates]
    for request in "ba":
        writes.store(request, updates[-1] if kept else updates.pop())
        if kept:
            updates.insert(0, updates.pop())
    writes.own()
    live = [runner.model_intermediate_buffer[request]["x"] for request in "ab"]
    assert joined == ([2] if kept else [])
    assert [tensor.data_ptr() == pointer for tensor, pointer in zip(live, pointers, strict=True)] == [not kept] * 2
    assert [tensor.tolist() for tensor in live] == [[0, 0], [1, 1]]


def test_what_its_maker_holds_is_copied_before_another_thread_can_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateWrites, "own", lambda writes: None)
    runner, reused = _runner(), torch.tensor([1])
    writes = StateWrites(runner, CpuBufferHelper(CPU))
    writes.store_copies("a", {"x": reused, "many": [reused], "codes": {"audio": reused}, "meta": {"y": reused, "z": 2}})
    reused.fill_(2)
    assert [tensor.tolist() for tensor in _tensors(runner.model_intermediate_buffer["a"])] == [[1]] * 4
    assert runner.model_intermediate_buffer["a"]["meta"]["z"] == 2


@pytest.mark.parametrize(
    "part",
    [lambda: torch.zeros(1 << 12)[:4], lambda: torch.zeros(4, 4).t(), lambda: torch.zeros(4, requires_grad=True) * 2],
    ids=["a small part of a large one", "not contiguous", "of a graph"],
)
def test_what_is_stored_is_contiguous_memory_of_its_own(part: Any) -> None:
    runner = _runner()
    writes = StateWrites(runner, CpuBufferHelper(CPU))
    writes.store("a", {"x": part()})
    writes.finish()
    stored = runner.model_intermediate_buffer["a"]["x"]
    assert stored.is_contiguous()
    assert stored.untyped_storage().nbytes() == stored.nbytes
    assert not stored.requires_grad


def test_tensors_with_an_element_in_common_become_each_requests_own() -> None:
    runner = _runner(SimpleNamespace, "a", "b")
    writes = StateWrites(runner, CpuBufferHelper(CPU))
    with torch.inference_mode():
        for request, view in zip("ab", torch.zeros(3).unfold(0, 2, 1).unbind(), strict=True):
            writes.store(request, {"x": view})
        del view
        writes.finish()
        a, b = (runner.model_intermediate_buffer[request]["x"] for request in "ab")
        a.fill_(1)
    assert b.tolist() == [0, 0]


def test_a_large_value_ends_with_its_request() -> None:
    runner = _runner(SimpleNamespace, "a", "b")
    writes = StateWrites(runner, CpuBufferHelper(CPU))
    for request, prompt in zip("ab", torch.zeros(2, 1 << 15), strict=True):
        writes.store(request, {"prompt": prompt})
    writes.finish()
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


def test_requests_without_state_are_passed_over() -> None:
    runner = _runner()
    writes = StateWrites(runner, CpuBufferHelper(CPU))
    writes.store("gone", {"x": 1})
    writes.store("a", {"x": 2})
    writes.finish()
    assert runner.model_intermediate_buffer == {"a": {"x": 2}}


def test_updates_reach_their_own_request() -> None:
    runner = _runner(SimpleNamespace, "a", "b")
    writes = StateWrites(runner, CpuBufferHelper(CPU))
    writes.store("a", {"x": torch.tensor(1)})
    writes.store("b", {"x": torch.tensor(2)})
    writes.finish()
    assert {request: int(info["x"]) for request, info in runner.model_intermediate_buffer.items()} == {"a": 1, "b": 2}


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
    writes = StateWrites(runner, helper)
    resident, host = _on_device(2), torch.ones(1)
    writes.store("a", {"x": _on_device(3), "codes": {"audio": resident}, "host": host})
    writes.store("b", {"meta": {"y": _on_device()}, "many": [_on_device(1), host]})
    writes.finish()
    a, b = runner.model_intermediate_buffer["a"], runner.model_intermediate_buffer["b"]
    assert a["codes"]["audio"].device.type == "meta"
    assert a["codes"]["audio"] is not resident
    for stored, shape in ((a["x"], (3,)), (b["meta"]["y"], ()), (b["many"][0], (1,))):
        assert (stored.device, tuple(stored.shape)) == (CPU, shape)
    # What already is on the host stays there, and is copied because it was kept.
    assert a["host"].data_ptr() != b["many"][1].data_ptr() != host.data_ptr()
    assert helper.transfers == 1
    writes.finish()
    assert helper.transfers == 1


def test_what_leaves_the_device_is_contiguous_and_of_no_graph() -> None:
    runner = _runner()
    writes = StateWrites(runner, _Elsewhere())
    writes.store("a", {"x": _on_device(2, 3).t(), "y": torch.empty(2, device="meta", requires_grad=True) * 2})
    writes.finish()
    assert [tuple(tensor.shape) for tensor in _tensors(runner.model_intermediate_buffer["a"])] == [(3, 2), (2,)]


def test_device_tensor_that_is_stored_leaves_unless_it_is_resident() -> None:
    runner, helper = _runner(), _Elsewhere()
    stray, resident = _on_device(1), _on_device(1)
    runner.model_intermediate_buffer["a"] = {"x": stray, "codes": {"audio": resident}}
    writes = StateWrites(runner, helper)
    writes.store("a", {"x": stray, "codes": {"audio": resident}})
    writes.finish()
    info = runner.model_intermediate_buffer["a"]
    assert info["x"].device == CPU
    assert (info["codes"]["audio"].device.type, info["codes"]["audio"] is resident) == ("meta", False)


def test_what_leaves_the_device_is_there_for_later_hooks_of_the_step() -> None:
    runner = _runner()
    writes = StateWrites(runner, _Elsewhere())
    writes.store("a", {"x": _on_device(3), "many": [_on_device(1)], "meta": {"y": _on_device(2)}})
    info = runner.model_intermediate_buffer["a"]
    assert sorted(tuple(tensor.shape) for tensor in _tensors(info)) == [(1,), (2,), (3,)]


def test_what_leaves_the_device_arrives_in_a_buffer_that_replaced_its_own() -> None:
    runner = _runner()
    writes = StateWrites(runner, _Elsewhere())
    writes.store("a", {"x": _on_device(3), "many": [_on_device(1), 2], "meta": {"y": _on_device(2)}, "z": 1})
    before = runner.model_intermediate_buffer["a"]
    replaced = {"x": before["x"], "many": list(before["many"]), "meta": {**before["meta"], "other": _on_device(5)}}
    runner.model_intermediate_buffer["a"] = replaced
    writes.finish()
    assert [(str(tensor.device), tuple(tensor.shape)) for tensor in _tensors(replaced)] == [
        ("cpu", (3,)),
        ("cpu", (1,)),
        ("cpu", (2,)),
        ("meta", (5,)),
    ]


@pytest.mark.parametrize("codes", [True, False])
def test_what_is_written_after_a_buffer_was_replaced_leaves_the_rest_its_way(codes: bool) -> None:
    runner = _runner()
    writes = StateWrites(runner, _Elsewhere())
    writes.store("a", {"x": _on_device(3), "many": [_on_device(1)]})
    runner.model_intermediate_buffer["a"] = replaced = dict(runner.model_intermediate_buffer["a"])
    if codes:
        writes.store_codes(["a"], ("codes", "other"), _on_device(1, 2), {})
    else:
        writes.store("a", {"codes": {"other": _on_device(1, 2)}})
    writes.finish()
    assert [tensor.device for tensor in _tensors(replaced)] == [CPU] * 3


def test_a_value_on_its_way_that_a_hook_puts_elsewhere_in_its_buffer_arrives_there() -> None:
    runner = _runner()
    writes = StateWrites(runner, _Elsewhere())
    writes.store("a", {"x": _on_device(3), "many": [_on_device(1)], "meta": {"y": _on_device(2)}})
    info = runner.model_intermediate_buffer["a"]
    info["moved"], info["z"] = info.pop("x"), info["meta"].pop("y")
    info["many"].insert(0, "first")
    writes.finish()
    assert [(tensor.device, tuple(tensor.shape)) for tensor in (info["moved"], info["z"], info["many"][1])] == [
        (CPU, (3,)),
        (CPU, (2,)),
        (CPU, (1,)),
    ]


def test_a_hook_that_writes_over_a_value_on_its_way_keeps_what_it_wrote() -> None:
    runner = _runner()
    writes = StateWrites(runner, _Elsewhere())
    writes.store("a", {"x": _on_device(3), "y": _on_device(1), "many": [_on_device(1), _on_device(1)]})
    info = runner.model_intermediate_buffer["a"]
    info["x"] = "own"
    del info["y"], info["many"][1]
    writes.finish()
    assert info["x"] == "own"
    assert "y" not in info
    assert [tensor.device for tensor in info["many"]] == [CPU]


class _Mapping(UserDict[Any, Any]):
    """A kind of mapping of a model's own."""


@pytest.mark.parametrize("copies", ["own", "finish"])
def test_a_group_that_is_a_mapping_of_the_models_own(copies: str) -> None:
    runner, group, reused = _runner(), _Mapping(), torch.ones(1)
    runner.model_intermediate_buffer["a"] = {"meta": group}
    writes = StateWrites(runner, CpuBufferHelper(CPU))
    writes.store("a", {"meta": {"x": reused, "gone": reused}})
    del group["gone"]
    getattr(writes, copies)()
    reused.zero_()
    writes.finish()
    assert runner.model_intermediate_buffer["a"]["meta"] is group
    assert {key: value.tolist() for key, value in group.items()} == {"x": [1]}


def test_host_tensors_beside_device_tensors() -> None:
    """As released: a host tensor under a resident key is kept on the host, and codes may be made there."""
    runner, host = _runner(), torch.arange(2)
    writes = StateWrites(runner, _Elsewhere())
    writes.store("a", {"codes": {"audio": host}, "x": _on_device(1)})
    writes.own()
    audio = runner.model_intermediate_buffer["a"]["codes"]["audio"]
    writes.store_codes(["a"], ("codes", "other"), host.reshape(1, 2), {("meta", "valid"): torch.tensor([True])})
    host.zero_()
    writes.finish()
    info = runner.model_intermediate_buffer["a"]
    assert info["codes"]["audio"] is audio
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
    writes = StateWrites(runner, CpuBufferHelper(CPU))
    writes.store_codes(["a", "b"], key, codes, {("meta", "valid"): marks})
    codes.zero_()
    writes.finish()
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
    writes = StateWrites(runner, _Elsewhere())
    writes.store_codes(["a"], ("codes", "elsewhere"), _on_device(1, 2), {mark: _on_device(1)})
    writes.finish()
    info = runner.model_intermediate_buffer["a"]
    assert info["codes"]["elsewhere"].device == CPU
    assert info["meta"]["valid"].device.type == ("meta" if mark_resident else "cpu")


@pytest.mark.parametrize("resident", [True, False])
def test_later_write_of_a_step_wins(resident: bool) -> None:
    runner = _runner()
    key = RESIDENT if resident else ("codes", "elsewhere")
    writes = StateWrites(runner, CpuBufferHelper(CPU))
    # A hook marks its frame as invalid, then MTP makes one.
    writes.store("a", {"meta": {"valid": torch.tensor(False)}})
    writes.store_codes(["a"], key, torch.ones(1, 2), {("meta", "valid"): torch.tensor([True])})
    writes.finish()
    assert bool(runner.model_intermediate_buffer["a"]["meta"]["valid"]) is True


def test_fewer_code_rows_than_requests() -> None:
    """As released: the requests behind them get empty codes."""
    runner = _runner(SimpleNamespace, "a", "b")
    writes = StateWrites(runner, CpuBufferHelper(CPU))
    writes.store_codes(["a", "b"], ("codes", "elsewhere"), torch.ones(1, 2), {})
    writes.finish()
    stored = [runner.model_intermediate_buffer[request]["codes"]["elsewhere"].shape for request in ("a", "b")]
    assert stored == [(1, 2), (0, 2)]


@pytest.mark.parametrize("make", [CpuBufferHelper, _Elsewhere])
def test_no_code_rows_at_all(make: Any) -> None:
    runner = _runner(SimpleNamespace, "a", "b")
    helper = make() if make is _Elsewhere else make(CPU)
    writes = StateWrites(runner, helper)
    writes.store_codes(["a", "b"], ("codes", "elsewhere"), torch.ones(0, 2, device=helper.device), {})
    writes.finish()
    assert [info["codes"]["elsewhere"].shape for info in runner.model_intermediate_buffer.values()] == [(0, 2)] * 2


def test_what_is_copied_together_is_contiguous_whatever_its_memory_format() -> None:
    runner = _runner(SimpleNamespace, "a", "b")
    writes = StateWrites(runner, CpuBufferHelper(CPU))
    for request in "ab":
        writes.store(request, {"x": torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last)})
    writes.finish()
    assert all(info["x"].is_contiguous() for info in runner.model_intermediate_buffer.values())


def test_live_info_is_made_once_and_mirrored() -> None:
    runner = _runner()
    info = live_info(runner, "a")
    assert live_info(runner, "a") is info is runner.requests["a"].additional_information_cpu


def test_a_small_value_does_not_keep_a_large_one_alive() -> None:
    runner = _runner(SimpleNamespace, "a", "b")
    writes = StateWrites(runner, CpuBufferHelper(torch.device("cpu")))
    memory = torch.zeros(1004)
    writes.store("a", {"prompt": memory[:1000]})
    writes.store("b", {"speaker": memory[1000:]})
    del memory
    writes.finish()
    assert runner.model_intermediate_buffer["b"]["speaker"].untyped_storage().nbytes() == 16
