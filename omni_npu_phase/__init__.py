# SPDX-License-Identifier: Apache-2.0
"""The prefill/decode phase contract of vLLM-Omni, implemented once for CUDA, Ascend and CPU model runners.

Importing this package loads no torch and no vLLM; the mixins load what they need on use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omni_npu_phase.contract import ContractError
    from omni_npu_phase.step.v1 import PhaseRoutingMixin
    from omni_npu_phase.step.v2 import PhaseStateMixin

__version__ = "0.2.0"
__all__ = ["ContractError", "PhaseRoutingMixin", "PhaseStateMixin", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "PhaseRoutingMixin":
        from omni_npu_phase.step.v1 import PhaseRoutingMixin

        return PhaseRoutingMixin
    if name == "PhaseStateMixin":
        from omni_npu_phase.step.v2 import PhaseStateMixin

        return PhaseStateMixin
    if name == "ContractError":
        from omni_npu_phase.contract import ContractError

        return ContractError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
