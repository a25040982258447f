# SPDX-License-Identifier: Apache-2.0
"""What a decode step costs on the device: counted, with the work of hooks and MTP excluded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_npu_phase.bench import talker as talkers
from omni_npu_phase.bench.steps import Case, Mix, Steps, engineless
from omni_npu_phase.bench.talker import Talker, Updates
from omni_npu_phase.buffers.ascend import AscendBufferHelper
from omni_npu_phase.buffers.staging import PinnedStaging
from omni_npu_phase.conformance import verify
from omni_npu_phase.conformance.bench import scheduler_output
from omni_npu_phase.conformance.drive import run_scenario
from omni_npu_phase.conformance.recording_model import HIDDEN
from omni_npu_phase.conformance.scenarios import BY_ID, MTP, Hook, Variant, row

ROWS = (1, 8, 64, 256)


def count_step(
    cls: type,
    rows: int,
    hook: Hook,
    updates: Updates,
    resident: bool,
    device: torch.device,
    emulated: Any,
    scattered: bool = False,
) -> Any:
    """Counts of the third of three steps, and the runner. ``scattered``: a prompt chunk lies among the decode rows."""
    # The chunk grows from step to step, so that every step has offsets of its own in the same batch.
    mix: Mix = "mixed" if scattered else "decode"
    case = Case(rows + scattered, HIDDEN, hook, mix, updates, resident, torch.float32, chunk=2)
    with engineless():
        steps = Steps(cls, case, device, kinds=3 if scattered else 1)
        torch.npu.synchronize()
        with emulated.counting() as whole:
            for number in range(3):
                steps.prepare()
                steps.place(number if scattered else 0)
                with emulated.counting() as counting:
                    steps.take()
    # A wait between the steps would hide what is used too early; the bench makes none.
    assert whole.counts.host_syncs in (0, 3 * counting.counts.host_syncs)
    return counting, steps.runner


def check_step(
    cls: type, rows: int, hook: Hook, updates: Updates, resident: bool, scattered: bool, *where: Any
) -> None:
    """One transfer and one wait at most, one pinned upload at most, no hazard; results right and owned (T9)."""
    counting, runner = count_step(cls, rows, hook, updates, resident, *where, scattered)
    counts, talker = counting.counts, runner.model
    to_host = int(not resident or bool(talker.frame_marks))
    assert (counts.d2h, counts.host_syncs) == (to_host, to_host)
    # Rows in sequence need no index.
    assert (counts.h2d_async, counts.h2d_sync) == (int(scattered and rows > 1), 0)
    counting.assert_no_hazards()
    # Nothing that grows with rows. Scattered: a hook call on each side of the chunk, and what the chunk itself stores.
    # For one transfer, marks of rows that leave the device are joined, and codes and updates that leave it packed.
    packed = updates == "talker" and not resident
    limit = 12 + bool(talker.frame_marks) + packed if scattered else 9
    assert counts.d2d + counts.kernels <= limit, (counts.d2d, counts.kernels)
    with torch.inference_mode():
        talker.codes.zero_()
    for number in range(rows):
        info = runner.model_intermediate_buffer[f"r{number}"]
        codes = info["codes"]["audio"]
        assert codes.device.type == ("npu" if resident else "cpu")
        assert codes.tolist() == [list(range(16 * number, 16 * number + 16))]
        if talker.frame_marks:
            assert info["meta"]["codec_frame_valid"].item() is True
        if updates == "talker":
            assert info["meta"]["talker_text_offset"] == 2


@pytest.mark.parametrize("scattered", [False, True], ids=["sequence", "scattered"])
@pytest.mark.parametrize("resident", [True, False], ids=["resident", "host"])
@pytest.mark.parametrize("updates", ["toy", "talker"])
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
    check_step(runner.autoregressive, rows, hook, updates, resident, scattered, device, emulated)


# Mutants of the helper, each caught by the same check.


def _pageable(staging: Any, dest: torch.Tensor, source: torch.Tensor) -> None:
    dest.copy_(source, non_blocking=True)


def _narrow_index(helper: Any, values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).to(helper.device)


def _not_copied(helper: Any, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _row_copies(helper: Any, dest: torch.Tensor, source: torch.Tensor) -> None:
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
        ({(AscendBufferHelper, "_stage"): _narrow_index}, True, (RuntimeError, IndexError), "index"),
        ({(AscendBufferHelper, "snapshot"): _not_copied}, True, AssertionError, "0, 0, 0, 0"),
        ({(PinnedStaging, "_free_slot"): _reused_early}, True, AssertionError, "pinned source"),
        ({(AscendBufferHelper, "fetch"): _copied_one_by_one}, False, AssertionError, r"\(8, 8\) == \(1, 1\)"),
        ({(AscendBufferHelper, "copy"): _row_copies}, True, AssertionError, r"<= 12"),
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
        check_step(runner.autoregressive, 8, "batched", "toy", resident, True, device, emulated)
    torch.npu.synchronize()


def test_the_released_runner_aliases(device: Any, emulated: Any) -> None:
    """It asks `is_cuda` before it copies, which no NPU tensor answers with yes."""
    released = verify.load_runner("npu-v1").autoregressive
    _, instance = count_step(released, 8, "batched", "toy", False, device, emulated)
    with torch.inference_mode():
        instance.model.codes.zero_()
    assert instance.model_intermediate_buffer["r3"]["codes"]["audio"].eq(0).all()


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "host"])
def test_host_tensors_are_stored_beside_device_tensors(
    resident: bool, runner: verify.RunnerClasses, device: Any, emulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes that MTP makes on the host, and a host tensor among a hook's updates, resident or not, as released."""
    made = torch.arange(128).reshape(8, 16)
    monkeypatch.setattr(Talker, "talker_mtp", lambda talker, ids, *rest, **_: (talker.hidden[: ids.shape[0]], made))
    own = {"hidden_states": {"last": torch.ones(4)}, "x": made}
    monkeypatch.setattr(talkers.Qwen3Tts, "batched", lambda talker, rows: [own] * 8)
    monkeypatch.setattr(talkers, "_anew", lambda updates: updates)
    counting, instance = count_step(runner.autoregressive, 8, "batched", "talker", resident, device, emulated)
    info = instance.model_intermediate_buffer["r3"]
    assert info["codes"]["audio"].tolist() == [list(range(48, 64))]
    assert info["codes"]["audio"].data_ptr() != made[3:4].data_ptr()
    assert info["hidden_states"]["last"].tolist() == [1.0] * 4
    assert info["x"].tolist() == made.tolist()
    assert info["x"].data_ptr() != made.data_ptr()
    assert counting.counts.d2h == 0


