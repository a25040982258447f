# SPDX-License-Identifier: Apache-2.0
"""How long a step keeps the host busy: the released runner and the mixin in turns, in one process and one thread.

Times are processor time of the thread, in microseconds: on a busy machine it is what a quiet one would need, and on the
CPU, where device work is host work, it includes the copies. What hooks and MTP take is measured in each call, and taken
out.
"""

from __future__ import annotations

import contextlib
import cProfile
import gc
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import thread_time_ns
from typing import Any

import numpy as np
import torch

from omni_npu_phase.bench.counts import count
from omni_npu_phase.bench.steps import Case, Steps, around_hooks, engineless

_WARM_UP = 5
_SECONDS_PER_CASE = 1.5
_FEWEST, _MOST = 15, 400


@dataclass(frozen=True, slots=True)
class Result:
    """One case: medians in microseconds without hooks and MTP, and ratios released/mixin of steps taken in turns.

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


class HookClock:
    """Processor time that this thread spends in hooks and MTP, to be taken out of a step's."""

    def __init__(self) -> None:
        self.reset()
        self._own_ns = self._own()

    def reset(self) -> None:
        self._spent_ns, self._calls = 0, 0

    @property
    def ns(self) -> float:
        """What hooks cost since the last reset, with what the clock itself adds to a call outside of what it reads."""
        return self._spent_ns + self._calls * self._own_ns

    def around(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            began = thread_time_ns()
            result = hook(*args, **keywords)
            self._spent_ns += thread_time_ns() - began
            self._calls += 1
            return result

        return call

    def _own(self) -> float:
        def empty(*args: Any, **keywords: Any) -> None:
            pass

        def spent(hook: Callable[..., Any]) -> int:
            self.reset()
            began = thread_time_ns()
            for _ in range(1000):
                hook(0, **keywords)
            return thread_time_ns() - began - self._spent_ns

        keywords = dict.fromkeys("abcdefghijkl")
        watched = self.around(empty)
        return max(0.0, statistics.median(spent(watched) - spent(empty) for _ in range(9)) / 1000)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """One thread for operators, and no look at what lives as long as the process, as in engines."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)


def measure(released: type, mixed: type, case: Case) -> Result:
    """Time one case on both runners, step by step and in an order drawn anew each time, and count its operations."""
    device, clock, draw = torch.device("cpu"), HookClock(), random.Random(7)
    with engineless():
        talker = case.talker(device)
        with around_hooks(talker.model, clock.around), _quiet():
            sides = [Steps(cls, case, device, talker) for cls in (released, mixed)]

            def both() -> dict[Steps, float]:
                # Whoever comes last looks several percent faster.
                return {side: _take(side, clock) for side in draw.sample(sides, 2)}

            began = thread_time_ns()
            for _ in range(_WARM_UP):
                both()
            whole = (thread_time_ns() - began) / _WARM_UP / 1e9
            times = [both() for _ in range(int(min(max(_SECONDS_PER_CASE / whole, _FEWEST), _MOST)))]
        operations = [count(side).operations.work.total() for side in sides]
    theirs, ours = ([each[side] for each in times] for side in sides)
    ratios = [one / other for one, other in zip(theirs, ours, strict=True)]
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
        operations=operations[1],
        released_operations=operations[0],
    )


def profile(cls: type, case: Case, steps: int, into: Path) -> list[float]:
    """Microseconds of so many steps of one runner; then as many under cProfile, whose statistics go to a file."""
    device, clock, profiler = torch.device("cpu"), HookClock(), cProfile.Profile()
    with engineless():
        talker = case.talker(device)
        with around_hooks(talker.model, clock.around), _quiet():
            runner = Steps(cls, case, device, talker)
            times = [_take(runner, clock) for _ in range(_WARM_UP + steps)][_WARM_UP:]
            for _ in range(steps):
                profiler.runcall(runner.take)
                runner.finish()
    profiler.dump_stats(into)
    return times


def _take(steps: Steps, clock: HookClock) -> float:
    """Microseconds of one step, hooks left out."""
    clock.reset()
    began = thread_time_ns()
    steps.take()
    spent = thread_time_ns() - began - clock.ns
    steps.finish()
    return spent / 1000


def fit(results: Sequence[Result], of: Callable[[Result], float]) -> Fit | None:
    """Fit times over rows; None with fewer than two numbers of rows."""
    rows = [result.rows for result in results]
    if len(set(rows)) < 2:
        return None
    row_us, fixed_us = np.polyfit(rows, [of(result) for result in results], 1)
    return Fit(round(float(fixed_us), 1), round(float(row_us), 2))
