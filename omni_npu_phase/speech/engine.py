# SPDX-License-Identifier: Apache-2.0
"""One engine, in processes of its own: vLLM-Omni's offline entry point with the whole pipeline.

:func:`run` starts ``python -m omni_npu_phase.speech.engine`` and returns what it heard; nothing of the engine is left
when it returns, whatever happened.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import psutil

from omni_npu_phase.platform import PLATFORM_VARIABLE
from omni_npu_phase.results import MODE_VARIABLE
from omni_npu_phase.speech import observe
from omni_npu_phase.speech.observe import Request, Row
from omni_npu_phase.speech.prompts import Prompt

Device = Literal["cpu", "cuda", "npu"]

START_SECONDS = 600
"""A published model on a busy machine takes minutes to load."""


class EngineError(Exception):
    """The engine could not do its work; the message is one line, ``log`` is what it wrote."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How to make an engine, and what it is to say, one prompt after the other."""

    name: str
    model: str
    device: Device
    prompts: tuple[Prompt, ...]
    max_tokens: int
    budget: int | None
    """Tokens a step; None for chunking switched off."""


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
    """What an engine did: ``speeches`` in the order of its prompts, ``ranks`` the rows that each process saw."""

    speeches: list[Speech]
    ranks: list[list[Row]]
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
    Raises :class:`EngineError`.
    """
    with tempfile.TemporaryDirectory(prefix="omni-npu-phase-") as scratch:
        folder = Path(scratch)
        (folder / "spec.json").write_text(json.dumps(asdict(spec)), encoding="utf-8")
        log = folder / "engine.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "omni_npu_phase.speech.engine", scratch],
                # It ends itself when this closes, should this process die without a word.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, **environment(spec.device), observe.OBSERVE_VARIABLE: scratch},
                # A group of its own, so that every process of the engine can be ended.
                start_new_session=True,
                text=True,
            )
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    said = json.loads(line)
                    if isinstance(said, str):
                        advance(said)
                    else:
                        accept(said)
                status = process.wait()
            finally:
                end_group(process)
        if status != 0:
            written = log.read_text(encoding="utf-8", errors="replace")
            raise EngineError(f"the {spec.name} engine failed: {_reason(written)}", written)
        return _read(folder)


def environment(device: Device) -> Mapping[str, str]:
    """Variables of an engine's processes that make runs comparable."""
    common = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        # A runner that the mixin does not know is an error here, not a run without it.
        MODE_VARIABLE: os.environ.get(MODE_VARIABLE, "strict"),
        PLATFORM_VARIABLE: "cpu" if device == "cpu" else "",
    }
    if device == "cuda":
        return {**common, "VLLM_BATCH_INVARIANT": "1"}
    if device == "cpu":
        return {
            **common,
            # One thread a process: how a sum is split must not depend on the cores that are there.
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # The worker in its stage's process: starting takes half the time.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    return common


def end_group(process: subprocess.Popen[str]) -> None:
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
    for process in psutil.process_iter(["status"]):
        # A dead process whose parent does not ask for it stays in the table.
        if process.info["status"] != psutil.STATUS_ZOMBIE:
            with suppress(ProcessLookupError):
                if os.getpgid(process.pid) == group:
                    return True
    return False


def _reason(log: str) -> str:
    # The first error says more than those that follow from it.
    errors = re.findall(r"\b\w+Error: .*", log)
    return str(errors[0]).strip() if errors else "it ended without an error message"


def _read(folder: Path) -> EngineRun:
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    speeches = [
        Speech(np.load(folder / f"speech-{index}.npy"), **heard) for index, heard in enumerate(result.pop("speeches"))
    ]
    return EngineRun(speeches, observe.read(folder), **result)


# What follows runs in the engine's first process.


def main(folder: Path) -> None:
    """Make the engine that ``folder`` describes and write what it says into it."""
    raw = json.loads((folder / "spec.json").read_text(encoding="utf-8"))
    spec = EngineSpec(**{**raw, "prompts": tuple(Prompt(**prompt) for prompt in raw["prompts"])})
    began = time.perf_counter()
    _say("importing vLLM-Omni")
    _check_device(spec.device)
    from vllm_omni import Omni

    prompt_lens = [prompt.length(Path(spec.model)) for prompt in spec.prompts]
    _say(prompt_lens)
    file = folder / "deploy.json"
    file.write_text(json.dumps(deploy(spec, max(prompt_lens) + spec.max_tokens + 1)), encoding="utf-8")
    _say("starting")
    engine = Omni(
        model=spec.model, deploy_config=str(file), stage_init_timeout=START_SECONDS, init_timeout=START_SECONDS
    )
    started = time.perf_counter() - began
    speeches = []
    try:
        for index, (prompt, length) in enumerate(zip(spec.prompts, prompt_lens, strict=True)):
            _say(f"speaking {index + 1} of {len(spec.prompts)}")
            speech = _speak(engine, prompt, length)
            np.save(folder / f"speech-{index}.npy", speech.audio)
            speeches.append({key: getattr(speech, key) for key in ("sample_rate", "first_audio_seconds", "seconds")})
    finally:
        _say("stopping")
        engine.close()
    result = {"speeches": speeches, "prompt_lens": prompt_lens, "start_seconds": started}
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def _check_device(device: Device) -> None:
    import torch

    if device == "npu":
        with suppress(ImportError):
            import torch_npu  # noqa: F401
    # torch_npu puts `npu` beside `cuda`.
    module = getattr(torch, device, None)
    if module is None or not module.is_available():
        raise RuntimeError(f"--device {device}: PyTorch finds no such device")


def _say(what: str | list[int]) -> None:
    os.write(_PARENT, f"{json.dumps(what)}\n".encode())


def _end_with_parent() -> None:
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def deploy(spec: EngineSpec, max_model_len: int, max_num_seqs: int = 1) -> dict[str, Any]:
    """The released deploy file of the pipeline, with what makes runs comparable.

    ``max_model_len``: tokens of the talker's longest request, prompt and frames.
    """
    import vllm_omni.deploy

    stages: list[dict[str, Any]] = [
        {
            "stage_id": 0,
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
            "max_num_batched_tokens": spec.budget or max_model_len,
            "enable_chunked_prefill": spec.budget is not None,
            # The observer sees no replayed graph.
            "enforce_eager": True,
            "default_sampling_params": {"temperature": 0.0, "max_tokens": spec.max_tokens},
            "subtalker_sampling_params": {"do_sample": False},
        },
        {"stage_id": 1, "max_num_seqs": max_num_seqs, "enforce_eager": True, "dtype": "float32"},
    ]
    made = {"base_config": str(Path(vllm_omni.deploy.__path__[0], "qwen3_tts.yaml")), "stages": stages}
    if spec.device == "cpu":
        made["model_runner"] = "v1"
        for stage in stages:
            # Given, because vLLM would otherwise run the model to find out what is left of the machine.
            kv_bytes = _kv_bytes(spec.model, max_num_seqs * max_model_len)
            stage.update(kv_cache_memory_bytes=kv_bytes, block_size=32, gpu_memory_utilization=0.1)
        stages[1].update(max_num_batched_tokens=8192, max_model_len=8192)
    return made


def _kv_bytes(model: str, tokens: int) -> int:
    talker = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))["talker_config"]
    values = 2 * talker["num_hidden_layers"] * talker["num_key_value_heads"] * talker["head_dim"]
    # Two bytes each, and as much again to spare.
    return max(64 << 20, int(2 * 2 * values * tokens))


