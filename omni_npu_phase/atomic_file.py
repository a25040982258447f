# SPDX-License-Identifier: Apache-2.0
"""Files that have their name only when they are whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def write(path: Path, write_to: Callable[[Path], object]) -> None:
    """Let ``write_to`` write a file beside ``path``, which then takes its place; whatever goes wrong leaves none.

    Raises OSError, and whatever ``write_to`` raises.
    """
    part = path.with_name(f".part-{path.name}")
    try:
        write_to(part)
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
