"""How commands speak: one stream of records, as text for people or as JSON for programs.

Owns: the two reporters, the exit code of an error, and the rule that results go to stdout and all
talk to stderr. Called by: every command but ``run``, whose workers own both streams.
"""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from everstep.core import exits
from everstep.core.events import Event, encode_line
from everstep.errors import EverstepError, UsageError

WIDE = 400
"""Columns where nobody's terminal sets a limit, so that no cell is cut in a file or a pipe."""

Advance = Callable[[int], None]
Render = Callable[[Console], None]

_STYLE = {"ok": "green", "warn": "yellow", "warning": "yellow", "fail": "red", "error": "red"}


class Reporter(Protocol):
    """What a command talks to. ``result`` is called once, at the end."""

    def event(self, event: Event) -> None: ...

    def say(self, text: str) -> None: ...

    def result(self, document: msgspec.Struct, render: Render) -> None: ...

    def progress(self, label: str, total: int) -> Any:
        """A context manager; it gives the function that is told of each further byte."""


class TextReporter:
    """Results as tables on stdout, talk and a progress bar (on a terminal only) on stderr."""

    def __init__(self) -> None:
        self._out, self._err = _console(sys.stdout), _console(sys.stderr)
        self._start = time.monotonic()

    def event(self, event: Event) -> None:
        if event.level != "debug":
            # Words of programs, paths of libraries among them: nothing in it is markup.
            line = event_line(event, self._start)
            self._err.print(line, style=_STYLE.get(event.level), markup=False)

    def say(self, text: str) -> None:
        self._err.print(text, markup=False)

    def result(self, document: msgspec.Struct, render: Render) -> None:
        del document
        render(self._out)

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Advance]:
        if not self._err.is_terminal or not total:
            yield lambda _: None
            return
        columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=self._err, transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda count: bar.advance(task, count)


class JsonReporter:
    """The result as one JSON document on stdout, events as lines of JSON on stderr."""

    def event(self, event: Event) -> None:
        sys.stderr.buffer.write(encode_line(event))
        sys.stderr.flush()

    def say(self, text: str) -> None:
        self.event(
            Event(wall=time.time(), mono=time.monotonic(), source="cli", kind="say", text=text)
        )

    def result(self, document: msgspec.Struct, render: Render) -> None:
        del render
        sys.stdout.write(to_json(document))

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Advance]:
        del label, total
        yield lambda _: None


class ErrorDocument(msgspec.Struct, frozen=True):
    """What ``--json`` prints in place of a result. ``code`` is the stable EVS code."""

    format: str
    code: str
    what: str
    hint: str
    retryable: bool


def reporter(*, as_json: bool) -> Reporter:
    """The reporter that ``--json`` asks for."""
    return JsonReporter() if as_json else TextReporter()


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--json``, the same for all commands; given to the function as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")(command)


def reported(command: Callable[..., int]) -> Callable[..., None]:
    """Run a command that returns its exit code; its errors become text (or JSON) and a code."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            code = command(*args, **kwargs)
        except EverstepError as error:
            _print_error(error, as_json=bool(kwargs.get("as_json")))
            code = exits.USAGE if isinstance(error, UsageError) else exits.FAILED
        sys.exit(code)

    return run


def to_json(document: object) -> str:
    """The document indented, with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def event_line(event: Event, start: float) -> str:
    """One event for people: seconds since ``start`` (CLOCK_MONOTONIC), who, what."""
    who = event.source if event.rank is None else f"{event.source} {event.rank}"
    said = event.text or event.kind
    named = event.step is None or re.search(rf"\bstep {event.step}\b", said)
    return f"{event.mono - start:8.2f}s  {who:<9} {said}" + (
        "" if named else f" (step {event.step})"
    )


def table(*headers: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table in the house's style; columns in ``right`` hold numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for header in headers:
        made.add_column(header, justify="right" if header in right else "left", overflow="fold")
    return made


def mark(level: str) -> str:
    """``ok``, ``warn`` or ``fail`` in its colour (none where the output is no terminal)."""
    return f"[{_STYLE.get(level, 'default')}]{level}[/]"


def age(seconds: float) -> str:
    """A duration for people: ``12 s``, ``3 min``, ``5 h``, ``2 d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def size(count: int) -> str:
    """Bytes for people: ``1.5 GB``; powers of 1000."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _console(file: Any) -> Console:
    terminal = file.isatty()
    return Console(file=file, width=None if terminal else WIDE, highlight=False, markup=True)


def _print_error(error: EverstepError, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(
            to_json(
                ErrorDocument(
                    "everstep.error/1", error.code, error.what, error.hint, error.retryable
                )
            )
        )
    else:
        print(f"everstep: {error}", file=sys.stderr)
