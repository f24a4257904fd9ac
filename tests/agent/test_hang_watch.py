"""The watch of one node: what it reads, says and keeps; and what nodes tell each other."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import pytest
from forked import wait_for
from torch.distributed import HashStore

from everstep.agent.hang import Hang, HangWatch, Patience
from everstep.agent.record import Recorder
from everstep.agent.rendezvous import Round
from everstep.agent.standings import Standings, decoded
from everstep.agent.watch.flight import Flight
from everstep.agent.watch.stacks import Sample, Stacks
from everstep.agent.watch.steps import Steps, heartbeats
from everstep.core.events import Event, decode_line
from everstep.core.settings import from_environment
from everstep.errors import UsageError
from everstep.faults.catalog import load
from everstep.faults.hang import HangPolicy, Look, RankBeat, Standing
from everstep.faults.records import Incident, Signal
from everstep.faults.scene import scene_of

STUCK = RankBeat(1, 49, "step", 0.0, 100.0, steps=50, longest=0.1)


class Node:
    """The ranks of a node as a test wants them, for the three sources that are asked."""

    def __init__(self) -> None:
        self.beats: tuple[RankBeat, ...] = (replace(STUCK, rank=0), STUCK)
        self.fails = False
        self.turn = 0

    def read(self) -> tuple[RankBeat, ...]:
        return self.beats

    def look(self) -> Sample:
        if self.fails:
            raise RuntimeError("no stacks today")
        self.turn += 1
        looks = (Look(0, ("all_reduce",), True), Look(1, ("get",), where="train.py:7 next_batch"))
        signals = tuple(Signal("stack", "...", rank=rank) for rank in range(2))
        return Sample(float(self.turn), looks, signals)

    def dump(self, deadline: float) -> list[Signal]:
        return [Signal("agent", f"by {deadline:.0f}")]


class Watched:
    """A watch over a :class:`Node`, at times that the test gives."""

    def __init__(self, path: Path, policy: HangPolicy, patience: Patience | None = None) -> None:
        self.node = Node()
        self.now = 100.0
        self._path = path / "events"
        self.watch = HangWatch(
            steps=cast(Steps, self.node), stacks=cast(Stacks, self.node),
            flight=cast(Flight, self.node), policy=policy, patience=patience or Patience(),
            record=Recorder("job", str(self._path), stream=io.StringIO()), began=100.0,
            clock=lambda: self.now,
        )  # fmt: skip

    def go_on(self, seconds: float) -> Hang | None:
        """So much later; a look that has begun is done."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.watch.due)
            looks = self.node.turn
            if found := self.watch.look(self.now):
                return found
            busy = self.watch.due - self.now < 0.09
            if busy and not self.node.fails:
                wait_for(lambda looks=looks: self.node.turn > looks)  # type: ignore[misc]
        return None

    def said(self, kind: str) -> list[Event]:
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        return [event for line in lines if (event := decode_line(line)).kind == kind]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path, HangPolicy(floor=30.0))


def test_a_hang_is_said_with_the_frame_that_it_stands_in_and_its_evidence_kept(
    watched: Watched,
) -> None:
    found = watched.go_on(40.0)
    assert found is not None
    assert found.culprits == (1,)
    assert "rank 1 in train.py:7 next_batch" in found.reason
    assert 30.0 <= found.age < 33.0
    assert watched.watch.standing.still
    (suspected,) = watched.said("hang.suspected")
    assert suspected.facts["ranks"] == [0, 1]
    watched.watch.gather(watched.now)
    kinds = [signal.source for signal in watched.watch.evidence]
    assert kinds == ["heartbeat"] * 2 + ["stack"] * 4 + ["agent"]
    watched.watch.stop()
    assert math.isinf(watched.watch.due)


def test_steps_that_go_on_clear_a_suspicion(watched: Watched) -> None:
    assert watched.go_on(25.0) is None
    watched.node.beats = (replace(STUCK, boundary_at=watched.now),)
    assert watched.go_on(2.0) is None
    assert len(watched.said("hang.cleared")) == 1
    assert watched.watch.standing == Standing(moving=49)


def test_evidence_is_taken_for_a_hang_that_another_node_has_found(watched: Watched) -> None:
    watched.watch.gather(100.0)
    assert watched.said("hang.evidence")[0].facts["stacks"] == [0, 0, 1, 1]


def test_a_look_that_fails_harms_nobody_and_is_said(watched: Watched) -> None:
    watched.node.fails = True
    assert watched.go_on(17.0) is None
    wait_for(lambda: watched.go_on(0.2) is None and watched.said("hang.unseen"))
    assert "no stacks today" in watched.said("hang.unseen")[0].text


