# SPDX-License-Identifier: Apache-2.0
"""The mixin as a class: modes, refusals, what stays with the released runner, and MTP called directly."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import omni_npu_phase
from omni_npu_phase import ContractError, contract
from omni_npu_phase.bench.steps import Case, Steps, engineless
from omni_npu_phase.conformance import bench, scenarios
from omni_npu_phase.conformance.bench import Bench
from omni_npu_phase.conformance.drive import Drive, run_scenario
from omni_npu_phase.conformance.judge import judge
from omni_npu_phase.conformance.recording_model import HIDDEN, MARK, RecordingModel, prompt_embedding
from omni_npu_phase.conformance.scenarios import BY_ID, Behaviour, Scenario, Setting, Variant
from omni_npu_phase.settings import MODE_VARIABLE
from omni_npu_phase.step import v1 as mixin
from omni_npu_phase.step.mtp import mtp_inputs
from omni_npu_phase.step.port import phase_of

CPU = torch.device("cpu")
PACKAGE = Path(omni_npu_phase.__file__).parent
SELECTION = (
    "_execute_mm_encoder",
    "_gather_mm_embeddings",
    "_prepare_mm_inputs",
    "_init_model_kwargs",
    "_extract_mm_kwargs",
    "sync_and_gather_intermediate_tensors",
    "sync_and_slice_intermediate_tensors",
    "_sync_local_stage_payloads",
    "_update_additional_information",
)


def _run(cls: type, scenario: str | Scenario, mode: str = "on", hook: str = "batched", mtp: bool = True) -> Any:
    case = BY_ID[scenario] if isinstance(scenario, str) else scenario
    return run_scenario(cls, case, Variant(hook, mtp, mode), CPU)  # type: ignore[arg-type]


# The package's door.


def test_lazy_names() -> None:
    assert omni_npu_phase.PhaseRoutingMixin is mixin.PhaseRoutingMixin
    assert set(dir(omni_npu_phase)) >= {"PhaseRoutingMixin", "ContractError", "__version__"}
    with pytest.raises(AttributeError, match="nothing"):
        omni_npu_phase.nothing  # noqa: B018


def test_selection_stays_with_the_released_code() -> None:
    """Input selection, payloads and pipeline stages are not written again."""
    for path in PACKAGE.rglob("*.py"):
        if "conformance" not in path.parts and "testing" not in path.parts:
            text = path.read_text(encoding="utf-8")
            assert [name for name in SELECTION if name in text] == []


# Modes.


def test_off_is_the_released_runner(mixed: type, released: type) -> None:
    for scenario in ("mutated-fields", "prompt-embeds", "owned-results"):
        ours, theirs = _run(mixed, scenario, "off"), _run(released, scenario)
        assert type(ours.error) is type(theirs.error)
        assert judge(ours) == [
            type(one)(one.clause, one.scenario, str(ours.variant), one.seen, one.undecided) for one in judge(theirs)
        ]


@pytest.mark.parametrize("mode", ["strict", "on"])
def test_mode_from_the_environment(mode: str, mixed: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE_VARIABLE, mode)
    run = run_scenario(mixed, BY_ID["e5-long"], Variant("scalar", True, ""), CPU)
    assert isinstance(run.error, ContractError) is (mode == "strict")


def test_the_attribute_wins_over_the_environment(mixed: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "strict")
    assert _run(mixed, "e5-long", "on", "scalar").error is None


def test_unknown_mode(mixed: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "sometimes")
    run = run_scenario(mixed, BY_ID["tail"], Variant("scalar", True, ""), CPU)
    assert isinstance(run.error, ValueError)
    assert "'sometimes'" in str(run.error)


def test_a_deviation_is_said_once(mixed: type) -> None:
    run = _run(mixed, "e5-long", "on", "scalar")
    assert len(run.warnings) == 1
    assert "[E5] hook preprocess" in run.warnings[0]


# Refusals.


def test_more_values_of_an_override_are_passed_through(released: type) -> None:
    class Longer(released):  # type: ignore[misc, valid-type]
        def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
            return (*super()._preprocess(*args, **kwargs), "more")

    runner = type("Runner", (omni_npu_phase.PhaseRoutingMixin, Longer), {})
    returned = []

    class _Noted(runner):
        def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
            returned.append(super()._preprocess(*args, **kwargs))
            return returned[-1]

    assert _run(_Noted, "tail").error is None
    assert {outputs[6:] for outputs in returned} == {("more",)}


# What is masked from the released code, and given back.


def test_masked_model() -> None:
    class Model:
        has_preprocess = True
        width = 3

        def __call__(self, value: int) -> int:
            return value + self.width

    model = Model()
    view: Any = mixin._HooksMasked(model)
    assert view.has_preprocess is False
    assert isinstance(view, Model)
    assert view.__class__.__name__ == "Model"
    assert view(1) == 4
    view.width = 5
    assert model.width == 5
    with pytest.raises(AttributeError):
        view.missing  # noqa: B018


def test_the_model_is_given_back_after_an_error(released: type) -> None:
    seen: list[Any] = []

    class Failing(released):  # type: ignore[misc, valid-type]
        def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
            seen.append((self, self.model.has_preprocess))
            raise RuntimeError("selection failed")

    runner = type("Runner", (omni_npu_phase.PhaseRoutingMixin, Failing), {})
    run = _run(runner, "tail")
    assert str(run.error) == "selection failed"
    (instance, masked), *_ = seen
    assert masked is False
    assert instance.model.has_preprocess is True
    assert phase_of(instance).selecting is False


def test_earlier_rows_keep_what_they_stored_before_an_error(mixed: type, monkeypatch: pytest.MonkeyPatch) -> None:
    stored: dict[str, Any] = {}
    untouched = Drive._untouched

    def noting(drive: Any, *rest: Any) -> bool:
        stored.update(drive.bench.live())
        return untouched(drive, *rest)

    monkeypatch.setattr(Drive, "_untouched", noting)
    run = _run(mixed, "e5b-short")
    assert isinstance(run.error, ContractError)
    assert run.untouched_by_error
    marked = {request: "token" in info[MARK] for request, info in stored.items()}
    assert marked == {"p": True, "a": False, "b": False, "c": False}


# MTP by itself, on a runner made without __init__.


@contextlib.contextmanager
def _no_context(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class Mtp:
    """An MTP that writes down its calls; codes are the row numbers."""

    def __init__(self, codes: Callable[[int], Any] = lambda rows: torch.arange(rows).reshape(-1, 1)) -> None:
        self.calls: list[dict[str, Any]] = []
        self._codes = codes

    def __call__(self, ids: Any, embeds: torch.Tensor, hidden: Any, text: Any, **keywords: Any) -> Any:
        self.calls.append({"rows": embeds.shape[0], **keywords})
        return embeds + 1, self._codes(embeds.shape[0])


@pytest.fixture
def bare(mixed: type, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two decode requests at rows 0 and 3, and only what MTP needs."""
    from vllm_omni.platforms import current_omni_platform

    monkeypatch.setattr(current_omni_platform, "set_forward_context", _no_context)
    runner: Any = object.__new__(mixed)
    runner.model, runner.device = SimpleNamespace(), torch.device("cpu")
    runner.requests = {name: SimpleNamespace() for name in ("r1", "r2")}
    runner.model_intermediate_buffer = {}
    runner.input_batch = SimpleNamespace(req_ids=["r1", "r2"], req_id_to_index={"r1": 0, "r2": 1})
    runner.query_start_loc = SimpleNamespace(cpu=torch.tensor([0, 3]))
    runner.vllm_config = SimpleNamespace(model_config=SimpleNamespace())
    runner.talker_mtp_input_ids = SimpleNamespace(gpu=torch.tensor([101, 202]))
    for name in ("talker_mtp_inputs_embeds", "last_talker_hidden", "text_step"):
        setattr(runner, name, SimpleNamespace(gpu=torch.arange(8.0).reshape(2, 4)))
    runner._determine_batch_execution_and_padding = lambda **_: (None, object(), None, None, None)
    runner.talker_mtp = Mtp()
    return runner


