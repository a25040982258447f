# SPDX-License-Identifier: Apache-2.0
"""Broken runners: the mixin with one guard taken out each, and the clause that must catch it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from omni_npu_phase import contract, mixin, mtp, plan, results, routing, state
from omni_npu_phase.buffers.base import BufferHelper
from omni_npu_phase.buffers.cpu import CpuBufferHelper
from omni_npu_phase.contract import FIELDS, MTP_INPUTS, ContractError
from omni_npu_phase.plan import Run, StepPlan

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    """One fault: which clause must catch it, and how it is brought in."""

    name: str
    clause: str
    apply: Patch


def _plans(change: Callable[[StepPlan], StepPlan]) -> Patch:
    """Change every plan right after it was made."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        made = mixin.plan_step
        patch.setattr(mixin, "plan_step", lambda *args, **kwargs: change(made(*args, **kwargs)))

    return apply


def _phases(prefill: Callable[[int, int, int], bool]) -> Patch:
    """Decide the phase, and with it MTP eligibility, in another way from P, C and S."""

    def change(step: StepPlan) -> StepPlan:
        rows = list(zip(step.prompt_lens, step.num_computed, step.spans, strict=True))
        phases = [prefill(*row) for row in rows]
        eligible = [span == 1 and not phase for (_, _, span), phase in zip(rows, phases, strict=True)]
        return replace(step, prefill=phases, eligible=eligible)

    return _plans(change)


def _eligible(eligible: Callable[[int, int, int], bool]) -> Patch:
    return _plans(
        lambda step: replace(
            step,
            eligible=[eligible(*row) for row in zip(step.prompt_lens, step.num_computed, step.spans, strict=True)],
        )
    )


