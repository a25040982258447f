# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for packages that a CPU environment often lacks."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from omni_npu_phase.standins.torchaudio import melscale_fbanks


@pytest.mark.parametrize(
    ("sample_rate", "n_fft", "n_mels", "low", "high"), [(24000, 1024, 128, 0, 12000), (16000, 400, 80, 20, 7600)]
)
@pytest.mark.parametrize("scale", ["slaney", "htk"])
def test_mel_filters_are_librosas(sample_rate: int, n_fft: int, n_mels: int, low: int, high: int, scale: str) -> None:
    librosa = pytest.importorskip("librosa")
    expected = librosa.filters.mel(
        sr=sample_rate, n_fft=n_fft, n_mels=n_mels, fmin=low, fmax=high, htk=scale == "htk", norm="slaney"
    )
    made = melscale_fbanks(n_fft // 2 + 1, low, high, n_mels, sample_rate, norm="slaney", mel_scale=scale)
    assert np.abs(made.numpy().T - expected).max() < 1e-6


def test_unscaled_filters_peak_at_one() -> None:
    filters = melscale_fbanks(4097, 0, 12000, 16, 24000)
    assert filters.shape == (4097, 16)
    assert 0.99 < float(filters.max(0).values.min()) <= 1


@pytest.mark.skipif(importlib.util.find_spec("torchaudio") is not None, reason="torchaudio is installed")
def test_more_than_the_one_function_is_refused_by_name() -> None:
    code = """
from omni_npu_phase.standins import torchaudio
torchaudio.install()
torchaudio.install()
from torchaudio.functional import melscale_fbanks
import torchaudio
from transformers.utils.import_utils import is_torchaudio_available
assert not is_torchaudio_available()
try:
    torchaudio.functional.resample
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        "the torchaudio stand-in has no torchaudio.functional.resample; install torchaudio to use it"
    )
