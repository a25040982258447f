# SPDX-License-Identifier: Apache-2.0
"""The folder of a validation's reports, audio and picture: emptied of an earlier run's, then filled at the end.

A file gets its name when it is whole, and the reports come last: whoever finds one finds all that it names.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import wave
from dataclasses import replace
from pathlib import Path

import numpy as np

from omni_npu_phase import atomic_file
from omni_npu_phase.speech.engine import Speech
from omni_npu_phase.speech.report import SCHEMA, Report

JSON, MARKDOWN, PICTURE = "report.json", "report.md", "speech.png"
FREE_BYTES = 64 << 20


def prepare(folder: Path) -> None:
    """Make the folder, and remove what an earlier validation wrote there: a run that fails must not leave its verdict.

    Raises OSError, and ValueError where there is no space or where ``report.json`` is somebody else's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    free = shutil.disk_usage(folder).free
    if free < FREE_BYTES:
        raise ValueError(f"no space, {free >> 20} MiB free of {FREE_BYTES >> 20} MiB needed")
    report = folder / JSON
    if report.exists():
        if not _is_ours(report):
            raise ValueError(f"the {JSON} there is not of this command; it would be overwritten")
        report.unlink()
        for old in (folder / MARKDOWN, folder / PICTURE, *folder.glob("prompt-*chunked.wav")):
            old.unlink(missing_ok=True)


def _is_ours(report: Path) -> bool:
    text = report.read_text(encoding="utf-8", errors="replace")
    if not text:
        return True
    try:
        schema = json.loads(text)["schema"]
    except (ValueError, LookupError, TypeError):
        return False
    return isinstance(schema, str) and schema.rpartition("/")[0] == SCHEMA.rpartition("/")[0]


def write(report: Report, folder: Path) -> Report:
    """Write everything, and return the report with the names of its files. Raises OSError."""
    from omni_npu_phase.speech import picture

    files = {}
    for index, comparison in enumerate(report.comparisons, 1):
        for kind, speech in (("chunked", comparison.chunked_speech), ("unchunked", comparison.unchunked_speech)):
            name = files[f"prompt {index}, {kind}"] = f"prompt-{index}-{kind}.wav"
            atomic_file.write(folder / name, lambda path, speech=speech: _write_wav(path, speech))  # type: ignore[misc]
    files["picture"] = PICTURE
    atomic_file.write(folder / PICTURE, lambda path: picture.draw(report, path))
    report = replace(report, files=files)
    atomic_file.write(folder / MARKDOWN, lambda path: path.write_text(report.to_markdown(), encoding="utf-8"))
    atomic_file.write(folder / JSON, lambda path: path.write_text(report.to_json(), encoding="utf-8"))
    return report


def _write_wav(path: Path, speech: Speech) -> None:
    samples = np.nan_to_num(np.clip(speech.audio, -1, 1)) * 32767
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(speech.sample_rate or 24000)
        file.writeframes(samples.astype("<i2").tobytes())
