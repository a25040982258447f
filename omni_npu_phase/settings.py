# SPDX-License-Identifier: Apache-2.0
"""What is set from outside: every ``OMNI_NPU_PHASE*`` variable, the mode, and the versions of installed packages."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Literal, cast, get_args

MODE_VARIABLE = "OMNI_NPU_PHASE"
"""``on`` (the default), ``strict`` or ``off``."""
REPLAY_VARIABLE = "OMNI_NPU_PHASE_REPLAY"
"""``exact`` gives a preempted request back what the forward pass was given before; ``off`` is the default."""
REPLAY_MIB_VARIABLE = "OMNI_NPU_PHASE_REPLAY_MIB"
"""Device memory that exact replay may take in a runner, in MiB; 256 unless it is set."""
TRACE_VARIABLE = "OMNI_NPU_PHASE_TRACE"
"""Folder for trace files; unset or empty for none."""
TRACE_HOOKS_VARIABLE = "OMNI_NPU_PHASE_TRACE_HOOKS"
"""``1`` to record every hook call with what it was told, which costs time for each row."""
OBSERVE_VARIABLE = "OMNI_NPU_PHASE_OBSERVE"
"""Folder into which ``validate`` has an engine's talker recorded; set by ``validate`` alone."""
PLATFORM_VARIABLE = "OMNI_NPU_PHASE_PLATFORM"
"""``cpu`` for this package's CPU platform, ``emulated_ascend`` for vLLM-Ascend on this package's emulated device."""
CACHE_VARIABLE = "OMNI_NPU_PHASE_CACHE"
"""Folder for what is made once: the tiny checkpoint, the emulated device's libraries."""

Mode = Literal["off", "on", "strict"]


def chosen_mode(own: str | None = None) -> Mode:
    """``own``, or what the environment variable OMNI_NPU_PHASE says, or ``on``. Raises ValueError for other values."""
    mode = (own or os.environ.get(MODE_VARIABLE) or "on").lower()
    if mode not in get_args(Mode):
        raise ValueError(f"phase_mode and {MODE_VARIABLE} take off, on or strict, not {mode!r}")
    return cast(Mode, mode)


def replays_exactly(own: str | None = None) -> bool:
    """Whether ``own``, or what OMNI_NPU_PHASE_REPLAY says, is ``exact``. Raises ValueError for what is unknown."""
    chosen = (own or os.environ.get(REPLAY_VARIABLE) or "off").lower()
    if chosen not in ("exact", "off"):
        raise ValueError(f"phase_replay and {REPLAY_VARIABLE} take exact or off, not {chosen!r}")
    return chosen == "exact"


def replay_bytes() -> int:
    """How many bytes exact replay may take in a runner. Raises ValueError for what is no number of MiB."""
    chosen = os.environ.get(REPLAY_MIB_VARIABLE) or "256"
    if not chosen.isdecimal():
        raise ValueError(f"{REPLAY_MIB_VARIABLE} takes a number of MiB, not {chosen!r}")
    return int(chosen) << 20


def trace_folder() -> Path | None:
    """Where this process is asked to write traces."""
    name = os.environ.get(TRACE_VARIABLE)
    return Path(name) if name else None


def cache_folder() -> Path:
    """Where what is made once is kept: the folder that was asked for, or one in the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return (
        Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "omni-npu-phase").expanduser()
    )


def version_of(package: str) -> str | None:
    """The version of an installed package, by its distribution's name; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
