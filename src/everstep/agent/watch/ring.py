"""The signals of one source that are kept, in bounded memory.

Owns: which are dropped, and the count of them. Never does: threads, clocks. Called by:
:mod:`everstep.agent.watch.node`.
"""

from __future__ import annotations

from collections import deque

import msgspec

from everstep.faults.records import Signal

MOST_BYTES = 256 << 10
MOST_AGE = 900.0
"""Seconds: health facts count from 10 min before a failure to 5 min after it."""
LONGEST = 16 << 10
"""Bytes of one signal's text; of a longer one the two ends are kept."""
EACH = 256
"""Bytes that a signal costs besides its text."""


class Ring:
    """Keeps at most ``most_bytes`` of signals, none older than ``most_age`` seconds.

    Over the limit the oldest of the kind of text that takes most room goes first, so that a storm
    of like lines pushes out itself and not the one line that began it all.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, most_age: float = MOST_AGE) -> None:
        self._most_bytes = most_bytes
        self._most_age = most_age
        self._kinds: dict[str, _Kind] = {}
        self._number = 0
        self.bytes = 0
        """What is held now."""
        self.dropped = 0
        """Signals that had no room, since the beginning."""
        self.dropped_at: float | None = None
        """When the last of them was dropped."""

    def add(self, arrived: float, signal: Signal) -> None:
        """Keep one more; ``arrived`` (CLOCK_MONOTONIC) never goes back."""
        signal = _shortened(signal)
        size = EACH + len(signal.text.encode("utf-8", "surrogatepass"))
        kind = self._kinds.setdefault(_kind_of(signal), _Kind())
        self._number += 1
        kind.held.append((self._number, arrived, size, signal))
        kind.bytes += size
        self.bytes += size
        self._forget(arrived - self._most_age)
        while self.bytes > self._most_bytes:
            self._drop(arrived)

    def since(self, mono: float) -> list[tuple[int, float, Signal]]:
        """Number, arrival and signal of those that arrived at ``mono`` or later, in order."""
        held = (one for kind in self._kinds.values() for one in kind.held if one[1] >= mono)
        return [
            (number, arrived, signal) for number, arrived, _, signal in sorted(held, key=_first)
        ]

    def _forget(self, before: float) -> None:
        for name in list(self._kinds):
            kind = self._kinds[name]
            while kind.held and kind.held[0][1] < before:
                self._take(kind)
            if not kind.held:
                del self._kinds[name]

    def _drop(self, now: float) -> None:
        name = max(self._kinds, key=lambda name: self._kinds[name].bytes)
        kind = self._kinds[name]
        self._take(kind)
        if not kind.held:
            del self._kinds[name]
        self.dropped += 1
        self.dropped_at = now

    def _take(self, kind: _Kind) -> None:
        size = kind.held.popleft()[2]
        kind.bytes -= size
        self.bytes -= size


class _Kind:
    def __init__(self) -> None:
        self.held: deque[tuple[int, float, int, Signal]] = deque()
        self.bytes = 0


def _first(held: tuple[int, float, int, Signal]) -> int:
    return held[0]


def _kind_of(signal: Signal) -> str:
    """Texts that differ in their figures alone are of one kind."""
    letters = (letter for letter in signal.text[:120] if not letter.isdigit())
    return f"{signal.rank} {''.join(letters)[:60]}"


def _shortened(signal: Signal) -> Signal:
    raw = signal.text.encode("utf-8", "surrogatepass")
    if len(raw) <= LONGEST:
        return signal
    half = LONGEST // 2 - 32
    ends = raw[:half].decode("utf-8", "replace"), raw[-half:].decode("utf-8", "replace")
    left = len(raw) - 2 * half
    text = f"{ends[0]}\n... {left} bytes left out ...\n{ends[1]}"
    return msgspec.structs.replace(signal, text=text)
