# SPDX-License-Identifier: Apache-2.0
"""The observer: stands before a runner's methods, passes everything through, and notes what a trace needs.

Nothing is done for each row on the step's thread: lists and arrays are copied as a whole. Only where every hook call
is to be recorded does each call of a scalar hook cost something.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from omni_npu_phase import __version__
from omni_npu_phase.contract import FIELDS
from omni_npu_phase.releases import v2
from omni_npu_phase.settings import TRACE_HOOKS_VARIABLE, trace_folder
from omni_npu_phase.step.plan import StepPlan
from omni_npu_phase.step.port import known_phase
from omni_npu_phase.step.route import BATCHED_HOOK, SCALAR_HOOK
from omni_npu_phase.tracing import schema
from omni_npu_phase.tracing.recorder import Observed, Recorder
from omni_npu_phase.tracing.schema import Header

OBSERVER = "_omni_npu_phase_trace"
"""Where a runner keeps its observer."""

# vLLM shows what is logged under its own name.
logger = logging.getLogger("vllm.omni_npu_phase")

_REPLICA_VARIABLE = "VLLM_OMNI_REPLICA_ID"
"""Where vLLM-Omni tells the processes of an engine which replica of its stage they are, from 0.24 on."""
_MIXINS = ("PhaseRoutingMixin", "PhaseStateMixin")
_TOLD = itemgetter(*FIELDS)
_ROW, _OFFSET = itemgetter(0), itemgetter(1)


def attach(runner: Any, folder: Path, *, hooks: bool = False) -> Recorder:
    """Watch a runner, or a V2 model state, from its next step on; one that is watched already stays with its file."""
    known: _Observer | None = runner.__dict__.get(OBSERVER)
    if known is not None:
        if not known.recorder.stopped:
            return known.recorder
        known.detach()
    kind = _StateObserver if v2.is_model_state(type(runner)) else _RunnerObserver
    observer: _Observer = kind(runner, folder, hooks=hooks)
    runner.__dict__[OBSERVER] = observer
    return observer.recorder


_watched: dict[type, Any] = {}
"""Classes whose instances are watched, and what stood for their ``__init__``, None where it was inherited."""


def watch_instances(cls: type) -> None:
    """Watch every runner of a class, and of classes derived from it, from its making on; the class stays what it is."""
    if any(base in _watched for base in cls.__mro__):
        return
    _watched[cls] = vars(cls).get("__init__")
    original: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def made(self: Any, *args: Any, **keywords: Any) -> None:
        original(self, *args, **keywords)
        folder = trace_folder()
        if folder is not None:
            try:
                attach(self, folder, hooks=os.environ.get(TRACE_HOOKS_VARIABLE) == "1")
            except Exception as error:  # noqa: BLE001 - a trace must not stop an engine
                logger.warning("omni-npu-phase: %s is not traced (%s)", type(self).__qualname__, error)

    cls.__init__ = made  # type: ignore[misc]


def unwatch_instances() -> None:
    """Take back :func:`watch_instances`; runners that exist stay watched."""
    while _watched:
        cls, own = _watched.popitem()
        if own is None:
            del cls.__init__  # type: ignore[misc]
        else:
            cls.__init__ = own  # type: ignore[misc]


class _Observer(ABC):
    """What the observers of both families do: the step under way, the model's hooks, and the recorder."""

    family: str
    request_key: str

    def __init__(self, runner: Any, folder: Path, *, hooks: bool) -> None:
        self.runner = runner
        self.recorder = Recorder(folder, self._header)
        self.step: Observed | None = None
        """The step under way."""
        self._methods: list[tuple[Any, str, Any]] = []
        self._model_hooks: list[tuple[Any, str, Any]] = []
        self._hooks = hooks
        self._number = 0
        self._model: Any = None
        self._id_of = itemgetter(self.request_key)

    def detach(self) -> None:
        """Take back what stands before methods and hooks."""
        _take_back(self._model_hooks)
        _take_back(self._methods)

    def _fail(self, error: Exception) -> None:
        """End the recording, and nothing else."""
        self.recorder.fail(f"cannot observe {type(self.runner).__qualname__}", error)

    def _step(self, released: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self.recorder

        @functools.wraps(released)
        def call(*args: Any, **keywords: Any) -> Any:
            step = None if recorder.stopped else self._began(args, keywords)
            if step is None:
                return released(*args, **keywords)
            before = self._plan()
            try:
                return released(*args, **keywords)
            except BaseException as error:
                step.error = f"{type(error).__name__} {getattr(error, 'clause', '')}".rstrip()
                raise
            finally:
                step.ended = time.perf_counter_ns()
                self.step = None
                plan = self._plan()
                step.plan = plan if plan is not before else None
                step.given = self._given()
                recorder.add(step)

        return call

    def _began(self, args: Sequence[Any], keywords: dict[str, Any]) -> Observed | None:
        try:
            if self.runner.model is not self._model:
                # A model that was taken away must not be kept.
                _take_back(self._model_hooks)
                self._model = self.runner.model
                self._watch_hooks()
            step = self.step = self._snapshot(*args, **keywords)
        except Exception as error:  # noqa: BLE001 - a trace must not stop an engine
            self._fail(error)
            return None
        self._number += step is not None
        return step

    @abstractmethod
    def _snapshot(self, *args: Any, **keywords: Any) -> Observed | None:
        """The step's rows from the arguments of the method that begins it; None where it has none to record."""

    @abstractmethod
    def _watch_hooks(self) -> None:
        """Stand before the hooks of the model that is there now."""

    def _batched(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def call(*args: Any, **keywords: Any) -> Any:
            if self.step is not None:
                try:
                    self._note_batch(self.step, keywords["req_infos"] if "req_infos" in keywords else args[-1])
                except Exception as error:  # noqa: BLE001 - a trace must not stop an engine
                    self._fail(error)
            return hook(*args, **keywords)

        return call

    def _note_batch(self, step: Observed, infos: Sequence[Any]) -> None:
        try:
            requests = list(map(self._id_of, infos))
            told = list(map(_TOLD, infos)) if self._hooks else None
        except KeyError:
            requests = [info.get(self.request_key) for info in infos]
            told = [[info.get(name) for name in FIELDS] for info in infos] if self._hooks else None
        step.calls.append((schema.BATCHED, requests, told))

    def _scalar(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def call(*args: Any, **keywords: Any) -> Any:
            if self.step is not None:
                told = [keywords.get(name) for name in FIELDS]
                self.step.calls.append((schema.SCALAR, (keywords.get(self.request_key),), (told,)))
            return hook(*args, **keywords)

        return call

    def _header(self) -> Header:
        runner, model = self.runner, self._model
        classes = [cls.__name__ for cls in type(runner).__mro__]
        config = getattr(getattr(runner, "vllm_config", None), "model_config", None)
        batched, gathers, mtp = self._offers()
        return Header(
            stage=int(getattr(config, "stage_id", None) or 0),
            replica=int(os.environ.get(_REPLICA_VARIABLE) or 0),
            dp=_rank("_DP"),
            pp=_rank("_PP"),
            tp=_rank("_TP"),
            pid=os.getpid(),
            runner=f"{type(runner).__module__}.{type(runner).__qualname__}",
            family=self.family,
            mixin=any(name in classes for name in _MIXINS) and self._plans(),
            model=type(model).__name__,
            preprocess=bool(getattr(model, "has_preprocess", False)),
            batched=batched,
            gathers=gathers,
            mtp=mtp,
            hooks=self._hooks,
            version=__version__,
        )

    def _plan(self) -> StepPlan | None:
        """The plan that the mixin keeps on its runner: of the last step, until the next one has its own."""
        phase = known_phase(self.runner)
        return phase.plan if phase is not None else None

    def _given(self) -> dict[str, int]:
        """What exact replay gave back in the step."""
        phase = known_phase(self.runner)
        replay = getattr(phase.tools, "replay", None) if phase is not None else None
        return {} if replay is None else {request: given.count for request, given in replay.given.items()}

    def _plans(self) -> bool:
        phase = known_phase(self.runner)
        return phase is not None and phase.mode != "off"

    @abstractmethod
    def _offers(self) -> tuple[bool, bool, bool]:
        """Whether the model has a batched hook, whether that gathers its rows, and whether there is MTP."""


class _RunnerObserver(_Observer):
    """Watches a V1 runner: ``_preprocess``, ``_talker_mtp_forward`` and its model's hooks."""

    family = "v1"
    request_key = "request_id"

    def __init__(self, runner: Any, folder: Path, *, hooks: bool) -> None:
        super().__init__(runner, folder, hooks=hooks)
        self._in_mtp = False
        _stand_before(runner, "_preprocess", self._step, self._methods)
        _stand_before(runner, "_talker_mtp_forward", self._mtp, self._methods)

    def _snapshot(self, scheduler_output: Any, num_input_tokens: int, *_: Any, **__: Any) -> Observed:
        batch = self.runner.input_batch
        request_ids = list(batch.req_ids)
        count, starts, known = (
            len(request_ids),
            self.runner.query_start_loc.cpu,
            getattr(batch, "num_tokens_no_spec", None),
        )
        return Observed(
            self._number,
            time.perf_counter_ns(),
            request_ids,
            batch.num_prompt_tokens[:count].copy(),
            batch.num_computed_tokens_cpu[:count].copy(),
            # Made for this step and not changed after it.
            scheduler_output.num_scheduled_tokens,
            # From the half of the pair that the released code reads: the host's, or the tensor itself.
            np.asarray((starts() if callable(starts) else starts)[:count]).copy(),
            num_input_tokens,
            None if known is None else known[:count].copy(),
        )

    def _mtp(self, released: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(released)
        def call(decode_req_ids: Any, inputs_embeds: Any, *rest: Any, **keywords: Any) -> Any:
            step = self.step
            # The released step for seeded rows calls itself once more for each of them.
            if step is None or self._in_mtp:
                return released(decode_req_ids, inputs_embeds, *rest, **keywords)
            self._in_mtp = True
            try:
                try:
                    offsets = rest[0] if rest else keywords.get("start_offsets")
                    step.mtp.append((list(decode_req_ids), None if offsets is None else list(offsets)))
                except Exception as error:  # noqa: BLE001 - a trace must not stop an engine
                    self._fail(error)
                return released(decode_req_ids, inputs_embeds, *rest, **keywords)
            finally:
                self._in_mtp = False

        return call

    def _filling(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def call(*args: Any, **keywords: Any) -> Any:
            filled = hook(*args, **keywords)
            if self.step is not None and filled:
                self.step.filled = tuple(filled)
            return filled

        return call

    def _watch_hooks(self) -> None:
        if getattr(self._model, "preprocess_batch_fills_rows", False):
            _stand_before(self._model, "preprocess_batch", self._filling, self._model_hooks)
        _stand_before(self._model, BATCHED_HOOK, self._batched, self._model_hooks)
        if self._hooks:
            _stand_before(self._model, SCALAR_HOOK, self._scalar, self._model_hooks)

    def _offers(self) -> tuple[bool, bool, bool]:
        batched = callable(getattr(self._model, BATCHED_HOOK, None))
        return batched, False, bool(getattr(self.runner, "has_talker_mtp", False))


class _StateObserver(_Observer):
    """Watches a V2 model state: ``run_preprocess``, ``_run_batched_mtp`` and its model's hooks."""

    family = "v2"
    request_key = "req_id"

    def __init__(self, runner: Any, folder: Path, *, hooks: bool) -> None:
        super().__init__(runner, folder, hooks=hooks)
        _stand_before(runner, "run_preprocess", self._step, self._methods)
        _stand_before(runner, "_run_batched_mtp", self._mtp, self._methods)

    def _snapshot(
        self, input_batch: Any, model_inputs: Any, req_states: Any = None, *_: Any, **__: Any
    ) -> Observed | None:
        count, prompt_lens, progress = input_batch.num_reqs, v2.prompt_lens(req_states), v2.num_computed(input_batch)
        if prompt_lens is None or progress is None:
            return None
        return Observed(
            self._number,
            time.perf_counter_ns(),
            list(input_batch.req_ids[:count]),
            prompt_lens[input_batch.idx_mapping_np[:count]],
            progress[:count].copy(),
            input_batch.num_scheduled_tokens[:count].copy(),
            input_batch.query_start_loc_np[:count].copy(),
            int(input_batch.num_tokens_after_padding),
            # Of a request that was preempted, its outputs are counted as prefill.
            getattr(input_batch, "prefill_len_np", None),
        )

    def _mtp(self, released: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(released)
        def call(mtp_batches: Any, *args: Any, **keywords: Any) -> Any:
            if self.step is not None:
                try:
                    self._note_mtp(self.step, mtp_batches)
                except Exception as error:  # noqa: BLE001 - a trace must not stop an engine
                    self._fail(error)
            return released(mtp_batches, *args, **keywords)

        return call

    def _note_mtp(self, step: Observed, batches: Any) -> None:
        requests = map(step.request_ids.__getitem__, map(_ROW, batches))
        step.mtp.append((list(requests), list(map(_OFFSET, batches))))

    def _watch_hooks(self) -> None:
        _stand_before(self.runner, "_decode_preprocess", self._batched, self._model_hooks)
        if self._hooks:
            _stand_before(self._model, SCALAR_HOOK, self._scalar, self._model_hooks)

    def _offers(self) -> tuple[bool, bool, bool]:
        batched = callable(getattr(self.runner, "_decode_preprocess", None))
        # The released state takes all decode rows at once, whatever its hook is called; the mixin goes by the name.
        gathers = batched and (not self._plans() or callable(getattr(self._model, v2.GATHERING_HOOK, None)))
        return batched, gathers, getattr(self._model, "mtp", None) is not None


def _stand_before(
    owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], kept: list[tuple[Any, str, Any]]
) -> None:
    """Put a wrapped method on an object, where it has it, and keep what the object itself had under the name."""
    method = getattr(owner, name, None)
    if callable(method):
        kept.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, wrap(method))


def _take_back(kept: list[tuple[Any, str, Any]]) -> None:
    while kept:
        owner, name, own = kept.pop()
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _rank(group: str) -> int:
    """This process's rank in one of vLLM's groups, 0 where there is no such group."""
    from vllm.distributed import parallel_state

    return int(getattr(getattr(parallel_state, group, None), "rank_in_group", 0))
