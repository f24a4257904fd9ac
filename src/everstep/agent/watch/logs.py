"""What workers print, as signals: a bounded memory of each stream.

Owns: which bytes are remembered, when they came, which older lines are kept as telling. Never does:
read a stream, judge. Called by: :mod:`everstep.agent.output`, :mod:`everstep.agent.watch.tail`.

The last bytes are kept as they are. What they push out is searched for lines that can matter
(:mod:`everstep.faults.sieve`), as long as that costs at most 2 % of a core: training needs the
rest. So a quiet log is searched whole, and each byte of it at most once; of a storm the end is
there, and it is said how much was not looked at (F5).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from everstep.faults.catalog import Catalog
from everstep.faults.lines import LONGEST
from everstep.faults.records import Signal
from everstep.faults.sieve import Sieve

RING = 256 << 10
"""Last bytes of a stream that are kept as they are."""
BATCH = 64 << 10
"""Bytes that are searched at once when they leave the ring."""
TELLING = 32 << 10
"""Bytes of telling lines that are kept of a stream's beginning, and as many of what followed."""
SHARE = 0.02
"""Of one core, for the search of all streams together; saved up to :data:`SAVED` seconds."""
SAVED = 0.5
PART = 16 << 10
"""Bytes from which on what comes next is remembered apart."""
GAP = 0.1
"""Seconds of silence after which the next line is a signal of its own."""
BURST = 0.25
"""Seconds after its first byte from which on the next line is a signal of its own."""
OPEN = 1.0
"""Seconds of silence that a line or a traceback may have within it, on a machine that is loaded."""
MOST = 256
"""Signals of one stream; older ones are one."""
JUDGED = 2 << 20
"""Bytes of signals of all streams of a node together: they are judged line by line."""


@dataclass
class Part:
    """Bytes that came together, from ``begun`` to ``ended`` (CLOCK_MONOTONIC)."""

    begun: float
    ended: float
    data: bytearray


class Search:
    """Looks for telling lines within a budget of CPU, shared by all streams of a node.
    ``catalog`` may still be loading, or have failed: then nothing is found. ``cpu`` gives the
    seconds of CPU of the calling thread, ``now`` those of CLOCK_MONOTONIC; ``told`` gets a fault
    of the search or the memory itself."""

    def __init__(
        self,
        catalog: Future[Catalog] | None,
        *,
        cpu: Callable[[], float] = time.thread_time,
        now: Callable[[], float] = time.monotonic,
        told: Callable[[str], object] = str,
    ) -> None:
        self.told = told
        self._catalog = catalog
        self._cpu = cpu
        self._now = now
        self._saved = SAVED
        self._since = now()

    def within_budget(self, data: bytes) -> bytes | None:
        """The telling lines of ``data``; None where it was not looked at."""
        now = self._now()
        self._saved = min(SAVED, self._saved + SHARE * (now - self._since))
        self._since = now
        if self._saved <= 0:
            return None
        before = self._cpu()
        found = self.whatever_it_costs(data)
        self._saved -= self._cpu() - before
        return found

    def whatever_it_costs(self, data: bytes) -> bytes | None:
        """The telling lines of ``data``; None where there is no catalogue (yet)."""
        known = self._catalog
        if known is None or not known.done() or known.exception() is not None:
            return None
        sieve = Sieve(known.result(), tail=0)
        sieve.feed(data)
        return sieve.kept()


