# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vLLM-Ascend where no release of it matches: just enough to import vLLM-Omni's own NPU runners.

It is not vLLM-Ascend and runs no model. With vllm-omni 0.26 to 0.30 it gives the real `NPUARModelRunner` and
`NPUGenerationModelRunner` a base class, vLLM's `GPUModelRunner`, so that preprocessing and MTP of a step run;
what would run attention or a graph raises. With 0.24 use the real package instead.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, NoReturn

from omni_npu_phase.emulated_ascend.device import active_device
from omni_npu_phase.emulated_ascend.errors import EmulationError

_PACKAGE = "vllm_ascend"


def install() -> None:
    """Provide `vllm_ascend`, and the plugin that makes vLLM choose NPU as its platform.

    Needs the active emulated device. Must come before anything imports vllm, which chooses its platform at once.
    """
    active_device()
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if _PACKAGE in sys.modules or importlib.util.find_spec(_PACKAGE) is not None:
        raise EmulationError("vllm_ascend_present", "the real vllm_ascend is installed here; use it, not the stand-in")
    if "vllm" in sys.modules:
        raise EmulationError(
            "imported_early", "vllm was imported before the stand-in and has chosen its platform; install() first"
        )
    sys.meta_path.insert(0, _Finder())


def platform_plugin() -> str:
    """What vLLM's entry point group `vllm.platform_plugins` asks for."""
    return "vllm_ascend.platform.NPUPlatform"


def _ascend_forward_context() -> dict[str, Any]:
    from vllm.forward_context import get_forward_context, set_forward_context

    @contextlib.contextmanager
    def set_ascend_forward_context(
        attn_metadata: Any,
        vllm_config: Any,
        num_tokens: int = 0,
        aclgraph_runtime_mode: Any = None,
        batch_descriptor: Any = None,
        **ignored: Any,
    ) -> Iterator[None]:
        mode = {} if aclgraph_runtime_mode is None else {"cudagraph_runtime_mode": aclgraph_runtime_mode}
        with set_forward_context(
            attn_metadata, vllm_config, num_tokens=num_tokens, batch_descriptor=batch_descriptor, **mode
        ):
            yield

    return {
        "get_forward_context": get_forward_context,  # npu_model_runner
        "set_ascend_forward_context": set_ascend_forward_context,  # every runner; called around MTP
    }


def _attention_v1() -> dict[str, Any]:
    states = "PrefillNoCache PrefillCacheHit DecodeOnly ChunkedPrefill SpecDecoding"
    return {
        # npu_model_runner, npu_generation_model_runner
        "AscendAttentionState": enum.Enum("AscendAttentionState", states),
    }


def _attention_utils() -> dict[str, Any]:
    class AscendCommonAttentionMetadata:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            _not_emulated("attention")

    return {
        "AscendCommonAttentionMetadata": AscendCommonAttentionMetadata,  # npu_ar_model_runner, in an annotation
        "using_paged_attention": _refusal("attention"),  # npu_model_runner, npu_generation_model_runner
    }


def _acl_graph() -> dict[str, Any]:
    class ACLGraphWrapper:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            _not_emulated("graph capture")

    return {"ACLGraphWrapper": ACLGraphWrapper}  # npu_ar_model_runner; asked whether MTP is one


def _rotary_embedding() -> dict[str, Any]:
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

    return {
        "AscendMRotaryEmbedding": MRotaryEmbedding,  # vllm_omni's layers.rotary_embedding.mrope, as a base class
        "update_cos_sin": _refusal("attention"),  # every runner
    }


