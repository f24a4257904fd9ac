"""The slots of one node: made, adopted, looked up, digested and given back.

Owns: descriptors and mappings of the node's slots. Never does: decide which is free (table), talk
to anyone. Called by: node.

A rank's slots come in pairs. A worker knows its pair as 0 and 1; here every pair has numbers of
its own, because a pair that became too small is kept until a newer snapshot is complete.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

from everstep.core.layout import Snapshot
from everstep.core.points import reach
from everstep.errors import CorruptObject, KeeperError
from everstep.keeper.facts import Held
from everstep.keeper.slot import Geometry, Slot, create
from everstep.keeper.wire import SlotName
from everstep.store.chunks import chunk_extents, split
from everstep.store.digests import digest

_DIGEST_BYTES = 16
_PARAMETERS = struct.Struct("<QQ")


class Memory(NamedTuple):
    """One slot: its descriptor and its mapping."""

    fd: int
    slot: Slot


class Holdings:
    """All slots of the node. ``reading`` counts the threads that read a slot now."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._slots: dict[SlotName, Memory] = {}
        self._base: dict[int, int] = {}
        self.reading: dict[SlotName, int] = {}

    # -- a worker's pair

    def open(self, rank: int, geometry: Geometry) -> tuple[int, int]:
        """The descriptors of the rank's pair; a new pair where there is none that is as large.

        Raises :class:`KeeperError` where the kernel has not the memory.
        """
        pair = self._pair(rank)
        if len(pair) < 2 or not all(m.slot.geometry.holds(geometry) for m in pair):
            pair = self._new_pair(rank, geometry)
        return pair[0].fd, pair[1].fd

    def needs(self, rank: int, geometry: Geometry) -> int:
        """Bytes of new memory that :meth:`open` would take."""
        pair = self._pair(rank)
        enough = len(pair) == 2 and all(m.slot.geometry.holds(geometry) for m in pair)
        return 0 if enough else 2 * geometry.total

    def adopt(self, names: tuple[SlotName, ...], fds: list[int]) -> list[SlotName]:
        """Take slots that an older keeper made; the names under which they are new here.

        Slots that are known already, or are no slots, are closed. A rank's names are kept where
        they are free, else the pair gets new numbers.
        """
        fresh = []
        for name, fd in zip(names, fds, strict=True):
            if self._known(fd):
                os.close(fd)
            else:
                fresh.append((name, fd))
        shift = {
            name.rank: self._next_number(name.rank) for name, _ in fresh if name in self._slots
        }
        added = []
        for name, fd in fresh:
            mapped = _map(fd)
            if mapped is not None:
                number = shift[name.rank] + name.index % 2 if name.rank in shift else name.index
                added.append(self._add(SlotName(name.rank, number), mapped))
        for name in added:
            self._base[name.rank] = self._newest_base(name.rank)
        return added

    def real(self, rank: int, index: int) -> int:
        """The number of the slot that the worker calls ``index``."""
        return self._base.get(rank, 0) + index

    def visible(self, rank: int, number: int) -> int:
        """What the worker calls the slot."""
        return number - self._base.get(rank, 0)

    # -- looking

    def names(self) -> list[SlotName]:
        return sorted(self._slots, key=lambda name: (name.rank, name.index))

    def ranks(self) -> list[int]:
        return sorted({name.rank for name in self._slots})

    def fd(self, name: SlotName) -> int:
        return self._slots[name].fd

    def slot(self, name: SlotName) -> Slot | None:
        memory = self._slots.get(name)
        return memory.slot if memory is not None else None

    def held(self, rank: int) -> tuple[Held, ...]:
        """The rank's slots as their headers now describe them."""
        return tuple(self._held(name) for name in self.names() if name.rank == rank)

    def inventory(self) -> tuple[Held, ...]:
        return tuple(self._held(name) for name in self.names())

    @property
    def nbytes(self) -> int:
        return sum(memory.slot.geometry.total for memory in self._slots.values())

    # -- ending

    def forget(self, name: SlotName) -> None:
        """Clear the commit word."""
        memory = self._slots.get(name)
        if memory is not None:
            memory.slot.begin()

    def drop(self, name: SlotName) -> None:
        """Close a slot and give its memory back, whoever else holds the descriptor."""
        memory = self._slots.pop(name, None)
        if memory is None:
            return
        with mmap.mmap(memory.fd, memory.slot.geometry.total) as whole:
            whole.madvise(mmap.MADV_REMOVE)
        memory.slot.close()
        os.close(memory.fd)

    def retire(self, rank: int) -> None:
        """Write no more into the rank's pair: another process may. It is kept until a newer
        snapshot is complete, and the next :meth:`open` makes a new one."""
        self._base[rank] = self._next_number(rank)

    def close(self) -> None:
        """Close everything; others that hold the descriptors keep the memory."""
        for memory in self._slots.values():
            os.close(memory.fd)
        self._slots = {}

    # -- within

    def _pair(self, rank: int) -> list[Memory]:
        base = self._base.get(rank, 0)
        found = (self._slots.get(SlotName(rank, base + i)) for i in (0, 1))
        return [memory for memory in found if memory is not None]

    def _new_pair(self, rank: int, geometry: Geometry) -> list[Memory]:
        base = self._next_number(rank)
        first = create(geometry, f"everstep-{self._job}-{rank}-{base}")
        try:
            second = create(geometry, f"everstep-{self._job}-{rank}-{base + 1}")
        except KeeperError:
            os.close(first)
            raise
        for number, fd in ((base, first), (base + 1, second)):
            self._add(SlotName(rank, number), Memory(fd, Slot(fd, populate=False)))
        self._base[rank] = base
        return self._pair(rank)

    def _add(self, name: SlotName, memory: Memory) -> SlotName:
        self._slots[name] = memory
        return name

    def _next_number(self, rank: int) -> int:
        numbers = [name.index for name in self._slots if name.rank == rank]
        return (max(numbers) // 2 + 1) * 2 if numbers else 0

    def _newest_base(self, rank: int) -> int:
        return max(name.index for name in self._slots if name.rank == rank) // 2 * 2

    def _known(self, fd: int) -> bool:
        about = os.fstat(fd)
        return any(
            (other.st_dev, other.st_ino) == (about.st_dev, about.st_ino)
            for other in (os.fstat(memory.fd) for memory in self._slots.values())
        )

    def _held(self, name: SlotName) -> Held:
        slot = self._slots[name].slot
        current = name.index // 2 * 2 == self._base.get(name.rank, 0)
        busy = self.reading.get(name, 0) > 0
        try:
            snapshot = slot.snapshot()
        except CorruptObject:
            return Held(name.rank, name.index, None, "", 0, current, busy)
        about = slot.described()
        point, layout = (about.point if about else None), snapshot.layout
        sequence = about.sequence if about else 0
        snapshot.payload.release()
        snapshot.state.release()
        return Held(
            name.rank, name.index, point, layout.layout, layout.world, current, busy, sequence
        )


def _map(fd: int) -> Memory | None:
    try:
        return Memory(fd, Slot(fd, populate=False))
    except (CorruptObject, ValueError, OSError):
        os.close(fd)
        return None


# -- digests: run in a thread


def write_digests(slot: Slot, chunk_bytes: int) -> None:
    """Digest the snapshot in the slot, so that any change of its memory is found later."""
    reach("keeper.digest.before_write")
    snapshot = slot.snapshot()
    try:
        found = [_parameters(chunk_bytes), *_digests(snapshot, chunk_bytes)]
        if (len(found) + 1) * _DIGEST_BYTES > slot.geometry.digests:
            found = [_parameters(0), *_digests(snapshot, 0)]
        slot.write_digests(found)
    finally:
        snapshot.payload.release()
        snapshot.state.release()


def check_digests(slot: Slot, chunk_bytes: int) -> str:
    """Why the slot's memory is not what was written; empty where it is.

    A snapshot that nobody digested yet is digested now: its records' sums alone speak for it.
    """
    try:
        known = slot.read_digests(_DIGEST_BYTES)
        if known is None:
            write_digests(slot, chunk_bytes)
            return ""
        snapshot = slot.snapshot()
    except CorruptObject as damaged:
        return damaged.what
    try:
        fresh = _digests(snapshot, _PARAMETERS.unpack(known[0])[0])
        return _difference(known[1:], list(fresh))
    finally:
        snapshot.payload.release()
        snapshot.state.release()


def known_digests(slot: Slot, chunk_bytes: int) -> list[bytes] | None:
    """The payload's chunk digests, where they were taken with this chunk size."""
    known = slot.read_digests(_DIGEST_BYTES)
    if known is None or _PARAMETERS.unpack(known[0])[0] != chunk_bytes:
        return None
    return known[1:]


def _difference(known: list[bytes], fresh: list[bytes]) -> str:
    if len(known) != len(fresh):
        return f"it has {len(fresh)} pieces, {len(known)} were digested."
    bad = [i for i, pair in enumerate(zip(known, fresh, strict=True)) if pair[0] != pair[1]]
    return f"piece {bad[0]} of {len(known)} differs ({len(bad)} in all)." if bad else ""


def _digests(snapshot: Snapshot, chunk_bytes: int) -> Iterator[bytes]:
    """The chunks' digests in payload order, then the state's; of each as a whole for size 0."""
    if chunk_bytes == 0:
        yield digest(snapshot.payload)
        yield digest(snapshot.state)
        return
    for _, at, length in chunk_extents(snapshot.layout, chunk_bytes):
        yield digest(snapshot.payload[at : at + length])
    for start, end in split(len(snapshot.state), chunk_bytes):
        yield digest(snapshot.state[start:end])


def _parameters(chunk_bytes: int) -> bytes:
    return _PARAMETERS.pack(chunk_bytes, 0)
