# SPDX-License-Identifier: Apache-2.0
"""Parity: what a runner did with every row, held against golden traces made by the mixin on CPU.

A trace says, per row, what the hook was told, which hook it was, where the row lies, whether it went to MTP, and its
codes and embeddings, exactly; and of the whole run, how it ended and which clauses it warned of. How rows were grouped
into calls is no part of it. One file more lists the clauses that each run shows. The golden files are made by
``python -m omni_npu_phase.conformance.parity --write`` and kept in the repository.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_npu_phase import contract
from omni_npu_phase.conformance.scenarios import SCENARIOS, Row, Scenario

if TYPE_CHECKING:
    from omni_npu_phase.conformance.drive import Recording, StepRecord

Trace = dict[str, Any]
# Longer spans are kept as their first and last row and a digest, so that a golden file stays readable.
_LONGEST_SPAN = 8
_SHOWN = "shown.json"
_ADVICE = "make it with: python -m omni_npu_phase.conformance.parity --write"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step at which a run and its golden trace differ."""

    scenario: str
    variant: str
    where: str
    golden: str
    here: str

    def __str__(self) -> str:
        return f"{self.scenario} ({self.variant}), {self.where}:\n  golden: {self.golden}\n  here:   {self.here}"


def trace(run: Recording) -> Trace:
    """The normalised routing of a run, made of what JSON can hold."""
    return {
        "ended": "as planned"
        if run.error is None
        else f"error {getattr(run.error, 'clause', type(run.error).__name__)}",
        "warned": [_clauses_in(text) for text in run.warnings],
        "steps": [list(_rows(run, step)) for step in run.steps],
    }


def _clauses_in(warning: str) -> str:
    return " ".join(clause for clause in contract.CLAUSES if f"[{clause}]" in warning) or "no clause"


def _rows(run: Recording, step: StepRecord) -> Iterator[dict[str, Any]]:
    from omni_npu_phase.conformance.judge import tokens_in_mtp
    from omni_npu_phase.conformance.recording_model import place

    in_mtp = [place(token_id) for call in step.log.mtp for token_id in tokens_in_mtp(run, step, call)]
    for row, start in zip(step.rows, step.offsets, strict=True):
        own = place(run.token(row))
        calls = [call for call in step.log.hooks if call.place == own]
        yield {
            "row": _title(row),
            "hook": " ".join(call.hook for call in calls) or None,
            "told": [[_plain(call.info.get(name)) for name in contract.FIELDS] for call in calls],
            "at": start,
            "mtp": in_mtp.index(own) if own in in_mtp else None,
            "codes": _codes(run, step.codes.get(row.request)),
            "embeds": _embeds((step.embeds or [])[start : start + row.span]),
        }


def _title(row: Row) -> str:
    return f"{row.request} {row}"


def _plain(value: Any) -> Any:
    return value if type(value) in (int, bool) else repr(value)


def _codes(run: Recording, codes: list[int] | None) -> list[Any] | None:
    if not codes or not run.scenario.setting.seeds:
        return codes
    # A seeded draw depends on the device's generator; that it was drawn does not.
    return [*codes[:-1], "drawn" if codes[-1] else "not drawn"]


def _embeds(rows: Sequence[Sequence[float]]) -> list[Any]:
    exact = [[_number(value) for value in row] for row in rows]
    if len(exact) <= _LONGEST_SPAN:
        return exact
    digest = hashlib.sha256(json.dumps(exact).encode()).hexdigest()[:16]
    return [exact[0], exact[-1], f"{len(exact)} rows {digest}"]


def _number(value: float) -> int | float | str:
    """A number as a golden file holds it: whole numbers without a point, and what JSON cannot hold as text."""
    if not math.isfinite(value):
        return repr(value)
    return int(value) if value.is_integer() else value


