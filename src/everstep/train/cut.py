"""One cut of this rank: read, plan where needed, copy into the slot, tell the keeper.

Owns: the layout in use and the geometry of the slots. Never does: choose the step or the slot,
decide what a failure means. Called by: :mod:`everstep.train.boundary`. All that happens here is
time in which training waits.
"""

from __future__ import annotations

import time

import msgspec

from everstep.core.health import Health
from everstep.core.layout import RankLayout
from everstep.core.points import reach
from everstep.errors import KeeperError
from everstep.keeper.slot import PAGE, Geometry, Slot
from everstep.keeper.wire import CutDone
from everstep.state import replicas
from everstep.state.capture import Capture
from everstep.state.inspect import LiveState
from everstep.state.plan import CHUNK_BYTES, plan_layout
from everstep.store import chunk_extents
from everstep.train.connect import Connection
from everstep.train.place import Place
from everstep.train.session import Session

_STATE_SLACK = 4
"""The record of a state may grow to this many times its first size before slots are moved."""
_MIN_RECORD = 256 * 1024
_DIGEST_BYTES = 32
_CHECKED_SHARE = 0.05
"""Share of a cut's bytes whose replicas are compared each time. Hashing is about twice as fast as
copying, so this is less than the 5 % of the copy that R8 allows."""


