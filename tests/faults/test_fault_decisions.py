"""From verdict, history and situation to a decision: the ladder, F3, F4, F6."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from told import EXCEPTION, FOUR, GPU, NAN, SOFT, TIMEOUT, UNKNOWN, Agent, points, verdict

from everstep.core import exits
from everstep.core.history import BODY_BYTES, Entry
from everstep.core.ids import Point
from everstep.faults.budget import cause_of, last_limits
from everstep.faults.decide import begin, respond
from everstep.faults.fold import fold
from everstep.faults.history import (
    AttemptFacts,
    DecisionRecord,
    LastWord,
    RecoveryPoint,
    Rung,
    Stamp,
    WordRecord,
    pack,
    unpack,
)
from everstep.faults.ladder import LADDER
from everstep.faults.limits import Limits
from everstep.faults.records import Evidence, Verdict
from everstep.faults.situation import Policy, Situation

SPARES = ("s1", "s2", "s3", "s4")
ENDLESS = Limits(None, None, None, None)


def agent(**changes: object) -> Agent:
    situation = msgspec.structs.replace(Situation(FOUR, SPARES[:2]), **changes)
    return Agent(situation=situation)


# F4: deterministic failures


def test_f4_an_error_of_the_program_stops_after_one_confirming_retry() -> None:
    """With file, line, rank and step, and what a person can do."""
    told = agent()
    first = told.fails(EXCEPTION)
    assert (first.action, first.begins) == ("restart_in_place", 2)
    assert "one restart shows whether it comes again" in first.reason
    second = told.fails(EXCEPTION)
    assert (second.action, second.exit_code, second.final) == ("stop", exits.REPEATED, True)
    for part in ("rank 1", "step 10", "train.py:7", "ZeroDivisionError", "Guard the division"):
        assert part in second.reason
    assert second.begins is None


@pytest.mark.parametrize(
    "what",
    [
        verdict(EXCEPTION, fault="CUDA_OOM", action="restart_in_place"),
        verdict(EXCEPTION, fault="DATA_CORRUPT", domain="user_data", action="restart_in_place"),
        Verdict("OBJ_DENIED", "storage", "stop", root_domain="service", step=3),
        Verdict("IMAGE_PULL", "scheduler", "stop", root_domain="service"),
    ],
    ids=lambda v: v.fault,
)
def test_f4_user_code_user_data_and_what_no_restart_helps_stop_at_the_second(what: Verdict) -> None:
    told = agent()
    assert told.fails(what).begins == 2
    assert told.fails(what).exit_code == exits.REPEATED


def test_f4_any_other_class_goes_to_other_nodes_and_stops_at_the_third() -> None:
    told = agent()
    assert told.fails(TIMEOUT).action == "restart_in_place"
    second = told.fails(TIMEOUT)
    assert second.action == "restart_elsewhere"
    assert second.rung.nodes == ("a", "b", "s1", "s2"), "all spares, since nobody is to blame"
    assert second.excluded == ()
    third = told.fails(TIMEOUT)
    assert (third.action, third.exit_code) == ("stop", exits.REPEATED)


def test_f4_the_second_retry_leaves_the_named_node_and_stays_where_there_are_no_others() -> None:
    named = verdict(TIMEOUT, root_node="c")
    told = agent()
    told.fails(named)
    assert told.fails(named).rung.nodes == ("a", "b", "s1", "d")
    alone = agent(spares=())
    alone.fails(TIMEOUT)
    second = alone.fails(TIMEOUT)
    assert (second.action, second.rung.nodes) == ("restart_in_place", FOUR)
    assert alone.fails(TIMEOUT).action == "stop"


def test_f4_another_step_or_another_text_is_not_the_same_failure() -> None:
    policy = Policy(limits=Limits(no_progress=None, unrestored=None))
    told = Agent(policy=policy)
    told.fails(EXCEPTION)
    assert told.fails(verdict(EXCEPTION, step=11)).begins == 3
    assert told.fails(verdict(EXCEPTION, message="IndexError: 3", step=10)).begins == 4
    assert told.fails(verdict(EXCEPTION, step=12)).begins == 5
    fourth = told.fails(verdict(EXCEPTION, step=13))
    assert (fourth.action, fourth.exit_code) == ("stop", exits.NO_PROGRESS), "its budget is spent"


def test_f4_before_step_1_without_a_known_step() -> None:
    told = agent()
    nothing = AttemptFacts(lasted=3.0)
    broken = verdict(EXCEPTION, fault="USER_IMPORT", step=None)
    told.fails(broken, facts=nothing)
    decision = told.fails(broken, facts=nothing)
    assert decision.exit_code == exits.REPEATED
    assert "before step 1" in decision.reason


# F6: recorded first, done once


def test_f6_a_decision_that_was_not_carried_out_is_carried_on() -> None:
    """By the next agent: it begins the same attempt, counts once, and waits only what is left."""
    told = agent()
    told.fails(verdict(TIMEOUT, action="wait_and_retry"))
    decided, before = told.last, told.history()
    assert decided is not None
    told.claims = 1  # the agent died before it claimed the attempt
    told.now += decided.rung.delay / 3
    again = told.start()
    assert (again.action, again.begins, again.incident) == ("wait_and_retry", 2, decided.incident)
    assert again.rung.delay == pytest.approx(decided.rung.delay * 2 / 3)
    assert len(told.history().restarts) == len(before.restarts) == 1


def test_f6_an_incident_without_a_decision_is_decided_by_the_next_agent() -> None:
    told = agent()
    told.start()
    incident = told.incident(EXCEPTION)
    told.records.append(msgspec.structs.replace(incident, sequence=5))
    decision = told.start()
    assert (decision.incident, decision.begins) == (incident.id, 2)
    assert len([r for r in told.records if r.attempt == 1]) == 2, "it is not told twice"


@pytest.mark.parametrize(("better", "action"), [(GPU, "restart_elsewhere"), (UNKNOWN, "continue")])
def test_f6_a_better_verdict_that_nobody_looked_at_is_looked_at(
    better: Verdict, action: str
) -> None:
    """Its agent died between writing it and deciding, before the next attempt was claimed."""
    told = agent()
    told.start()
    told.tells(told.incident(UNKNOWN, closed=False))
    told.claims, told.situation = 1, Situation(FOUR, SPARES[:2])
    told.records.append(told.incident(better, id="i1", attempt=1, revision=2, sequence=7))
    decision = told.start()
    assert decision.begins == 2
    assert decision.action == ("restart_in_place" if action == "continue" else action)
    assert len(told.history().restarts) == 1


def test_f6_asked_twice_it_decides_once() -> None:
    told = agent()
    told.start()
    incident = told.incident(GPU)
    first = told.tells(incident)
    written = len(told.records)
    assert told.tells(incident) == first
    assert len(told.records) == written


def test_an_agent_that_was_overtaken_begins_nothing() -> None:
    told = agent()
    told.start()
    told.claims = 2  # another agent has taken the job over
    decision = told.tells(told.incident(TIMEOUT, attempt=1, id="late"))
    assert (decision.action, decision.begins) == ("continue", None)
    assert "another agent" in decision.reason


# begin


def test_the_first_start_is_no_restart() -> None:
    told = agent()
    decision = told.start()
    assert (decision.begins, decision.rung.nodes, decision.reason) == (1, FOUR, "the job starts")
    assert told.history().restarts == ()


def test_a_job_that_ran_before_there_was_a_history_just_starts() -> None:
    told = agent()
    told.claims = 41
    assert told.start().begins == 42
    assert told.history().restarts == ()


def test_a_lost_agent_is_an_incident_of_its_own() -> None:
    told = agent()
    told.start()
    decision = told.start(AttemptFacts(committed=7, reached=7))
    assert (decision.begins, decision.fault) == (2, "UNKNOWN_ROOT")
    lost = told.history().incident("lost-1")
    assert lost is not None
    assert (lost.cause, lost.facts.committed, lost.verdict.root_node) == ("agent_lost", 7, None)


@pytest.mark.parametrize(
    "code", [exits.FINISHED, exits.PREEMPTED, exits.REFUSED, exits.NOT_DURABLE]
)
def test_a_last_word_ends_the_job_with_its_code_and_charges_nothing(code: int) -> None:
    """Today's codes: what only a person can change is no failure that could be retried."""
    told = agent()
    for _ in range(8):
        decision = told.fails(EXCEPTION, last_word=LastWord(code, "said so"))
        assert (decision.action, decision.exit_code, decision.final) == ("stop", code, False)
        assert told.start().begins == told.claims
    assert told.fails(EXCEPTION).action == "restart_in_place"


