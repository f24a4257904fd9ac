"""Where restored bytes come from: this node's slots or the store, behind one shape.

Owns: reading tensors from either tier into memory that is handed in. Never does: choose the tier
(the coordinator does, R6). Called by: :mod:`everstep.train.restore`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from everstep.core.ids import Point
from everstep.core.layout import ITEMSIZE, Extent, RankState, TensorRef
from everstep.core.settings import Settings
from everstep.errors import CorruptObject
from everstep.keeper.slot import Slot
from everstep.keeper.wire import SlotName
from everstep.store.boxes import runs

if TYPE_CHECKING:
    from everstep.store import Checkpoint

_decoder = msgspec.msgpack.Decoder(RankState)

Wanted = Sequence[tuple[TensorRef, memoryview]]
"""What to read, and where its row-major bytes go."""


class Source(Protocol):
    """A recovery point that can be read by this rank."""

    def rank_state(self, rank: int) -> RankState: ...

    def read(self, wanted: Wanted) -> int: ...

    def close(self) -> None: ...


class MemorySource:
    """The slots of one point on this node; the keeper has checked their digests (S3)."""

    def __init__(self, slots: dict[SlotName, Slot]) -> None:
        self._states: dict[int, memoryview] = {}
        self._extents: dict[tuple[str, int], list[tuple[Extent, memoryview]]] = {}
        for name, slot in slots.items():
            snapshot = slot.snapshot()
            self._states[name.rank] = snapshot.state
            for extent in snapshot.layout.extents:
                held = self._extents.setdefault((extent.fqn, extent.rank), [])
                held.append((extent, snapshot.payload))

    def rank_state(self, rank: int) -> RankState:
        """The records of ``rank``. Raises :class:`CorruptObject` where this node has none."""
        if rank not in self._states:
            raise CorruptObject(f"this node's memory holds no snapshot of rank {rank}.")
        return _decoder.decode(self._states[rank])

    def read(self, wanted: Wanted) -> int:
        """Fill every destination; gives the bytes copied. Raises :class:`CorruptObject` where
        a byte of a tensor is in no slot of this node."""
        return sum(self._fill(ref, into) for ref, into in wanted)

    def _fill(self, ref: TensorRef, into: memoryview) -> int:
        itemsize, copied = ITEMSIZE[ref.dtype], 0
        for extent, payload in self._extents.get((ref.fqn, ref.rank), ()):
            for run in runs(extent.box, ref.box, itemsize):
                at = extent.payload_offset + run.source
                into[run.target : run.target + run.length] = payload[at : at + run.length]
                copied += run.length
        if copied != ref.nbytes:
            raise CorruptObject(
                f"this node's memory holds {copied} of the {ref.nbytes} bytes of {ref.fqn}."
            )
        return copied

    def close(self) -> None:
        """Let go of the slots' memory, so that they can be unmapped."""
        self._states.clear()
        self._extents.clear()


class StoreSource:
    """One committed checkpoint; every chunk is verified while it is read."""

    def __init__(self, settings: Settings, point: Point) -> None:
        # Not at the top: a restart from memory must not pay for importing the store's reader.
        from everstep.store import open_store

        job = open_store(settings.store).job(settings.job)
        self._checkpoint: Checkpoint = job.open_checkpoint(point)

    def rank_state(self, rank: int) -> RankState:
        return self._checkpoint.rank_state(rank)

    def read(self, wanted: Wanted) -> int:
        from everstep.store import ReadRequest

        requests = [ReadRequest(ref.fqn, ref.rank, ref.box, into) for ref, into in wanted]
        return self._checkpoint.load(requests).bytes

    def close(self) -> None:
        """Nothing is held open."""
