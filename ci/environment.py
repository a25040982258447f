# SPDX-License-Identifier: Apache-2.0
"""The environment that everything in ``ci/`` runs in: made once, then reused.

Run as a script it only prepares the environment; other scripts call ``ensure()``.
It needs nothing but the standard library, because it runs before anything is
installed, under whatever Python 3.10 or newer the machine calls ``python3``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "ci" / "pins"
# A venv under the same name that lacks this file was made by somebody else.
STAMP = "omni-npu-phase.json"
OVERLAY_STAMP = "omni-npu-phase.sha256"
LOG = "setup.log"

PYTHON_VERSION = "3.11"
GIB = 1024**3
FREE_SPACE = 5 * GIB
HEARTBEAT_SECONDS = 8.0
ADVICE = "so it is left alone: move it away, or set OMNI_NPU_PHASE_VENV to another folder."

HELP = f"""usage: ci/environment.py

Makes the Python {PYTHON_VERSION} environment that ci/test and ci/verify run in, or
brings it up to date.  Both call this themselves, so there is seldom a reason to.

The first run takes two to seven minutes and about 4 GB; a later one is instant.
Where it goes and what goes in:

  ci/pins/torch.txt    PyTorch, installed with its dependencies.  A CPU build is
                       enough; with PIP_EXTRA_INDEX_URL set to PyTorch's CPU index
                       the environment is 3 GB smaller.
  ci/pins/stack.txt    vLLM (CPU), vLLM-Omni and what they import, every version
                       fixed.  torchvision, torchaudio and torchcodec are left out:
                       beside a CPU torch they fail on import.
  ci/pins/tools.txt    what tests, checks and builds need.
  ci/pins/overlays/    what is laid over it where a script asks for it, each in a folder of
                       its own: torch_npu for the emulated device (made at once), other
                       vLLM-Omni releases and vLLM-Ascend (made on first use, 0.5 GB each).
  this checkout        editable, so that a change needs no reinstall.

Change a pin file and the next run makes the environment anew; change
pyproject.toml and it reinstalls only this checkout.

environment variables:
  OMNI_NPU_PHASE_VENV  where the environment is; default: .venv in the checkout
  PYTHON               the Python {PYTHON_VERSION} to make it from; default: the running one,
                       then python{PYTHON_VERSION} on PATH
  PIP_*                pip's own settings (index, proxy, cache, ...) apply as usual

exit status: 0 ready, 2 could not be made (the last lines say what to do)
"""


class PreparationError(Exception):
    """The environment cannot be made; the message says what the user can do."""


def ensure() -> Path:
    """Return the environment's Python, making the environment first if need be.

    Exits with status 2 and an explanation when it cannot be made.
    """
    venv = location()
    if is_ready():
        return _python_of(venv)
    try:
        with _lock(venv):
            if not is_ready():
                _prepare(venv)
    except PreparationError as problem:
        _say(f"failed: {problem}")
        sys.exit(2)
    except KeyboardInterrupt:
        _say("interrupted; the next run starts over")
        sys.exit(130)
    return _python_of(venv)


def is_ready() -> bool:
    """Return whether the environment exists and is up to date."""
    venv = location()
    return _pins_match(venv) and _read_stamp(venv).get("checkout") == _checkout_key()


def location() -> Path:
    """Return the environment's folder, which need not exist yet."""
    chosen = os.environ.get("OMNI_NPU_PHASE_VENV")
    return Path(chosen).absolute() if chosen else ROOT / ".venv"


def overlay(name: str) -> Path:
    """Return the folder of packages that goes before the environment's own on PYTHONPATH, making it first if need be.

    ``name`` is that of a file in ci/pins/overlays. Exits with status 2 and an explanation when it cannot be made.
    """
    ensure()
    venv = location()
    if not _overlay_is_ready(venv, name):
        try:
            with _lock(venv):
                _make_overlay(venv, name, f"overlay {name}")
        except PreparationError as problem:
            _say(f"failed: {problem}")
            sys.exit(2)
    return _overlay_folder(venv, name)


