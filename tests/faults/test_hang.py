"""Whole jobs on a clock that runs as fast as they do: what hangs is found in time, what takes long by
right is let alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.faults.hang import (
    AWAY,
    Finding,
    HangPolicy,
    Look,
    RankBeat,
    Standing,
    Watch,
    observe,
    standing,
)

TICK = 0.5
FOREVER = 1e9
POLICY = HangPolicy()


@dataclass(frozen=True)
class Does:
    """What a rank does for ``seconds``. ``moves``: its program goes on meanwhile; ``stack`` gives
    where it is seen. ``phase`` is what it declares, ``waits`` that it stands in a collective."""

    seconds: float
    moves: bool = False
    phase: str = ""
    limit: float | None = None
    waits: bool = False
    stack: tuple[str, ...] = ("here",)
    stacks: int = 1
    answers: bool = True


STEP = Does(0.5, moves=True, stacks=9)
STUCK = Does(FOREVER)
BARRIER = Does(FOREVER, waits=True, stack=("all_reduce",))


@dataclass
class Rank:
    """A rank that does ``plan(step)`` in each step and then waits for the others."""

    number: int
    plan: Callable[[int], list[Does]]
    step: int = 0
    steps: int = 0
    boundary_at: float = 0.0
    phase: str = "first_step"
    phase_since: float = 0.0
    limit: float | None = None
    longest: float = 0.0
    left: list[Does] = field(default_factory=list)
    until: float = 0.0
    declared: float = 0.0
    looks: int = 0

    def begin(self, now: float) -> None:
        self.left, self.declared = list(self.plan(self.step)), 0.0
        self._next(now)

    def _next(self, now: float) -> None:
        if self.left:
            self.until = now + self.left[0].seconds
        wanted = self.left[0].phase if self.left else ""
        wanted = wanted or ("step" if self.steps else "first_step")
        if wanted != self.phase:
            self.phase, self.phase_since = wanted, now
            self.limit = self.left[0].limit if self.left else None

    def run(self, now: float) -> bool:
        """Whether it has arrived at the step's end."""
        while self.left and self.until <= now:
            done = self.left.pop(0)
            if done.phase:
                self.declared += done.seconds
            self._next(self.until)
        return not self.left

    def finish(self, now: float) -> None:
        taken = now - self.boundary_at - self.declared
        if self.steps:
            self.longest = max(self.longest, taken)
        self.step, self.steps, self.boundary_at = self.step + 1, self.steps + 1, now
        if self.phase != "step":
            self.phase, self.phase_since, self.limit = "step", now, None

    def beat(self) -> RankBeat:
        return RankBeat(
            self.number, self.step - 1, self.phase, self.phase_since, self.boundary_at,
            limit=self.limit, steps=self.steps, longest=self.longest,
        )  # fmt: skip

    def look(self, dice: random.Random) -> Look:
        self.looks += 1
        does = self.left[0] if self.left else BARRIER
        place = (str(dice.randrange(does.stacks)),) if does.moves else ()
        turn = self.looks if does.moves else 0
        return Look(
            self.number,
            (*place, *does.stack),
            waits=does.waits,
            turn=turn if does.answers else None,
        )


@dataclass
class Found:
    at: float
    finding: Finding


def run(
    plans: list[Callable[[int], list[Does]]],
    until: float,
    policy: HangPolicy = POLICY,
    seed: int = 0,
) -> Found | None:
    """The first hang that is found within ``until`` seconds, None where none is."""
    dice, watch, now = random.Random(seed), Watch(), 0.0
    ranks = [Rank(number, plan) for number, plan in enumerate(plans)]
    for rank in ranks:
        rank.begin(now)
    while now < until:
        now += TICK
        arrived = [rank.run(now) for rank in ranks]
        if all(arrived):
            for rank in ranks:
                rank.finish(now)
            for rank in ranks:
                rank.begin(now)
        watch, finding = observe(watch, policy, now, [rank.beat() for rank in ranks])
        if finding.stage == "act":
            return Found(now, finding)
        if finding.look:
            watch = watch.looked(now, [rank.look(dice) for rank in ranks])
    return None


