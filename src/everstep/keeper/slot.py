"""One slot: a memfd that holds one snapshot of one rank and describes itself.

Owns: the slot's layout in memory, its commit word and its digests. Never does: decide which slot
is free (the coordinator, R7), talk to anyone. Called by: the worker, which writes; the keeper and
restoring workers, which read; a new keeper, which adopts slots it has never seen.

Layout, every region on a page boundary::

    0      header: geometry, then the description of the snapshot, then the commit word
    4096   layout record (msgpack RankLayout)
    ...    state record (msgpack RankState)
    ...    payload (extents; see core.layout)
    ...    digests of the payload's chunks and of the state record, written by the keeper

The commit word is a checksum of the description, written last and cleared first: a slot whose
writer died has none. The worker's message to the keeper (a system call) orders the bytes for the
reader on machines with weak memory order; a reader after the writer's death has the kernel's
teardown in between.
"""

from __future__ import annotations

import mmap
import os
import struct

import msgspec
import xxhash

from everstep.core.ids import Point
from everstep.core.layout import RankLayout, Snapshot
from everstep.errors import CorruptObject, KeeperError

PAGE = mmap.PAGESIZE
_MAGIC = b"EVSSLOT1"
_GEOMETRY = struct.Struct("<8s4Q")
_DESCRIPTION = struct.Struct("<QIIIIQQQQ")
_DESCRIBED_AT = 64
_COMMIT_AT = 256
_DIGESTED_AT = 264
_WORD = struct.Struct("<Q")

_layout_decoder = msgspec.msgpack.Decoder(RankLayout)


