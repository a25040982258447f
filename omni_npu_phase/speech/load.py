# SPDX-License-Identifier: Apache-2.0
"""An engine that speaks for several requests at once, in processes of its own: when is each of them heard?

:class:`LoadedEngine` starts ``python -m omni_npu_phase.speech.load``, which makes vLLM-Omni's asynchronous entry point
with the whole pipeline and serves one round of requests after the other, until it is closed.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from omni_npu_phase.settings import MODE_VARIABLE, OBSERVE_VARIABLE, Mode
from omni_npu_phase.speech import engine, pipeline
from omni_npu_phase.speech.engine import EngineError, EngineSpec
from omni_npu_phase.speech.prompts import Prompt
from omni_npu_phase.speech.tiny_qwen3_tts import SAMPLES_PER_FRAME

START_SECONDS = 600
ROUND_SECONDS = 300
"""Longer than either takes on a machine that is not stuck."""
# The plugin's line in vLLM's log, from the stage's own process.
_MIXED = "PhaseRoutingMixin is before"


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """How to make an engine on the CPU platform."""

    name: str
    model: str
    mode: Mode
    budget: int | None
    """Tokens a step; None for chunking switched off."""
    max_model_len: int
    max_num_seqs: int
    observed: bool = False
    """Whether the talker's steps are recorded, into the engine's folder; that takes time in each."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a round. One that is ``late`` is sent when all the others have been heard."""

    name: str
    text: str
    frames: int
    late: bool = False


@dataclass(frozen=True, slots=True)
class Heard:
    """What came of a request. ``sent``, ``first`` and ``last``: seconds since the round began."""

    name: str
    prompt_len: int
    frames: int
    sent: float
    first: float
    last: float


