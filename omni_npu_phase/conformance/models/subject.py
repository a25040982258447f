# SPDX-License-Identifier: Apache-2.0
"""What is judged in a model: its hooks, and the requests to drive them with.

A factory for ``pytest --pyargs omni_npu_phase.conformance --phase-model MODULE:FACTORY`` returns a
:class:`ModelUnderTest`. Importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omni_npu_phase.conformance import verify

if TYPE_CHECKING:
    import torch

_LEAST_PROMPT, _LEAST_OUTPUTS = 3, 4


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it arrives at the model's stage, and what it will have sampled."""

    prompt: Sequence[int]
    """Token ids of the prompt as the scheduler counts them, placeholders included; three at least."""
    outputs: Sequence[int]
    """Token ids to decode with, in the model's vocabulary; four at least, different ones."""
    information: Mapping[str, Any]
    """What its live buffer holds at first: the request's additional information. Every run gets a deep copy."""


@dataclass(frozen=True, slots=True)
class ModelUnderTest:
    """A model instance with ``preprocess``, ready to be called, and requests that differ from each other."""

    model: Any
    requests: Mapping[str, Request]
    """By name, for reports. Two at least show more: batches, order, neighbours."""
    hidden_size: int
    dtype: torch.dtype
    """Of the runner's embedding buffer, as the engine would have it."""
    device: str = "cpu"
    tolerance: float = 0.0
    """How far two embeddings may differ that must be equal. A slice of a prompt is exact; 0 fits most models."""

    def faults(self) -> Sequence[str]:
        """Why it cannot be judged; nothing where it can."""
        found = []
        if not getattr(self.model, "has_preprocess", False) or not callable(getattr(self.model, "preprocess", None)):
            found.append(f"{type(self.model).__qualname__} has no preprocess hook, or has_preprocess is not set")
        if not self.requests:
            found.append("it has no requests")
        for name, request in self.requests.items():
            if len(request.prompt) < _LEAST_PROMPT:
                found.append(f"request {name!r}: a prompt of {len(request.prompt)} tokens; {_LEAST_PROMPT} are needed")
            if len(request.outputs) < _LEAST_OUTPUTS:
                found.append(f"request {name!r}: {len(request.outputs)} outputs; {_LEAST_OUTPUTS} are needed")
        return found


def load_model(name: str) -> ModelUnderTest:
    """What the factory ``MODULE:FACTORY`` returns. Raises :class:`~.verify.NoRuntimeError`."""
    module, separator, attribute = name.partition(":")
    if not separator or not module or not attribute:
        raise verify.NoRuntimeError(f"a model is MODULE:FACTORY, not {name!r}")
    factory = verify.load(module, attribute)
    if not callable(factory):
        raise verify.NoRuntimeError(f"{name} is no function that returns a ModelUnderTest")
    model = verify.call_factory(factory, name)
    if not isinstance(model, ModelUnderTest):
        raise verify.NoRuntimeError(f"{name} returned {verify.described(model)}, which is no ModelUnderTest")
    if faults := model.faults():
        raise verify.NoRuntimeError(f"{name}: {'; '.join(faults)}")
    return model