def steady(_: int) -> list[Does]:
    return [STEP]


def at(step: int, *does: Does) -> Callable[[int], list[Does]]:
    return lambda now: [*does, STEP] if now == step else [STEP]


# -- nothing hangs


HARMLESS = {
    "a stall of 20 s for data": at(40, Does(20.0, waits=False, stack=("next",))),
    "a long first step": at(0, Does(600.0, stack=("compile",))),
    "a slow second step": at(1, Does(200.0, stack=("compile",))),
    "a declared evaluation": at(50, Does(900.0, phase="evaluation", stack=("evaluate",))),
    "one that was declared with its limit": at(
        50, Does(280.0, phase="evaluation", limit=300.0, stack=("evaluate",))
    ),
    "an evaluation that nobody declared": at(50, Does(600.0, moves=True, stacks=9)),
    "one that is always seen at one line": at(50, Does(600.0, moves=True, stacks=1)),
    "a slow save": at(60, Does(250.0, phase="save", limit=660.0, stack=("await_durable",))),
    "a slow first snapshot": at(60, Does(200.0, phase="save", stack=("copy",))),
    "a new compilation": at(70, Does(500.0, phase="compile", stack=("compile",))),
    "a place in the data that is reached again": at(0, Does(3200.0, moves=True, stacks=2)),
    "a restore that takes long": at(0, Does(900.0, phase="restore", stack=("read",))),
    "an end that takes its time": at(90, Does(900.0, phase="ended", stack=("export",))),
}


@pytest.mark.parametrize("plan", HARMLESS.values(), ids=HARMLESS.keys())
@pytest.mark.parametrize("world", [1, 4], ids=["alone", "while three wait in a barrier"])
def test_what_takes_long_by_right_is_let_alone(
    plan: Callable[[int], list[Does]], world: int
) -> None:
    until = 4000.0 if plan(0)[0].seconds > 1000.0 else 1200.0
    assert run([plan, *[steady] * (world - 1)], until=until) is None


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.floats(1.1, 3.0))
def test_heavy_tailed_step_times_give_no_alarm(seed: int, world: int, shape: float) -> None:
    """With evaluations that nobody declared now and then, and stalls below the floor."""
    dice = random.Random(seed)

    def plan(step: int) -> list[Does]:
        seconds = min(0.2 * dice.paretovariate(shape), 25.0)
        does = [Does(seconds, stack=(f"op {dice.randrange(3)}",))]
        if step % 100 == 99:
            does.append(Does(dice.uniform(10, 400), moves=True, stacks=dice.randrange(1, 4)))
        return does

    assert run([plan] * world, until=900.0, seed=seed) is None


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.05, 1.0))
def test_slow_steps_are_measured_by_themselves(seed: int, tail: float) -> None:
    """Steps of a minute, one of which takes four of them, stuck in one operation."""
    dice = random.Random(seed)

    def plan(step: int) -> list[Does]:
        slow = step > 25 and dice.random() < tail / 10
        return [Does(240.0 if slow else 60.0, stack=("matmul",))]

    assert run([plan], until=4000.0, seed=seed) is None


def test_a_rank_that_answers_nothing_and_is_seen_at_one_place_but_came_late_is_alive() -> None:
    """It was in C with the interpreter's lock, and came out of it between two looks."""
    beat = RankBeat(0, 50, "step", 0.0, 100.0, steps=50, longest=0.5)
    watch, now = Watch(), 100.0
    for _ in range(400):
        now += TICK
        watch, finding = observe(watch, POLICY, now, [beat])
        assert finding.stage != "act"
        if finding.look:
            watch = watch.looked(now, [Look(0, ("item",), came_late=True)])


# -- something hangs


HANGS = {
    "in the data loader": (at(50, replace(STUCK, stack=("next",))), steady),
    "in a collective that the others have left": (at(50, BARRIER), steady),
    "in a save": (
        at(50, Does(FOREVER, phase="save", limit=40.0, stack=("state_dict",))), steady,
    ),
    "on all ranks": (at(50, STUCK), at(50, STUCK)),
    "with the interpreter's lock": (at(50, replace(STUCK, answers=False)), steady),
    "in a declared phase past its limit": (
        at(50, Does(FOREVER, phase="evaluation", limit=60.0)), steady,
    ),
}  # fmt: skip