@pytest.mark.parametrize(
    ("beats", "why"),
    [((), "no control page"), ((RankBeat(0, -1, "", 0.0, 0.0),), "no rank has attached")],
)
def test_what_cannot_be_seen_is_said_once_and_never_judged(
    watched: Watched, beats: tuple[RankBeat, ...], why: str
) -> None:
    """F5: a blind watcher is not healthy, and it is no hang."""
    watched.node.beats = beats
    assert watched.go_on(3000.0) is None
    (blind,) = watched.said("hang.blind")
    assert why in blind.text
    assert [signal.source for signal in watched.watch.evidence] == ["agent"]


def test_the_floor_is_what_a_restart_takes_unless_it_is_given() -> None:
    patience = Patience()
    assert patience.policy(0.0).floor == 30.0
    patience = patience.after(hung=False, step=5, resume=90.0)
    assert patience.policy(0.0).floor == 90.0
    assert patience.policy(10.0).floor == 10.0
    assert patience.policy(from_environment({"EVERSTEP_HANG_FLOOR": "off"}).hang_floor).floor > 1e9
    assert from_environment({"EVERSTEP_HANG_FLOOR": "2min"}).hang_floor == 120.0
    with pytest.raises(UsageError, match="EVERSTEP_HANG_FLOOR"):
        from_environment({"EVERSTEP_HANG_FLOOR": "soon"})


def test_what_was_ended_at_a_step_is_waited_for_longer_there(tmp_path: Path) -> None:
    """An evaluation that stands still by right, in one call of somebody's program, gets through."""
    policy = HangPolicy(floor=30.0)
    once = Patience().after(hung=True, step=49, resume=0.0)
    twice = once.after(hung=True, step=49, resume=0.0)
    assert [p.at(policy, 49).floor for p in (Patience(), once, twice)] == [30.0, 120.0, 480.0]
    assert once.at(policy, 50).floor == 30.0
    assert once.after(hung=True, step=60, resume=0.0).at(policy, 60).floor == 120.0
    watched = Watched(tmp_path, policy, once)
    assert watched.go_on(110.0) is None
    assert watched.go_on(15.0) is not None


def test_heartbeats_are_of_the_form_that_is_judged() -> None:
    beats = [STUCK, replace(STUCK, rank=2, phase="my evaluation", phase_since=130.0)]
    signals = heartbeats(beats, 190.0, 90.0, {1: True})
    scene = scene_of(Incident("a", tuple(signals), nodes={"here": (1, 2)}), load())
    read = [(beat.rank, beat.step, beat.phase, beat.age) for beat in scene.beats]
    assert read == [(1, 49, "step:collective", 90.0), (2, 49, "my_evaluation", 60.0)]
    assert scene.boundaries == {1: 0.0, 2: 0.0}, "the phase since then is no step"


# -- nodes


def rounds(nodes: int) -> list[Round]:
    store = HashStore()
    return [Round(store, node, nodes, "localhost", 1) for node in range(nodes)]


def test_nodes_hear_of_each_other_through_the_leader() -> None:
    each = rounds(3)
    known = [Standings(round_) for round_ in each]
    still, excused = Standing(still=True), Standing(excused=True)
    for round_, standings, own in zip(each, known, (still, excused, still), strict=True):
        standings.tell(own)
        round_.say_alive(1)
    known[1].exchange(1.0, suspects=True)
    assert known[1].others() == (Standing(), Standing()), "nothing was told yet"
    known[0].exchange(2.0, suspects=True)
    assert known[0].others() == (excused, still)
    known[1].exchange(3.0, suspects=True)
    assert known[1].others() == (still, still)
    known[2].exchange(4.0, suspects=True)
    assert known[2].others() == (Standing(), Standing()), "told before it began to suspect"
    known[0].exchange(5.0, suspects=False)
    known[2].exchange(6.0, suspects=True)
    assert known[2].others() == (still, excused)
    known[2].exchange(7.0, suspects=False)
    assert known[2].others() == (Standing(), Standing())


def test_a_sign_of_life_carries_the_standing_and_is_one_without_it() -> None:
    leader, other = rounds(2)
    other.say_alive(3)
    assert leader.standings() == {1: ""}
    assert decoded("") == decoded("no JSON") == Standing()
    other.standing = msgspec.json.encode(Standing(moving=7)).decode()
    other.say_alive(4)
    assert decoded(leader.standings()[1]) == Standing(moving=7)


@pytest.mark.parametrize("hangs", [True, False])
def test_a_failure_says_whether_it_is_a_hang(hangs: bool) -> None:
    leader, other = rounds(2)
    assert not leader.failed()
    other.say_failed(hangs=hangs)
    assert leader.failed()
    assert leader.hangs() == hangs