def golden(scenario: Scenario) -> Mapping[str, Trace]:
    """The golden traces of a scenario by variant. Raises ValueError where there is no such file, or not of them."""
    name = f"{scenario.id}.json"
    try:
        traces = json.loads((resources.files(__package__) / "golden" / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no golden/{name}; {_ADVICE}") from None
    except ValueError as error:
        raise ValueError(f"golden/{name} is no JSON ({error}); {_ADVICE}") from None
    if not isinstance(traces, dict) or not all(map(_is_trace, traces.values())):
        raise ValueError(f"golden/{name} holds no traces; {_ADVICE}")
    return traces


def _is_trace(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"ended", "warned", "steps"}:
        return False
    return isinstance(value["steps"], list) and all(isinstance(rows, list) for rows in value["steps"])


def compare(run: Recording) -> Difference | None:
    """The first difference between a run and its golden trace, None where they are the same."""
    variant = str(run.variant)
    found = trace(run)
    try:
        wanted = golden(run.scenario)[variant]
    except ValueError as error:
        return Difference(run.scenario.id, variant, "the whole run", str(error), found["ended"])
    except KeyError:
        return Difference(run.scenario.id, variant, "the whole run", f"no such variant; {_ADVICE}", found["ended"])
    for where, one, other in _parts(wanted, found):
        if one != other:
            return Difference(run.scenario.id, variant, where, one, other)
    return None


def _parts(wanted: Trace, found: Trace) -> Iterator[tuple[str, str, str]]:
    for number in range(max(len(wanted["steps"]), len(found["steps"]))):
        one, other = (steps["steps"][number] if number < len(steps["steps"]) else [] for steps in (wanted, found))
        for index in range(max(len(one), len(other))):
            texts = [json.dumps(rows[index]) if index < len(rows) else "no such row" for rows in (one, other)]
            yield f"step {number + 1}, row {index}", texts[0], texts[1]
    yield "the end", wanted["ended"], found["ended"]
    yield "the warnings", json.dumps(wanted["warned"]), json.dumps(found["warned"])


def render(traces: Mapping[str, Trace]) -> str:
    """A golden file: one line per row, so that a change shows as the rows it changes."""
    lines = ["{"]
    for number, (variant, own) in enumerate(traces.items()):
        lines.append(f"  {json.dumps(variant)}: {{")
        lines.append(f'    "ended": {json.dumps(own["ended"])},')
        lines.append(f'    "warned": {json.dumps(own["warned"])},')
        lines.append('    "steps": [')
        for index, step in enumerate(own["steps"]):
            lines.append("      [")
            lines += [
                f"        {json.dumps(row)}{',' if place + 1 < len(step) else ''}" for place, row in enumerate(step)
            ]
            lines.append("      ]" + ("," if index + 1 < len(own["steps"]) else ""))
        lines.append("    ]")
        lines.append("  }" + ("," if number + 1 < len(traces) else ""))
    return "\n".join([*lines, "}"]) + "\n"


def golden_files() -> Iterator[tuple[str, str]]:
    """Name and text of every golden file, from a fresh run of the mixin on CPU."""
    import torch

    from omni_npu_phase.conformance import verify
    from omni_npu_phase.conformance.drive import run_scenario

    runner = verify.classes_for("mixin", verify.load_runner("gpu-v1"))
    shown: dict[str, dict[str, str]] = {}
    for scenario in SCENARIOS:
        cls = runner.of(scenario)
        assert cls is not None
        runs = [run_scenario(cls, scenario, each, torch.device("cpu")) for each in verify.variants(scenario, "mixin")]
        yield f"{scenario.id}.json", render({str(run.variant): trace(run) for run in runs})
        shown[scenario.id] = {str(run.variant): _clauses_shown(run) for run in runs}
    yield _SHOWN, json.dumps(shown, indent=1) + "\n"


def _clauses_shown(run: Recording) -> str:
    from omni_npu_phase.conformance.judge import judge

    found = {judgement.clause for judgement in judge(run)}
    return " ".join(clause for clause in contract.CLAUSES if clause in found)


def clauses_shown(scenario: Scenario) -> Mapping[str, Sequence[str]]:
    """The clauses that each variant of a scenario says something about, as its golden run does."""
    return {variant: clauses.split() for variant, clauses in _shown()[scenario.id].items()}


@functools.cache
def _shown() -> Mapping[str, Mapping[str, str]]:
    shown: Mapping[str, Mapping[str, str]] = json.loads(
        (resources.files(__package__) / "golden" / _SHOWN).read_text(encoding="utf-8")
    )
    return shown


def main() -> int:
    """Write the golden files, or check that they are what the code makes."""
    parser = argparse.ArgumentParser(prog="python -m omni_npu_phase.conformance.parity", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="make all golden files anew")
    what.add_argument("--check", action="store_true", help="exit 1 if a golden file is not what the code makes")
    arguments = parser.parse_args()
    folder = Path(str(resources.files(__package__) / "golden"))
    made = dict(golden_files())
    known = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")} if folder.is_dir() else {}
    stale = sorted(name for name in {*made, *known} if made.get(name) != known.get(name))
    if arguments.write:
        folder.mkdir(exist_ok=True)
        for name in stale:
            if name in made:
                (folder / name).write_text(made[name], encoding="utf-8")
            else:
                (folder / name).unlink()
        sys.stderr.write(f"{len(made)} golden files, {len(stale)} changed\n")
        return 0
    for name in stale:
        sys.stderr.writelines(_diff(name, known.get(name, ""), made.get(name, "")))
    sys.stderr.write(f"stale: {', '.join(stale)}\n" if stale else f"{len(made)} golden files are up to date\n")
    return int(bool(stale))


def _diff(name: str, golden_text: str, made_text: str) -> Iterator[str]:
    texts = golden_text.splitlines(), made_text.splitlines()
    for line in difflib.unified_diff(*texts, f"golden/{name}", f"{name} as made now", n=2, lineterm=""):
        yield line + "\n"


if __name__ == "__main__":
    sys.exit(main())
