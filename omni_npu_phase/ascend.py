# SPDX-License-Identifier: Apache-2.0
"""What an Ascend machine says of itself: CANN, driver, firmware, and the devices that this process sees."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path("/usr/local/Ascend")
HOMES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
"""What CANN's ``set_env.sh`` sets."""
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


def cann() -> str | None:
    """CANN's version and folder, or that it is there and not set up."""
    home = _home()
    if home is None:
        return not_set_up() if any(ROOT.glob("*/set_env.sh")) else None
    versions = (_version(file) for file in sorted(Path(home).glob("*/ascend_toolkit_install.info")))
    return f"CANN {next(filter(None, versions), 'of unknown version')} in {home}"


def not_set_up() -> str | None:
    """What to source where CANN is not set up in this process."""
    if _home() is not None:
        return None
    toolkit = [str(ROOT / name / "set_env.sh") for name in ("ascend-toolkit", "cann") if (ROOT / name).exists()]
    kernels = [str(file) for file in (ROOT / "nnal/atb/set_env.sh",) if file.exists()]
    return f"CANN is not set up here: source {' and '.join(toolkit[:1] + kernels) or 'its set_env.sh'}"


def driver() -> str | None:
    """The driver's version; a container has its file where it was mounted."""
    version = _version(ROOT / "driver" / "version.info")
    return version and f"Ascend driver {version}"


def firmware() -> str | None:
    """The firmware's version, from its file, or else from npu-smi, for a container seldom has the file."""
    return _version(ROOT / "firmware" / "version.info") or _of_board("Firmware Version")


def devices() -> str:
    """Name and number of the devices that this process sees. Needs a torch_npu that has found one."""
    npu = sys.modules["torch_npu"].npu
    which = f"{VISIBLE}={os.environ[VISIBLE]}" if VISIBLE in os.environ else f"{VISIBLE} is not set"
    return f"{npu.device_count()} x {npu.get_device_name(0)} ({which})"


def _home() -> str | None:
    return next(filter(None, map(os.environ.get, HOMES)), None)


def _version(file: Path) -> str | None:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^version=(\S+)", text, re.MULTILINE | re.IGNORECASE)
    return found.group(1) if found else "of unknown version"


def _of_board(field: str) -> str | None:
    """What npu-smi says of the card with the first visible chip."""
    # Columns: card, chip on it, the number that ASCEND_RT_VISIBLE_DEVICES counts by ('-' for what is no chip), name.
    chips = re.findall(r"^\s*(\d+)\s+\d+\s+(\d+)\s+\S", _npu_smi("info", "-m"), re.MULTILINE)
    first = os.environ.get(VISIBLE, "").partition(",")[0].strip()
    card = next((card for card, number in chips if number == first), chips[0][0] if chips else None)
    board = _npu_smi("info", "-t", "board", "-i", card) if card else ""
    found = re.search(rf"^\s*{field}\s*:\s*(\S+)", board, re.MULTILINE)
    return found.group(1) if found else None


def _npu_smi(*arguments: str) -> str:
    try:
        return subprocess.run(["npu-smi", *arguments], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
