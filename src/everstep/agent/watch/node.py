"""All sources of one node, each looked at in a thread of its own.

Owns: the threads, what of the signals is kept, and the signals about the sources themselves (F5).
Never does: know what a source reads, judge. Called by: the agent's loop, which never waits for a
source: a look may hang for ever (statvfs on a mount whose server is gone does).
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterable
from typing import Literal

import msgspec

from everstep.agent.watch.ring import MOST_AGE, MOST_BYTES, Ring
from everstep.agent.watch.source import Blind, Source, reason_of
from everstep.core.clock import Clock, SystemClock
from everstep.faults.records import Signal
from everstep.faults.redact import redact, redacted

LATE_LOOKS, LATE_SECONDS = 5, 10.0
"""A look counts as hung after so many times ``every``, and not before so many seconds."""
AGAIN_SECONDS = 1.0
"""It is told at the second check that finds it so, this much later: after the agent itself was
stopped for a while, all looks seem late until their threads have run."""
CLOSE_SECONDS = 1.0
"""How long :meth:`NodeWatch.close` waits for threads; one that hangs is left behind."""
REMIND_SECONDS = 60.0
"""After which :meth:`NodeWatch.gather` tells again which sources are not read."""
OWN = "agent"
"""The ring of the signals about sources."""

State = Literal["new", "seeing", "blind", "late", "dead"]
"""``new``: not looked at yet; ``blind``: cannot be read; ``late``: its look hangs; ``dead``: its
thread ended by an error of its own."""


class NodeWatch:
    """Looks at ``sources`` until :meth:`close`. ``node`` is the name that signals get which have
    none; None leaves it to whoever takes them. ``most_bytes`` and ``most_age`` (seconds) bound what
    is kept of each source."""

    def __init__(
        self,
        sources: Iterable[Source],
        node: str | None,
        clock: Clock | None = None,
        *,
        most_bytes: int = MOST_BYTES,
        most_age: float = MOST_AGE,
    ) -> None:
        self._node = node
        self._clock = clock or SystemClock()
        self._bounds = (most_bytes, most_age)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._answer = threading.Condition(self._lock)
        self._own = Ring(*self._bounds)
        self._watched: dict[str, _Watched] = {}
        for source in sources:
            self.add(source)

    def add(self, source: Source) -> None:
        """Look at one more source from now on."""
        assert source.name not in self._watched, "names of sources are unique on a node"
        one = _Watched(source, Ring(*self._bounds), self._clock.mono())
        one.thread = threading.Thread(
            target=self._serve, args=(one,), name=f"everstep-watch-{source.name}", daemon=True
        )
        with self._lock:
            self._watched[source.name] = one
        one.thread.start()

    def since(self, mono: float = -math.inf) -> tuple[Signal, ...]:
        """The signals that arrived at ``mono`` (CLOCK_MONOTONIC) or later, in the order of their
        arrival. A signal's own ``mono`` may be earlier: kernels stamp their lines themselves."""
        with self._lock:
            self._check()
            mono = max(mono, self._clock.mono() - self._bounds[1])
            rings = [self._own, *(one.ring for one in self._watched.values())]
            kept = [
                (arrived, index, number, signal)
                for index, ring in enumerate(rings)
                for number, arrived, signal in ring.since(mono)
            ]
            kept.sort(key=lambda one: one[:3])
            return (*(signal for *_, signal in kept), *self._left_out(mono))

    def gather(self, seconds: float) -> tuple[str, ...]:
        """Have every source look now, and wait at most ``seconds`` for that: evidence before the
        kill. What still holds is told anew. Gives the names of the sources that did not answer."""
        until = time.monotonic() + seconds
        with self._lock:
            self._check()
            asked = [one for one in self._watched.values() if one.state not in ("late", "dead")]
            for one in asked:
                one.asked += 1
            self._work.notify_all()
            self._answer.wait_for(
                lambda: all(one.answered >= one.asked or one.state == "dead" for one in asked),
                max(0.0, until - time.monotonic()),
            )
            self._remind()
            answered = {one.source.name for one in asked if one.answered >= one.asked}
            return tuple(name for name in self._watched if name not in answered)

    def states(self) -> dict[str, State]:
        """How each source does now."""
        with self._lock:
            self._check()
            return {name: one.state for name, one in self._watched.items()}

    def close(self) -> None:
        """Look at nothing any more. A thread that hangs ends with the process."""
        with self._lock:
            for one in self._watched.values():
                one.stopped = True
            self._work.notify_all()
        until = time.monotonic() + CLOSE_SECONDS
        for one in self._watched.values():
            assert one.thread is not None, "a source is watched from its thread's start on"
            one.thread.join(max(0.0, until - time.monotonic()))

    # -- in the sources' threads

    def _serve(self, one: _Watched) -> None:
        try:
            while not one.stopped:
                self._look(one)
                self._rest(one)
            one.source.close()
        finally:
            if (
                sys.exception() is not None
            ):  # the interpreter prints it: it is a bug of the source's
                with self._lock:
                    self._becomes(one, "dead", "by an error of its own, which is on standard error")
                    self._answer.notify_all()

    def _look(self, one: _Watched) -> None:
        with self._lock:
            one.busy_since = self._clock.mono()
            asked = one.asked
        found: list[Signal] = []
        state: State = "seeing"
        why = ""
        try:
            found.extend(one.source.look())  # what it gives before it fails is kept
            if asked > one.answered:
                found.extend(one.source.standing())
        except (Blind, OSError) as error:
            state = "blind"
            why = error.reason if isinstance(error, Blind) else reason_of(error)
        mono, wall = self._clock.mono(), self._clock.wall()
        stamped = [redacted(_stamped(signal, self._node, mono, wall)) for signal in found]
        with self._lock:
            for signal in stamped:
                one.ring.add(mono, signal)
            one.answered = asked
            one.busy_since, one.due = None, mono + one.source.every
            self._becomes(one, state, why)
            self._answer.notify_all()

    def _rest(self, one: _Watched) -> None:
        with self._lock:
            self._work.wait_for(lambda: one.stopped or one.asked > one.answered, one.source.every)

    # -- signals about the sources, under the lock

    def _check(self) -> None:
        """Find the looks that hang."""
        now = self._clock.mono()
        for one in self._watched.values():
            since = one.busy_since if one.busy_since is not None else one.due
            if one.state in ("late", "dead") or now - since < one.patience:
                one.suspect_at = None
            elif one.suspect_at is None:
                one.suspect_at = now
            elif now - one.suspect_at >= AGAIN_SECONDS:
                self._becomes(one, "late", f"no look at it came back for {now - since:.0f} s")

    def _becomes(self, one: _Watched, state: State, why: str) -> None:
        text = word(one.source.name, one.state, state, why)
        one.state = state
        if text:
            one.word = redact(text)
        if text and not one.stopped:
            self._tell(one)

    def _remind(self) -> None:
        """Of the sources that are not read, where it was told long ago: the incident lacks them."""
        now = self._clock.mono()
        for one in self._watched.values():
            if one.state in ("blind", "late", "dead") and now - one.told_at > REMIND_SECONDS:
                self._tell(one)

    def _tell(self, one: _Watched) -> None:
        mono = one.told_at = self._clock.mono()
        about = Signal("agent", one.word)
        self._own.add(mono, _stamped(about, self._node, mono, self._clock.wall()))

    def _left_out(self, mono: float) -> list[Signal]:
        told = []
        for name, ring in ((OWN, self._own), *((n, one.ring) for n, one in self._watched.items())):
            if ring.dropped_at is not None and ring.dropped_at >= mono:
                text = (
                    f"watch: {ring.dropped} signals of the source {name} were dropped: it gives "
                    f"more than the {self._bounds[0]} bytes that are kept of it"
                )
                told.append(Signal("agent", text, node=self._node, mono=ring.dropped_at))
        return told


