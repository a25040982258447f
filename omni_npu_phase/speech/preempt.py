# SPDX-License-Identifier: Apache-2.0
"""Speak the same texts at once with enough KV blocks and with too few, without exact replay and with it, and compare.

The three engines are vLLM's core with vLLM-Omni's talker, one after the other in a process of their own, for vLLM
chooses its platform once a process: ``python -m omni_npu_phase.speech.preempt FOLDER``. What is compared is what the
next stage is sent: every frame of codes that is marked as valid.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omni_npu_phase import atomic_file
from omni_npu_phase.settings import REPLAY_VARIABLE
from omni_npu_phase.speech import engine, output
from omni_npu_phase.speech.engine import Device, EngineError
from omni_npu_phase.speech.prompts import Prompt
from omni_npu_phase.speech.report import EMULATED, Verdict, markdown_table

SCHEMA = "omni-npu-phase/validate/preempt-1"
TEXTS = ("Hello world", "The rain has ended.", "Good morning to you all.", "Never mind the noise outside.")
BUDGET = 7
BLOCK = 32
"""Tokens of a KV block, where the platform leaves the choice."""
ENOUGH, OFF, ON = "enough", "off", "on"
COLUMNS = ("prompt", "P", "frames", "preempted", "without replay, first other frame", "with replay, first other frame")


@dataclass(frozen=True, slots=True)
class Spec:
    """What the process of the engines is asked.

    ``max_tokens``: of each prompt, at least; every request is made longer than a KV block. ``blocks``: KV blocks of the
    engines with too few; None finds them.
    """

    model: str
    device: Device
    prompts: tuple[Prompt, ...]
    budget: int
    max_tokens: int
    blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Preemption:
    """Where a request stood when it was preempted."""

    computed: int
    """Tokens of it that had been read."""
    frames: int
    """Frames of it that had been sent on."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """One prompt in one engine."""

    prompt_len: int
    frames: list[list[int]]
    preempted: list[Preemption] = field(default_factory=list)

    def where(self) -> str:
        told = [
            f"in its prompt, at {each.computed} of {self.prompt_len}"
            if each.computed < self.prompt_len
            else f"behind frame {each.frames}"
            for each in self.preempted
        ]
        return "; ".join(told) or "never"


@dataclass(frozen=True, slots=True)
class Report:
    """What three engines said: :data:`ENOUGH` KV blocks, too few and replay :data:`OFF`, and :data:`ON`."""

    prompts: Sequence[Prompt]
    spoken: Mapping[str, Sequence[Spoken]]
    blocks: int
    runtime: Mapping[str, Any]

    def first_other(self, name: str) -> list[int | None]:
        """The first frame of each prompt that is another than with enough KV blocks; None where none is."""
        return [
            _first_other(own.frames, known.frames)
            for own, known in zip(self.spoken[name], self.spoken[ENOUGH], strict=True)
        ]

    @property
    def unproven(self) -> list[str]:
        """Why the run proves nothing."""
        if any(own.preempted for own in self.spoken[ENOUGH]):
            return ["the engine with enough KV blocks preempted a request"]
        if not all(own.frames for own in self.spoken[ENOUGH]):
            return ["a prompt made no frames"]
        if not any(own.preempted for own in self.spoken[ON]):
            return [f"no request was preempted with {self.blocks} KV blocks"]
        if not any(frame is not None for frame in self.first_other(OFF)):
            return ["without replay the same was spoken, too: these preemptions show nothing"]
        return []

    @property
    def faults(self) -> list[str]:
        return [
            f"prompt {index}: frame {frame} is another with replay"
            for index, frame in enumerate(self.first_other(ON), 1)
            if frame is not None
        ]

    @property
    def verdict(self) -> Verdict:
        return "proves nothing" if self.unproven else "different" if self.faults else "equal"

    def rows(self) -> list[tuple[str, ...]]:
        """Cells under :data:`COLUMNS`."""
        others = zip(self.first_other(OFF), self.first_other(ON), strict=True)
        return [
            (
                prompt.text,
                str(own.prompt_len),
                str(len(self.spoken[ENOUGH][index].frames)),
                own.where(),
                *("none" if frame is None else str(frame) for frame in next(others)),
            )
            for index, (prompt, own) in enumerate(zip(self.prompts, self.spoken[ON], strict=True))
        ]

    def summary(self) -> str:
        lines = [f"{self.verdict}: {_VERDICTS[self.verdict]}", *(f"- {told}" for told in self.unproven + self.faults)]
        if self.runtime["device"] == "emulated":
            lines[0] += f"; {EMULATED}"
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "reasons": self.unproven + self.faults,
            "kv_blocks": self.blocks,
            "preemptions": sum(len(own.preempted) for own in self.spoken[ON]),
            "prompts": [
                {
                    **asdict(prompt),
                    "prompt_len": self.spoken[ENOUGH][index].prompt_len,
                    "frames": {name: len(spoken[index].frames) for name, spoken in self.spoken.items()},
                    "preempted": {name: list(map(asdict, self.spoken[name][index].preempted)) for name in (OFF, ON)},
                    "first_other_frame": {name: self.first_other(name)[index] for name in (OFF, ON)},
                }
                for index, prompt in enumerate(self.prompts)
            ],
            "runtime": dict(self.runtime),
        }

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n"

    def to_markdown(self) -> str:
        lines = ["# Speech, preempted against not", "", self.summary(), "", *markdown_table(COLUMNS, self.rows())]
        return "\n".join(lines) + "\n"


_VERDICTS: Mapping[Verdict, str] = {
    "equal": "with exact replay preempted requests speak the same codes, frame by frame",
    "different": "preempted requests do not speak the same",
    "proves nothing": "the run could not have shown a fault",
}


def _first_other(frames: Sequence[list[int]], known: Sequence[list[int]]) -> int | None:
    for index, (one, other) in enumerate(zip(frames, known, strict=False)):
        if one != other:
            return index
    return None if len(frames) == len(known) else min(len(frames), len(known))


def compare(spec: Spec, runtime: Mapping[str, Any], timeout: float, advance: Callable[[str], None]) -> Report:
    """Run the three engines and compare what they said. Raises :class:`~omni_npu_phase.speech.engine.EngineError`."""
    with tempfile.TemporaryDirectory(prefix="omni-npu-phase-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        advance("three engines of the talker: enough KV blocks, too few, too few with replay")
        process = engine.begin(__name__, spec, folder, engine.environment(spec.device))
        try:
            process.communicate(timeout=3 * timeout)
        except subprocess.TimeoutExpired:
            raise EngineError(f"the engines took longer than three times the timeout of {timeout:g} s") from None
        finally:
            engine.end_group(process)
        written = (folder / engine.LOG).read_text(encoding="utf-8", errors="replace")
        file = folder / "spoken.json"
        if not file.exists():
            raise EngineError(f"the engines failed: {engine.reason(written)}", written)
        heard = json.loads(file.read_text(encoding="utf-8"))
    spoken = {
        name: [
            Spoken(own["prompt_len"], own["frames"], [Preemption(**each) for each in own["preempted"]]) for own in said
        ]
        for name, said in heard["spoken"].items()
    }
    return Report(spec.prompts, spoken, heard["blocks"], runtime)


def write(report: Report, folder: Path) -> None:
    """Write the report into a folder, as JSON and markdown. Raises OSError."""
    for name, text in ((output.MARKDOWN, report.to_markdown()), (output.JSON, report.to_json())):
        atomic_file.write(folder / name, lambda path, text=text: path.write_text(text, encoding="utf-8"))  # type: ignore[misc]


# What follows runs in the process of the engines.


def main(folder: Path) -> None:
    raw = json.loads((folder / "spec.json").read_text(encoding="utf-8"))
    spec = Spec(**{**raw, "prompts": tuple(Prompt(**prompt) for prompt in raw["prompts"])})
    from omni_npu_phase.speech.talker_engine import prepare

    prepare(spec.device)
    import vllm_omni.patch  # noqa: F401 - the platform, and with it the device

    from omni_npu_phase.speech.talker_engine import talker_config

    settings: dict[str, Any] = {"budget": spec.budget, "max_num_seqs": len(spec.prompts), "block_size": BLOCK}
    # vLLM-Ascend has a size of its own.
    block = talker_config(Path(spec.model), **settings).cache_config.block_size
    lengths = [prompt.length(Path(spec.model)) for prompt in spec.prompts]
    # Who stays within its first block is never preempted while it speaks.
    spec = replace(spec, max_tokens=max(spec.max_tokens, block + 8 - min(lengths)))
    alone = -(-(max(lengths) + spec.max_tokens) // block)
    settings["max_model_len"] = alone * block
    # One is vLLM's own; of what is left the longest request takes all but one.
    blocks = spec.blocks or alone + 2
    few = {**settings, "num_gpu_blocks_override": blocks}
    spoken = {name: _speak(spec, name == ON, few if name != ENOUGH else settings) for name in (ENOUGH, OFF, ON)}
    text = json.dumps({"blocks": blocks, "spoken": spoken}, default=asdict)
    atomic_file.write(folder / "spoken.json", lambda path: path.write_text(text, encoding="utf-8"))


def _speak(spec: Spec, replay: bool, settings: dict[str, Any]) -> list[Spoken]:
    from omni_npu_phase.speech.talker_engine import talker_engine

    os.environ[REPLAY_VARIABLE] = "exact" if replay else "off"
    with talker_engine(Path(spec.model), **settings) as made:
        scheduler = made.core.scheduler
        preempt = scheduler._preempt_request
        spoken: dict[str, Spoken] = {}

        def noted(request: Any, *args: Any, **keywords: Any) -> Any:
            own = spoken[request.request_id]
            own.preempted.append(Preemption(request.num_computed_tokens, len(own.frames)))
            return preempt(request, *args, **keywords)

        scheduler._preempt_request = noted
        for index, prompt in enumerate(spec.prompts):
            length = made.submit_prompt(str(index), prompt, max_tokens=spec.max_tokens)
            spoken[str(index)] = Spoken(length, [])
        while made.working:
            for sent in made.step():
                spoken[sent.request_id].frames.extend(_frames(sent.multimodal_output or {}))
    return list(spoken.values())


def _frames(sent: Mapping[str, Any]) -> list[list[int]]:
    """The frames in what a step sent on of a request: a row of codes a token, of which prompt tokens have none."""
    codes, valid = sent.get("codes.audio"), sent.get("meta.codec_frame_valid")
    if codes is None or valid is None:
        return []
    pairs = zip(codes.tolist(), valid.reshape(-1).tolist(), strict=True)
    return [row for row, is_frame in pairs if is_frame]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