def test_a_job_that_a_person_ended_starts_again() -> None:
    told = agent()
    cancelled = Verdict("USER_CANCEL", "scheduler", "stop")
    decision = told.fails(cancelled)
    assert (decision.action, decision.exit_code) == ("stop", exits.PREEMPTED)
    assert told.start().begins == 2


# values that are not finite


def test_a_value_that_is_not_finite_is_replayed_once_from_before_it() -> None:
    told = agent(checkpoints=points(2, 5, 8, 10, 12))
    decision = told.fails(NAN)
    assert (decision.action, decision.replay) == ("rollback", True)
    assert decision.rung.recovery == points(8)[0], "the newest before the step, not at it"
    assert decision.rung.nodes == FOUR, "exactly as it was"
    again = told.fails(NAN)
    assert (again.action, again.exit_code) == ("stop", exits.REPEATED)
    assert "an exact replay gave it again at step 10: program or data" in again.reason


def test_where_the_user_allows_it_the_batches_are_left_out() -> None:
    told = agent(checkpoints=points(8))
    told.policy = Policy(skip_batches=True)
    told.fails(NAN)
    again = told.fails(NAN)
    assert (again.action, again.skip, again.replay) == ("rollback", (10,), False)
    third = told.fails(NAN)
    assert third.action == "stop", "it was not the batches"


