# SPDX-License-Identifier: Apache-2.0
"""What a decode step costs on the device: counted, with the work of hooks and MTP excluded."""

from __future__ import annotations

import importlib
import itertools
import sys
from functools import cache
from typing import Any

import pytest
import torch

from omni_npu_phase.buffers.ascend import AscendBufferHelper
from omni_npu_phase.buffers.staging import PinnedStaging
from omni_npu_phase.conformance import driver, suite
from omni_npu_phase.conformance.model import HIDDEN
from omni_npu_phase.conformance.scenarios import BY_ID, MTP, PREFILL, Hook, Scenario, row, step
from omni_npu_phase.testing import torchaudio_standin

ROWS = (1, 8, 64)
CODES = ("codes", "audio")


@cache
def _qwen3_tts() -> type:
    """The installed Qwen3-TTS talker. Its module imports torchaudio, for mel filters that no decode step computes."""
    torchaudio_standin.install()
    module = importlib.import_module("vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_talker")
    talker: type = module.Qwen3TTSTalkerForConditionalGeneration
    return talker


def talker_updates(rows: int, device: torch.device) -> list[dict[str, Any]]:
    """Updates of decode rows in the middle of their text, from the installed Qwen3-TTS's own batched hook."""
    cls: Any = _qwen3_tts()
    talker = object.__new__(cls)
    torch.nn.Module.__init__(talker)
    talker._embedding_dtype, talker._codebook_vocab_size = torch.float32, 2048
    talker._tts_pad_embed = torch.zeros(1, HIDDEN, device=device)
    talker.embed_input_ids = lambda ids: torch.zeros(ids.shape[0], 1, HIDDEN, device=device)
    trailing = torch.ones(8, HIDDEN, device=device)
    infos = [
        {
            "text": ["text"],
            "hidden_states": {"last": torch.ones(HIDDEN, device=device), "trailing_text": trailing},
            "meta": {"talker_text_offset": 1},
        }
        for _ in range(rows)
    ]
    ids = torch.arange(rows).to(device)
    updates: list[dict[str, Any]] = talker.preprocess_decode_batch(input_ids=ids, req_infos=infos)[-1]
    return updates


class Talker:
    """A model whose hooks and MTP hand out tensors made beforehand, so that only the runner's work is counted.

    ``updates``: ``toy``, none; or ``talker``, those that the installed Qwen3-TTS makes itself for decode rows.
    """

    has_preprocess = has_postprocess = True
    talker_mtp_graph_safe = False
    mtp_hidden_size = HIDDEN
    requires_raw_input_tokens = False

    def __init__(self, rows: int, hook: Hook, updates: str, resident: bool, device: torch.device) -> None:
        self.talker_mtp_output_key = CODES
        # As Qwen3-TTS, but for its codes: whether those stay on the device is what is counted both ways.
        self.gpu_resident_buffer_keys = {
            ("hidden_states", "last"),
            ("hidden_states", "trailing_text"),
            *([CODES] if resident else []),
        }
        self.hidden = torch.ones(rows, HIDDEN, device=device)
        self.codes = torch.arange(rows * 16, device="cpu").reshape(rows, 16).to(device)
        self.rows_of = self.hidden.split(1)
        self.updates: list[dict[str, Any]] = [{}] * rows if updates == "toy" else talker_updates(rows, device)
        self._next = 0
        if hook == "batched":
            self.preprocess_decode_batch = self._batch

    @property
    def frame_marks(self) -> list[torch.Tensor]:
        """The device scalar in each row's update that says whether its frame is valid; before 0.30 there is none."""
        marks = [update.get("meta", {}).get("codec_frame_valid") for update in self.updates]
        return [mark for mark in marks if mark is not None]

    def preprocess(self, input_ids: torch.Tensor, input_embeds: torch.Tensor, **info: Any) -> Any:
        if info["_omni_is_prefill"]:
            return input_ids, input_embeds, {}
        index, self._next = self._next, self._next + 1
        own = self.rows_of[index]
        return input_ids, own, {"mtp_inputs": (own, own), **self.updates[index]}

    def _batch(self, input_ids: torch.Tensor, req_infos: list[dict[str, Any]]) -> Any:
        own = slice(self._next, self._next + len(req_infos))
        self._next = own.stop
        return input_ids, self.hidden[own], self.hidden[own], self.hidden[own], self.updates[own]

    def talker_mtp(self, ids: Any, embeds: Any, hidden: Any, text: Any, **_: Any) -> Any:
        return self.hidden[: ids.shape[0]], self.codes[: ids.shape[0]]

    def postprocess(self, hidden_states: torch.Tensor, **_: Any) -> dict[str, Any]:
        return {"hidden_states": {"last": hidden_states[-1:]}}


