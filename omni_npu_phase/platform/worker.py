# SPDX-License-Identifier: Apache-2.0
"""Workers of the CPU platform: vLLM's CPU worker with the runners of this package."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_omni.worker.mixins import OmniWorkerMixin

from omni_npu_phase.platform import runner, streams


class _CpuOmniWorker(OmniWorkerMixin, CPUWorker):  # type: ignore[misc]
    model_runner_cls: type

    def init_device(self) -> None:
        """Make the runner. Raises ValueError for Model Runner V2."""
        if getattr(self.model_config, "use_v2_model_runner", False):
            raise ValueError("the CPU platform of omni-npu-phase runs V1: set 'model_runner: v1' in the deploy file")
        self._undo = ExitStack()
        if self.scheduler_config.async_scheduling:
            self._undo.enter_context(streams.inert())
        # vLLM's worker names its runner class in its module only.
        with mock.patch.object(cpu_worker, "CPUModelRunner", self.model_runner_cls):
            super().init_device()

    def shutdown(self) -> None:
        super().shutdown()
        self._undo.close()

    def encoder_loaded(self) -> bool:
        """Whether the model has an encoder and has loaded it; vLLM-Omni asks its workers."""
        loaded: Any = getattr(self.model_runner.model, "encoder_loaded", None)
        return bool(loaded()) if callable(loaded) else False


class CpuARWorker(_CpuOmniWorker):
    """Worker of autoregressive stages."""

    model_runner_cls = runner.PhaseCpuARModelRunner


class CpuGenerationWorker(_CpuOmniWorker):
    """Worker of generation stages."""

    model_runner_cls = runner.PhaseCpuGenerationModelRunner
