# SPDX-License-Identifier: Apache-2.0
"""A stand-in for torchaudio where it is missing: the one function that vLLM-Omni's Qwen3-TTS imports.

Packages beside a CPU build of torch often lack torchaudio, and the CUDA build crashes there.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from omni_npu_phase.standins import stand_in

if TYPE_CHECKING:
    import torch


def install() -> None:
    """Make ``from torchaudio.functional import melscale_fbanks`` succeed. Does nothing where torchaudio is there."""
    if importlib.util.find_spec("torchaudio") is None:
        # transformers asks once whether torchaudio is there and remembers the answer, which has to stay no.
        from transformers.utils.import_utils import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
            is_torchaudio_available,
        )

        is_torchaudio_available()
        stand_in("torchaudio", "torchaudio.functional", names={"melscale_fbanks": melscale_fbanks})


def melscale_fbanks(
    n_freqs: int,
    f_min: float,
    f_max: float,
    n_mels: int,
    sample_rate: int,
    norm: str | None = None,
    mel_scale: str = "htk",
) -> torch.Tensor:
    """Triangular filters of equal width in mel, as float32 of shape (``n_freqs``, ``n_mels``).

    Frequencies are in Hz. ``mel_scale`` is ``htk`` or ``slaney``; with ``norm="slaney"`` each triangle has area 1.
    """
    import torch

    low, high = _to_mel(np.array([f_min, f_max]), mel_scale)
    edges = _to_hz(np.linspace(low, high, n_mels + 2), mel_scale)
    frequencies = np.linspace(0, sample_rate // 2, n_freqs)
    rising = (frequencies[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies[:, None]) / (edges[2:] - edges[1:-1])
    filters = np.clip(np.minimum(rising, falling), 0, None)
    if norm == "slaney":
        filters *= 2 / (edges[2:] - edges[:-2])
    return torch.from_numpy(filters.astype(np.float32))


# Slaney's scale: linear, 200/3 Hz a mel, up to 1 kHz; then logarithmic, 27 mels to a factor of 6.4.
_BEND_HZ, _BEND_MEL, _LOG_STEP = 1000.0, 15.0, float(np.log(6.4) / 27)


def _to_mel(hz: npt.NDArray[np.float64], scale: str) -> npt.NDArray[np.float64]:
    if scale == "htk":
        return 2595 * np.log10(1 + hz / 700)
    above = _BEND_MEL + np.log(np.maximum(hz, _BEND_HZ) / _BEND_HZ) / _LOG_STEP
    return np.where(hz < _BEND_HZ, hz * 3 / 200, above)


def _to_hz(mel: npt.NDArray[np.float64], scale: str) -> npt.NDArray[np.float64]:
    if scale == "htk":
        return 700 * (10 ** (mel / 2595) - 1)
    return np.where(mel < _BEND_MEL, mel * 200 / 3, _BEND_HZ * np.exp((mel - _BEND_MEL) * _LOG_STEP))
