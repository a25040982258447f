# SPDX-License-Identifier: Apache-2.0
"""What the tiny checkpoint must satisfy, so that it cannot become one that hides faults."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from omni_npu_phase.speech import tiny_qwen3_tts

pytestmark = pytest.mark.xdist_group("talker")


def _bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("talker")
def test_one_seed_makes_the_same_bytes(checkpoints: Path) -> None:
    made = _bytes(tiny_qwen3_tts.cached())
    assert made == _bytes(checkpoints / "again")
    assert made["model.safetensors"] != _bytes(checkpoints / "other")["model.safetensors"]
    assert sum(map(len, made.values())) < 5e6


def test_it_has_the_ids_that_the_pipeline_takes_for_granted() -> None:
    talker = json.loads((tiny_qwen3_tts.cached() / "config.json").read_text(encoding="utf-8"))["talker_config"]
    assert talker["codec_eos_token_id"] == 2150
    assert talker["vocab_size"] > max(*talker["spk_id"].values(), *talker["codec_language_id"].values())


@pytest.mark.parametrize(
    ("maker", "seconds", "reason"),
    [
        ("exit 3", 600, "its maker said nothing, exit status 3"),
        ("kill -9 $$", 600, "its maker was ended by SIGKILL"),
        ("echo 'OSError: no space' >&2; exit 1", 600, "OSError: no space"),
        ("exec sleep infinity", 1, "the tiny checkpoint was not made in 1 s, the timeout"),
    ],
)
def test_a_maker_that_fails_says_why(
    maker: str, seconds: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{maker}\n", encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setenv("OMNI_NPU_PHASE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RuntimeError, match=f"{re.escape(reason)}$"):
        tiny_qwen3_tts.cached(seconds)
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("cache", ["/dev/null", "/proc"])
def test_a_cache_that_cannot_be_written_is_named(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_NPU_PHASE_CACHE", cache)
    with pytest.raises(RuntimeError, match=f"the cache folder {cache} cannot be written: "):
        tiny_qwen3_tts.cached()


@pytest.fixture
def codes(talker: dict[str, dict[str, Any]]) -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = {}
    rows: list[dict[str, Any]] = talker["one letter"]["ranks"][0]
    for row in rows:
        if row["codes"] is not None:
            found.setdefault(row["request"], []).append(row["codes"])
    return found


def test_one_letter_changes_the_codes(codes: dict[str, list[list[int]]]) -> None:
    assert codes["first"] != codes["second"]
    # The first letter is in the prompt; what follows is taken up frame by frame.
    assert codes["first"][0] != codes["third"][0]


def test_every_codebook_says_something(codes: dict[str, list[list[int]]]) -> None:
    for frames in codes.values():
        assert len(frames) == 24
        for codebook in zip(*frames, strict=True):
            assert len(set(codebook)) > 8
