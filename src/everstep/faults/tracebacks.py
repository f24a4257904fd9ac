"""Python tracebacks: what was raised, where in the program, and by which first cause.

Owns: the form of tracebacks, also cut and interleaved ones. Never does: I/O, judge. Called by:
:mod:`everstep.faults.candidates`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everstep.faults.lines import Line

_HEAD = re.compile(
    r"^\s*(?:\+ )?(?:Original |Exception Group )?Traceback \(most recent call last\):"
)
_FRAME = re.compile(
    r'^\s*(?:\| )*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<name>\S+))?'
)
_RAISED = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z_]\w*(?:Error|Exception|Interrupt|Exit|Abort|Timeout|Invalid"
    r"|Closed|NotFound|Refused|Fault|Corrupt\w*|Failed|Warning|Iteration|Group|ed)(?:\(\w+\))?)"
    r"(?:: ?(?P<message>.*))?$"
)
_ANY = re.compile(r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w+)(?:: ?(?P<message>.*))?$")
_BOXED = re.compile(r"^\s*[│|] (?:❱ )?(?P<file>/\S+\.py):(?P<line>\d+) in (?P<name>\S+)")
_SOURCE = re.compile(r"^(?:\s*\| {4,}| {4,}(?![\s]*[|+│]))\S")
"""Below a frame: the program's text, also within a group of exceptions; those themselves stand
further to the left."""
_IGNORED = re.compile(
    r"^(?:Exception ignored in|Error in atexit|Exception in thread .*(?:pin_memory|QueueFeeder))"
)
_SOURCES = frozenset(("log", "agent", "exit", "slurm", "kubernetes"))
_LINKED = re.compile(
    r"During handling of the above exception|The above exception was the direct cause"
)
_LIBRARY = re.compile(
    r"(?:site|dist)-packages/|/lib/python\d|^<frozen|^<string|/torch/(?:nn|distributed|utils"
    r"|autograd|_)"
)


@dataclass(frozen=True)
class Raised:
    """One exception of one rank. ``line`` is the line with its type; ``frame`` the last frame of
    the program (``file:line name``), or of anything where there is none. ``ignored``:
    Python itself said that it, or the one before it in its chain, was ignored."""

    line: Line
    type: str
    message: str
    frame: str
    ignored: bool = False

    @property
    def name(self) -> str:
        return self.type.rpartition(".")[2]


def raised_in(
    lines: Iterable[Line], speaking: Sequence[Line]
) -> tuple[list[Raised], set[tuple[int, int]]]:
    """The exceptions in the lines, each stream (rank or signal) by itself, and the places (signal
    and order) of their lines of source: these say what the program would do, and not what was.
    ``speaking``: those of the lines that have what any line of a traceback but its source has."""
    known = {id(line) for line in speaking}
    source: set[tuple[int, int]] = set()
    signals = {line.signal for line in speaking}
    streams: dict[object, list[Line]] = defaultdict(list)
    for line in lines:
        if line.signal in signals and line.source in _SOURCES:
            streams[(line.signal, line.rank)].append(line)
    found = [one for stream in streams.values() for one in _of_stream(stream, known, source)]
    return found, source


def _of_stream(lines: list[Line], speaking: set[int], source: set[tuple[int, int]]) -> list[Raised]:
    found: list[Raised] = []
    frames: list[re.Match[str]] = []
    inside = ignored = False
    for line in lines:
        text = line.text
        if not inside and id(line) not in speaking:
            continue
        if _IGNORED.match(text):
            ignored = True
        elif _HEAD.match(text):
            inside, frames = True, []
        elif frame := _FRAME.match(text) or _BOXED.match(text):
            inside = True
            frames.append(frame)
        elif _LINKED.search(text):
            ignored = bool(found) and found[-1].ignored
        elif raised := _raised(text, inside):
            said = raised["message"] or ""
            if (
                found
                and found[-1].message.startswith("Caught ")
                and found[-1].type in said + raised["type"]
            ):
                found.pop()  # a loader's worker: the original follows, with its own frames
            found.append(Raised(line, raised["type"], said, _where(frames), ignored=ignored))
            inside, ignored, frames = False, False, []
        elif frames and _SOURCE.match(text):
            source.add((line.signal, line.order))
    return found


def _raised(text: str, inside: bool) -> re.Match[str] | None:
    if inside and text[:1] in (" ", "\t", "~", "^", "|"):
        return None
    return _RAISED.match(text) or (_ANY.match(text) if inside else None)


def _where(frames: list[re.Match[str]]) -> str:
    if not frames:
        return ""
    own = [frame for frame in frames if not _LIBRARY.search(frame["file"])]
    frame = (own or frames)[-1]
    return f"{frame['file']}:{frame['line']}" + (f" {frame['name']}" if frame["name"] else "")
