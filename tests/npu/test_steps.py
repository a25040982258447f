# SPDX-License-Identifier: Apache-2.0
"""What a decode step costs on the device: counted, with the work of hooks and MTP excluded."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from omni_npu_phase.bench.models import Updates
from omni_npu_phase.bench.steps import Case, Mix, Steps, around_hooks, engineless
from omni_npu_phase.buffers.staging import PinnedStaging, StagedBufferHelper
from omni_npu_phase.conformance import verify
from omni_npu_phase.conformance.bench import scheduler_output
from omni_npu_phase.conformance.drive import run_scenario
from omni_npu_phase.conformance.recording_model import HIDDEN
from omni_npu_phase.conformance.scenarios import BY_ID, MTP, Hook, Variant
from omni_npu_phase.emulated_ascend.device import Counts

ROWS = (1, 8, 64)


class Counted(NamedTuple):
    """The third of three steps, hooks and MTP left out, and the hazards of all three."""

    counts: Counts
    hazards: tuple[str, ...]
    steps: Steps


def count_step(cls: type, case: Case, device: torch.device, emulated: Any) -> Counted:
    """Take three steps, with no wait between them, which would hide what is used too early."""
    spent: list[Counts] = []

    def apart(hook: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            with emulated.counting() as counting:
                result = hook(*args, **keywords)
            spent.append(counting.counts)
            return result

        return call

    with engineless():
        steps = Steps(cls, case, device)
        torch.npu.synchronize()
        with around_hooks(steps.model, apart), emulated.counting() as whole:
            for number in range(3):
                _lengthen_chunk(steps, number)
                spent.clear()
                with emulated.counting() as counting:
                    steps.take()
    counts = counting.counts
    for own in spent:
        counts = counts - own
    return Counted(counts, whole.hazards, steps)


def _lengthen_chunk(steps: Steps, by: int) -> None:
    """The same rows with a longer chunk, so that every step has offsets of its own."""
    rows = tuple(replace(each, span=each.span + by * (each.request == "prompt")) for each in steps.rows)
    starts = [0, *itertools.accumulate(each.span for each in rows)]
    steps.runner.query_start_loc.np[: len(starts)] = starts
    steps._scheduled, steps._tokens = scheduler_output(rows), starts[-1]


def check_step(cls: type, case: Case, device: torch.device, emulated: Any) -> None:
    """One transfer and one wait at most, one pinned upload at most, no hazard; results right and owned (T9)."""
    counts, hazards, steps = count_step(cls, case, device, emulated)
    assert not hazards
    scattered, speaks = case.mix == "mixed", case.updates == "qwen3-tts"
    # Qwen3-TTS marks its frames from 0.30 on.
    marks = speaks and "codec_frame_valid" in steps.live()["r0"]["meta"]
    to_host = int(not case.resident or marks)
    assert (counts.d2h, counts.host_syncs) == (to_host, to_host)
    # Rows in sequence need no index.
    assert (counts.h2d_async, counts.h2d_sync) == (int(scattered and case.rows > 1), 0)
    # A scalar row: its id and three parts one by one, and its mark. One more where codes and marks leave packed.
    limit = 9 if case.hook == "batched" else (4 + marks) * case.rows + 5
    if scattered:
        # A batched hook is called twice, before and behind the chunk, and the chunk has rows and updates of its own.
        limit += 11 if case.hook == "batched" else 4
    limit += marks and not case.resident
    assert counts.d2d + counts.kernels <= limit, (counts.d2d, counts.kernels)
    codes = steps.model.talker_mtp(torch.empty(case.rows))[1]
    wanted = codes.tolist()
    with torch.inference_mode():
        codes.zero_()
    for number in range(case.rows):
        info = steps.live()[f"r{number}"]
        stored = info["codes"]["audio"]
        assert stored.device.type == ("npu" if case.resident else "cpu")
        assert stored.tolist() == [wanted[number]]
        if marks:
            assert info["meta"]["codec_frame_valid"].item() is True
        if speaks:
            assert info["meta"]["talker_text_offset"] == 3


# What runs here runs in the tests of the mutants too, where it is counted.
@pytest.mark.parametrize("scattered", [False, True], ids=["sequence", "scattered"])
@pytest.mark.parametrize("resident", [True, False], ids=["resident", "host"])
@pytest.mark.parametrize("updates", ["toy", "qwen3-tts"])
@pytest.mark.parametrize("hook", ["batched", "scalar"])
@pytest.mark.parametrize("rows", ROWS)
def test_transfers_and_waits_do_not_grow_with_rows(
    rows: int,
    hook: Hook,
    updates: Updates,
    resident: bool,
    scattered: bool,
    runner: verify.RunnerClasses,
    device: Any,
    emulated: Any,
) -> None:
    mix: Mix = "mixed" if scattered else "decode"
    check_step(runner.autoregressive, Case(rows, HIDDEN, hook, mix, updates, resident, chunk=2), device, emulated)


def _toys(resident: bool, mix: Mix = "decode") -> Case:
    return Case(8, HIDDEN, "batched", mix, resident=resident, chunk=2)


# Mutants of the helper, each caught by the same check.


def _pageable(staging: Any, dest: torch.Tensor, source: torch.Tensor) -> None:
    dest.copy_(source, non_blocking=True)


def _narrow_index(helper: Any, values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).to(helper.device)


def _not_copied(helper: Any, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _row_copies(helper: Any, dests: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for dest, source in zip(dests, sources, strict=True):
        for index in range(source.shape[0]):
            dest[index].copy_(source[index])


def _reused_early(staging: Any, size: int) -> Any:
    slot = staging._slots[0]
    if slot.memory.numel() < size:
        slot.memory = torch.empty(4096, dtype=torch.uint8, pin_memory=True)
    return slot


def _copied_one_by_one(helper: Any, blocks: Any) -> list[torch.Tensor]:
    return [torch.stack([piece.to("cpu") for piece in block]) for block in blocks]


@pytest.mark.parametrize(
    ("changes", "resident", "expected", "caught"),
    [
        ({(PinnedStaging, "upload"): _pageable}, True, AssertionError, r"\(0, 1\) == \(0, 0\)"),
        ({(StagedBufferHelper, "_stage"): _narrow_index}, True, (RuntimeError, IndexError), "index"),
        ({(StagedBufferHelper, "snapshot"): _not_copied}, True, AssertionError, "0, 0, 0, 0"),
        ({(PinnedStaging, "_free_slot"): _reused_early}, True, AssertionError, "pinned source"),
        ({(StagedBufferHelper, "fetch"): _copied_one_by_one}, False, AssertionError, r"\(8, 8\) == \(1, 1\)"),
        ({(StagedBufferHelper, "copy_all"): _row_copies}, True, AssertionError, r"<= 20"),
    ],
    ids=["pageable-upload", "int32-index", "missing-snapshot", "early-reuse", "per-tensor-copies", "per-row-copies"],
)
def test_mutants_of_the_helper_are_caught(
    changes: dict[Any, Any],
    resident: bool,
    expected: Any,
    caught: str,
    runner: verify.RunnerClasses,
    device: Any,
    emulated: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for (owner, name), mutated in changes.items():
        monkeypatch.setattr(owner, name, mutated)
    with pytest.raises(expected, match=caught):
        check_step(runner.autoregressive, _toys(resident, "mixed"), device, emulated)
    torch.npu.synchronize()


def test_the_released_runner_aliases(device: Any, emulated: Any) -> None:
    """It asks `is_cuda` before it copies, which no NPU tensor answers with yes."""
    released = verify.load_runner("npu-v1").autoregressive
    *_, steps = count_step(released, _toys(resident=False), device, emulated)
    with torch.inference_mode():
        steps.model.talker_mtp(torch.empty(8))[1].zero_()
    assert steps.live()["r3"]["codes"]["audio"].eq(0).all()


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "host"])
def test_host_tensors_are_stored_beside_device_tensors(
    resident: bool, runner: verify.RunnerClasses, device: Any, emulated: Any
) -> None:
    """Codes that MTP makes on the host, and a host tensor among a hook's updates, resident or not, as released."""
    made = torch.arange(128).reshape(8, 16)
    own = {"hidden_states": {"last": torch.ones(4)}, "x": made}
    with engineless():
        steps = Steps(runner.autoregressive, _toys(resident), device)
        embeds = torch.ones(8, HIDDEN, dtype=torch.bfloat16, device=device)
        steps.model.talker_mtp = lambda *_, **__: (embeds, made)
        steps.model.preprocess_decode_batch = lambda input_ids, req_infos: (input_ids, *[embeds] * 3, [own] * 8)
        with emulated.counting() as counting:
            steps.take()
    info = steps.live()["r3"]
    assert info["codes"]["audio"].tolist() == [list(range(48, 64))]
    assert info["codes"]["audio"].data_ptr() != made[3:4].data_ptr()
    assert info["hidden_states"]["last"].tolist() == [1.0] * 4
    assert info["x"].tolist() == made.tolist()
    assert info["x"].data_ptr() != made.data_ptr()
    assert counting.counts.d2h == 0


