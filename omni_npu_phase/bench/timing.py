# SPDX-License-Identifier: Apache-2.0
"""How long a step keeps the host busy: the released runner and the mixin in turns, in one process and one thread.

Times are processor time of the thread, in microseconds: on a busy machine it is what a quiet one would need, and on the
CPU, where device work is host work, it includes the copies. What hooks and MTP return is made before a step begins.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import thread_time_ns
from typing import Any

import numpy as np
import torch

from omni_npu_phase.bench.counts import count_step
from omni_npu_phase.bench.steps import Case, Steps, engineless

_WARM_UP = 5
_SECONDS_PER_CASE = 1.5
_FEWEST, _MOST = 15, 400


@dataclass(frozen=True, slots=True)
class Result:
    """One case: medians in microseconds, ratios released/mixin of the steps taken one after the other.

    ``ratio_min`` and ``ratio_max`` are the tenth and ninetieth percentile of those ratios; ``operations`` are what the
    mixin has dispatched, views left out. ``transfers`` and ``syncs`` are counted on the emulated device only, and None
    elsewhere: on the CPU nothing is transferred.
    """

    rows: int
    hidden: int
    hook: str
    mix: str
    updates: str
    released_us: float
    mixin_us: float
    ratio: float
    ratio_min: float
    ratio_max: float
    operations: int
    released_operations: int
    transfers: int | None = None
    syncs: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Fit:
    """Time as a fixed part and a part for each row, in microseconds, by least squares."""

    fixed_us: float
    row_us: float


def measure(released: type, mixed: type, case: Case) -> Result:
    """Time one case on both runners in turns, and count its operations."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    # As engines do: what lives as long as the process is not looked at again.
    gc.freeze()
    try:
        with engineless():
            runners = [Steps(cls, case, torch.device("cpu")) for cls in (released, mixed)]
            for _ in range(_WARM_UP):
                spent = _in_turns(runners, first=0)
            repeats = int(min(max(_SECONDS_PER_CASE * 1e6 / sum(spent), _FEWEST), _MOST))
            times = [_in_turns(runners, first=turn % 2) for turn in range(repeats)]
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)
    theirs, ours = zip(*times, strict=True)
    ratios = [one / other for one, other in times]
    low, *_, high = statistics.quantiles(ratios, n=10)
    return Result(
        rows=case.rows,
        hidden=case.hidden,
        hook=case.hook,
        mix=case.mix,
        updates=case.updates,
        released_us=round(statistics.median(theirs), 1),
        mixin_us=round(statistics.median(ours), 1),
        ratio=round(statistics.median(theirs) / statistics.median(ours), 2),
        ratio_min=round(low, 2),
        ratio_max=round(high, 2),
        operations=count_step(mixed, case).work.total(),
        released_operations=count_step(released, case).work.total(),
    )


def _in_turns(runners: Sequence[Steps], first: int) -> list[float]:
    """A step of each of two runners. Whoever came last looked a few percent faster, so the order changes."""
    spent = [0.0, 0.0]
    for index in (first, 1 - first):
        spent[index] = _take(runners[index])
    return spent


def _take(steps: Steps) -> float:
    steps.prepare()
    began = thread_time_ns()
    steps.take()
    return (thread_time_ns() - began) / 1000


def fit(results: Sequence[Result], of: Callable[[Result], float]) -> Fit | None:
    """Fit times over rows; None with fewer than two numbers of rows."""
    rows = [result.rows for result in results]
    if len(set(rows)) < 2:
        return None
    row_us, fixed_us = np.polyfit(rows, [of(result) for result in results], 1)
    return Fit(round(float(fixed_us), 1), round(float(row_us), 2))


def floor(rows: int) -> float:
    """Microseconds of a bare loop that writes the keys a hook must be told into one dictionary a row."""
    infos: list[dict[str, Any]] = [{} for _ in range(rows)]
    values = [(f"r{row}", 2, 3, False, 9, 7) for row in range(rows)]
    times = []
    for _ in range(50):
        began = thread_time_ns()
        for info, (request, prompt_len, computed, prefill, most, seed) in zip(infos, values, strict=True):
            info["_omni_prompt_len"] = prompt_len
            info["_omni_num_computed_tokens"] = computed
            info["_omni_is_prefill"] = prefill
            info["request_id"] = request
            info["duplex_token_offset"] = computed
            info["duplex_prompt_len"] = prompt_len
            info["_omni_max_tokens"] = most
            info["_omni_seed"] = seed
        times.append((thread_time_ns() - began) / 1000)
    return round(statistics.median(times), 1)
