"""What workers print, on its way through the agent to the agent's own output.

Owns: the pipes that workers write to, the threads that read and forward. Never does: change a
byte, judge. Called by: workers (one :class:`Streams` for each attempt), the loop (its end).

A pipe has no name in any folder: workers get it as a path below ``/proc``, so nothing is left
behind however the agent ends. The agent holds both its ends, so a worker never meets a closed one
while the agent lives. One thread reads all pipes and remembers; one thread for each of the agent's
two streams writes, and may block there: a console that is stopped lets the pipes run full, and
then workers wait as they would have on the console itself, but not the agent.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from everstep.agent.watch.logs import JUDGED, Memory, Search, share
from everstep.agent.watch.tail import Tail, Tailing
from everstep.faults.catalog import Catalog
from everstep.faults.records import Signal

PIPE = 1 << 20
"""Bytes that a pipe holds, where the kernel's limit for a user leaves as much."""
AHEAD = 1 << 20
"""Bytes that wait for one of the agent's streams from which on no more is read for it."""
PAUSE = 0.004
"""Seconds between two rounds of reading little: many small writes cost one round."""
AGAIN = 0.1
"""Seconds until reading is tried again after a fault of it."""
MUCH = 64 << 10

OUT, ERR = 1, 2


class Forward:
    """Writes to one of the agent's streams from a thread of its own. ``room`` is called where
    there is room again. ``lost`` says why bytes could not be written, empty where all were;
    ``moved`` is when some were last (CLOCK_MONOTONIC)."""

    def __init__(self, fd: int, room: Callable[[], None]) -> None:
        self._fd = fd
        self._room = room
        self._pieces: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._put = self._done = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"everstep-fd{fd}", daemon=True)
        self.lost = ""
        self.moved = -math.inf

    def start(self) -> None:
        self._thread.start()

    @property
    def full(self) -> bool:
        return self._put - self._done >= AHEAD

    def put(self, piece: bytes) -> None:
        with self._changed:
            self._pieces.append(piece)
            self._put += len(piece)
            self._changed.notify_all()

    def flush(self, deadline: float | None) -> bool:
        """Wait until everything put so far is written; False where it is not by the deadline."""
        with self._changed:
            wanted = self._put
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            return self._changed.wait_for(lambda: self._done >= wanted, left)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (piece := self._next()) is not None:
            self._write(piece)
            was_full = self.full
            with self._changed:
                self._done += len(piece)
                self._changed.notify_all()
            if was_full:
                self._room()

    def _next(self) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pieces or self._closed)
            return self._pieces.popleft() if self._pieces else None

    def _write(self, piece: bytes) -> None:
        rest = memoryview(piece)
        while rest:
            try:
                rest = rest[self._put_out(rest[:MUCH]) :]
                self.moved = time.monotonic()
            except OSError as error:
                # Nobody reads it any more, or its disk is full: the workers go on (R3).
                self.lost = error.strerror or str(error)
                return

    def _put_out(self, piece: memoryview) -> int:
        try:
            return os.write(self._fd, piece)
        except BlockingIOError:  # somebody made the console's end non-blocking
            select.select([], [self._fd], [])
            return 0


class Pipe:
    """One pipe. ``forward`` None: shown nowhere. ``memory`` None: of an attempt that has ended,
    where a process that it left behind may still print."""

    def __init__(self, forward: Forward | None, memory: Memory) -> None:
        self.forward = forward
        self.memory: Memory | None = memory
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        with contextlib.suppress(OSError):  # beyond what the kernel grants a user: it stays small
            fcntl.fcntl(self.reader, fcntl.F_SETPIPE_SZ, PIPE)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.writer}"

    @property
    def waiting(self) -> int:
        """Bytes that are in it."""
        raw = fcntl.ioctl(self.reader, termios.FIONREAD, b"\0\0\0\0")
        count: int = struct.unpack("i", raw)[0]
        return count

    def take(self, buffer: bytearray) -> int | None:
        """Take what is there: how much; None where nobody can write any more."""
        try:
            count = os.readv(self.reader, [buffer])
        except BlockingIOError:
            return 0
        if count == 0:
            return None
        piece = bytes(memoryview(buffer)[:count])
        if self.forward is not None:
            self.forward.put(piece)
        if self.memory is not None:
            self.memory.remember(piece, time.monotonic())
        return count

    def part(self) -> None:
        """Write no more, remember no more; read on for as long as anybody else writes."""
        self.memory = None
        os.close(self.writer)
        self.writer = -1

    def close(self) -> None:
        os.close(self.reader)
        if self.writer >= 0:
            os.close(self.writer)