def _seed(runner: Any, **seeds: int | None) -> None:
    for request, seed in seeds.items():
        extra = None if seed is None else {"tts_local_seed": seed}
        runner.requests[request].sampling_params = SimpleNamespace(seed=42, extra_args=extra)


@pytest.mark.parametrize("offsets", [None, [0, 3]])
def test_mtp_results(bare: Any, offsets: list[int] | None) -> None:
    embeds = torch.zeros(6, 4)
    bare._talker_mtp_forward(["r1", "r2"], embeds, offsets)
    assert torch.equal(embeds[0], torch.arange(4.0) + 1)
    assert torch.equal(embeds[3], torch.arange(4.0) + 5)
    assert embeds[[1, 2, 4, 5]].eq(0).all()
    for row, request in enumerate(("r1", "r2")):
        assert bare.requests[request].additional_information_cpu["codes"]["audio"].tolist() == [[row]]
    assert bare.talker_mtp.calls == [{"rows": 2, "do_sample": None, "temperature": None, "top_k": None, "top_p": None}]


def test_no_rows_no_call(bare: Any) -> None:
    bare._talker_mtp_forward([], torch.zeros(2, 4))
    assert bare.talker_mtp.calls == []


def test_plain_tensors_are_accepted_as_buffers(bare: Any) -> None:
    for name in ("talker_mtp_input_ids", "talker_mtp_inputs_embeds", "last_talker_hidden", "text_step"):
        setattr(bare, name, getattr(bare, name).gpu)
    bare._talker_mtp_forward(["r1"], torch.zeros(6, 4))
    assert bare.talker_mtp.calls[0]["rows"] == 1