def test_the_first_symptom_counts_and_only_healthy_checkpoints_do() -> None:
    told = agent(checkpoints=(*points(3), *points(6, healthy=False), *points(9)))
    decision = told.fails(NAN, first_symptom=8)
    assert decision.rung.recovery == points(3)[0]


def test_without_a_healthy_checkpoint_it_stops_and_never_starts_afresh() -> None:
    told = agent(checkpoints=points(6, healthy=False))
    decision = told.fails(NAN)
    assert (decision.action, decision.exit_code) == ("stop", exits.NO_RECOVERY_POINT)
    assert "no healthy checkpoint is older than step 10" in decision.reason
    none_yet = agent()
    assert none_yet.fails(NAN).action == "rollback", "nothing was ever committed: from nothing"


def test_a_damaged_checkpoint_is_gone_back_behind() -> None:
    damaged = Verdict("CKPT_CORRUPT", "storage", "rollback", root_domain="path", confidence=0.9)
    told = agent(checkpoints=points(3, 6))
    decision = told.fails(damaged, facts=AttemptFacts(restored=6))
    assert decision.rung.recovery == points(3)[0]
    assert not decision.replay
    at_start = agent(checkpoints=points(3, 6, healthy=False))
    unread = at_start.fails(damaged, facts=AttemptFacts())
    assert unread.rung.recovery == points(3, healthy=False)[0], "damage says nothing of values"
    only = agent(checkpoints=points(6))
    assert only.fails(damaged, facts=AttemptFacts()).exit_code == exits.NO_RECOVERY_POINT


def test_a_device_that_computes_wrongly_is_left_and_its_state_too() -> None:
    wrong = verdict(GPU, fault="SDC", action="rollback")
    told = agent(checkpoints=points(3, 6))
    decision = told.fails(wrong)
    assert (decision.action, decision.excluded) == ("rollback", ("b",))
    assert decision.rung.nodes == ("a", "s1", "c", "d")
    assert decision.rung.recovery == points(6)[0]


# the ladder


