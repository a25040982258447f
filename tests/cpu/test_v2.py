# SPDX-License-Identifier: Apache-2.0
"""The contract on Model Runner V2: its four faults, what V2 keeps, and which code is refused."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, make_dataclass
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_npu_phase import ContractError
from omni_npu_phase.conformance import verify
from omni_npu_phase.conformance.bench import StateBench, scenario_bench, single_stage
from omni_npu_phase.conformance.drive import run_scenario
from omni_npu_phase.conformance.judge import judge
from omni_npu_phase.conformance.recording_model import (
    HIDDEN,
    NEW_IDS,
    StateModel,
    embedding,
    mtp_codes,
    mtp_embedding,
    token,
)
from omni_npu_phase.conformance.report import Report
from omni_npu_phase.conformance.scenarios import (
    BY_ID,
    DECODE,
    MTP,
    NOT_IN_V2,
    PREFILL,
    SCENARIOS,
    TAIL,
    Behaviour,
    Hook,
    Scenario,
    Step,
    Variant,
    row,
    step,
)
from omni_npu_phase.contract import FIELDS, IS_PREFILL, NUM_COMPUTED, PROMPT_LEN
from omni_npu_phase.releases import UnsupportedRuntimeError, fits, v2
from omni_npu_phase.settings import MODE_VARIABLE
from omni_npu_phase.step.plan import Run, StepPlan
from omni_npu_phase.step.v2 import PhaseStateMixin

CPU = torch.device("cpu")
_PLAIN = Behaviour()
_PAIR = step(row("a", 3, 3, 1, MTP), row("b", 4, 6, 1, MTP))
_MIXED = step(row("p", 9, 0, 3, PREFILL), row("a", 3, 3, 1, MTP), row("t", 5, 4, 1, TAIL), row("b", 4, 6, 1, MTP))


def _run(cls: type, scenario: str | Scenario, hook: Hook = "batched", mtp: bool = True, mode: str = "on") -> Any:
    case = BY_ID[scenario] if isinstance(scenario, str) else scenario
    return run_scenario(cls, case, Variant(hook, mtp, mode), CPU)


def _failed(run: Any) -> set[str]:
    return {judgement.clause for judgement in judge(run) if not judgement.holds}


@pytest.fixture
def make_bench() -> Iterator[Any]:
    """Benches of model states that are taken through a step by hand."""

    def make(
        cls: type,
        *steps: Step,
        hook: Hook = "batched",
        mtp: bool = True,
        mode: str = "on",
        behaviour: Behaviour = _PLAIN,
    ) -> StateBench:
        scenario = Scenario("by-hand", "a step by hand", (), steps, behaviour=behaviour)
        bench = scenario_bench(cls, scenario, Variant(hook, mtp, mode), CPU)
        assert isinstance(bench, StateBench)
        return bench

    with single_stage(), torch.inference_mode():
        yield make


@dataclass(slots=True)
class _Given:
    """A step that is ready for ``run_preprocess``."""

    batch: Any
    inputs: dict[str, Any]

    @property
    def embeds(self) -> list[list[float]]:
        return self.inputs["inputs_embeds"].tolist()  # type: ignore[no-any-return]


def _ready(bench: StateBench, rows: Step) -> _Given:
    offsets = bench.schedule(rows)
    batch = bench.input_batch(rows, offsets[-1])
    inputs = {"input_ids": batch.input_ids, **bench.runner.prepare_inputs(batch, bench.requests)}
    return _Given(batch, inputs)


def _take(bench: StateBench, rows: Step) -> _Given:
    given = _ready(bench, rows)
    bench.runner.run_preprocess(given.batch, given.inputs, bench.requests, bench.dispatch)
    return given


def _codes(bench: StateBench, request: str) -> Any:
    codes = bench.live()[request].get("codes", {}).get("audio")
    return None if codes is None else codes.reshape(-1).tolist()


def _own(bench: StateBench, request: str, position: int) -> int:
    return token(bench.indices[request], position)


# Verdicts.


@pytest.fixture(scope="module")
def report() -> Report:
    return verify.verify(verify.load_runner("gpu-v2"), ("released", "mixin"))


def test_every_clause_that_applies_holds_with_the_mixin(report: Report) -> None:
    by_status: dict[str, list[str]] = {}
    for result in report.of("mixin"):
        by_status.setdefault(result.status, []).append(result.id)
    assert by_status.pop("not_applicable") == ["M10"]
    assert list(by_status) == ["pass"]
    assert report.passed("mixin")


def test_routing_is_that_of_v1(report: Report) -> None:
    assert report.parity is not None
    assert report.parity.differences == ()
    shown = [case for case in SCENARIOS if case.id not in NOT_IN_V2]
    assert report.parity.compared == sum(len(list(verify.variants(case, "mixin"))) for case in shown)


def test_released_fails_what_its_source_says(report: Report) -> None:
    passed = {result.id for result in report.of("released") if result.status == "pass"}
    assert passed == {"R1"}


def test_what_is_not_for_v2_says_why(report: Report) -> None:
    assert set(NOT_IN_V2) <= set(BY_ID)
    for mode in report.modes:
        (batch_hook,) = (result for result in report.of(mode) if result.id == "M10")
        assert batch_hook.status == "not_applicable"
        assert "preprocess_batch_mrv2" in batch_hook.detail


def test_runner_by_name() -> None:
    runner = verify.load_runner("vllm_omni.worker_v2.model_states.omni_model_state:OmniModelState")
    mixed = verify.classes_for("mixin", runner).autoregressive
    assert mixed.__mro__[1] is PhaseStateMixin
    assert verify.classes_for("released", verify.RunnerClasses("mixed", mixed)).autoregressive is runner.autoregressive


# The four faults.


@pytest.mark.parametrize(
    ("scenario", "hook", "mtp", "clause"),
    [
        ("frame-mid-prompt", "scalar", True, "T2"),
        ("tail", "scalar", True, "T2"),
        ("one-token-prompts", "scalar", True, "T3"),
        ("mixed", "batched", False, "R4"),
        ("adjacent-decodes", "batched", False, "R3"),
        ("mixed", "batched", True, "T4"),
    ],
)
def test_fault(scenario: str, hook: Hook, mtp: bool, clause: str, released_state: type, mixed_state: type) -> None:
    assert clause in _failed(_run(released_state, scenario, hook, mtp))
    assert _failed(_run(mixed_state, scenario, hook, mtp)) == set()


def _no_states(given: _Given, requests: Any) -> Any:
    return None


def _no_prompt_len(given: _Given, requests: Any) -> Any:
    # As if there were the device copy alone.
    return _with(requests, prompt_len=SimpleNamespace(gpu=torch.from_numpy(requests.prompt_len.np)))


def _no_progress(given: _Given, requests: Any) -> Any:
    given.batch.num_computed_tokens_np = None
    return requests


def _progress_by_slot(given: _Given, requests: Any) -> Any:
    given.batch.num_computed_tokens_np = requests.num_computed_tokens_np
    return requests


def _with(requests: Any, **changed: Any) -> Any:
    changed_states = copy.copy(requests)
    vars(changed_states).update(changed)
    return changed_states


@pytest.mark.parametrize(
    ("forget", "expected"),
    [
        (_no_states, "a request state"),
        (_no_prompt_len, "a prompt length on the host"),
        (_no_progress, "a progress on the host"),
        (_progress_by_slot, "a progress on the host"),
    ],
)
def test_no_guess_when_a_length_is_unknown(forget: Any, expected: str, mixed_state: type, make_bench: Any) -> None:
    rows = step(row("t", 5, 4, 1, TAIL), row("a", 3, 3, 1, MTP))
    bench = make_bench(mixed_state, rows, hook="scalar", behaviour=Behaviour(mtp_inputs="every_row"))
    given = _ready(bench, rows)
    before = given.embeds
    requests = forget(given, bench.requests)
    with pytest.raises(ContractError, match=expected) as caught:
        bench.runner.run_preprocess(given.batch, given.inputs, requests, bench.dispatch)
    assert (caught.value.clause, caught.value.requests, caught.value.rows) == ("E4", ("t",), (0,))
    assert bench.model.log.hooks == []
    assert given.embeds == before
    assert not any(name in info for info in bench.live().values() for name in FIELDS)


def test_released_guesses(released_state: type, make_bench: Any) -> None:
    rows = step(row("t", 5, 4, 1, TAIL))
    bench = make_bench(released_state, rows, hook="scalar", behaviour=Behaviour(mtp_inputs="every_row"))
    given = _ready(bench, rows)
    bench.runner.run_preprocess(given.batch, given.inputs, None, bench.dispatch)
    assert len(bench.model.log.mtp) == 1


def test_batched_and_scalar_decode_rows_get_their_own_codes(
    mixed_state: type, make_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever hook a decode row went to: here every second one goes to the scalar hook."""
    rows = step(*(row(name, 3, 3 + index, 1, MTP) for index, name in enumerate("abcde")))
    monkeypatch.setattr(
        StepPlan, "runs", lambda plan, **how: (Run([index], index % 2 == 0) for index in range(len(plan)))
    )
    bench = make_bench(mixed_state, rows)
    given = _take(bench, rows)
    assert [call.hook for call in bench.model.log.hooks] == ["batched", "scalar"] * 2 + ["batched"]
    for index, each in enumerate(rows):
        own = _own(bench, each.request, each.num_computed)
        assert _codes(bench, each.request) == mtp_codes(own)
        assert given.embeds[index] == mtp_embedding(own)