def count_step(
    cls: type,
    rows: int,
    hook: Hook,
    updates: str,
    resident: bool,
    device: torch.device,
    emulated: Any,
    scattered: bool = False,
) -> Any:
    """Counts of the third of three steps, and the runner. ``scattered``: a prompt chunk lies among the decode rows."""
    decodes = [row(f"r{number}", 2, 2 + number % 3, 1, MTP) for number in range(rows)]
    # The chunk grows from step to step, so that every step has offsets of its own in the same batch.
    chunks = [row("prompt", 20, 4 * number, 2 + number, PREFILL) for number in range(3 if scattered else 0)]
    steps = [step(*decodes[:1], *chunks[number : number + 1], *decodes[1:]) for number in range(3)]
    case = Scenario("counted", "decode rows", (), tuple(steps))
    talker = Talker(rows, hook, updates, resident, device)
    with driver._single_stage(), torch.inference_mode():
        bench = driver._Bench(cls, case, driver.Variant(hook, True), device, {r.request: 1 for r in steps[0]})
        runner = bench.runner
        runner.model, runner.talker_mtp = talker, talker.talker_mtp
        starts = [[0, *itertools.accumulate(each.span for each in placed)] for placed in steps]
        bench._update_requests(steps[0])
        bench._fill_inputs(steps[0], starts[0])
        torch.npu.synchronize()
        with emulated.counting() as whole:
            for placed, offsets in zip(steps, starts, strict=True):
                talker._next = 0
                runner.input_batch.num_computed_tokens_cpu[: len(placed)] = [each.computed for each in placed]
                runner.query_start_loc.cpu[: len(offsets)] = torch.tensor(offsets)
                scheduled = driver._scheduler_output(placed, reverse=False)
                with emulated.counting() as counting:
                    runner._preprocess(scheduled, offsets[-1])
    # A wait between the steps would hide what is used too early; the driver makes none.
    assert whole.counts.host_syncs in (0, 3 * counting.counts.host_syncs)
    return counting, runner


def check_step(cls: type, rows: int, hook: Hook, updates: str, resident: bool, scattered: bool, *where: Any) -> None:
    """One transfer and one wait at most, one pinned upload at most, no hazard; results right and owned (T9)."""
    counting, runner = count_step(cls, rows, hook, updates, resident, *where, scattered)
    counts, talker = counting.counts, runner.model
    to_host = int(not resident or bool(talker.frame_marks))
    assert (counts.d2h, counts.host_syncs) == (to_host, to_host)
    # Rows in sequence need no index.
    assert (counts.h2d_async, counts.h2d_sync) == (int(scattered and rows > 1), 0)
    counting.assert_no_hazards()
    for tensor in (talker.codes, *talker.frame_marks):
        tensor.zero_()
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
    updates: str,
    resident: bool,
    scattered: bool,
    runner: suite.RunnerClasses,
    device: Any,
    emulated: Any,
) -> None:
    check_step(runner.autoregressive, rows, hook, updates, resident, scattered, device, emulated)


# Mutants of the helper, each caught by the same check.


def _pageable(staging: Any, dest: torch.Tensor, source: torch.Tensor) -> None:
    dest.copy_(source, non_blocking=True)


def _narrow_index(helper: Any, values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).to(helper.device)


def _not_copied(helper: Any, tensors: Any) -> Any:
    return list(tensors)


def _as_handed_in(helper: Any, block: Any, like: Any) -> Any:
    return block


def _reused_early(staging: Any, size: int) -> Any:
    slot = staging._slots[0]
    if slot.memory.numel() < size:
        slot.memory = torch.empty(4096, dtype=torch.uint8, pin_memory=True)
    return slot


