# SPDX-License-Identifier: Apache-2.0
"""The model kit: right models pass, each mistake is noticed by its cases, and the real talker shows what it does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.out_of_tree_model.toy_talker import ToyTalker, under_test
from omni_npu_phase.conformance.models.bench import ModelBench
from omni_npu_phase.conformance.models.cases import CASES, NotShownError, chunkings
from omni_npu_phase.conformance.models.subject import ModelUnderTest, Request, load_model
from omni_npu_phase.conformance.test_model import first_seen
from omni_npu_phase.conformance.verify import NoRuntimeError
from omni_npu_phase.settings import REPLAY_VARIABLE
from tests.cpu.wrong_models import WRONG_MODELS, WrongModel

FINDINGS = Path(__file__).with_name("talker_findings.txt")


def _noticed(subject: ModelUnderTest, runner: type) -> dict[str, str]:
    make = partial(ModelBench, subject, runner)
    found = {}
    for case in CASES.values():
        for request in subject.requests:
            if seen := first_seen(case.findings(make, request)):
                found.setdefault(case.id, seen)
    return found


def test_a_right_model_passes(mixed: type) -> None:
    assert _noticed(under_test(), mixed) == {}


def test_a_model_with_slots_that_finished_requests_free_passes(mixed: type) -> None:
    class Slots(ToyTalker):
        """State by request id, in as many slots as an engine serves at a time."""

        def __init__(self) -> None:
            super().__init__()
            self.slots: dict[str, int] = {}

        def preprocess(self, input_ids: torch.Tensor, input_embeds: object, **info: object) -> object:
            self.slots.setdefault(str(info["request_id"]), len(self.slots))
            assert len(self.slots) <= 16
            return super().preprocess(input_ids, input_embeds, **info)

        def on_requests_finished(self, finished_req_ids: set[str]) -> None:
            for request_id in finished_req_ids:
                self.slots.pop(request_id, None)

    subject = replace(under_test(), model=Slots())
    assert _noticed(subject, mixed) == {}
    assert subject.model.slots == {}


@pytest.mark.parametrize("wrong", WRONG_MODELS, ids=lambda wrong: wrong.cls.__name__)
def test_a_mistake_is_noticed_by_its_cases_and_no_others(wrong: WrongModel, mixed: type) -> None:
    assert _noticed(wrong.under_test(), mixed).keys() == wrong.noticed_by


@pytest.mark.parametrize("wrong", WRONG_MODELS[:-1], ids=lambda wrong: wrong.cls.__name__)
def test_with_exact_replay_no_model_makes_a_mistake_when_it_is_read_again(
    wrong: WrongModel, mixed: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REPLAY_VARIABLE, "exact")
    again = {"replay", "resume", "resume-crossing", "resume-one-by-one"}
    assert _noticed(wrong.under_test(), mixed).keys() == wrong.noticed_by - again


def test_every_case_notices_a_mistake() -> None:
    shared = WRONG_MODELS[-1].noticed_by
    assert shared == set(CASES)
    assert {case for wrong in WRONG_MODELS[:-1] for case in wrong.noticed_by} == set(CASES)


def test_findings_name_rows_and_what_is_there(mixed: type) -> None:
    by_name = {wrong.cls.__name__: _noticed(wrong.under_test(), mixed) for wrong in WRONG_MODELS[:3]}
    assert "P=3 C=2 S=1" in by_name["DecidesBySpan"]["tail"]
    assert "read again after 2 outputs" in by_name["SlicesByItsOwnCounter"]["replay"]
    assert "[E5]" in by_name["ReturnsTheWholePrompt"]["results"]
    assert "is that of position 0" in by_name["ReturnsTheWholePrompt"]["chunks"]


def test_a_model_without_batched_hook_or_mtp(mixed: type) -> None:
    class Scalar(ToyTalker):
        preprocess_decode_batch = None  # type: ignore[assignment]

    class Mute(Scalar):
        talker_mtp = None  # type: ignore[assignment]

    for cls in (Scalar, Mute):
        subject = replace(under_test(), model=cls())
        with pytest.raises(NotShownError, match="no preprocess_decode_batch"):
            next(CASES["batched"].check(partial(ModelBench, subject, mixed), "long"))
        make = partial(ModelBench, subject, mixed)
        assert not [seen for case in CASES.values() if case.id != "batched" for seen in case.check(make, "long")]


def test_one_request_shows_no_company(mixed: type) -> None:
    subject = under_test()
    alone = replace(subject, requests={"long": subject.requests["long"]})
    with pytest.raises(NotShownError, match="one request only"):
        next(CASES["company"].check(partial(ModelBench, alone, mixed), "long"))
    assert not list(CASES["batched"].check(partial(ModelBench, alone, mixed), "long"))


def test_tolerance_is_for_embeddings_that_are_nearly_equal(mixed: type) -> None:
    class Drifts(ToyTalker):
        """As kernels that add up in another order do."""

        def preprocess(self, input_ids: torch.Tensor, input_embeds: object, **info: object) -> object:
            ids, embeds, updates = super().preprocess(input_ids, None, **info)
            return ids, embeds + 1e-4 * len(input_ids), updates

    subject = replace(under_test(), model=Drifts())
    assert "chunks" in _noticed(subject, mixed)
    assert "chunks" not in _noticed(replace(subject, tolerance=1e-2), mixed)


@given(st.integers(2, 40))
def test_chunkings_cut_a_prompt_into_all_its_tokens(length: int) -> None:
    if length < 3:
        return
    ways = [list(chunks) for chunks in chunkings(length)]
    assert [length - 1, 1] in ways
    assert [1] * length in ways
    for chunks in ways:
        assert sum(chunks) == length
        assert min(chunks) > 0


# Factories.


def _without(**parts: object) -> Callable[[], ModelUnderTest]:
    return lambda: replace(under_test(), **parts)  # type: ignore[arg-type]


def _raises() -> None:
    raise OSError("no weights here")


@pytest.mark.parametrize(
    ("factory", "told"),
    [
        (_raises, "raised OSError: no weights here"),
        (dict, "returned a dict, which is no ModelUnderTest"),
        (_without(model=torch.nn.Identity()), "Identity has no preprocess hook"),
        (_without(requests={}), "it has no requests"),
        (_without(requests={"a": Request([1], [2] * 4, {})}), "'a': a prompt of 1 tokens; 3 are needed"),
        (_without(requests={"a": Request([1] * 3, [], {})}), "'a': 0 outputs; 4 are needed"),
        ("text", "is no function that returns a ModelUnderTest"),
    ],
)
def test_models_that_cannot_be_judged(factory: object, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "factory", factory, raising=False)
    with pytest.raises(NoRuntimeError) as error:
        load_model(f"{__name__}:factory")
    assert told in str(error.value)


@pytest.mark.parametrize("name", ["module", "module:", ":factory", "no_such_module:factory"])
def test_names_of_no_model(name: str) -> None:
    with pytest.raises(NoRuntimeError):
        load_model(name)


# The real talker.


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], ElementTree.Element]:
    """vLLM-Omni's talker with the tiny checkpoint, in a process of its own: the platform is chosen once a process."""
    folder = tmp_path_factory.mktemp("talker")
    command = [sys.executable, "-m", "pytest", "-p", "omni_npu_phase.conformance.pytest_plugin", "-rxX", "-q"]
    options = ["--phase-model", "omni_npu_phase.speech.tiny_talker:under_test", "--phase-xfail", str(FINDINGS)]
    done = subprocess.run(
        [*command, "--pyargs", "omni_npu_phase.conformance", *options, "--junitxml=junit.xml"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert (folder / "junit.xml").is_file(), done.stdout + done.stderr
    return done, ElementTree.parse(folder / "junit.xml").getroot()


def test_the_real_talker_keeps_what_is_not_listed(
    talker: tuple[subprocess.CompletedProcess[str], ElementTree.Element],
) -> None:
    done, junit = talker
    assert done.returncode == 0, done.stdout
    assert not junit.findall(".//failure")
    assert len(junit.findall(".//testcase")) == 3 * len(CASES) + 3 + 2


def test_findings_about_the_real_talker_are_shown(
    talker: tuple[subprocess.CompletedProcess[str], ElementTree.Element],
) -> None:
    """Its prompt offset, and its place in a text that is read frame by frame, do not survive a preemption."""
    done, junit = talker
    expected = {case.get("name") for case in junit.iter("testcase") if case.find("skipped") is not None}
    assert expected == {
        *(f"test_model[replay-{request}]" for request in ("hello", "rain", "by-frame")),
        "test_model[resume-one-by-one-by-frame]",
    }
    assert "slices its prompt from an offset of its own" in done.stdout
