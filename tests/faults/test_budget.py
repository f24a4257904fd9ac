"""F3: the three nested budgets hold against every history.

The oracles below read the log of what was really begun and how it really ended; they share no code
with the budgets.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from histories import (
    CRASHES,
    POLICIES,
    PROGRAM,
    UNCHARGED,
    VERDICTS,
    Begun,
    Ended,
    Op,
    World,
    alone,
    draw_history,
    repeat,
)
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from told import TIMEOUT, UNKNOWN, Agent, verdict

from everstep.core import exits
from everstep.faults.budget import count, left, nearly_spent, window_frees
from everstep.faults.fold import Life, fold
from everstep.faults.history import AttemptFacts, IncidentRecord, LastWord
from everstep.faults.limits import Limits
from everstep.faults.situation import Policy

LIMITS = Limits(window_restarts=12, window_seconds=2000.0)
POLICY = Policy(limits=LIMITS)
NOBODYS = ("killed", "moved", "preempted")


# the oracles: what was begun, against what may be


def check(world: World) -> None:
    limits = world.policy.limits
    for begun, ended in world.segments:
        check_window([b for b in begun if b.attempt > 1], limits)
        if limits.no_progress is not None:
            check_progress(begun, ended, limits.no_progress, limits.setbacks)
        if world.policy.mode is None:
            check_fingerprints(begun, ended, limits)


def check_window(restarts: list[Begun], limits: Limits) -> None:
    if limits.window_restarts is None:
        return
    for one in restarts:
        recent = [b for b in restarts if one.at - limits.window_seconds < b.at <= one.at]
        assert len(recent) <= limits.window_restarts, f"{len(recent)} restarts by {one.at}"


def check_progress(begun: list[Begun], ended: list[Ended], most: int, setbacks: int) -> None:
    """No attempt follows ``most`` failures in a row of which none got further, or went on from a
    later step than those before it."""
    for place, end in enumerate(ended):
        if not any(b.attempt > end.attempt for b in begun):
            continue
        in_a_row = 0
        for at in range(place, -1, -1):
            if got_on(ended[: at + 1], setbacks) or ended[at].provisional:
                break
            in_a_row += ended[at].fault not in NOBODYS
        if end.fault not in NOBODYS and not end.late:
            assert in_a_row < most, f"{in_a_row} failures in a row before attempt {end.attempt + 1}"


def got_on(ends: list[Ended], setbacks: int) -> bool:
    """Whether the last of ``ends`` was progress, in a reading that is never stricter than the
    rule: it came further than all before, or went on from a later step than all since the last
    setback that counts."""
    last, before = ends[-1], ends[:-1]
    if last.furthest > max((e.furthest for e in before), default=-1):
        return True
    mark, best, downs = -1, -1, 0
    for end in before:
        if end.restored > mark:
            mark = end.restored
        elif 0 <= end.restored < mark and downs < setbacks:
            mark, downs = end.restored, downs + 1
        if end.furthest > best:
            best, downs = end.furthest, 0
    return last.restored > mark


def check_fingerprints(begun: list[Begun], ended: list[Ended], limits: Limits) -> None:
    """For every failure: how many attempts were begun after it since its last true refill, in all
    and at one step."""
    for fault in set(VERDICTS) - UNCHARGED:
        restarts, at_step, where = 0, dict[int, int](), -1
        since: tuple[float, float] | None = None
        useful, best = 0.0, -1
        for end in ended:
            if end.committed > best and not end.provisional:
                best, useful = end.committed, useful + end.useful
            if since is not None and not end.provisional and end.committed > where:
                elapsed, spent = end.at - since[0], useful - since[1]
                if elapsed > 0 and spent >= limits.useful_share * elapsed - 1e-6:
                    restarts, at_step, where, since = 0, {}, -1, (end.at, useful)
            if end.fault != fault:
                continue
            since = since or (end.at, useful)
            where = max(where, end.step, end.furthest)
            if any(b.attempt == end.attempt + 1 for b in begun) and not end.late:
                restarts += 1
                at_step[end.step] = at_step.get(end.step, 0) + 1
            if limits.per_fingerprint is not None:
                assert restarts <= limits.per_fingerprint, f"{restarts} restarts after {fault}"
            identical = max(at_step.values(), default=0)
            # F4: one confirming retry for what the program or the data did, two for the rest.
            allowed = (limits.same_step_program if fault in PROGRAM else limits.same_step) - 1
            assert identical <= allowed, f"{identical} restarts after {fault} at one step"


# adversarial histories

OPS = st.builds(
    Op,
    fault=st.sampled_from(sorted(VERDICTS)),
    source=st.sampled_from(["store", "store", "memory", "scratch"]),
    steps=st.integers(0, 4),
    commits=st.booleans(),
    at=st.none() | st.integers(0, 12),
    told=st.booleans(),
    lasted=st.sampled_from([0.0, 1.0, 30.0, 400.0]),
    useful=st.sampled_from([0.0, 0.1, 0.3, 1.0]),
    crash=st.sampled_from(["", "", "", *CRASHES]),
    intruder=st.sampled_from([False] * 5 + [True]),
    race=st.booleans(),
    closed=st.sampled_from([True, True, True, False]),
    closes=st.booleans(),
    becomes=st.sampled_from(["", "", "", *sorted(VERDICTS)]),
    falls=st.sampled_from([False] * 4 + [True]),
    offline=st.sampled_from([False] * 4 + [True]),
    gap=st.sampled_from([0.0, 1.0, 300.0]),
    host=st.sampled_from(["node", "m", "new-host"]),
    reset=st.sampled_from([False] * 19 + [True]),
)
HISTORIES = st.lists(OPS, max_size=40) | st.lists(OPS, min_size=1, max_size=3).flatmap(
    lambda few: st.lists(st.sampled_from(few), max_size=40)
)


@settings(max_examples=250, deadline=None, phases=(Phase.explicit, Phase.generate, Phase.shrink))
@given(ops=HISTORIES, policy=st.sampled_from(POLICIES), spares=st.sampled_from([(), ("s1", "s2")]))
@example([Op(crash="after claim")] * 40, POLICY, ())
@example([Op("victims")] * 40, POLICY, ())
@example([Op("data", host="m"), Op("data")] * 3, POLICY, ())
def test_f3_no_history_gives_more_restarts_than_allowed(
    ops: list[Op], policy: Policy, spares: tuple[str, ...]
) -> None:
    """Alternating fingerprints, moving steps, victims alone, commits before the crash, failures
    before step 1, roll backs, killed agents, resubmissions, new host names, two agents at once."""
    world = World(policy, spares)
    world.play(ops)
    check(world)
    assert len(world.begun) <= world.claims


@pytest.mark.parametrize("first", range(0, 180, 30))
def test_f3_no_character_of_history_gives_more_restarts_than_allowed(first: int) -> None:
    """The same with histories that insist: few failures that keep coming, each budget alone too,
    so that none hides behind another."""
    for seed in range(first, first + 30):
        policy, spares, ops = draw_history(seed)
        world = World(policy, spares)
        world.play(ops)
        try:
            check(world)
        except AssertionError as failure:
            raise AssertionError(f"draw_history({seed})") from failure


ADVERSARIES: dict[str, Callable[[random.Random], Op]] = {
    "alternating fingerprints": lambda r: Op(r.choice(sorted(VERDICTS)), at=5, steps=4),
    "moving steps": lambda r: Op("exception", source="scratch", at=r.randrange(9), steps=9),
    "ever later steps": lambda _: Op("nccl", "memory", steps=1),
    "victims alone": lambda _: Op("victims"),
    "taken away again and again": lambda _: Op("preempted", lasted=30.0),
    "commits, then crashes": lambda _: Op("nccl", steps=1, commits=True, lasted=5.0),
    "commits, then crashes, usefully": lambda _: Op(
        "nccl", steps=1, commits=True, lasted=5.0, useful=1.0
    ),
    "fails before step 1": lambda r: Op(r.choice(["exception", "unknown"]), "scratch", at=0),
    "rolls back": lambda r: Op("nan", steps=r.randrange(1, 5), commits=True),
    "agent killed": lambda r: Op(crash=r.choice(CRASHES)),
    "resubmitted": lambda r: Op(
        "oom", at=4, steps=3, crash=r.choice(["", "after DecisionRecord"]), gap=r.random()
    ),
    "a new host each time": lambda r: Op("gpu", host=f"host{r.randrange(99)}-"),
    "two agents at once": lambda r: Op("nccl", intruder=True, gap=r.random()),
    "verdicts that change": lambda r: Op(
        "unknown", closed=False, becomes=r.choice(["gpu", "nan"]), steps=1, commits=True
    ),
    "nothing leads anywhere": lambda _: Op("nccl", falls=True),
    "the store is away": lambda _: Op("nccl", steps=1, commits=True, useful=1.0, offline=True),
    "the clock jumps": lambda r: Op("nccl", steps=1, jump=r.choice([-1e6, 1e6, 3e4])),
}


@pytest.mark.parametrize("name", ADVERSARIES)
def test_f3_every_adversary_is_stopped(name: str) -> None:
    """Each alone, for 100 attempts on end: the budgets hold, and end the job for good."""
    draw = random.Random(name)
    world = World(POLICY)
    world.play([ADVERSARIES[name](draw) for _ in range(100)])
    check(world)
    if name != "taken away again and again":  # that waits, longer and longer, within the window
        assert len(world.begun) <= LIMITS.window_restarts + 1
    assert len(world.begun) >= 2, "it was tried again at all"


def test_f3_what_makes_progress_is_never_stopped_by_what_it_fails_of() -> None:
    """A job that fails every hour of something else, or of the same, and commits in between."""
    for fault in ("nccl", "exception", "gpu", "unknown", "victims", "preempted"):
        op = Op(fault, steps=50, commits=True, lasted=3600.0, useful=0.9)
        world = World(Policy(), ("s1", "s2", "s3"))
        world.play(repeat(op, 60))
        assert world.refusals == 0, world.decisions[-1].reason
        assert len(world.begun) == 61


# each budget by itself


def history_of(world: World) -> list[Ended]:
    return world.ended


def test_a_fingerprint_is_refilled_only_by_commits_past_its_step_in_a_useful_share_of_time() -> (
    None
):
    """F3. Default: 20 % of the time since the last refill."""
    limits = Limits(no_progress=None, unrestored=None, window_restarts=None)
    base = Op("nccl", steps=3, commits=True, lasted=100.0)
    for useful, begun in ((0.0, 4), (0.19, 4), (0.21, 13)):
        world = World(Policy(limits=limits))
        world.play(repeat(base, 12, useful=useful))
        assert len(world.begun) == begun, f"with {useful} useful"
    behind = World(Policy(limits=limits))
    behind.play(repeat(base, 12, useful=1.0, at=10**9))
    assert len(behind.begun) == 3, "commits, but never past the failing step (F4: it is the same)"
    just = World(Policy(limits=limits))
    just.play(repeat(base, 12, useful=1.0, steps=1))
    assert len(just.begun) == 4, "each commits the step that failed, and nothing past it"


def test_the_store_being_away_refills_nothing() -> None:
    limits = Limits(no_progress=None, unrestored=None, window_restarts=None)
    op = Op("nccl", steps=3, commits=True, lasted=100.0, useful=1.0)
    online, offline = World(Policy(limits=limits)), World(Policy(limits=limits))
    online.play(repeat(op, 12))
    offline.play(repeat(op, 12, offline=True))
    assert (len(online.begun), len(offline.begun)) == (13, 4)


def test_a_provisional_attempt_refills_nothing() -> None:
    """Until the incident that it went on from is closed."""
    limits = Limits(no_progress=None, unrestored=None, window_restarts=None)
    op = Op("nccl", steps=3, commits=True, lasted=100.0, useful=1.0, closed=False)
    world = World(Policy(limits=limits))
    world.play(repeat(op, 12))
    assert len(world.begun) == 4


def test_what_a_provisional_attempt_did_counts_for_no_later_refill_either() -> None:
    """Neither the step that it committed nor the time that it spent."""

    def run(second: AttemptFacts, third: AttemptFacts, fourth: AttemptFacts) -> int:
        told = Agent(policy=alone())
        told.fails(TIMEOUT, facts=AttemptFacts(-1, 9, 9, 5, 100.0, 50.0))
        told.fails(UNKNOWN, closed=False, facts=second)
        told.fails(verdict(TIMEOUT, step=30), facts=third)  # it was provisional
        told.fails(verdict(TIMEOUT, step=40), facts=fourth)
        return spent_on_timeouts(told)

    behind, past = AttemptFacts(5, 8, 8, 8, 100.0, 90.0), AttemptFacts(8, 25, 25, 25, 100.0)
    nothing = AttemptFacts()
    assert run(behind, past, nothing) == 3, "its commit refills nothing"
    beyond = AttemptFacts(8, 45, 45, 45, 100.0, 90.0)
    assert run(behind, nothing, beyond) == 1, "what is closed refills"


def test_the_time_of_a_provisional_attempt_is_useful_for_nothing() -> None:
    for closed, spent in ((False, 2), (True, 1)):
        told = Agent(policy=alone())
        told.fails(TIMEOUT, facts=AttemptFacts(-1, 9, 9, 5, 100.0))
        told.fails(UNKNOWN, closed=closed, facts=AttemptFacts(5, 6, 6, 6, 100.0))
        told.fails(UNKNOWN, facts=AttemptFacts(6, 8, 8, 8, 100.0, 90.0))
        told.fails(verdict(TIMEOUT, step=40), facts=AttemptFacts(8, 25, 25, 25, 100.0))
        assert spent_on_timeouts(told) == spent


def spent_on_timeouts(told: Agent) -> int:
    spent = count(told.history(), told.policy.limits).fingerprints
    return next(one.spent for one in spent.values() if "watchdog" in one.fingerprint.text)


def test_useful_time_is_never_longer_than_the_attempt_was() -> None:
    """Whatever it says of itself."""
    for useful, spent in ((19.0, 2), (21.0, 1), (1e9, 1)):
        told = Agent(policy=alone())
        told.fails(TIMEOUT)
        told.fails(
            verdict(TIMEOUT, step=40), facts=AttemptFacts(9, 30, 30, 30, 1e9, useful), after=100.0
        )
        assert spent_on_timeouts(told) == spent
    boast = Agent(policy=alone())
    boast.fails(TIMEOUT, facts=AttemptFacts(-1, 9, 9, 5, 10.0))
    boast.fails(UNKNOWN, facts=AttemptFacts(5, 8, 8, 8, 1e9, 1e9), after=10.0)
    boast.fails(verdict(TIMEOUT, step=40), facts=AttemptFacts(8, 30, 30, 30, 1e3), after=1000.0)
    assert spent_on_timeouts(boast) == 2, "10 s of 1010 were useful"


def test_the_furthest_failing_step_has_to_be_passed() -> None:
    """Not only the one that it failed at last."""
    for committed, spent in ((40, 3), (60, 1)):
        told = Agent(policy=alone())
        told.fails(verdict(TIMEOUT, step=50), facts=AttemptFacts(-1, 9, 9))
        told.fails(verdict(TIMEOUT, step=12), facts=AttemptFacts(-1, 9, 9))
        facts = AttemptFacts(9, committed, committed, committed, 100.0, 100.0)
        told.fails(verdict(TIMEOUT, step=70), facts=facts)
        assert spent_on_timeouts(told) == spent


def test_a_provisional_attempt_that_gets_further_is_no_progress_yet() -> None:
    told = Agent(policy=alone(no_progress=3))
    nothing = AttemptFacts()
    told.fails(UNKNOWN, facts=nothing)
    told.fails(UNKNOWN, facts=nothing, closed=False)
    assert told.fails(UNKNOWN).begins == 4, "it got further, and its incident was never closed"
    assert told.fails(UNKNOWN, facts=nothing).stops
    closed = Agent(policy=alone(no_progress=3))
    closed.fails(UNKNOWN, facts=nothing)
    closed.fails(UNKNOWN, facts=nothing)
    closed.fails(UNKNOWN)
    assert closed.fails(UNKNOWN, facts=nothing).begins == 5


def test_attempts_without_progress_stop_after_three_across_all_fingerprints() -> None:
    """The class is NO_PROGRESS_LOOP, the exit code 93."""
    world = World(POLICY)
    world.play([Op("nccl"), Op("victims"), Op("unknown"), Op("gpu")])
    assert len(world.begun) == 3
    stop = world.decisions[-1]
    assert (stop.fault, stop.exit_code, stop.final) == ("NO_PROGRESS_LOOP", exits.NO_PROGRESS, True)
    assert "3 attempts in a row got no further" in stop.reason
    assert "--reset-budget" in stop.reason


def test_a_stop_survives_resubmission_until_an_operator_resets_it() -> None:
    """F3: starting the job again is no way around the budget."""
    world = World(POLICY)
    world.play([*repeat(Op("unknown"), 3), *repeat(Op("unknown", gap=10**6), 5)])
    assert len(world.begun) == 3
    records = len(world.records)
    world.play([Op("unknown", gap=10**6)])
    assert len(world.records) == records, "a queue that tries for ever fills no store"
    world.play([Op("unknown", reset=True), Op("unknown"), Op("unknown"), Op("unknown")])
    assert [len(begun) for begun, _ in world.segments][-1] == 3


def test_a_lost_agent_counts_as_one_that_restored_no_later_step() -> None:
    """Six in a row; a host that dies says nothing of whether the program got on."""
    world = World(Policy(limits=Limits(window_restarts=None)))
    world.play(repeat(Op(crash="running", source="scratch"), 20))
    assert len(world.begun) == 6


def test_what_is_taken_away_counts_in_the_window_alone() -> None:
    world = World(Policy(limits=Limits(window_restarts=9, window_seconds=10**9)))
    world.play(repeat(Op("preempted"), 40))
    assert len(world.begun) == 10
    assert world.decisions[-1].stops
    counted = count(fold(world.records), Limits())
    assert (counted.stuck, counted.fingerprints) == (0, {})


def test_a_job_that_gets_on_and_is_taken_away_waits_for_room_in_the_window() -> None:
    policy = Policy(limits=Limits(window_restarts=2, window_seconds=1000.0))
    world = World(policy)
    world.play(repeat(Op("preempted", steps=1, commits=True, lasted=10.0, useful=1.0), 8))
    assert world.refusals == 0
    assert len(world.begun) == 9
    check(world)


def test_f2_victims_charge_no_fingerprint() -> None:
    world = World(Policy(limits=Limits(no_progress=None, unrestored=None)))
    world.play(repeat(Op("victims"), 10))
    assert len(world.begun) == 11
    assert count(fold(world.records), LIMITS).fingerprints == {}


def test_a_jump_of_the_wall_clock_moves_no_window() -> None:
    """Neither forward nor back: within an agent, time is its monotonic clock."""
    policy = Policy(limits=Limits(None, None, None, 5, 10_000.0))
    for jump in (0.0, 1e7, -1e7):
        world = World(policy)
        world.play(repeat(Op("nccl", "memory", steps=1, jump=jump), 30))
        assert len(world.begun) == 6, f"with jumps of {jump}"


def test_max_restarts_is_one_agents_own_limit() -> None:
    """As torchrun's: a new start of the job has it again, within the budgets."""
    world = World(Policy(limits=Limits(None, None, None, None, max_restarts=2)))
    world.play(repeat(Op("nccl", "memory", steps=1), 3))
    assert (len(world.begun), world.decisions[-1].exit_code) == (3, exits.FAILED)
    world.play(repeat(Op("nccl", "memory", steps=1), 3))
    assert len(world.begun) == 6
    zero = World(Policy(limits=Limits(max_restarts=0)))
    zero.play([Op("nccl")])
    assert (len(zero.begun), zero.decisions[-1].stops) == (1, True)


