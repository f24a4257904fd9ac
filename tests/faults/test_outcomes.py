"""Success: the first newly committed step past the failing one, within 30 minutes, no human."""

from __future__ import annotations

import random

import msgspec
import pytest
from histories import World, draw_history
from told import EXCEPTION, GPU, TIMEOUT, UNKNOWN, Agent, verdict

from everstep.core import exits
from everstep.faults.fold import fold
from everstep.faults.history import (
    AttemptFacts,
    IncidentRecord,
    LastWord,
    ProgressRecord,
    Record,
    ResultRecord,
    WordRecord,
    next_sequence,
)
from everstep.faults.limits import Limits
from everstep.faults.outcomes import RESUME_WITHIN, Ending, Outcome, outcomes, seconds
from everstep.faults.situation import Policy

AFTER = AttemptFacts(restored=9, reached=20, finished=20, committed=15)


def one(agent: Agent, name: str = "i1", after: float = 0.0) -> Outcome:
    found = outcomes(agent.history(after)).of(name)
    assert found is not None
    return found


def tells(agent: Agent, facts: AttemptFacts, after: float = 10.0, **more: object) -> None:
    """A progress record of the attempt that runs."""
    agent.now += after
    record = ProgressRecord(agent.claims, agent.stamp(), facts)
    place = next_sequence(agent.records, agent.claims)
    agent.records.append(msgspec.structs.replace(record, sequence=place, **more))


def failed_once(of: object = GPU) -> Agent:
    agent = Agent()
    agent.fails(of)  # type: ignore[arg-type]
    return agent


def test_a_new_commit_past_the_failing_step_is_success() -> None:
    agent = failed_once()
    assert one(agent).ending == "open"
    tells(agent, msgspec.structs.replace(AFTER, committed=9))
    assert one(agent).ending == "open", "it is not got past by the step before it"
    tells(agent, msgspec.structs.replace(AFTER, committed=10))
    found = one(agent)
    assert (found.ending, found.committed_in, found.human) == ("recovered", 20.0, False)


def test_what_was_committed_before_or_is_not_known_to_be_is_no_success() -> None:
    agent = Agent()
    agent.fails(GPU, facts=AttemptFacts(restored=0, reached=20, finished=20, committed=18))
    for old in (18, 20):
        tells(agent, msgspec.structs.replace(AFTER, committed=old))
        assert one(agent).ending == "open", "the attempt that failed at 10 had come to 20"
    tells(agent, msgspec.structs.replace(AFTER, committed=30, offline=True))
    assert one(agent).ending == "open", "the store could not be asked"


def test_what_the_keeper_commits_of_the_failed_attempt_is_no_recovery() -> None:
    agent = failed_once()
    late = ProgressRecord(1, agent.stamp(), AFTER, next_sequence(agent.records, 1))
    agent.records.append(late)
    assert one(agent).ending == "open"


def test_an_attempt_that_goes_on_recovers_by_its_own_commit() -> None:
    agent = Agent()
    agent.start()
    agent.tells(agent.incident(TIMEOUT, fatal=False))
    tells(agent, AFTER)
    assert one(agent).ending == "recovered"


def test_half_an_hour_is_the_limit() -> None:
    agent = failed_once()
    assert one(agent, after=RESUME_WITHIN).ending == "open"
    assert one(agent, after=1.0).ending == "failed"
    tells(agent, AFTER)
    found = one(agent)
    assert (found.ending, found.why) == ("failed", "step 10 was committed after 30 minutes")


@pytest.mark.parametrize("word", ["reset-budget", "exclude", "pardon"])
def test_a_person_who_spoke_before_it_makes_it_no_success(word: str) -> None:
    agent = failed_once()
    agent.says(word, "b")  # type: ignore[arg-type]
    tells(agent, AFTER)
    assert (one(agent).ending, one(agent).human) == ("failed", True)


def test_a_person_who_spoke_after_it_changes_nothing() -> None:
    agent = failed_once()
    tells(agent, AFTER)
    agent.says("exclude", "b")
    assert (one(agent).ending, one(agent).human) == ("recovered", False)
    told = failed_once()
    told.says("on-fault", "advise")  # a flag that each start of the job may give
    tells(told, AFTER)
    assert one(told).ending == "recovered"


def test_a_deterministic_error_that_stops_the_job_is_meant_to_f4() -> None:
    """F4: neither it nor the retry that confirmed it counts against the rate."""
    agent = failed_once(EXCEPTION)
    assert agent.fails(EXCEPTION).exit_code == exits.REPEATED
    found = outcomes(agent.history())
    assert [item.ending for item in found.each] == ["stopped", "stopped"]
    assert (found.figures.rate, found.figures.stopped) == (None, 2)
    agent.says("reset-budget", reason="fixed")
    agent.start()
    tells(agent, AFTER)
    assert [i.ending for i in outcomes(agent.history()).each] == ["stopped", "stopped"]


def test_an_error_of_the_program_that_went_away_is_recovered() -> None:
    agent = failed_once(EXCEPTION)
    tells(agent, AFTER)
    agent.fails(verdict(EXCEPTION, step=16), facts=AFTER)
    assert one(agent).ending == "recovered"


def test_a_spent_budget_is_a_failure() -> None:
    agent = Agent(policy=Policy(limits=Limits(same_step=99)))
    agent.fails(UNKNOWN)
    while not (agent.last is not None and agent.last.stops):
        agent.fails(UNKNOWN)
    found = outcomes(agent.history())
    assert {item.ending for item in found.each} == {"failed"}
    assert found.figures.rate == 0.0