def test_what_is_not_fatal_goes_on() -> None:
    told = agent()
    slow = Verdict("STRAGGLER", "gpu_hardware", "continue", (1,), "b", confidence=0.9)
    decision = told.fails(slow, fatal=False)
    assert (decision.action, decision.begins, decision.excluded) == ("continue", None, ())
    assert told.history().events == ()


def test_what_went_on_and_turns_out_to_be_fatal_is_decided_anew() -> None:
    told = agent()
    told.start()
    slow = told.incident(UNKNOWN, fatal=False)
    assert told.tells(slow).action == "continue"
    decision = told.tells(msgspec.structs.replace(slow, revision=2, fatal=True))
    assert (decision.action, decision.begins) == ("restart_in_place", 2)
    crashed = agent()
    crashed.start()
    crashed.tells(slow)
    crashed.records.append(msgspec.structs.replace(slow, revision=2, fatal=True, sequence=9))
    assert crashed.start().begins == 2


def test_f1_the_unknown_is_restarted_in_place_and_nobody_is_blamed() -> None:
    decision = agent().fails(UNKNOWN)
    assert (decision.action, decision.excluded, decision.avoided) == ("restart_in_place", (), ())


def test_f1_where_no_node_is_named_none_is_left() -> None:
    decision = agent().fails(verdict(GPU, root_node=None))
    assert (decision.action, decision.rung.nodes) == ("restart_in_place", FOUR)
    assert "names no node" in decision.reason
    guess = agent().fails(verdict(GPU, confidence=0.2))
    assert (guess.action, guess.rung.nodes) == ("restart_in_place", FOUR)
    assert "not enough to blame a node" in guess.reason


def test_a_blamed_node_that_has_no_part_any_more_is_not_waited_for() -> None:
    told = agent()
    told.fails(GPU)
    again = told.fails(verdict(GPU, step=90))
    assert (again.action, again.rung.nodes) == ("restart_in_place", ("a", "s1", "c", "d"))
    assert "node b has no part in it any more" in again.reason


def test_without_a_spare_the_world_shrinks_where_it_can() -> None:
    told = agent(spares=(), can_shrink=True, min_nodes=3)
    decision = told.fails(GPU)
    assert (decision.action, decision.rung.nodes) == ("restart_elsewhere", ("a", "c", "d"))
    assert agent(spares=(), can_shrink=True, min_nodes=4).fails(GPU).rung.nodes == FOUR


def test_waits_grow_with_jitter_up_to_a_limit() -> None:
    waiting = verdict(TIMEOUT, fault="OBJ_THROTTLE", domain="storage", action="wait_and_retry")
    for jitter, share in ((0.0, 0.5), (1.0, 1.0), (7.0, 1.0)):
        told = agent(jitter=jitter)
        told.policy = Policy(limits=ENDLESS)
        delays = [told.fails(verdict(waiting, step=i)).rung.delay for i in range(8)]
        assert delays == [share * d for d in (30, 120, 480, 1800, 1800, 1800, 1800, 1800)]


def test_every_rung_has_a_timeout_and_falls_to_the_next_down_to_the_stop() -> None:
    told = agent(checkpoints=points(5))
    told.policy = Policy(limits=ENDLESS)
    decision = told.fails(TIMEOUT)
    seen = [decision.action]
    while not decision.stops:
        assert decision.rung.timeout > 0
        assert decision.begins == told.claims
        assert [*decision.ladder] == sorted(decision.ladder, key=lambda r: LADDER.index(r.action))
        decision = told.falls()
        seen.append(decision.action)
    assert seen == [
        "restart_in_place", "restart_elsewhere", "wait_and_retry", "rollback", "stop",
    ]  # fmt: skip
    assert "led to no new step" in decision.reason


def test_a_fall_is_decided_once_and_counts_as_an_attempt_without_progress() -> None:
    told = agent()
    first = told.fails(TIMEOUT)
    second = told.falls()
    assert second.ends_running == "fell"
    told.last = first
    assert told.falls() == second
    while not told.falls().stops:
        pass
    assert told.last is not None
    assert told.last.fault == "NO_PROGRESS_LOOP"
    assert told.claims == 4, "the first got somewhere, and three after it nowhere"


