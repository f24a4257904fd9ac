"""Names of jobs, steps and attempts, and how they stand in keys.

Owns: validation and text forms. Never does: I/O. Called by: store, keeper, agent, cli.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import PurePath

import msgspec

from everstep.errors import BadName

MAX_STEP = 10**12 - 1
MAX_ATTEMPT = 10**6 - 1

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_POINT = re.compile(r"(\d{12})-(\d{6})")


class Point(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A step of one attempt: names a snapshot or a checkpoint. Sorts by step, then attempt."""

    step: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.step:012d}-{self.attempt:06d}"


def parse_point(text: str) -> Point | None:
    """The point a folder name stands for, or None where the name is not one."""
    match = _POINT.fullmatch(text)
    return Point(int(match[1]), int(match[2])) if match else None


def check_job(name: str) -> str:
    """``name`` itself, or :class:`BadName` where it could not be one folder of a store."""
    if not _JOB.fullmatch(name):
        raise BadName(
            f"job name {name!r} is not usable as a folder name.",
            hint="Use 1 to 128 letters, digits, '.', '_', '-', beginning with a letter or digit.",
        )
    return name


def default_job(script: str, arguments: Sequence[str]) -> str:
    """The job's name where none was given: script stem and six hex digits of what is run.

    ``script`` is an absolute path (or a module's name); the same path and arguments give the
    same job, so a job that is started again goes on.
    """
    what = "\0".join([script, *arguments]).encode()
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", PurePath(script).stem)[:100].lstrip("._-") or "job"
    return f"{stem}-{hashlib.sha256(what).hexdigest()[:6]}"
