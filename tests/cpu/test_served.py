# SPDX-License-Identifier: Apache-2.0
"""The pipeline behind vLLM-Omni's OpenAI-compatible server, asked by the real client under chunked prefill."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from omni_npu_phase.settings import OBSERVE_VARIABLE
from omni_npu_phase.speech import engine, observe, pipeline, tiny_qwen3_tts
from omni_npu_phase.speech.engine import EngineSpec
from omni_npu_phase.speech.prompts import Prompt
from omni_npu_phase.speech.report import AUDIO_TOLERANCE, Report
from omni_npu_phase.speech.validate import MAX_TOKENS

pytestmark = pytest.mark.xdist_group("engines")
openai = pytest.importorskip("openai")

TEXTS = ("Hello world", "The rain has ended.")
START_SECONDS = 240
# 16-bit samples round.
TOLERANCE = AUDIO_TOLERANCE + 1 / 32767


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    observed: Path


@pytest.fixture(scope="module")
def offline(spoken: Report) -> list[npt.NDArray[np.float32]]:
    assert tuple(comparison.prompt.text for comparison in spoken.comparisons) == TEXTS
    return [comparison.unchunked_speech.audio for comparison in spoken.comparisons]


@contextmanager
def _serving(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The server's process; its log is ``folder / "log"``, and its talker is observed in ``folder``."""
    prompts = tuple(Prompt(text, "vivian", "english") for text in TEXTS)
    spec = EngineSpec("served", str(tiny_qwen3_tts.cached()), "cpu", prompts, MAX_TOKENS, budget=7)
    deploy = folder / "deploy.json"
    deploy.write_text(json.dumps(pipeline.deploy(spec, max_model_len=128, max_num_seqs=2)), encoding="utf-8")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm_omni.entrypoints.cli.main", "serve", spec.model, "--omni"),
                *("--deploy-config", str(deploy), "--host", "127.0.0.1", "--port", str(port)),
                *("--served-model-name", "tiny"),
            ],
            stdout=log,
            stderr=log,
            env={**os.environ, **engine.environment("cpu"), OBSERVE_VARIABLE: str(folder)},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        engine.end_group(process)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with _serving(folder, port) as process:
        _wait(process, f"http://127.0.0.1:{port}/health", folder / "log")
        yield Server(f"http://127.0.0.1:{port}/v1", folder)


@pytest.mark.no_cover
def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with _serving(tmp_path, taken.getsockname()[1]) as process:
            assert process.wait(START_SECONDS) != 0
    log = (tmp_path / "log").read_text(encoding="utf-8", errors="replace")
    assert engine.reason(log) == "OSError: [Errno 98] Address already in use"
    # It looked before it started an engine.
    assert not list(tmp_path.glob("talker-*"))


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise AssertionError(f"no server after {START_SECONDS} s: {log.read_text(errors='replace')[-4000:]}")


def _whole(client: openai.OpenAI, text: str) -> npt.NDArray[np.float32]:
    answer = client.audio.speech.create(
        model="tiny",
        voice="vivian",
        input=text,
        response_format="wav",
        extra_body={"language": "English", "task_type": "CustomVoice"},
    )
    with wave.open(io.BytesIO(answer.content)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, tiny_qwen3_tts.SAMPLE_RATE)
        return _samples(file.readframes(file.getnframes()))


def _streamed(client: openai.OpenAI, text: str) -> tuple[npt.NDArray[np.float32], int]:
    pieces = []
    with client.audio.speech.with_streaming_response.create(
        model="tiny",
        voice="vivian",
        input=text,
        response_format="pcm",
        extra_body={"language": "English", "task_type": "CustomVoice", "stream": True, "stream_format": "audio"},
    ) as answer:
        pieces = [piece for piece in answer.iter_bytes() if piece]
    return _samples(b"".join(pieces)), len(pieces)


def _samples(pcm: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(pcm, "<i2").astype(np.float32) / 32767


def test_two_concurrent_requests_speak_as_offline(server: Server, offline: list[npt.NDArray[np.float32]]) -> None:
    client = openai.OpenAI(base_url=server.url, api_key="none", timeout=START_SECONDS, max_retries=0)
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(_whole, client, TEXTS[0])
        streamed = pool.submit(_streamed, client, TEXTS[1])
        audio, (stream, pieces) = whole.result(), streamed.result()
    assert pieces > 1
    for heard, expected in ((audio, offline[0]), (stream, offline[1])):
        assert heard.shape == expected.shape
        assert np.abs(heard - expected).max() <= TOLERANCE

    (rows,) = observe.read(server.observed)
    steps: dict[int, set[str]] = {}
    for row in rows:
        steps.setdefault(row.step, set()).add(row.request)
    assert any(len(requests) == 2 for requests in steps.values())
    assert sum(row.told["_omni_is_prefill"] is True for row in rows) > 2
