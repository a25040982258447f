# SPDX-License-Identifier: Apache-2.0
"""Updates merge as the released runner merges them, and what is stored is owned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_npu_phase.buffers.cpu import CpuBufferHelper
from omni_npu_phase.state import StateWrites, live_info

CODES = ("codes", "audio")


def _runner(cls: type | None = None, resident: set[Any] | None = None) -> Any:
    runner: Any = SimpleNamespace() if cls is None else object.__new__(cls)
    runner.requests = {"a": SimpleNamespace(), "b": SimpleNamespace()}
    runner.model_intermediate_buffer = {"a": {"kept": 1, "codes": {"other": 2}}}
    runner.model = SimpleNamespace(gpu_resident_buffer_keys=resident or set())
    return runner


def _store(runner: Any, requests: list[str], updates: list[Any]) -> None:
    writes = StateWrites(runner, CpuBufferHelper(torch.device("cpu")))
    writes.store(requests, updates)
    writes.finish()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape), value.tolist())
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


SEQUENCES: dict[str, list[tuple[str, Any]]] = {
    "nested": [("a", {"codes": {"audio": torch.ones(1, 2)}, "x": 3}), ("a", {"codes": {"audio": None}})],
    "new-request": [("b", {"meta": {"valid": torch.tensor(True)}})],
    "lists": [("a", {"frames": [torch.zeros(2), "text", torch.ones(1)]}), ("a", {"frames": [torch.ones(2)]})],
    "nested-lists": [("a", {"codes": {"frames": [torch.zeros(2)]}})],
    "not-contiguous": [("a", {"t": torch.arange(6.0).reshape(2, 3).t()})],
    "no-dictionary": [("a", None), ("a", [1]), ("a", {})],
    "unknown-request": [("gone", {"x": 1})],
    "objects": [("a", {"generator": "g", "tuple": (torch.ones(1),), "none": None})],
}


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("resident", [set(), {CODES}], ids=["host", "resident"])
def test_merges_as_released(name: str, resident: set[Any], released: type) -> None:
    ours, theirs = _runner(resident=resident), _runner(released, resident)
    for request, update in SEQUENCES[name]:
        _store(ours, [request], [update])
        theirs._update_intermediate_buffer(request, update)  # type: ignore[attr-defined]
    assert _plain(ours.model_intermediate_buffer) == _plain(theirs.model_intermediate_buffer)
    for request in ours.requests:
        mirrored = getattr(ours.requests[request], "additional_information_cpu", None)
        assert _plain(mirrored) == _plain(getattr(theirs.requests[request], "additional_information_cpu", None))


@pytest.mark.parametrize("resident", [set(), {CODES}], ids=["host", "resident"])
def test_stored_tensors_are_owned(resident: set[Any]) -> None:
    runner = _runner(resident=resident)
    buffer = torch.ones(3, 2)
    update = {"codes": {"audio": buffer[:1], "list": [buffer[1:2]]}, "top": buffer[2]}
    _store(runner, ["a"], [update])
    buffer.zero_()
    info = runner.model_intermediate_buffer["a"]
    for stored in (info["codes"]["audio"], info["codes"]["list"][0], info["top"]):
        assert stored.eq(1).all()


def test_a_stored_tensor_stays_the_same_object() -> None:
    """Models that return their whole dictionary every step do not pay for a copy of it."""
    runner = _runner(resident={CODES})
    update = {"codes": {"audio": torch.ones(1)}, "embeds": torch.ones(4), "frames": [torch.ones(1), torch.ones(2)]}
    _store(runner, ["a"], [update])
    info = runner.model_intermediate_buffer["a"]
    before = (info["codes"]["audio"], info["embeds"], *info["frames"])
    _store(runner, ["a"], [dict(info)])
    _store(runner, ["a"], [info])
    after = (info["codes"]["audio"], info["embeds"], *info["frames"])
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_a_hook_may_reuse_its_memory_for_the_next_row() -> None:
    runner = _runner()
    writes = StateWrites(runner, CpuBufferHelper(torch.device("cpu")))
    scratch = torch.ones(1)
    writes.store(["a"], [{"x": scratch}])
    scratch.fill_(2)
    writes.store(["b"], [{"x": scratch}])
    scratch.fill_(3)
    writes.finish()
    assert [runner.model_intermediate_buffer[name]["x"].item() for name in "ab"] == [1, 2]


def test_the_updates_of_a_hook_are_not_changed() -> None:
    runner = _runner()
    update = {"x": torch.ones(1), "n": {"y": 1}}
    before = dict(update)
    _store(runner, ["a"], [update])
    assert update == before


def test_a_missing_buffer_is_made_and_mirrored() -> None:
    runner = _runner()
    info = live_info(runner, "b")
    assert info is runner.model_intermediate_buffer["b"]
    assert info is runner.requests["b"].additional_information_cpu
    assert live_info(runner, "b") is info


@pytest.mark.parametrize("resident", [set(), {CODES}], ids=["host", "resident"])
def test_codes_by_row(resident: set[Any]) -> None:
    runner = _runner(resident=resident)
    codes = torch.arange(4).reshape(2, 2)
    writes = StateWrites(runner, CpuBufferHelper(torch.device("cpu")))
    writes.store_codes(["b", "a"], CODES, codes, {("meta", "valid"): torch.tensor([True, True])})
    codes.zero_()
    writes.finish()
    for request, wanted in (("b", [[0, 1]]), ("a", [[2, 3]])):
        info = runner.model_intermediate_buffer[request]
        assert info["codes"]["audio"].tolist() == wanted
        assert info["meta"]["valid"].shape == ()
        assert runner.requests[request].additional_information_cpu is info
    assert runner.model_intermediate_buffer["a"]["codes"]["other"] == 2
