"""The texts: three lines that tell it all, and the rest in a fixed order."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from histories import World, draw_history
from told import EXCEPTION, FOUR, GPU, UNKNOWN, Agent, verdict

from everstep.faults.fold import fold
from everstep.faults.history import AttemptFacts, Cause, ProgressRecord, next_sequence
from everstep.faults.records import Action, Evidence
from everstep.faults.situation import Situation, waiting
from everstep.faults.standing import Present, standing
from everstep.faults.tell import ACTIONS, CAUSES, Explanation, explain, newest, ranks, root_of, rows
from everstep.faults.words import needless, nodes_of, odd_node

TITLES = ["seen", "verdict", "discarded", "decided", "otherwise", "done", "ended", "budget"]


def told(agent: Agent, name: str = "i1") -> Explanation:
    found = explain(agent.history(), name)
    assert found is not None
    return found


def lines(found: Explanation, title: str) -> list[str]:
    return next(list(s.lines) for s in found.sections if s.title == title)


def test_three_lines_say_what_failed_what_was_decided_and_how_it_ended() -> None:
    agent = Agent(situation=Situation(FOUR, spares=("e",)))
    agent.fails(GPU)
    what, decided, ended = told(agent).headline
    assert what == "XID_79 on rank 2 on node b at step 10 (fell off the bus), attempt 1"
    assert decided.startswith("decided: restart on other nodes as attempt 2, because ")
    assert ended == "open: step 10, which would prove it, is not committed yet"
    assert [section.title for section in told(agent).sections] == TITLES
    assert "no work any more for: b" in "\n".join(lines(told(agent), "decided"))


def test_evidence_stands_in_the_order_of_time_with_rank_and_node() -> None:
    late = Evidence("late", "log", "A", "victim", 3, "b", 9.5)
    early = Evidence("early\n  line", "kernel", "B", "root", None, "a", 2.0, "kind before time")
    timeless = Evidence("whenever", "agent")
    agent = Agent()
    agent.fails(verdict(GPU, evidence=(late, timeless, early), discarded=(late,)))
    assert lines(told(agent), "seen") == [
        "    2.00 s  a  [kernel] early line  (kind before time)",
        "    9.50 s  rank 3 on b  [log] late  (victim: A)",
        "         ?  -  [agent] whenever  (noise)",
    ]
    assert lines(told(agent), "discarded") == ["    9.50 s  rank 3 on b  [log] late  (victim: A)"]


def test_spares_that_are_not_known_by_name_are_agents_that_wait() -> None:
    for count, text in ((1, "an agent that waits"), (2, "2 agents that wait")):
        agent = Agent(situation=Situation(("a", "b"), spares=waiting(count)))
        agent.fails(UNKNOWN)
        assert agent.last is not None
        nodes = ("a", *waiting(count))
        moved = msgspec.structs.replace(
            agent.last, rung=msgspec.structs.replace(agent.last.rung, nodes=nodes)
        )
        agent.records[-1] = moved
        decided = lines(told(agent), "decided")
        assert f"  nodes: a, {text}" in decided
        assert "(waiting" not in "\n".join(decided)


def test_what_else_was_possible_is_said_with_its_reason() -> None:
    agent = Agent()
    agent.fails(UNKNOWN)
    decision = agent.last
    assert decision is not None
    assert len(lines(told(agent), "otherwise")) == len(decision.alternatives) + len(decision.ladder)
    assert all(f": {a.why_not}" in "\n".join(lines(told(agent), "otherwise"))
               for a in decision.alternatives)  # fmt: skip


def test_a_stop_says_how_to_go_on() -> None:
    agent = Agent()
    agent.fails(EXCEPTION)
    agent.fails(EXCEPTION)
    found = told(agent, "i2")
    assert found.headline[1].startswith("decided: stop with exit code 94, because the same failure")
    assert "everstep retry --reset-budget" in lines(found, "ended")[-1]
    assert "Guard the division." in lines(found, "verdict")[-1]


def test_every_action_and_cause_has_words() -> None:
    assert set(ACTIONS) == set(get_args(Action))
    assert set(CAUSES) == set(get_args(Cause))


def test_nobody_is_blamed_in_words_where_nobody_is() -> None:
    assert root_of(UNKNOWN) == "nobody is blamed"
    assert root_of(GPU) == "rank 2 on node b (gpu)"
    assert root_of(verdict(UNKNOWN, root_domain="service")) == "a service"
    assert root_of(verdict(UNKNOWN, root_ranks=(6, 0, 1, 2))) == "ranks 0-2, 6"
    assert ranks([]) == ""


@pytest.mark.parametrize("seed", range(6))
def test_every_history_can_be_told_at_every_moment(seed: int) -> None:
    policy, spares, ops = draw_history(seed)
    world = World(policy, spares)
    world.play(ops)
    for end in range(0, len(world.records) + 1, 8):
        history = fold(world.records[:end])
        shown = rows(history)
        assert (newest(history) is None) == (not shown)
        for row in shown:
            found = explain(history, row.incident, policy.limits)
            assert found is not None
            assert all(found.headline)
            assert all("\n" not in line for line in found.headline)
            assert found.outcome.ending == row.ending
        for owner in ("", "pid 1 on host"):
            now = standing(history, Present(owner, world.claims), policy.limits)
            assert now.why
            assert bool(owner) == (now.state in ("running", "waiting"))
    assert explain(fold(world.records), "no such") is None


# -- where the job stands


def state(agent: Agent, owner: str = "", attempts: int | None = None) -> tuple[str, str, bool]:
    claims = agent.claims if attempts is None else attempts
    found = standing(agent.history(), Present(owner, claims, "--job j"))
    return found.state, found.next.split("  ")[0], found.final


def test_the_state_and_the_next_command() -> None:
    agent = Agent()
    assert state(agent) == ("never run", "everstep run --job j ...", False)
    agent.start()
    assert state(agent, "pid 1") == ("running", "", False)
    assert state(agent) == ("stopped", "everstep run --job j ...", False)
    agent.fails(EXCEPTION)
    assert state(agent, "pid 1") == ("running", "", False)
    assert state(agent, "pid 1", attempts=1) == ("waiting", "", False), "it is not claimed yet"
    agent.fails(EXCEPTION)
    retry = 'everstep retry --reset-budget "what was changed" --job j'
    assert state(agent) == ("stopped", retry, True)
    agent.says("reset-budget", reason="fixed")
    assert state(agent) == ("stopped", "everstep run --job j ...", False)


def test_a_wait_says_how_long() -> None:
    agent = Agent()
    throttled = verdict(UNKNOWN, fault="OBJ_THROTTLE", action="wait_and_retry")
    delay = agent.fails(throttled).rung.delay
    agent.now += 10.0
    found = standing(agent.history(), Present("pid 1", 1))
    assert found.state == "waiting"
    assert f"attempt 2 begins in {delay - 10.0:.0f} s" in found.why


def test_a_finished_job_is_told_from_one_that_was_stopped() -> None:
    for finished, wanted in ((True, "finished"), (False, "stopped")):
        agent = Agent()
        agent.start()
        record = ProgressRecord(
            1, agent.stamp(), AttemptFacts(), next_sequence(agent.records, 1), ended="it ended",
            finished=finished,
        )  # fmt: skip
        agent.records.append(record)
        assert state(agent)[0] == wanted
        assert standing(agent.history(), Present("", 1)).why == "it ended"


def test_excluded_nodes_are_listed_until_they_may_return() -> None:
    agent = Agent()
    agent.says("exclude", "a", "loose cable")
    (found,) = standing(agent.history(), Present()).excluded
    assert (found.node, found.why, found.seconds_left) == ("a", "loose cable", None)
    agent.says("pardon", "a")
    assert standing(agent.history(), Present()).excluded == ()


# -- words


def test_a_word_that_changes_nothing_is_not_needed() -> None:
    agent = Agent(situation=Situation(FOUR, spares=("e",)))
    assert needless(agent.history(), "reset-budget", "") == "nothing of the budgets is spent"
    assert needless(agent.history(), "pardon", "a") == "nothing is held against node a"
    agent.fails(GPU)
    assert needless(agent.history(), "reset-budget", "") == ""
    assert needless(agent.history(), "pardon", "b") == ""
    assert needless(agent.history(), "exclude", "b") == "", "until then it would return by itself"
    for word, subject in (("exclude", "b"), ("on-fault", "advise"), ("reset-budget", "")):
        assert needless(agent.history(), word, subject) == ""  # type: ignore[arg-type]
        agent.says(word, subject)  # type: ignore[arg-type]
        assert needless(agent.history(), word, subject) != ""  # type: ignore[arg-type]
    agent.says("pardon", "b")
    assert needless(agent.history(), "pardon", "b") == "node b is pardoned already"
    agent.fails(GPU)
    assert needless(agent.history(), "reset-budget", "") == ""


def test_a_node_that_nobody_named_is_odd() -> None:
    agent = Agent()
    assert "no record of the job names its nodes" in odd_node(agent.history(), "q")
    agent.fails(GPU)
    assert nodes_of(agent.history()) == list(FOUR)
    assert odd_node(agent.history(), "a") == ""
    assert odd_node(agent.history(), "q").endswith("known are: a, b, c, d")
