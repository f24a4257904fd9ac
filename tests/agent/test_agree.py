"""How long the nodes wait for each other after an attempt: as long as an agent lives, no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from torch.distributed import HashStore

from everstep.agent import agree
from everstep.agent.rendezvous import Announcement, NodeEnd, Round, poll
from everstep.errors import RendezvousLost

BEAT = 0.001
DONE = NodeEnd(workers=((0, 0, False),))


def _round_of(nodes: int) -> list[Round]:
    """The same round, as each of its nodes sees it."""
    store = HashStore()
    return [Round(store, node, nodes, "localhost", 1) for node in range(nodes)]


def _clock(each: Callable[[int], object] = lambda _: None) -> Callable[[], float]:
    """A clock that is 10 s further at every look; ``each`` is called with how often it was read."""
    reads = iter(range(10_000))

    def read() -> float:
        nth = next(reads)
        each(nth)
        return nth * 10.0

    return read


def test_node_whose_agent_died_without_a_word_is_lost() -> None:
    leader, other = _round_of(2)
    other.say_alive(1)
    leader.say_ended(DONE)
    ends = agree.gather_ends(leader, clock=_clock(), beat=BEAT)
    assert agree.combine(ends, 2).lost_nodes == (1,)
    assert other.failed(), "those that live must not wait for it"


def test_node_whose_agent_lives_is_waited_for_however_long_its_workers_run() -> None:
    leader, other = _round_of(2)
    leader.say_ended(DONE)

    def live(nth: int) -> None:
        other.say_alive(nth)
        if nth == 50:  # 500 s
            other.say_ended(DONE)

    ends = agree.gather_ends(leader, clock=_clock(live), beat=BEAT)
    assert sorted(ends) == [0, 1]
    assert not leader.failed()


def test_nodes_that_live_are_heard_after_another_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        agree, "ENDS_SECONDS", 50_000.0
    )  # of a clock that is 10 s further each time
    leader, living, dead = _round_of(3)
    leader.say_ended(DONE)

    def live(nth: int) -> None:
        living.say_alive(nth)

    def end_when_told() -> None:
        assert poll(living.failed, 20.0)
        living.say_ended(DONE)

    thread = threading.Thread(target=end_when_told)
    thread.start()
    ends = agree.gather_ends(leader, clock=_clock(live), beat=BEAT)
    thread.join()
    assert sorted(ends) == [0, 1]
    assert dead.failed()


def test_leader_that_shows_no_life_is_not_waited_for() -> None:
    _, other = _round_of(2)
    with pytest.raises(RendezvousLost, match="no life"):
        agree.hear_decision(other, clock=_clock(), beat=BEAT)


def test_verdict_of_a_leader_that_took_its_time_is_heard() -> None:
    leader, other = _round_of(2)

    def live(nth: int) -> None:
        leader.say_alive(nth)
        if nth == 50:
            leader.say_decision(Announcement(0, "the job finished"))

    decision, _ = agree.hear_decision(other, clock=_clock(live), beat=BEAT)
    assert (decision.action, decision.exit_code) == ("stop", 0)


def test_agent_shows_life_while_it_watches_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agree, "BEAT_SECONDS", BEAT)
    one, other = _round_of(2)
    with agree.sign_of_life(one):
        assert poll(lambda: int(other.signs_of_life().get(0, 0)) > 3, 20.0)
    assert poll(lambda: not [t for t in threading.enumerate() if t.name == "everstep-alive"], 20.0)
    assert sorted(other.signs_of_life()) == [0]