def _set(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """Replace an attribute by what ``make`` makes of it."""
    return lambda patch: patch.setattr(owner, name, make(getattr(owner, name)))


def _latched(patch: pytest.MonkeyPatch) -> None:
    known: dict[str, bool] = {}

    def change(step: StepPlan) -> StepPlan:
        phases = [known.setdefault(name, phase) for name, phase in zip(step.request_ids, step.prefill, strict=True)]
        return replace(step, prefill=phases)

    _forget_with_runner(patch, known)
    _plans(change)(patch)


def _replay_is_prefill(patch: pytest.MonkeyPatch) -> None:
    furthest: dict[str, int] = {}

    def change(step: StepPlan) -> StepPlan:
        phases = []
        for row, name in enumerate(step.request_ids):
            phases.append(step.prefill[row] or step.num_computed[row] < furthest.get(name, 0))
            furthest[name] = max(furthest.get(name, 0), step.num_computed[row])
        return replace(step, prefill=phases)

    _forget_with_runner(patch, furthest)
    _plans(change)(patch)


def _forget_with_runner(patch: pytest.MonkeyPatch, memory: dict[str, Any]) -> None:
    made = mixin._phase_of

    def fresh(runner: Any) -> Any:
        if "_omni_npu_phase" not in runner.__dict__:
            memory.clear()
        return made(runner)

    patch.setattr(mixin, "_phase_of", fresh)


def _fields(change: Callable[[dict[str, Any], StepPlan, int], dict[str, Any]]) -> Patch:
    """Change the fields of a row as they are written."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        made = StepPlan.fields
        patch.setattr(StepPlan, "fields", lambda step, row: change(made(step, row), step, row))

    return apply


def _field(name: str, value: Callable[[StepPlan, int], Any]) -> Patch:
    return _fields(lambda fields, step, row: {**fields, name: value(step, row)})


def _only_when_absent(made: Any) -> Any:
    def own(step: StepPlan, rows: Sequence[int], infos: list[dict[str, Any]]) -> None:
        for row, info in zip(rows, infos, strict=True):
            for name, value in step.fields(row).items():
                info.setdefault(name, value)

    return own


def _scheduler_order(patch: pytest.MonkeyPatch) -> None:
    made = mixin._plan

    def planned(runner: Any, scheduler_output: Any, buffer_rows: int) -> StepPlan:
        step = made(runner, scheduler_output, buffer_rows)
        wanted = list(scheduler_output.num_scheduled_tokens)
        order = [step.request_ids.index(name) for name in wanted]

        def sort(values: Sequence[Any]) -> list[Any]:
            return [values[row] for row in order]

        return StepPlan(
            *(
                sort(values)
                for values in (
                    step.request_ids,
                    step.prompt_lens,
                    step.num_computed,
                    step.spans,
                    step.offsets,
                    step.prefill,
                    step.eligible,
                )
            )
        )

    patch.setattr(mixin, "_plan", planned)


def _port(name: str, make: Callable[[Any], Any]) -> Patch:
    return _set(mixin._RunnerPort, name, make)


def _late_flush(made: Any) -> Any:
    def runs(step: StepPlan, *, batched: bool) -> Any:
        grouped = list(made(step, batched=batched))
        return iter([run for run in grouped if not run.batched] + [run for run in grouped if run.batched])

    return runs


def _no_copy_of_hook_infos(made: Any) -> Any:
    return lambda port, rows: [dict(info) for info in made(port, rows)]


def _batch_hook(order: str) -> Patch:
    """Move the optional batch hook: after the hooks, or run it twice."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        made = routing.route

        def call(port: Any, step: StepPlan) -> None:
            hook = getattr(port.model, "preprocess_batch", None)
            if callable(hook):
                runner = port._runner
                hook(
                    req_ids=step.request_ids,
                    model_intermediate_buffer=runner.model_intermediate_buffer,
                    device=port.ids.device,
                )

        def late(step: StepPlan, port: Any) -> None:
            made(step, port)
            call(port, step)

        def twice(step: StepPlan, port: Any) -> None:
            call(port, step)
            made(step, port)

        patch.setattr(routing, "route", late if order == "late" else twice)

    return apply


def _batch_hook_after_fields(patch: pytest.MonkeyPatch) -> None:
    """The batch hook runs once, but between the fields and the first hook."""
    made = routing._own_fields
    done: set[int] = set()

    before = mixin._RunnerPort.__init__

    def start(port: Any, *args: Any) -> None:
        before(port, *args)
        done.clear()
        patched["port"] = port

    patched: dict[str, Any] = {}

    def own(step: StepPlan, rows: Sequence[int], infos: list[dict[str, Any]]) -> None:
        made(step, rows, infos)
        port = patched["port"]
        hook = port.model.__dict__.get("late_batch_hook")
        if hook is not None and not done:
            done.add(1)
            hook(
                req_ids=step.request_ids,
                model_intermediate_buffer=port._runner.model_intermediate_buffer,
                device=port.ids.device,
            )

    model = _recording_model()
    init = model.__init__

    def hide(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        hook = self.__dict__.pop("preprocess_batch", None)
        if hook is not None:
            self.late_batch_hook = hook

    patch.setattr(model, "__init__", hide)
    patch.setattr(mixin._RunnerPort, "__init__", start)
    patch.setattr(routing, "_own_fields", own)


def _recording_model() -> Any:
    from omni_npu_phase.conformance.model import RecordingModel

    return RecordingModel


def _mtp_always(made: Any) -> Any:
    def run(step: StepPlan, port: Any) -> None:
        ran: list[int] = []
        original = port.run_mtp
        port.run_mtp = lambda rows: (ran.append(1), original(rows))[1]
        made(step, port)
        if not ran and port.mtp_width is not None and len(step):
            port._runner.talker_mtp(*(buffer[:1] for buffer in port._mtp_inputs))

    return run


def _row_numbers(made: Any) -> Any:
    """MTP embeddings go to the row's number instead of its offset."""

    def forward(runner: Any, request_ids: list[str], embeds: torch.Tensor, offsets: Any = None) -> None:
        made(runner, request_ids, embeds, [runner.input_batch.req_id_to_index[name] for name in request_ids])

    return forward


def _shared_codes(made: Any) -> Any:
    def store(writes: Any, request_ids: Any, key: Any, codes: torch.Tensor, marks: Any) -> None:
        made(writes, request_ids, key, codes[:1].expand_as(codes), marks)

    return store


def _keywords_reversed(made: Any) -> Any:
    """The batched hook's entries are handed over in the opposite order to its rows."""

    def call(port: Any, run: Run, infos: list[dict[str, Any]], ids: torch.Tensor) -> Any:
        entries = [port._keywords(row, info) for row, info in zip(run.rows, infos, strict=True)]
        return port.model.preprocess_decode_batch(input_ids=ids, req_infos=entries[::-1])

    return call


def _neighbours_updates(made: Any) -> Any:
    return lambda port, rows, updates: made(port, rows, list(updates)[::-1])


def _copied_late(made: Any) -> Any:
    """Nothing is copied when it is handed in, so what the device writes next is what arrives."""
    return lambda helper, tensors: _Views(tensors)


class _Views:
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors


def _aliasing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BufferHelper, "pack", _copied_late(None))
    patch.setattr(BufferHelper, "unpack", lambda helper, block, like: list(block.tensors))
    patch.setattr(CpuBufferHelper, "fetch", lambda helper, blocks: list(blocks))


def _unchecked_batch(made: Any) -> Any:
    def check(call: Any, raw: Any, *, given_ids: Any, mtp_width: int | None) -> Any:
        hidden, text_step = (raw[2], raw[3]) if mtp_width is not None else (None, None)
        return results.BatchResult(raw[0].reshape(-1), raw[1], hidden, text_step, raw[-1])

    return check


def _written_before_check(patch: pytest.MonkeyPatch) -> None:
    made = mixin._RunnerPort.call_batch

    def call(port: Any, run: Run, infos: Any, ids: torch.Tensor) -> Any:
        raw = made(port, run, infos, ids)
        start = port._plan.offsets[run.start]
        port.embeds[start : start + len(run.rows)].fill_(1)
        return raw

    patch.setattr(mixin._RunnerPort, "call_batch", call)


def _one_generator(made: Any) -> Any:
    def generators(talker: Any, request_ids: Sequence[str]) -> list[torch.Generator | None]:
        own = made(talker, request_ids)
        first = next((generator for generator in own if generator is not None), None)
        return [None if generator is None else first for generator in own]

    return generators


def _replays_seeded(patch: pytest.MonkeyPatch) -> None:
    """Seeded calls take the captured graph, which ignores their generators."""
    made = mtp.TalkerMtp._keywords

    def keywords(talker: Any, call: Any, generators: Any) -> dict[str, Any]:
        return _Seedless(made(talker, call, generators))

    patch.setattr(mtp.TalkerMtp, "_keywords", keywords)


class _Seedless(dict[str, Any]):
    """Keywords that deny having generators when asked, and pass them all the same."""

    def __contains__(self, key: object) -> bool:
        return key not in ("generator", "generators") and super().__contains__(key)


def _padding_written(made: Any) -> Any:
    def check(call: Any, raw: Any) -> Any:
        embeds = raw[0]
        extra = embeds.shape[0] - len(call.rows)
        if extra:
            call.embeds[-extra:].copy_(embeds[-extra:])
        return made(call, raw)

    return check


def _none_clears(made: Any) -> Any:
    def check(call: Any, raw: Any) -> Any:
        embeds, codes = made(call, raw)
        return embeds, torch.zeros(len(call.rows), 5, dtype=torch.int64) if codes is None else codes

    return check


def _rows_of_mtp_reversed(made: Any) -> Any:
    return lambda port, rows: made(port, list(rows)[::-1])


def _key_error(made: Any) -> Any:
    def inputs(call: Any, updates: dict[Any, Any], width: int) -> Any:
        updates[MTP_INPUTS]
        return made(call, updates, width)

    return inputs


def _without_mtp_hook(patch: pytest.MonkeyPatch) -> None:
    made = mixin._RunnerPort.__init__

    def start(port: Any, *args: Any) -> None:
        made(port, *args)
        port.has_batched_hook = port.has_batched_hook and port.mtp_width is None

    patch.setattr(mixin._RunnerPort, "__init__", start)


def _ids_withheld(made: Any) -> Any:
    """With ids absent from input selection, hooks get none."""

    def call(port: Any, row: int, info: dict[str, Any], ids: torch.Tensor, embeds: torch.Tensor) -> Any:
        absent = port._runner.enable_prompt_embeds or port._runner.supports_mm_inputs
        return made(port, row, info, torch.zeros_like(ids) + 1 if absent else ids, embeds)

    return call


def _checks_after_hooks(patch: pytest.MonkeyPatch) -> None:
    """Bad lengths are found out when the hooks have run."""
    refused: list[ContractError] = []
    made, original = plan._refuse, routing.route

    def remember(*args: Any) -> None:
        try:
            made(*args)
        except ContractError as error:
            refused.append(error)

    def route(step: StepPlan, port: Any) -> None:
        original(step, port)
        if refused:
            raise refused.pop()

    patch.setattr(plan, "_refuse", remember)
    patch.setattr(routing, "route", route)


def _new_embeds(patch: pytest.MonkeyPatch) -> None:
    made = mixin._RunnerPort.__init__

    def start(port: Any, runner: Any, phase: Any, step: Any, ids: Any, embeds: torch.Tensor, writes: Any) -> None:
        made(port, runner, phase, step, ids, embeds.clone(), writes)

    patch.setattr(mixin._RunnerPort, "__init__", start)


def _ids(value: Callable[[torch.Tensor | None, Any, int, int], torch.Tensor | None]) -> Patch:
    """Change which token ids are written."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        made = mixin._RunnerPort.write_rows

        def write(port: Any, start: int, ids: torch.Tensor | None, embeds: torch.Tensor) -> None:
            made(port, start, None, embeds)
            ids = value(ids, port, start, embeds.shape[0])
            if ids is not None:
                port.ids[start : start + embeds.shape[0]].copy_(ids)

        patch.setattr(mixin._RunnerPort, "write_rows", write)

    return apply


def _careless_put(made: Any) -> Any:
    def put(helper: Any, dest: torch.Tensor, rows: Any, source: torch.Tensor) -> None:
        target = dest[rows]
        for row in reversed(range(source.shape[0])):
            target[row].copy_(source[row])

    return put


def _always_active(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mixin._Phase, "active", property(lambda phase: True))


def _stored(kept: Sequence[str]) -> Patch:
    """Store names that a hook may not store."""
    return _set(
        routing, "_NEVER_STORED", lambda names: tuple(name for name in names if name not in kept) or ("nothing",)
    )


def _no_reowning(patch: pytest.MonkeyPatch) -> None:
    """Returned fields are stored, and nobody writes the runner's again."""
    _stored(FIELDS)(patch)
    made = routing._own_fields

    def own(step: StepPlan, rows: Sequence[int], infos: list[dict[str, Any]]) -> None:
        if len(rows) < len(step) or getattr(own, "ran", None) != id(step):
            own.ran = id(step)  # type: ignore[attr-defined]
            made(step, rows, infos)

    patch.setattr(routing, "_own_fields", own)


def _private_infos(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mixin._RunnerPort, "infos", _no_copy_of_hook_infos(mixin._RunnerPort.infos))


def _no_fields_in_batches(made: Any) -> Any:
    def call(port: Any, run: Run, infos: list[dict[str, Any]], ids: torch.Tensor) -> Any:
        bare = [{key: value for key, value in info.items() if key not in FIELDS} for info in infos]
        return made(port, run, bare, ids)

    return call


def _shifted_slices(made: Any) -> Any:
    """The scalar hook is handed the whole buffer."""

    def call(port: Any, row: int, info: dict[str, Any], ids: torch.Tensor, embeds: torch.Tensor) -> Any:
        return made(port, row, info, ids, port.embeds)

    return call


def _prefill_in_batches(patch: pytest.MonkeyPatch) -> None:
    """The batched hook takes every one-token row."""
    made = StepPlan.runs

    def runs(step: StepPlan, *, batched: bool) -> Any:
        return made(replace(step, eligible=[span == 1 for span in step.spans]), batched=batched)

    patch.setattr(StepPlan, "runs", runs)


def _raise(*args: Any) -> None:
    raise args[-1]


MUTANTS: tuple[Mutant, ...] = (
    Mutant("span-length-phase", "M5", _phases(lambda p, c, s: s > 1)),
    Mutant("boundary-is-prefill", "M5", _phases(lambda p, c, s: c <= p)),
    Mutant("boundary-off-by-one", "M5", _phases(lambda p, c, s: c < p - 1)),
    Mutant("tail-as-decode", "T2", _eligible(lambda p, c, s: s == 1 and c >= p - 1)),
    Mutant("every-one-token-row", "T2", _eligible(lambda p, c, s: s == 1)),
    Mutant("one-token-prompt-as-decode", "T3", _phases(lambda p, c, s: c < p and p > 1)),
    Mutant("long-decode-span-to-mtp", "T6", _eligible(lambda p, c, s: c >= p)),
    Mutant("crossing-span-as-decode", "E2", _phases(lambda p, c, s: c + s <= p)),
    Mutant("latched-phase", "M8", _latched),
    Mutant("replay-as-prefill", "E3", _replay_is_prefill),
    Mutant("fields-missing-in-batches", "M1", _port("call_batch", _no_fields_in_batches)),
    Mutant("numpy-integers", "M2", _field(contract.PROMPT_LEN, lambda step, row: np.int64(step.prompt_lens[row]))),
    Mutant("numpy-bools", "M2", _field(contract.IS_PREFILL, lambda step, row: np.bool_(step.prefill[row]))),
    Mutant("prompt-length-from-chunk", "M3", _field(contract.PROMPT_LEN, lambda step, row: step.spans[row])),
    Mutant(
        "progress-after-span",
        "M4",
        _field(contract.NUM_COMPUTED, lambda step, row: step.num_computed[row] + step.spans[row]),
    ),
    Mutant("fields-only-when-absent", "M6", _set(routing, "_own_fields", _only_when_absent)),
    Mutant("scheduler-order", "M7", _scheduler_order),
    Mutant("private-infos", "M9", _private_infos),
    Mutant("returned-fields-win", "M9", _no_reowning),
    Mutant("batch-hook-late", "M10", _batch_hook("late")),
    Mutant("batch-hook-twice", "M10", _batch_hook("twice")),
    Mutant("batch-hook-after-fields", "M6", _batch_hook_after_fields),
    Mutant("hooks-without-has-preprocess", "R1", _always_active),
    Mutant("prefill-rows-in-batches", "R2", _prefill_in_batches),
    Mutant("entries-reversed", "R3", _port("call_batch", _keywords_reversed)),
    Mutant("late-flush", "R4", _set(StepPlan, "runs", _late_flush)),
    Mutant("batched-hook-ignored-with-mtp", "R5", _without_mtp_hook),
    Mutant("new-embeddings-tensor", "R6", _new_embeds),
    Mutant("ids-never-copied", "R7", _ids(lambda ids, port, start, rows: None)),
    Mutant(
        "ids-always-copied",
        "R7",
        _ids(lambda ids, port, start, rows: port.ids[start : start + rows].clone() if ids is None else ids),
    ),
    Mutant("neighbours-updates", "R8", _port("store_updates", _neighbours_updates)),
    Mutant("whole-buffer-to-scalar-hook", "R9", _port("call_scalar", _shifted_slices)),
    Mutant("ids-withheld", "R10", _port("call_scalar", _ids_withheld)),
    Mutant("mtp-rows-reversed", "T1", _port("run_mtp", _rows_of_mtp_reversed)),
    Mutant("row-numbers-as-offsets", "T4", _set(mixin.PhaseRoutingMixin, "_talker_mtp_forward", _row_numbers)),
    Mutant("shared-codes", "T5", _set(state.StateWrites, "store_codes", _shared_codes)),
    Mutant("mtp-without-rows", "T7", _set(routing, "route", _mtp_always)),
    Mutant("one-generator-for-all", "T8", _set(mtp.TalkerMtp, "_generators", _one_generator)),
    Mutant("seeded-rows-replayed", "T8", _replays_seeded),
    Mutant("aliasing-results", "T9", _aliasing),
    Mutant("padding-written", "T10", _set(results, "mtp_result", _padding_written)),
    Mutant("no-codes-clears", "T11", _set(results, "mtp_result", _none_clears)),
    Mutant(
        "no-token-ids-no-prompt",
        "E1",
        _set(mixin, "_prompt_len", lambda made: lambda state, *_: len(getattr(state, "prompt_token_ids", None) or ())),
    ),
    Mutant("overlay-missing", "E1", _set(mixin, "_overlay_prompt_embeds", lambda made: lambda *args: None)),
    Mutant("lengths-unchecked", "E4", _set(plan, "_refuse", lambda made: lambda *args: None)),
    Mutant("lengths-checked-late", "E4", _checks_after_hooks),
    Mutant("deviations-silent", "E5", _set(results.Deviations, "report", lambda made: lambda *args: None)),
    Mutant("deviations-always-raise", "E5", _set(results.Deviations, "report", lambda made: _raise)),
    Mutant("embeddings-unchecked", "E5", _set(results, "_check_embeds", lambda made: lambda *args: None)),
    Mutant("batches-unchecked", "E5b", _set(results, "batch_result", _unchecked_batch)),
    Mutant("written-before-check", "E5b", _written_before_check),
    Mutant("mtp-inputs-stored", "E6", _stored((MTP_INPUTS,))),
    Mutant("missing-inputs-key-error", "E7", _set(results, "_mtp_inputs", _key_error)),
    Mutant("careless-overlap", "E8", _set(BufferHelper, "put", _careless_put)),
)