# Lengths.


def test_prompt_length_leaves_out_recomputed_outputs(mixed_state: type, make_bench: Any) -> None:
    """A preempted request comes back as a new one whose prefill holds its outputs too."""
    before, after = step(row("a", 3, 6, 1, MTP)), step(row("a", 3, 4, 1, MTP))
    bench = make_bench(mixed_state, before, after)
    _take(bench, before)
    bench.runner.remove_request(bench.slots["a"])
    bench.requests.remove_request("a")
    del bench.slots["a"]
    bench.add(before[0])
    assert bench.requests.prefill_len.np[bench.slots["a"]] == 7
    bench.model.log.hooks.clear()
    _take(bench, after)
    (call,) = bench.model.log.hooks
    assert [call.info[name] for name in FIELDS] == [3, 4, False]
    assert call.hook == "batched"


def test_slots_in_another_order_than_rows(mixed_state: type, make_bench: Any) -> None:
    bench = make_bench(mixed_state, _PAIR, _PAIR[::-1])
    _take(bench, _PAIR)
    bench.model.log.hooks.clear()
    _take(bench, _PAIR[::-1])
    told = [(call.info[PROMPT_LEN], call.info[NUM_COMPUTED]) for call in bench.model.log.hooks]
    assert told == [(4, 6), (3, 3)]