def variables(*overlays: str) -> dict[str, str]:
    """Return the variables of a process in which these overlays lie over the environment, the first one uppermost."""
    folders = [*(str(overlay(name)) for name in overlays), str(ROOT), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


def emulated_variables(*overlays: str) -> dict[str, str]:
    """Return the variables of a process that uses the emulated Ascend device, with further overlays over it."""
    settings = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TASK_QUEUE_ENABLE": "0"}
    return {**variables(*overlays, "torch-npu"), **settings}


def _prepare(venv: Path) -> None:
    _refuse_what_others_made(venv)
    if not _pins_match(venv):
        _make(venv)
    _install_checkout(venv)
    _write_stamp(venv, environment=_environment_key(venv), checkout=_checkout_key())
    _say(f"ready: {venv}")


def _make(venv: Path) -> None:
    if sys.platform != "linux":
        raise PreparationError("the pinned packages exist for Linux only; use a Linux machine.")
    python = _find_python()
    if Path(sys.prefix).resolve() == venv.resolve():
        raise PreparationError(f"{venv} is to be made anew and runs this script; start it with another Python.")
    _clear(venv)
    _check_space(venv)
    _say(f"making {venv} in six steps: 4 GB, 2 to 7 minutes, once. Progress every {HEARTBEAT_SECONDS:.0f} s")
    _write_stamp(venv, environment="", checkout="")

    _step(venv, "1/6 new environment", [python, "-m", "venv", str(venv)])
    # This small step also tells an unreachable index from a failing package, early.
    _pip(
        venv,
        "2/6 build tools",
        ["--no-deps", "--retries", "1", "--timeout", "20", *_pinned("setuptools", "wheel")],
    )
    # Constrained, so that the next step has nothing of torch's to replace.
    _pip(venv, "3/6 PyTorch", ["-c", _pin_file("stack"), "-r", _pin_file("torch")])
    _pip(
        venv,
        "4/6 vLLM, vLLM-Omni and tools",
        ["--no-deps", "-r", _pin_file("stack"), "-r", _pin_file("tools")],
    )
    # With torch_npu on the environment's own path and no CANN, importing torch fails.
    _make_overlay(venv, "torch-npu", "5/6 torch_npu for the emulated device")


def _make_overlay(venv: Path, name: str, title: str) -> None:
    if _overlay_is_ready(venv, name):
        return
    folder = _overlay_folder(venv, name)
    for path in (folder, folder.parent):
        _refuse_link(path)
    shutil.rmtree(folder, ignore_errors=True)
    # vLLM-Ascend comes as source, and is built as pure Python: its kernels need a compiler for NPUs.
    settings = {
        "COMPILE_CUSTOM_KERNELS": "0",
        "SOC_VERSION": "ascend910b1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PATH": os.pathsep.join([str(venv / "bin"), os.environ.get("PATH", "")]),
    }
    options = ["--no-deps", "--no-build-isolation", "--target", str(folder)]
    _pip(venv, title, [*options, "-r", str(_overlay_pins(name))], settings)
    (folder / OVERLAY_STAMP).write_text(_overlay_key(name))


def _install_checkout(venv: Path) -> None:
    if not (ROOT / "pyproject.toml").exists():
        raise PreparationError(f"{ROOT} has no pyproject.toml; is the checkout complete?")
    _write_stamp(venv, environment=_environment_key(venv), checkout="")
    _pip(venv, "6/6 this checkout", ["--no-deps", "--no-build-isolation", "-e", str(ROOT)])


# What is there already


def _refuse_what_others_made(venv: Path) -> None:
    _refuse_link(venv)
    is_empty_folder = venv.is_dir() and not any(venv.iterdir())
    if venv.exists() and not is_empty_folder and not (venv / STAMP).exists():
        raise PreparationError(f"{venv} was not made by this script, {ADVICE}")


def _refuse_link(path: Path) -> None:
    # Making an environment empties its folder first, and that of a link is somebody else's.
    if path.is_symlink():
        raise PreparationError(f"{path} is a link, {ADVICE}")


def _overlay_folder(venv: Path, name: str) -> Path:
    return venv / "overlays" / name


def _overlay_pins(name: str) -> Path:
    return PINS / "overlays" / f"{name}.txt"


def _overlay_key(name: str) -> str:
    return _digest([_overlay_pins(name).read_bytes()])


def _overlay_is_ready(venv: Path, name: str) -> bool:
    try:
        return (_overlay_folder(venv, name) / OVERLAY_STAMP).read_text() == _overlay_key(name)
    except OSError:
        return False


def _pins_match(venv: Path) -> bool:
    usable = os.access(_python_of(venv), os.X_OK)
    return usable and _read_stamp(venv).get("environment") == _environment_key(venv)


def _environment_key(venv: Path) -> str:
    # The path counts: a venv copied along with its checkout still points at the original.
    parts = [str(venv).encode(), _python_recorded_by(venv).encode(), platform.machine().encode()]
    parts += [path.read_bytes() for path in sorted(PINS.glob("*.txt"))]
    return _digest(parts)


def _checkout_key() -> str:
    pyproject = ROOT / "pyproject.toml"
    return _digest([str(ROOT).encode(), pyproject.read_bytes() if pyproject.exists() else b""])


def _digest(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _python_recorded_by(venv: Path) -> str:
    # Read, not asked: starting an interpreter would take longer than the whole check may.
    try:
        lines = (venv / "pyvenv.cfg").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("version")), "")