def test_the_decision_says_what_else_was_possible() -> None:
    decision = agent(checkpoints=points(5)).fails(GPU)
    others = {one.action: one.why_not for one in decision.alternatives}
    assert set(others) == set(LADDER) - {"restart_elsewhere"}
    assert all(others.values())
    assert "no new step" in others["rollback"]


def test_eighty_percent_of_a_budget_are_told() -> None:
    told = agent()
    told.policy = Policy(limits=Limits(per_fingerprint=None, no_progress=None, unrestored=None,
                                       window_restarts=5))  # fmt: skip
    alerts = [told.fails(verdict(UNKNOWN, step=i)).alerts for i in range(4)]
    assert [bool(a) for a in alerts] == [False, False, False, True]
    assert "80 % of the window budget" in alerts[-1][0]


# provisional attempts and late verdicts


def test_an_open_incident_makes_a_provisional_attempt() -> None:
    told = agent()
    told.start()
    decision = told.tells(told.incident(UNKNOWN, closed=False))
    assert decision.provisional
    assert told.history().lives[-1].provisional
    known = told.tells(told.incident(UNKNOWN, id="i1", attempt=1, revision=2))
    assert known.action == "continue"
    assert not told.history().lives[-1].provisional
    assert not agent().fails(UNKNOWN).provisional


def late(told: Agent, better: Verdict, revision: int = 2, **changes: object) -> DecisionRecord:
    return told.tells(told.incident(better, id="i1", attempt=1, revision=revision, **changes))


def begun(told: Agent, of: Verdict = UNKNOWN) -> DecisionRecord:
    told.start()
    return told.tells(told.incident(of, closed=False))


def test_a_late_verdict_moves_the_attempt_once() -> None:
    told = agent(checkpoints=points(2, 5))
    begun(told)
    moved = late(told, GPU, closed=False)
    assert (moved.action, moved.begins, moved.ends_running) == ("restart_elsewhere", 3, "moved")
    assert "it runs on b" in moved.reason
    assert late(told, verdict(GPU, root_node="c"), 3).action == "continue"
    counted = [life.cause for life in told.history().lives]
    assert counted[:2] == ["root", "external"], "the moved attempt is nobody's failure"
    assert len(told.history().restarts) == 2, "and counts in the window"


def test_a_late_verdict_moves_back_before_an_unsound_state() -> None:
    told = agent(checkpoints=points(2, 5))
    begun(told)
    moved = late(told, NAN)
    assert (moved.action, moved.ends_running, moved.rung.recovery) == (
        "rollback", "moved", points(5)[0],
    )  # fmt: skip


def test_a_late_verdict_stops_what_was_failing_all_along() -> None:
    told = agent()
    told.fails(EXCEPTION)
    told.now += 10
    told.tells(told.incident(UNKNOWN, closed=False))
    stopped = told.tells(told.incident(EXCEPTION, id="i2", attempt=2, revision=2))
    assert (stopped.action, stopped.ends_running, stopped.exit_code) == (
        "stop", "moved", exits.REPEATED,
    )  # fmt: skip


def test_a_late_verdict_leaves_later_attempts_alone() -> None:
    told = agent()
    begun(told)
    told.fails(verdict(TIMEOUT, step=70), id="other")
    assert late(told, GPU).action == "continue"


# operator control


def test_advise_says_what_it_would_do_and_restarts_in_place() -> None:
    told = agent()
    told.start()
    told.says("on-fault", "advise")
    decision = told.fails(GPU)
    assert (decision.action, decision.excluded) == ("restart_in_place", ())
    assert decision.advice.startswith("restart_elsewhere: XID_79")
    told.says("on-fault", "off")
    assert told.fails(GPU).advice == ""
    assert told.fails(GPU).stops, "budgets hold in every mode"
    told.says("reset-budget", reason="replaced the board")
    told.says("on-fault", "act")
    assert told.start().begins == 4
    assert told.fails(verdict(GPU, root_node="c")).action == "restart_elsewhere"


