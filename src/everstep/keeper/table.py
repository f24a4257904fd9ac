"""Which slot of which rank on which node holds what, and which may be written (R7).

Owns: contents, leases and reservations of all slots of the job, as node 0 knows them. Never does:
touch memory. Called by: the parts of the coordinator.

A slot is free iff it is current, nobody leases it, no rank may be writing it, and it does not
hold the newest complete snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from everstep.core.ids import Point
from everstep.keeper.facts import Held


class Key(msgspec.Struct, frozen=True, order=True):
    """The address of a slot in the job."""

    node: int
    rank: int
    index: int


@dataclass
class Entry:
    """``sequence`` is the number of the try that the contents are of, ``reserved`` the step of the
    cut that may be written into the slot at any moment, ``doomed`` that its contents are to be
    forgotten as soon as nobody reads them."""

    point: Point | None = None
    layout: str = ""
    world: int = 0
    current: bool = True
    sequence: int = 0
    leases: set[str] = field(default_factory=set)
    reserved: int | None = None
    doomed: bool = False

    def holds(self, point: Point) -> bool:
        """Whether the slot can be read as ``point``."""
        return self.point == point and self.reserved is None and not self.doomed


class Complete(NamedTuple):
    """A snapshot that all ranks hold of one try: its slots by rank."""

    point: Point
    layout: str
    slots: dict[int, Key]
    sequence: int = 0


class SlotTable:
    """``home`` maps each rank of the attempt to its node; it is replaced when one begins."""

    def __init__(self) -> None:
        self.entries: dict[Key, Entry] = {}
        self.home: Mapping[int, int] = {}

    # -- what the nodes tell

    def see(self, node: int, rank: int, slots: tuple[Held, ...]) -> None:
        """Take a rank's slots on a node as their headers now describe them."""
        named = {Key(node, rank, held.index): held for held in slots}
        for key in [k for k in self.entries if k.node == node and k.rank == rank]:
            if key not in named:
                del self.entries[key]
        for key, held in named.items():
            entry = self.entries.setdefault(key, Entry())
            entry.point, entry.layout, entry.world = held.point, held.layout, held.world
            entry.current, entry.sequence = held.current, held.sequence
            if held.busy:
                entry.leases.add("busy")
            else:
                entry.leases.discard("busy")

    def only_node(self, node: int) -> None:
        """Forget the other nodes' slots; they say again what they hold when they join."""
        self.entries = {key: entry for key, entry in self.entries.items() if key.node == node}

    def see_node(self, node: int, slots: tuple[Held, ...]) -> None:
        """Take all that a node holds; what it does not name is gone."""
        ranks = {held.rank for held in slots} | {k.rank for k in self.entries if k.node == node}
        for rank in ranks:
            self.see(node, rank, tuple(held for held in slots if held.rank == rank))

    def put(self, key: Key, point: Point, layout: str, world: int, sequence: int) -> None:
        """A rank has said that it wrote ``point`` there."""
        entry = self.entries.setdefault(key, Entry())
        entry.sequence = sequence
        entry.point, entry.layout, entry.world, entry.reserved = point, layout, world, None

    # -- questions

    def key(self, rank: int, index: int) -> Key:
        return Key(self.home[rank], rank, index)

    def anywhere(self, rank: int, point: Point, sequence: int) -> Key | None:
        """A slot of the rank that holds that try of ``point``, on whichever node."""
        for key, entry in self.entries.items():
            if key.rank == rank and entry.holds(point) and entry.sequence == sequence:
                return key
        return None

    def of_rank(self, rank: int) -> Iterator[tuple[Key, Entry]]:
        """The rank's slots on the node where it now runs."""
        node = self.home.get(rank)
        for key, entry in self.entries.items():
            if key.rank == rank and key.node == node:
                yield key, entry

    def holding(self, point: Point, sequence: int) -> dict[int, Key]:
        """The slot of each rank that holds that try of ``point``."""
        return {
            rank: key
            for rank in self.home
            for key, entry in self.of_rank(rank)
            if entry.holds(point) and entry.sequence == sequence
        }

    def holds(self, rank: int, point: Point) -> bool:
        """Whether the rank holds ``point``, of whichever try."""
        return any(entry.holds(point) for _, entry in self.of_rank(rank))

    def complete(self, point: Point, sequence: int | None = None) -> Complete | None:
        """The snapshot of ``point`` if every rank holds it of one try, in one layout and this
        world; the newest such try where none is named."""
        if sequence is not None:
            return self._complete(point, sequence)
        tries = {entry.sequence for entry in self.entries.values() if entry.holds(point)}
        found = (self._complete(point, one) for one in sorted(tries, reverse=True))
        return next((snapshot for snapshot in found if snapshot is not None), None)

    def _complete(self, point: Point, sequence: int) -> Complete | None:
        slots = self.holding(point, sequence)
        if not self.home or len(slots) < len(self.home):
            return None
        entries = [self.entries[key] for key in slots.values()]
        layouts = {entry.layout for entry in entries}
        if len(layouts) > 1 or any(entry.world != len(self.home) for entry in entries):
            return None
        return Complete(point, layouts.pop(), slots, sequence)

    def completes(self) -> list[Complete]:
        """All complete snapshots, newest first."""
        points = {entry.point for entry in self.entries.values() if entry.point is not None}
        found = (self.complete(point) for point in sorted(points, reverse=True))
        return [snapshot for snapshot in found if snapshot is not None]

    def newest(self) -> Complete | None:
        return next(iter(self.completes()), None)

    def other_world(self) -> tuple[Point, int] | None:
        """The newest snapshot that is complete in another world than this one."""
        for point in sorted({e.point for e in self.entries.values() if e.point}, reverse=True):
            tries: dict[tuple[int, int], set[int]] = {}
            for key, entry in self.entries.items():
                if entry.point == point:
                    tries.setdefault((entry.sequence, entry.world), set()).add(key.rank)
            for (_, world), holders in tries.items():
                if world != len(self.home) and holders == set(range(world)):
                    return point, world
        return None

    def free(self, rank: int, *, kept: AbstractSet[Point] = frozenset()) -> int | None:
        """A slot of the rank that may be written now, or None (R7). ``kept`` are points in the
        making, whose slots are not given either."""
        newest = self.newest()
        complete = newest.slots.get(rank) if newest else None
        for key, entry in self.of_rank(rank):
            idle = entry.current and not entry.leases and entry.reserved is None
            wanted = key == complete or entry.point in kept
            if idle and not entry.doomed and not wanted:
                return key.index
        return None

    def replaced(self) -> dict[tuple[int, int], list[int]]:
        """Slots that were replaced and are not needed any more, by (node, rank)."""
        newest = self.newest()
        kept = set(newest.slots.values()) if newest else set()
        found: dict[tuple[int, int], list[int]] = {}
        for key, entry in self.entries.items():
            if not entry.current and not entry.leases and key not in kept:
                found.setdefault((key.node, key.rank), []).append(key.index)
        return found

    # -- leases and reservations

    def reserve(self, key: Key, step: int) -> None:
        entry = self.entries[key]
        assert not entry.leases, f"{key} is leased"
        assert entry.reserved is None, f"{key} may be being written"
        entry.reserved = step

    def resolve(self, rank: int) -> None:
        """The rank is known not to be writing: its reservations end."""
        for _, entry in self.of_rank(rank):
            entry.reserved = None

    def resolve_before(self, rank: int, step: int) -> None:
        """The rank has gone on beyond ``step`` - 1: reservations of earlier cuts end."""
        for _, entry in self.of_rank(rank):
            if entry.reserved is not None and entry.reserved < step:
                entry.reserved = None

    def lease(self, key: Key, why: str) -> None:
        self.entries[key].leases.add(why)

    def release(self, key: Key, why: str) -> bool:
        """End a lease; True where the slot was to be forgotten and can be now."""
        entry = self.entries.get(key)
        if entry is None:
            return False
        entry.leases.discard(why)
        return self._forgettable(entry)

    def forget(self, key: Key) -> bool:
        """The contents must not be used again; True where they can be cleared now."""
        entry = self.entries[key]
        entry.doomed = True
        return self._forgettable(entry)

    def _forgettable(self, entry: Entry) -> bool:
        if not entry.doomed or entry.leases:
            return False
        entry.doomed = False
        entry.point, entry.layout, entry.world, entry.sequence = None, "", 0, 0
        return True
