# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's released V1 runners on vLLM's CPU runner, with the phase contract before them."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner

from omni_npu_phase.plugin import phase_runner


class _RewindableGenerator(torch.Generator):
    """A CPU generator that can take back its last draw.

    vLLM takes back the draw of a row that is still in its prompt by counting the offset back, which CPU generators do
    not have.
    """

    before: torch.Tensor

    def get_offset(self) -> int:
        return 0

    def set_offset(self, _: int) -> torch.Generator:
        return self.set_state(self.before)


class CpuARModelRunner(GPUARModelRunner, CPUModelRunner):  # type: ignore[misc]
    """The released runner of autoregressive stages, every device buffer being its host buffer."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        # The released runner makes buffers of its own after vLLM's CPU runner has joined both sides of each.
        self._postprocess_tensors()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self._postprocess_tensors()

    def _init_talker_mtp(self) -> None:
        # Without graphs the capture size is None, which the released code compares with a number.
        compilation = self.compilation_config
        compilation.max_cudagraph_capture_size = compilation.max_cudagraph_capture_size or 0
        super()._init_talker_mtp()

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        for row, generator in generators.items():
            if not isinstance(generator, _RewindableGenerator):
                rewindable = _RewindableGenerator(device="cpu")
                rewindable.set_state(generator.get_state())
                generators[row] = self.requests[self.input_batch.req_ids[row]].generator = rewindable
            generators[row].before = generators[row].get_state()
        return super()._sample(*args, **kwargs)


class CpuGenerationModelRunner(GPUGenerationModelRunner, CPUModelRunner):  # type: ignore[misc]
    """The released runner of generation stages, every device buffer being its host buffer."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._postprocess_tensors()


PhaseCpuARModelRunner = phase_runner(CpuARModelRunner)
PhaseCpuGenerationModelRunner = phase_runner(CpuGenerationModelRunner)
