"""Large logs down to the lines that can matter, in one pass and bounded memory.

Owns: blocks, the lines that are kept, storms of equal lines. Never does: I/O of its own, judge.
Called by: :mod:`everstep.faults.read`, the agent's watch over the workers' output.

Most of a log is benign. A block of lines is searched for all patterns at once; only in blocks where
something is found the lines are looked at one by one. Bytes are searched as they are, so invalid
UTF-8 hides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import re2

from everstep.faults.catalog import Catalog
from everstep.faults.lines import LONGEST

BLOCK = 2048
"""Bytes that are searched at once: with one line in a hundred of interest, most such blocks hold
none."""
FIRST, LAST = 300, 100
"""Lines that are kept of a storm of equal ones: the first and the last."""
KINDS = 4096
"""Kinds of lines that are told apart; further ones share what is kept."""
TAIL = 100
"""Last lines of a log that are kept whatever they say: where it was, how it ended."""

_STRUCTURE = (
    r"Traceback \(most recent call last\)",
    r'(?m)^.{0,80}?File "[^"\n]+", line \d+',
    r"[A-Z]\w*(?:Error|Exception|Interrupt)\b",
    r"During handling of the above|the direct cause of",
    r"(?m)^.{0,40}?(?:time|host|rank|exitcode)\s+: ",
    r"exitcode|exit code|Exited with|return code|exited on signal",
    r"closing signal|terminated with|srun: error",
    r"(?i)\bRank \d+ is running|missing ranks|last enqueued|acquire GIL",
    r"(?i)training (?:is )?(?:finished|complete|done)|final checkpoint",
    r"(?i)checkpoint[^\n]{0,40}(?:uploaded|saved|written)",
    r"Bootstrap : Using|NET/\w+ : Using",
    r"(?i)\brank \d+:? [^\n]{0,40}GPU|\brank \d+ runs",
    r"nfs: server \S+ OK|task \S+ blocked for more",
)
"""What the judge reads besides the catalogue's patterns."""


class Sieve:
    """Takes a log in pieces; :meth:`kept` gives what is left of it. ``tail``: how many last lines
    are kept whatever they say."""

    def __init__(self, catalog: Catalog, tail: int = TAIL) -> None:
        self._set = _searcher(catalog)
        self._rest = b""
        self._order = 0
        self._first: list[tuple[int, bytes]] = []
        self._last: dict[object, deque[tuple[int, bytes]]] = {}
        self._counts: dict[object, int] = {}
        self._tail: deque[tuple[int, bytes]] = deque(maxlen=tail)

    def feed(self, piece: bytes) -> None:
        """The next bytes of the log, at any edge."""
        data = self._rest + piece
        start, size = 0, len(data)
        while size - start > BLOCK:
            end = _edge(data, start)
            if end < 0:
                if size - start > 4 * LONGEST:  # a huge line: its beginning and its end are kept
                    data = data[start : start + LONGEST] + data[-LONGEST:]
                    start, size = 0, len(data)
                break
            self._block(data[start:end])
            start = end
        self._rest = data[start:]

    def kept(self) -> bytes:
        """The lines that can matter, in their order."""
        self._block(self._rest)
        self._rest = b""
        lines = dict(self._tail)
        lines.update(self._first)
        for last in self._last.values():
            lines.update(last)
        return b"\n".join(lines[order] for order in sorted(lines))

    def _block(self, block: bytes) -> None:
        if not self._set.Match(block):
            self._skip(block)
            return
        for line in block.replace(b"\r", b"\n").split(b"\n"):
            self._order += 1
            if not line:
                continue
            self._tail.append((self._order, line))
            if found := self._set.Match(line):
                self._keep(line, tuple(found))

    def _skip(self, block: bytes) -> None:
        """Nothing in it: of the last blocks the lines are kept as the tail."""
        lines = block.rsplit(b"\n", TAIL)
        for line in lines[-TAIL:]:
            self._order += 1
            self._tail.append((self._order, line[-LONGEST:]))

    def _keep(self, line: bytes, found: tuple[int, ...]) -> None:
        key: object = (found, line[:10])
        if key not in self._counts and len(self._counts) >= KINDS:
            key = found[0]
        count = self._counts[key] = self._counts.get(key, 0) + 1
        if len(line) > LONGEST:
            line = line[: LONGEST // 2] + b" ... " + line[-LONGEST // 2 :]
        if count <= FIRST:
            self._first.append((self._order, line))
        else:
            self._last.setdefault(key, deque(maxlen=LAST)).append((self._order, line))


def sieved(pieces: Iterable[bytes], catalog: Catalog) -> bytes:
    """What is left of a log that comes in pieces."""
    sieve = Sieve(catalog)
    for piece in pieces:
        sieve.feed(piece)
    return sieve.kept()


def pieces_of(raw: bytes, size: int = 1 << 18) -> Iterator[bytes]:
    """A log in memory in pieces."""
    for start in range(0, len(raw), size):
        yield raw[start : start + size]


def _edge(data: bytes, start: int) -> int:
    """The end of the block that begins at ``start``: behind a line; -1 where no line ends."""
    end = data.rfind(b"\n", start, start + BLOCK)
    if end < 0:
        end = data.rfind(b"\r", start, start + BLOCK)
    if end < 0:
        end = data.find(b"\n", start + BLOCK)
    return end + 1 if end >= 0 else -1


_made: dict[int, tuple[Catalog, re2.Set]] = {}


def _searcher(catalog: Catalog) -> re2.Set:
    """All patterns and the structure of logs as one search over bytes; one for each catalogue."""
    known = _made.get(id(catalog))
    if known is not None and known[0] is catalog:
        return known[1]
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.max_mem = 64 << 20
    options.never_capture = True
    options.log_errors = False
    made = re2.Set.SearchSet(options)
    for text in (*(pattern.text for pattern in catalog.patterns), *_STRUCTURE):
        made.Add(_by_line(text))
    made.Compile()
    _made.clear()
    _made[id(catalog)] = (catalog, made)
    return made


def _by_line(text: str) -> str:
    """``^`` and ``$`` mean lines where a block is searched. A line's own prefixes are still there,
    so a pattern for the beginning of a line is looked for anywhere in it."""
    return text.replace("(?m)^", "(?m:^)") if text.startswith("(?m)") else _loose(text)


def _loose(text: str) -> str:
    return (
        text.replace("|^", "|")
        .removeprefix("^")
        .replace("(?:^|", "(?:")
        .replace("$)", ")")
        .replace("$|", "|")
        .removesuffix("$")
    )
