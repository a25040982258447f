# SPDX-License-Identifier: Apache-2.0
"""Streams and events of a device on which everything has happened when a call returns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream:
    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass

    def wait_event(self, _: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


@contextmanager
def inert() -> Iterator[None]:
    """Answer for the streams and events that asynchronous scheduling asks of ``torch.cuda``, until the block ends."""
    current = _Stream()
    names: dict[str, Any] = {
        "Event": _Event,
        "Stream": _Stream,
        "current_stream": lambda *_: current,
        "stream": nullcontext,
        "set_device": lambda _: None,
    }
    with ExitStack() as patches:
        for name, value in names.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, value))
        patches.enter_context(mock.patch.object(torch, "Event", _Event))
        patches.enter_context(mock.patch.object(torch.Tensor, "record_stream"))
        yield
