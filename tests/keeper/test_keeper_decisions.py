"""What the coordinator decides in stories that once went wrong: each ends with the right answer.

One node, facts in the order in which a real keeper tells them; no clock, no process.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from everstep.cadence.policy import Policy
from everstep.core.ids import Point
from everstep.keeper import commands, facts
from everstep.keeper.commands import Command
from everstep.keeper.coordinate import Coordinator
from everstep.keeper.facts import AnyFact, Boundary, Candidate, Held
from everstep.keeper.table import Key


@dataclass
class Story:
    """A coordinator and everything that it has said."""

    world: int = 1
    policy: Policy = field(default_factory=lambda: Policy(1, 1e9))
    coordinator: Coordinator = field(default_factory=Coordinator)
    now: float = 0.0
    said: list[Command] = field(default_factory=list)

    def tell(self, *told: AnyFact, seconds: float = 0.01) -> list[Command]:
        """The commands that these facts lead to."""
        before = len(self.said)
        for fact in told:
            self.now += seconds
            for command in self.coordinator.handle(fact, self.now):
                self.said.append(command)
                if isinstance(command, commands.Digest):
                    self.said += self.coordinator.handle(
                        facts.Digested(0, command.rank, command.index), self.now
                    )
        return self.said[before:]

    def newest(self, kind: type[Command]) -> Command:
        return [command for command in self.said if isinstance(command, kind)][-1]

    def events(self, kind: str) -> list[commands.Tell]:
        return [c for c in self.said if isinstance(c, commands.Tell) and c.kind == kind]

    def answers(self) -> list[tuple[int, bool]]:
        found = [c for c in self.said if isinstance(c, commands.AnswerDurable)]
        return [(answer.rank, answer.durable) for answer in found]

    # -- an attempt

    def begin(self, attempt: int = 1, *held: Held, resume: str = "auto") -> None:
        self.tell(
            facts.Begun(attempt, (tuple(range(self.world)),), resume, False, self.policy),
            facts.NodeJoined(0, held),
        )

    def restore(self, attempt: int = 1, *rejected: str, **store: object) -> None:
        """The store is read, all ranks reject as often as is said, and then vote for it."""
        self.tell(facts.StoreRead(attempt, **store))  # type: ignore[arg-type]
        for rank in range(self.world):
            self.tell(facts.Registered(rank), facts.OfferAsked(rank, self.world))
        for reason in rejected:
            self._check()
            self.tell(*(facts.Voted(rank, False, reason) for rank in range(self.world)))
        self._check()
        self.tell(*(facts.Voted(rank, True, "") for rank in range(self.world)))
        self.tell(facts.BranchWritten(attempt))

    def _check(self) -> None:
        checks = [c for c in self.said if isinstance(c, commands.CheckMemory)]
        if checks:
            self.tell(facts.MemoryChecked(0, checks[-1].point, ()))

    def open(self) -> None:
        """All ranks open their slots at the first boundary."""
        for rank in range(self.world):
            self.tell(facts.SlotsSeen(0, rank, _empty(rank)), facts.Registered(rank))

    def trained(self) -> commands.PublishCut:
        """A first attempt that trains; the cut that is published."""
        self.begin()
        self.restore()
        self.open()
        return self.published()

    def published(self) -> commands.PublishCut:
        cut = self.newest(commands.PublishCut)
        assert isinstance(cut, commands.PublishCut)
        return cut

    # -- what ranks do

    def take(self, rank: int, cut: commands.PublishCut, **more: str) -> list[Command]:
        """The rank takes the published cut; ``more`` are digests of replicas."""
        index = dict(cut.slots)[rank]
        return self.tell(_made(rank, cut.step, index, cut.sequence, more))

    def ask(self, rank: int, step: int) -> commands.GrantSlot:
        self.tell(facts.SlotAsked(rank, step, 30.0))
        grant = self.newest(commands.GrantSlot)
        assert isinstance(grant, commands.GrantSlot)
        assert grant.rank == rank
        return grant

    def cut(self, rank: int, step: int, **more: str) -> list[Command]:
        """The rank asks for a slot and cuts into it, as checkpoint() does."""
        grant = self.ask(rank, step)
        assert grant.index >= 0, "no slot came free"
        return self.tell(_made(rank, step, grant.index, grant.sequence, more, persist=True))

    def store(self) -> None:
        """What is ordered to be stored is stored."""
        for command in [c for c in self.said if isinstance(c, commands.Persist)]:
            self.tell(facts.RankPersisted(0, command.rank, command.index, command.point))
        for command in [c for c in self.said if isinstance(c, commands.Commit)]:
            self.tell(facts.Committed(command.point))


def _made(
    rank: int, step: int, index: int, sequence: int, replicas: dict[str, str], persist: bool = False
) -> facts.CutMade:
    return facts.CutMade(rank, step, index, "l", 0.01, 1, replicas, persist, sequence)


def _empty(rank: int) -> tuple[Held, ...]:
    return Held(rank, 0, None, "", 0), Held(rank, 1, None, "", 0)


def _held(rank: int, point: Point, world: int = 1, sequence: int = 1) -> tuple[Held, ...]:
    return Held(rank, 0, point, "l", world, sequence=sequence), Held(rank, 1, None, "", 0)


# -- a step is cut more than once


def test_stop_at_the_step_of_the_published_cut_becomes_durable() -> None:
    """SIGTERM takes the published cut back and stops at that very step."""
    story = Story()
    cut = story.trained()
    at = Boundary(0, cut.step - 1, 0.01)
    story.tell(facts.Boundaries((at,), drained=False), facts.PreemptAsked(30.0))
    stop = story.newest(commands.PublishStop)
    assert isinstance(stop, commands.PublishStop)
    assert stop.step == cut.step
    assert [e.level for e in story.events("cut.dropped")] == ["debug"]
    story.tell(facts.RankArrived(0, stop.step))
    story.cut(0, stop.step)
    story.tell(facts.DurableAsked(0, stop.step, 30.0))
    story.store()
    assert story.answers() == [(0, True)]
    assert story.events("job.preempted")[-1].facts["durable"] is True


def test_rank_that_took_the_cut_before_the_stop_took_it_back_cuts_again() -> None:
    """What the rank holds of the dropped try is not what the others will hold."""
    story = Story(world=2)
    cut = story.trained()
    story.take(0, cut)
    at = tuple(Boundary(rank, cut.step - rank, 0.01) for rank in range(2))
    story.tell(facts.Boundaries(at, drained=False), facts.PreemptAsked(30.0))
    stop = story.newest(commands.PublishStop)
    assert isinstance(stop, commands.PublishStop)
    for rank in range(2):
        story.tell(facts.RankArrived(rank, stop.step))
    for rank in range(2):
        story.cut(rank, stop.step)
        story.tell(facts.DurableAsked(rank, stop.step, 30.0))
    story.store()
    assert sorted(story.answers()) == [(0, True), (1, True)]


def test_last_step_is_cut_again_after_its_cut_failed() -> None:
    story = Story()
    cut = story.trained()
    story.tell(facts.CutMissed(0, cut.step, "the user's state_dict raised", cut.sequence))
    story.cut(0, cut.step)
    story.tell(facts.DurableAsked(0, cut.step, 600.0))
    story.store()
    assert story.answers() == [(0, True)]


def test_rank_whose_cut_was_dropped_before_it_asked_is_told_at_once() -> None:
    """Or finish() waits for its whole deadline instead of cutting again."""
    story = Story(world=2)
    step = story.trained().step
    grants = [story.ask(rank, step + 5) for rank in range(2)]
    assert grants[0].sequence == grants[1].sequence
    story.tell(facts.CutMissed(1, step + 5, "no room", grants[1].sequence))
    story.tell(_made(0, step + 5, grants[0].index, grants[0].sequence, {}, persist=True))
    story.tell(facts.DurableAsked(0, step + 5, 600.0))
    assert story.answers() == [(0, False)]
    for rank in range(2):
        story.cut(rank, step + 5)
        story.tell(facts.DurableAsked(rank, step + 5, 600.0))
    story.store()
    assert sorted(story.answers()[1:]) == [(0, True), (1, True)]


def test_step_is_cut_again_after_replicas_differed() -> None:
    """R8: the mismatch drops one try; the demoted one is complete."""
    story = Story(world=2)
    step = story.trained().step
    for rank, digest in enumerate("ab"):
        story.cut(rank, step + 3, w=digest)
        story.tell(facts.DurableAsked(rank, step + 3, 600.0))
    assert story.answers() == [(0, False), (1, False)]
    assert story.coordinator.cuts.demoted == ("w",)
    for rank in range(2):
        story.cut(rank, step + 3)
        story.tell(facts.DurableAsked(rank, step + 3, 600.0))
    story.store()
    assert sorted(story.answers()[2:]) == [(0, True), (1, True)]


def test_rank_that_is_very_late_at_the_last_step_meets_the_others_there() -> None:
    story = Story(world=2)
    step = story.trained().step
    story.cut(0, step + 2)
    story.tell(facts.DurableAsked(0, step + 2, 600.0))
    story.tell(facts.Tick(), seconds=300.0)
    assert story.answers() == [(0, False)]
    for rank in range(2):
        story.cut(rank, step + 2)
        story.tell(facts.DurableAsked(rank, step + 2, 600.0))
    story.store()
    assert sorted(story.answers()[1:]) == [(0, True), (1, True)]


def test_straggler_of_a_dropped_cut_is_forgotten() -> None:
    """R2: its slot holds what nobody else holds any more."""
    story = Story(world=2)
    cut = story.trained()
    story.tell(facts.CutMissed(0, cut.step, "late", cut.sequence))
    out = story.take(1, cut)
    assert commands.Forget(0, 1, dict(cut.slots)[1]) in out


def test_checkpoint_of_one_rank_is_not_mixed_into_the_complete_cut() -> None:
    """S2: rank 0 holds two contents of one step; only the one that rank 1 cut as well counts."""
    story = Story(world=2)
    cut = story.trained()
    for rank in range(2):
        story.take(rank, cut)
    grant = story.ask(0, cut.step)
    assert grant.sequence != cut.sequence
    story.tell(_made(0, cut.step, grant.index, grant.sequence, {}, persist=True))
    complete = story.coordinator.at.table.complete(Point(cut.step, 1))
    assert complete is not None
    assert complete.sequence == cut.sequence
    assert complete.slots == {rank: Key(0, rank, index) for rank, index in cut.slots}


def test_new_keeper_takes_no_snapshot_from_slots_of_two_tries() -> None:
    """S2: the numbers stand in the slots, so that a keeper that saw neither cut knows."""
    story = Story(world=2)
    point = Point(10, 1)
    story.begin(2, *_held(0, point, 2, sequence=5), *_held(1, point, 2, sequence=6))
    assert story.coordinator.at.table.complete(point) is None
    story.begin(2, *_held(0, point, 2, sequence=6), *_held(1, point, 2, sequence=6))
    assert story.coordinator.at.table.complete(point) is not None


def test_new_keeper_gives_no_number_that_the_old_one_gave() -> None:
    old, new = Story(), Story(now=1.0)
    assert old.trained().sequence < new.trained().sequence


def test_checkpoints_that_ranks_reach_apart_meet_in_their_order() -> None:
    """Rank 0 asks for its second checkpoint of a step while rank 1 comes to its first."""
    story = Story(world=2)
    step = story.trained().step
    story.cut(0, step + 1)
    second = story.ask(0, step + 1)
    story.cut(1, step + 1)
    complete = story.coordinator.at.table.complete(Point(step + 1, 1))
    assert complete is not None
    assert complete.sequence != second.sequence, "rank 1's first met rank 0's second"
    assert story.ask(1, step + 1).sequence == second.sequence


# -- stops


def test_each_attempt_obeys_its_own_sigterm() -> None:
    """A keeper lives through many attempts; a stop ends with the attempt it was asked in."""
    story = Story()
    story.trained()
    story.tell(facts.PreemptAsked(5.0))
    story.tell(facts.Tick(), seconds=10.0)
    assert story.coordinator.stop.over
    story.begin(2)
    story.restore(2, branches={1: None})
    story.open()
    assert not story.coordinator.cuts.stopping, "an old stop is obeyed"
    assert story.published().step > 0
    story.tell(facts.PreemptAsked(5.0))
    assert story.coordinator.cuts.stopping, "the new stop is not obeyed"
    assert len(story.events("job.preempting")) == 2


def test_stop_stays_asked_for_where_the_same_attempt_begins_again() -> None:
    story = Story()
    story.trained()
    story.tell(facts.PreemptAsked(5.0))
    story.begin(1)
    assert story.coordinator.stop.asked


@pytest.mark.parametrize("dies_first", [True, False])
def test_ranks_do_not_wait_for_a_dead_rank_at_a_stop(dies_first: bool) -> None:
    """The launcher ends the others because one died: they can meet nobody."""
    story = Story(world=2)
    cut = story.trained()
    for rank in range(2):
        story.take(rank, cut)
    gone = facts.RankGone(0, 1, _held(1, Point(cut.step, 1), 2, cut.sequence), False)
    order = [gone, facts.PreemptAsked(30.0), facts.RankArrived(0, cut.step + 4)]
    story.tell(*(order if dies_first else [order[1], order[2], order[0]]))
    stop = story.newest(commands.PublishStop)
    assert stop == commands.PublishStop(0, 0, final=True), "nobody tells rank 0 to leave"
    assert story.ask(0, cut.step + 4).index == -1
    story.tell(facts.DurableAsked(0, cut.step + 4, 30.0))
    assert story.answers() == [(0, False)]
    persisted = [c.point for c in story.said if isinstance(c, commands.Persist)]
    assert set(persisted) == {Point(cut.step, 1)}, "what is held is not made durable"


def test_rank_that_cut_at_the_stop_and_left_does_not_end_it() -> None:
    """R7: its part is in memory, so the others complete the snapshot."""
    story = Story(world=2)
    cut = story.trained()
    at = tuple(Boundary(rank, cut.step, 0.01) for rank in range(2))
    story.tell(facts.Boundaries(at, drained=False), facts.PreemptAsked(30.0))
    stop = story.newest(commands.PublishStop)
    assert isinstance(stop, commands.PublishStop)
    for rank in range(2):
        story.tell(facts.RankArrived(rank, stop.step))
    story.cut(1, stop.step)
    held = tuple(
        Held(1, k.index, e.point, e.layout, e.world, sequence=e.sequence)
        for k, e in story.coordinator.at.table.of_rank(1)
    )
    story.tell(facts.RankGone(0, 1, held, finished=False))
    story.cut(0, stop.step)
    story.tell(facts.DurableAsked(0, stop.step, 30.0))
    story.store()
    assert story.answers() == [(0, True)]


# -- what the job goes on from


def test_durable_means_this_very_state_and_not_one_of_its_step() -> None:
    """S6: (60, 1) is damaged; attempt 2 came to 60 in memory alone, and attempt 3 resumes that."""
    story = Story()
    story.begin(2)
    old = (Candidate(Point(60, 1), 1), Candidate(Point(40, 1), 0))
    story.restore(2, "damaged", candidates=old, expected=True, branches={1: None})
    held = _held(0, Point(60, 2))
    story.tell(facts.RankGone(0, 0, held, False))
    story.begin(3, *held)
    story.restore(3, candidates=old[1:], expected=True, branches={1: None, 2: Point(40, 1)})
    assert story.coordinator.at.origin == Point(60, 2)
    story.tell(facts.DurableAsked(0, 60, 30.0))
    assert story.answers() == []
    story.store()
    assert story.answers() == [(0, True)]
    assert Point(60, 2) in story.coordinator.durable.commits


def test_commit_of_an_abandoned_life_answers_nobody() -> None:
    """S6: it was being stored when the job went on from before it."""
    story = Story(policy=Policy(1, 0.0))
    cut = story.trained()
    story.take(0, cut)
    story.tell(facts.RankPersisted(0, 0, dict(cut.slots)[0], Point(cut.step, 1)))
    story.tell(facts.RankGone(0, 0, _empty(0), False))
    story.begin(2, *_empty(0), resume="never")
    story.restore(2, branches={1: None})
    story.cut(0, cut.step)
    story.tell(facts.DurableAsked(0, cut.step, 30.0))
    story.tell(facts.Committed(Point(cut.step, 1)))
    assert story.answers() == []
    story.store()
    assert story.answers() == [(0, True)]


def test_memory_of_a_life_that_the_job_went_on_without_is_not_elected() -> None:
    """S6: the job ran elsewhere with --resume never in between."""
    story = Story()
    story.begin(3, *_held(0, Point(60, 1)))
    story.restore(
        3, candidates=(Candidate(Point(25, 2), 1),), expected=True, branches={1: None, 2: None}
    )
    assert story.coordinator.at.origin == Point(25, 2)
    assert commands.Forget(0, 0, 0) in story.said
    assert [e.step for e in story.events("memory.off_lineage")] == [60]


@pytest.mark.parametrize(("restored", "elected"), [(50, Point(50, 1)), (40, Point(40, 1))])
def test_memory_beyond_the_branch_of_a_later_attempt_is_not_elected(
    restored: int, elected: Point
) -> None:
    story = Story()
    story.begin(3, *_held(0, Point(50, 1)))
    branches = {1: None, 2: Point(restored, 1)}
    story.restore(3, candidates=(Candidate(Point(40, 1), 1),), expected=True, branches=branches)
    assert story.coordinator.at.origin == elected


def test_memory_whose_branch_the_store_has_not_yet_is_elected() -> None:
    """S6: the owner restarts from memory while the store is unreachable."""
    story = Story()
    story.begin(2, *_held(0, Point(80, 1)))
    story.restore(2, error="away", error_code="EVS-200")
    for _ in range(8):
        story.tell(facts.StoreRead(2, error="away", error_code="EVS-200"), seconds=2.0)
    story._check()
    story.tell(facts.Voted(0, True, ""))
    for _ in range(8):
        story.tell(facts.BranchWritten(2, "away", "EVS-200", retryable=True), seconds=2.0)
    assert story.coordinator.at.origin == Point(80, 1)
    held = _held(0, Point(95, 2))
    story.tell(facts.RankGone(0, 0, held, False))
    story.begin(3, *held)
    story.restore(3, candidates=(Candidate(Point(70, 1), 1),), expected=True, branches={1: None})
    assert story.coordinator.at.origin == Point(95, 2)


def test_snapshot_is_stored_though_the_next_attempt_never_restored() -> None:
    """S6: its own attempt's branch is in the store; the next attempt's is not needed for it."""
    story = Story()
    story.begin(2, *_held(0, Point(100, 1)))
    story.tell(
        facts.StoreRead(2, (Candidate(Point(50, 1), 1),), expected=True, branches={1: None}),
        facts.Registered(0),
        facts.RankGone(0, 0, _held(0, Point(100, 1)), finished=False),
        facts.Left(),
    )
    story.store()
    assert Point(100, 1) in story.coordinator.durable.commits
    assert not story.coordinator.pending


def test_snapshot_waits_for_the_branch_of_its_own_attempt() -> None:
    """S6: no rank index before the branch."""
    story = Story(policy=Policy(1, 0.0))
    story.begin()
    story.tell(facts.StoreRead(1), facts.Registered(0), facts.OfferAsked(0, 1))
    story.tell(facts.Voted(0, True, ""))
    for _ in range(8):
        story.tell(facts.BranchWritten(1, "away", "EVS-200", retryable=True), seconds=2.0)
    story.open()
    story.take(0, story.published())
    assert not any(isinstance(c, commands.Persist) for c in story.said)
    out = story.tell(facts.BranchWritten(1))
    assert any(isinstance(c, commands.Persist) for c in out)


def test_reason_of_a_rejected_candidate_names_the_rank_once() -> None:
    story = Story()
    story.begin(2)
    story.restore(
        2, "rank 0: damaged", candidates=(Candidate(Point(60, 1), 1), Candidate(Point(40, 1), 1)),
        expected=True, branches={1: None},
    )  # fmt: skip
    (event,) = story.events("restore.rejected")
    assert event.text.count("rank 0") == 1


# -- a keeper that dies between the election and the first snapshot


def _heirs() -> list[tuple[AnyFact, ...]]:
    """Every order in which a new keeper may be told of a job that trains already."""
    told: list[AnyFact] = [
        facts.StoreRead(1, branched=True, branch=None, branch_source="fresh", branches={1: None}),
        facts.SlotsSeen(0, 0, _empty(0)),
        facts.Registered(0),
        facts.Boundaries((Boundary(0, 4, 0.1),), drained=True),
        facts.OfferAsked(0, 1),
    ]
    with_offer = list(itertools.permutations(told))
    return with_offer + list(itertools.permutations(told[:-1]))


def test_new_keeper_lets_cuts_go_on_in_any_order_of_what_it_hears() -> None:
    """The old one was killed after the election and before the first snapshot."""
    for told in _heirs():
        story = Story()
        story.begin()
        story.tell(*told)
        story.tell(facts.Voted(0, True, ""))
        story.tell(facts.Boundaries((Boundary(0, 5, 0.1),), drained=True))
        cut = story.published()
        assert cut.step > 4, told
        story.take(0, cut)
        assert story.coordinator.at.table.complete(Point(cut.step, 1)) is not None, told


def test_new_keeper_that_cannot_learn_of_the_election_lets_cuts_go_on() -> None:
    """The branch was owed when the old keeper died; a rank that waits for the election is told
    that it cannot be known instead of waiting for ever."""
    story = Story(world=2)
    story.begin()
    for rank in range(2):
        story.tell(facts.SlotsSeen(0, rank, _empty(rank)), facts.Registered(rank))
    story.tell(facts.OfferAsked(1, 2), facts.StoreRead(1))
    story.tell(facts.Boundaries((Boundary(0, 4, 0.1),), drained=True))
    assert [c.rank for c in story.said if isinstance(c, commands.RefuseTo)] == [1]
    assert story.published().step > 4


# -- what people are shown


def test_normal_finish_shows_no_dropped_cut() -> None:
    """A published cut beyond the last step is no fault, nor that its ranks are gone after it."""
    story = Story(world=2)
    cut = story.trained()
    for rank in range(2):
        story.cut(rank, cut.step - 1)
        story.tell(facts.DurableAsked(rank, cut.step - 1, 600.0))
    story.store()
    story.tell(facts.Boundaries((Boundary(0, cut.step, 0.1),), drained=False))
    for rank in range(2):
        story.tell(facts.RankGone(0, rank, (), finished=True))
    assert {e.level for e in story.events("cut.dropped")} == {"debug"}
    assert story.events("job.finished")