def test_sampling_parameters_reach_the_call(bare: Any) -> None:
    bare.vllm_config.model_config.subtalker_sampling_params = {"do_sample": True, "temperature": 0.2, "other": 1}
    _seed(bare, r1=7)
    bare._talker_mtp_forward(["r1"], torch.zeros(6, 4))
    (call,) = bare.talker_mtp.calls
    assert (call["do_sample"], call["temperature"], call["top_k"]) == (True, 0.2, None)
    assert call["generator"].initial_seed() == 7
    assert "other" not in call


def test_a_general_seed_is_no_mtp_seed(bare: Any) -> None:
    _seed(bare, r1=None)
    bare._talker_mtp_forward(["r1"], torch.zeros(6, 4))
    assert "generator" not in bare.talker_mtp.calls[0]


def test_seeded_rows_run_alone_and_inputs_stay(bare: Any) -> None:
    _seed(bare, r1=11, r2=22)
    before = [buffer.clone() for buffer in mtp_inputs(bare)]
    embeds = torch.zeros(6, 4)
    bare._talker_mtp_forward(["r1", "r2"], embeds)
    calls = bare.talker_mtp.calls
    assert [call["rows"] for call in calls] == [1, 1]
    assert [call["generator"].initial_seed() for call in calls] == [11, 22]
    assert all(torch.equal(*pair) for pair in zip(mtp_inputs(bare), before, strict=True))
    assert torch.equal(embeds[3], torch.arange(4.0) + 5)


def test_inputs_stay_when_a_seeded_call_fails(bare: Any) -> None:
    _seed(bare, r1=11, r2=22)

    def second_call_fails(rows: int) -> None:
        if len(bare.talker_mtp.calls) > 1:
            raise RuntimeError("no codes today")

    bare.talker_mtp = Mtp(second_call_fails)
    before = mtp_inputs(bare)[1].clone()
    with pytest.raises(RuntimeError, match="no codes today"):
        bare._talker_mtp_forward(["r1", "r2"], torch.zeros(6, 4))
    assert torch.equal(mtp_inputs(bare)[1], before)


def test_one_call_for_models_with_a_generator_per_row(bare: Any) -> None:
    bare.model.talker_mtp_accepts_per_row_generators = True
    _seed(bare, r1=11, r2=None)
    for _ in range(2):
        bare._talker_mtp_forward(["r1", "r2"], torch.zeros(6, 4))
    first, second = (call["generators"] for call in bare.talker_mtp.calls)
    assert first[1] is None
    assert second[0] is first[0], "a request's stream goes on from step to step"
    del bare.requests["r1"]
    bare._talker_mtp_forward(["r2"], torch.zeros(6, 4))
    assert bare._talker_mtp_generators == {}


