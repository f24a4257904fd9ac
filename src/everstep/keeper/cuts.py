"""Which cuts are taken, into which slots, and whether they are complete (R2, R7, R8).

Owns: the outstanding published cut, the slots that workers ask for, what came of each try.
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
from everstep.keeper.tries import KEPT_TRIES, Tries, Try

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
    sequence: int


@dataclass
class Cuts:
    """``completed`` is called with each complete snapshot and whether a checkpoint of it was asked
    for; ``lost`` with the step of each cut that was dropped, why, and whose cut it was.

    ``hopeless`` says that no cut of all ranks will come any more: nobody is given a slot."""

    at: Situation
    completed: Callable[[Complete, bool], None]
    lost: Callable[[int, str, set[int]], None]
    outstanding: Outstanding | None = None
    stopping: bool = False
    hopeless: bool = False
    tries: Tries = field(default_factory=Tries)
    asks: dict[int, _Ask] = field(default_factory=dict)
    boundaries: dict[int, Boundary] = field(default_factory=dict)
    last_cut: int = 0
    step_seconds: float = 0.0
    cut_seconds: float = 0.0
    lag: float = 0.0
    demoted: tuple[str, ...] = ()

    def begin(self) -> None:
        """A new attempt: nothing is published, nobody has asked."""
        self.outstanding = None
        self.stopping = self.hopeless = False
        self.tries.begin(self.at.now)
        self.asks, self.boundaries = {}, {}

    # -- facts

    def cut_made(self, fact: CutMade) -> None:
        key = self.at.table.key(fact.rank, fact.index)
        point = self.at.point(fact.step)
        self.at.table.put(key, point, fact.layout, self.at.world, fact.sequence)
        one = self.tries.take(fact, self.at.now)
        if one is None:
            self.at.forget(key)
            return
        self._judge(one)
        for old in self.tries.making[:-KEPT_TRIES]:
            self._lose(old, "too many cuts are in the making")

    def cut_missed(self, fact: CutMissed) -> None:
        # Reservations of later cuts stay: the rank may already be in one of them.
        self.at.table.resolve_before(fact.rank, fact.step + 1)
        one = self.tries.missed(fact.rank, fact.step, fact.sequence)
        if one is None:
            return
        why = f"rank {fact.rank} skipped it: {fact.reason}"
        if self._is_out(one):
            self._late()
            self.drop(why, rank=fact.rank)
        else:
            self._lose(one, why, rank=fact.rank)

    def slot_asked(self, fact: SlotAsked) -> None:
        """The rank waits at a boundary, so it writes no slot."""
        cut = self.outstanding
        self.at.table.resolve(fact.rank)
        if self.hopeless:
            self._grant(fact.rank, None, 0)
            return
        if cut is not None and fact.rank not in self.tries.live[cut.sequence].cuts:
            if cut.step == fact.step:
                self._reserve(fact.rank, cut.slots[fact.rank], fact.step)
                self._grant(fact.rank, cut.slots[fact.rank], cut.sequence)
                return
            why = f"rank {fact.rank} cuts at step {fact.step} instead"
            self.drop(why, rank=fact.rank, level="debug")
        one = self.tries.join(fact.rank, fact.step)
        self.asks[fact.rank] = _Ask(fact.step, self.at.now + fact.timeout, one.sequence)

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
        for key, entry in list(self.at.table.of_rank(rank)):
            if entry.sequence in self.tries.dropped:
                self.at.forget(key)
        # It may have committed its slot and died before it could say so.
        for one in list(self.tries.live.values()):
            self._judge(one)
        level: Level = "debug" if self.stopping or rank in self.at.finished else "info"
        self.drop(f"rank {rank} is gone", rank=rank, level=level, unless_cut_by=rank)
        for one in [t for t in self.tries.live.values() if rank not in t.cuts]:
            self._lose(one, f"rank {rank} is gone", rank=rank, level=level)

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
        waiting = self.outstanding or self.stopping or self.asks or self.tries.making
        if waiting or not (at.elected and at.assembled):
            return
        slots = {rank: at.table.free(rank) for rank in at.table.home}
        free = {rank: index for rank, index in slots.items() if index is not None}
        if len(free) < at.world:
            return
        one = self.tries.open(self._next_step(), published=True)
        self.outstanding = Outstanding(one.sequence, one.step, free)
        for rank, index in free.items():
            self._reserve(rank, index, one.step)
        for node in at.nodes:
            mine = tuple((r, i) for r, i in sorted(free.items()) if at.node_of(r) == node)
            at.say(PublishCut(node, one.sequence, one.step, mine))

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
                self._reserve(rank, index, ask.step)
            self._grant(rank, index, ask.sequence)

    def _reserve(self, rank: int, index: int, step: int) -> None:
        self.at.table.reserve(self.at.table.key(rank, index), step)

    def _grant(self, rank: int, index: int | None, sequence: int) -> None:
        given = -1 if index is None else index
        self.at.say(GrantSlot(self.at.node_of(rank), rank, given, sequence))

    def _free_for(self, rank: int, step: int) -> int | None:
        """A slot for a cut that the rank asked for. One that holds a cut in the making is given
        only where there is no other, and that cut is lost."""
        for older in [t for t in self.tries.making if t.step < step and rank in t.cuts]:
            index = self.at.table.free(rank, kept=self._pending())
            if index is not None:
                return index
            self._lose(older, f"rank {rank} needs its slot for step {step}", rank=rank)
        return self.at.table.free(rank, kept=self._pending())

    def _pending(self) -> set[Point]:
        return {self.at.point(one.step) for one in self.tries.making}

    # -- completeness

    def _judge(self, one: Try) -> None:
        """Complete, or held by all and yet not one snapshot (R2, R8), or still in the making."""
        point = self.at.point(one.step)
        if len(self.at.table.holding(point, one.sequence)) < self.at.world:
            return
        complete = self.at.table.complete(point, one.sequence)
        if complete is None:
            self._lose(one, "the ranks disagree about the layout of the state")
            return
        differing = _differing(one.cuts)
        if differing:
            self._demote(one.step, differing)
            self._lose(one, "replicated tensors differ between ranks")
            return
        self._complete(complete, one)

    def _complete(self, snapshot: Complete, one: Try) -> None:
        step, cuts = one.step, one.cuts
        self.tries.complete(one)
        if self.outstanding is not None and self.outstanding.sequence not in self.tries.live:
            self.outstanding = None
        self.last_cut = step
        self.at.lived = True
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

    def drop(
        self,
        why: str,
        *,
        rank: int | None = None,
        level: Level = "info",
        unless_cut_by: int | None = None,
    ) -> None:
        """Take the outstanding cut back; training goes on. Ranks that may be writing their slot
        at this moment keep it until they speak or have gone on."""
        cut = self.outstanding
        if cut is None:
            return
        one = self.tries.live[cut.sequence]
        if unless_cut_by in one.cuts:
            return
        self.outstanding = None
        for node in self.at.nodes:
            self.at.say(ClearCut(node))
        self._lose(one, why, rank=rank, level=level)

    def _is_out(self, one: Try) -> bool:
        return self.outstanding is not None and self.outstanding.sequence == one.sequence

    def _lose(
        self, one: Try, why: str, *, rank: int | None = None, level: Level = "warning"
    ) -> None:
        if self._is_out(one):
            self.outstanding = None
        self.tries.drop(one)
        point = self.at.point(one.step)
        for key, entry in list(self.at.table.entries.items()):
            if entry.point == point and entry.sequence == one.sequence:
                self.at.forget(key)
        if one.published or one.cuts:  # else nobody has begun it
            self.at.tell(
                "cut.dropped", f"the cut at step {one.step} is dropped: {why}",
                level=level, rank=rank, step=one.step, reason=why,
            )  # fmt: skip
        self.lost(one.step, why, {r for r in one.cuts if not self.tries.others_of(r, one)})

    def _passed(self, boundary: Boundary) -> None:
        """The rank has finished a step: cuts of earlier steps that it did not take are missed."""
        self.at.table.resolve_before(boundary.rank, boundary.step)
        for one in list(self.tries.live.values()):
            if boundary.step <= one.step or boundary.rank in one.cuts:
                continue
            if self._is_out(one):
                self._late()
                self.drop(f"rank {boundary.rank} learnt of it too late", rank=boundary.rank)
            else:
                self._lose(one, f"rank {boundary.rank} did not take it", rank=boundary.rank)

    def _late(self) -> None:
        lag = self.lag or (REMOTE_LAG if len(self.at.nodes) > 1 else LOCAL_LAG)
        self.lag = min(2 * lag, MAX_LAG)

    def _straggling(self) -> None:
        allowed = STRAGGLER_SECONDS + 10 * self.step_seconds
        for one in self.tries.making:
            if one.since is None or self.at.now - one.since <= allowed:
                continue
            missing = sorted(set(self.at.table.home) - set(one.cuts))
            why = f"ranks {missing} did not cut within {allowed:.0f} s"
            if self._is_out(one):
                self.drop(why, level="warning")
            else:
                self._lose(one, why)

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
