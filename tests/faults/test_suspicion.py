"""Which nodes are trusted: blame, decay, exclusion, probation, caps, pods (F1, F2)."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from told import EXCEPTION, FOUR, GPU, NAN, SOFT, UNKNOWN, Agent, verdict

from everstep.faults.fold import Life
from everstep.faults.history import ResultRecord
from everstep.faults.records import Verdict
from everstep.faults.situation import Situation
from everstep.faults.suspicion import (
    Rules,
    Standing,
    blamed_pods,
    blames,
    excluded,
    may_exclude,
    standings,
)

DAY = 24 * 3600.0
RULES = Rules()


def agent(spares: tuple[str, ...] = ("s1", "s2"), **pods: str) -> Agent:
    return Agent(situation=Situation(FOUR, spares), pods=pods)


def of(told: Agent, node: str = "b", after: float = 0.0) -> Standing:
    return standings(told.history(after), RULES).get(node, Standing(node))


def test_a_node_that_is_blamed_is_left_out_and_a_spare_takes_its_place() -> None:
    told = agent()
    decision = told.fails(GPU)
    assert (decision.action, decision.excluded) == ("restart_elsewhere", ("b",))
    assert decision.rung.nodes == ("a", "s1", "c", "d")
    assert of(told).state == "excluded"
    assert "XID_79" in of(told).why


@pytest.mark.parametrize(
    "innocent",
    [
        pytest.param(verdict(EXCEPTION, root_node="b"), id="the program's error"),
        pytest.param(verdict(GPU, confidence=0.3), id="F1: a guess"),
        pytest.param(verdict(GPU, root_node=None), id="F1: nobody named"),
        pytest.param(UNKNOWN, id="F1: unknown"),
        pytest.param(
            Verdict("GLOO_CONN_CLOSED", "communication", "restart_in_place", victim_ranks=(1,),
                    confidence=0.9), id="F2: victims",
        ),
        pytest.param(
            Verdict("API_EVICT_DRAIN", "scheduler", "restart_elsewhere", (1,), "b",
                    confidence=0.95), id="taken from outside",
        ),
        pytest.param(verdict(NAN), id="a value that is not finite, before it is replayed"),
    ],
)  # fmt: skip
def test_f1_f2_no_node_is_charged(innocent: Verdict) -> None:
    told = agent()
    decision = told.fails(innocent)
    assert decision.excluded == ()
    assert blames(told.history(), RULES) == []
    assert excluded(standings(told.history(), RULES)) == set()


def test_a_drained_node_is_avoided_and_not_suspected() -> None:
    told = agent()
    drained = Verdict("API_EVICT_DRAIN", "scheduler", "restart_elsewhere", (1,), "b")
    decision = told.fails(drained)
    assert (decision.avoided, decision.excluded) == (("b",), ())
    assert "b" not in decision.rung.nodes
    assert of(told).state == "trusted"


def test_blame_decays_by_half_a_day_and_adds_up() -> None:
    told = agent()
    told.fails(SOFT)
    assert (of(told).score, of(told).state) == (0.5, "suspect")
    assert of(told, after=DAY).score == pytest.approx(0.25)
    assert of(told, after=30 * DAY).state == "trusted"
    assert of(told).score < 0.01


def test_what_can_be_survived_in_place_excludes_the_second_time_soon() -> None:
    told = agent()
    assert told.fails(SOFT).action == "restart_in_place"
    second = told.fails(verdict(SOFT, step=500), after=60.0)
    assert (second.action, second.excluded) == ("restart_elsewhere", ("b",))
    late = agent()
    late.fails(SOFT)
    assert late.fails(verdict(SOFT, step=500), after=10 * DAY).excluded == ()


def test_probation_after_the_return_forgives_nothing_and_then_ends() -> None:
    told = agent()
    told.fails(GPU)
    assert of(told, after=DAY - 1).state == "excluded"
    assert of(told, after=2).state == "probation"
    assert of(told, after=12 * 3600.0).state != "probation"
    back = agent()
    back.fails(GPU)
    back.now += DAY + 11 * 3600.0  # its old blame alone would not do
    back.situation = Situation(FOUR, ("s1", "s2"))  # it is back, in its old place
    again = back.fails(verdict(SOFT, step=900), after=60.0)
    assert again.excluded == ("b",), "one soft failure is enough now"
    standing = of(back)
    assert standing.exclusions == 2
    assert standing.until - back.history().now == pytest.approx(2 * DAY), "and for twice as long"
    trusted = agent()
    trusted.fails(GPU)
    trusted.now += DAY + 13 * 3600.0
    trusted.situation = Situation(FOUR, ("s1", "s2"))
    assert trusted.fails(verdict(SOFT, step=900), after=60.0).excluded == ()


def test_an_operator_excludes_and_pardons() -> None:
    told = agent()
    told.start()
    told.says("exclude", "c", "smells burnt")
    assert of(told, "c", after=365 * DAY).state == "excluded", "it has no end"
    assert of(told, "c").why == "smells burnt"
    assert told.fails(EXCEPTION).rung.nodes == ("a", "b", "s1", "d")
    told.says("pardon", "c", "repaired")
    assert of(told, "c").state == "probation"
    assert of(told, "c", after=DAY).state == "trusted"
    assert of(told, "c").score == 0.0


def test_a_pardon_wipes_earlier_blame() -> None:
    told = agent()
    told.fails(SOFT)
    told.says("pardon", "b")
    assert of(told).score == 0.0


def test_several_nodes_of_one_pod_within_ten_minutes_blame_the_pod() -> None:
    """Not the nodes: the first one's exclusion is lifted, and the others get none."""
    told = agent(a="p1", b="p1", c="p2", d="p2")
    told.fails(GPU)
    assert of(told, "b").state == "excluded"
    second = told.fails(verdict(GPU, root_node="a", step=11), after=300.0)
    assert second.excluded == ()
    assert any("pod p1" in alert for alert in second.alerts)
    assert blamed_pods(blames(told.history(), RULES), RULES).keys() == {"p1"}
    assert [of(told, node).state for node in "ab"] == ["trusted", "trusted"]