def test_resident_codes_and_validity(bare: Any) -> None:
    codes = torch.tensor([[5], [6]])
    bare.talker_mtp = Mtp(lambda rows: codes[:rows])
    bare.model.gpu_resident_buffer_keys = {("codes", "audio")}
    bare.model.talker_mtp_validity_key = ("meta", "valid")
    bare._talker_mtp_forward(["r1", "r2"], torch.zeros(6, 4))
    codes.zero_()
    info = bare.model_intermediate_buffer["r2"]
    assert info["codes"]["audio"].tolist() == [[6]]
    assert info["meta"]["valid"].item() is True


def test_codes_go_where_the_model_wants_them(bare: Any) -> None:
    bare.model.talker_mtp_output_key = ("speech", "tokens")
    bare._talker_mtp_forward(["r1"], torch.zeros(6, 4))
    assert bare.model_intermediate_buffer["r1"]["speech"]["tokens"].tolist() == [[0]]


@pytest.mark.parametrize("key", ["codes", ("codes",), ["codes", "audio"]])
def test_a_bad_output_key(bare: Any, key: Any) -> None:
    bare.model.talker_mtp_output_key = key
    with pytest.raises(TypeError, match="must be a pair"):
        bare._talker_mtp_forward(["r1"], torch.zeros(6, 4))


def test_no_codes_leave_the_stored_ones(bare: Any) -> None:
    bare.talker_mtp = Mtp(lambda rows: None)
    bare.model_intermediate_buffer["r1"] = {"codes": {"audio": "kept"}}
    bare._talker_mtp_forward(["r1"], torch.zeros(6, 4))
    assert bare.model_intermediate_buffer["r1"]["codes"]["audio"] == "kept"


@pytest.mark.parametrize("codes", [{0: 1}, torch.tensor(3)])
def test_codes_without_rows(bare: Any, codes: Any) -> None:
    bare.talker_mtp = Mtp(lambda rows: codes)
    with pytest.raises(ContractError, match=r"\[T5\] hook talker_mtp"):
        bare._talker_mtp_forward(["r1"], torch.zeros(6, 4))


def test_too_few_codes(bare: Any, caplog: pytest.LogCaptureFixture) -> None:
    bare.talker_mtp = Mtp(lambda rows: torch.zeros(1, 1))
    with caplog.at_level(logging.WARNING):
        bare._talker_mtp_forward(["r1", "r2"], torch.zeros(6, 4))
    assert "expected at least 2 code rows, got 1" in caplog.text


@pytest.mark.parametrize("resident", [True, False])
def test_rows_without_codes_store_none_of_a_neighbour(bare: Any, resident: bool) -> None:
    bare.talker_mtp = Mtp(lambda rows: torch.full((1, 1), 7))
    bare.model.gpu_resident_buffer_keys = {("codes", "audio")} if resident else set()
    bare._talker_mtp_forward(["r1", "r2"], torch.zeros(6, 4))
    stored = [bare.model_intermediate_buffer[request]["codes"]["audio"].tolist() for request in ("r1", "r2")]
    assert stored == [[[7]], []]


@pytest.mark.parametrize("make", [list, tuple, np.array])
def test_codes_that_are_no_tensor(bare: Any, make: Callable[[Any], Any]) -> None:
    """As released, each request gets its slice of whatever MTP returned; here it is the request's own."""
    codes = make([[1], [2]])
    bare.talker_mtp = Mtp(lambda rows: codes)
    bare.model.gpu_resident_buffer_keys = set()
    bare.model.talker_mtp_validity_key = ("meta", "valid")
    bare._talker_mtp_forward(["r1", "r2"], torch.zeros(6, 4))
    if isinstance(codes, np.ndarray):
        codes[:] = 9
    for request, wanted in (("r1", 1), ("r2", 2)):
        info = bare.model_intermediate_buffer[request]
        assert [int(row[0]) for row in info["codes"]["audio"]] == [wanted]
        assert bool(info["meta"]["valid"])