def test_an_attempt_that_ends_at_the_furthest_step_again_is_no_progress() -> None:
    """Whatever it restored: a script that always fails at one step gets three attempts."""
    policy = Policy(limits=Limits(None, same_step=99, same_step_program=99))
    world = World(policy)
    world.play([Op("nccl", "scratch", steps=9, at=9), *repeat(Op("nccl", "memory", at=9), 8)])
    assert len(world.begun) == 3


def test_setbacks_are_forgiven_three_times() -> None:
    """After a roll back the way forward is progress again, but not for ever."""
    policy = Policy(limits=Limits(None, window_restarts=None, same_step=99))
    world = World(policy)
    far = Op("nccl", "store", steps=100, commits=True)
    world.play([far])
    for _ in range(40):
        world._committed = 3
        world.play([Op("unknown", "store", steps=1, commits=True), Op("nccl", "store", steps=1)])
    assert 8 <= len(world.begun) <= 14


def test_what_is_left_and_what_is_nearly_spent() -> None:
    world = World(Policy(limits=Limits(window_restarts=5, window_seconds=1e6)))
    world.play(repeat(Op("nccl", "memory", steps=1), 3))
    history = fold(world.records)
    incident = history.incident("agent1-3")
    assert isinstance(incident, IncidentRecord)
    limits = world.policy.limits
    counted = count(history, limits)
    assert left(counted, incident, limits) == {"fingerprint": 0, "no_progress": 3, "window": 2}
    assert nearly_spent(counted, incident, limits) == ["fingerprint"]
    world.play([Op("unknown", "memory", steps=1)])
    assert any("80 % of the window budget" in alert for alert in world.decisions[-1].alerts)
    assert window_frees(count(fold(world.records), limits), limits, 0.0) == 0.0


