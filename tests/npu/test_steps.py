# SPDX-License-Identifier: Apache-2.0
"""What a decode step costs on the device: counted, with the work of hooks and MTP excluded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_npu_phase.conformance import driver, suite
from omni_npu_phase.conformance.model import HIDDEN
from omni_npu_phase.conformance.scenarios import BY_ID, MTP, Hook, Scenario, row, step

ROWS = (1, 8, 64)
CODES = ("codes", "audio")


class Talker:
    """A model whose hooks and MTP hand out tensors made beforehand, so that only the runner's work is counted.

    ``updates``: ``toy``, none; or ``talker``, as Qwen3-TTS returns for every decode row: a device scalar that marks the
    frame as valid, hidden states that stay on the device, and plain values.
    """

    has_preprocess = has_postprocess = True
    talker_mtp_graph_safe = False
    mtp_hidden_size = HIDDEN
    requires_raw_input_tokens = False

    def __init__(self, rows: int, hook: Hook, updates: str, resident: bool, device: torch.device) -> None:
        self.talker_mtp_output_key = CODES
        self.gpu_resident_buffer_keys = {("hidden_states", "last"), *([CODES] if resident else [])}
        self.hidden = torch.ones(rows, HIDDEN, device=device)
        self.codes = torch.arange(rows * 16, device="cpu").reshape(rows, 16).to(device)
        self.valid = torch.ones(rows, dtype=torch.bool).to(device)
        self.rows_of = self.hidden.split(1)
        self.valid_of = self.valid.unbind(0)
        self._updates = updates
        self._next = 0
        if hook == "batched":
            self.preprocess_decode_batch = self._batch

    def _update(self, index: int) -> dict[str, Any]:
        if self._updates == "toy":
            return {}
        return {
            "meta": {"codec_frame_valid": self.valid_of[index], "talker_text_offset": index},
            "hidden_states": {"last": self.rows_of[index]},
        }

    def preprocess(self, input_ids: torch.Tensor, input_embeds: torch.Tensor, **info: Any) -> Any:
        index, self._next = self._next, self._next + 1
        own = self.rows_of[index]
        return input_ids, own, {"mtp_inputs": (own, own), **self._update(index)}

    def _batch(self, input_ids: torch.Tensor, req_infos: list[dict[str, Any]]) -> Any:
        return input_ids, self.hidden, self.hidden, self.hidden, [self._update(row) for row in range(len(req_infos))]

    def talker_mtp(self, ids: Any, embeds: Any, hidden: Any, text: Any, **_: Any) -> Any:
        return self.hidden[: ids.shape[0]], self.codes[: ids.shape[0]]

    def postprocess(self, hidden_states: torch.Tensor, **_: Any) -> dict[str, Any]:
        return {"hidden_states": {"last": hidden_states[-1:]}}


def count_step(
    cls: type, rows: int, hook: Hook, updates: str, resident: bool, device: torch.device, emulated: Any
) -> Any:
    """Counts of the third of three equal steps, and the runner."""
    decodes = step(*(row(f"r{number}", 2, 2 + number % 3, 1, MTP) for number in range(rows)))
    case = Scenario("counted", "decode rows", (), (decodes,))
    talker = Talker(rows, hook, updates, resident, device)
    with driver._single_stage(), torch.inference_mode():
        bench = driver._Bench(cls, case, driver.Variant(hook, True), device, {r.request: 1 for r in decodes})
        runner = bench.runner
        runner.model, runner.talker_mtp = talker, talker.talker_mtp
        offsets = list(range(rows + 1))
        for _ in range(3):
            talker._next = 0
            bench._update_requests(decodes)
            bench._fill_inputs(decodes, offsets)
            scheduled = driver._scheduler_output(decodes, reverse=False)
            with emulated.counting() as counting:
                runner._preprocess(scheduled, rows)
    return counting, runner


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "host"])
@pytest.mark.parametrize("updates", ["toy", "talker"])
@pytest.mark.parametrize("hook", ["batched", "scalar"])
@pytest.mark.parametrize("rows", ROWS)
def test_transfers_and_waits_do_not_grow_with_rows(
    rows: int, hook: Hook, updates: str, resident: bool, runner: suite.RunnerClasses, device: Any, emulated: Any
) -> None:
    counting, instance = count_step(runner.autoregressive, rows, hook, updates, resident, device, emulated)
    counts = counting.counts
    to_host = int(not resident or updates == "talker")
    assert counts.d2h == to_host
    assert counts.host_syncs == to_host
    assert counts.h2d == 0, "decode rows in sequence need no index"
    counting.assert_no_hazards()
    for number in range(rows):
        info = instance.model_intermediate_buffer[f"r{number}"]
        codes = info["codes"]["audio"]
        assert codes.device.type == ("npu" if resident else "cpu")
        assert codes.tolist() == [list(range(16 * number, 16 * number + 16))]
        if updates == "talker":
            assert info["meta"]["codec_frame_valid"].item() is True


def test_stored_results_are_owned(runner: suite.RunnerClasses, device: Any, emulated: Any) -> None:
    for resident in (True, False):
        _, instance = count_step(runner.autoregressive, 8, "batched", "talker", resident, device, emulated)
        for tensor in (instance.model.codes, instance.model.hidden, instance.model.valid):
            tensor.zero_()
        info = instance.model_intermediate_buffer["r3"]
        assert info["codes"]["audio"].tolist() == [list(range(48, 64))]
        assert info["hidden_states"]["last"].tolist() == [[1.0] * HIDDEN]
        assert info["meta"]["codec_frame_valid"].item() is True


def test_the_released_runner_aliases(device: Any, emulated: Any) -> None:
    """It asks `is_cuda` before it copies, which no NPU tensor answers with yes."""
    released = suite.load_runner("npu-v1").autoregressive
    _, instance = count_step(released, 8, "batched", "toy", False, device, emulated)
    instance.model.codes.zero_()
    assert instance.model_intermediate_buffer["r3"]["codes"]["audio"].eq(0).all()


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
