# SPDX-License-Identifier: Apache-2.0
"""The one exception the emulated device raises for what it cannot or will not do."""

from __future__ import annotations


class EmulationError(RuntimeError):
    """What was found and what to do about it; `code` is stable, the text is not."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"[{code}] {message}")
        self.code = code
