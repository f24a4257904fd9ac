"""Cuts of one rank into real slots, and what a boundary does with them; the keeper is played by
the test, because what it says and when is the case."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from everstep.core.layout import RankState
from everstep.core.settings import Settings
from everstep.errors import (
    CorruptObject,
    KeeperError,
    MemoryTooSmall,
    NotDurable,
    PendingGradients,
    StateMismatch,
)
from everstep.keeper.client import Grant
from everstep.keeper.slot import PAGE, Geometry, Slot, create
from everstep.keeper.wire import CutDone, Elected, SlotName
from everstep.train import session as session_room
from everstep.train.boundary import Boundary, Preempted
from everstep.train.cut import Cutter
from everstep.train.finite import Finite
from everstep.train.options import Options
from everstep.train.phases import Phases
from everstep.train.place import Place
from everstep.train.restore import Restorer
from everstep.train.session import Session
from everstep.train.sources import MemorySource

ONE = Place(0, 1, 0, 0, ((0,),), "launch")


class Keeper:
    """What the training side sees of a keeper: slots, the page's words, answers."""

    attempt = 1

    def __init__(self, room: int | None = None) -> None:
        self.room = room
        self.opened: list[Geometry] = []
        self.done: list[CutDone] = []
        self.skipped: list[tuple[int, str]] = []
        self.failed: list[tuple[int, str]] = []
        self.said: list[str] = []
        self.preempted = 0
        self.cut = (0, 0)
        self.stop = (False, 0, False)
        self.demotions: tuple[str, ...] = ()
        self.durable: list[str | None] = []
        self.away = 0
        self.met = 1
        self.link = self
        self.phases = Phases(lambda *_: None)
        self._slots: tuple[Slot, Slot] | None = None

    def open_slots(self, geometry: Geometry) -> tuple[Slot, Slot]:
        if self.room is not None and geometry.payload > self.room:
            raise MemoryTooSmall("two slots do not fit")
        self.close()
        self.opened.append(geometry)
        fds = [create(geometry, "test") for _ in range(2)]
        self._slots = (Slot(fds[0]), Slot(fds[1]))
        for fd in fds:
            os.close(fd)
        return self._slots

    def slots(self) -> tuple[Slot, Slot] | None:
        return self._slots

    def close(self) -> None:
        for slot in self._slots or ():
            slot.close()
        self._slots = None

    def ask_slot(self, step: int, _: float) -> Grant | None:
        return Grant(step % 2, 7)

    def cut_done(self, done: CutDone) -> None:
        self.done.append(done)

    def cut_skipped(self, step: int, reason: str, _: int) -> None:
        self.skipped.append((step, reason))

    def cut_failed(self, step: int, failed: BaseException, _: int = 0) -> None:
        self.failed.append((step, str(failed)))

    def say(self, kind: str, *_: object, **__: object) -> None:
        self.said.append(kind)

    def demoted(self) -> int:
        return len(self.demotions)

    def ask_demoted(self) -> tuple[str, ...]:
        return self.demotions

    def published_cut(self) -> tuple[int, int]:
        return self.cut

    def keepers_met(self) -> int:
        return self.met

    def published_slot(self, step: int) -> int | None:
        return step % 2 if self.cut[1] == step else None

    def published_stop(self) -> tuple[bool, int, bool]:
        return self.stop

    def keep_alive(self) -> bool:
        self.away = max(0, self.away - 1)
        return self.away == 0

    def await_durable(self, *_: float) -> str | None:
        return self.durable.pop(0) if self.durable else None

    def preempt(self, _: float) -> None:
        self.preempted += 1

    def post_boundary(self, *_: int) -> None: ...
    def post_pace(self, _: int) -> None: ...
    def arrived(self, step: int) -> None: ...
    def finished(self, step: int) -> None: ...


