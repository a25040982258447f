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
from collections.abc import Callable, Mapping
from importlib import metadata
from itertools import pairwise
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

from omni_npu_phase import PhaseRoutingMixin
from omni_npu_phase.conformance.drive import run_scenario
from omni_npu_phase.conformance.scenarios import BY_ID, Variant
from omni_npu_phase.releases import RUNTIMES, Runtime, UnsupportedRuntimeError, fits, names_in, release_of, runtime_of

OWN: Runtime = next(one for one in RUNTIMES if one.release == release_of(metadata.version("vllm-omni")))
METHODS, FUNCTIONS = fits.methods_of(OWN), fits.functions_of(OWN)
NAMES = [(method, name) for method, taken in METHODS.items() for name in taken.names]
SHARED = {
    (method, name)
    for method, name in NAMES
    if all(method in every and name in every[method].names for every in map(fits.methods_of, RUNTIMES))
}
GIVEN = [(method, name) for method, taken in METHODS.items() for name in (*(taken.given or ()), *taken.by_name)]
CALLED = list(dict(GIVEN))
Parameters = list[inspect.Parameter]
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


def _signed(change: Callable[[Parameters], Parameters]) -> Callable[[Any], Any]:
    """A change of a method's parameters, ``self`` left out, and of nothing else."""

    def changed(method: Any) -> Any:
        function = inspect.unwrap(method)
        other = FunctionType(function.__code__, function.__globals__, closure=function.__closure__)
        own, *parameters = inspect.signature(method).parameters.values()
        parameters = change([parameter.replace(default=inspect.Parameter.empty) for parameter in parameters])
        other.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [own.replace(kind=inspect.Parameter.POSITIONAL_ONLY), *parameters]
        )
        return other

    return changed


def _renamed(parameter: str) -> Callable[[Any], Any]:
    return _signed(lambda known: [one.replace(name="other") if one.name == parameter else one for one in known])


def _positional(known: Parameters) -> Parameters:
    return [one.replace(kind=inspect.Parameter.POSITIONAL_ONLY) for one in known]


def _last_by_name(known: Parameters) -> Parameters:
    return [*known[:-1], known[-1].replace(kind=inspect.Parameter.KEYWORD_ONLY)]


def _swapped(known: Parameters) -> Parameters:
    return [*known[1::-1], *known[2:]]


def _one_more(known: Parameters) -> Parameters:
    return [*known, inspect.Parameter("further", inspect.Parameter.KEYWORD_ONLY)]


SIGNATURES = [
    *((method, _one_more) for method in CALLED),
    *((method, _positional if METHODS[method].by_name else _last_by_name) for method in CALLED),
    *((method, _swapped) for method in CALLED if len(METHODS[method].given or ()) > 1),
]


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
    [("0.99.0", True), ("1.0.0rc1", True), (f"{OWN.release}.7.dev3+g12", False), (None, False)],
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
    assert fits.mismatches(OWN, classes) == [f"no method {method}"]
    assert f"no method {method}" in _refusal(classes)


@pytest.mark.parametrize(("method", "name"), NAMES)
def test_a_missing_name_is_named(method: str, name: str, released: type) -> None:
    classes = _copies(released, {method: _unnamed(name)})
    assert fits.mismatches(OWN, classes) == [f"{method} names no {name}"]
    if (method, name) in SHARED:
        assert f"{method} names no {name}" in _refusal(classes)


@pytest.mark.parametrize(("method", "parameter"), GIVEN)
def test_a_missing_parameter_is_named(method: str, parameter: str, released: type) -> None:
    classes = _copies(released, {method: _renamed(parameter)})
    (line,) = fits.mismatches(OWN, classes)
    assert line.startswith(f"{method}(")
    assert parameter in line.partition(" does not take ")[2]
    assert line in _refusal(classes)


