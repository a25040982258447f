# SPDX-License-Identifier: Apache-2.0
"""The stand-in for CANN as shared libraries: compiled once per machine and cached."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from omni_npu_phase.emulated_ascend.errors import EmulationError
from omni_npu_phase.settings import CACHE_VARIABLE, cache_folder

_FOLDER = Path(__file__).parent
_SOURCES = (_FOLDER / "acl.c", _FOLDER / "answers.c")
_FLAGS = ("-std=gnu11", "-shared", "-fPIC", "-O2")
_MAIN = "libascendcl.so"
# torch_npu links against these too, and looks functions up in them by name; all they do is lead to the first.
_ALIASES = ("libhccl.so", "libacl_op_compiler.so", "libge_runner.so", "libgraph.so", "libacl_tdt_channel.so")
_ATB, _ATB_SOURCE = "libatb.so", _FOLDER / "atb.c"


def find_compiler() -> tuple[str, str]:
    """The C compiler's path and the version it reports."""
    wanted = os.environ.get("CC")
    candidates = (wanted,) if wanted else ("cc", "gcc", "clang")
    for name in candidates:
        path = shutil.which(name)
        if path is not None:
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            return path, answer.stdout.partition("\n")[0]
    raise EmulationError(
        "no_compiler",
        f"no C compiler among {', '.join(candidates)} on PATH; install gcc or clang, or name one with CC",
    )


def build(torch_npu_version: str) -> Path:
    """The directory with the compiled libraries; compiles them if no earlier process did."""
    compiler, compiler_version = find_compiler()
    digest = hashlib.sha256()
    for part in (
        *(source.read_bytes() for source in (*_SOURCES, _ATB_SOURCE)),
        compiler.encode(),
        compiler_version.encode(),
    ):
        digest.update(len(part).to_bytes(8, "little") + part)
    digest.update(" ".join((*_FLAGS, *_ALIASES, torch_npu_version)).encode())
    target = cache_folder() / f"cann-{digest.hexdigest()[:20]}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".cann-", dir=target.parent))
    except OSError as error:
        raise EmulationError(
            "cache_unwritable", f"cannot write to {target.parent} ({error}); set {CACHE_VARIABLE} to a writable place"
        ) from error
    try:
        main = draft / _MAIN
        _compile(compiler, [*map(str, _SOURCES), "-lpthread"], main)
        for name, source in {**dict.fromkeys(_ALIASES, os.devnull), _ATB: _ATB_SOURCE}.items():
            inputs = ["-x", "c", str(source), "-x", "none", "-Wl,--no-as-needed", str(main)]
            _compile(compiler, inputs, draft / name)
        # A directory appears under its final name complete or not at all. If another process was first, its
        # libraries are as good as these.
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _compile(compiler: str, inputs: list[str], output: Path) -> None:
    command = [compiler, *_FLAGS, "-o", str(output), f"-Wl,-soname,{output.name}", *inputs]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EmulationError(
            "compile_failed",
            f"{' '.join(command)} ended with {done.returncode}; the compiler said:\n{done.stdout}{done.stderr}",
        )


def load(directory: Path) -> ctypes.CDLL:
    """Make the libraries the ones that torch_npu will find, and return the first."""
    try:
        main = ctypes.CDLL(str(directory / _MAIN), mode=ctypes.RTLD_GLOBAL)
        for name in (*_ALIASES, _ATB):
            ctypes.CDLL(str(directory / name), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise EmulationError("load_failed", f"{error}; delete {directory} and try again") from error
    return main