class Bag:
    """An object of tensors whose number and sizes may change."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors
        self.fails = 0
        self.log: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            self.fails -= 1
            raise ZeroDivisionError("the user's own")
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.log.append("load_state_dict")
        self.tensors = state


class Rank:
    """One rank of its own with a bag."""

    def __init__(self, place: Place = ONE, *, keeper: Keeper | None = None, **objects: Any) -> None:
        self.bag = Bag(a=torch.arange(5.0), b=torch.ones(33, dtype=torch.uint8))
        self.keeper: Any = keeper or Keeper()
        self.session = Session({"bag": self.bag, **objects}, place, Options(), None)
        self.cutter = Cutter(self.session, self.keeper, place)

    def cut(self, step: int) -> Slot:
        self.cutter.make_ready(step)
        self.cutter.cut(step, step % 2, persist=False, sequence=step)
        slot: Slot = self.keeper.slots()[step % 2]
        return slot

    def close(self) -> None:
        self.cutter.close()
        self.session.close()
        self.keeper.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.close()


def read(slot: Slot, fqn: str) -> bytes:
    """The bytes of a tensor in a slot, by the layout that the slot itself holds."""
    snapshot = slot.snapshot()
    extents = [e for e in snapshot.layout.extents if e.fqn == fqn]
    found = b"".join(
        bytes(snapshot.payload[e.payload_offset : e.payload_offset + e.nbytes]) for e in extents
    )
    snapshot.payload.release()
    snapshot.state.release()
    return found


# -- the cutter


def test_a_cut_holds_the_state_and_none_of_the_live_memory(rank: Rank) -> None:
    """R1; pytorch#144657: a CPU tensor that the "copy" shares with training."""
    slot = rank.cut(2)
    rank.bag.tensors["a"].fill_(-1)
    assert read(slot, "bag.a") == torch.arange(5.0).numpy().tobytes()
    described = slot.described()
    assert described is not None
    assert (described.step, described.sequence, described.world) == (2, 2, 1)
    assert rank.cutter.holds(2)
    assert rank.keeper.done[0].replicas == {}, "one rank has nobody to compare with"


def test_a_replaced_tensor_is_never_stale(rank: Rank) -> None:
    rank.cut(2)
    rank.bag.tensors["a"] = torch.full((5,), 7.0)
    assert read(rank.cut(4), "bag.a") == torch.full((5,), 7.0).numpy().tobytes()


