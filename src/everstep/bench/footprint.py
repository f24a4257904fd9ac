"""What processes hold: memory, descriptors, mappings, threads.

Owns: reading them from /proc, the peak over a time, and what counts as a leak. Called by: the
benchmarks, soak tests.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from everstep.bench.processes import bearers

PSS_SLACK = 8 << 20
"""Bytes that an allocator may keep or give back between two looks at the same state."""
MAPPING_SLACK = 4
"""Mappings that an allocator may split or join between two looks."""


class Footprint(msgspec.Struct, frozen=True):
    """The sum over some processes. ``pss`` in bytes: a page shared by n counts for 1/n.
    ``anonymous`` is the part of it that no file backs: a library's pages are shared with whatever
    else runs on the machine, and count for more when that ends."""

    pss: int
    anonymous: int
    fds: int
    mappings: int
    threads: int
    processes: int


def footprint(pids: Iterable[int]) -> Footprint:
    """Of the processes together; one that ends meanwhile counts for nothing."""
    total = [0, 0, 0, 0, 0, 0]
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total = [a + b for a, b in zip(total, _one(pid), strict=True)]
    return Footprint(*total)


def at_rest(look: Callable[[], Footprint], seconds: float = 2.0) -> Footprint:
    """The least of every field over so many seconds: what a process opens and closes again (a
    retention pass, a renewed lease) is not held, what has leaked stays."""
    deadline = time.monotonic() + seconds
    least = look()
    while time.monotonic() < deadline:
        time.sleep(0.02)
        least = least_of(least, look())
    return least


def least_of(one: Footprint, other: Footprint) -> Footprint:
    """Field by field the smaller value."""
    names = Footprint.__struct_fields__
    return Footprint(*(min(getattr(one, name), getattr(other, name)) for name in names))


def pss(pid: int) -> int:
    """Proportional set size in bytes."""
    return _rollup(pid).get("Pss", 0)


def _rollup(pid: int) -> dict[str, int]:
    """Bytes by name; empty for a process that has let go of its memory and ends."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    fields = (line.split() for line in lines)
    return {name.rstrip(":"): int(value) * 1024 for name, value, *_ in fields}


def leaks(before: Footprint, after: Footprint) -> list[str]:
    """What ``after`` holds beyond ``before`` and the slack of an allocator, as sentences."""
    found = []
    for name, slack in (("fds", 0), ("threads", 0), ("processes", 0), ("mappings", MAPPING_SLACK)):
        was, now = getattr(before, name), getattr(after, name)
        if now > was + slack:
            found.append(f"{name} grew from {was} to {now}")
    was, now = before.anonymous, after.anonymous
    if now > was + PSS_SLACK:
        found.append(f"anonymous memory grew from {was / 1e6:.1f} to {now / 1e6:.1f} MB")
    return found


class Peak:
    """Samples the PSS of all that bear ``mark`` while it is open; reading walks page tables and
    holds the memory lock, so nothing is timed meanwhile."""

    def __init__(self, mark: str, *, every: float = 0.02) -> None:
        self.bytes = 0
        self._mark = mark
        self._every = every
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="bench-peak", daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        pids: Sequence[int] = ()
        looks = 0
        while not self._end.is_set():
            if looks % 10 == 0:
                pids = bearers(self._mark)  # processes come and go; /proc is slow to search
            looks += 1
            self.bytes = max(self.bytes, _pss_of(pids))
            self._end.wait(self._every)


def _pss_of(pids: Sequence[int]) -> int:
    """Of all together. They are read one after another, and a page that a second process maps
    meanwhile would count twice or not at all: so once forth and once back, and the mean."""
    forth = sum(_pss_or_none(pids))
    return (forth + sum(_pss_or_none(reversed(pids)))) // 2


def _pss_or_none(pids: Iterable[int]) -> Iterator[int]:
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield pss(pid)


def _one(pid: int) -> tuple[int, int, int, int, int, int]:
    place = Path(f"/proc/{pid}")
    mappings = len((place / "maps").read_text().splitlines())
    memory = _rollup(pid)
    return (
        memory.get("Pss", 0),
        memory.get("Pss_Anon", 0) + memory.get("Pss_Shmem", 0),
        len(os.listdir(place / "fd")),
        mappings,
        len(os.listdir(place / "task")),
        1,
    )
