# SPDX-License-Identifier: Apache-2.0
"""The runtime of the installed release: everything it takes is there, and anything less is refused by name.

Holds for every release that a runtime is for; ci/matrix runs it on each.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import logging
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from itertools import pairwise
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

from omni_npu_phase import PhaseRoutingMixin
from omni_npu_phase import releases as runtimes
from omni_npu_phase.conformance.drive import run_scenario
from omni_npu_phase.conformance.scenarios import BY_ID, Variant
from omni_npu_phase.releases import Runtime, UnsupportedRuntimeError, known_runtimes, names_in, runtime_of

OWN: Runtime = next(one for one in known_runtimes() if metadata.version("vllm-omni").startswith(f"{one.release}."))
SHARED = {
    (method, name)
    for method, taken in OWN.methods.items()
    for name in taken.names
    if all(method in one.methods and name in one.methods[method].names for one in known_runtimes())
}
METHODS = list(OWN.methods)
NAMES = [(method, name) for method, taken in OWN.methods.items() for name in taken.names]
PARAMETERS = [
    (method, parameter)
    for method, taken in OWN.methods.items()
    for parameter in taken.parameters or ()
    if parameter != "*"
]
CALLED = [method for method, taken in OWN.methods.items() if taken.parameters]
PLACED = [
    method
    for method in CALLED
    if "*" not in (OWN.methods[method].parameters or ())[:2] and len(OWN.methods[method].parameters or ()) > 1
]
CONTEXT = next(name for name in OWN.functions if name.endswith("set_forward_context"))


Classes = tuple[type, ...]


def _copies(released: type, change: Mapping[str, Callable[[Any], Any]]) -> Classes:
    """The released classes as copies of their own, with every definition of these methods changed, or gone if None."""
    copies = []
    for cls in released.__mro__[:-1]:
        body = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
        for name in change.keys() & body.keys():
            changed = change[name](body.pop(name))
            if changed is not None:
                body[name] = changed
        copies.append(type(cls.__name__, (), body))
    return tuple(copies)


def _unnamed(name: str) -> Callable[[Any], Any]:
    """A change that makes a method's code name something else instead."""

    def changed(constant: Any) -> Any:
        if isinstance(constant, CodeType):
            return constant.replace(
                co_names=changed(constant.co_names),
                co_varnames=changed(constant.co_varnames),
                co_consts=changed(constant.co_consts),
            )
        if isinstance(constant, tuple):
            return tuple(changed(part) for part in constant)
        return f"other_{name}" if constant == name and isinstance(constant, str) else constant

    def change(method: Any) -> Any:
        function = inspect.unwrap(method)
        other = FunctionType(changed(function.__code__), function.__globals__, closure=function.__closure__)
        other.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
        return other

    return change


def _signed(change: Callable[[list[inspect.Parameter]], Sequence[inspect.Parameter]]) -> Callable[[Any], Any]:
    """A change of a method's parameters, ``self`` left out, and of nothing else."""

    def changed(method: Any) -> Any:
        function = inspect.unwrap(method)
        other = FunctionType(function.__code__, function.__globals__, closure=function.__closure__)
        own, *parameters = inspect.signature(method).parameters.values()
        other.__signature__ = inspect.Signature(
            [own.replace(kind=inspect.Parameter.POSITIONAL_ONLY), *change(parameters)]
        )  # type: ignore[attr-defined]
        return other

    return changed


def _renamed(parameter: str) -> Callable[[Any], Any]:
    return _signed(lambda known: [one.replace(name="other") if one.name == parameter else one for one in known])


def _swapped(known: list[inspect.Parameter]) -> list[inspect.Parameter]:
    first, second = (one.replace(default=inspect.Parameter.empty) for one in known[:2])
    return [second, first, *known[2:]]


def _of_kind(kind: Any) -> Callable[[list[inspect.Parameter]], list[inspect.Parameter]]:
    """A change of the last parameter's kind, or of all of them where the language does not allow for less."""

    def changed(known: list[inspect.Parameter]) -> list[inspect.Parameter]:
        if kind is inspect.Parameter.KEYWORD_ONLY:
            return [*known[:-1], known[-1].replace(kind=kind)]
        return [one.replace(kind=kind) for one in known]

    return changed


def _returning(values: int) -> Callable[[Any], Any]:
    """A change of how many values a method returns, in code that is only looked at."""

    def change(method: Any) -> Any:
        function = inspect.unwrap(method)
        code = bytearray(function.__code__.co_code)
        for built, after in pairwise(dis.get_instructions(function)):
            if (built.opname, after.opname) == ("BUILD_TUPLE", "RETURN_VALUE"):
                code[built.offset + 1] = values
        other = FunctionType(
            function.__code__.replace(co_code=bytes(code)), function.__globals__, closure=function.__closure__
        )
        other.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
        return other

    return change


def _with_further(known: list[inspect.Parameter]) -> list[inspect.Parameter]:
    return [*known, inspect.Parameter("further", inspect.Parameter.KEYWORD_ONLY)]


