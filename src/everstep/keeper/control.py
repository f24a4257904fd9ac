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

import xxhash

from everstep.core.ids import Point
from everstep.errors import CorruptObject
from everstep.keeper.wire import WentOn

_MAGIC = 0x31434B5045535645
_SIZE = 4 * mmap.PAGESIZE
_LINES_AT = 1024
_LINE = 128
MAX_LOCAL_RANKS = (_SIZE - _LINES_AT) // _LINE
_WORD = struct.Struct("<Q")

# Written by the keeper.
_CUT_SEQUENCE, _CUT_STEP, _STOP_REQUESTED, _STOP_STEP, _STOP_FINAL, _DEMOTED, _ATTEMPT = range(
    64, 120, 8
)
# Attempt, source, step and attempt of the point, world, digest of the five. Never read by workers.
_WENT_ON = struct.Struct("<6Q")
_WENT_ON_AT = 128
_KEPT_ELECTIONS = 16
_SOURCES = ("fresh", "memory", "store")
# Written by the worker, in its own line.
_STEP, _BOUNDARY, _STEP_NANOS, _CUT_NANOS, _PHASE = range(0, 40, 8)
# Written by the keeper, in the worker's line.
_SLOT = 64


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

    def publish_demoted(self, count: int) -> None:
        self._put(_DEMOTED, count)

    def serve(self, attempt: int) -> None:
        """Say whose page this is; a page serves one attempt."""
        self._put(_ATTEMPT, attempt)

    def served(self) -> int:
        """The attempt that the page serves, 0 where none was said."""
        return self._get(_ATTEMPT)

    def note_election(self, election: WentOn) -> None:
        """Keep what an attempt went on from: for the keeper after this one, which may have to
        write the branch. The newest 16 attempts are kept."""
        point = election.point or Point(0, 0)
        source = _SOURCES.index(election.source)
        words = (election.attempt, source, point.step, point.attempt, election.world)
        _WENT_ON.pack_into(self._map, _election_at(election.attempt), *words, _sum(words))

    def forget_election(self, attempt: int) -> None:
        """What was noted of that attempt is of another life."""
        if any(election.attempt == attempt for election in self.elections()):
            _WENT_ON.pack_into(self._map, _election_at(attempt), *(0,) * 6)

    def elections(self) -> tuple[WentOn, ...]:
        """What was noted, oldest first; a note that a death has torn is none."""
        found = []
        for at in range(_KEPT_ELECTIONS):
            *words, digest = _WENT_ON.unpack_from(self._map, _WENT_ON_AT + at * _WENT_ON.size)
            attempt, source, step, restored, world = words
            if attempt and digest == _sum(tuple(words)):
                point = Point(step, restored) if restored else None
                found.append(WentOn(attempt, _SOURCES[source], point, world))
        return tuple(sorted(found, key=lambda election: election.attempt))

    def close(self) -> None:
        self._map.close()

    def _put(self, at: int, value: int) -> None:
        _WORD.pack_into(self._map, at, value)

    def _get(self, at: int) -> int:
        value: int = _WORD.unpack_from(self._map, at)[0]
        return value


def _election_at(attempt: int) -> int:
    return _WENT_ON_AT + attempt % _KEPT_ELECTIONS * _WENT_ON.size


def _sum(words: tuple[int, ...]) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(words)}Q", *words))