def test_a_setting_overrides_what_the_operator_said_last() -> None:
    told = agent()
    told.policy = Policy(mode="off")
    assert told.fails(GPU).action == "restart_in_place"


def test_a_reset_begins_every_budget_anew() -> None:
    """F3: it is the one way around a stop, and it is recorded with its reason."""
    told = agent()
    told.fails(EXCEPTION)
    assert told.fails(EXCEPTION).stops
    assert told.start().stops
    told.says("reset-budget", reason="fixed the division")
    assert told.start().begins == 3
    assert told.fails(EXCEPTION).begins == 4
    assert told.fails(EXCEPTION).stops


def test_nodes_that_come_and_go_are_nobodys_failure() -> None:
    told = agent()
    changed = Verdict("UNKNOWN_ROOT", "unknown", "restart_in_place")
    for _ in range(10):
        assert told.fails(changed, cause="external").begins is not None
    assert told.fails(TIMEOUT).budget["no_progress"] == 2


def test_causes() -> None:
    assert cause_of(EXCEPTION) == "root"
    assert cause_of(UNKNOWN) == "root"
    assert cause_of(verdict(UNKNOWN, victim_ranks=(1,))) == "victims"
    seen = (Evidence("boom", "log", role="root"),)
    assert cause_of(verdict(EXCEPTION, root_ranks=(), evidence=seen)) == "root", "common to all"
    assert cause_of(Verdict("PREEMPTED", "scheduler", "wait_and_retry")) == "external"
    assert cause_of(Verdict("USER_CANCEL", "scheduler", "stop")) == "person"


# the budget of attempts without progress


