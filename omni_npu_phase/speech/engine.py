# SPDX-License-Identifier: Apache-2.0
"""One engine, in processes of its own: vLLM-Omni's offline entry point with the whole pipeline.

:func:`run` starts ``python -m omni_npu_phase.speech.pipeline`` and returns what it heard; nothing of the engine is left
when it returns, whatever happened.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from omni_npu_phase.emulated_ascend import engine as emulated_engine
from omni_npu_phase.settings import MODE_VARIABLE, OBSERVE_VARIABLE, PLATFORM_VARIABLE
from omni_npu_phase.speech import observe
from omni_npu_phase.speech.observe import Request, Row, Runner
from omni_npu_phase.speech.prompts import Prompt

Device = Literal["cpu", "cuda", "npu", "emulated"]
"""``emulated``: vLLM-Ascend on the emulated device, which is not tested on Ascend."""

ON_HOST: frozenset[Device] = frozenset(["cpu", "emulated"])
"""Devices whose kernels the host computes, in memory that all stages share."""
LOG = "engine.log"
TIMEOUT = 600.0
"""Seconds. A published model on a busy machine takes minutes to load."""
BATCH_INVARIANT_VARIABLE = "VLLM_BATCH_INVARIANT"
PLUGINS_VARIABLE = "VLLM_PLUGINS"


class EngineError(Exception):
    """The engine could not do its work; the message is one line, ``log`` is what it wrote."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How to make an engine, and what it is to say."""

    name: str
    model: str
    device: Device
    prompts: tuple[Prompt, ...]
    max_tokens: int
    budget: int | None
    """Tokens a step; None for chunking switched off."""
    timeout: float = TIMEOUT
    """Seconds for its imports, for its start, and for each prompt."""
    together: bool = False
    """Whether all prompts are sent at once, and share their batches. No audio is kept of them."""


@dataclass(slots=True)
class Speech:
    """What one prompt sounded like."""

    audio: npt.NDArray[np.float32]
    """Shape (samples,), in -1 to 1."""
    sample_rate: int
    first_audio_seconds: float
    seconds: float


@dataclass(slots=True)
class EngineRun:
    """What an engine did: ``speeches`` in the order of its prompts; ``ranks`` and ``runners`` by talker process."""

    speeches: list[Speech]
    ranks: list[list[Row]]
    runners: list[Runner]
    prompt_lens: list[int]
    start_seconds: float

    @property
    def requests(self) -> list[Request]:
        """What the first rank saw of each prompt. Raises ValueError where the talker was not observed."""
        return observe.by_request(self.ranks[0] if self.ranks else [], self.prompt_lens)


def _accept(_: list[int]) -> None:
    pass