@pytest.mark.parametrize(("method", "change"), SIGNATURES)
def test_another_signature_is_named(method: str, change: Callable[[Parameters], Parameters], released: type) -> None:
    classes = _copies(released, {method: _signed(change)})
    (line,) = fits.mismatches(OWN, classes)
    assert line.startswith(f"{method}(")
    assert " does not take (" in line
    assert line in _refusal(classes)


@pytest.mark.parametrize("values", [5, 7])
def test_another_number_of_values_is_named(values: int, released: type) -> None:
    classes = _copies(released, {"_preprocess": _returning(values)})
    assert fits.mismatches(OWN, classes) == [f"_preprocess returns {values} values, not 6"]
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
    assert fits.values_returned((theirs, own), "_preprocess") == values


def test_what_has_no_signature_is_named(released: type) -> None:
    """As callables of compiled extensions."""

    class Compiled:
        __signature__ = "none"

        def __call__(self) -> None: ...

    lines = fits.mismatches(OWN, _copies(released, {"_update_intermediate_buffer": lambda _: Compiled()}))
    assert lines[0].startswith("_update_intermediate_buffer has no signature (")


def test_whatever_a_package_raises_on_import_is_a_line(released: type, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> Any:
        raise RuntimeError("libascend_hal.so: wrong driver")

    monkeypatch.setattr(fits.pkgutil, "resolve_name", fails)
    lines = fits.mismatches(OWN, _copies(released, {"_talker_mtp_forward": lambda _: None}))
    assert lines[0] == "no method _talker_mtp_forward"
    assert lines[1:] == [f"no {name.replace(':', '.')} (libascend_hal.so: wrong driver)" for name in FUNCTIONS]


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
        "_maybe_attach_mimo_audio_req_infos(self, req_state, other, req_id) does not take (req_state, req_infos",
    ):
        assert line in text
    assert all(one.name in text for one in RUNTIMES)


@pytest.fixture
def replaceable(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], None]:
    """Put something else, or nothing for None, in the place of a ``module:name`` or ``module:name.name``."""

    def replace(where: str, other: Any) -> None:
        module, _, path = where.partition(":")
        first, _, rest = path.partition(".")
        if rest:
            siblings = {
                name.rpartition(".")[2]: pkgutil.resolve_name(name)
                for name in FUNCTIONS
                if name.startswith(f"{module}:{first}.")
            }
            siblings.pop(rest)
            other = SimpleNamespace(**siblings, **({} if other is None else {rest: other}))
        if other is None:
            monkeypatch.delattr(importlib.import_module(module), first)
        else:
            monkeypatch.setattr(importlib.import_module(module), first, other)

    return replace


@pytest.mark.parametrize("function", list(FUNCTIONS))
def test_a_missing_function_is_named(function: str, released: type, replaceable: Callable[[str, Any], None]) -> None:
    replaceable(function, None)
    lines = fits.mismatches(OWN, _copies(released, {}))
    assert len(lines) == 1
    assert lines[0].startswith(f"no {function.replace(':', '.')}")
    assert lines[0] in _refusal(_copies(released, {}))


def test_another_forward_context_is_named(released: type, replaceable: Callable[[str, Any], None]) -> None:
    replaceable(OWN.mtp_context, lambda attn_metadata, vllm_config, *, cudagraph_runtime_mode: None)
    (line,) = fits.mismatches(OWN, _copies(released, {}))
    assert line.startswith(
        f"{OWN.mtp_context.replace(':', '.')}(attn_metadata, vllm_config, cudagraph_runtime_mode) does not take ("
    )
    assert line.endswith("got an unexpected keyword argument 'batch_descriptor'")
    assert line in _refusal(_copies(released, {}))


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
    assert "_update_intermediate_buffer(self, request, update) does not take (req_id, upd)" in str(run.error)
    assert calls == []
    assert run.untouched_by_error
    assert not run.steps[-1].log.hooks
    assert {cls: dict(vars(cls)) for cls in Changed.__mro__} == before