def test_too_few_codes_in_strict_mode(bare: Any) -> None:
    bare.phase_mode = "strict"
    bare.talker_mtp = Mtp(lambda rows: torch.zeros(1, 1))
    embeds = torch.zeros(6, 4)
    with pytest.raises(ContractError, match=r"\[T5\] hook talker_mtp, requests 'r1', 'r2', rows 0, 1"):
        bare._talker_mtp_forward(["r1", "r2"], embeds)
    assert embeds.eq(0).all()
    assert bare.model_intermediate_buffer == {}


def test_off_leaves_mtp_and_updates_to_the_released_code(bare: Any, released: type) -> None:
    bare.phase_mode = "off"
    seen: list[tuple[Any, ...]] = []
    # Stand in front of the released class only: the mixin's own code would not come here.
    behind = type("Behind", (released,), {name: _noting(seen, name) for name in _ROUTED})
    runner: Any = object.__new__(type("Runner", (omni_npu_phase.PhaseRoutingMixin, behind), {}))
    runner.__dict__.update(bare.__dict__)
    embeds = torch.zeros(6, 4)
    runner._talker_mtp_forward(["r1"], embeds, [3])
    runner._update_intermediate_buffer("r1", {"x": 1})
    assert seen == [("_talker_mtp_forward", ["r1"], embeds, [3]), ("_update_intermediate_buffer", "r1", {"x": 1})]
    assert bare.talker_mtp.calls == []


_ROUTED = ("_talker_mtp_forward", "_update_intermediate_buffer")


def _noting(seen: list[tuple[Any, ...]], name: str) -> Callable[..., None]:
    # The parameters are those by which a released runner is known.
    def mtp(self: Any, decode_req_ids: Any, inputs_embeds: Any, start_offsets: Any = None) -> None:
        seen.append((name, decode_req_ids, inputs_embeds, start_offsets))

    def update(self: Any, req_id: Any, upd: Any) -> None:
        seen.append((name, req_id, upd))

    return mtp if name == "_talker_mtp_forward" else update


def test_models_without_hooks_keep_the_released_storage(bare: Any) -> None:
    """R1: what such a model stores is not copied, as released."""
    value = torch.ones(1)
    bare._update_intermediate_buffer("r1", {"x": value})
    assert bare.model_intermediate_buffer["r1"]["x"].data_ptr() == value.data_ptr()
    bare.model.has_preprocess = True
    bare._update_intermediate_buffer("r1", {"y": value})
    assert bare.model_intermediate_buffer["r1"]["y"].data_ptr() != value.data_ptr()


def test_a_runner_without_buffers_names_its_device(bare: Any) -> None:
    del bare.talker_mtp_inputs_embeds
    bare.device = "cpu"
    bare.model.has_preprocess = True
    bare._update_intermediate_buffer("r1", {"x": torch.ones(1)})
    assert bare.model_intermediate_buffer["r1"]["x"].device == CPU


def test_too_few_embeddings(bare: Any, caplog: pytest.LogCaptureFixture) -> None:
    """As released: one row is written for all where the rows are the buffer's first, and cannot be elsewhere."""
    bare.talker_mtp = lambda ids, embeds, hidden, text, **_: (embeds[:1] + 1, None)
    embeds = torch.zeros(6, 4)
    with pytest.raises(ContractError, match=r"\[T4\].*expected inputs_embeds of shape \(2, 4\) .* got \(1, 4\)"):
        bare._talker_mtp_forward(["r1", "r2"], embeds)
    assert embeds.eq(0).all()
    bare._talker_mtp_forward(["r1", "r2"], embeds, [0, 1])
    assert embeds[:2].tolist() == [[1, 2, 3, 4]] * 2
    assert "Tolerated" in caplog.text


def test_a_runner_without_a_model_stores_as_released(bare: Any) -> None:
    del bare.model
    bare._update_intermediate_buffer("r1", {"x": 1})
    assert bare.model_intermediate_buffer["r1"] == {"x": 1}