class Cutter:
    """Takes cuts. ``ever_cut`` says whether one has succeeded in this attempt."""

    def __init__(self, session: Session, connection: Connection, place: Place) -> None:
        self._session = session
        self._connection = connection
        self._place = place
        self._capture: Capture | None = None
        self._layout_record = b""
        self._slots: tuple[Slot, Slot] | None = None
        self._geometry: Geometry | None = None
        self._demotions = 0
        self._proved_layout = ""
        self._held_step = -1
        self._padded: dict[int, tuple[Slot, bytes]] = {}
        self.ever_cut = False

    def holds(self, step: int) -> bool:
        """Whether the newest cut is of ``step``."""
        return self._held_step == step

    @property
    def ready(self) -> bool:
        """Whether slots are open."""
        return self._geometry is not None

    def make_ready(self, step: int) -> None:
        """Have slots for the state as it is now: the keeper can give and publish only slots that
        exist. Does nothing once they do; the first call costs the memory's first touch.

        Raises as :meth:`cut` does.
        """
        if self._geometry is None:
            live = self._session.resolve(step)
            capture = self._planned(live)
            self._slot(capture.layout, msgspec.msgpack.encode(live.rank_state()), 0)

    @property
    def nbytes(self) -> int:
        """Bytes that a cut copies, 0 before the first plan."""
        return 0 if self._capture is None else self._capture.layout.payload_bytes

    def cut(
        self,
        step: int,
        index: int,
        *,
        persist: bool,
        sequence: int = 0,
        health: Health | None = None,
        began: float | None = None,
    ) -> None:
        """Copy the state of ``step`` into slot ``index``; ``sequence`` is the cut's,
        equal on all ranks that take part in it. ``health`` goes with it. ``began``: since when
        training waits for it (seconds of CLOCK_MONOTONIC), None for now.

        Raises what reading the objects raises, and :class:`~everstep.errors.KeeperError` where
        there is no memory to copy into.
        """
        began = time.monotonic() if began is None else began
        reach("train.cut.before")
        self._learn_demotions()
        live = self._session.resolve(step)
        capture = self._planned(live)
        if health is not None and self._session.attached.demoted:
            health = msgspec.structs.replace(health, replicas="differ")
        state = msgspec.msgpack.encode(msgspec.structs.replace(live.rank_state(), health=health))
        slot = self._slot(capture.layout, state, index)
        slot.begin()
        reach("train.cut.begun")
        self._clear_padding(slot, index, capture.layout)
        capture.copy_into(slot.payload, live)
        reach("train.cut.copied")
        slot.commit(
            step=step,
            attempt=self._connection.attempt,
            world=self._place.world,
            rank=self._place.rank,
            sequence=sequence,
            layout=self._layout_record,
            state=state,
        )
        reach("train.cut.committed")
        proofs = self._proofs(live, capture.layout, sequence or step)
        self._held_step, self.ever_cut = step, True
        self._connection.cut_done(
            CutDone(
                step=step,
                index=index,
                layout=capture.layout.layout,
                sequence=sequence,
                seconds=time.monotonic() - began,
                nbytes=capture.layout.payload_bytes,
                replicas=proofs,
                persist=persist,
            )
        )

    def close(self) -> None:
        """Let go of the slots' memory, so that the connection can unmap it."""
        if self._capture is not None:
            self._capture.release()
        self._slots = None

    # -- planning

    def _planned(self, live: LiveState) -> Capture:
        if self._capture is not None and self._capture.matches(live):
            return self._capture
        layout = plan_layout(
            live.held,
            world=self._place.world,
            rank=self._place.rank,
            node_of_rank=self._place.node_of_rank,
            chunk_bytes=CHUNK_BYTES,
        )
        self.close()
        self._capture = Capture(live, layout)
        self._layout_record = msgspec.msgpack.encode(layout)
        return self._capture

    def _slot(self, layout: RankLayout, state: bytes, index: int) -> Slot:
        needed = self._needed(layout, len(state))
        if self._geometry is None or not self._geometry.holds(needed):
            # Views of the old slots must be gone before the connection unmaps them.
            self.close()
            roomy = self._needed(layout, len(state) * _STATE_SLACK)
            self._connection.open_slots(roomy)
            self._geometry = roomy
        slots = self._connection.slots()
        if slots is None:
            raise KeeperError("the keeper is away and no slot is open.")
        if self._slots is not slots and self._capture is not None:
            self._capture.release()
        self._slots = slots
        return slots[index]

    def _clear_padding(self, slot: Slot, index: int, layout: RankLayout) -> None:
        """Zero the bytes between extents once for each layout: another layout's may be there, and
        the store refuses padding that is not zero (S3)."""
        if self._padded.get(index) == (slot, self._layout_record):
            return
        # The whole record: the layout's digest knows nothing of what is this rank's own.
        self._padded[index] = (slot, self._layout_record)
        ends = [0, *(extent.payload_offset + extent.nbytes for extent in layout.extents)]
        page_end = -(-layout.payload_bytes // PAGE) * PAGE
        starts = [*(extent.payload_offset for extent in layout.extents), page_end]
        for end, start in zip(ends, starts, strict=True):
            slot.payload[end:start] = bytes(start - end)

    def _needed(self, layout: RankLayout, state_bytes: int) -> Geometry:
        chunks = len(chunk_extents(layout, CHUNK_BYTES)) + 1 + state_bytes // CHUNK_BYTES + 1
        return Geometry.fitting(
            payload=layout.payload_bytes,
            state=max(state_bytes, _MIN_RECORD),
            layout=max(2 * len(self._layout_record), _MIN_RECORD),
            digests=chunks * _DIGEST_BYTES + 64,
        )

    # -- replicas (R8)

    def _learn_demotions(self) -> None:
        count = self._connection.demoted()
        if count != self._demotions:
            named = self._connection.link.ask_demoted()
            self._session.attached.demote([what.rpartition(" [")[0] for what in named])
            self._demotions = count

    def _proofs(self, live: LiveState, layout: RankLayout, turn: int) -> dict[str, str]:
        """Digests to compare: all of a new layout, later a rotating part. ``turn`` must be equal
        on all ranks of a cut; names carry the span, so that only like is compared with like."""
        if self._place.world == 1:
            return {}
        if self._proved_layout != layout.layout:
            self._proved_layout = layout.layout
            spans = replicas.replicated(live)
        else:
            # Of what all ranks agree on: their own payloads differ, and so would the windows.
            shared = sum(h.ref.nbytes for h in live.held if h.split)
            budget = max(int(shared * _CHECKED_SHARE / self._place.world), 1)
            spans, _ = replicas.rotation(live, cursor=turn * budget, budget_bytes=budget)
        found = replicas.digests(live, spans)
        return {f"{s.fqn} [{s.start}:{s.stop}]": found[s.fqn] for s in spans}
