# SPDX-License-Identifier: Apache-2.0
"""What a chunked and an unchunked run have to show, and the report of it as JSON, markdown or text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from omni_npu_phase import contract
from omni_npu_phase.speech.engine import Speech
from omni_npu_phase.speech.observe import Request, Row, Runner
from omni_npu_phase.speech.prompts import Prompt

SCHEMA = "omni-npu-phase/validate/2"
AUDIO_TOLERANCE = 1e-3
"""Largest difference of two samples, of a full scale of 1: 60 dB below it. The codec adds up in another order when it
gets frames in other groups, which was seen to make 3e-5; a wrong code makes more than 0.1."""
EMULATED = "emulated, not tested on Ascend"
AUDIBLE = 1e-3
"""Least standard deviation of audio that is not silence."""
_PACKAGE = __name__.partition(".")[0]
HISTORY = 3
"""Rows shown before and after a difference."""

Verdict = Literal["equal", "different", "proves nothing"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt in both runs."""

    prompt: Prompt
    budget: int
    chunked: Request
    unchunked: Request
    chunked_speech: Speech
    unchunked_speech: Speech

    @property
    def tail(self) -> Row | None:
        return next(iter(self.chunked.tails), None)

    @property
    def codes_equal(self) -> bool:
        return self.chunked.codes == self.unchunked.codes

    @property
    def frames(self) -> str:
        """How many frames the runs made: one number, or both where they differ."""
        chunked, unchunked = len(self.chunked.codes), len(self.unchunked.codes)
        return str(unchunked) if chunked == unchunked else f"{chunked} chunked, {unchunked} unchunked"

    @property
    def spoken_twice(self) -> tuple[str, int, int] | None:
        """The run whose audio says some frames a second time, and the first and last of them, counted from 1.

        None where the codes differ, and where the audio differs in anything else.
        """
        runs = (("chunked", self.chunked_speech.audio), ("unchunked", self.unchunked_speech.audio))
        (_, once), (name, twice) = sorted(runs, key=lambda run: run[1].size)
        more = twice.size - once.size
        samples, rest = divmod(once.size, len(self.unchunked.codes) or 1)
        if not self.codes_equal or not more or not samples or rest or more % samples:
            return None
        begin, end = _agreeing(once, twice[: once.size]), once.size - _agreeing(once[::-1], twice[more:][::-1])
        # The second time may begin wherever both what is before it and what is after it are the other run's audio.
        first = -(-end // samples)
        return (name, first + 1, first + more // samples) if first * samples + more <= begin else None

    @property
    def audio_difference(self) -> float | None:
        """Largest difference of two samples, each frame heard once; None where one run's audio is longer even so."""
        audio = {"chunked": self.chunked_speech.audio, "unchunked": self.unchunked_speech.audio}
        if self.spoken_twice is not None:
            name, first, last = self.spoken_twice
            samples = min(heard.size for heard in audio.values()) // len(self.unchunked.codes)
            audio[name] = np.delete(audio[name], slice((first - 1) * samples, last * samples))
        chunked, unchunked = audio.values()
        if chunked.shape != unchunked.shape:
            return None
        return float(np.abs(chunked - unchunked).max(initial=0))

    @property
    def runs(self) -> tuple[tuple[str, Request], tuple[str, Request]]:
        return ("chunked", self.chunked), ("unchunked", self.unchunked)

    def unproven(self) -> Iterator[str]:
        """Why this prompt could not have shown a fault, one sentence each."""
        if self.tail is None:
            yield "no one-token prefill tail was observed"
        spans = [row.span for row in self.unchunked.rows if row.lengths.prefill]
        if spans != [self.unchunked.prompt_len]:
            told = " + ".join(map(str, spans)) or "no"
            yield f"the unchunked run read {told} tokens, not the prompt's {self.unchunked.prompt_len} in one span"
        for name, request in self.runs:
            for caller in sorted({row.called_by for row in request.rows} - {_PACKAGE}):
                yield f"{name}: the talker's hooks were called by {caller}, not by the mixin"

    @property
    def audio_equal(self) -> bool:
        difference = self.audio_difference
        return difference is not None and difference <= AUDIO_TOLERANCE

    def faults(self) -> Iterator[str]:
        """What does not hold, one sentence each."""
        if not self.unchunked.codes:
            yield "the unchunked run made no frames"
        for name, request in self.runs:
            prompt_rows = [row for row in request.rows if row.lengths.prefill]
            for row in [row for row in prompt_rows if not row.unchanged][:1]:
                clause = "T2" if row.lengths.tail else "R9"
                kept = f"did not reach the forward pass unchanged ({clause})"
                yield f"{name}, step {row.step}: the embedding of {_kind(row)} {kept}"
            for row in [row for row in prompt_rows if row.seen_by_mtp][:1]:
                yield f"{name}, step {row.step}: MTP was given {_kind(row)} (T2)"
        for name, request in self.runs:
            for row in request.rows:
                if row.told != row.lengths.fields:
                    told, expected = _short(row.told), _short(row.lengths.fields)
                    yield f"{name}, step {row.step}: the hook was told {told}, the row is {expected} (M3 to M5)"
                    break
        if not self.codes_equal:
            yield "the codes differ"
        for name, speech in (("chunked", self.chunked_speech), ("unchunked", self.unchunked_speech)):
            yield from (f"{name} audio is {fault}" for fault in _audio_faults(speech))
        difference = self.audio_difference
        if difference is None:
            sizes = f"{self.chunked_speech.audio.size} and {self.unchunked_speech.audio.size}"
            yield f"the audio has {sizes} samples"
        elif not self.audio_equal:
            yield f"the audio differs by {difference:.2g}, more than {AUDIO_TOLERANCE}"


def _kind(row: Row) -> str:
    """A row of a prompt, as a sentence names it."""
    return "the one-token tail" if row.lengths.tail else f"the prompt row C={row.computed} S={row.span}"


def _audio_faults(speech: Speech) -> Iterator[str]:
    if speech.audio.size == 0:
        yield "empty"
    elif not np.isfinite(speech.audio).all():
        yield "not finite"
    elif float(speech.audio.std()) < AUDIBLE:
        yield "constant or silent"


def _agreeing(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> int:
    """How many samples agree from the first on."""
    apart = ~(np.abs(one - other) <= AUDIO_TOLERANCE)
    return int(apart.argmax()) if apart.any() else one.size


def _short(fields: Mapping[str, Any]) -> str:
    length, computed, prefill = (fields.get(name) for name in contract.FIELDS)
    return f"P={length} C={computed} prefill={prefill}"


@dataclass(frozen=True, slots=True)
class Company:
    """Each prompt spoken alone and among others, whose rows share its batches."""

    others: int
    pairs: Sequence[tuple[Request, Request]]
    """What was recorded of each prompt alone, and of the same among others."""

    def faults(self) -> Iterator[str]:
        for index, (alone, among) in enumerate(self.pairs, 1):
            frames = zip_longest(alone.codes, among.codes)
            frame = next((number for number, (one, other) in enumerate(frames) if one != other), None)
            if frame is not None:
                others = f"{self.others} other{'s' * (self.others != 1)}"
                yield f"prompt {index}: among {others} the codes differ from frame {frame} on (R3, T5)"

    def unproven(self) -> Iterator[str]:
        decoding = [{row.step for row in among.rows if row.lengths.decode} for _, among in self.pairs]
        shared = [mine for index, mine in enumerate(decoding) if any(mine & other for other in decoding[:index])]
        if len(self.pairs) > 1 and not shared:
            yield "no two prompts were decoded in one step"

    def as_dict(self) -> dict[str, Any]:
        return {"others": self.others, "codes_equal": not any(self.faults())}


@dataclass(frozen=True, slots=True)
class Report:
    """A validation. ``control`` says what proves that codes depend on the prompt, or None where they do not."""

    comparisons: Sequence[Comparison]
    control: str | None
    runners: Mapping[str, Sequence[Runner]]
    """What called the talker, by engine, one for each process that had a talker."""
    runtime: Mapping[str, Any]
    timings: Mapping[str, Any]
    files: Mapping[str, str]
    """Audio and picture by name, relative to the report."""
    company: Company | None = None
    """The prompts among others; None where that was not asked for."""

    @property
    def unproven(self) -> list[str]:
        """Why the run proves nothing."""
        reasons = [
            f"the {name} engine ran {runner.classes[0]} {'in mode off' if runner.mixin else 'without the mixin'}"
            for name, runners in self.runners.items()
            for runner in runners
            if runner.mixin is None or runner.mode == "off"
        ]
        reasons += [f"no runner of the {name} engine was observed" for name in self.runners if not self.runners[name]]
        reasons += [
            f"prompt {index}: {reason}"
            for index, comparison in enumerate(self.comparisons, 1)
            for reason in comparison.unproven()
        ]
        reasons += [] if self.company is None else self.company.unproven()
        if self.control is None:
            reasons.append("the codes do not depend on the prompt, so equal codes would show nothing")
        return reasons

    @property
    def faults(self) -> list[str]:
        own = [
            f"prompt {index}: {fault}"
            for index, comparison in enumerate(self.comparisons, 1)
            for fault in comparison.faults()
        ]
        return own if self.company is None else [*own, *self.company.faults()]

    @property
    def notes(self) -> list[str]:
        """What was heard that is no fault of chunked prefill, nor of this package."""
        repeats = {index: comparison.spoken_twice for index, comparison in enumerate(self.comparisons, 1)}
        return [
            "prompt {}: the {} audio says frames {} to {} twice, of codes made once. Up to 0.26, vLLM-Omni's connector "
            "sends a chunk twice when it falls behind the talker's last steps".format(index, *repeat)
            for index, repeat in repeats.items()
            if repeat is not None
        ]

    @property
    def reasons(self) -> list[str]:
        """All that keeps the verdict from being ``equal``."""
        return [*self.unproven, *self.faults]

    @property
    def verdict(self) -> Verdict:
        if self.unproven:
            return "proves nothing"
        return "different" if self.faults else "equal"

    def first_difference(self) -> dict[str, Any] | None:
        """Where codes first differ: prompt, frame, codebook, both values, and the chunked rows around the frame."""
        for index, comparison in enumerate(self.comparisons, 1):
            if not comparison.codes_equal:
                return {"prompt": index, "text": comparison.prompt.text, **_difference(comparison)}
        return None

    def as_dict(self) -> dict[str, Any]:
        comparisons = self.comparisons
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "reasons": self.reasons,
            "notes": self.notes,
            "codes_equal": self._shown(comparison.codes_equal for comparison in comparisons),
            "tails_observed": bool(comparisons) and all(comparison.tail is not None for comparison in comparisons),
            "frames": sum(len(comparison.unchunked.codes) for comparison in comparisons),
            "first_difference": self.first_difference(),
            "prompts": [_prompt(comparison) for comparison in comparisons],
            "audio": {
                "tolerance": AUDIO_TOLERANCE,
                "equal": self._shown(comparison.audio_equal for comparison in comparisons),
                "largest_differences": [comparison.audio_difference for comparison in comparisons],
                "samples": [comparison.unchunked_speech.audio.size for comparison in comparisons],
                "sample_rates": [comparison.unchunked_speech.sample_rate for comparison in comparisons],
            },
            "control": self.control,
            "company": None if self.company is None else self.company.as_dict(),
            "files": dict(self.files),
            "runtime": {
                **self.runtime,
                "runners": {name: [asdict(runner) for runner in runners] for name, runners in self.runners.items()},
            },
            "timings": dict(self.timings),
        }

    def _shown(self, equal: Iterable[bool]) -> bool | None:
        """Whether all are equal; None where that would show nothing."""
        if not all(equal):
            return False
        return None if self.unproven else True

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n"

    def summary(self) -> str:
        """The verdict in a few lines."""
        reasons = self.reasons
        lines = [f"{self.verdict}: {_VERDICTS[self.verdict]}", *(f"- {reason}" for reason in reasons[:8])]
        if self.runtime.get("device") == "emulated":
            lines[0] += f"; {EMULATED}"
        if len(reasons) > 8:
            lines.append(f"- and {len(reasons) - 8} more")
        lines += [f"- {note}" for note in self.notes]
        return "\n".join(lines)

    def to_markdown(self) -> str:
        lines = ["# Speech, chunked against unchunked", "", self.summary(), ""]
        lines += markdown_table(COLUMNS, map(comparison_row, self.comparisons))
        difference = self.first_difference()
        if difference is not None:
            lines += ["", "## First difference", "", difference_text(difference), "", "```", *difference["rows"], "```"]
        if "picture" in self.files:
            lines += ["", f"![rows over steps, and waveforms]({self.files['picture']})"]
        lines += ["", "## Engines", "", *markdown_table(_ENGINE_COLUMNS, self._engine_rows())]
        lines += [
            "",
            "## Runtime",
            "",
            *markdown_table(
                (
                    "",
                    "",
                ),
                [(name, str(value)) for name, value in _flat(self.runtime)],
            ),
        ]
        return "\n".join(lines) + "\n"

    def _engine_rows(self) -> Iterator[tuple[str, ...]]:
        for name, runners in self.runners.items():
            timings = self.timings["engines"][name]
            for runner in runners:
                yield (
                    name,
                    runner.classes[0],
                    runner.mixin or "none",
                    runner.mode,
                    "on" if runner.batch_invariant else "off",
                    str(timings["start_seconds"]),
                    ", ".join(map(str, timings["first_audio_seconds"])),
                    ", ".join(map(str, timings["speech_seconds"])),
                )


_VERDICTS: Mapping[Verdict, str] = {
    "equal": "chunked prefill speaks the same codes, frame by frame, and the same audio",
    "different": "chunked prefill does not speak the same",
    "proves nothing": "the run could not have shown a fault",
}


_ENGINE_COLUMNS = (
    *("engine", "runner", "mixin", "mode", "batch-invariant kernels"),
    *("start, s", "first audio of each prompt, s", "speech, s"),
)
COLUMNS = ("prompt", "P", "budget", "tail (P, C, S)", "frames", "codes", "largest audio difference")


def comparison_row(comparison: Comparison) -> tuple[str, ...]:
    """Cells under :data:`COLUMNS`."""
    tail, difference = comparison.tail, comparison.audio_difference
    return (
        comparison.prompt.text,
        str(comparison.chunked.prompt_len),
        str(comparison.budget),
        f"({tail.prompt_len}, {tail.computed}, {tail.span})" if tail else "none",
        comparison.frames,
        "equal" if comparison.codes_equal else "differ",
        "other length" if difference is None else f"{difference:.1e}",
    )


def difference_text(difference: Mapping[str, Any]) -> str:
    """One sentence for :meth:`Report.first_difference`."""
    place = f"prompt {difference['prompt']}, frame {difference['frame']}"
    if difference["codebook"] is not None:
        place += f", codebook {difference['codebook']}"
    return f"{place}: {difference['chunked']} chunked, {difference['unchunked']} unchunked"


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield name, value


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_markdown_row(row) for row in (headers, ["---"] * len(headers), *rows)]


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _prompt(comparison: Comparison) -> dict[str, Any]:
    tail = comparison.tail
    return {
        **asdict(comparison.prompt),
        "prompt_len": comparison.chunked.prompt_len,
        "budget": comparison.budget,
        "codes_equal": comparison.codes_equal,
        "frames": {"chunked": len(comparison.chunked.codes), "unchunked": len(comparison.unchunked.codes)},
        "tail": None if tail is None else {**asdict(tail), "prefill": tail.lengths.prefill},
    }


def _difference(comparison: Comparison) -> dict[str, Any]:
    chunked, unchunked = comparison.chunked.codes, comparison.unchunked.codes
    pairs = list(zip(chunked, unchunked, strict=False))
    frame = next((index for index, (one, other) in enumerate(pairs) if one != other), len(pairs))
    if frame == len(pairs):
        codebook = None
        values: tuple[Any, Any] = (f"{len(chunked)} frames", f"{len(unchunked)} frames")
    else:
        one, other = pairs[frame]
        codebook = next(index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        values = (one[codebook], other[codebook])
    rows = comparison.chunked.rows
    made = [index for index, row in enumerate(rows) if row.codes is not None]
    # A last frame that is missing has no row of its own.
    at = made[frame] if frame < len(made) else len(rows) - 1
    around = rows[max(0, at - HISTORY) : at + HISTORY + 1]
    return {
        "frame": frame,
        "codebook": codebook,
        "chunked": values[0],
        "unchunked": values[1],
        "rows": [_row_text(row, here=row is rows[at]) for row in around],
    }


def _row_text(row: Row, *, here: bool) -> str:
    kind = "tail" if row.lengths.tail else "prefill" if row.lengths.prefill else "decode"
    text = f"step {row.step}: {row.lengths} {kind}, {row.hook}, told {_short(row.told)}"
    return f"{'>' if here else ' '} {text}, codes {row.codes}"