@given(st.lists(OPS, max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_fold_depends_on_the_set_of_records_alone(ops: list[Op], draw: random.Random) -> None:
    """Not on the order of arrival, nor on duplicates: what was appended elsewhere merges in."""
    world = World(POLICY)
    world.play([replace(op, reset=False) for op in ops])
    shuffled = [*world.records, *world.records[::3]]
    draw.shuffle(shuffled)
    assert fold(shuffled, highest_claim=world.claims) == fold(
        world.records, highest_claim=world.claims
    )


@given(st.lists(OPS, max_size=12))
@settings(max_examples=40, deadline=None)
def test_asked_again_it_gives_the_same_answer_and_writes_nothing(ops: list[Op]) -> None:
    """Every action is idempotent: an agent that died between decision and action finds it."""
    from everstep.faults.decide import respond
    from everstep.faults.history import Stamp
    from everstep.faults.situation import Situation

    world = World(POLICY)
    world.play(ops)
    for incident in [r for r in world.records if isinstance(r, IncidentRecord)]:
        if not fold(world.records).decisions(incident.id):
            continue  # its agent died before it had decided
        later = Stamp("another", 1e9, 0.0)
        answer = respond(world.records, incident, Situation(highest_claim=99), POLICY, later)
        assert answer.records == ()
        assert answer.decision in world.records


def test_an_attempt_of_which_no_record_tells_counts_by_its_number() -> None:
    world = World(POLICY)
    world.play([Op("nccl", steps=3)])
    known = fold(world.records, highest_claim=world.claims)
    more = fold(world.records, highest_claim=world.claims + 4)
    assert len(more.lives) == len(known.lives) + 4
    assert len(more.restarts) == len(known.restarts) + 4
    causes = [life.cause for life in more.events if isinstance(life, Life)]
    assert causes == ["root"] + ["agent_lost"] * 4


def test_a_start_that_the_window_refuses_is_written_once() -> None:
    """A queue that tries for ever fills no store; once there is room, the job starts."""
    policy = Policy(limits=Limits(window_restarts=2, window_seconds=1000.0))
    told = Agent(policy=policy)
    said = LastWord(exits.PREEMPTED, "taken")
    for _ in range(3):
        told.fails(UNKNOWN, last_word=said, after=1.0)
        told.start()
    refused = told.last
    assert refused is not None
    assert (refused.stops, refused.final, refused.exit_code) == (True, False, exits.NO_PROGRESS)
    written = len(told.records)
    for _ in range(5):
        told.now += 1.0
        assert told.start() == refused
    assert len(told.records) == written
    told.now += 1000.0
    assert told.start().begins == 4
