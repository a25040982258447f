# SPDX-License-Identifier: Apache-2.0
"""Which class a checkpoint or a module means, and lint's verdict on it."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from omni_npu_phase.lint import source
from omni_npu_phase.lint.findings import Answer, judge
from omni_npu_phase.lint.report import as_dict
from omni_npu_phase.lint.source import Model, Source, UnreadableError, module_file

Verdict = Answer | Literal["has no hook"]

_MODELS = "model_executor/models"
DECLARATION = "supports_chunked_prefill"
"""The class attribute by which a model says whether chunks of a prompt are right for it."""


class UnknownModelError(ValueError):
    """There is no model to look at where one was asked for; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Look:
    """What the source of one class shows; ``findings`` as ``lint`` gives them in JSON."""

    cls: str
    file: str
    verdict: Verdict
    reason: str
    registered: bool = False
    """Whether vLLM-Omni's registry names the class, or one of the module, as a model."""
    findings: list[dict[str, Any]] = field(default_factory=list)
    declares: bool | None = None
    """Whether the class says of itself that it supports chunked prefill; None where it says nothing."""


def look_at(model: str) -> list[Look]:
    """Look at a checkpoint's folder, or at MODULE or MODULE:CLASS; one look per class with a hook, or per class asked.

    A folder's ``config.json`` names the architecture, and the installed vLLM-Omni its class. Where that class has no
    hook, or the look cannot tell, its family's other classes are looked at too. Raises :class:`UnknownModelError`.
    """
    try:
        return _look_at_checkpoint(Path(model)) if Path(model).is_dir() else _look_at_module(model)
    except UnreadableError as error:
        raise UnknownModelError(str(error)) from error


def _look_at_module(model: str) -> list[Look]:
    module, _, name = model.partition(":")
    file = source.read(module_file(module))
    looks = [_look(file, cls) for cls in ([name] if name else list(file.classes))]
    registered = _registered_in(file.path)
    shown = looks if name else [look for look in looks if look.verdict != "has no hook"]
    if not shown:
        reason = "no class in it has a preprocess hook"
        return [Look(module, str(file.path), "has no hook", reason, not registered.isdisjoint(file.classes))]
    return [replace(look, registered=look.cls in registered) for look in shown]


def _look_at_checkpoint(folder: Path) -> list[Look]:
    architectures = _architectures(folder / "config.json")
    models = module_file("vllm_omni").parent / _MODELS
    known = _registered(models / "registry.py")
    missing = [name for name in architectures if name not in known]
    if missing:
        raise UnknownModelError(f"{folder}: the installed vLLM-Omni has no architecture {', '.join(missing)}")
    looks = {}
    for name in architectures:
        package, module, cls = known[name]
        own = replace(_look(source.read(models / package / f"{module}.py"), cls), registered=True)
        looks[module, cls] = own
        if own.verdict in ("has no hook", "cannot tell"):
            for other, module, cls in known.values():
                file = models / other / f"{module}.py"
                if other == package and file.is_file():
                    look = _look(source.read(file), cls)
                    if look.verdict != "has no hook":
                        looks[module, cls] = replace(look, registered=True)
    return list(looks.values())


def _architectures(config: Path) -> list[str]:
    try:
        read = json.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnknownModelError(f"{config}: {error.strerror}") from error
    except ValueError as error:
        raise UnknownModelError(f"{config} is no JSON: {error}") from error
    named = read.get("architectures") if isinstance(read, dict) else None
    if not isinstance(named, list) or not named or not all(isinstance(name, str) for name in named):
        raise UnknownModelError(f"{config} lists no architectures by name")
    return named


def _registered_in(file: Path) -> set[str]:
    """Classes of a file that vLLM-Omni's registry names as models."""
    try:
        models = module_file("vllm_omni").parent / _MODELS
        known = _registered(models / "registry.py")
    except (UnknownModelError, UnreadableError, OSError):
        return set()
    return {cls for package, module, cls in known.values() if models / package / f"{module}.py" == file}


def _registered(registry: Path) -> dict[str, tuple[str, str, str]]:
    """Architectures with package, module and class, from the registry's own source."""
    for node in ast.parse(registry.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(to, ast.Name) and to.id == "_OMNI_MODELS" for to in node.targets
        ):
            return dict(ast.literal_eval(node.value))
    raise UnknownModelError(f"{registry} lists no models in a way this version of omni-npu-phase knows")


def _look(file: Source, cls: str) -> Look:
    model = Model.of(file, cls)
    judged, declares = judge(model), model.declared(DECLARATION)
    if judged is not None:
        findings = [as_dict(found) for found in judged.findings]
        return Look(cls, str(judged.file), *judged.answer, findings=findings, declares=declares)
    if model.unknown:
        return Look(cls, str(file.path), "cannot tell", f"it may inherit a hook from {', '.join(model.unknown)}")
    return Look(cls, str(file.path), "has no hook", "neither it nor its bases have a preprocess hook")
