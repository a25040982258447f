# SPDX-License-Identifier: Apache-2.0
"""What is read of an Ascend machine: files as CANN, driver and firmware leave them, and npu-smi's tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_npu_phase import ascend
from omni_npu_phase.conformance import verify
from omni_npu_phase.emulated_ascend import EmulationError, device

# Two cards; what is no chip has no number.
MAP = """\
	NPU ID                         Chip ID                        Chip Logic ID                  Chip Name
	3                              0                              0                              Ascend 910B3
	3                              1                              -                              Mcu
	5                              0                              1                              Ascend 910B3
	5                              1                              -                              Mcu
"""
NPU_SMI = f"""#!/bin/sh
case "$*" in
"info -m") cat <<'END'
{MAP}END
;;
"info -t board -i 3") printf '\\tSoftware Version     : 24.1.rc2\\n\\tFirmware Version     : 7.3\\n' ;;
"info -t board -i 5") printf '\\tSoftware Version     : 24.1.rc2\\n\\tFirmware Version     : 7.5\\n' ;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that everything of Ascend is under, and nothing set up."""
    monkeypatch.setattr(ascend, "ROOT", tmp_path / "Ascend")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    for variable in (*ascend.HOMES, ascend.VISIBLE):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "Ascend"


def _write(file: Path, text: str = "") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def test_a_machine_without_ascend(machine: Path) -> None:
    assert (ascend.cann(), ascend.driver(), ascend.firmware()) == (None, None, None)


def test_versions_are_read(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(machine / "driver" / "version.info", "Version=24.1.rc2\nascendhal_version=7.35.19\n")
    _write(machine / "firmware" / "version.info", "Version=7.5.0.1.129\nfirmware_version=1.0\n")
    assert (ascend.driver(), ascend.firmware()) == ("Ascend driver 24.1.rc2", "7.5.0.1.129")
    toolkit = machine / "ascend-toolkit" / "latest"
    monkeypatch.setenv("ASCEND_HOME_PATH", str(toolkit))
    assert ascend.cann() == f"CANN of unknown version in {toolkit}"
    _write(toolkit / "aarch64-linux" / "ascend_toolkit_install.info", "package_name=toolkit\nversion=8.5.0\n")
    assert ascend.cann() == f"CANN 8.5.0 in {toolkit}"


def test_what_to_source(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ascend.not_set_up() == "CANN is not set up here: source its set_env.sh"
    _write(machine / "cann" / "set_env.sh")
    _write(machine / "nnal" / "atb" / "set_env.sh")
    told = f"CANN is not set up here: source {machine}/cann/set_env.sh and {machine}/nnal/atb/set_env.sh"
    assert (ascend.not_set_up(), ascend.cann()) == (told, told)
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(machine / "cann"))
    assert ascend.not_set_up() is None


@pytest.mark.parametrize(("visible", "version"), [(None, "7.3"), ("0,1", "7.3"), ("1", "7.5"), ("7", "7.3")])
def test_firmware_of_the_first_visible_device(
    visible: str | None, version: str, machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card's number on its machine is not the one by which a process counts."""
    _write(tmp_path / "bin" / "npu-smi", NPU_SMI)
    (tmp_path / "bin" / "npu-smi").chmod(0o755)
    if visible is not None:
        monkeypatch.setenv(ascend.VISIBLE, visible)
    assert ascend.firmware() == version


@pytest.mark.parametrize(
    "source",
    [
        "raise ImportError('libhccl.so: cannot open shared object file')",
        # So it is where torch loads it.
        "raise RuntimeError('Failed to load the backend extension') from ImportError('libhccl.so: cannot open')",
    ],
)
def test_an_unsourced_cann_is_named(
    source: str, machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path / "torch_npu.py", source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(verify.NoRuntimeError, match=r"^no NPU: CANN is not set up here: source .*set_env.sh.*libhccl"):
        verify.prepare_device("npu")


def test_the_emulated_device_wants_a_cpu_build_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside one for CUDA torch_npu 2.13 aborts the process, with nothing said."""
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(EmulationError, match="is built for CUDA; install a CPU build"):
        device._check_no_other_device()
