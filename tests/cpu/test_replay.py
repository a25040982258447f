# SPDX-License-Identifier: Apache-2.0
"""Exact replay beside its clauses: what it holds, what it leaves when memory is short, and what it sends on."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from omni_npu_phase import PhaseRoutingMixin, settings
from omni_npu_phase.bench.counts import Operations
from omni_npu_phase.contract import Row
from omni_npu_phase.releases import UnsupportedRuntimeError
from omni_npu_phase.step.plan import StepPlan, plan_step
from omni_npu_phase.step.port import phase_of
from omni_npu_phase.step.replay import BLOCK, Given, Replay

HIDDEN = 4
CPU = torch.device("cpu")


class Steps:
    """Steps of a runner that does nothing but replay. Embeddings and ids name their request and position."""

    def __init__(self, mib: int = 1, prompt_len: int = 3) -> None:
        self.runner = SimpleNamespace(requests={}, input_batch=SimpleNamespace(req_ids=[]))
        self.replay = Replay(self.runner, CPU, mib << 20)
        self.prompt_len = prompt_len
        self.numbers: dict[str, int] = {}

    def take(self, *rows: tuple[str, int, int]) -> StepPlan:
        """A step of rows (request, C, S); gives the plan of what is new, and checks what is handed on."""
        names, computed, spans = map(list, zip(*rows, strict=True))
        for name, _, _ in rows:
            self.numbers.setdefault(name, len(self.numbers) + 1)
            if name not in self.runner.requests:
                prompt = [0] * self.prompt_len
                self.runner.requests[name] = SimpleNamespace(prompt_token_ids=prompt, num_tokens=self.prompt_len)
        for name, start, span in rows:
            state = self.runner.requests[name]
            state.num_tokens = max(state.num_tokens, start + span)
        self.runner.input_batch.req_ids = names
        offsets = np.cumsum([0, *spans])
        plan = plan_step(names, [self.prompt_len] * len(rows), computed, spans, offsets[:-1], buffer_rows=offsets[-1])
        wanted = torch.tensor(
            [self.numbers[name] * 1000 + start + index for name, start, span in rows for index in range(span)]
        )
        ids, embeds = torch.zeros(offsets[-1], dtype=torch.int32), torch.zeros(offsets[-1], HIDDEN, dtype=torch.float32)
        new = self.replay.split(plan, int(offsets[-1]))
        self.replay.give_back(plan, ids, embeds)
        for offset, span in zip(new.offsets, new.spans, strict=True):
            ids[offset : offset + span] = wanted[offset : offset + span]
            embeds[offset : offset + span] = wanted[offset : offset + span, None]
        self.replay.keep(new, ids, embeds)
        assert ids.tolist() == wanted.tolist()
        assert embeds[:, 0].tolist() == wanted.tolist()
        # As the scheduler counts what was sampled.
        for name, start, span in rows:
            state = self.runner.requests[name]
            state.num_tokens = max(state.num_tokens, start + span + 1)
        return new

    def given(self, *rows: tuple[str, int, int]) -> list[int]:
        """The same; gives how many tokens of each row were given back."""
        self.take(*rows)
        return [self.replay.given[name].count if name in self.replay.given else 0 for name, _, _ in rows]


def test_blocks_and_their_end() -> None:
    """Requests grow beyond a block and beyond the pool; all that is kept of one is freed when it ends."""
    steps = Steps()
    long = BLOCK * 5 + 3
    assert steps.given(("a", 0, long), ("b", 0, 3)) == [0, 0]
    for token in range(long, long + 2 * BLOCK):
        steps.take(("b", 3 + token - long, 1), ("a", token, 1))
    end = long + 2 * BLOCK
    held = steps.replay.held_bytes
    assert steps.given(("a", 0, end - 7), ("b", 0, 9)) == [end - 7, 9]
    assert steps.given(("b", 9, 1), ("a", end - 7, 8)) == [1, 7]
    assert steps.replay.kept_tokens == {"a": end + 1, "b": 2 * BLOCK + 3}
    del steps.runner.requests["a"]
    steps.take(("b", 2 * BLOCK + 3, 1), ("c", 0, 2))
    assert steps.replay.kept_tokens == {"b": 2 * BLOCK + 4, "c": 2}
    assert steps.replay.held_bytes == held
    del steps.runner.requests["b"], steps.runner.requests["c"]
    steps.take(("d", 1, 1))
    assert steps.replay.held_bytes == 0


def test_a_row_without_tokens_leaves_what_is_kept() -> None:
    steps = Steps()
    steps.take(("a", 0, 9))
    assert steps.given(("a", 0, 0)) == [0]
    assert steps.replay.kept_tokens == {"a": 9}
    assert steps.given(("a", 0, 1)) == [1]


def test_the_youngest_goes_without_when_memory_is_short(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps()
    most = (1 << 20) // ((HIDDEN * 4 + 4) * BLOCK) * BLOCK
    with caplog.at_level(logging.WARNING):
        assert steps.given(("old", 0, most // 2), ("young", 0, most // 2 - BLOCK)) == [0, 0]
        steps.take(("younger", 0, BLOCK))
        assert not caplog.records
        # There is no more room; the oldest grows on, at the cost of the youngest.
        steps.take(("old", most // 2, 1), ("younger", BLOCK, 1))
        assert list(steps.replay.kept_tokens) == ["old", "young"]
        steps.take(("old", most // 2 + 1, BLOCK), ("young", most // 2 - BLOCK, 1))
        assert list(steps.replay.kept_tokens) == ["old"]
    assert [record.message for record in caplog.records] == [
        "Request 'younger' goes without exact replay: 1 MiB are full. Said once."
    ]
    assert steps.given(("old", 0, 5), ("young", 0, 5), ("younger", 0, 5)) == [5, 0, 0]
    assert steps.replay.held_bytes <= 1 << 20


def test_without_room_nothing_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps(mib=0)
    assert steps.given(("a", 0, 3), ("b", 0, 3)) == [0, 0]
    assert steps.given(("a", 0, 3), ("b", 0, 3)) == [0, 0]
    assert len(caplog.records) == 1
    assert steps.replay.held_bytes == 0


@pytest.mark.parametrize("rows", [2, 64])
def test_a_step_copies_as_often_whatever_its_rows(rows: int) -> None:
    """Keeping is one write of embeddings and one of ids; giving back is one gather and one write of each."""
    steps = Steps(mib=16)
    names = [f"r{number}" for number in range(rows)]
    steps.take(*((name, 0, 3) for name in names))
    plan = plan_step(names, [3] * rows, [3] * rows, [1] * rows, range(rows), buffer_rows=rows)
    ids, embeds = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, HIDDEN)
    with Operations() as keeping:
        steps.replay.keep(steps.replay.split(plan, rows), ids, embeds)
    assert keeping.work == {"index_copy_": 2}
    plan = plan_step(names, [3] * rows, [0] * rows, [4] * rows, range(0, rows * 4, 4), buffer_rows=rows * 4)
    ids, embeds = torch.zeros(rows * 4, dtype=torch.int32), torch.zeros(rows * 4, HIDDEN)
    steps.replay.split(plan, rows * 4)
    with Operations() as giving:
        steps.replay.give_back(plan, ids, embeds)
    assert giving.work == {"index": 2, "copy_": 2}


def test_ten_thousand_tokens_with_preemptions_leave_nothing_behind() -> None:
    """Requests come, are preempted in prefill and in decode, and end: what is held stays flat."""
    steps, held = Steps(prompt_len=9), set()
    for number in range(200):
        one, other = f"a{number}", f"b{number}"
        steps.take((one, 0, 9), (other, 0, 4))
        steps.take((one, 9, 1))
        assert steps.given((one, 10, 1), (other, 0, 6)) == [0, 4]
        assert steps.given((other, 0, 9), (one, 0, 12)) == [6, 11]
        for token in range(12, 30):
            steps.take((other, token - 3, 1), (one, token, 1))
        assert steps.given((other, 0, 28)) == [27]
        held.add(steps.replay.held_bytes)
        del steps.runner.requests[one], steps.runner.requests[other]
    assert len(held) == 1


def test_what_was_thrown_away_is_drawn_and_sent_again() -> None:
    """Asynchronous scheduling preempts a request whose last step is still under way: its token comes once more."""
    steps = Steps()
    steps.runner.use_async_scheduling = True
    steps.take(("a", 0, 3))
    state = steps.runner.requests["a"]
    state.generator = torch.Generator().manual_seed(3)
    steps.take(("a", 3, 1))
    drawn = torch.randint(1 << 30, (1,), generator=state.generator)
    # The sampled token was not delivered.
    state.num_tokens = 4
    assert steps.given(("a", 0, 4)) == [4]
    assert steps.replay.given["a"].again
    assert steps.replay.sent(["a", "b"]) == ["a", "b"]
    assert steps.replay.silent() == {"a"}
    assert torch.randint(1 << 30, (1,), generator=state.generator).equal(drawn)


def test_tokens_that_were_taken_back_end_what_is_kept() -> None:
    steps = Steps()
    steps.take(("a", 0, 3))
    steps.take(("a", 3, 1))
    steps.runner.requests["a"].num_tokens = 3
    assert steps.given(("a", 0, 3)) == [0]


# What is sent on.


def _sending(given: dict[str, Given]) -> Steps:
    steps = Steps()
    steps.runner.input_batch.req_ids = ["a", "b", "c"]
    steps.replay.given.update(given)
    return steps


def _row(start: int, span: int) -> Row:
    return Row(3, start, span)


def test_only_new_rows_are_cut_out_of_a_steps_outputs() -> None:
    given = {"a": Given(_row(0, 4), 4), "b": Given(_row(0, 6), 5), "c": Given(_row(0, 4), 4, again=True)}
    steps = _sending(given)
    spans, starts = np.array([4, 6, 4], np.int32), SimpleNamespace(cpu=torch.tensor([0, 4, 10, 14]), np="whole")
    steps.runner._omni_num_scheduled_tokens_np, steps.runner.query_start_loc = spans, starts
    with steps.replay.only_new_sent():
        assert steps.runner._omni_num_scheduled_tokens_np.tolist() == [0, 1, 1]
        assert steps.runner.query_start_loc.cpu.tolist() == [4, 9, 13, 14]
        assert steps.runner.query_start_loc.np == "whole"
    assert steps.runner._omni_num_scheduled_tokens_np is spans
    assert steps.runner.query_start_loc is starts
    assert starts.cpu.tolist() == [0, 4, 10, 14]
    assert steps.replay.sent(["a", "b", "c"]) == ["b", "c"]


def test_codes_have_a_row_a_token() -> None:
    given = {"a": Given(_row(0, 3), 3), "b": Given(_row(0, 4), 3), "c": Given(_row(0, 2), 2, again=True)}
    infos = [{"codes": {"audio": torch.tensor([[7]]), "ref": 1}, "meta": {"n": 1}} for _ in given]
    seen = _sending(given).replay.for_forward(infos, "codes", "audio")
    assert [info["codes"]["audio"].flatten().tolist() for info in seen] == [[0] * 3, [0, 0, 0, 7], [0, 7]]
    assert all(info["codes"]["audio"].tolist() == [[7]] for info in infos)
    # What a model changes for a row without a new part is not kept; of the others it is.
    for info in seen:
        info["meta"]["n"] = 2
    assert [info["meta"]["n"] for info in infos] == [1, 2, 1]


class Threaded:
    """A released runner whose outputs a thread may build."""

    def _should_use_async_omni_output(self) -> bool:
        return True

    def _resolve_pooler_payload_req_ids(self, req_ids: list[str]) -> tuple[str, list[str]]:
        return "latent", req_ids


def test_no_output_thread_beside_given_rows() -> None:
    """It would find the rows of the next step."""
    runner: Any = type("Runner", (PhaseRoutingMixin, Threaded), {})()
    assert runner._should_use_async_omni_output()
    replay = _sending({}).replay
    phase_of(runner).tools = SimpleNamespace(replay=replay)
    assert runner._should_use_async_omni_output()
    assert runner._resolve_pooler_payload_req_ids(["a", "b"]) == ("latent", ["a", "b"])
    replay.given["a"] = Given(_row(0, 3), 3)
    assert not runner._should_use_async_omni_output()
    assert runner._resolve_pooler_payload_req_ids(["a", "b"]) == ("latent", ["b"])


# The switch.


def test_values(monkeypatch: pytest.MonkeyPatch, mixed: type) -> None:
    monkeypatch.setenv(settings.REPLAY_VARIABLE, "EXACT")
    assert settings.replays_exactly()
    assert not settings.replays_exactly("off")
    monkeypatch.setenv(settings.REPLAY_VARIABLE, "sometimes")
    with pytest.raises(ValueError, match="OMNI_NPU_PHASE_REPLAY take exact or off, not 'sometimes'"):
        settings.replays_exactly()
    with pytest.raises(ValueError, match="phase_replay"):
        type("Wrong", (mixed,), {"phase_replay": "always"})
    assert settings.replay_bytes() == 256 << 20
    monkeypatch.setenv(settings.REPLAY_MIB_VARIABLE, "3")
    assert settings.replay_bytes() == 3 << 20
    monkeypatch.setenv(settings.REPLAY_MIB_VARIABLE, "-3")
    with pytest.raises(ValueError, match="takes a number of MiB, not '-3'"):
        settings.replay_bytes()


def test_speculative_decoding_is_refused(mixed: type) -> None:
    runner: Any = object.__new__(mixed)
    runner.phase_replay, runner.speculative_config = "exact", object()
    runner.model, runner.device = SimpleNamespace(has_preprocess=True), "cpu"
    with pytest.raises(UnsupportedRuntimeError, match="rejected drafts"):
        runner._preprocess(None, 0)


def test_v2_is_refused(mixed_state: type) -> None:
    state: Any = object.__new__(mixed_state)
    state.phase_replay, state.has_preprocess = "exact", True
    with pytest.raises(UnsupportedRuntimeError, match="no exact replay: Model Runner V2 forgets"):
        state.run_preprocess(None, {})
