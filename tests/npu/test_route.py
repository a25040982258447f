# SPDX-License-Identifier: Apache-2.0
"""The conformance scenarios on vLLM-Omni's NPU runners: every clause holds, and routing is what the tables say."""

from __future__ import annotations

from typing import Any

import pytest

from omni_npu_phase.conformance import bench, routing, verify
from omni_npu_phase.conformance.drive import run_scenario
from omni_npu_phase.conformance.judge import judge
from omni_npu_phase.conformance.scenarios import SCENARIOS, Scenario
from tests.cpu.mutants import MUTANTS, Mutant


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.id)
def test_scenario(scenario: Scenario, runner: verify.RunnerClasses, device: Any) -> None:
    cls = runner.of(scenario)
    assert cls is not None
    runs = [run_scenario(cls, scenario, variant, device) for variant in verify.variants(scenario, "mixin")]
    assert [difference for difference in map(routing.compare, runs) if difference] == []
    judgements = [judgement for run in runs for judgement in judge(run)]
    assert [judgement for judgement in judgements if not judgement.holds] == []
    assert set(scenario.about) <= {judgement.clause for judgement in judgements}


@pytest.mark.parametrize("mutant", [one for one in MUTANTS if "T9" in one.caught_by], ids=lambda mutant: mutant.name)
def test_what_is_not_copied_in_its_call_is_noticed(mutant: Mutant, runner: verify.RunnerClasses, device: Any) -> None:
    """The guards of ownership, where a copy to the host is another than on the CPU."""
    scenarios = [one for one in SCENARIOS if "T9" in one.about or one.id in mutant.also]
    failed: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch)
        for scenario in scenarios:
            cls = runner.of(scenario)
            assert cls is not None
            for variant in verify.variants(scenario, "mixin"):
                failed |= {one.clause for one in judge(run_scenario(cls, scenario, variant, device)) if not one.holds}
    assert "T9" in failed, f"T9 did not notice that {mutant.breaks}; failed: {sorted(failed)}"


def test_the_classes_are_the_released_ones(runner: verify.RunnerClasses) -> None:
    from vllm_omni.platforms.npu.worker.npu_model_runner import OmniNPUModelRunner
    from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner

    from omni_npu_phase import PhaseRoutingMixin

    assert runner.generation is not None
    for cls in (runner.autoregressive, runner.generation):
        names = [base for base in cls.__mro__ if base in (PhaseRoutingMixin, OmniNPUModelRunner, OmniGPUModelRunner)]
        assert names == [PhaseRoutingMixin, OmniNPUModelRunner, OmniGPUModelRunner]


def test_runners_have_what_their_own_init_gives_them(runner: verify.RunnerClasses, device: Any, emulated: Any) -> None:
    for cls in (runner.autoregressive, runner.generation):
        assert cls is not None
        made = bench._made_by_its_init(cls, device)
        assert {"vllm_config", "ascend_config", "attn_state"} <= set(made)


def test_rows_of_a_captured_graph(device: Any) -> None:
    """A captured graph replays on the same addresses, with padding behind the rows."""
    import torch

    from omni_npu_phase import buffers

    helper = buffers.for_device(device)
    dest, source = torch.zeros(8, 4, device=device), torch.ones(3, 4, device=device)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        helper.put(dest, slice(2, 5), source)
    source.fill_(2)
    graph.replay()
    assert dest[2:5].eq(2).all()
    assert dest[:2].eq(0).all()