class _Watched:
    """A source with its thread's state; all but ``source`` is under the watch's lock."""

    def __init__(self, source: Source, ring: Ring, now: float) -> None:
        self.source = source
        self.ring = ring
        self.thread: threading.Thread | None = None
        self.state: State = "new"
        self.stopped = False
        self.asked = self.answered = 0
        self.busy_since: float | None = None
        self.due = now
        self.suspect_at: float | None = None
        self.word = ""
        self.told_at = now

    @property
    def patience(self) -> float:
        """Seconds without an answer until its look counts as hung."""
        return max(LATE_SECONDS, LATE_LOOKS * self.source.every)


def word(name: str, before: State, after: State, why: str) -> str:
    """What there is to say of a source that was ``before`` and is ``after`` now; empty: nothing.

    One that could never be read is only named: this user or machine may simply not have it. No
    signature of a failure takes these texts for one."""
    if before == after or (before, after) == ("new", "seeing"):
        return ""
    if after == "seeing":
        return f"watch: the source {name} gives signals again"
    if after == "blind" and before == "new":
        return f"watch: the source {name} is not available on this node, degraded: {why}"
    how = {"blind": "stopped giving signals", "late": "hangs", "dead": "ended"}[after]
    return f"watch: the source {name} {how}, what it would show is not seen: {why}"


def timed(signals: Iterable[Signal], started: float) -> tuple[Signal, ...]:
    """The signals with ``time`` as seconds since ``started`` (CLOCK_MONOTONIC of this node), which
    is when the attempt began.

    What this agent itself saw before is left out: the judge takes an agent's word of that time as
    history of earlier attempts. What of it still holds is told anew by :meth:`NodeWatch.gather`."""
    placed = (
        signal if signal.mono is None or signal.time is not None
        else msgspec.structs.replace(signal, time=signal.mono - started)
        for signal in signals
    )  # fmt: skip
    return tuple(one for one in placed if one.source != "agent" or (one.time or 0.0) >= 0.0)


def _stamped(signal: Signal, node: str | None, mono: float, wall: float) -> Signal:
    seen = mono if signal.mono is None else signal.mono
    return msgspec.structs.replace(
        signal,
        text=signal.text.encode("utf-8", "replace").decode(),  # names of files may be any bytes
        node=node if signal.node is None else signal.node,
        mono=seen,
        wall=wall - (mono - seen) if signal.wall is None else signal.wall,
    )
