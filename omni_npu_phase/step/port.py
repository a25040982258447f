# SPDX-License-Identifier: Apache-2.0
"""What both mixins share: their mode, what they keep on a runner, and the port through which a route works on it."""

from __future__ import annotations

from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from omni_npu_phase import buffers
from omni_npu_phase.settings import Mode, chosen_mode, replays_exactly
from omni_npu_phase.step.plan import Run, StepPlan, of_rows
from omni_npu_phase.step.results import Call, Deviations

if TYPE_CHECKING:
    import torch

    from omni_npu_phase.buffers.base import BufferHelper, Rows

_KEPT = "_omni_npu_phase"


@dataclass(slots=True)
class Phase:
    """What a mixin keeps on its runner, or model state, between steps."""

    mode: Mode
    deviations: Deviations
    plan: StepPlan | None = None
    """The plan of the step under way, or else of the last one."""
    selecting: bool = False
    """Whether the released code is selecting the step's inputs, for which it sees a model without hooks."""
    tools: Any = None
    """What the mixin made for its runner on first use."""
    _helpers: dict[torch.device, BufferHelper] = field(default_factory=dict)

    def helper(self, device: torch.device) -> BufferHelper:
        if device not in self._helpers:
            self._helpers[device] = buffers.for_device(device)
        return self._helpers[device]


def phase_of(owner: Any) -> Phase:
    """What the mixin keeps on a runner or model state, made on first use: some are built without ``__init__``."""
    phase: Phase | None = owner.__dict__.get(_KEPT)
    if phase is None:
        mode = chosen_mode(owner.phase_mode)
        phase = owner.__dict__[_KEPT] = Phase(mode, Deviations(mode))
    return phase


def known_phase(owner: Any) -> Phase | None:
    """The same for any runner; None where no mixin has begun its work on it."""
    return owner.__dict__.get(_KEPT)  # type: ignore[no-any-return]


class _Before(ABCMeta):
    """The class of the mixins, and of what lists one: a mixin comes first, but not before a class that has it too.

    So ``class Runner(PhaseRoutingMixin, GPUARModelRunner)`` can be made where the plugin gave the released class the
    mixin, and stays right when the plugin does that later.
    """

    # ABCMeta remembers its answers, and the plugin changes them.
    __instancecheck__ = type.__instancecheck__
    __subclasscheck__ = type.__subclasscheck__

    def mro(cls) -> list[type]:
        if len(cls.__bases__) == 1:
            return super().mro()
        mixins = [base for base in cls.__bases__ if PhaseMixin in base.__bases__]
        first = [one for one in mixins if not any(one in base.__mro__[1:] for base in cls.__bases__)]
        bases = [*first, *(base for base in cls.__bases__ if base not in mixins)]
        if tuple(bases) == cls.__bases__:
            return super().mro()
        return [cls, *_merged([list(base.__mro__) for base in bases] + [bases])]


def _merged(orders: list[list[type]]) -> Iterator[type]:
    """The classes of several orders in one, as Python's own method resolution has them."""
    while orders := [order for order in orders if order]:
        behind = {cls for order in orders for cls in order[1:]}
        first = next((order[0] for order in orders if order[0] not in behind), None)
        if first is None:
            raise TypeError(f"no method resolution order for {', '.join(order[0].__name__ for order in orders)}")
        yield first
        orders = [order[1:] if order[0] is first else order for order in orders]


class PhaseMixin(metaclass=_Before):
    """What both mixins are: classes with a mode, listed before a released class."""

    phase_mode: Mode | None = None
    phase_replay: Literal["exact", "off"] | None = None
    _omni_npu_phase_released: tuple[type, ...] | None = None
    """The released classes where the plugin gave them the mixin."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # A wrong mode is refused when the class is made, not in a serving engine's first step.
        chosen_mode(cls.phase_mode)
        replays_exactly(cls.phase_replay)


def released_classes(cls: type) -> tuple[type, ...]:
    """The classes behind the mixin in method resolution order; all of them where there is no mixin."""
    known: tuple[type, ...] | None = getattr(cls, "_omni_npu_phase_released", None)
    if known is not None:
        return known
    mro = cls.__mro__
    return mro[mro.index(PhaseMixin) + 1 :] if PhaseMixin in mro else mro


def device_side(buffer: Any) -> torch.Tensor:
    """The device tensor of a buffer: of vLLM's host/device pair, or the tensor itself."""
    tensor: torch.Tensor = getattr(buffer, "gpu", buffer)
    return tensor