def test_padding_is_cleared_when_the_layout_changes(rank: Rank) -> None:
    """S3: another layout's bytes lie where this one has gaps, and the store refuses them."""
    rank.bag.tensors = {"wide": torch.full((700,), 255, dtype=torch.uint8)}
    rank.cut(2)
    rank.bag.tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(1)}
    slot = rank.cut(4)
    assert len(rank.keeper.opened) == 1, "the same slot, and the old bytes are in it"
    snapshot = slot.snapshot()
    covered = {
        at
        for e in snapshot.layout.extents
        for at in range(e.payload_offset, e.payload_offset + e.nbytes)
    }
    end = -(-snapshot.layout.payload_bytes // PAGE) * PAGE
    gaps = [at for at in range(end) if at not in covered]
    dirty = [at for at in gaps if slot.payload[at]]
    snapshot.payload.release()
    snapshot.state.release()
    assert len(gaps) > 100
    assert dirty == []


def test_a_state_that_grows_gets_other_slots(rank: Rank) -> None:
    first = rank.cut(2)
    rank.bag.tensors["c"] = torch.arange(5000.0)
    second = rank.cut(4)
    assert second is not first
    assert len(rank.keeper.opened) == 2
    assert rank.keeper.opened[1].holds(rank.keeper.opened[0])
    assert read(second, "bag.c") == torch.arange(5000.0).numpy().tobytes()
    rank.cut(5)
    assert len(rank.keeper.opened) == 2


def pair(number: int) -> Rank:
    """One of two ranks whose bag is said to be equal and which has something of its own."""
    place = Place(number, 2, number, 0, ((0, 1),), "launch")
    made = Rank.__new__(Rank)
    made.bag = Bag(a=torch.arange(4000.0), b=torch.arange(9.0))
    own = Bag(mine=torch.ones(50 + 1000 * number))
    made.keeper = Keeper()
    options = Options(replicated=("bag",))
    made.session = Session({"bag": made.bag, "own": own}, place, options, None)
    made.cutter = Cutter(made.session, made.keeper, place)
    return made


@pytest.fixture
def two() -> Iterator[list[Rank]]:
    made = [pair(0), pair(1)]
    yield made
    for one in made:
        one.close()


def test_replicas_are_compared_in_equal_windows_by_ranks_of_unequal_size(two: list[Rank]) -> None:
    """R8: everything first, then a rotating part that comes round to every byte."""
    looked: list[set[str]] = []
    for step in range(1, 40):
        for one in two:
            one.cut(step)
        proofs = [one.keeper.done[-1].replicas for one in two]
        assert proofs[0] == proofs[1]
        looked.append(set(proofs[0]))
    assert looked[0] == {"bag.a [0:4000]", "bag.b [0:9]"}
    later = set().union(*looked[1:])
    assert later.isdisjoint(looked[0] - {"bag.b [0:9]"}), "only a part is looked at"
    covered = {
        element
        for name in later
        if name.startswith("bag.a ")
        for element in range(*map(int, name.split("[")[1].rstrip("]").split(":")))
    }
    assert len(covered) > 3000


def test_a_difference_shows_and_a_demoted_tensor_is_stored_by_each(two: list[Rank]) -> None:
    """R8."""
    two[1].bag.tensors["b"][3] = -1
    layouts = []
    for one in two:
        one.cut(1)
    proofs = [one.keeper.done[0].replicas for one in two]
    assert proofs[0]["bag.a [0:4000]"] == proofs[1]["bag.a [0:4000]"]
    assert proofs[0]["bag.b [0:9]"] != proofs[1]["bag.b [0:9]"]
    for number, one in enumerate(two):
        one.keeper.demotions = ("bag.b [0:9]",)
        slot = one.cut(2)
        assert read(slot, "bag.b") == one.bag.tensors["b"].numpy().tobytes(), number
        layouts.append(one.keeper.done[-1].layout)
        assert not [n for n in one.keeper.done[-1].replicas if n.startswith("bag.b")]
    assert layouts[0] == layouts[1] != two[0].keeper.done[0].layout


# -- the boundary


def boundary_of(rank: Rank, **settings: Any) -> Boundary:
    finite = Finite(rank.session.attached, rank.session.since, ONE, rank.keeper.say)
    made = Boundary(rank.session, rank.keeper, Settings(**settings), ONE, finite)
    made.start(0, durable=False)
    return made


def test_a_cut_that_was_learnt_of_too_late_is_skipped_once(rank: Rank) -> None:
    """R2."""
    boundary = boundary_of(rank)
    boundary.pass_step(1)
    rank.keeper.cut = (1, 2)
    boundary.pass_step(3)
    boundary.pass_step(4)
    assert rank.keeper.skipped == [(2, "learnt of it at step 3")]
    assert rank.keeper.done == []
    rank.keeper.cut = (2, 5)
    boundary.pass_step(5)
    assert [(d.step, d.sequence, d.persist) for d in rank.keeper.done] == [(5, 2, False)]
    boundary.close()


def test_the_first_cut_of_a_new_keeper_is_not_taken_for_the_old_ones(rank: Rank) -> None:
    """Each keeper counts its cuts from 1."""
    boundary = boundary_of(rank)
    for met, step in ((1, 2), (2, 4)):
        rank.keeper.met, rank.keeper.cut = met, (1, step)
        boundary.pass_step(step - 1)
        boundary.pass_step(step)
    assert [d.step for d in rank.keeper.done] == [2, 4]
    boundary.close()


def test_a_state_dict_that_raises_is_told_and_training_goes_on(rank: Rank) -> None:
    """R3."""
    boundary = boundary_of(rank)
    boundary.pass_step(1)
    rank.keeper.cut = (1, 2)
    rank.bag.fails = 1
    boundary.pass_step(2)
    assert rank.keeper.failed == [(2, "the user's own")]
    assert boundary.checkpoint(2, wait=True, timeout=5) is True
    boundary.close()


def test_a_checkpoint_that_could_not_be_cut_is_not_waited_for(rank: Rank) -> None:
    boundary = boundary_of(rank)
    boundary.pass_step(1)
    rank.bag.fails = 1
    began = time.monotonic()
    assert boundary.checkpoint(1, wait=True, timeout=300) is False
    assert time.monotonic() - began < 60
    boundary.close()


def test_the_last_step_is_cut_again_where_its_cut_was_dropped(rank: Rank) -> None:
    boundary = boundary_of(rank)
    boundary.pass_step(1)
    rank.bag.fails = 1
    rank.keeper.durable = ["the cut at step 1 was dropped", None]
    boundary.finish(1, 60.0)
    assert [d.step for d in rank.keeper.done] == [1, 1]
    assert rank.keeper.failed == [(1, "the user's own")]
    boundary.close()


def test_a_last_step_that_cannot_be_committed_is_said_with_its_cause(rank: Rank) -> None:
    boundary = boundary_of(rank)
    boundary.pass_step(1)
    rank.keeper.durable = ["EVS-205: no space left"] * 100
    with pytest.raises(NotDurable, match=r"last step 1 is not committed after 0\.3 s: EVS-205"):
        boundary.finish(1, 0.3)
    boundary.close()


def test_too_little_memory_stops_the_job_at_its_first_boundary_and_never_later() -> None:
    """Nothing is lost yet at the first; later it is an event (R3)."""
    small = Rank(keeper=Keeper(room=0))
    boundary = boundary_of(small)
    with pytest.raises(MemoryTooSmall, match="EVS-301"):
        boundary.pass_step(1)
    boundary.close()
    small.close()

    grown = Rank(keeper=Keeper(room=4 * PAGE))
    boundary = boundary_of(grown)
    boundary.pass_step(1)
    grown.keeper.cut = (1, 2)
    boundary.pass_step(2)
    grown.bag.tensors["c"] = torch.ones(PAGE * 4)
    grown.keeper.cut = (2, 3)
    boundary.pass_step(3)
    assert [d.step for d in grown.keeper.done] == [2]
    assert grown.keeper.failed == [(3, "EVS-301: two slots do not fit")]
    boundary.close()
    grown.close()


def test_pending_gradients_are_refused_with_what_to_pass() -> None:
    """R1."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = Rank(model=model, optimizer=optimizer)
    boundary = boundary_of(rank)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(PendingGradients, match=r"rank 0, step 1: .*accumulate="):
        boundary.pass_step(1)
    optimizer.step()
    boundary.pass_step(2)
    boundary.close()
    rank.close()


def test_a_sigterm_is_told_until_the_keeper_has_heard_it(rank: Rank) -> None:
    boundary = boundary_of(rank, grace=30.0)
    boundary.pass_step(1)
    boundary._term.raised = True
    boundary.pass_step(2)
    assert rank.keeper.preempted == 1
    boundary._tell_term_at = 0.0  # the pause between two tellings is over
    boundary.pass_step(3)
    assert rank.keeper.preempted == 2
    rank.keeper.stop = (True, 5, True)
    boundary.pass_step(4)
    assert rank.keeper.preempted == 2
    with pytest.raises(Preempted, match="stopped at step 5; it is committed") as stopped:
        boundary.pass_step(5)
    assert stopped.value.exit_code == 75
    assert [(d.step, d.persist) for d in rank.keeper.done] == [(5, True)]
    boundary.close()


def test_a_sigterm_that_no_keeper_hears_ends_the_rank_within_the_grace(rank: Rank) -> None:
    boundary = boundary_of(rank, grace=0.0)
    boundary.pass_step(1)
    boundary._term.raised = True
    boundary.pass_step(2)
    with pytest.raises(Preempted, match="the keeper did not answer"):
        boundary.pass_step(3)
    boundary.close()


def test_an_explicit_checkpoint_waits_for_a_keeper_that_comes_back(rank: Rank) -> None:
    boundary = boundary_of(rank)
    boundary.pass_step(1)
    rank.keeper.away = 5
    assert boundary.checkpoint(1, wait=True, timeout=30) is True
    assert rank.keeper.away == 0
    boundary.close()


# -- the restore


class Coordinator:
    """Offers, and elects when it hears yes."""

    def __init__(self, log: list[str], offers: list[Any]) -> None:
        self.log, self.offers = log, offers
        self.link = self
        self.said: list[str] = []

    def ask_offer(self, **_: float) -> Any:
        return self.offers.pop(0)

    def vote(self, ok: bool, reason: str, **_: float) -> Any:
        self.log.append(f"vote {ok} {reason}".strip())
        return Elected(None, "memory") if ok else self.offers.pop(0)

    def say(self, kind: str, *_: object, **__: object) -> None:
        self.said.append(kind)


class Offer:
    def __init__(self, source: str, slots: dict[SlotName, Slot]) -> None:
        self.source, self.slots, self.point = source, slots, None


def restorer(log: list[str], offers: list[Any]) -> tuple[Restorer, Bag, Any]:
    bag = Bag(a=torch.zeros(5), b=torch.zeros(33, dtype=torch.uint8))
    bag.log = log
    session = Session({"bag": bag}, ONE, Options(), None)
    coordinator: Any = Coordinator(log, offers)
    return Restorer(session, coordinator, Settings(), ONE), bag, coordinator


def test_the_users_objects_hear_of_a_state_only_after_the_vote(rank: Rank) -> None:
    """R6; and a candidate that fails is voted down, with its reason."""
    good = {SlotName(0, 0): rank.cut(2)}
    log: list[str] = []
    restore, bag, coordinator = restorer(log, [Offer("memory", {}), Offer("memory", good)])
    assert restore.restore() == 2
    assert log[0].startswith("vote False rank 0: EVS-206: this node's memory holds no snapshot")
    assert log[1:] == ["vote True", "load_state_dict"]
    assert torch.equal(bag.tensors["a"], torch.arange(5.0))
    assert coordinator.said == ["restore.candidate_failed", "train.started", "train.restored"]
    assert not restore.durable


def test_a_state_that_does_not_fit_is_no_vote(rank: Rank) -> None:
    """It would be the same with every candidate: the job is stopped with what differs."""
    good = {SlotName(0, 0): rank.cut(2)}
    log: list[str] = []
    session = Session({"other": Bag()}, ONE, Options(), None)
    made: Any = Coordinator(log, [Offer("memory", good)])
    with pytest.raises(StateMismatch, match="missing: bag"):
        Restorer(session, made, Settings(), ONE).restore()
    assert log == []


def test_a_tensor_that_is_not_wholly_in_memory_is_an_error(rank: Rank) -> None:
    slot = rank.cut(2)
    state = msgspec.msgpack.decode(bytes(slot.snapshot().state), type=RankState)
    source = MemorySource({SlotName(0, 0): slot})
    wider = msgspec.structs.replace(
        state.refs[0], box=msgspec.structs.replace(state.refs[0].box, sizes=(6,)), shape=(6,)
    )
    with pytest.raises(CorruptObject, match=r"holds 20 of the 24 bytes of bag\.a"):
        source.read([(wider, memoryview(bytearray(24)))])
    source.close()


# -- the session


def test_more_than_two_ranks_are_warned_where_ddp_cannot_fix_its_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FACTS: with 4 ranks the rebuilt buckets change the order of floating-point sums."""
    asked: list[object] = []

    class Wrapped(nn.Linear):
        """Stands for a DDP module where there is no process group."""

    def refuse(module: object) -> bool:
        asked.append(module)
        return False

    monkeypatch.setattr(session_room, "DistributedDataParallel", Wrapped)
    monkeypatch.setattr(session_room, "rebuild_buckets_now", refuse)
    model = Wrapped(2, 2)
    four = Place(0, 4, 0, 0, ((0, 1, 2, 3),), "launch")
    with pytest.warns(UserWarning, match="model fix its order of gradient sums.*4 ranks"):
        Session({"model": model}, four, Options(), None).close()
    assert asked == [model]
    two = Place(0, 2, 0, 0, ((0, 1),), "launch")
    Session({"model": model}, two, Options(), None).close()
    assert asked == [model], "two ranks sum in one order only"


def test_errors_of_the_keeper_in_a_cut_are_told(rank: Rank) -> None:
    """R3: an error that is none of the user's either."""
    boundary = boundary_of(rank)

    def away(_: Geometry) -> tuple[Slot, Slot]:
        raise KeeperError("the keeper is away.")

    rank.keeper.open_slots = away
    boundary.pass_step(1)
    assert rank.keeper.failed == [(1, "EVS-300: the keeper is away.")]
    boundary.close()
