# SPDX-License-Identifier: Apache-2.0
"""Steps that nobody thought of: random lengths, spans, orders and models, held against every clause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_npu_phase.conformance.drive import run_scenario
from omni_npu_phase.conformance.judge import judge
from omni_npu_phase.conformance.scenarios import Behaviour, Scenario, Setting, Step, Variant, row

REQUESTS = ("a", "b", "c", "d", "e")


@st.composite
def random_steps(draw: st.DrawFn) -> tuple[Step, ...]:
    """Requests that go on from where they were, grow their prompt, or fall back to an earlier progress."""
    prompts = {request: draw(st.integers(1, 6)) for request in REQUESTS}
    progress = {request: draw(st.integers(0, prompts[request] + 2)) for request in REQUESTS}
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        batch = draw(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=5, unique=True))
        rows = []
        for request in batch:
            prompts[request] += draw(st.sampled_from([0, 0, 0, 2]))
            if draw(st.sampled_from([False, False, False, True])):
                progress[request] = draw(st.integers(0, progress[request]))
            lengths = prompts[request], progress[request], draw(st.sampled_from([1, 1, 1, 2, 3]))
            rows.append(row(request, *lengths))
            progress[request] += lengths[2]
        steps.append(tuple(rows))
    return tuple(steps)


behaviours = st.builds(
    Behaviour,
    ids=st.sampled_from(["same", "new"]),
    mtp_inputs=st.sampled_from(["one_token", "every_row"]),
    updates=st.sampled_from(["mark", "whole", "fields", "nothing"]),
    embeds=st.sampled_from(["fresh", "in_place"]),
    preprocess_batch=st.sampled_from(["absent", "records", "replaces", "claims"]),
    codes=st.sampled_from(["rows", "resident"]),
    validity=st.booleans(),
)
surroundings = st.builds(
    Setting,
    padded=st.sampled_from([0, 8]),
    stale=st.booleans(),
    multimodal=st.booleans(),
    scheduled_reversed=st.booleans(),
)
variants = st.builds(Variant, hook=st.sampled_from(["scalar", "batched"]), mtp=st.booleans())


# The same examples every time: a merge must not fail for a draw that nobody can see again.
@settings(max_examples=150, derandomize=True)
@given(steps=random_steps(), behaviour=behaviours, setting=surroundings, variant=variants)
def test_every_clause_holds(
    mixed: type, steps: tuple[Step, ...], behaviour: Behaviour, setting: Any, variant: Variant
) -> None:
    _assert_holds(mixed, Scenario("random", "random steps", (), steps, behaviour=behaviour, setting=setting), variant)


@settings(max_examples=100, derandomize=True)
@given(steps=random_steps(), behaviour=behaviours, setting=surroundings, variant=variants)
def test_every_clause_holds_on_model_runner_v2(
    mixed_state: type, steps: tuple[Step, ...], behaviour: Behaviour, setting: Setting, variant: Variant
) -> None:
    behaviour, setting = replace(behaviour, preprocess_batch="absent"), replace(setting, multimodal=False)
    scenario = Scenario("random", "random steps", (), steps, behaviour=behaviour, setting=setting)
    _assert_holds(mixed_state, scenario, variant)


def _assert_holds(cls: type, scenario: Scenario, variant: Variant) -> None:
    run = run_scenario(cls, scenario, variant, torch.device("cpu"))
    assert run.error is None
    judgements = judge(run)
    assert judgements
    assert [judgement for judgement in judgements if not judgement.holds] == []
