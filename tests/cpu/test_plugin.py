# SPDX-License-Identifier: Apache-2.0
"""The plugin: which classes workers build when it is installed, what it refuses, and that it can be taken back."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
import os
import pickle
import shutil
import subprocess
import sys
import typing
from abc import ABC
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import cloudpickle  # type: ignore[import-untyped]
import pytest
import torch

from omni_npu_phase import PhaseRoutingMixin, plugin, workers
from omni_npu_phase.releases import UnsupportedRuntimeError
from omni_npu_phase.releases.places import PLACES, V1
from omni_npu_phase.settings import PLATFORM_VARIABLE
from omni_npu_phase.step.port import PhaseMixin

ROOT = Path(__file__).parents[2]
_T = TypeVar("_T")
KINDS = ("ar", "generation")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the plugin logs, a refusal that was already said elsewhere included."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, level = Collect(), plugin.logger.level
    monkeypatch.setattr(plugin, "_said", set())
    plugin.logger.addHandler(handler)
    plugin.logger.setLevel(logging.INFO)
    yield lines
    plugin.logger.removeHandler(handler)
    plugin.logger.setLevel(level)


@pytest.fixture
def taken_back() -> Iterator[None]:
    yield
    plugin.uninstall()


def _worker(kind: str) -> Any:
    return importlib.import_module(f"vllm_omni.worker.gpu_{kind}_worker")


def _runner_module(kind: str) -> Any:
    return importlib.import_module(f"vllm_omni.worker.gpu_{kind}_model_runner")


def _names(kind: str) -> dict[str, type]:
    """Every name of a kind's runner in the installed release."""
    runner = {"ar": "GPUARModelRunner", "generation": "GPUGenerationModelRunner"}[kind]
    worker = _worker(kind)
    worker_class = getattr(worker, runner.replace("ModelRunner", "Worker"))
    return {
        "defined": getattr(_runner_module(kind), runner),
        "global": getattr(worker, runner),
        # Older releases have no such attribute.
        "attribute": getattr(worker_class, "model_runner_cls", getattr(worker, runner)),
    }


def _is_before(mixin: type, released: tuple[type, ...], cls: type) -> bool:
    """Whether a class has the mixin, with its own bases, right before released classes."""
    mro = list(cls.__mro__)
    before = [base for base in mixin.__mro__ if base is not object]
    start = mro.index(mixin)
    return mro[start : start + len(before)] == before and tuple(mro[-len(released) :]) == released


@pytest.mark.usefixtures("taken_back")
@pytest.mark.parametrize("kind", KINDS)
def test_installed_and_taken_back(kind: str) -> None:
    names = _names(kind)
    (cls,) = set(names.values())
    released = cls.__mro__
    plugin.install()
    assert _names(kind) == names
    assert _is_before(PhaseRoutingMixin, released[1:], cls)
    phased = cls.__mro__

    plugin.install()
    assert cls.__mro__ == phased
    assert sum(finder is plugin._FINDER for finder in sys.meta_path) == 1

    plugin.uninstall()
    assert cls.__mro__ == released
    assert plugin._FINDER not in sys.meta_path
    plugin.uninstall()
    assert cls.__mro__ == released


@pytest.mark.usefixtures("taken_back")
def test_model_runner_v2() -> None:
    """What the released state itself defines under the mixin's names is behind the mixin then."""
    from vllm_omni.worker_v2.model_states.omni_model_state import OmniModelState

    from omni_npu_phase.step.v2 import PhaseStateMixin

    mro, run = OmniModelState.__mro__, OmniModelState.run_preprocess
    plugin.install()
    assert _is_before(PhaseStateMixin, mro[1:], OmniModelState)
    assert OmniModelState.run_preprocess is PhaseStateMixin.run_preprocess
    assert super(PhaseMixin, OmniModelState).run_preprocess is run
    plugin.uninstall()
    assert OmniModelState.__mro__ == mro
    assert vars(OmniModelState)["run_preprocess"] is run