class Memory:
    """The end of one stream, and the telling lines before it."""

    def __init__(self, search: Search, ring: int = RING) -> None:
        self._search = search
        self._ring = ring
        self._parts: deque[Part] = deque()
        self._size = 0
        self._rest = b""
        self._first: list[Part] = []
        self._later: deque[Part] = deque()
        self.unsearched = 0
        """Bytes that were forgotten without a look at them."""
        self.broken = ""
        """The fault by which nothing more is remembered."""

    def remember(self, piece: bytes, now: float) -> None:
        """The next bytes of the stream, at any edge; ``now`` never goes back. Raises nothing:
        whoever reads the stream has to read on, else what writes it waits for ever."""
        if self.broken:
            return
        try:
            self._remember(piece, now)
        except Exception as error:  # noqa: BLE001 - told, and judged as blind (F5)
            self._parts.clear()
            self.broken = f"{type(error).__name__}: {error}"
            self._search.told(
                f"what workers print is shown but not remembered any more: {self.broken}. Causes "
                "of failures are found without it."
            )

    def _remember(self, piece: bytes, now: float) -> None:
        last = self._parts[-1] if self._parts else None
        if last is not None and len(last.data) < PART and _together(last, now, piece):
            last.data += piece
            last.ended = now
        else:
            self._parts.append(Part(now, now, bytearray(piece)))
        self._size += len(piece)
        if self._size >= self._ring + BATCH:
            self._forget()

    def signals(self, most: int, rank: int | None, node: str | None) -> list[Signal]:
        """What is known of the stream, in about ``most`` bytes: its end as it came, and a quarter
        of them for the telling lines before it."""
        if self.broken:
            said = f"the output of rank {rank} was not remembered: {self.broken}"
            return [Signal("agent", said, rank, node, mono=time.monotonic())]
        older, newer = _split(self._parts, most * 3 // 4)
        telling = [*self._first, *self._later, *self._found(older)]
        parts = [*_ends(telling, most // 4), *_bursts(newer)]
        made = [Signal("log", text(part.data), rank, node, mono=part.begun) for part in parts]
        return [*made, *self._blind(rank, node)]

    def _found(self, older: list[Part]) -> list[Part]:
        if not older:
            return []
        data = self._rest + b"".join(part.data for part in older)
        found = self._search.whatever_it_costs(data)
        return [Part(older[0].begun, older[-1].ended, bytearray(found))] if found else []

    def _blind(self, rank: int | None, node: str | None) -> list[Signal]:
        if not self.unsearched or not self._parts:
            return []
        said = (
            f"log of rank {rank}: {self.unsearched >> 10} KiB came faster than they could be "
            f"searched and are forgotten; its end is kept"
        )
        return [Signal("agent", said, rank, node, mono=self._parts[-1].ended)]

    def _forget(self) -> None:
        """Drop the oldest parts; their telling lines stay."""
        dropped: list[Part] = []
        while self._size > self._ring and len(self._parts) > 1:
            dropped.append(self._parts.popleft())
            self._size -= len(dropped[-1].data)
        if self._size > self._ring:  # one huge part is left
            dropped.append(self._cut_last())
        whole = self._rest + b"".join(part.data for part in dropped)
        edge = whole.rfind(b"\n") + 1 or len(whole)
        self._rest = whole[edge:][-LONGEST:]
        self._note(whole[:edge], dropped[0].begun, dropped[-1].ended)

    def _cut_last(self) -> Part:
        last = self._parts[-1]
        edge = len(last.data) - self._ring
        cut = Part(last.begun, last.ended, last.data[:edge])
        del last.data[:edge]
        self._size -= edge
        return cut

    def _note(self, dropped: bytes, begun: float, ended: float) -> None:
        found = self._search.within_budget(dropped)
        if found is None:
            self.unsearched += len(dropped)
        elif found:
            self._tell(Part(begun, ended, bytearray(found[-TELLING:])))

    def _tell(self, part: Part) -> None:
        if sum(len(one.data) for one in self._first) + len(part.data) <= TELLING:
            self._first.append(part)
            return
        self._later.append(part)
        while sum(len(one.data) for one in self._later) > TELLING:
            self._later.popleft()


def share(most: int, streams: int) -> int:
    """Bytes that each of so many streams may hand out of ``most``."""
    return min(RING, max(4 << 10, most // max(streams, 1)))


def text(data: bytes | bytearray) -> str:
    """Bytes of any encoding as a text that can be stored: what is no UTF-8 as ``\\xff``."""
    return data.decode("utf-8", "backslashreplace")


def since_wall(wall: float, *, earliest: float = -math.inf) -> float:
    """A time of the wall clock by CLOCK_MONOTONIC, at most now and at least ``earliest``."""
    now = time.monotonic()
    return min(now, max(earliest, now - (time.time() - wall)))


def _together(last: Part, now: float, piece: bytes | bytearray) -> bool:
    """Whether a piece that comes now belongs to the same burst, or goes on with something."""
    silent = now - last.ended
    if silent >= OPEN:
        return False
    if silent < GAP and now - last.begun < BURST:
        return True
    between = last.data.endswith((b"\n", b"\r")) or piece.startswith((b"\n", b"\r"))
    return not between or _in_traceback(last.data)


def _in_traceback(data: bytearray) -> bool:
    """Whether the last line is one that a traceback goes on after."""
    edge = max(data.rfind(b"\n", 0, -1), data.rfind(b"\r", 0, -1)) + 1
    line = data[edge : edge + LONGEST]
    return line.startswith((b" ", b"\t")) or b"Traceback (most" in line or b'  File "' in line


def _split(parts: Sequence[Part], raw: int) -> tuple[list[Part], list[Part]]:
    """The older parts, and the newest ones with ``raw`` bytes, cut between two lines."""
    newer: list[Part] = []
    for at in range(len(parts) - 1, -1, -1):
        part = parts[at]
        if len(part.data) > raw:
            start = len(part.data) - raw
            # Not between two lines where one of them alone would take half of it.
            edge = part.data.find(b"\n", start, start + raw // 2) + 1 or start
            old, new = part.data[:edge], part.data[edge:]
            newer.insert(0, Part(part.begun, part.ended, new))
            older = [*parts][:at]
            return [*older, Part(part.begun, part.ended, old)], [one for one in newer if one.data]
        newer.insert(0, part)
        raw -= len(part.data)
    return [], newer


def _ends(parts: list[Part], most: int) -> list[Part]:
    """The first and the last parts, within so many bytes each half."""
    first = _within(parts, most // 2)
    last = _within(parts[len(first) :][::-1], most // 2)[::-1]
    return [*first, *last]


def _within(parts: list[Part], most: int) -> list[Part]:
    kept: list[Part] = []
    for part in parts:
        if most <= 0:
            break
        kept.append(Part(part.begun, part.ended, part.data[:most]))
        most -= len(part.data)
    return kept


def _bursts(parts: Iterable[Part]) -> list[Part]:
    """Parts that came in one burst as one, the oldest of very many too."""
    bursts: list[Part] = []
    for part in parts:
        if bursts and _together(bursts[-1], part.begun, part.data):
            bursts[-1].data += part.data
            bursts[-1].ended = part.ended
        else:
            bursts.append(Part(part.begun, part.ended, bytearray(part.data)))
    old = bursts[:-MOST]
    if not old:
        return bursts
    one = Part(old[0].begun, old[-1].ended, bytearray().join(part.data for part in old))
    return [one, *bursts[-MOST:]]
