# SPDX-License-Identifier: Apache-2.0
"""Which packages belong together: what each known vLLM-Omni release was run with here, by major and minor version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pair:
    vllm: str
    vllm_ascend: str | None = None
    """None where no matching release is on the package index."""


PAIRS: Mapping[str, Pair] = {
    "0.20": Pair("0.20"),
    "0.22": Pair("0.22"),
    "0.24": Pair("0.24", "0.23"),
    "0.26": Pair("0.26"),
    "0.28": Pair("0.28"),
    "0.30": Pair("0.30"),
}