def _speak(engine: Any, prompt: Prompt, length: int) -> Speech:
    from vllm.sampling_params import RequestOutputKind

    sampling = [parameters.clone() for parameters in engine.default_sampling_params_list]
    # Audio as it is made, to see when the first of it comes.
    sampling[-1].output_kind = RequestOutputKind.DELTA
    request = {"prompt_token_ids": [1] * length, "additional_information": prompt.information}
    began = time.perf_counter()
    first = None
    rate = 0
    pieces: list[npt.NDArray[np.float32]] = []
    for output in engine.generate([request], sampling, py_generator=True, use_tqdm=False):
        heard = dict(output.multimodal_output or {})
        for piece in _tensors(heard.get("audio", heard.get("model_outputs"))):
            pieces.append(piece.detach().float().cpu().numpy().reshape(-1))
        if pieces and first is None:
            first = time.perf_counter() - began
        for value in _tensors(heard.get("sr")):
            rate = int(value)
    audio = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
    return Speech(audio, rate, first or 0.0, time.perf_counter() - began)


def _tensors(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    return value if isinstance(value, list) else (value,)


if __name__ == "__main__":
    # Standard output is the parent's; what the engine prints goes to the log.
    _PARENT = os.dup(1)
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    main(Path(sys.argv[1]))
