# SPDX-License-Identifier: Apache-2.0
"""Engines of the talker alone, one after the other in a process of their own: the platform is chosen once a process.

``python talker_runs.py MODEL`` reads cases from standard input and writes what the model saw to standard output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omni_npu_phase.settings import OBSERVE_VARIABLE


def talker_runs(model: Path, cases: list[dict[str, Any]], **environment: str) -> list[dict[str, Any]]:
    """Run each case: ``texts`` by request, and keywords of ``talker_engine``; ``sampling`` is for every request.

    Returns for each: ``tokens``, ``prompt_lens``, and ``ranks`` and ``runners``, what each process with a talker saw.
    """
    done = subprocess.run(
        [sys.executable, __file__, str(model)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
        env={"VLLM_LOGGING_LEVEL": "ERROR", **os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"tokens"')]


def main(model: Path) -> None:
    from omni_npu_phase.speech import observe
    from omni_npu_phase.speech.talker_engine import prepare, talker_engine

    prepare()
    for case in json.loads(sys.stdin.read()):
        texts, sampling = case.pop("texts"), case.pop("sampling", {})
        with tempfile.TemporaryDirectory() as folder:
            os.environ[OBSERVE_VARIABLE] = folder
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
    main(Path(sys.argv[1]))