# Modes.


def test_off_is_the_released_state(mixed_state: type, released_state: type) -> None:
    for scenario, hook in (("tail", "scalar"), ("mixed", "batched"), ("owned-results", "scalar")):
        ours, theirs = _run(mixed_state, scenario, hook, mode="off"), _run(released_state, scenario, hook)
        assert type(ours.error) is type(theirs.error)
        assert [(one.clause, one.seen) for one in judge(ours)] == [(one.clause, one.seen) for one in judge(theirs)]


def test_mode_from_the_environment(mixed_state: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "strict")
    assert isinstance(_run(mixed_state, "e5-long", "scalar", mode="").error, ContractError)
    assert _run(mixed_state, "e5-long", "scalar", mode="on").error is None


def test_unknown_mode(released_state: type) -> None:
    with pytest.raises(ValueError, match="'sometimes'"):
        type("Wrong", (PhaseStateMixin, released_state), {"phase_mode": "sometimes"})


def test_a_row_without_live_buffer_is_passed_over_as_released(
    mixed_state: type, released_state: type, make_bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for cls in (released_state, mixed_state):
        bench = make_bench(cls, _PAIR, hook="scalar")
        for _ in range(2):
            given = _ready(bench, _PAIR)
            bench.runner.intermediate_buffer.buffers[bench.slots["a"]].clear()
            bench.runner.run_preprocess(given.batch, given.inputs, bench.requests, bench.dispatch)
        assert [call.request_id for call in bench.model.log.hooks] == ["b", "b"]
        assert _codes(bench, "b") == mtp_codes(_own(bench, "b", 6))
        assert given.embeds[1] == mtp_embedding(_own(bench, "b", 6))
    said = [record.getMessage() for record in caplog.records if "a live buffer" in record.getMessage()]
    assert len(said) == 1
    assert "[E4]" in said[0]
    bench = make_bench(mixed_state, _PAIR, mode="strict")
    given = _ready(bench, _PAIR)
    bench.runner.intermediate_buffer.buffers[bench.slots["a"]].clear()
    with pytest.raises(ContractError, match="a live buffer"):
        bench.runner.run_preprocess(given.batch, given.inputs, bench.requests, bench.dispatch)


# What V2 keeps.


@pytest.mark.parametrize("hook", ["scalar", "batched"])
def test_warm_up_gets_no_hook(hook: Hook, mixed_state: type, make_bench: Any) -> None:
    rows = step(row("_warmup_0_", 3, 3, 1, DECODE), row("a", 3, 3, 1, MTP))
    bench = make_bench(mixed_state, rows, hook=hook)
    given = _take(bench, rows)
    assert [call.request_id for call in bench.model.log.hooks] == ["a"]
    assert _codes(bench, "a") == mtp_codes(_own(bench, "a", 3))
    assert given.embeds[1] == mtp_embedding(_own(bench, "a", 3))
    assert not set(FIELDS) & set(bench.live()["_warmup_0_"])


def test_a_step_of_warm_up_only(mixed_state: type, make_bench: Any) -> None:
    """Its lengths are nobody's matter."""
    rows = step(row("_warmup_0_", 3, 0, 3, PREFILL))
    bench = make_bench(mixed_state, rows)
    given = _ready(bench, rows)
    bench.runner.run_preprocess(given.batch, given.inputs)
    assert bench.model.log.hooks == []


def test_staging_comes_before_all_hooks(mixed_state: type, make_bench: Any) -> None:
    bench = make_bench(mixed_state, _MIXED)
    staged = []
    bench.runner._stage_batched_preprocess_inputs = lambda slots, device: staged.append(
        (list(slots), len(bench.model.log.hooks))
    )
    _take(bench, _MIXED)
    assert [call for call in staged if call[0]] == [([bench.slots[each.request] for each in _MIXED], 0)]


@pytest.mark.parametrize("hook", ["scalar", "batched"])
def test_hooks_get_string_keys_only(hook: Hook, mixed_state: type, make_bench: Any) -> None:
    bench = make_bench(mixed_state, _PAIR, hook=hook)
    given = _ready(bench, _PAIR)
    for info in bench.live().values():
        info[0] = "not for hooks"
    bench.runner.run_preprocess(given.batch, given.inputs, bench.requests, bench.dispatch)
    assert [0 in call.info for call in bench.model.log.hooks] == [False, False]
    assert all(0 in info for info in bench.live().values())


def test_static_buffer_is_refreshed(mixed_state: type, make_bench: Any) -> None:
    """A captured graph reads the static buffer: what an earlier step left there must not reach a hook."""
    bench = make_bench(mixed_state, _MIXED, hook="scalar")
    given = _ready(bench, _MIXED)
    static = bench.runner._static_inputs_embeds
    static.fill_(50)
    bench.model.embed_input_ids = lambda ids, **_: torch.tensor([embedding(int(each)) for each in ids])
    bench.runner.run_preprocess(given.batch, given.inputs, bench.requests, bench.dispatch)
    assert given.inputs["inputs_embeds"].data_ptr() == static.data_ptr()
    for call, each in zip(bench.model.log.hooks, _MIXED, strict=True):
        own = [embedding(_own(bench, each.request, each.num_computed + index)) for index in range(each.span)]
        assert call.given == own


class _Mrv2Model(StateModel):
    """A model with both kinds of hooks."""

    def preprocess_decode_batch_mrv2(self, *, input_ids: Any, input_embeds: Any, req_infos: Any) -> Any:
        self.embeds_given = [*getattr(self, "embeds_given", []), tuple(input_embeds.shape)]
        return self._preprocess_decode_batch(input_ids, req_infos)

    def preprocess_batch_mrv2(self, *, req_infos: Sequence[dict[str, Any]], device: torch.device) -> None:
        self.log.batch_hooks.append((self.log.calls, [info["req_id"] for info in req_infos]))
        for info in req_infos:
            info.update({"prepared": True, PROMPT_LEN: 77, NUM_COMPUTED: 88, IS_PREFILL: False})


@pytest.fixture
def mrv2_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateBench, "model_class", _Mrv2Model)