class Output:
    """The output of all workers that this agent starts. ``catalog`` tells which lines are worth
    remembering (:func:`everstep.agent.watch.logs.loading`). ``told`` gets faults of the reading
    itself."""

    def __init__(
        self, catalog: Future[Catalog] | None = None, told: Callable[[str], object] = str
    ) -> None:
        self._lock = threading.Lock()
        self._told = told
        self._search = Search(catalog, told=told)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._forwards = {fd: Forward(fd, self._nudge) for fd in (OUT, ERR)}
        self._pipes: list[Pipe] = []
        self._tailing = Tailing(self._lock)
        self._buffer = bytearray(PIPE)
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def lost(self) -> str:
        """Why something that workers printed could not be written, empty where all was."""
        return self._forwards[OUT].lost or self._forwards[ERR].lost

    @property
    def moved(self) -> float:
        """When anything was last written (CLOCK_MONOTONIC)."""
        return max(forward.moved for forward in self._forwards.values())

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Of all pipes: what a process forked from the agent must close to be a worker."""
        with self._lock:
            held = [fd for pipe in self._pipes for fd in (pipe.reader, pipe.writer) if fd >= 0]
        return (*held, self._wake)

    def open(self) -> Streams:
        """For the workers of one attempt."""
        return Streams(self, self._search, self._lock, self._tailing)

    def forward_to(self, fd: int) -> Forward:
        return self._forwards[fd]

    def add(self, pipe: Pipe) -> None:
        with self._lock:
            self._pipes.append(pipe)
        if self._thread is None:
            for forward in self._forwards.values():
                forward.start()
            self._thread = threading.Thread(target=self._run, name="everstep-output", daemon=True)
            self._thread.start()
        self._nudge()

    def take(self, pipes: list[Pipe], deadline: float) -> None:
        """Read what is in these pipes now, whether or not the agent's own streams have room: of
        each at least once, and on until the deadline."""
        for pipe in pipes:
            left = PIPE
            while left == PIPE or (left > 0 and time.monotonic() < deadline):
                with self._lock:
                    if pipe not in self._pipes:
                        break  # its last writer has gone
                    left = min(left - 1, pipe.waiting)
                    left -= pipe.take(self._buffer) or left

    def part(self, pipes: list[Pipe]) -> None:
        with self._lock:
            for pipe in pipes:
                if pipe in self._pipes:  # else all was closed already
                    pipe.part()
        self._nudge()

    def flush(self, seconds: float | None) -> bool:
        """Wait until all that workers have printed by now is written to the agent's own streams,
        for at most so long (None: however long); False where it is not."""
        if self._thread is None:
            return True
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._lock:
            pipes = list(self._pipes)
        self.take(pipes, time.monotonic() + (1.0 if seconds is None else seconds))
        return all(forward.flush(deadline) for forward in self._forwards.values())

    def close(self, seconds: float = 0.0) -> None:
        """Forward what is there, for at most so long, and let go of everything."""
        if self._closed:
            return
        self.flush(seconds)
        self._closed = True
        self._nudge()
        if self._thread is not None:
            self._thread.join()
        self._tailing.close()
        for forward in self._forwards.values():
            forward.close()
        with self._lock:
            for pipe in self._pipes:
                pipe.close()
            self._pipes = []
            os.close(self._wake)
            self._wake = -1

    def _nudge(self) -> None:
        with self._lock:
            if self._wake >= 0:  # else closed, and this a forward that was stuck until now
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        while not self._closed:
            try:
                ready = self._wait()
                little = self._read(ready) < MUCH and bool(ready)
            except Exception as error:  # noqa: BLE001 - were this thread gone, all workers would wait
                self._fail(error)
            else:
                if little:
                    time.sleep(PAUSE)

    def _fail(self, error: Exception) -> None:
        """Say it and go on: memory or descriptors may be there again."""
        self._told(
            f"what workers print cannot be read: {type(error).__name__}: {error}. It is tried "
            "again; until then workers wait where they print."
        )
        time.sleep(AGAIN)

    def _wait(self) -> set[int]:
        """The pipes to be read: there is something in them, and room for it."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        with self._lock:
            for pipe in self._pipes:
                if pipe.forward is None or not pipe.forward.full:
                    poll.register(pipe.reader, select.POLLIN)
        ready = {fd for fd, _ in poll.poll()}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        return ready - {self._wake}

    def _read(self, ready: set[int]) -> int:
        taken = 0
        with self._lock:
            for pipe in [pipe for pipe in self._pipes if pipe.reader in ready]:
                count = pipe.take(self._buffer)
                if count is None:
                    self._pipes.remove(pipe)
                    pipe.close()
                taken += count or 0
        return taken


