"""Names of objects. The one place that knows the layout of spec section 4.

Owns: building and parsing keys, and refusing unsafe ones. Never does: I/O. Called by: the store.
Keys of a job's objects are relative to the job's folder.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from everstep.core.ids import Point, parse_point
from everstep.errors import BadName

SETTINGS = "everstep.json"
MAX_WORLD = 99_999
PACKS = "packs/"
STEPS = "steps/"
ATTEMPTS = "attempts/"
HISTORY = "history/"
OWNER, NEWEST, VERIFIED, CLOCK = "refs/owner", "refs/newest", "refs/verified", "refs/clock"

_PACK = re.compile(r"packs/(\d{12}-\d{6})-rank-(\d{5})-([A-Za-z0-9]{1,64})\.pack")
_HISTORY = re.compile(
    r"history/(\d{6})-(\d{6})-(incident|decision|progress|result|word)-([0-9a-f]{32})"
)
_INDEX = re.compile(r"rank-(\d{5})-of-(\d{5})\.index")


def job_prefix(job: str) -> str:
    return f"jobs/{job}/"


def step_prefix(point: Point) -> str:
    return f"{STEPS}{point}/"


def index(point: Point, rank: int, world: int) -> str:
    return f"{step_prefix(point)}rank-{rank:05d}-of-{world:05d}.index"


def manifest(point: Point) -> str:
    return f"{step_prefix(point)}manifest"


def tombstone(point: Point) -> str:
    return f"{step_prefix(point)}tombstone"


def swept(point: Point) -> str:
    return f"{step_prefix(point)}swept"


def pack(point: Point, rank: int, unique: str) -> str:
    """Raises ``BadName`` where ``unique`` is not 1 to 64 letters and digits."""
    key = f"{PACKS}{point}-rank-{rank:05d}-{unique}.pack"
    if not _PACK.fullmatch(key):
        raise BadName(f"pack name {key!r} is not usable.", hint="Pass letters and digits.")
    return key


def claim(attempt: int) -> str:
    return f"{ATTEMPTS}{attempt:06d}/claim"


def branch(attempt: int) -> str:
    return f"{ATTEMPTS}{attempt:06d}/branch"


def history(attempt: int, sequence: int, kind: str, name: str) -> str:
    """Raises ``BadName`` where the parts make no key of spec section 12."""
    key = f"{HISTORY}{attempt:06d}-{sequence:06d}-{kind}-{name}"
    if not _HISTORY.fullmatch(key):
        raise BadName(f"history record {key!r} is not usable.", hint="Pass a number of 6 digits.")
    return key


class HistoryName(NamedTuple):
    """What a history record's key says: the attempt, its place, its kind, the object's digest."""

    attempt: int
    sequence: int
    kind: str
    name: str


def parse_history(key: str) -> HistoryName | None:
    """The parts of a history record's key, or None where ``key`` names none."""
    match = _HISTORY.fullmatch(key)
    return HistoryName(int(match[1]), int(match[2]), match[3], match[4]) if match else None


def parse_pack(key: str) -> Point | None:
    """The point that a pack was written for, or None where ``key`` names no pack."""
    match = _PACK.fullmatch(key)
    return parse_point(match[1]) if match else None


def parse_index(name: str) -> tuple[int, int] | None:
    """(rank, world) of an index's name without its folder, or None where it is not one."""
    match = _INDEX.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def parse_attempt(name: str) -> int | None:
    """The attempt that a folder name stands for."""
    return int(name) if re.fullmatch(r"\d{6}", name) else None
