# SPDX-License-Identifier: Apache-2.0
"""The first process of an engine: makes vLLM-Omni's pipeline and lets it speak.

:mod:`omni_npu_phase.speech.engine` starts it, and hears from it one JSON object a line: ``doing`` and ``prompt_lens``
on the way, and ``result`` or ``killed`` last.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omni_npu_phase.speech.engine import ON_HOST, Device, EngineSpec, Speech
from omni_npu_phase.speech.prompts import Prompt


def main(folder: Path) -> None:
    """Make the engine that ``folder`` describes and write what it says into it. Does not return."""
    raw = json.loads((folder / "spec.json").read_text(encoding="utf-8"))
    spec = EngineSpec(**{**raw, "prompts": tuple(Prompt(**prompt) for prompt in raw["prompts"])})
    began = time.perf_counter()
    _say(doing="importing vLLM-Omni")
    _check_device(spec.device)
    from vllm_omni import Omni

    prompt_lens = [prompt.length(Path(spec.model)) for prompt in spec.prompts]
    _say(prompt_lens=prompt_lens)
    file = folder / "deploy.json"
    file.write_text(
        json.dumps(deploy(spec, max(prompt_lens) + spec.max_tokens + 1, len(spec.prompts) if spec.together else 1)),
        encoding="utf-8",
    )
    _say(doing="starting")
    seconds = math.ceil(spec.timeout)
    engine = Omni(
        model=spec.model,
        deploy_config=str(file),
        stage_init_timeout=seconds,
        init_timeout=seconds,
        # Stages of one device otherwise wait for each other, so that each can measure what memory is left.
        parallel_stage_init=spec.device in ON_HOST,
    )
    # vLLM-Omni 0.24 closes the engine when its first generator ends; it is the parent who ends this one.
    engine.close = lambda: None
    started = time.perf_counter() - began
    _say(doing="ready")
    speeches: list[dict[str, Any]] = []
    if spec.together:
        _say(doing=f"{len(spec.prompts)} requests")
        requests = [_request(*each) for each in zip(spec.prompts, prompt_lens, strict=True)]
        engine.generate(requests, engine.default_sampling_params_list, use_tqdm=False)
    for index, (prompt, length) in enumerate(() if spec.together else zip(spec.prompts, prompt_lens, strict=True)):
        _say(doing=f"request {index + 1} of {len(spec.prompts)}")
        speech = _speak(engine, prompt, length)
        np.save(folder / f"speech-{index}.npy", speech.audio)
        speeches.append({key: getattr(speech, key) for key in ("sample_rate", "first_audio_seconds", "seconds")})
    _say(result={"speeches": speeches, "prompt_lens": prompt_lens, "start_seconds": started})
    # The parent ends all processes at once; vLLM-Omni would end one stage after the other.
    signal.pause()


def _check_device(device: Device) -> None:
    import torch

    if device == "emulated":
        # The platform's entry point brings the device, and says what is missing.
        return
    if device == "npu":
        with suppress(ImportError):
            import torch_npu  # noqa: F401
    # torch_npu puts `npu` beside `cuda`.
    module = getattr(torch, device, None)
    if module is None or not module.is_available():
        raise RuntimeError(f"--device {device}: PyTorch finds no such device")


def _say(**what: Any) -> None:
    try:
        os.write(_PARENT, f"{json.dumps(what)}\n".encode())
    except BrokenPipeError:
        # The parent is gone, and the thread that sees it ends everything.
        signal.pause()


def _end_with_parent(folder: Path) -> None:
    sys.stdin.read()
    _ENDING.acquire()
    for _ in range(100):
        # A stage that is still running may write meanwhile.
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
    os.killpg(0, signal.SIGKILL)


def _killed_stages() -> Iterator[str]:
    """Processes of stages that a signal ended, but for the one with which vLLM-Omni ends them itself."""
    for found in gc.get_objects():
        if issubclass(type(found), BaseProcess) and (found.exitcode or 0) < 0 and found.exitcode != -signal.SIGTERM:
            yield f"{found.name} was ended by {signal.Signals(-found.exitcode).name}"


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
    made: dict[str, Any] = {"base_config": str(Path(vllm_omni.deploy.__path__[0], "qwen3_tts.yaml")), "stages": stages}
    # What the released file says of NPUs comes last, and there it switches graphs on again. Without chunked prefill
    # vLLM-Ascend 0.30.0rc2 takes blocks of 128 for its cache, and of 16 for its tables unless the size is given.
    on_npu = {"enforce_eager": True, "block_size": 128}
    made["platforms"] = {"npu": {"stages": [{"stage_id": stage["stage_id"], **on_npu} for stage in stages]}}
    if spec.device in ON_HOST:
        made["model_runner"] = "v1"
        for stage in stages:
            # Given, because vLLM would otherwise run the model to find out what is left of the machine.
            kv_bytes = _kv_bytes(spec.model, max_num_seqs * max_model_len)
            stage.update(kv_cache_memory_bytes=kv_bytes, gpu_memory_utilization=0.1)
            if spec.device == "cpu":
                stage["block_size"] = 32
        stages[1].update(max_num_batched_tokens=8192, max_model_len=8192)
    return made


def _kv_bytes(model: str, tokens: int) -> int:
    talker = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))["talker_config"]
    values = 2 * talker["num_hidden_layers"] * talker["num_key_value_heads"] * talker["head_dim"]
    # Two bytes each, and as much again to spare.
    return max(64 << 20, int(2 * 2 * values * tokens))


def _request(prompt: Prompt, length: int) -> dict[str, Any]:
    return {"prompt_token_ids": [1] * length, "additional_information": prompt.information}


def _speak(engine: Any, prompt: Prompt, length: int) -> Speech:
    from vllm.sampling_params import RequestOutputKind

    sampling = [parameters.clone() for parameters in engine.default_sampling_params_list]
    # Audio as it is made, to see when the first of it comes.
    sampling[-1].output_kind = RequestOutputKind.DELTA
    began = time.perf_counter()
    first = None
    rate = 0
    pieces: list[npt.NDArray[np.float32]] = []
    for output in engine.generate([_request(prompt, length)], sampling, py_generator=True, use_tqdm=False):
        heard = dict(output.multimodal_output or {})
        for piece in tensors(heard.get("audio", heard.get("model_outputs"))):
            pieces.append(piece.detach().float().cpu().numpy().reshape(-1))
        if pieces and first is None:
            first = time.perf_counter() - began
        for value in tensors(heard.get("sr")):
            rate = int(value)
    audio = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
    return Speech(audio, rate, first or 0.0, time.perf_counter() - began)


def tensors(value: Any) -> Sequence[Any]:
    """A value of vLLM-Omni's multimodal output: it is one tensor, a list of them, or missing."""
    if value is None:
        return ()
    return value if isinstance(value, list) else (value,)


if __name__ == "__main__":
    # Standard output is the parent's; what the engine prints goes to the log.
    _PARENT = os.dup(1)
    os.dup2(2, 1)
    _ENDING = threading.Lock()
    _FOLDER = Path(sys.argv[1])
    threading.Thread(target=_end_with_parent, args=(_FOLDER,), daemon=True).start()
    try:
        main(_FOLDER)
    except Exception:
        logging.exception("the engine failed")
        _say(killed=list(_killed_stages()))
        # Not while the folder is being removed.
        _ENDING.acquire()
        # An engine that failed leaves threads that would keep Python from ending.
        os._exit(1)