class Streams:
    """The output of the workers of one attempt on this node, by local rank."""

    def __init__(
        self, output: Output, search: Search, lock: threading.Lock, tailing: Tailing
    ) -> None:
        self._output = output
        self._search = search
        self._lock = lock
        self._tailing = tailing
        self._pipes: dict[int, list[Pipe]] = {}
        self._tails: dict[int, list[Tail]] = {}
        self._memories: dict[int, list[Memory]] = {}
        self._blind: dict[int, str] = {}

    def route(self, local_rank: int, stdout: str, stderr: str) -> tuple[str, str]:
        """Where a worker is to write, given where torch would let it: empty is the agent's own
        stream, ``/dev/null`` a rank that is not to be shown. Files of the user stay."""
        told = {OUT: stdout, ERR: stderr}
        files = {fd: path for fd, path in told.items() if path not in ("", os.devnull)}
        self._memories[local_rank] = []
        tails = [Tail(path, self._memory(local_rank)) for path in files.values()]
        self._tails[local_rank] = tails
        self._tailing.add(tails)
        try:
            ours = self._piped(local_rank, {fd: told[fd] == "" for fd in told.keys() - files})
        except OSError as error:
            self._blind[local_rank] = error.strerror or str(error)
            return stdout, stderr
        return ours.get(OUT, stdout), ours.get(ERR, stderr)

    def drain(self, seconds: float, local_rank: int | None = None) -> None:
        """Read and remember what is there already, for at most so long."""
        deadline = time.monotonic() + seconds
        self._output.take(_of(self._pipes, local_rank), deadline)
        if _of(self._tails, local_rank):
            self._tailing.look(deadline - time.monotonic())

    def signals(
        self,
        ranks: Sequence[int],
        node: str | None,
        local_rank: int | None = None,
        most: int = JUDGED,
    ) -> list[Signal]:
        """What the workers printed, in each stream the newest last, also once they have ended: in
        about ``most`` bytes. ``ranks`` are those of the local ranks; ``local_rank``: of this one
        alone."""
        asked = list(self._memories) if local_rank is None else [local_rank]
        each = share(most, sum(len(self._memories[local]) for local in asked))
        made: list[Signal] = []
        for local in asked:
            with self._lock:
                for memory in self._memories[local]:
                    made += memory.signals(each, ranks[local], node)
            if why := self._blind.get(local):
                said = f"the output of rank {ranks[local]} cannot be read: {why}"
                made.append(Signal("agent", said, ranks[local], node, mono=time.monotonic()))
        return made

    def part(self) -> None:
        """The workers have ended: what they left behind may print on, and is not remembered."""
        self._output.part(_of(self._pipes, None))
        self._tailing.remove(_of(self._tails, None))
        self._pipes, self._tails = {}, {}

    def _piped(self, local_rank: int, shown: dict[int, bool]) -> dict[int, str]:
        """The paths of the streams for which a pipe is made, and whether each is shown."""
        # Where both end in one place, one pipe keeps the order in which they were written.
        one_place = _same_file(OUT, ERR)
        places = {fd: (fd if show and not one_place else OUT, show) for fd, show in shown.items()}
        pipes = {
            (fd, show): self._pipe(local_rank, self._output.forward_to(fd) if show else None)
            for fd, show in dict.fromkeys(places.values())
        }
        self._pipes[local_rank] = list(pipes.values())
        for pipe in pipes.values():
            self._output.add(pipe)
        return {fd: pipes[place].path for fd, place in places.items()}

    def _pipe(self, local_rank: int, forward: Forward | None) -> Pipe:
        return _usable(Pipe(forward, self._memory(local_rank)))

    def _memory(self, local_rank: int) -> Memory:
        memory = Memory(self._search)
        self._memories[local_rank].append(memory)
        return memory


_T = TypeVar("_T")


def _of(known: dict[int, list[_T]], local_rank: int | None) -> list[_T]:
    """Those of one local rank, or all."""
    if local_rank is not None:
        return known.get(local_rank, [])
    return [one for some in known.values() for one in some]


def _usable(pipe: Pipe) -> Pipe:
    """The pipe, if its path can be opened: ``/proc`` may be missing or closed to this user."""
    try:
        os.close(os.open(pipe.path, os.O_WRONLY))
    except OSError:
        pipe.close()
        raise
    return pipe


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:  # closed
        return False
