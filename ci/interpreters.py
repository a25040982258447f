# SPDX-License-Identifier: Apache-2.0
"""Where this machine has a certain Python."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


def find(version: str) -> Path | None:
    """An interpreter of that version ("3.12") with pip's own installer, None where there is none.

    Looked for on PATH, then where pyenv, uv and GitHub's runners keep theirs.
    """
    check = f"import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != {tuple(map(int, version.split('.')))})"
    for candidate in _candidates(version):
        try:
            done = subprocess.run([candidate, "-c", check], capture_output=True, check=False)
        except OSError:
            continue
        # A shim of pyenv exists for versions that it does not run.
        if done.returncode == 0:
            return candidate
    return None


def _candidates(version: str) -> Iterator[Path]:
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        yield Path(folder, f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from pyenv.glob(f"versions/{version}.*/bin/python")
    yield from Path.home().glob(f".local/share/uv/python/cpython-{version}.*/bin/python")
    if tools := os.environ.get("RUNNER_TOOL_CACHE"):
        yield from Path(tools).glob(f"Python/{version}.*/*/bin/python")