class TestIdentity:
    """The class that workers build is the released one, whoever asks it who it is, and whenever he got it."""

    @pytest.fixture
    def early(self, released: type) -> type:
        return type("Early", (released,), {})

    @pytest.fixture
    def given(self, released: type, early: type) -> Iterator[type]:
        plugin.install()
        yield released
        plugin.uninstall()

    def test_its_names_source_and_pickles_are_its_own(self, given: type, early: type) -> None:
        assert issubclass(given, PhaseRoutingMixin)
        assert repr(given) == "<class 'vllm_omni.worker.gpu_ar_model_runner.GPUARModelRunner'>"
        assert inspect.getsource(given).startswith("class GPUARModelRunner(")
        assert pickle.loads(pickle.dumps(given)) is given
        # A function sent by collective_rpc names the class, and does not carry one.
        asks = cloudpickle.loads(cloudpickle.dumps(lambda cls: issubclass(cls, given)))
        assert asks(given)
        assert asks(early)
        assert typing.get_type_hints(given)

    def test_what_was_derived_before_has_the_mixin(self, given: type, early: type) -> None:
        assert issubclass(early, PhaseRoutingMixin)
        assert plugin.phase_runner(early) is early
        plugin.uninstall()
        assert not issubclass(early, PhaseRoutingMixin)

    def test_a_patch_of_the_class_is_called_whenever_it_comes(
        self, released: type, given: type, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(released, "_preprocess", lambda self: "patched")
        assert given._preprocess(None) == "patched"  # type: ignore[attr-defined]

    @pytest.mark.parametrize("bases", ["before", "after", "with an ABC"])
    def test_the_mixin_may_be_listed_before_it(self, bases: str, released: type) -> None:
        """By hand, as the README says, made before or after the plugin came."""
        listed = (PhaseRoutingMixin, released, *((ABC,) if bases == "with an ABC" else ()))
        if bases != "before":
            plugin.install()
        try:
            cls = type("ByHand", listed, {})
            plugin.install()
            mro = cls.__mro__
            assert mro.index(released) < mro.index(PhaseRoutingMixin) < mro.index(released.__mro__[-2])
        finally:
            plugin.uninstall()
        assert cls.__mro__.index(PhaseRoutingMixin) < cls.__mro__.index(released)

    def test_listing_the_mixin_again_makes_one_class(self, given: type) -> None:
        """A generic one too; hooks for subclasses are called once, with their keywords."""
        made: list[tuple[type, str]] = []

        class Tagged(given):  # type: ignore[misc, valid-type]
            def __init_subclass__(cls, *, tag: str) -> None:
                super().__init_subclass__()
                made.append((cls, tag))

        class Again(PhaseRoutingMixin, Tagged, Generic[_T], tag="a"):  # type: ignore[misc]
            pass

        assert made == [(Again, "a")]
        assert Again[int] is not None  # type: ignore[misc]
        with pytest.raises(TypeError, match="no method resolution order for"):
            type("Crossed", (PhaseRoutingMixin, given, Tagged), {}, tag="b")

    def test_a_method_that_calls_super_does_not_move(self, released: type, monkeypatch: pytest.MonkeyPatch) -> None:
        class Calls(released):  # type: ignore[misc, valid-type]
            def _preprocess(self, scheduler_output: Any, num_input_tokens: int, intermediate_tensors: Any) -> Any:
                return super()._preprocess(scheduler_output, num_input_tokens, intermediate_tensors)

        mro = Calls.__mro__
        monkeypatch.setattr(plugin, "_RELEASED_PACKAGES", ("tests", *plugin._RELEASED_PACKAGES))
        with pytest.raises(UnsupportedRuntimeError, match=r"Calls\._preprocess calls super"):
            plugin.give(Calls)
        assert Calls.__mro__ == mro


@pytest.mark.usefixtures("taken_back")
def test_off_and_odd_values(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    (released,) = set(_names("ar").values())
    monkeypatch.setenv("OMNI_NPU_PHASE", "off")
    plugin.install()
    assert not issubclass(released, PhaseRoutingMixin)
    assert plugin.phase_runner(released) is released
    assert said == ["omni-npu-phase: OMNI_NPU_PHASE=off, nothing is replaced"]
    monkeypatch.setenv("OMNI_NPU_PHASE", "yes")
    with pytest.raises(ValueError, match="OMNI_NPU_PHASE take off, on or strict, not 'yes'"):
        plugin.install()
    assert not issubclass(released, PhaseRoutingMixin)


@pytest.mark.usefixtures("taken_back")
def test_off_takes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    (cls,) = set(_names("ar").values())
    plugin.install()
    assert issubclass(cls, PhaseRoutingMixin)
    monkeypatch.setenv("OMNI_NPU_PHASE", "off")
    plugin.install()
    assert not issubclass(cls, PhaseRoutingMixin)
    assert plugin._FINDER not in sys.meta_path


@pytest.mark.usefixtures("taken_back")
def test_a_finder_of_the_old_form_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def find_module(self, name: str, path: Any = None) -> None:
            return None

    module = "vllm_omni.worker.gpu_ar_model_runner"
    monkeypatch.setattr(sys, "meta_path", [plugin._FINDER, Old(), *sys.meta_path])
    spec = plugin._FINDER.find_spec(module, importlib.import_module("vllm_omni.worker").__path__)
    assert spec is not None
    assert isinstance(spec.loader, plugin._GivingLoader)


@pytest.mark.usefixtures("taken_back")
def test_one_line_says_what_was_installed_where(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    _worker("ar")
    plugin.install()
    (line,) = [line for line in said if "GPUARModelRunner" in line]
    assert "(on): PhaseRoutingMixin is before vllm_omni.worker.gpu_ar_model_runner.GPUARModelRunner" in line
    assert "vLLM-Omni 0.30 (V1)" in line


def test_a_platform_may_ask_for_its_own_class(released: type) -> None:
    class Derived(released):  # type: ignore[misc, valid-type]
        pass

    phased = plugin.phase_runner(Derived)
    assert _is_before(PhaseRoutingMixin, Derived.__mro__, phased)
    assert (phased.__module__, phased.__qualname__) == (__name__, "PhaseDerived")
    assert plugin.phase_runner(Derived) is phased
    assert plugin.phase_runner(phased) is phased


class TestForeign:
    """Third parties: what they leave to the mixin gets it, what they override is kept and said."""

    @pytest.fixture
    def overriding(self, released: type) -> type:
        class Overriding(released):  # type: ignore[misc, valid-type]
            def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
                return super()._preprocess(*args, **kwargs)

        return Overriding

    @pytest.mark.usefixtures("taken_back")
    def test_a_replaced_class_gets_the_mixin(self, released: type, monkeypatch: pytest.MonkeyPatch) -> None:
        class Another(released):  # type: ignore[misc, valid-type]
            pass

        monkeypatch.setattr(_worker("ar"), "GPUARModelRunner", Another)
        plugin.install()
        assert issubclass(Another, PhaseRoutingMixin)
        assert _worker("ar").GPUARModelRunner is Another
        plugin.uninstall()
        assert not issubclass(Another, PhaseRoutingMixin)

    @pytest.mark.usefixtures("taken_back")
    def test_a_replaced_class_that_overrides_is_kept(
        self, overriding: type, monkeypatch: pytest.MonkeyPatch, said: list[str]
    ) -> None:
        monkeypatch.setattr(_worker("ar"), "GPUARModelRunner", overriding)
        plugin.install()
        assert _worker("ar").GPUARModelRunner is overriding
        (line,) = [line for line in said if "Overriding" in line]
        assert "overrides _preprocess" in line
        assert f"omni-npu-phase verify --mode released --runner {__name__}:" in line

    @pytest.mark.usefixtures("taken_back")
    def test_strict_refuses_it(self, overriding: type, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_worker("ar"), "GPUARModelRunner", overriding)
        monkeypatch.setenv("OMNI_NPU_PHASE", "strict")
        with pytest.raises(UnsupportedRuntimeError, match="responsible for the phase contract"):
            plugin.install()

    @pytest.mark.usefixtures("taken_back")
    def test_a_patched_method_is_kept(self, released: type, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
        monkeypatch.setattr(released, "_talker_mtp_forward", lambda self, ids, embeds, start_offsets=None: None)
        plugin.install()
        assert not issubclass(released, PhaseRoutingMixin)
        assert any("GPUARModelRunner overrides _talker_mtp_forward" in line for line in said)

    @pytest.mark.usefixtures("taken_back")
    @pytest.mark.parametrize("decorate", [lambda function: function, torch.inference_mode()], ids=["plain", "torch"])
    def test_a_patch_that_wraps_is_kept(
        self,
        decorate: Callable[[Any], Any],
        released: type,
        monkeypatch: pytest.MonkeyPatch,
        said: list[str],
    ) -> None:
        """functools.wraps gives a patch the module of what it wraps."""
        original = released._preprocess  # type: ignore[attr-defined]

        @decorate
        @functools.wraps(original)
        def patch(self: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, *args, **kwargs)

        monkeypatch.setattr(released, "_preprocess", patch)
        plugin.install()
        assert not issubclass(released, PhaseRoutingMixin)
        assert any("GPUARModelRunner overrides _preprocess" in line for line in said)

    def test_torchs_own_decorators_are_no_patch(self, released: type, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(released, "_preprocess", torch.inference_mode()(released._preprocess))  # type: ignore[attr-defined]
        assert issubclass(plugin.phase_runner(released), PhaseRoutingMixin)

    @pytest.mark.parametrize("method", V1.bypassed)
    def test_an_override_that_the_mixin_would_not_call_is_kept(
        self, method: str, released: type, said: list[str]
    ) -> None:
        cls = type("Bypassed", (released,), {method: lambda self, *args, **kwargs: None, "__module__": __name__})
        assert plugin.phase_runner(cls) is cls
        (line,) = said
        assert f"Bypassed overrides {method}, and so is responsible" in line

    def test_a_later_subclass_that_overrides_is_kept(
        self, mixed: type, released: type, monkeypatch: pytest.MonkeyPatch, said: list[str]
    ) -> None:
        phased = plugin.phase_runner(released)

        class Quiet(phased):  # type: ignore[misc, valid-type]
            pass

        assert said == [] or "is before" in said[0]
        said.clear()

        class Overriding(phased):  # type: ignore[misc, valid-type]
            def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
                return super()._preprocess(*args, **kwargs)

        (line,) = said
        assert "Overriding overrides _preprocess" in line
        assert Overriding.__mro__[1] is phased
        monkeypatch.setenv("OMNI_NPU_PHASE", "strict")
        with pytest.raises(UnsupportedRuntimeError):
            type("Later", (phased,), {"_talker_mtp_forward": Overriding.__dict__["_preprocess"]})


# Another process is what a worker is: nothing of this one is imported there.


@pytest.fixture(scope="session")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip records of this checkout, whatever the environment's own record says."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("metadata")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "omni_npu_phase", source / "omni_npu_phase", ignore=shutil.ignore_patterns("__pycache__"))
    code = f"from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel({str(target)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    return target


Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def python(metadata: Path) -> Python:
    def run(code: str, *folders: Path | str, **environment: str) -> subprocess.CompletedProcess[str]:
        # Another release may lie over the environment; ROOT is there for those who run pytest without it.
        path = os.pathsep.join(map(str, [*folders, metadata, os.environ.get("PYTHONPATH", ""), ROOT]))
        variables = {**os.environ, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "INFO", **environment}
        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=variables, timeout=300
        )

    return run


# As vLLM's WorkerWrapperBase does it: plugins first, then the worker by name. What the worker builds is read from its
# own code: the attribute, or the global that its init_device calls. What the environment may say is asked before.
SPAWNED = """
import inspect
import multiprocessing
import os
import pathlib
import pickle
import sys

import cloudpickle

def loads(**variables):
    from vllm import plugins

    os.environ.update(variables)
    plugins.plugins_loaded = False
    plugins.load_general_plugins()
    own = sys.modules.get("omni_npu_phase.plugin")
    found = bool(own) and own._FINDER in sys.meta_path
    if own:
        own.uninstall()
    plugins.plugins_loaded = False
    return str(found)

def child(queue):
    from vllm.plugins import load_general_plugins
    from vllm.utils.import_utils import resolve_obj_by_qualname

    off = loads(OMNI_NPU_PHASE="off")
    del os.environ["OMNI_NPU_PHASE"]
    queue.put(["loads", loads(VLLM_PLUGINS="another"), loads(VLLM_PLUGINS="another,omni_npu_phase"), off])
    del os.environ["VLLM_PLUGINS"]
    load_general_plugins()
    load_general_plugins()
    for kind, name in (("ar", "GPUARWorker"), ("generation", "GPUGenerationWorker")):
        worker = resolve_obj_by_qualname(f"vllm_omni.worker.gpu_{kind}_worker.{name}")
        build = inspect.unwrap(worker.init_device)
        if "model_runner_cls" in build.__code__.co_names:
            runner = worker.model_runner_cls
        else:
            (called,) = [called for called in build.__code__.co_names if called.endswith("ModelRunner")]
            runner = build.__globals__[called]
        asks = cloudpickle.loads(pathlib.Path(__file__).with_name("question").read_bytes())
        source = inspect.getsource(runner).partition("(")[0].replace(" ", ":")
        itself = str(pickle.loads(pickle.dumps(runner)) is runner)
        queue.put([kind, asks(runner), source, itself, *(cls.__name__ for cls in runner.__mro__)])

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    for _ in range(3):
        print("child:", *queue.get(timeout=240))
    process.join()
"""


@pytest.fixture(scope="module")
def spawned(python: Python, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What a worker's process answered: ``loads``; of each kind of worker's runner which of the classes here it derives
    from, as a callable from here finds, how its source begins, whether its pickle is itself, and its bases."""
    script = tmp_path_factory.mktemp("spawned") / "spawned.py"
    script.write_text(SPAWNED, encoding="utf-8")
    own = {kind: _names(kind)["defined"] for kind in KINDS}
    plugin.install()
    question = cloudpickle.dumps(lambda runner: "+".join(kind for kind, cls in own.items() if issubclass(runner, cls)))
    plugin.uninstall()
    script.with_name("question").write_bytes(question)
    done = python(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("child: ")]
    return {kind: answer for kind, *answer in lines}


def test_a_spawned_worker_builds_the_class_with_the_mixin(spawned: dict[str, list[str]]) -> None:
    """On whichever release is installed, or lies over it."""
    for kind in KINDS:
        assert spawned[kind].index("PhaseRoutingMixin") < spawned[kind].index("OmniGPUModelRunner"), kind


def test_a_spawned_worker_knows_the_class_as_released(spawned: dict[str, list[str]]) -> None:
    """Where a callable was sent to workers, and names a class that was imported before the plugin came."""
    for kind, name in zip(KINDS, ("GPUARModelRunner", "GPUGenerationModelRunner"), strict=True):
        assert spawned[kind][:4] == [kind, f"class:{name}", "True", name]


def test_vllm_plugins_and_off_are_honoured(spawned: dict[str, list[str]]) -> None:
    """Where the plugin does not load, or with ``off``, no later import is watched."""
    assert spawned["loads"] == ["False", "True", "False"]


def test_installing_imports_nothing_heavy(python: Python) -> None:
    code = (
        "import sys; from omni_npu_phase import plugin; plugin.install(); print(plugin._FINDER in sys.meta_path, "
        "[name for name in ('torch', 'vllm', 'vllm_omni', 'torch_npu', 'vllm_ascend') if name in sys.modules])"
    )
    assert python(code).stdout.strip() == "True []"


def test_it_takes_no_platform_over_unless_asked(metadata: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PLATFORM_VARIABLE, raising=False)
    distribution = next(iter(importlib.metadata.distributions(name="omni-npu-phase", path=[str(metadata)])))
    platforms = [entry for entry in distribution.entry_points if entry.group.endswith(".platform_plugins")]
    assert {entry.group for entry in platforms} == {"vllm.platform_plugins", "vllm_omni.platform_plugins"}
    assert {entry.load()() for entry in platforms} == {None}


LOGGED = "import logging; logging.basicConfig(level='INFO'); from omni_npu_phase import plugin; plugin.install()"


def test_without_vllm_omni(python: Python) -> None:
    done = python(f"import sys; sys.modules['vllm_omni'] = None; {LOGGED}")
    assert done.returncode == 0
    assert done.stderr.strip().endswith("vllm_omni is not installed, nothing is replaced")


def _fake_release(folder: Path, runner_source: str | None) -> Path:
    worker = folder / "vllm_omni" / "worker"
    worker.mkdir(parents=True)
    for package in (worker, worker.parent):
        (package / "__init__.py").touch()
    if runner_source is not None:
        (worker / "gpu_ar_model_runner.py").write_text(runner_source, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "none of the modules that define its runners: an unknown release, or half-installed"),
        ("", "vllm_omni.worker.gpu_ar_model_runner has no class GPUARModelRunner"),
        ("class GPUARModelRunner: _preprocess = 1", "no method _preprocess; no method _talker_mtp_forward"),
    ],
    ids=["half-installed", "no class", "unknown release"],
)
def test_what_is_not_known_stays_and_is_named(source: str | None, reason: str, python: Python, tmp_path: Path) -> None:
    """With ``on`` it stays, the module with its own loader; with ``strict`` it is an error."""
    folder = _fake_release(tmp_path, source)
    code = f"""
import logging, os, sys
logging.basicConfig(level="INFO")
from omni_npu_phase import plugin

def load():
    plugin.install()
    if {source is not None}:
        import vllm_omni.worker.gpu_ar_model_runner as module
        print("loaders:", type(module.__loader__).__name__, type(module.__spec__.loader).__name__)
        assert module.__loader__.get_source(module.__name__) == {source!r}
        print(getattr(module, "GPUARModelRunner", None))

load()
print("stayed", flush=True)
sys.modules.pop("vllm_omni.worker.gpu_ar_model_runner", None)
os.environ["OMNI_NPU_PHASE"] = "strict"
load()
"""
    done = python(code, folder)
    # vLLM, once imported, logs to standard output.
    output = done.stdout + done.stderr
    assert "stayed" in done.stdout, output
    assert output.count("omni-npu-phase: ") == 1
    assert reason in output
    assert "PhaseGPUARModelRunner" not in output
    assert done.stdout.count("loaders: SourceFileLoader SourceFileLoader") == (0 if source is None else 1)
    assert done.returncode == 1
    assert "UnsupportedRuntimeError" in done.stderr
    assert reason in done.stderr.splitlines()[-1]


def test_an_unexpected_error_stops_no_engine(python: Python, tmp_path: Path) -> None:
    folder = _fake_release(tmp_path, "class GPUARModelRunner: pass")
    code = (
        f"import sys; sys.modules['omni_npu_phase.step.v1'] = None; {LOGGED};"
        "import vllm_omni.worker.gpu_ar_model_runner as m; print(m.GPUARModelRunner)"
    )
    done = python(code, folder)
    assert done.returncode == 0, done.stderr
    assert "ModuleNotFoundError: " in done.stdout + done.stderr
    assert python(code, folder, OMNI_NPU_PHASE="strict").returncode == 1


class TestNamedWorkers:
    @pytest.mark.usefixtures("taken_back")
    def test_the_platforms_own_worker_with_the_mixin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm_omni import platforms
        from vllm_omni.platforms.interface import OmniPlatform

        class Platform(OmniPlatform):
            """CPU has no platform in vLLM-Omni; CUDA's and ROCm's name these workers."""

            get_omni_ar_worker_cls = staticmethod(lambda: "vllm_omni.worker.gpu_ar_worker.GPUARWorker")
            get_omni_generation_worker_cls = staticmethod(
                lambda: "vllm_omni.worker.gpu_generation_worker.GPUGenerationWorker"
            )

        monkeypatch.setattr(platforms, "current_omni_platform", Platform(), raising=False)
        for kind, name in zip(KINDS, ("ARWorker", "GenerationWorker"), strict=True):
            worker = getattr(workers, name)
            assert worker is getattr(_worker(kind), worker.__name__)
            assert issubclass(worker.model_runner_cls, PhaseRoutingMixin)

    def test_no_other_names(self) -> None:
        with pytest.raises(AttributeError, match="no attribute 'Worker'"):
            _ = workers.Worker


def test_places_are_in_the_installed_release() -> None:
    """A place that nothing has would never be replaced, and nobody would notice."""
    for place in PLACES:
        if place.module.startswith("vllm_omni.worker."):
            module = importlib.import_module(place.module)
            owner, name = plugin._owner(module, place.name)
            assert isinstance(vars(owner)[name], type), place