def _platform() -> dict[str, Any]:
    from vllm.platforms.interface import Platform, PlatformEnum

    class NPUPlatform(Platform):  # type: ignore[misc]
        _enum = PlatformEnum.OOT
        device_name = "npu"
        device_type = "npu"
        dispatch_key = "PrivateUse1"
        ray_device_key = "NPU"
        device_control_env_var = "ASCEND_RT_VISIBLE_DEVICES"
        simple_compile_backend = "eager"

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            """Every VllmConfig asks its platform; there is nothing an emulated device would change."""

        @classmethod
        def import_kernels(cls) -> None:
            """As vLLM-Ascend: not vLLM's kernels, which would end the process on a CPU without AVX-512."""

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return True

    return {"NPUPlatform": NPUPlatform}  # vLLM, as its platform; vllm_omni's platforms.npu.platform, as a base class


def _utils() -> dict[str, Any]:
    return {
        "adapt_patch": _nothing,  # platforms.npu.platform; called when the platform is made
        "enable_custom_op": _nothing,  # platforms.npu.platform; called by set_device
        "enable_sp": _no,  # every runner; called while padding is decided
        "global_stream": _current_stream,  # npu_ar_model_runner
        "is_310p": _no,  # platforms.npu._310p; called at import
        "is_950": _no,  # platforms.npu; called by is_a5
        "lmhead_tp_enable": _no,  # npu_model_runner, npu_generation_model_runner
        "maybe_trans_nz": _unchanged,  # platforms.npu.models.qwen3_tts
    }


def _model_runner_v1() -> dict[str, Any]:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    class NPUModelRunner(GPUModelRunner):  # type: ignore[misc]
        pass

    return {
        "NPUModelRunner": NPUModelRunner,  # npu_model_runner, as a base class
        "SEQ_LEN_WITH_MAX_PA_WORKSPACE": 6144,  # npu_model_runner, npu_generation_model_runner
        "graph_capture": _refusal("graph capture"),  # npu_ar_model_runner
    }


_CONTENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "vllm_ascend": dict,
    "vllm_ascend.ascend_forward_context": _ascend_forward_context,
    "vllm_ascend.attention": dict,
    "vllm_ascend.attention.attention_v1": _attention_v1,
    "vllm_ascend.attention.utils": _attention_utils,
    "vllm_ascend.compilation": dict,
    "vllm_ascend.compilation.acl_graph": _acl_graph,
    "vllm_ascend.ops": dict,
    "vllm_ascend.ops.rotary_embedding": _rotary_embedding,
    "vllm_ascend.platform": _platform,
    "vllm_ascend.utils": _utils,
    "vllm_ascend.worker": dict,
    "vllm_ascend.worker.model_runner_v1": _model_runner_v1,
}


class StandInModule(ModuleType):
    """A module that says it is a stand-in when a name is missing from it."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"the vLLM-Ascend stand-in has no {self.__name__}.{name}; {__name__} lists what it has")


class _Distribution(importlib.metadata.Distribution):
    """Without one of its own, vLLM would not ask the stand-in for a platform."""

    def read_text(self, filename: str) -> str | None:
        return {
            "METADATA": "Metadata-Version: 2.1\nName: vllm-ascend-standin\nVersion: 0\n",
            "entry_points.txt": f"[vllm.platform_plugins]\nascend = {__name__}:platform_plugin\n",
        }.get(filename)

    def locate_file(self, path: Any) -> NoReturn:
        raise FileNotFoundError(f"the vLLM-Ascend stand-in has no files, so no {path}")


class _Finder(importlib.metadata.DistributionFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _CONTENTS:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        distribution = _Distribution()
        wanted = getattr(context, "name", None)
        return [distribution] if wanted in (None, distribution.metadata["Name"]) else []

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandInModule(spec.name, __doc__)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(_CONTENTS[module.__name__]())


def _not_emulated(what: str) -> NoReturn:
    raise NotImplementedError(f"{what} is not emulated: the vLLM-Ascend stand-in only prepares steps")


def _refusal(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        _not_emulated(what)

    return refuse


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _no(*args: Any, **kwargs: Any) -> bool:
    return False


def _unchanged(weight: Any, *args: Any) -> Any:
    return weight


def _current_stream() -> Any:
    import torch

    return torch.npu.current_stream()  # type: ignore[attr-defined]