def test_a_replayed_row_leaves_its_generator_where_it_was(bare: Any) -> None:
    """Also behind a call that fails, and only for the rows that are replayed (E3)."""
    bare.model.talker_mtp_accepts_per_row_generators = True
    bare.input_batch.num_computed_tokens_cpu = np.array([7, 7])
    bare.requests["r1"].num_tokens, bare.requests["r2"].num_tokens = 9, 8
    _seed(bare, r1=11, r2=22)
    bare._talker_mtp_forward(["r1", "r2"], torch.zeros(6, 4))
    before = [generator.get_state() for generator in bare._talker_mtp_generators.values()]

    def drawing(rows: int) -> None:
        for generator in bare.talker_mtp.calls[-1]["generators"]:
            torch.rand(1, generator=generator)
        raise RuntimeError("no codes today")

    bare.talker_mtp = Mtp(drawing)
    with pytest.raises(RuntimeError, match="no codes today"):
        bare._talker_mtp_forward(["r1", "r2"], torch.zeros(6, 4))
    after = [generator.get_state() for generator in bare._talker_mtp_generators.values()]
    assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [True, False]


def test_infos_show_what_the_hooks_just_returned(mixed: type) -> None:
    run = _run(mixed, "request-ids", hook="scalar")
    (call,) = run.steps[0].log.mtp
    assert [info["mark"]["token"] for info in call.keywords["req_infos"]] == call.token_ids


def test_what_postprocess_and_payloads_may_not_store(bare: Any) -> None:
    bare.model.has_preprocess = True
    bare.model_intermediate_buffer["r1"] = {"_omni_prompt_len": 5}
    bare._update_intermediate_buffer("r1", {"_omni_prompt_len": 77, "mtp_inputs": (1, 2), "x": 1})
    assert bare.model_intermediate_buffer["r1"] == {"_omni_prompt_len": 5, "x": 1}


def test_a_batched_hook_may_keep_the_ids_of_rows_that_go_to_mtp(mixed: type, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[torch.Tensor, list[int]]] = []
    original = RecordingModel._preprocess_decode_batch

    def keeping(model: Any, input_ids: torch.Tensor, req_infos: Any) -> Any:
        kept.append((input_ids, input_ids.tolist()))
        return original(model, input_ids, req_infos)

    monkeypatch.setattr(RecordingModel, "_preprocess_decode_batch", keeping)
    _run(mixed, "adjacent-decodes")
    assert len(kept) > 1
    assert all(ids.tolist() == as_given for ids, as_given in kept)


@pytest.mark.parametrize("hook", ["batched", "scalar"])
@pytest.mark.parametrize("mix", ["decode", "mixed"])
def test_what_a_hook_stores_of_its_inputs_is_what_it_was_given(mixed: type, hook: Any, mix: Any) -> None:
    """Though it returns other ids and embeddings, which are written to the memory of its inputs."""
    with engineless():
        steps = Steps(mixed, Case(4, 8, hook, mix=mix, chunk=3, dtype=torch.float32), CPU)
        model, buffers = steps.model, (steps.runner.input_ids.gpu, steps.runner.inputs_embeds.gpu)

        def preprocess(input_ids: torch.Tensor, input_embeds: torch.Tensor, **info: Any) -> Any:
            new = torch.full_like(input_embeds, 9)
            mtp_inputs = {} if info[contract.IS_PREFILL] else {contract.MTP_INPUTS: (new, new.clone())}
            return input_ids + 1000, new, {**mtp_inputs, "ids": input_ids, "embeds": input_embeds}

        def preprocess_decode_batch(input_ids: torch.Tensor, req_infos: Any) -> Any:
            new = torch.full((len(req_infos), 8), 9.0)
            return input_ids + 1000, new, new, new, [{"ids": row} for row in input_ids.split(1)]

        model.preprocess = preprocess
        if hook == "batched":
            model.preprocess_decode_batch = preprocess_decode_batch
        for buffer in buffers:
            buffer.copy_(torch.arange(len(buffer)).reshape(-1, *[1] * (buffer.ndim - 1)))
        steps.take()
        live = [steps.runner.model_intermediate_buffer[request] for request in steps.runner.input_batch.req_ids]
    assert torch.cat([info["ids"] for info in live]).tolist() == list(range(steps._tokens))
    given = [info["embeds"][:, 0].tolist() for info in live if "embeds" in info]
    wanted = [info["ids"].tolist() for info in live if "embeds" in info]
    assert given == wanted
    assert buffers[0][: steps._tokens].tolist() == list(range(1000, 1000 + steps._tokens))


