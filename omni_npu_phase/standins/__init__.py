# SPDX-License-Identifier: Apache-2.0
"""Modules that stand for packages which are missing, and say so when more is asked of them."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NoReturn


class StandInModule(ModuleType):
    """A module that says it is a stand-in when a name is missing from it."""

    def __getattr__(self, name: str) -> NoReturn:
        package = self.__name__.partition(".")[0]
        raise AttributeError(f"the {package} stand-in has no {self.__name__}.{name}; install {package} to use it")


def stand_in(*modules: str, names: Mapping[str, Any] | None = None) -> None:
    """Make ``modules``, each after its parent, importable; the last one has ``names``."""
    for name in modules:
        module = StandInModule(name, "A stand-in; see omni_npu_phase.standins.")
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    vars(sys.modules[modules[-1]]).update(names or {})