@pytest.mark.parametrize("plans", HANGS.values(), ids=HANGS.keys())
@pytest.mark.parametrize("others", [0, 3])
def test_a_hang_is_found(plans: tuple[Callable[[int], list[Does]], ...], others: int) -> None:
    """Within the floor and a little more, or within the limit of the phase and the floor."""
    hung, rest = plans
    found = run([hung, *[rest] * others], until=3000.0)
    assert found is not None
    began = 50 * 0.5
    (does, *_) = hung(50)
    assert found.at - began <= 1.2 * (POLICY.floor + (does.limit or 0.0)) + 2 * TICK
    assert found.at - began >= POLICY.floor
    assert 0 in found.finding.culprits
    assert found.finding.step == 49


def test_the_one_that_stands_apart_is_named() -> None:
    found = run([steady, at(60, replace(STUCK, stack=("next",))), steady, steady], until=300.0)
    assert found is not None
    assert found.finding.culprits == (1,)
    assert found.finding.ranks == (0, 1, 2, 3)


def test_an_outlier_is_enough_where_those_that_wait_are_seen_to_move() -> None:
    """They wait in a loop of Python's."""
    polling = Does(FOREVER, moves=True, waits=True, stack=("wait",), stacks=5)
    found = run([at(60, STUCK), at(60, polling), at(60, polling)], until=300.0)
    assert found is not None
    assert found.finding.culprits == (0,)
    assert "while all others wait" in found.finding.reason


def test_what_moves_and_never_ends_a_step_is_ended_at_the_deadline() -> None:
    found = run([at(50, Does(FOREVER, moves=True, stacks=9)), steady], until=3000.0)
    assert found is not None
    assert found.at - 25.0 == pytest.approx(POLICY.last(0.5), abs=2 * TICK)


def test_a_phase_without_a_limit_is_an_excuse_for_an_hour_and_then_as_long_as_it_moves() -> None:
    stuck = Does(FOREVER, phase="evaluation")
    found = run([at(50, stuck), steady], until=5000.0)
    assert found is not None
    assert found.at - 25.0 == pytest.approx(POLICY.declared + POLICY.floor, abs=4)
    assert run([at(50, replace(stuck, moves=True, stacks=9)), steady], until=6000.0) is None


def test_there_is_no_verdict_before_twenty_steps() -> None:
    assert run([at(19, STUCK)], until=1500.0) is None
    assert run([at(20, STUCK)], until=100.0) is not None
    # But a hang in the first steps does not sit for ever.
    assert run([at(19, STUCK)], until=2000.0) is not None


def test_the_drills_floor_finds_it_in_ten_seconds() -> None:
    found = run([at(50, STUCK), steady], until=100.0, policy=HangPolicy(floor=10.0))
    assert found is not None
    assert found.at - 25.0 <= 11.0


def test_off_is_off() -> None:
    assert run([at(50, STUCK)], until=3000.0, policy=HangPolicy(floor=float("inf"))) is None


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(25, 60), st.booleans())
def test_every_hang_is_found_whatever_came_before(
    seed: int, world: int, when: int, all_ranks: bool
) -> None:
    dice = random.Random(seed)
    shapes = [dice.choice([Does(0.5), Does(2.0, stack=("load",)), STEP]) for _ in range(world)]

    def plan(rank: int) -> Callable[[int], list[Does]]:
        hangs = all_ranks or rank == seed % world
        return lambda step: [shapes[rank], *([STUCK] if hangs and step == when else [])]

    found = run([plan(rank) for rank in range(world)], until=when * 2.5 + 100.0, seed=seed)
    assert found is not None


# -- several nodes


def silent(rank: int = 0) -> list[RankBeat]:
    return [RankBeat(rank, 49, "step", 0.0, 100.0, steps=50, longest=0.5)]