def test_nodes_of_one_pod_with_more_time_between_are_blamed_themselves() -> None:
    told = agent(a="p1", b="p1", c="p2", d="p2")
    told.situation = Situation((*(f"n{i}" for i in range(38)), "a", "b"), ("s1", "s2"))
    told.fails(GPU)
    second = told.fails(verdict(GPU, root_node="a", step=11), after=700.0)
    assert second.excluded == ("a",)
    assert [of(told, node).state for node in "ab"] == ["excluded", "excluded"]


def test_nodes_of_two_pods_are_blamed_themselves() -> None:
    told = agent(a="p1", b="p2")
    told.fails(GPU)
    told.fails(verdict(GPU, root_node="a", step=11), after=60.0)
    assert blamed_pods(blames(told.history(), RULES), RULES) == {}
    assert of(told, "b").state == "excluded"


def test_a_verdict_that_names_the_pod_excludes_no_node() -> None:
    told = agent(a="p1", b="p1", c="p2", d="p2")
    fabric = Verdict(
        "NVSWITCH_FM", "gpu_hardware", "restart_elsewhere", (0, 1), None, "pod", confidence=0.9
    )
    decision = told.fails(fabric)
    assert decision.excluded == ()
    assert set(decision.avoided) == {"a", "b"}
    assert set(decision.rung.nodes) == {"s1", "s2", "c", "d"}


def test_a_late_verdict_takes_blame_back() -> None:
    """Only what is known last of an incident counts."""
    told = agent()
    told.start()
    incident = told.incident(GPU, closed=False)
    told.tells(incident)
    better = told.incident(EXCEPTION, id=incident.id, attempt=1, revision=2)
    told.tells(better)
    assert blames(told.history(), RULES) == []


def test_a_replay_that_differs_makes_the_device_suspect() -> None:
    """And nobody where the verdict named no node (F1)."""
    for node, score in (("a", 0.5), (None, 0.0)):
        told = agent()
        decision = told.fails(verdict(NAN, root_node=node))
        assert decision.replay
        told.records.append(
            ResultRecord("r", decision.incident, 2, told.stamp(), 1, replay_differed=True)
        )
        assert of(told, "a").score == score


@given(st.integers(1, 200), st.integers(0, 200), st.integers(1, 200), st.lists(st.integers(0, 220)))
@example(100, 0, 1, list(range(50)))
@example(100, 4, 1, list(range(50)))
def test_the_cap_on_excluded_nodes_holds(
    count: int, gone: int, least: int, wanted: list[int]
) -> None:
    """At most max(1, 5 %), and never below the job's minimum."""
    known = {f"n{i}" for i in range(count)}
    already = {f"n{i}" for i in range(min(gone, count))}
    found = may_exclude([f"n{i}" for i in wanted if i < count], already, known, least, RULES)
    after = already | set(found.nodes)
    if found.nodes:
        assert len(after) <= max(1, count * 5 // 100)
        assert count - len(after) >= least
    assert set(found.nodes).isdisjoint(already)
    assert bool(found.kept) == bool(found.why_kept)


def test_at_the_cap_the_job_goes_on_in_place_with_an_alert() -> None:
    told = agent(spares=())
    decision = told.fails(GPU)
    assert (decision.action, decision.excluded) == ("restart_in_place", ())
    assert "cannot be" in decision.alerts[0]
    assert "the job needs 4 nodes" in decision.alerts[0]
    assert of(told).state == "suspect"
    two = agent(spares=("s1", "s2"))
    two.fails(GPU)
    second = two.fails(verdict(GPU, root_node="c", step=11), after=60.0)
    assert (second.action, second.excluded) == ("restart_in_place", ())
    assert "1 of 6 nodes are excluded already; at most 1 may be" in second.alerts[0]


def test_a_lost_node_for_which_none_is_there_is_waited_for() -> None:
    told = agent(spares=())
    told.start()
    told.situation = Situation(FOUR, lost=("b",))
    gone = Verdict("NODE_NOT_READY", "host", "restart_elsewhere", (1,), "b", "node", confidence=0.9)
    decision = told.fails(gone)
    assert decision.action == "wait_and_retry"
    assert any("take the place of b" in alert for alert in decision.alerts)


def test_lives_are_told_in_order() -> None:
    told = agent()
    told.fails(SOFT)
    told.fails(verdict(SOFT, step=44), after=3 * DAY)
    lives = [life for life in told.history().events if isinstance(life, Life)]
    assert [life.attempt for life in lives] == [1, 2]