def run(
    spec: EngineSpec,
    advance: Callable[[str], None] = lambda _: None,
    accept: Callable[[list[int]], None] = _accept,
) -> EngineRun:
    """Start an engine, let it speak, stop it.

    ``advance`` hears what it is doing; ``accept`` gets the prompts' lengths before anything is loaded, and may raise.
    Raises :class:`EngineError`, also where the engine takes longer than ``spec.timeout`` for what it is doing.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="omni-npu-phase-", ignore_cleanup_errors=True) as scratch:
            return _run_in(Path(scratch), spec, advance, accept)
    except OSError as error:
        raise EngineError(f"the {spec.name} engine failed: {error}") from error


def _run_in(
    folder: Path, spec: EngineSpec, advance: Callable[[str], None], accept: Callable[[list[int]], None]
) -> EngineRun:
    variables = {**environment(spec.device), OBSERVE_VARIABLE: str(folder)}
    process = begin("omni_npu_phase.speech.pipeline", spec, folder, variables)
    log = folder / LOG
    doing, failure, result = "starting Python", "", None
    try:
        for said in _said(process, spec.timeout):
            if "doing" in said:
                doing = said["doing"]
                advance(doing)
            elif "prompt_lens" in said:
                accept(said["prompt_lens"])
            elif "killed" in said:
                failure = "".join(f"{stage}; " for stage in said["killed"])
            else:
                result = said["result"]
                break
        else:
            status = process.wait(spec.timeout)
            if status < 0:
                failure = f"it was ended by {signal.Signals(-status).name}; "
    except (TimeoutError, subprocess.TimeoutExpired):
        failure = f"it took longer than the timeout of {spec.timeout:g} s; "
    finally:
        end_group(process)
    written = log.read_text(encoding="utf-8", errors="replace")
    if result is None:
        raise EngineError(f"the {spec.name} engine failed ({doing}): {failure}{reason(written)}", written)
    speeches = [
        Speech(np.load(folder / f"speech-{index}.npy"), **heard) for index, heard in enumerate(result.pop("speeches"))
    ]
    return EngineRun(speeches, observe.read(folder), observe.read_runners(folder), **result)


def _said(process: subprocess.Popen[bytes], timeout: float) -> Iterator[dict[str, Any]]:
    """What the engine says until it closes its standard output. Raises TimeoutError after a silence of ``timeout``."""
    assert process.stdout is not None
    begun = b""
    while True:
        if not select.select([process.stdout], [], [], timeout)[0]:
            raise TimeoutError
        piece = os.read(process.stdout.fileno(), 1 << 16)
        if not piece:
            return
        *lines, begun = (begun + piece).split(b"\n")
        yield from map(json.loads, lines)


def environment(device: Device) -> Mapping[str, str]:
    """Variables of an engine's processes that make runs comparable."""
    common = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        # A runner that the mixin does not know is an error here, not a run without it.
        MODE_VARIABLE: os.environ.get(MODE_VARIABLE) or "strict",
        PLATFORM_VARIABLE: "cpu" if device == "cpu" else "",
    }
    if device in ON_HOST:
        return {
            **common,
            **(emulated_engine.ENVIRONMENT if device == "emulated" else _plugins_without_ascend()),
            # vLLM's batch-invariant kernels are written in Triton, which CPU builds do not have.
            BATCH_INVARIANT_VARIABLE: "0",
            # One thread a process: how a sum is split must not depend on the cores that are there.
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # The worker in its stage's process: starting takes half the time.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    return {**common, BATCH_INVARIANT_VARIABLE: os.environ.get(BATCH_INVARIANT_VARIABLE) or "1"}


def _plugins_without_ascend() -> Mapping[str, str]:
    """Where it is installed, vLLM-Ascend names a platform whatever the device, and vLLM takes no more than one."""
    groups = ("vllm.platform_plugins", "vllm.general_plugins", "vllm_omni.platform_plugins")
    modules = {point.name: point.module for group in groups for point in entry_points(group=group)}
    ascend = {name for name, module in modules.items() if module.partition(".")[0] == "vllm_ascend"}
    named = os.environ[PLUGINS_VARIABLE].split(",") if PLUGINS_VARIABLE in os.environ else modules
    return {PLUGINS_VARIABLE: ",".join(name for name in named if name not in ascend)} if ascend else {}


def begin(module: str, spec: Any, folder: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a module as an engine's first process. It finds ``spec``, a dataclass, in ``folder``, and logs there."""
    (folder / "spec.json").write_text(json.dumps(asdict(spec)), encoding="utf-8")
    # vLLM leaves its sockets behind, wherever they are.
    settings = {**os.environ, **variables, "VLLM_RPC_BASE_PATH": str(folder)}
    with (folder / LOG).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(folder)],
            # It ends itself when this closes, should this process die without a word.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=settings,
            # A group of its own, so that every process of the engine can be ended.
            start_new_session=True,
        )


def end_group(process: subprocess.Popen[Any]) -> None:
    """End every process of the engine, politely first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            process.poll()
            if not _living(process.pid):
                return
            time.sleep(0.05)


def _living(group: int) -> bool:
    import psutil

    for process in psutil.process_iter(["status"]):
        # A dead process whose parent does not ask for it stays in the table.
        if process.info["status"] != psutil.STATUS_ZOMBIE:
            with suppress(ProcessLookupError):
                if os.getpgid(process.pid) == group:
                    return True
    return False


def reason(log: str) -> str:
    """The error in what an engine or a server wrote, in one line."""
    # The first error says more than those that follow from it.
    errors = re.findall(r"\b\w+Error: .*", log)
    return str(errors[0]).strip() if errors else "there is no error in its log"