class Geometry(msgspec.Struct, frozen=True):
    """Capacities in bytes of a slot's regions, each rounded up to pages."""

    payload: int
    state: int
    layout: int
    digests: int

    @classmethod
    def fitting(cls, *, payload: int, state: int, layout: int, digests: int) -> Geometry:
        return cls(*(-(-max(n, 1) // PAGE) * PAGE for n in (payload, state, layout, digests)))

    @property
    def total(self) -> int:
        return PAGE + self.layout + self.state + self.payload + self.digests

    def holds(self, other: Geometry) -> bool:
        """Whether everything that fits ``other`` fits this."""
        return all(getattr(self, f) >= getattr(other, f) for f in self.__struct_fields__)


class Described(msgspec.Struct, frozen=True):
    """What the header says of the snapshot in the slot."""

    step: int
    attempt: int
    world: int
    rank: int
    sequence: int
    layout_bytes: int
    state_bytes: int
    layout_sum: int
    state_sum: int

    @property
    def point(self) -> Point:
        return Point(self.step, self.attempt)


def create(geometry: Geometry, name: str) -> int:
    """A new memfd of that geometry, pre-faulted. The caller owns the descriptor.

    Raises :class:`KeeperError` where the kernel has not the memory.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, geometry.total)
        os.pwrite(fd, _GEOMETRY.pack(_MAGIC, *msgspec.structs.astuple(geometry)), 0)
    except OSError as full:
        os.close(fd)
        raise KeeperError(f"no memory for a slot of {geometry.total} bytes: {full}.") from full
    return fd


class Slot:
    """A mapping of one slot. ``close`` releases the mapping; the descriptor stays the caller's.

    ``populate`` maps every page now (the writer's way); a reader of a part leaves it out.
    """

    def __init__(self, fd: int, *, populate: bool = True) -> None:
        size = os.fstat(fd).st_size
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        self._map = mmap.mmap(fd, size, flags=flags)
        self.memory = memoryview(self._map)
        magic, *sizes = _GEOMETRY.unpack_from(self.memory, 0)
        self.geometry = Geometry(*sizes)
        if magic != _MAGIC or self.geometry.total != size:
            raise CorruptObject(f"descriptor {fd} is not a slot of this version.")
        ends = [PAGE]
        for region in ("layout", "state", "payload", "digests"):
            ends.append(ends[-1] + getattr(self.geometry, region))
        self.layout = self.memory[ends[0] : ends[1]]
        self.state = self.memory[ends[1] : ends[2]]
        self.payload = self.memory[ends[2] : ends[3]]
        self.digests = self.memory[ends[3] : ends[4]]

    # -- the worker's side

    def begin(self) -> None:
        """Clear the commit word: from here on the slot holds nothing."""
        self._put(_COMMIT_AT, 0)
        self._put(_DIGESTED_AT, 0)

    def commit(
        self,
        *,
        step: int,
        attempt: int,
        world: int,
        rank: int,
        sequence: int,
        layout: bytes,
        state: bytes,
    ) -> None:
        """Describe what :attr:`payload` now holds and write the commit word last."""
        self.layout[: len(layout)] = layout
        self.state[: len(state)] = state
        _DESCRIPTION.pack_into(
            self.memory, _DESCRIBED_AT, step, attempt, world, rank, 0, sequence,
            len(layout), len(state), _sum(layout),
        )  # fmt: skip
        self._put(_DESCRIBED_AT + _DESCRIPTION.size, _sum(state))
        self._put(_COMMIT_AT, self._description_sum())

    # -- the reader's side

    def described(self) -> Described | None:
        """The snapshot's description, or None where the slot holds none."""
        word = self._get(_COMMIT_AT)
        if word == 0 or word != self._description_sum():
            return None
        step, attempt, world, rank, _, sequence, layout_bytes, state_bytes, layout_sum = (
            _DESCRIPTION.unpack_from(self.memory, _DESCRIBED_AT)
        )
        state_sum = self._get(_DESCRIBED_AT + _DESCRIPTION.size)
        return Described(
            step, attempt, world, rank, sequence, layout_bytes, state_bytes, layout_sum, state_sum
        )

    def snapshot(self) -> Snapshot:
        """The snapshot as buffers over the slot's memory; records checked against their sums.

        Raises :class:`CorruptObject` where the slot holds none or a record is damaged. Whether
        the payload is what was written, only :meth:`read_digests` and hashing can say.
        """
        about = self.described()
        if about is None:
            raise CorruptObject("the slot holds no committed snapshot.")
        layout = self.layout[: about.layout_bytes]
        state = self.state[: about.state_bytes]
        if _sum(layout) != about.layout_sum or _sum(state) != about.state_sum:
            raise CorruptObject(f"the records of the snapshot of step {about.step} are damaged.")
        record = _layout_decoder.decode(layout)
        payload = self.payload[: record.payload_bytes].toreadonly()
        return Snapshot(about.step, about.attempt, record, payload, state.toreadonly())

    def write_digests(self, digests: list[bytes]) -> None:
        """Keep the keeper's digests beside the snapshot, bound to its commit word."""
        joined = b"".join(digests)
        if len(joined) + 8 > self.geometry.digests:
            raise KeeperError(f"{len(digests)} digests do not fit into the slot.")
        _WORD.pack_into(self.digests, 0, len(joined))
        self.digests[8 : 8 + len(joined)] = joined
        self._put(_DIGESTED_AT, self._digests_sum(joined))

    def read_digests(self, width: int) -> list[bytes] | None:
        """The digests of this very snapshot, ``width`` bytes each, or None where there are none."""
        (length,) = _WORD.unpack_from(self.digests, 0)
        word = self._get(_DIGESTED_AT)
        if word == 0 or length + 8 > self.geometry.digests or length % width:
            return None
        joined = bytes(self.digests[8 : 8 + length])
        if word != self._digests_sum(joined):
            return None
        return [joined[i : i + width] for i in range(0, length, width)]

    def close(self) -> None:
        """Release the views and the mapping. Raises BufferError while a caller holds a view."""
        for view in (self.layout, self.state, self.payload, self.digests, self.memory):
            view.release()
        self._map.close()

    def _description_sum(self) -> int:
        end = _DESCRIBED_AT + _DESCRIPTION.size + _WORD.size
        return _sum(self.memory[_DESCRIBED_AT:end])

    def _digests_sum(self, joined: bytes) -> int:
        return _sum(_WORD.pack(self._get(_COMMIT_AT)) + joined)

    def _put(self, at: int, value: int) -> None:
        _WORD.pack_into(self.memory, at, value)

    def _get(self, at: int) -> int:
        value: int = _WORD.unpack_from(self.memory, at)[0]
        return value


def _sum(data: bytes | memoryview) -> int:
    # Never 0: that is the word of an empty slot.
    return xxhash.xxh3_64_intdigest(data) or 1