@pytest.mark.usefixtures("mrv2_hooks")
def test_mrv2_hook_comes_first(mixed_state: type, make_bench: Any) -> None:
    bench = make_bench(mixed_state, _PAIR)
    bench.model.preprocess_decode_batch = None
    _take(bench, _PAIR)
    assert bench.model.embeds_given == [(2, HIDDEN)]
    assert _codes(bench, "b") == mtp_codes(_own(bench, "b", 6))


def test_five_values_without_mtp_are_what_released_models_return(
    mixed_state: type, make_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The released state unpacks five from every batched hook; in strict mode three are wanted (R4)."""
    original = StateModel._preprocess_decode_batch

    def five(model: Any, input_ids: Any, req_infos: Any) -> Any:
        ids, embeds, updates = original(model, input_ids, req_infos)
        return ids, embeds, None, None, updates

    monkeypatch.setattr(StateModel, "_preprocess_decode_batch", five)
    bench = make_bench(mixed_state, _PAIR, mtp=False)
    given = _take(bench, _PAIR)
    assert given.embeds[0] == embedding(_own(bench, _PAIR[0].request, _PAIR[0].num_computed), batched=True)
    strict = make_bench(mixed_state, _PAIR, mtp=False, mode="strict")
    with pytest.raises(ContractError, match="expected 3 values"):
        _take(strict, _PAIR)


@pytest.mark.usefixtures("mrv2_hooks")
@pytest.mark.parametrize("ids", ["same", "new"])
def test_mrv2_hook_takes_scattered_decode_rows_at_once(mixed_state: type, make_bench: Any, ids: Any) -> None:
    rows = step(
        row("a", 3, 3, 1, MTP), row("p", 9, 0, 3, PREFILL), row("b", 4, 6, 1, MTP), row("t", 5, 4, 1, TAIL),
        row("c", 2, 9, 1, MTP),
    )  # fmt: skip
    bench = make_bench(mixed_state, rows, behaviour=Behaviour(ids=ids))
    given = _take(bench, rows)
    assert bench.model.embeds_given == [(3, HIDDEN)]
    assert [call.hook for call in bench.model.log.hooks] == ["batched"] * 3 + ["scalar"] * 2
    offset = NEW_IDS if ids == "new" else 0
    for name, start in (("a", 0), ("b", 4), ("c", 6)):
        own = _own(bench, name, next(each.num_computed for each in rows if each.request == name))
        assert _codes(bench, name) == mtp_codes(own + offset)
        assert given.embeds[start] == mtp_embedding(own + offset)
    assert given.embeds[5] == embedding(_own(bench, "t", 4))
    assert [_codes(bench, name) for name in ("p", "t")] == [None, None]


@pytest.mark.usefixtures("mrv2_hooks")
def test_mrv2_batch_hook_gets_live_prefill_buffers_first(mixed_state: type, make_bench: Any) -> None:
    bench = make_bench(mixed_state, _MIXED, _PAIR)
    _take(bench, _MIXED)
    assert bench.model.log.batch_hooks == [(0, ["p", "t"])]
    told = {call.request_id: call.info for call in bench.model.log.hooks}
    assert told["p"]["prepared"]
    assert "prepared" not in told["a"]
    assert [told["p"][name] for name in FIELDS] == [9, 0, True]
    assert bench.live()["t"]["prepared"]
    assert [bench.live()["t"][name] for name in FIELDS] == [5, 4, True]
    bench.model.log.batch_hooks.clear()
    _take(bench, _PAIR)
    assert bench.model.log.batch_hooks == []


def test_mtp_is_the_attribute_mtp(mixed_state: type, make_bench: Any) -> None:
    bench = make_bench(mixed_state, _PAIR, mtp=False)
    bench.model.talker_mtp = bench.model._talker_mtp
    _take(bench, _PAIR)
    assert bench.model.log.mtp == []
    assert len(bench.model.log.hooks) == 2


def test_resident_updates_are_stored_as_one_block(mixed_state: type, make_bench: Any) -> None:
    bench = make_bench(mixed_state, _PAIR)
    bench.model.gpu_resident_buffer_keys = {("mark", "scalar"), "flat"}
    returned = [{"mark": {"scalar": torch.tensor(index), "kept": index}, "flat": torch.ones(2)} for index in range(2)]
    bench.model._updates = lambda *_: returned[len(bench.model.log.hooks) - 1]
    _take(bench, _PAIR)
    live = bench.live()
    for key in ("a", "b"):
        assert set(live[key]["mark"]) == {"arrived", "scalar", "kept"}
    stored = [live[key]["mark"]["scalar"] for key in ("a", "b")]
    assert [int(value) for value in stored] == [0, 1]
    assert stored[0].untyped_storage().data_ptr() == stored[1].untyped_storage().data_ptr()
    assert set(returned[0]) == {"mark", "flat"}
    assert set(returned[0]["mark"]) == {"scalar", "kept"}


def test_a_returned_live_dictionary_loses_nothing(mixed_state: type, make_bench: Any) -> None:
    behaviour = Behaviour(updates="whole", codes="resident", validity=True)
    bench = make_bench(mixed_state, _PAIR, behaviour=behaviour)
    _take(bench, _PAIR)
    bench.model.mtp = None
    known = _codes(bench, "a")
    bench.runner._decode_preprocess = lambda **given: bench.model._preprocess_decode_batch(
        given["input_ids"], given["req_infos"]
    )
    bench.model._mtp = False
    _take(bench, _PAIR)
    assert known is not None
    assert _codes(bench, "a") == known


@pytest.mark.parametrize("name", ["_run_batched_mtp", "capture_mtp_graphs", "_pack_mtp_batch", "add_request"])
def test_stays_the_released_method(name: str, mixed_state: type, released_state: type) -> None:
    assert getattr(mixed_state, name) is getattr(released_state, name)


def test_codes_of_mtp_are_owned(mixed_state: type, make_bench: Any) -> None:
    bench = make_bench(mixed_state, _PAIR)
    _take(bench, _PAIR)
    state, own = bench.runner, bench.live()["a"]["codes"]["audio"].clone()
    _, codes = state._call_mtp_runner(*(buffer[:1] for buffer in bench.mtp_inputs()))
    bench.model.scribble()
    assert int(codes.max()) < 200
    assert torch.equal(bench.live()["a"]["codes"]["audio"], own)


# Refusals.


def test_known_state(released_state: type) -> None:
    v2.check(released_state.__mro__)
    assert v2.mismatches(released_state.__mro__) == []


@pytest.mark.parametrize(("installed", "noted"), [("0.31.0", True), ("0.30.2", False)])
def test_a_release_that_was_not_tested_is_noted(
    installed: str,
    noted: bool,
    released_state: type,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: installed)
    classes = type("State", (released_state,), {}).__mro__
    with caplog.at_level(logging.INFO, "omni_npu_phase"):
        v2.check(classes)
        v2.check(classes)
    assert [v2.RUNTIME.name in record.getMessage() for record in caplog.records] == ([True] if noted else [])


_METHODS = sorted(v2.TAKEN[v2.STATE].keys() - {"__init__"})
_CALLED_WITH = {name: taken.given for name, taken in v2.TAKEN[v2.STATE].items() if taken.given}


def _without(released: type, name: str) -> type:
    """The released state with one method gone from it, in a module with all that belongs to it."""
    bare = {key: value for cls in reversed(released.__mro__[:-1]) for key, value in vars(cls).items() if key != name}
    kept = {key: value for key, value in bare.items() if callable(value) and key not in ("__new__", "__dict__")}
    return type("Other", (), {**kept, "__module__": released.__module__})


@pytest.mark.parametrize("name", _METHODS)
def test_a_missing_method_is_named(name: str, released_state: type) -> None:
    other = _without(released_state, name)
    with pytest.raises(UnsupportedRuntimeError, match=f"Other is no model state .*no method {name}"):
        v2.check((other,))


@pytest.mark.parametrize("name", _CALLED_WITH)
def test_a_changed_signature_is_named(name: str, released_state: type) -> None:
    changed = type("Changed", (), {name: lambda self: None, "__module__": released_state.__module__})
    with pytest.raises(UnsupportedRuntimeError, match=rf"{name}\(self\) does not take \({_CALLED_WITH[name][0]}"):
        v2.check((changed, *released_state.__mro__))


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, taken in v2.TAKEN.items() for name in taken["__init__"].names]
)
def test_a_missing_attribute_is_named(
    owner: str, name: str, released_state: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fits.names_in

    def without(classes: Sequence[type], method: str) -> frozenset[str]:
        gone = (classes[0].__name__, method) == (owner, "__init__")
        return found(classes, method) - ({name} if gone else set())

    monkeypatch.setattr(fits, "names_in", without)
    assert v2.mismatches(released_state.__mro__) == [f"{owner}: __init__ names no {name}"]


@pytest.mark.parametrize("name", v2.NOT_DONE)
def test_a_state_that_does_more_is_refused(name: str, released_state: type) -> None:
    """As those of 0.31, which finish frames in the step that samples them: nobody would do that in their stead."""
    scope: dict[str, Any] = {}
    given = ", ".join(["self", *_CALLED_WITH["run_preprocess"]])
    exec(f"def run_preprocess({given}): self.{name}", scope)
    changed = type(
        "Changed",
        (released_state,),
        {"run_preprocess": scope["run_preprocess"], "__module__": released_state.__module__},
    )
    with pytest.raises(UnsupportedRuntimeError, match=f"run_preprocess uses {name}, which the mixin would leave out"):
        v2.check(changed.__mro__)


@pytest.mark.parametrize("beside", sorted(v2.TAKEN.keys() - {v2.STATE}))
def test_a_missing_class_is_named(beside: str, released_state: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules[released_state.__module__], beside)
    assert v2.mismatches(released_state.__mro__) == [f"{beside}: not in {released_state.__module__}"]


def test_another_input_batch_is_named(released_state: type, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    kept = [(each.name, Any) for each in fields(InputBatch) if each.name != "num_computed_tokens_np"]
    other = make_dataclass("InputBatch", kept)
    monkeypatch.setattr(sys.modules[released_state.__module__], "InputBatch", other)
    assert v2.mismatches(released_state.__mro__) == ["InputBatch: __init__ names no num_computed_tokens_np"]


def test_a_refused_state_is_left_as_it_was(mixed_state: type, released_state: type, make_bench: Any) -> None:
    class Changed(released_state):  # type: ignore[misc, valid-type]
        def _run_batched_mtp(self, rows: Any) -> None: ...

    bench = make_bench(type("Mixed", (PhaseStateMixin, Changed), {}), _PAIR)
    given = _ready(bench, _PAIR)
    before = given.embeds, copy.deepcopy(bench.live())
    with pytest.raises(UnsupportedRuntimeError, match=r"_run_batched_mtp\(self, rows\) does not take \(mtp_batches"):
        bench.runner.run_preprocess(given.batch, given.inputs, bench.requests, bench.dispatch)
    assert bench.model.log.hooks == []
    assert (given.embeds, bench.live()) == before
    with pytest.raises(UnsupportedRuntimeError, match="_run_batched_mtp"):
        verify.classes_for("mixin", verify.RunnerClasses("changed", Changed))


@pytest.mark.parametrize(("mode", "has_preprocess"), [("off", True), ("on", False)])
def test_a_state_whose_steps_are_not_ours_is_not_looked_at(
    mode: str, has_preprocess: bool, released_state: type, make_bench: Any
) -> None:
    changed = type("Changed", (released_state,), {"_call_mtp_runner": lambda self, *rest: None})
    mixed, behaviour = type("Mixed", (PhaseStateMixin, changed), {}), Behaviour(has_preprocess=has_preprocess)
    bench = make_bench(mixed, _PAIR, mtp=False, hook="scalar", mode=mode, behaviour=behaviour)
    _take(bench, _PAIR)
    assert len(bench.model.log.hooks) == (2 if has_preprocess else 0)