def judged(others: list[Standing], seconds: float = 200.0) -> Finding | None:
    """A node whose rank stands still in a collective from 100 s on, and the others'."""
    watch, now = Watch(), 100.0
    while now < 100.0 + seconds:
        now += TICK
        watch, finding = observe(watch, POLICY, now, silent(), others)
        if finding.stage == "act":
            return finding
        if finding.look:
            watch = watch.looked(now, [Look(0, ("all_reduce",), waits=True, turn=0)])
    return None


@pytest.mark.parametrize(
    ("others", "hangs"),
    [
        ([Standing(still=True)], True),
        ([Standing(still=False)], False),
        ([Standing()], False),
        ([Standing(excused=True)], False),
        ([Standing(moving=60)], True),
        ([Standing(moving=49)], False),
        ([Standing(moving=40)], False),
        ([Standing(still=True), Standing(still=False)], False),
    ],
)
def test_other_nodes_have_a_say(others: list[Standing], hangs: bool) -> None:
    """One of their ranks may be what all wait for: in a phase of its own, in an evaluation that
    nobody declared, or behind."""
    assert (judged(others) is not None) == hangs


def test_a_node_that_says_nothing_delays_a_verdict_until_the_deadline() -> None:
    finding = judged([Standing()], seconds=2000.0)
    assert finding is not None
    assert finding.age == pytest.approx(POLICY.last(0.5), abs=2 * TICK)


def test_what_a_node_tells_of_itself() -> None:
    evaluating = [replace(silent()[0], phase="evaluation", phase_since=110.0)]
    assert standing(Watch(), POLICY, 120.0, evaluating).excused
    moving = [replace(silent()[0], boundary_at=119.0)]
    assert standing(Watch(), POLICY, 120.0, moving) == Standing(moving=49)
    watch = Watch(since=110.0, looks=((Look(0, ("here",)),),) * POLICY.samples)
    assert standing(watch, POLICY, 130.0, silent()) == Standing(still=True)


# -- the observer itself


def test_an_observer_that_stood_still_itself_knows_nothing() -> None:
    """It was stopped for a minute, with all that it watches: nothing is ended for that."""
    watch, _ = observe(Watch(), POLICY, 100.0, silent())
    watch, finding = observe(watch, POLICY, 100.0 + AWAY + 60.0, silent())
    assert finding.stage == "watching"


def test_a_rank_that_waits_for_one_that_is_behind_and_moves_is_no_suspect() -> None:
    ahead = RankBeat(0, 99, "step", 0.0, 100.0, steps=100, longest=0.5)
    for behind, suspects in ((49, ()), (150, (0,))):
        moving = RankBeat(1, behind, "step", 0.0, 199.0, steps=50, longest=0.5)
        watch, _ = observe(Watch(), POLICY, 195.0, [moving])
        _, finding = observe(replace(watch, clear_at=0.0), POLICY, 200.0, [ahead, moving])
        assert finding.ranks == suspects


def looks_of(kinds: list[str]) -> Iterator[Look]:
    for number, kind in enumerate(kinds):
        yield {
            "same": Look(0, ("a", "b")),
            "unread": Look(0),
            "elsewhere": Look(0, ("a", f"c{number}")),
            "turned": Look(0, ("a", "b"), turn=number + 1),
        }[kind]


@given(
    st.lists(st.sampled_from(["same", "unread", "elsewhere", "turned"]), min_size=4, max_size=12)
)
def test_only_looks_that_all_agree_count(kinds: list[str]) -> None:
    """One that could not be read, or that saw something move, begins the count anew."""
    beats, watch, now = silent(), Watch(clear_at=0.0, seen_at=140.0), 140.0
    for count, look in enumerate(looks_of(kinds)):
        watch, finding = observe(watch, POLICY, now, beats)
        assert (finding.stage == "act") == agree(kinds[:count])
        watch = watch.looked(now, [look])
        now += 6.0


def agree(kinds: list[str]) -> bool:
    """Whether the last four looks do; one answer alone differs from no other."""
    last = kinds[-POLICY.samples :]
    return len(last) == POLICY.samples and last.count("same") + (last.count("turned") == 1) == 4
