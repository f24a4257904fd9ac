"""The control page: what the keeper publishes to its workers, and they to it, without a message.

Owns: the page's fields. Never does: decide. Called by: workers at every step boundary (a few
loads and stores, no system call), the keeper when the coordinator publishes.

Fields are written by one side only. Two sides that must not miss each other (a stop and a
boundary) both write first and read second: see :meth:`ControlPage.post_boundary`.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from typing import NamedTuple

import xxhash

from everstep.core.ids import Point
from everstep.errors import CorruptObject
from everstep.keeper.wire import WentOn

_MAGIC = 0x32434B5045535645
_LINES_AT = 1024
_LINE = 128
_NOTES_AT = 4 * mmap.PAGESIZE
_BANK = 2 * mmap.PAGESIZE
_SIZE = _NOTES_AT + 2 * _BANK
MAX_LOCAL_RANKS = (_NOTES_AT - _LINES_AT) // _LINE
_WORD = struct.Struct("<Q")
_TRIES = 8
"""Looks at a line that its worker may be writing: a few stores, unless it died in the midst."""

# Written by the keeper.
(
    _CUT_SEQUENCE, _CUT_STEP, _STOP_REQUESTED, _STOP_STEP, _STOP_FINAL, _DEMOTED, _ATTEMPT, _BEAT,
) = range(64, 128, 8)  # fmt: skip
_HOLD_UNTIL = 128
# Two banks of notes, never read by workers: the one that is not in force is written, and is in
# force when its digest is right and its generation the higher one. A death in between changes none.
_BANK_HEAD = struct.Struct("<3Q")  # digest of what follows, generation, count of the notes
_WENT_ON = struct.Struct("<5Q")  # attempt, source, step and attempt of the point, world
KEPT_ELECTIONS = (_BANK - _BANK_HEAD.size) // _WENT_ON.size
_SOURCES = ("fresh", "memory", "store", "rooted")
# Written by the worker, in its own line.
(
    _STEP, _BOUNDARY, _STEP_NANOS, _CUT_NANOS, _PHASE, _PHASE_SINCE, _PHASE_LIMIT, _LONGEST,
) = range(0, 64, 8)  # fmt: skip
# Written by the keeper, in the worker's line.
_SLOT = 64
# Again the worker's: how many steps it did, and its phase's name, padded with zeros.
_STEPS, _NAME = 72, 80
LONGEST_NAME = _LINE - _NAME
"""Bytes that the name of a phase may have."""


class Beat(NamedTuple):
    """What one worker's line says, at CLOCK_MONOTONIC times in nanoseconds.

    ``step`` is the last one finished (None: none), ``boundary`` when that was, ``steps`` how many
    this attempt has done, ``longest`` the longest of its recent steps, without what the worker had
    declared as something else. ``phase`` is what it does now, since ``since`` and for at most
    ``limit`` as far as it knows (0: it did not say); empty before it attached.
    """

    step: int | None
    boundary: int
    steps: int
    longest: int
    cut: int
    phase: str
    since: int
    limit: int


def create_page() -> int:
    """A memfd that holds an empty page; the caller owns the descriptor."""
    fd = os.memfd_create("everstep-control", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, _SIZE)
    os.pwrite(fd, _WORD.pack(_MAGIC), 0)
    return fd


class ControlPage:
    """A mapping of one node's page."""

    def __init__(self, fd: int) -> None:
        if os.fstat(fd).st_size != _SIZE:
            raise CorruptObject(f"descriptor {fd} is not a control page of this version.")
        self._map = mmap.mmap(fd, _SIZE)
        if self._get(0) != _MAGIC:
            raise CorruptObject(f"descriptor {fd} is not a control page of this version.")

    # -- the worker's side

    def post_boundary(self, local_rank: int, step: int, now_nanos: int, step_nanos: int) -> None:
        """Say that ``step`` is finished. Read the stop fields after this, never before: the
        keeper publishes a stop and then reads the boundaries, so one of the two sees the other."""
        at = _LINES_AT + local_rank * _LINE
        self._put(at + _BOUNDARY, now_nanos)
        self._put(at + _STEP_NANOS, step_nanos)
        self._put(at + _STEP, step + 1)

    def post_cut(self, local_rank: int, cut_nanos: int) -> None:
        """Say how long the last cut blocked."""
        self._put(_LINES_AT + local_rank * _LINE + _CUT_NANOS, cut_nanos)

    def post_pace(self, local_rank: int, steps: int, longest_nanos: int) -> None:
        """Say how many steps this rank has done, and how long the longest recent one took."""
        at = _LINES_AT + local_rank * _LINE
        self._put(at + _LONGEST, longest_nanos)
        self._put(at + _STEPS, steps)

    def post_phase(self, local_rank: int, name: str, since_nanos: int, limit_nanos: int) -> None:
        """Say what this rank does from now on; names are cut at :data:`LONGEST_NAME` bytes."""
        at = _LINES_AT + local_rank * _LINE
        turn = self._get(at + _PHASE)
        # Zero while it changes, another number afterwards: a reader sees that it must read again.
        self._put(at + _PHASE, 0)
        self._map[at + _NAME : at + _LINE] = name.encode()[:LONGEST_NAME].ljust(LONGEST_NAME, b"\0")
        self._put(at + _PHASE_SINCE, since_nanos)
        self._put(at + _PHASE_LIMIT, limit_nanos)
        self._put(at + _PHASE, turn + 1)

    def cut(self) -> tuple[int, int]:
        """(sequence, step) of the published cut; sequence 0 where there is none."""
        return self._get(_CUT_SEQUENCE), self._get(_CUT_STEP)

    def cut_at(self, local_rank: int, step: int) -> tuple[int, int] | None:
        """(sequence, slot index) where a cut is published for exactly ``step``, else None."""
        sequence, cut_step = self.cut()
        if not sequence or cut_step != step:
            return None
        index = self.slot(local_rank)
        # The keeper clears the sequence before it changes a field: equal twice, all is of one cut.
        return (sequence, index) if self._get(_CUT_SEQUENCE) == sequence else None

    def slot(self, local_rank: int) -> int:
        """Index of the slot that the rank's next published cut goes into."""
        return self._get(_LINES_AT + local_rank * _LINE + _SLOT)

    def stop(self) -> tuple[bool, int, bool]:
        """(requested, step at which all ranks stop, whether that step is final)."""
        return bool(self._get(_STOP_REQUESTED)), self._get(_STOP_STEP), bool(self._get(_STOP_FINAL))

    def demoted(self) -> int:
        """A counter that moves when replicas were found to differ."""
        return self._get(_DEMOTED)

    def held_until(self) -> int:
        """The CLOCK_MONOTONIC time in nanoseconds before which no batch is given to the user's
        code, 0 where nobody is held. A time, so that a keeper that stands still holds nobody."""
        return self._get(_HOLD_UNTIL)

    # -- the keeper's side

    def boundary(self, local_rank: int) -> tuple[int | None, int, int, int]:
        """(last finished step or None, its CLOCK_MONOTONIC time, step and cut durations), times
        in nanoseconds."""
        at = _LINES_AT + local_rank * _LINE
        step = self._get(at + _STEP)
        return (
            step - 1 if step else None,
            self._get(at + _BOUNDARY),
            self._get(at + _STEP_NANOS),
            self._get(at + _CUT_NANOS),
        )

    def beat(self, local_rank: int) -> Beat:
        """What that worker says of itself; its phase is that of one moment."""
        at = _LINES_AT + local_rank * _LINE
        for _ in range(_TRIES):
            turn = self._get(at + _PHASE)
            name = self._map[at + _NAME : at + _LINE].rstrip(b"\0")
            since, limit = self._get(at + _PHASE_SINCE), self._get(at + _PHASE_LIMIT)
            if turn == self._get(at + _PHASE) != 0:
                break
        else:  # it said nothing yet, or died while it said it
            name, since, limit = b"", 0, 0
        step, boundary, _, cut = self.boundary(local_rank)
        return Beat(
            step, boundary, self._get(at + _STEPS), self._get(at + _LONGEST), cut,
            name.decode(errors="ignore"), since, limit,
        )  # fmt: skip

    def publish_cut(self, sequence: int, step: int, slots: dict[int, int]) -> None:
        """Publish a cut; ``slots`` gives each local rank's slot. The sequence is written last."""
        self._put(_CUT_SEQUENCE, 0)
        for local_rank, index in slots.items():
            self._put(_LINES_AT + local_rank * _LINE + _SLOT, index)
        self._put(_CUT_STEP, step)
        self._put(_CUT_SEQUENCE, sequence)

    def clear_cut(self) -> None:
        """Take the published cut back; a rank that has read it just now may still cut."""
        self._put(_CUT_SEQUENCE, 0)

    def publish_stop(self, step: int, *, final: bool) -> None:
        """Publish the step at which all ranks stop."""
        self._put(_STOP_FINAL, 0)
        self._put(_STOP_STEP, step)
        self._put(_STOP_REQUESTED, 1)
        self._put(_STOP_FINAL, int(final))

    def hold_until(self, nanos: int) -> None:
        """See :meth:`held_until`."""
        self._put(_HOLD_UNTIL, nanos)

    def publish_demoted(self, count: int) -> None:
        self._put(_DEMOTED, count)

    def move(self) -> None:
        """Say that the keeper moves."""
        self._put(_BEAT, self._get(_BEAT) + 1)

    def beats(self) -> int:
        """A counter that moves with the keeper; for its agent."""
        return self._get(_BEAT)

    def serve(self, attempt: int) -> None:
        """Say whose page this is; a page serves one attempt."""
        self._put(_ATTEMPT, attempt)

    def served(self) -> int:
        """The attempt that the page serves, 0 where none was said."""
        return self._get(_ATTEMPT)

    def note_elections(self, elections: Iterable[WentOn]) -> None:
        """Keep what attempts went on from, in place of what was noted before: for the keeper after
        this one, which may have to write the branches. At most :data:`KEPT_ELECTIONS`, those of
        the newest attempts."""
        kept = sorted(elections, key=lambda election: election.attempt)[-KEPT_ELECTIONS:]
        generation, now = self._notes()
        if tuple(kept) == now:
            return
        body = _WORD.pack(generation + 1) + _WORD.pack(len(kept))
        body += b"".join(_WENT_ON.pack(*_words(election)) for election in kept)
        at = _NOTES_AT + (generation + 1) % 2 * _BANK
        self._map[at + _WORD.size : at + _WORD.size + len(body)] = body
        self._put(at, xxhash.xxh3_64_intdigest(body))

    def note_election(self, election: WentOn) -> None:
        """Keep this one beside those of other attempts."""
        others = (one for one in self.elections() if one.attempt != election.attempt)
        self.note_elections([*others, election])

    def forget_election(self, attempt: int) -> None:
        """What was noted of that attempt is of another life."""
        self.note_elections(one for one in self.elections() if one.attempt != attempt)

    def elections(self) -> tuple[WentOn, ...]:
        """What was noted, oldest attempt first."""
        return self._notes()[1]

    def _notes(self) -> tuple[int, tuple[WentOn, ...]]:
        """The generation in force and its notes."""
        return max(self._bank(_NOTES_AT), self._bank(_NOTES_AT + _BANK), key=lambda bank: bank[0])

    def _bank(self, at: int) -> tuple[int, tuple[WentOn, ...]]:
        digest, generation, count = _BANK_HEAD.unpack_from(self._map, at)
        end = at + _BANK_HEAD.size + count * _WENT_ON.size
        if not generation or count > KEPT_ELECTIONS:
            return 0, ()
        if xxhash.xxh3_64_intdigest(self._map[at + _WORD.size : end]) != digest:
            return 0, ()
        notes = self._map[at + _BANK_HEAD.size : end]
        return generation, tuple(_election(*words) for words in _WENT_ON.iter_unpack(notes))

    def close(self) -> None:
        self._map.close()

    def _put(self, at: int, value: int) -> None:
        _WORD.pack_into(self._map, at, value)

    def _get(self, at: int) -> int:
        value: int = _WORD.unpack_from(self._map, at)[0]
        return value


def _words(election: WentOn) -> tuple[int, ...]:
    point = election.point or Point(0, 0)
    source = _SOURCES.index(election.source)
    return election.attempt, source, point.step, point.attempt, election.world


def _election(attempt: int, source: int, step: int, restored: int, world: int) -> WentOn:
    return WentOn(attempt, _SOURCES[source], Point(step, restored) if restored else None, world)
