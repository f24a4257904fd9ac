"""The one stream of events: what happened, in one record, for people and programs alike.

Owns: the record and its text and JSON forms. Never does: I/O. Called by: keeper, agent, train
(which make events), cli and drill (which read them).
"""

from __future__ import annotations

from typing import Literal

import msgspec

Source = Literal["agent", "keeper", "worker", "cli", "drill"]
Level = Literal["debug", "info", "warning", "error"]


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One observation.

    ``wall`` is seconds since the epoch, ``mono`` seconds of CLOCK_MONOTONIC (comparable between
    the processes of one machine). ``kind`` is a stable dotted name such as ``snapshot.complete``;
    ``facts`` holds figures and names, JSON types only.
    """

    wall: float
    mono: float
    source: Source
    kind: str
    text: str = ""
    level: Level = "info"
    job: str = ""
    attempt: int = 0
    rank: int | None = None
    node: int | None = None
    step: int | None = None
    facts: dict[str, object] = {}


def counted(count: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``: for texts of events and commands."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def encode_line(event: Event) -> bytes:
    """One line of JSON, newline included; at most one line whatever the text holds."""
    return msgspec.json.encode(event) + b"\n"


def decode_line(line: bytes) -> Event:
    """The event of one line. Raises ``msgspec.DecodeError`` where the line is torn."""
    return msgspec.json.decode(line, type=Event)