def test_an_incident_that_another_failure_cuts_short_is_a_failure() -> None:
    agent = failed_once(GPU)
    agent.fails(EXCEPTION)
    assert agent.fails(EXCEPTION).stops
    assert one(agent).ending == "failed"
    assert "stopped for USER_EXCEPTION" in one(agent).why


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        (exits.PREEMPTED, "stopped"),
        (exits.REFUSED, "stopped"),
        (exits.NO_RECOVERY_POINT, "failed"),
        (exits.NOT_DURABLE, "failed"),
    ],
)
def test_a_last_word_is_meant_unless_it_tells_of_lost_work(code: int, ending: Ending) -> None:
    agent = Agent()
    agent.fails(UNKNOWN, last_word=LastWord(code, "said so"))
    assert (one(agent).ending, one(agent).why) == (ending, "said so")


def test_a_person_who_ends_the_job_leaves_no_failure_behind() -> None:
    agent = failed_once()
    tells(agent, msgspec.structs.replace(AFTER, committed=-1), ended="stopped by SIGTERM")
    assert one(agent).ending == "stopped"
    again = failed_once()
    tells(again, AFTER)
    tells(again, AFTER, after=9999.0, ended="stopped by SIGTERM")
    assert one(again).ending == "recovered", "it had recovered long before"


def test_a_job_that_is_taken_away_may_still_recover() -> None:
    """The scheduler that takes it gives it back: no human."""
    taken: dict[str, object] = {"ended": "stopped by SIGTERM", "cause": "external"}
    agent = failed_once()
    tells(agent, msgspec.structs.replace(AFTER, committed=-1), **taken)
    assert one(agent).ending == "stopped"
    agent.start()
    tells(agent, AFTER)
    assert one(agent).ending == "recovered"
    late = failed_once()
    tells(late, msgspec.structs.replace(AFTER, committed=-1), **taken)
    late.now += 5 * 3600.0
    late.start()
    tells(late, AFTER)
    assert one(late).ending == "stopped", "it waited in a queue"


def test_a_job_that_finished_is_past_every_step() -> None:
    agent = failed_once()
    facts = msgspec.structs.replace(AFTER, committed=-1)
    tells(agent, facts, ended="all workers ended with exit code 0", finished=True)
    assert one(agent).ending == "recovered"


def test_a_result_gives_the_times_that_were_measured() -> None:
    agent = failed_once()
    agent.now += 500.0  # when it was written down says nothing
    result = ResultRecord(
        "r", "i1", 2, agent.stamp(), next_sequence(agent.records, 2), True, 0.1, 0.2, 0.3, 2.0, 0.4,
        1.0, 6.0, 11, 4, "memory",
    )  # fmt: skip
    agent.records.append(result)
    found = one(agent)
    assert found.resumed_in == pytest.approx(4.0)
    assert found.committed_in == pytest.approx(10.0)
    assert (found.new_step, found.repeated, found.tier) == (11, 4, "memory")
    assert seconds(msgspec.structs.replace(result, first_step=None)) is None
    figures = outcomes(agent.history()).figures
    assert figures.mean_resume == figures.median_resume == pytest.approx(4.0)
    assert (figures.rate, figures.repeated) == (1.0, 4)


def test_figures_are_given_by_class() -> None:
    agent = failed_once(GPU)
    tells(agent, AFTER)
    agent.fails(TIMEOUT, facts=AFTER)
    found = outcomes(agent.history())
    assert {name: (f.recovered, f.open) for name, f in found.by_class.items()} == {
        "XID_79": (1, 0), "NCCL_WATCHDOG_TIMEOUT": (0, 1),
    }  # fmt: skip


# -- properties, over the histories that the budgets are tested with


def lived(seed: int) -> World:
    policy, spares, ops = draw_history(seed)
    world = World(policy, spares)
    world.play(ops)
    return world


@pytest.mark.parametrize("seed", range(16))
def test_every_incident_has_one_outcome_whatever_the_order(seed: int) -> None:
    world = lived(seed)
    found = outcomes(fold(world.records, highest_claim=world.claims))
    ids = {r.id for r in world.records if isinstance(r, IncidentRecord)}
    assert sorted(item.incident for item in found.each) == sorted(ids)
    total = found.figures
    assert total.incidents == total.recovered + total.failed + total.stopped + total.open
    assert total.incidents == sum(f.incidents for f in found.by_class.values())
    draw = random.Random(seed)
    shuffled = draw.sample(world.records, len(world.records)) + draw.sample(world.records, 3)
    assert outcomes(fold(shuffled, highest_claim=world.claims)) == found


@pytest.mark.parametrize("seed", range(16))
def test_nothing_is_called_recovered_that_was_not(seed: int) -> None:
    """Against what really happened: some later attempt committed a step past the failing one."""
    world = lived(seed)
    lives = [end for _, ended in world.segments for end in ended]
    for item in outcomes(fold(world.records, highest_claim=world.claims)).each:
        if item.ending == "recovered":
            where = next(r.where for r in world.records if _known_last(r, item, world.records))
            later = [end for end in lives if end.attempt > item.attempt]
            assert any(end.committed >= where for end in later), item


@pytest.mark.parametrize("seed", range(8))
def test_a_word_after_every_incident_leaves_nothing_recovered(seed: int) -> None:
    records: list[Record] = []
    for record in lived(seed).records:
        records.append(record)
        if isinstance(record, IncidentRecord):
            word = WordRecord(
                "pardon", record.attempt, record.at, record.sequence, "n", by=record.id
            )
            records.append(word)
    found = outcomes(fold(records))
    between = {"recovered"} & {item.ending for item in found.each if item.human}
    assert not between


def _known_last(record: Record, item: Outcome, records: list[Record]) -> bool:
    if not isinstance(record, IncidentRecord) or record.id != item.incident:
        return False
    same = [r for r in records if isinstance(r, IncidentRecord) and r.id == item.incident]
    return record == max(same, key=lambda r: r.revision)
