# SPDX-License-Identifier: Apache-2.0
"""What every command shares: reports on standard output, progress and messages on standard error."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from omni_npu_phase import atomic_file

FAILED, UNUSABLE = 1, 2
# Reports must read the same in a log as in a terminal; a pipe has no width of its own.
_PLAIN_WIDTH = 160


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A spinner with the time that has passed in a terminal, one line a phase elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        seen: set[str] = set()

        def say_line(text: str) -> None:
            phase = text.partition(":")[0]
            if phase not in seen:
                seen.add(phase)
                console.print(f"... {phase}", highlight=False)

        yield say_line
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("")
        yield lambda text: bar.update(task, description=text)


def escape(text: str) -> str:
    """Text as it is, where rich would read markup."""
    return text.replace("[", "\\[")


def write(parts: Sequence[Table | str], output: Path | None) -> None:
    """Tables and lines to a file, or to standard output without one."""
    console = Console()
    if output is None and console.is_terminal:
        for part in parts:
            console.print(part, highlight=False)
        return
    text = io.StringIO()
    console = Console(width=_PLAIN_WIDTH, file=text)
    for part in parts:
        console.print(part, highlight=False)
    write_text(text.getvalue(), output)


def write_text(text: str, output: Path | None) -> None:
    """The same for text that is ready."""
    try:
        if output is None:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            output.write_text(text, encoding="utf-8")
    except OSError as error:
        stop(f"{'standard output' if output is None else f'--output {output}'}: {error.strerror}")


def write_whole(path: Path, write_to: Callable[[Path], object]) -> None:
    """Write a file that is there as a whole or, where it cannot be written, not at all."""
    if path.is_dir():
        stop(f"{path}: this is a folder; name a file in it")
    try:
        if path.exists() and not path.is_file():
            # A device or a pipe: to put a file in its place would take it away from everybody.
            write_to(path)
        else:
            atomic_file.write(path.resolve(), write_to)
    except OSError as error:
        stop(f"{path}: {error.strerror}")


def stop(message: str) -> NoReturn:
    """Say in one line why it cannot go on, and exit 2."""
    Console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    raise typer.Exit(UNUSABLE)


class InterruptedByError(BaseException):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        self.name = signal.Signals(number).name


@contextlib.contextmanager
def signals_raised() -> Iterator[None]:
    """Raise :class:`InterruptedByError` for the first signal that asks this process to end, and ignore those after it.

    What is under way then ends its processes and removes its files, in seconds.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # Whoever started this process with a signal ignored, as nohup does, wants it so.
    before = {number: signal.getsignal(number) for number in numbers}
    heard = [number for number in numbers if before[number] is not signal.SIG_IGN]

    def interrupt(number: int, _: FrameType | None) -> None:
        for each in heard:
            signal.signal(each, signal.SIG_IGN)
        raise InterruptedByError(number)

    for number in heard:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])