def _copied_one_by_one(helper: Any, blocks: Any) -> list[torch.Tensor]:
    return [torch.cat([piece.to("cpu") for piece in block.split(128)]) for block in blocks]


@pytest.mark.parametrize(
    ("changes", "resident", "expected", "caught"),
    [
        ({(PinnedStaging, "upload"): _pageable}, True, AssertionError, r"\(0, 1\) == \(0, 0\)"),
        ({(AscendBufferHelper, "_stage"): _narrow_index}, True, (RuntimeError, IndexError), "index"),
        (
            {
                (AscendBufferHelper, "pack"): _not_copied,
                (AscendBufferHelper, "unpack"): lambda helper, block, like: block,
            },
            True,
            AssertionError,
            "0, 0, 0, 0",
        ),
        ({(PinnedStaging, "_free_slot"): _reused_early}, True, AssertionError, "pinned source"),
        ({(AscendBufferHelper, "fetch"): _copied_one_by_one}, False, AssertionError, r"\(8, 8\) == \(1, 1\)"),
    ],
    ids=["pageable-upload", "int32-index", "missing-snapshot", "early-reuse", "per-tensor-copies"],
)
def test_mutants_of_the_helper_are_caught(
    changes: dict[Any, Any],
    resident: bool,
    expected: Any,
    caught: str,
    runner: suite.RunnerClasses,
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
    released = suite.load_runner("npu-v1").autoregressive
    _, instance = count_step(released, 8, "batched", "toy", False, device, emulated)
    instance.model.codes.zero_()
    assert instance.model_intermediate_buffer["r3"]["codes"]["audio"].eq(0).all()


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "host"])
def test_host_tensors_are_stored_beside_device_tensors(
    resident: bool, runner: suite.RunnerClasses, device: Any, emulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes that MTP makes on the host, and a host tensor among a hook's updates, resident or not, as released."""
    made = torch.arange(128).reshape(8, 16)
    monkeypatch.setattr(Talker, "talker_mtp", lambda talker, ids, *rest, **_: (talker.hidden[: ids.shape[0]], made))
    monkeypatch.setattr(
        sys.modules[__name__],
        "talker_updates",
        lambda rows, _: [{"hidden_states": {"last": torch.ones(4)}, "x": made}] * 8,
    )
    counting, instance = count_step(runner.autoregressive, 8, "batched", "talker", resident, device, emulated)
    info = instance.model_intermediate_buffer["r3"]
    assert info["codes"]["audio"].tolist() == [list(range(48, 64))]
    assert info["codes"]["audio"].data_ptr() != made[3:4].data_ptr()
    assert info["hidden_states"]["last"].tolist() == [1.0] * 4
    assert info["x"].data_ptr() == made.data_ptr()
    assert counting.counts.d2h == 0


def test_what_postprocess_stores_leaves_together(runner: suite.RunnerClasses, device: Any, emulated: Any) -> None:
    _, instance = count_step(runner.autoregressive, 8, "batched", "toy", True, device, emulated)
    instance.model.gpu_resident_buffer_keys = set()
    hidden = torch.arange(8.0 * HIDDEN).reshape(8, HIDDEN).to(device)
    scheduled = driver._scheduler_output(tuple(row(f"r{n}", 2, 2, 1, MTP) for n in range(8)), reverse=False)
    torch.npu.synchronize()
    with emulated.counting() as counting:
        instance._process_additional_information_updates(hidden, None, [1] * 8, scheduled)
    assert (counting.counts.d2h, counting.counts.host_syncs) == (1, 1)
    hidden.zero_()
    kept = instance.model_intermediate_buffer["r5"]["hidden_states"]["last"]
    assert kept.tolist() == [[float(5 * HIDDEN + column) for column in range(HIDDEN)]]


def test_mixed_rows_leave_no_hazard(runner: suite.RunnerClasses, device: Any, emulated: Any) -> None:
    """Scattered decode rows: MTP inputs and results share one index, uploaded from pinned memory."""
    with emulated.counting() as counting:
        record = driver.run_scenario(runner.autoregressive, BY_ID["mixed"], driver.Variant("batched", True), device)
    assert record.error is None
    assert [placed.shows for placed in record.steps[0].rows].count(MTP) == 3
    assert counting.counts.h2d_async > 0
    counting.assert_no_hazards()