def test_what_postprocess_stores_leaves_together(runner: verify.RunnerClasses, device: Any, emulated: Any) -> None:
    *_, steps = count_step(runner.autoregressive, _toys(resident=True), device, emulated)
    steps.model.gpu_resident_buffer_keys = set()
    with torch.inference_mode():
        steps.hidden[:8].copy_(torch.arange(8).unsqueeze(1).expand(8, HIDDEN))
    torch.npu.synchronize()
    with emulated.counting() as counting, torch.inference_mode():
        steps.postprocess(steps.rows)
    assert (counting.counts.d2h, counting.counts.host_syncs) == (1, 1)
    with torch.inference_mode():
        steps.hidden.zero_()
    assert steps.live()["r5"]["hidden_states"]["last"].tolist() == [[5.0] * HIDDEN]


def test_mixed_rows_leave_no_hazard(runner: verify.RunnerClasses, device: Any, emulated: Any) -> None:
    """Scattered decode rows: MTP inputs and results share one index, uploaded from pinned memory."""
    with emulated.counting() as counting:
        record = run_scenario(runner.autoregressive, BY_ID["mixed"], Variant("batched", True), device)
    assert record.error is None
    assert [placed.shows for placed in record.steps[0].rows].count(MTP) == 3
    assert counting.counts.h2d_async > 0
    counting.assert_no_hazards()