def _python_of(venv: Path) -> Path:
    return venv / "bin" / "python"


def _read_stamp(venv: Path) -> dict[str, str]:
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _write_stamp(venv: Path, **keys: str) -> None:
    venv.mkdir(parents=True, exist_ok=True)
    draft = venv / f"{STAMP}.new"
    draft.write_text(json.dumps(keys) + "\n")
    draft.replace(venv / STAMP)


def _clear(venv: Path) -> None:
    if not venv.is_dir():
        return
    # The stamp goes last: without it an interrupted clearing would leave a folder we disown.
    for entry in sorted(venv.iterdir(), key=lambda entry: entry.name == STAMP):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


# What the machine offers


def _find_python() -> str:
    chosen = os.environ.get("PYTHON")
    candidates = [chosen] if chosen else [sys.executable, f"python{PYTHON_VERSION}"]
    found = [path for path in map(shutil.which, candidates) if path]
    suitable = [path for path in found if _version_of(path) == PYTHON_VERSION]
    if not suitable:
        named = f"PYTHON={chosen} is not that" if chosen else "none was found"
        raise PreparationError(
            f"Python {PYTHON_VERSION} is needed, and {named}.\n"
            f"Install it, or set PYTHON to the path of a Python {PYTHON_VERSION}."
        )
    for path in suitable:
        if _runs(path, "import ensurepip, venv"):
            return path
    raise PreparationError(
        f"{suitable[0]} has no venv and pip modules.\n"
        f"Install them (on Debian and Ubuntu: python{PYTHON_VERSION}-venv), or set PYTHON to the "
        f"path of another Python {PYTHON_VERSION}."
    )


def _version_of(python: str) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return answer.stdout.strip()


