"""Which cuts are taken, into which slots, and whether they are complete (R2, R7, R8).

Owns: the outstanding published cut, the slots that workers ask for, what came of each cut.
Never does: I/O; persist (durable does). Called by: coordinate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from everstep.cadence.policy import Pace, first_cut, next_cut, smoothed
from everstep.core.events import Level
from everstep.core.ids import Point
from everstep.keeper.commands import (
    ClearCut,
    DemoteFqns,
    Digest,
    DropSlots,
    GrantSlot,
    PublishCut,
)
from everstep.keeper.facts import Boundaries, Boundary, CutMade, CutMissed, SlotAsked
from everstep.keeper.situation import Situation
from everstep.keeper.table import Complete, Key

KEPT_STEPS = 8
"""Cuts in the making that are remembered; explicit cuts of some ranks alone must not pile up."""

STRAGGLER_SECONDS = 60.0
"""How long after the first rank's cut the others may take, besides ten steps."""

LOCAL_LAG = 0.02
REMOTE_LAG = 0.2
MAX_LAG = 10.0


@dataclass
class Outstanding:
    """The published cut. ``slots`` by rank."""

    sequence: int
    step: int
    slots: dict[int, int]


@dataclass
class _Ask:
    step: int
    deadline: float


@dataclass
class Cuts:
    """``made`` holds the cuts in the making: what each rank said that has cut, by step.

    ``completed`` is called with each complete snapshot and whether a checkpoint of it was asked
    for; ``lost`` with the step of each cut that was dropped, and why."""

    at: Situation
    completed: Callable[[Complete, bool], None]
    lost: Callable[[int, str], None]
    outstanding: Outstanding | None = None
    stopping: bool = False
    made: dict[int, dict[int, CutMade]] = field(default_factory=dict)
    first_made: dict[int, float] = field(default_factory=dict)
    dropped: dict[int, None] = field(default_factory=dict)
    asks: dict[int, _Ask] = field(default_factory=dict)
    boundaries: dict[int, Boundary] = field(default_factory=dict)
    sequence: int = 0
    last_cut: int = 0
    step_seconds: float = 0.0
    cut_seconds: float = 0.0
    lag: float = 0.0
    demoted: tuple[str, ...] = ()

    def begin(self) -> None:
        """A new attempt: nothing is published, nobody has asked."""
        self.outstanding = None
        self.stopping = False
        self.made, self.first_made, self.dropped = {}, {}, {}
        self.asks, self.boundaries = {}, {}

    # -- facts

    def cut_made(self, fact: CutMade) -> None:
        key = self.at.table.key(fact.rank, fact.index)
        self.at.table.put(key, self.at.point(fact.step), fact.layout, self.at.world)
        if fact.step in self.dropped:
            self.at.forget(key)
            return
        self._remember(fact)
        self._judge(fact.step)

    def cut_missed(self, fact: CutMissed) -> None:
        # Reservations of later cuts stay: the rank may already be in one of them.
        self.at.table.resolve_before(fact.rank, fact.step + 1)
        cut = self.outstanding
        if cut is not None and cut.step == fact.step:
            self._late()
            self.drop(f"rank {fact.rank} skipped it: {fact.reason}", rank=fact.rank)
        elif fact.step in self.made:
            self._lose(fact.step, f"rank {fact.rank} skipped it: {fact.reason}", rank=fact.rank)

    def slot_asked(self, fact: SlotAsked) -> None:
        """The rank waits at a boundary, so it writes no slot."""
        cut = self.outstanding
        self.at.table.resolve(fact.rank)
        if cut is not None and fact.rank not in self.made.get(cut.step, {}):
            if cut.step == fact.step:
                self.at.table.reserve(self.at.table.key(fact.rank, cut.slots[fact.rank]), fact.step)
                self.at.say(GrantSlot(self.at.node_of(fact.rank), fact.rank, cut.slots[fact.rank]))
                return
            self.drop(f"rank {fact.rank} cuts at step {fact.step} instead", rank=fact.rank)
        self.asks[fact.rank] = _Ask(fact.step, self.at.now + fact.timeout)

    def boundaries_seen(self, fact: Boundaries) -> None:
        for boundary in fact.ranks:
            self.boundaries[boundary.rank] = boundary
            if boundary.step_seconds > 0:
                self.step_seconds = smoothed(self.step_seconds, boundary.step_seconds)
            if fact.drained:
                self._passed(boundary)

    def rank_gone(self, rank: int) -> None:
        self.asks.pop(rank, None)
        self.boundaries.pop(rank, None)
        self.at.table.resolve(rank)
        # It may have committed its slot and died before it could say so.
        for step in list(self.made):
            self._judge(step)
        cut = self.outstanding
        if cut is not None and rank not in self.made.get(cut.step, {}):
            self.drop(f"rank {rank} is gone", rank=rank)
        for step in [s for s, cuts in self.made.items() if rank not in cuts]:
            self._lose(step, f"rank {rank} is gone", rank=rank, level="info")

    def settle(self) -> None:
        """Called after each fact: grant what is free, publish what is due, drop what hangs."""
        self._serve_asks()
        self._straggling()
        self._drop_replaced()
        self._publish()

    # -- publishing

    @property
    def wants_boundaries(self) -> bool:
        """Whether a fresh look at the control pages could lead to anything soon."""
        return self.at.elected and (self.outstanding is None or self.stopping)

    def _publish(self) -> None:
        at = self.at
        waiting = self.outstanding or self.stopping or self.asks or self.made
        if waiting or not (at.elected and at.assembled):
            return
        slots = {rank: at.table.free(rank) for rank in at.table.home}
        free = {rank: index for rank, index in slots.items() if index is not None}
        if len(free) < at.world:
            return
        self.sequence += 1
        self.outstanding = Outstanding(self.sequence, self._next_step(), free)
        for rank, index in free.items():
            at.table.reserve(at.table.key(rank, index), self.outstanding.step)
        for node in at.nodes:
            mine = tuple((r, i) for r, i in sorted(free.items()) if at.node_of(r) == node)
            at.say(PublishCut(node, self.sequence, self.outstanding.step, mine))

    def _next_step(self) -> int:
        lag = self.lag or (REMOTE_LAG if len(self.at.nodes) > 1 else LOCAL_LAG)
        pace = Pace(self.step_seconds, self.cut_seconds, lag)
        last = max(self.last_cut, self.at.start)
        if not self.boundaries:
            return first_cut(self.at.policy, pace, start=last)
        newest = max(boundary.step for boundary in self.boundaries.values())
        return next_cut(self.at.policy, pace, newest_boundary=newest, last_cut=last)

    def _serve_asks(self) -> None:
        for rank, ask in sorted(self.asks.items()):
            index = self._free_for(rank, ask.step) if self.at.elected else None
            if index is None and self.at.now < ask.deadline:
                continue
            del self.asks[rank]
            if index is not None:
                self.at.table.reserve(self.at.table.key(rank, index), ask.step)
            self.at.say(GrantSlot(self.at.node_of(rank), rank, -1 if index is None else index))

    def _free_for(self, rank: int, step: int) -> int | None:
        """A slot for a cut that the rank asked for. One that holds a cut in the making is given
        only where there is no other, and that cut is lost."""
        for older in sorted(s for s, cuts in self.made.items() if s < step and rank in cuts):
            index = self.at.table.free(rank, kept=self._pending())
            if index is not None:
                return index
            self._lose(older, f"rank {rank} needs its slot for step {step}", rank=rank)
        return self.at.table.free(rank, kept=self._pending())

    def _pending(self) -> set[Point]:
        return {self.at.point(step) for step in self.made}

    # -- completeness

    def _remember(self, fact: CutMade) -> None:
        self.made.setdefault(fact.step, {})[fact.rank] = fact
        self.first_made.setdefault(fact.step, self.at.now)
        for step in sorted(self.made)[:-KEPT_STEPS]:
            self._lose(step, "too many cuts are in the making")

    def _judge(self, step: int) -> None:
        """Complete, or held by all and yet not one snapshot (R2, R8), or still in the making."""
        point = self.at.point(step)
        held = self.at.table.holding(point)
        if len(held) < self.at.world:
            return
        complete = self.at.table.complete(point)
        cuts = self.made.get(step, {})
        if complete is None:
            self._lose(step, "the ranks disagree about the layout of the state")
            return
        differing = _differing(cuts)
        if differing:
            self._demote(step, differing)
            self._lose(step, "replicated tensors differ between ranks")
            return
        self._complete(complete, cuts)

    def _complete(self, snapshot: Complete, cuts: dict[int, CutMade]) -> None:
        step = snapshot.point.step
        if self.outstanding is not None and self.outstanding.step <= step:
            self.outstanding = None
        for older in [s for s in self.made if s <= step]:
            self._decided(older)
        self.last_cut = step
        seconds = max((cut.seconds for cut in cuts.values()), default=0.0)
        if seconds > 0:
            self.cut_seconds = smoothed(self.cut_seconds, seconds)
        for key in snapshot.slots.values():
            self.at.table.lease(key, "digest")
            self.at.say(Digest(key.node, key.rank, key.index))
        nbytes = sum(cut.nbytes for cut in cuts.values())
        self.at.tell(
            "snapshot.complete", f"snapshot of step {step} is complete in memory",
            level="debug", step=step, seconds=seconds, bytes=nbytes,
        )  # fmt: skip
        self.completed(snapshot, any(cut.persist for cut in cuts.values()))

    def _demote(self, step: int, differing: dict[str, dict[str, list[int]]]) -> None:
        for fqn, groups in sorted(differing.items()):
            ranks = " != ".join(str(group) for group in groups.values())
            self.at.tell(
                "replica.mismatch",
                f"{fqn} should be equal on all ranks and is not at step {step}: ranks {ranks}. "
                "From now on it is stored for each rank.",
                level="error", step=step, fqn=fqn, ranks=list(groups.values()),
            )  # fmt: skip
        self.demoted = tuple(sorted({*self.demoted, *differing}))
        for node in self.at.nodes:
            self.at.say(DemoteFqns(node, self.demoted))

    # -- dropping

    def drop(self, why: str, *, rank: int | None = None, level: Level = "info") -> None:
        """Take the outstanding cut back; training goes on. Ranks that may be writing their slot
        at this moment keep it until they speak or have gone on."""
        cut = self.outstanding
        if cut is None:
            return
        self.outstanding = None
        for node in self.at.nodes:
            self.at.say(ClearCut(node))
        self._lose(cut.step, why, rank=rank, level=level)

    def _lose(
        self, step: int, why: str, *, rank: int | None = None, level: Level = "warning"
    ) -> None:
        if self.outstanding is not None and self.outstanding.step == step:
            self.outstanding = None
        self.dropped[step] = None
        for old in list(self.dropped)[:-KEPT_STEPS]:
            del self.dropped[old]
        point = self.at.point(step)
        for key, entry in list(self.at.table.entries.items()):
            if entry.point == point:
                self.at.forget(key)
        self._decided(step)
        self.at.tell(
            "cut.dropped", f"the cut at step {step} is dropped: {why}",
            level=level, rank=rank, step=step, reason=why,
        )  # fmt: skip
        self.lost(step, why)

    def _passed(self, boundary: Boundary) -> None:
        """The rank has finished a step: cuts of earlier steps that it did not take are missed."""
        self.at.table.resolve_before(boundary.rank, boundary.step)
        cut = self.outstanding
        if cut is not None and self._missed(cut.step, boundary):
            self._late()
            self.drop(f"rank {boundary.rank} learnt of it too late", rank=boundary.rank)
        for step in [s for s in self.made if self._missed(s, boundary)]:
            self._lose(step, f"rank {boundary.rank} did not take it", rank=boundary.rank)

    def _missed(self, step: int, boundary: Boundary) -> bool:
        return boundary.step > step and boundary.rank not in self.made.get(step, {})

    def _decided(self, step: int) -> None:
        self.made.pop(step, None)
        self.first_made.pop(step, None)

    def _late(self) -> None:
        lag = self.lag or (REMOTE_LAG if len(self.at.nodes) > 1 else LOCAL_LAG)
        self.lag = min(2 * lag, MAX_LAG)

    def _straggling(self) -> None:
        allowed = STRAGGLER_SECONDS + 10 * self.step_seconds
        for step, since in list(self.first_made.items()):
            if self.at.now - since > allowed:
                missing = sorted(set(self.at.table.home) - set(self.made[step]))
                why = f"ranks {missing} did not cut within {allowed:.0f} s"
                if self.outstanding is not None and self.outstanding.step == step:
                    self.drop(why, level="warning")
                else:
                    self._lose(step, why)

    def _drop_replaced(self) -> None:
        for (node, rank), indexes in self.at.table.replaced().items():
            for index in indexes:
                del self.at.table.entries[Key(node, rank, index)]
            self.at.say(DropSlots(node, rank, tuple(indexes)))


def _differing(cuts: dict[int, CutMade]) -> dict[str, dict[str, list[int]]]:
    """FQN -> digest -> ranks, of the replicated tensors that are not equal everywhere."""
    found: dict[str, dict[str, list[int]]] = {}
    for rank, cut in sorted(cuts.items()):
        for fqn, digest in cut.replicas.items():
            found.setdefault(fqn, {}).setdefault(digest, []).append(rank)
    return {fqn: groups for fqn, groups in found.items() if len(groups) > 1}