def test_spans_may_be_numpy_integers(mixed: type) -> None:
    with engineless():
        steps = Steps(mixed, Case(3, 8, "scalar"), CPU)
        spans = steps._scheduled.num_scheduled_tokens
        spans.update({request: np.int64(span) for request, span in spans.items()})
        steps.take()
    assert all("codes" in info for info in steps.runner.model_intermediate_buffer.values())


# Edges that no scenario reaches.


def test_prompt_embeds_that_are_too_short(mixed: type, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Bench.new_state

    def shortened(bench: Any, row: Any) -> Any:
        state = made(bench, row)
        if row.request == "a":
            state.prompt_embeds_cpu = state.prompt_embeds_cpu[:2]
        return state

    monkeypatch.setattr(Bench, "new_state", shortened)
    run = _run(mixed, "prompt-embeds")
    assert isinstance(run.error, ContractError)
    assert (run.error.clause, run.error.requests) == ("E1", ("a",))


@pytest.mark.parametrize(
    ("span", "sent", "multimodal", "last"),
    [(8, False, False, 0), (8, True, False, 0), (5, True, False, "sent"), (8, False, True, "embedded")],
)
def test_a_row_without_embeddings_is_not_an_older_step_s(
    span: int, sent: bool, multimodal: bool, last: object, mixed: type
) -> None:
    """P5 C0, one row too few: what the step itself put there stays, and only what is left of an older one goes."""
    scenario = Scenario(
        "short", "", (), ((scenarios.row("a", 5, 0, span),),), behaviour=Behaviour(fault="short"),
        setting=Setting(prompt_embeds=frozenset({"a"} if sent else ()), multimodal=multimodal),
    )  # fmt: skip
    run = run_scenario(mixed, scenario, Variant("scalar", False), torch.device("cpu"))
    assert run.error is None
    (left,) = run.steps
    values = {"sent": prompt_embedding(run.indices["a"], 4), "embedded": [3.0] * HIDDEN, 0: [0.0] * HIDDEN}
    assert left.embeds is not None
    assert left.embeds[span - 1] == values[last]
    (said,) = run.warnings
    assert f"expected {span} embedding rows, got {span - 1}, and behind them what the runner has" in said


def test_a_request_of_unknown_length(mixed: type, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Bench.update_requests

    def forget(bench: Any, rows: Any) -> None:
        made(bench, rows)
        bench.runner.requests["a"] = SimpleNamespace(prompt_token_ids=None)

    monkeypatch.setattr(Bench, "update_requests", forget)
    run = _run(mixed, "tail")
    assert isinstance(run.error, ContractError)
    assert run.error.clause == "E4"
    assert "neither" in str(run.error)


def test_a_row_without_a_span(mixed: type, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench.scheduler_output

    def forget(rows: Any, *, reverse: bool) -> Any:
        output = made(rows, reverse=reverse)
        output.num_scheduled_tokens.pop("a")
        return output

    monkeypatch.setattr(bench, "scheduler_output", forget)
    run = _run(mixed, "adjacent-decodes")
    assert isinstance(run.error, ContractError)
    assert "expected a scheduled span, got none" in str(run.error)


@pytest.mark.parametrize("changed", [True, False])
def test_mtp_is_given_the_ids_that_a_batched_hook_left_in_what_it_was_lent(
    changed: bool, released: type, mixed: type
) -> None:
    given = []
    for cls in (released, mixed):
        with engineless():
            steps = Steps(cls, Case(2, 16, "batched"), CPU)
            hook = steps.model.preprocess_decode_batch

            def in_place(input_ids: Any, hook: Any = hook, **keywords: Any) -> Any:
                result = hook(input_ids=input_ids, **keywords)
                return (input_ids.fill_(9) if changed else input_ids, *result[1:])

            steps.model.preprocess_decode_batch = in_place
            steps.take()
            given.append(steps.mtp_inputs()[0][:2].tolist())
    assert given[0] == given[1]
    assert (given[0] == [9, 9]) is changed
