# SPDX-License-Identifier: Apache-2.0
"""The floors of the package: who may import whom.

A room is a folder or a module at the top of the package. It imports from its own floor and from lower ones. So the core
knows nothing of its proof, the proof nothing of the commands, and no modules import each other in a circle. Imports
inside functions and for types count too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import omni_npu_phase

PACKAGE = "omni_npu_phase"
# From the ground up; __init__ is the package itself, which offers the mixins.
FLOORS = (
    {"contract", "settings", "atomic_file"},
    {"buffers", "releases"},
    {"step", "__init__"},
    {"tracing", "plugin", "workers", "platform", "standins", "ascend", "emulated_ascend"},
    {"conformance", "lint", "bench", "speech"},
    {"doctor"},
    {"commands", "__main__"},
)
Arrows = Mapping[str, set[str]]


def read(package: Path) -> Arrows:
    """Each module's name below the package, and the modules of the package that it imports."""
    files = {_name(path.relative_to(package)): path for path in package.rglob("*.py")}
    return {name: set(_imported(name, path, files)) - {name} for name, path in files.items()}


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def _imported(name: str, path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    for full in _full_names(name, path):
        package, _, below = full.partition(".")
        while package == PACKAGE:
            if (below or "__init__") in files:
                yield below or "__init__"
                break
            # The last part is something that the module defines.
            below = below.rpartition(".")[0]


def _full_names(name: str, path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folders = [PACKAGE, *name.split(".")][: None if path.name == "__init__.py" and name != "__init__" else -1]
            start = folders[: len(folders) - node.level + 1] if node.level else []
            yield from (".".join([*start, *filter(None, [node.module]), alias.name]) for alias in node.names)


def climbs(arrows: Arrows) -> list[str]:
    """Imports from a higher floor, and modules that are on none."""
    floor = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
    rooms = {module: module.partition(".")[0] for module in arrows}
    homeless = [f"{module} is on no floor" for module, room in rooms.items() if room not in floor]
    return homeless or [
        f"{module} imports {other}"
        for module, others in sorted(arrows.items())
        for other in sorted(others)
        if floor[rooms[other]] > floor[rooms[module]]
    ]


def circles(arrows: Arrows) -> list[list[str]]:
    """Groups of modules that import each other, whether directly or by way of others of the group."""
    reached = {module: _reached(module, arrows) for module in arrows}
    groups = {frozenset(other for other in reached[module] if module in reached[other]) for module in arrows}
    return sorted(sorted(group) for group in groups if group)


def _reached(module: str, arrows: Arrows) -> set[str]:
    found: set[str] = set()
    ahead = set(arrows[module])
    while ahead:
        found |= ahead
        ahead = {further for other in ahead for further in arrows[other]} - found
    return found


@pytest.fixture(scope="module")
def own() -> Arrows:
    return read(Path(omni_npu_phase.__file__).parent)


def test_nothing_imports_from_a_higher_floor(own: Arrows) -> None:
    assert climbs(own) == []


def test_no_modules_import_each_other_in_a_circle(own: Arrows) -> None:
    assert circles(own) == []


def test_every_room_of_the_floors_is_there(own: Arrows) -> None:
    assert {module.partition(".")[0] for module in own} == set().union(*FLOORS)


@pytest.mark.parametrize(
    ("module", "text", "climb"),
    [
        ("step/v1.py", "from omni_npu_phase.tracing import record", "step.v1 imports tracing"),
        ("step/v1.py", "def late():\n    import omni_npu_phase.lint.rules", "step.v1 imports lint.rules"),
        ("step/__init__.py", "from ..conformance import judge", "step imports conformance.judge"),
        ("buffers/base.py", "from omni_npu_phase import PhaseRoutingMixin", "buffers.base imports __init__"),
        ("contract.py", "from . import settings, doctor", "contract imports doctor"),
        ("contract.py", "if TYPE_CHECKING:\n    from .step.v1 import Plan", "contract imports step.v1"),
        ("lint/rules.py", "from omni_npu_phase.commands.app import app", "lint.rules imports commands.app"),
        ("extra/own.py", "", "extra.own is on no floor"),
        ("lint/rules.py", "import numpy, omni_npu_phase.contract, omni_npu_phase_other.doctor", None),
    ],
)
def test_a_climb_is_seen(module: str, text: str, climb: str | None, tmp_path: Path) -> None:
    for name in ("__init__.py", "contract.py", "settings.py", "doctor.py", "step/v1.py", "tracing/__init__.py",
                 "lint/rules.py", "conformance/judge.py", "commands/app.py", "buffers/base.py"):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / module).parent.mkdir(exist_ok=True)
    (tmp_path / module).write_text(text, encoding="utf-8")
    assert climbs(read(tmp_path)) == ([] if climb is None else [climb])
    assert circles(read(tmp_path)) == []


def test_a_circle_is_seen(tmp_path: Path) -> None:
    for name, text in {
        "one.py": "from . import two",
        "two.py": "def late():\n    from .three import thing",
        "three.py": "import omni_npu_phase.one",
        "outside.py": "from omni_npu_phase.one import thing",
        "pair/__init__.py": "from .half import thing",
        "pair/half.py": "from omni_npu_phase import pair",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "__init__.py").touch()
    assert circles(read(tmp_path)) == [["one", "three", "two"], ["pair", "pair.half"]]
