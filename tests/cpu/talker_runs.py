# SPDX-License-Identifier: Apache-2.0
"""Engines of the talker alone, one after the other in processes of their own: the platform is chosen once a process.

``python talker_runs.py MODEL [FOLDER]`` reads cases from standard input and writes what the model saw to standard
output. With FOLDER it makes two checkpoints there: ``again`` as MODEL was made, ``other`` with another seed.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from omni_npu_phase.settings import MODE_VARIABLE, OBSERVE_VARIABLE, REPLAY_VARIABLE, TRACE_VARIABLE

TEXTS = {"a": "Hello world", "b": "The rain has ended."}
_SEEDED = {"seed": 5, "temperature": 0.9}
_BLOCKS = {"texts": TEXTS, "budget": 7, "max_model_len": 96, "sampling": {"max_tokens": 16}}
CASES: Mapping[str, dict[str, Any]] = {
    "unchunked": {"texts": TEXTS, "budget": 128},
    "one at a time": {"texts": {"b": TEXTS["b"]}, "budget": 128},
    "chunked": {"texts": TEXTS, "budget": 7},
    "chunked, asynchronous": {"texts": TEXTS, "budget": 7, "asynchronous": True},
    "asynchronous": {"texts": TEXTS, "budget": 128, "asynchronous": True},
    "least chunks": {"texts": TEXTS, "budget": 2},
    "seeded": {"texts": TEXTS, "budget": 128, "sampling": _SEEDED},
    "seeded, chunked": {"texts": TEXTS, "budget": 7, "sampling": _SEEDED},
    # Two ranks add up in another order. In float32 that decides no argmax here, in bfloat16 it does.
    "one process": {"texts": TEXTS, "budget": 7, "dtype": "float32"},
    "enough blocks": {**_BLOCKS},
    # One is the null block; the third that is left is for whichever request needs a second one first.
    "few blocks": {**_BLOCKS, "num_gpu_blocks_override": 4},
    "few blocks, replay": {**_BLOCKS, "num_gpu_blocks_override": 4, "replay": "exact"},
    "one letter": {
        "texts": {"first": "Hello world", "second": "Hello worle", "third": "Jello world"},
        **{"budget": 128, "sampling": {"max_tokens": 25}},
    },
    "two processes": {
        **{"texts": TEXTS, "budget": 7, "dtype": "float32"},
        **{"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    },
    "off": {"texts": TEXTS, "budget": 7, "mode": "off"},
    "off, traced": {"texts": TEXTS, "budget": 7, "mode": "off"},
}
"""What engines are asked; ``conftest.talker`` runs them."""


def talker_runs(model: Path, cases: list[dict[str, Any]], folder: Path | None = None) -> list[dict[str, Any]]:
    """Run each case: ``texts`` by request, and keywords of ``talker_engine``; ``sampling`` is for every request.

    Cases of another ``mode`` than those before them run in another process. With ``trace``, a folder, a case writes
    traces there; no case of its mode that writes none may come after it. Returns for each: ``tokens``, ``prompt_lens``,
    and ``ranks`` and ``runners``, what each process with a talker saw.
    """
    done = subprocess.run(
        [sys.executable, __file__, str(model), *([] if folder is None else [str(folder)])],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
        env={"VLLM_LOGGING_LEVEL": "ERROR", **os.environ},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"tokens"')]


def main(model: Path, folder: Path | None = None) -> None:
    from omni_npu_phase.speech import tiny_qwen3_tts
    from omni_npu_phase.speech.talker_engine import prepare

    prepare()
    import vllm_omni  # noqa: F401

    if folder is not None:
        tiny_qwen3_tts.make(folder / "again")
        tiny_qwen3_tts.make(folder / "other", seed=1)
    # At an engine's end vLLM looks through all objects for garbage: a second each time, with what was imported.
    gc.freeze()
    gc.unfreeze = lambda: None
    for mode, cases in groupby(json.loads(sys.stdin.read()), lambda case: case.pop("mode", "")):
        # A fork has imported vLLM-Omni, but no plugin yet and no runner.
        if os.fork() == 0:
            os.environ[MODE_VARIABLE] = mode
            run(model, cases)
            sys.exit()
        if os.wait()[1]:
            sys.exit("a case failed")


def run(model: Path, cases: Iterable[dict[str, Any]]) -> None:
    from omni_npu_phase import plugin
    from omni_npu_phase.speech import observe
    from omni_npu_phase.speech.talker_engine import talker_engine

    for case in cases:
        texts, sampling, trace = case.pop("texts"), case.pop("sampling", {}), case.pop("trace", None)
        os.environ[REPLAY_VARIABLE] = case.pop("replay", "off")
        with tempfile.TemporaryDirectory() as folder:
            os.environ[OBSERVE_VARIABLE] = folder
            if trace:
                os.environ[TRACE_VARIABLE] = trace
                plugin.install()
            with talker_engine(model, **case) as engine:
                for request_id, text in texts.items():
                    engine.submit(request_id, text, **sampling)
                tokens = engine.run()
            ranks = [[asdict(row) for row in rank] for rank in observe.read(Path(folder))]
            runners = [asdict(runner) for runner in observe.read_runners(Path(folder))]
        result = {"tokens": tokens, "prompt_lens": engine.prompt_lens, "ranks": ranks, "runners": runners}
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