class LoadedEngine:
    """An engine and its processes; nothing of them is left after :meth:`close`, whatever happened."""

    def __init__(self, spec: LoadSpec, folder: Path) -> None:
        """Begin to start it; ``folder`` is its own and exists."""
        self.spec = spec
        self.folder = folder
        self._begun = b""
        variables = {
            **engine.environment("cpu"),
            MODE_VARIABLE: spec.mode,
            OBSERVE_VARIABLE: str(folder) if spec.observed else "",
            # Which runner was built is read from the log.
            "VLLM_LOGGING_LEVEL": "INFO",
        }
        self._process = engine.begin("omni_npu_phase.speech.load", spec, folder, variables)

    def wait(self) -> float:
        """Wait until it can speak; returns the seconds that starting took. Raises :class:`EngineError`."""
        seconds = float(self._answer(START_SECONDS))
        mixed = _MIXED in self._log()
        if mixed is (self.spec.mode == "off"):
            raise EngineError(f"the {self.spec.name} engine has {'the' if mixed else 'no'} mixin", self._log())
        return seconds

    def speak(self, asks: Sequence[Ask]) -> list[Heard]:
        """Send these requests at once, but late ones, and return what was heard. Raises :class:`EngineError`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([asdict(ask) for ask in asks]).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("it ended between two rounds") from None
        heard = [Heard(**answer) for answer in self._answer(ROUND_SECONDS)]
        for ask, speech in zip(asks, heard, strict=True):
            if speech.frames != ask.frames:
                raise self._failure(f"{ask.frames} frames were asked for, {speech.frames} came")
        return heard

    def cpu_seconds(self) -> float:
        """Processor time of its processes so far, which says more than a clock where others use the machine too."""
        try:
            first = psutil.Process(self._process.pid)
            return sum(sum(process.cpu_times()[:2]) for process in (first, *first.children(recursive=True)))
        except psutil.Error:
            raise self._failure("it ended between two rounds") from None

    def close(self) -> None:
        engine.end_group(self._process)

    def _answer(self, seconds: float) -> Any:
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._begun:
            if not select.select([self._process.stdout], [], [], max(0, deadline - time.monotonic()))[0]:
                raise self._failure(f"no answer in {seconds} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise self._failure(engine.reason(self._log()))
            self._begun += piece
        line, _, self._begun = self._begun.partition(b"\n")
        return json.loads(line)

    def _log(self) -> str:
        return (self.folder / engine.LOG).read_text(encoding="utf-8", errors="replace")

    def _failure(self, reason: str) -> EngineError:
        return EngineError(f"the {self.spec.name} engine failed: {reason}", self._log())


# What follows runs in the engine's first process.


async def _serve(folder: Path, answers: int) -> None:
    spec = LoadSpec(**json.loads((folder / "spec.json").read_text(encoding="utf-8")))
    rounds: asyncio.Queue[list[Ask]] = asyncio.Queue()
    threading.Thread(target=_listen, args=(asyncio.get_running_loop(), rounds), daemon=True).start()
    began = time.perf_counter()
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    deploy = pipeline.deploy(
        EngineSpec(spec.name, spec.model, "cpu", (), spec.max_model_len, spec.budget),
        spec.max_model_len,
        spec.max_num_seqs,
    )
    file = folder / "deploy.json"
    file.write_text(json.dumps(deploy), encoding="utf-8")
    omni = AsyncOmni(
        model=spec.model,
        deploy_config=str(file),
        stage_init_timeout=START_SECONDS,
        init_timeout=START_SECONDS,
        # They would wait for each other to measure what memory is left, which is given here.
        parallel_stage_init=True,
    )
    _answer(answers, time.perf_counter() - began)
    while True:
        asks = await rounds.get()
        _answer(answers, [asdict(heard) for heard in await _round(omni, spec, asks)])


def _listen(loop: asyncio.AbstractEventLoop, rounds: asyncio.Queue[list[Ask]]) -> None:
    for line in sys.stdin:
        loop.call_soon_threadsafe(rounds.put_nowait, [Ask(**ask) for ask in json.loads(line)])
    # Nobody is there to hear it any more.
    os.killpg(0, signal.SIGKILL)


def _answer(answers: int, value: Any) -> None:
    os.write(answers, f"{json.dumps(value)}\n".encode())


async def _round(omni: Any, spec: LoadSpec, asks: Sequence[Ask]) -> list[Heard]:
    began = time.perf_counter()
    silent = sum(not ask.late for ask in asks)
    all_heard = asyncio.Event()

    async def speak(ask: Ask) -> Heard:
        nonlocal silent
        prompt = Prompt(ask.text, "vivian", "english")
        length = prompt.length(Path(spec.model))
        if ask.late:
            await all_heard.wait()
        sent = time.perf_counter() - began
        times: list[float] = []
        samples = 0
        async for output in omni.generate(
            {"prompt_token_ids": [1] * length, "additional_information": prompt.information},
            request_id=ask.name,
            sampling_params_list=_sampling(omni, ask),
        ):
            heard = _samples(output)
            if not heard:
                continue
            samples += heard
            times.append(time.perf_counter() - began)
            if len(times) == 1 and not ask.late:
                silent -= 1
                if not silent:
                    all_heard.set()
                    # Late requests are sent before more is heard, also where more has been waiting to be.
                    await asyncio.sleep(0)
        first, last = (times[0], times[-1]) if times else (0.0, 0.0)
        return Heard(ask.name, length, samples // SAMPLES_PER_FRAME, sent, first, last)

    return list(await asyncio.gather(*map(speak, asks)))


def _sampling(omni: Any, ask: Ask) -> list[Any]:
    from vllm.sampling_params import RequestOutputKind

    sampling = [parameters.clone() for parameters in omni.default_sampling_params_list]
    # The last token makes no frame.
    sampling[0].max_tokens = ask.frames + 1
    # Audio as it is made.
    sampling[-1].output_kind = RequestOutputKind.DELTA
    return sampling


def _samples(output: Any) -> int:
    heard = dict(output.multimodal_output or {})
    return sum(int(piece.numel()) for piece in pipeline.tensors(heard.get("audio", heard.get("model_outputs"))))


if __name__ == "__main__":
    # Standard output is the parent's; what the engine prints goes to the log.
    _ANSWERS = os.dup(1)
    os.dup2(2, 1)
    asyncio.run(_serve(Path(sys.argv[1]), _ANSWERS))