ENDS = st.lists(
    st.tuples(st.integers(-1, 6), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=14
)


@settings(max_examples=200, deadline=None)
@given(ENDS)
def test_three_attempts_that_get_no_further_or_six_that_restore_no_later_step_stop_the_job(
    ends: list[tuple[int, int, int]],
) -> None:
    """Where restored steps never go back; one that ends at exactly the furthest step again is no
    progress, and shows that the first to end there was none either."""
    policy = Policy(limits=Limits(None, 3, 6, None, same_step=99))
    told = Agent(policy=policy)
    told.start()
    furthest = last_restored = -1
    stuck = unrestored = 0
    for before, reached, finished in ends:
        restored = max(before, last_restored)
        facts = AttemptFacts(restored, restored + reached, restored + finished)
        later = restored > last_restored
        if facts.furthest > furthest:
            stuck = 0
        elif facts.furthest == furthest >= 0:
            stuck = max(stuck, 1) + 1
        else:
            stuck = 0 if later else stuck + 1
        unrestored = 0 if later else unrestored + 1
        last_restored, furthest = restored, max(furthest, facts.furthest)
        now = told.fails(verdict(TIMEOUT, step=None), facts=facts)
        assert now.stops == (stuck >= 3 or unrestored >= 6), now.reason
        if now.stops:
            assert now.exit_code == exits.NO_PROGRESS
            return


# bytes


def test_records_survive_the_store() -> None:
    told = agent(checkpoints=points(5))
    told.fails(GPU, closed=False, first_symptom=3)
    told.says("pardon", "b", "new board")
    told.fails(NAN)
    told.falls()
    entries = [pack(record) for record in told.records]
    found = unpack(entries)
    assert found == (tuple(told.records), ())
    assert fold(found.records) == fold(told.records)


def test_a_later_format_or_a_broken_body_is_named_and_the_rest_is_read() -> None:
    told = agent()
    told.start()
    good = pack(told.records[0])
    later = msgspec.structs.replace(good, format=2)
    broken = Entry("incident", 3, 1, 1, b"\xc1")
    mislabelled = msgspec.structs.replace(good, attempt=9)
    found = unpack([later, broken, mislabelled, good])
    assert found.records == tuple(told.records)
    assert [text.split(" of ")[0] for text in found.problems] == [
        "decision 1", "incident 1", "decision 1",
    ]  # fmt: skip
    assert "format 2; this everstep knows 1" in found.problems[0]


def test_every_decision_tells_the_limits_that_it_was_made_by() -> None:
    mine = Limits(window_restarts=7, per_fingerprint=None, max_restarts=4)
    told = agent()
    told.policy = Policy(limits=mine)
    assert last_limits(told.history()) is None
    told.start()
    assert last_limits(told.history()) == mine
    told.fails(UNKNOWN)
    told.falls()
    assert told.last is not None
    assert told.last.limits == mine
    found = unpack([pack(record) for record in told.records]).records
    assert last_limits(fold(found)) == mine
    told.policy = Policy()
    told.fails(UNKNOWN)
    assert last_limits(told.history()) == Limits()


def test_evidence_is_cut_to_what_a_record_may_have() -> None:
    told = agent()
    told.start()
    line = Evidence("x" * 10_000 + "\udcff", "log", role="root", why="w\udc80")
    large = verdict(EXCEPTION, evidence=(line,) * 90, discarded=(line,) * 90, message="\udcff")
    entry = pack(told.incident(large))
    assert len(entry.body) <= BODY_BYTES
    found = unpack([entry]).records[0]
    assert found.verdict.evidence  # type: ignore[union-attr]
    assert found.verdict.fault == EXCEPTION.fault  # type: ignore[union-attr]
    many = msgspec.structs.replace(told.incident(EXCEPTION), nodes={"n" * 40: (1,)})
    assert len(pack(many).body) <= BODY_BYTES


def test_time_between_boots_is_the_wall_clock_and_never_runs_back() -> None:
    def at(place: int, wall: float, mono: float, boot: str) -> WordRecord:
        return WordRecord("on-fault", place, Stamp("a", wall, mono, boot), 1)

    told = fold(
        [
            at(1, 5000.0, 10.0, "x"),
            at(2, 9e9, 20.0, "x"),
            at(3, 5100.0, 7.0, "y"),
            at(4, 4000.0, 9.0, "z"),
            at(5, 0.0, 17.0, "y"),
            at(6, float("nan"), 1.0, "w"),
            at(7, 5001.0, 25.0, "x"),
            at(8, 4000.0, 30.0, "z"),
        ]
    )
    times = [time for time, _ in told.records]
    assert times == [0.0, 10.0, 100.0, 100.0, 110.0, 110.0, 110.0, 121.0]


def test_a_situation_without_names_of_nodes_works() -> None:
    """One node under a name that nobody told."""
    told = Agent(situation=Situation())
    assert told.fails(TIMEOUT).action == "restart_in_place"
    assert told.fails(TIMEOUT).action == "restart_in_place"
    assert told.fails(TIMEOUT).stops


def test_soft_faults_stay_in_place() -> None:
    assert agent().fails(SOFT).rung.nodes == FOUR


def test_respond_and_begin_leave_their_arguments_alone() -> None:
    told = agent()
    told.start()
    records, stamp = tuple(told.records), told.stamp()
    respond(records, told.incident(GPU), Situation(FOUR, highest_claim=1), Policy(), stamp)
    begin(records, Situation(FOUR, highest_claim=1), Policy(), stamp)
    assert records == tuple(told.records)
    assert isinstance(records[0], DecisionRecord)
    assert isinstance(records[0].rung, Rung)


def test_a_roll_back_is_not_made_again_for_a_target_that_has_only_grown_older() -> None:
    """What was sound is healthy two seconds later, and a newer one may be: the attempt that went
    on from it is left alone. An older target moves it."""
    young = [RecoveryPoint(Point(step, 1), sound=True) for step in (4, 6)]
    for aged, action in (((4, 6), "continue"), ((4, 6, 8), "continue"), ((4,), "rollback")):
        told = agent(checkpoints=tuple(young))
        told.start()
        first = told.fails(NAN, closed=False)
        assert (first.action, first.rung.recovery) == ("rollback", young[1])
        told.situation = msgspec.structs.replace(told.situation, checkpoints=points(*aged))
        assert late(told, NAN).action == action