def _runs(python: str, code: str) -> bool:
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def _check_space(venv: Path) -> None:
    existing = next(folder for folder in [venv, *venv.parents] if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < FREE_SPACE:
        raise PreparationError(
            f"{existing} has {free / GIB:.1f} GB free, and {FREE_SPACE // GIB} GB are needed.\n"
            "Free some space, or set OMNI_NPU_PHASE_VENV to a folder on another disk."
        )


@contextlib.contextmanager
def _lock(venv: Path) -> Iterator[None]:
    # Beside the environment, not in it: making one anew empties that folder.
    path = venv.with_name(f"{venv.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _wait_for(held.fileno())
        # Steps inherit it: a pip that outlives this process, killed, must keep others out.
        os.set_inheritable(held.fileno(), True)
        yield


def _wait_for(descriptor: int) -> None:
    _say("another run is preparing the environment; waiting for it")
    started = said = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.2)
        if time.monotonic() - said > HEARTBEAT_SECONDS:
            said = time.monotonic()
            _say(f"  still waiting, {said - started:.0f} s")


# Running the steps


def _pin_file(name: str) -> str:
    return str(PINS / f"{name}.txt")


def _pinned(*names: str) -> list[str]:
    lines = [line.strip() for path in PINS.glob("*.txt") for line in path.read_text().splitlines()]
    return [line for line in lines if line.partition("==")[0] in names]


def _pip(venv: Path, title: str, arguments: list[str], settings: dict[str, str] | None = None) -> None:
    options = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    pip = [str(_python_of(venv)), "-m", "pip", "install", *options]
    _step(venv, title, [*pip, *arguments], settings)


def _step(venv: Path, title: str, command: list[str], settings: dict[str, str] | None = None) -> None:
    log = venv / LOG
    started = said = time.monotonic()
    _say(title)
    with log.open("a") as written:
        start_of_step = written.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            env={**_pip_settings(), **(settings or {})},
            close_fds=False,
        )
        try:
            while process.poll() is None:
                time.sleep(0.1)
                if time.monotonic() - said > HEARTBEAT_SECONDS:
                    said = time.monotonic()
                    _say(f"  {said - started:4.0f} s  {_progress(venv, log, start_of_step)}")
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        raise PreparationError(_explain(title, process.returncode, log, start_of_step))
    _say(f"{title}: done in {time.monotonic() - started:.0f} s")


def _pip_settings() -> dict[str, str]:
    # Each of these would send packages elsewhere, or make pip count some that lie elsewhere.
    elsewhere = {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER"}
    kept = {name: value for name, value in os.environ.items() if name not in elsewhere}
    return {**kept, "PYTHONUNBUFFERED": "1", "PIP_USER": "0"}


def _lines_since(log: Path, start: int) -> list[str]:
    with log.open(errors="replace") as written:
        written.seek(start)
        lines = [line.strip() for line in written]
    # One such line per package where an index is a folder: they hide what matters.
    return [line for line in lines if line and not line.startswith("WARNING: Location ")]


def _progress(venv: Path, log: Path, start: int) -> str:
    latest = (_lines_since(log, start) or ["starting"])[-1]
    if latest.startswith("Installing collected packages"):
        # pip's longest phase, in which it writes nothing more.
        return f"installing: {len(list(venv.glob('lib/python*/site-packages/*.dist-info')))} packages in place"
    return latest[:90]


def _explain(title: str, status: int, log: Path, start: int) -> str:
    lines = _lines_since(log, start)
    text = "\n".join(lines).lower()
    if "no space left" in text or "errno 28" in text:
        advice = "The disk is full.  Free some space, or set TMPDIR and OMNI_NPU_PHASE_VENV to another."
    elif any(sign in text for sign in NETWORK_SIGNS):
        advice = (
            "pip could not reach its package index.  Check the network, and pip's index and proxy\n"
            "settings (python3 -m pip config list), then run this again."
        )
    elif "no matching distribution" in text:
        advice = (
            "pip's index has no such package for this machine.  The pins are for Linux on x86_64;\n"
            "check pip's index settings (python3 -m pip config list), then run this again."
        )
    else:
        advice = "Run this again to start over; if it fails the same way, read the log."
    tail = "\n".join(f"    {line}" for line in lines[-12:])
    return f"{title} ended with status {status}\n{tail}\n{advice}\nlog: {log}"


NETWORK_SIGNS = (
    "connection broken",
    "connection refused",
    "connecttimeout",
    "name resolution",
    "name or service not known",
    "network is unreachable",
    "newconnectionerror",
    "proxyerror",
    "read timed out",
    "sslerror",
)


def _say(message: str) -> None:
    for line in message.splitlines():
        sys.stderr.write(f"environment: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asked = sys.argv[1] in ("-h", "--help")
        (sys.stdout if asked else sys.stderr).write(HELP)
        sys.exit(0 if asked else 2)
    sys.stdout.write(f"{ensure()}\n")