# Accepted.


def test_the_installed_release_has_its_own_runtime(released: type) -> None:
    from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner

    assert runtime_of(released.__mro__) is OWN
    assert runtime_of(GPUGenerationModelRunner.__mro__) is OWN


def test_copies_are_as_good_as_the_classes(released: type) -> None:
    assert runtime_of(_copies(released, {})) is OWN


@pytest.mark.parametrize("method", CALLED)
def test_overrides_with_open_signatures_are_accepted(method: str, released: type) -> None:
    wrapped = type("Wrapped", (), {method: lambda self, *args, **kwargs: None})
    assert runtime_of((wrapped, *released.__mro__)) is OWN


def test_names_are_those_of_the_method_that_runs(released: type) -> None:
    def override(self: Any) -> Any:
        return self.own_name

    theirs = type("Theirs", (), {"__module__": "somewhere", "_preprocess": override})
    replaced = type("Replaced", (), {"__module__": "vllm_omni.platforms.other", "_preprocess": override})
    known = names_in(released.__mro__, "_preprocess")
    assert names_in((theirs, *released.__mro__), "_preprocess") == known | {"self", "own_name"}
    assert names_in((replaced, *released.__mro__), "_preprocess") == {"self", "own_name"}


# A release that was not tested.


@pytest.mark.parametrize(
    ("installed", "noted"),
    [("0.31.0", True), ("1.0.0rc1", True), (f"{OWN.release}.7.dev3+g12", False), (None, False)],
)
def test_a_release_that_was_not_tested_is_noted(
    installed: str | None,
    noted: bool,
    released: type,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def version(package: str) -> str:
        if installed is None:
            raise metadata.PackageNotFoundError(package)
        return installed

    monkeypatch.setattr(metadata, "version", version)
    classes = _copies(released, {})
    with caplog.at_level(logging.INFO, "omni_npu_phase"):
        assert runtime_of(classes) is runtime_of(classes) is OWN
    expected = [
        f"vllm-omni {installed} is not among the releases this was tested with; its runner offers what that of "
        f"{OWN.name} does, and is treated alike."
    ]
    assert [record.getMessage() for record in caplog.records] == (expected if noted else [])


# Refused.


def _refusal(classes: Classes) -> str:
    with pytest.raises(UnsupportedRuntimeError) as refused:
        runtime_of(classes)
    return str(refused.value)


@pytest.mark.parametrize("method", METHODS)
def test_a_missing_method_is_named(method: str, released: type) -> None:
    classes = _copies(released, {method: lambda _: None})
    assert OWN.mismatches(classes) == [f"no method {method}"]
    assert f"no method {method}" in _refusal(classes)


@pytest.mark.parametrize(("method", "name"), NAMES)
def test_a_missing_name_is_named(method: str, name: str, released: type) -> None:
    classes = _copies(released, {method: _unnamed(name)})
    assert OWN.mismatches(classes) == [f"{method} names no {name}"]
    if (method, name) in SHARED:
        assert f"{method} names no {name}" in _refusal(classes)


@pytest.mark.parametrize(("method", "parameter"), PARAMETERS)
def test_a_missing_parameter_is_named(method: str, parameter: str, released: type) -> None:
    classes = _copies(released, {method: _renamed(parameter)})
    assert f"{method} takes no {parameter}" in OWN.mismatches(classes)
    assert f"{method} takes no {parameter}" in _refusal(classes)


@pytest.mark.parametrize("method", PLACED)
def test_another_order_is_named(method: str, released: type) -> None:
    classes = _copies(released, {method: _signed(_swapped)})
    assert f"{method} takes (" in _refusal(classes)
    assert " in another order than (" in _refusal(classes)


@pytest.mark.parametrize("method", CALLED)
def test_a_further_parameter_is_named(method: str, released: type) -> None:
    classes = _copies(released, {method: _signed(_with_further)})
    assert OWN.mismatches(classes) == [f"{method} also needs further"]
    assert f"{method} also needs further" in _refusal(classes)


@pytest.mark.parametrize("method", CALLED)
def test_how_parameters_are_given_is_named(method: str, released: type) -> None:
    parameters = list(OWN.methods[method].parameters or ())
    kind, line = (
        (inspect.Parameter.POSITIONAL_ONLY, f"{method} takes {', '.join(parameters[1:])} by position only")
        if parameters[0] == "*"
        else (inspect.Parameter.KEYWORD_ONLY, f"{method} takes {parameters[-1]} by name only")
    )
    classes = _copies(released, {method: _signed(_of_kind(kind))})
    assert OWN.mismatches(classes) == [line]
    assert line in _refusal(classes)


@pytest.mark.parametrize("values", [5, 7])
def test_another_number_of_values_is_named(values: int, released: type) -> None:
    classes = _copies(released, {"_preprocess": _returning(values)})
    assert OWN.mismatches(classes) == [f"_preprocess returns {values} values, not 6"]
    assert f"_preprocess returns {values} values, not 6" in _refusal(classes)


def _two_or_three(a: Any, b: Any) -> Any:
    if a:
        return a, b
    return a, a, b


@pytest.mark.parametrize(
    ("method", "values"),
    [
        (lambda self, a, b: (a, b), {2}),
        (_two_or_three, {2, 3}),
        (lambda self, a, b: (a, *b), set()),
        (lambda self, a, b: a, set()),
        (print, set()),
    ],
)
def test_values_are_counted_where_the_code_shows_them(method: Any, values: set[int], released: type) -> None:
    theirs = type("Theirs", (), {"__module__": "somewhere", "_preprocess": lambda self, a: (a, a, a, a)})
    own = type("Own", (), {"__module__": "vllm_omni.other", "_preprocess": method})
    assert runtimes.values_returned((theirs, own), "_preprocess") == values


def test_what_has_no_signature_is_named(released: type) -> None:
    """As callables of compiled extensions."""

    class Compiled:
        __signature__ = "none"

        def __call__(self) -> None: ...

    lines = OWN.mismatches(_copies(released, {"_update_intermediate_buffer": lambda _: Compiled()}))
    assert lines[0].startswith("_update_intermediate_buffer has no signature (")


def test_whatever_a_package_raises_on_import_is_a_line(released: type, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> Any:
        raise RuntimeError("libascend_hal.so: wrong driver")

    monkeypatch.setattr(runtimes.pkgutil, "resolve_name", fails)
    lines = OWN.mismatches(_copies(released, {"_talker_mtp_forward": lambda _: None}))
    assert lines[0] == "no method _talker_mtp_forward"
    assert lines[1:] == [f"no {name.replace(':', '.')} (libascend_hal.so: wrong driver)" for name in OWN.functions]


def test_everything_is_named_at_once(released: type) -> None:
    def without_hooks(_: Any) -> Any:
        return None

    text = _refusal(
        _copies(
            released,
            {
                "_update_intermediate_buffer": without_hooks,
                "_talker_mtp_forward": _unnamed("text_step"),
                "_maybe_attach_mimo_audio_req_infos": _renamed("req_infos"),
            },
        )
    )
    assert f"most like {OWN.name}, but: " in text
    for line in (
        "_talker_mtp_forward names no text_step",
        "no method _update_intermediate_buffer",
        "_maybe_attach_mimo_audio_req_infos takes no req_infos",
    ):
        assert line in text
    assert all(one.name in text for one in known_runtimes())


@pytest.fixture
def replaceable(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], None]:
    """Put something else, or nothing for None, in the place of a ``module:name`` or ``module:name.name``."""

    def replace(where: str, other: Any) -> None:
        module, _, path = where.partition(":")
        first, _, rest = path.partition(".")
        if rest:
            siblings = {
                name.rpartition(".")[2]: pkgutil.resolve_name(name)
                for name in OWN.functions
                if name.startswith(f"{module}:{first}.")
            }
            siblings.pop(rest)
            other = SimpleNamespace(**siblings, **({} if other is None else {rest: other}))
        if other is None:
            monkeypatch.delattr(importlib.import_module(module), first)
        else:
            monkeypatch.setattr(importlib.import_module(module), first, other)

    return replace


@pytest.mark.parametrize("function", list(OWN.functions))
def test_a_missing_function_is_named(function: str, released: type, replaceable: Callable[[str, Any], None]) -> None:
    replaceable(function, None)
    lines = OWN.mismatches(_copies(released, {}))
    assert len(lines) == 1
    assert lines[0].startswith(f"no {function.replace(':', '.')}")
    assert lines[0] in _refusal(_copies(released, {}))


def test_another_forward_context_is_named(released: type, replaceable: Callable[[str, Any], None]) -> None:
    replaceable(CONTEXT, lambda attn_metadata, vllm_config, *, cudagraph_runtime_mode: None)
    assert f"{CONTEXT.replace(':', '.')} takes no batch_descriptor" in _refusal(_copies(released, {}))


# The runner of a refused class stays as it was.


@pytest.mark.parametrize("scenario", ["tail", "prompt-embeds"])
def test_a_refused_runner_does_nothing(scenario: str, released: type) -> None:
    calls: list[str] = []

    class Changed(released):  # type: ignore[misc, valid-type]
        def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("_preprocess")
            return super()._preprocess(*args, **kwargs)

        def _update_intermediate_buffer(self, request: str, update: Any) -> None:
            calls.append("_update_intermediate_buffer")

    before = {cls: dict(vars(cls)) for cls in Changed.__mro__}
    mixed = type("Mixed", (PhaseRoutingMixin, Changed), {})
    run = run_scenario(mixed, BY_ID[scenario], Variant("scalar", True), torch.device("cpu"))
    assert isinstance(run.error, UnsupportedRuntimeError)
    assert "_update_intermediate_buffer takes no req_id, upd" in str(run.error)
    assert calls == []
    assert run.untouched_by_error
    assert not run.steps[-1].log.hooks
    assert {cls: dict(vars(cls)) for cls in Changed.__mro__} == before
