# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine core with vLLM-Omni's Qwen3-TTS talker, in this process, for tests.

On the CPU platform everything is the released code, but for the platform's workers; on the emulated Ascend device, all
of it is. :func:`prepare` must run before vLLM is imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_npu_phase.emulated_ascend import engine as emulated_engine
from omni_npu_phase.settings import PLATFORM_VARIABLE

if TYPE_CHECKING:
    from omni_npu_phase.speech.prompts import Prompt

ARCHITECTURE = "Qwen3TTSTalkerForConditionalGeneration"
_ENVIRONMENTS = {"cpu": {PLATFORM_VARIABLE: "cpu"}, "emulated": emulated_engine.ENVIRONMENT}
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def prepare(device: str = "cpu") -> None:
    """Set this process's environment for an engine of its own, on ``cpu`` or on the ``emulated`` Ascend device."""
    os.environ.update(_ENVIRONMENT | _ENVIRONMENTS[device])


class TalkerEngine:
    """An engine core and what it has produced: ``tokens`` by request, in order."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.tokens: dict[str, list[int]] = {}
        self.prompt_lens: dict[str, int] = {}

    def submit(
        self, request_id: str, text: str, *, speaker: str = "vivian", with_embeds: bool = False, **sampling: Any
    ) -> int:
        """Queue one request, greedy unless ``sampling`` says otherwise; returns its prompt's length in tokens.

        ``with_embeds``: the request brings prompt embeddings too, for whose rows the talker's hook has its own.
        """
        from omni_npu_phase.speech.prompts import Prompt

        return self.submit_prompt(request_id, Prompt(text, speaker, "english"), with_embeds=with_embeds, **sampling)

    def submit_prompt(self, request_id: str, prompt: Prompt, *, with_embeds: bool = False, **sampling: Any) -> int:
        """The same for a prompt."""
        import torch
        from vllm import SamplingParams
        from vllm_omni.engine import OmniEngineCoreRequest
        from vllm_omni.engine.serialization import serialize_additional_information

        model = self.core.vllm_config.model_config
        length = self.prompt_lens[request_id] = prompt.length(Path(model.model))
        # Other values in each request.
        embeds = torch.full((length, model.get_hidden_size()), float(len(self.prompt_lens)))
        settings = {"temperature": 0.0, "max_tokens": 6, "stop_token_ids": [2150], "detokenize": False, **sampling}
        message = OmniEngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=[1] * length,
            mm_features=None,
            sampling_params=SamplingParams(**settings),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            prompt_embeds=embeds if with_embeds else None,
            additional_information=serialize_additional_information(prompt.information),
        )
        message.external_req_id = request_id
        request, wave = self.core.preprocess_add_request(message)
        # vLLM's core drops what it does not know; vLLM-Omni's own core process carries these two over.
        request.additional_information, request.external_req_id = message.additional_information, request_id
        self.core.add_request(request, wave)
        self.tokens[request_id] = []
        return length

    def step(self) -> list[Any]:
        """Take one step, and note what came of an earlier one; returns vLLM-Omni's outputs of that."""
        made, _ = self.core.step_fn()
        outputs: list[Any] = made[0].outputs if made and 0 in made else []
        for output in outputs:
            self.tokens[output.request_id] += output.new_token_ids
        return outputs

    @property
    def working(self) -> bool:
        """Whether a request has not ended."""
        return bool(self.core.scheduler.has_unfinished_requests() or self.core.batch_queue)

    def run(self) -> dict[str, list[int]]:
        """Step until every request has ended; returns ``tokens``."""
        while self.working:
            self.step()
        return self.tokens


@contextmanager
def talker_engine(
    model: Path, *, budget: int = 64, asynchronous: bool = False, **settings: Any
) -> Iterator[TalkerEngine]:
    """An engine of the talker stage with ``budget`` tokens a step; ``settings`` are vLLM-Omni's engine arguments."""
    config = talker_config(model, budget=budget, asynchronous=asynchronous, **settings)
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    try:
        yield TalkerEngine(core)
    finally:
        core.shutdown()


def talker_config(model: Path, *, budget: int = 64, asynchronous: bool = False, **settings: Any) -> Any:
    """vLLM's configuration of that engine."""
    import vllm_omni.patch  # noqa: F401
    from vllm_omni.engine.arg_utils import OmniEngineArgs

    scheduler = "OmniARAsyncScheduler" if asynchronous else "OmniARScheduler"
    arguments = {
        "model": str(model),
        "stage_id": 0,
        "model_stage": "qwen3_tts",
        "model_arch": ARCHITECTURE,
        "worker_type": "ar",
        "engine_output_type": "latent",
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": min(4, budget),
        "max_num_batched_tokens": budget,
        "enable_prefix_caching": False,
        "trust_remote_code": True,
        "kv_cache_memory_bytes": 64 << 20,
        "block_size": 32,
        "enable_chunked_prefill": True,
        "subtalker_sampling_params": {"do_sample": False},
        "disable_log_stats": True,
        "distributed_executor_backend": "uni",
        "async_scheduling": asynchronous,
        "scheduler_cls": f"vllm_omni.core.sched.omni_ar_scheduler.{scheduler}",
        **settings,
    }
    return OmniEngineArgs(**arguments).create_engine_config()
