# SPDX-License-Identifier: Apache-2.0
"""The mixin against the released runner: the same bytes where the released runner is right, or survives."""

from __future__ import annotations

import pytest
import torch

from omni_npu_phase import ContractError
from omni_npu_phase.conformance.scenarios import Hook, Variant
from tests.differential import Driven

SEEDS = range(240)
CPU = torch.device("cpu")

every_variant = pytest.mark.parametrize("mtp", [True, False], ids=["mtp", "plain"])
every_hook = pytest.mark.parametrize("hook", ["scalar", "batched"])


def _pair(released: type, mixed: type, hook: Hook, mtp: bool) -> tuple[Driven, Driven]:
    variant = Variant(hook, mtp)
    return Driven(released, variant, CPU), Driven(mixed, variant, CPU)


@every_hook
@every_variant
def test_right_steps_leave_what_the_released_runner_leaves(released: type, mixed: type, hook: Hook, mtp: bool) -> None:
    """Token ids, embeddings, codes and live buffers, of random rows in random order, some of them seeded."""
    oracle, ours = _pair(released, mixed, hook, mtp)
    for seed in SEEDS:
        wanted, found = oracle.run(seed), ours.run(seed)
        assert wanted.error is found.error is None, seed
        assert found.left == wanted.left, seed
        assert found.warnings == [], seed


@every_hook
@every_variant
def test_malformed_results_end_as_on_the_released_runner_or_better(
    released: type, mixed: type, hook: Hook, mtp: bool
) -> None:
    """What it survives is survived, with the same bytes, but for rows that it leaves as they were; what it dies of is
    survived too or is an error by its name."""
    oracle, ours = _pair(released, mixed, hook, mtp)
    survived = died = 0
    for seed in SEEDS:
        wanted, found = oracle.run(seed, malformed=True), ours.run(seed, malformed=True)
        if wanted.error is None:
            assert found.error is None, seed
            assert found.left == wanted.without_older_steps, seed
            survived += bool(found.warnings)
        else:
            assert found.error is None or isinstance(found.error, ContractError), (seed, found.error)
            died += found.error is not None
    # Neither is rare, so neither is untested.
    assert survived >= 10
    assert died >= 30