class Port(ABC):
    """A runner as the route of one step sees it. ``rows`` are row numbers of the plan."""

    index: Mapping[str, int]
    """The row of the input batch of each request, which is not the plan's where rows get no hook."""
    has_batched_hook: bool
    gathers = False
    """Whether the batched hook takes all its rows of a step at once; they need not be contiguous (R4) then."""
    mtp_width: int | None = None
    """Hidden size of the MTP inputs; None for a model without MTP."""

    def __init__(self, phase: Phase, plan: StepPlan, model: Any, ids: torch.Tensor, embeds: torch.Tensor) -> None:
        """``ids``: the step's token ids, shape (buffer rows,). ``embeds``: its embeddings, (buffer rows, hidden)."""
        self.plan = plan
        self.model = model
        self.ids = ids
        self.embeds = embeds
        self.deviations = phase.deviations
        self.helper = phase.helper(embeds.device)

    def hook_call(self, hook: str, rows: Sequence[int]) -> Call:
        """A call of a hook for these rows, by which its result is checked."""
        requests = of_rows(rows, self.plan.request_ids)
        return Call(hook, requests, self.index, self.embeds, self.model, self.deviations)

    @abstractmethod
    def infos(self, rows: Sequence[int]) -> list[Any]:
        """The live buffers of rows, made where they are missing (M9)."""

    def infos_for_hooks(self, rows: Sequence[int]) -> list[Any]:
        """The same, with what the release tells hooks beside the fields."""
        return self.infos(rows)

    @abstractmethod
    def call_scalar(self, row: int, info: Any, ids: torch.Tensor, embeds: torch.Tensor) -> Any:
        """Call the scalar hook with the row's slices (R9)."""

    @abstractmethod
    def call_batch(self, run: Run, infos: Sequence[Any], ids: torch.Tensor) -> Any:
        """Call the batched hook for a run of decode rows (R3)."""

    def locate(self, run: Run) -> Rows:
        """Where a batched run's tokens lie in the step's buffers."""
        return self.helper.rows(of_rows(run.rows, self.plan.offsets))

    def lend_ids(self, where: Rows) -> torch.Tensor:
        """Token ids for a batched hook."""
        return self.ids[where]

    def selected(self, row: int) -> int:
        """How many of a row's embeddings are of this step before its hook; those behind them are an older step's."""
        return self.plan.spans[row]

    def write_rows(self, where: Rows, ids: torch.Tensor | None, embeds: torch.Tensor | None) -> None:
        """Write rows; None leaves the token ids or the embeddings as they are (R6, R7)."""
        if embeds is not None:
            self.helper.put(self.embeds, where, embeds)
        if ids is not None:
            self.helper.put(self.ids, where, ids)

    @abstractmethod
    def store_updates(self, rows: Sequence[int], updates: Sequence[Any]) -> None:
        """Merge each row's update into its own request's live buffer, owned (R8, T9)."""

    @abstractmethod
    def fill_mtp(self, position: int, where: Rows, parts: list[torch.Tensor]) -> None:
        """Put rows into the MTP batch, from ``position`` on (T1); their embeddings may wait for MTP's own (T4).

        ``parts``: their token ids, embeddings, hidden states and text steps.
        """

    @abstractmethod
    def run_mtp(self, rows: Sequence[int]) -> None:
        """Run MTP for these rows, write its embeddings at their offsets and store its codes (T4, T5)."""