def test_what_postprocess_stores_leaves_together(runner: verify.RunnerClasses, device: Any, emulated: Any) -> None:
    _, instance = count_step(runner.autoregressive, 8, "batched", "toy", True, device, emulated)
    instance.model.gpu_resident_buffer_keys = set()
    hidden = torch.arange(8.0 * HIDDEN).reshape(8, HIDDEN).to(device)
    scheduled = scheduler_output(tuple(row(f"r{n}", 2, 2, 1, MTP) for n in range(8)))
    torch.npu.synchronize()
    with emulated.counting() as counting, torch.inference_mode():
        instance._process_additional_information_updates(hidden, None, [1] * 8, scheduled)
    assert (counting.counts.d2h, counting.counts.host_syncs) == (1, 1)
    hidden.zero_()
    kept = instance.model_intermediate_buffer["r5"]["hidden_states"]["last"]
    assert kept.tolist() == [[float(5 * HIDDEN + column) for column in range(HIDDEN)]]


def test_mixed_rows_leave_no_hazard(runner: verify.RunnerClasses, device: Any, emulated: Any) -> None:
    """Scattered decode rows: MTP inputs and results share one index, uploaded from pinned memory."""
    with emulated.counting() as counting:
        record = run_scenario(runner.autoregressive, BY_ID["mixed"], Variant("batched", True), device)
    assert record.error is None
    assert [placed.shows for placed in record.steps[0].rows].count(MTP) == 3
    assert counting.counts.h2d_async > 0
    counting.assert_no_hazards()
