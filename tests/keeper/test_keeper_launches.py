"""One launch and the next: which processes belong to which, and what the earlier ones may still do.

Workers that must die or be told apart are real processes; each does what the test tells it.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import pytest
from keeper_fakes import DEADLINE, GEOMETRY, Agent, Keeper, Place, Worker, closing, train, until

from everstep.cadence.policy import Policy
from everstep.core.clock import SystemClock
from everstep.core.ids import Point
from everstep.core.location import canonical_store
from everstep.errors import JobOwned, KeeperError
from everstep.keeper import commands, facts
from everstep.keeper.address import keeper_name
from everstep.keeper.background import Background
from everstep.keeper.client import WorkerLink
from everstep.keeper.coordinate import Coordinator
from everstep.keeper.holdings import Holdings
from everstep.keeper.identity import Process, end_processes, identity_of, is_alive, process_of
from everstep.keeper.owner import Owner
from everstep.keeper.storing import Storing
from everstep.keeper.wire import BeginAttempt, Goodbye, Hello, SlotName
from everstep.store import Job, open_store

SPAWN = multiprocessing.get_context("spawn")


def job_of(place: Place) -> Job:
    return open_store(str(place.folder / "store")).job(place.job)


def newest_complete(place: Place) -> int:
    return max((e.step or 0 for e in place.events("snapshot.complete")), default=0)


# -- a worker in a process of its own


class Plain(Worker):
    """A rank where no agent runs; its local rank 0 begins with ``begin``."""

    def __init__(self, place: Place, rank: int, world: int, launch: str, **begin: Any) -> None:
        self.place, self.rank, self.world, self.local_rank = place, rank, world, rank
        message = BeginAttempt(
            launch, 0, 0, (tuple(range(world)),), policy=place.policy, **begin
        )  # fmt: skip
        self.link = WorkerLink.connect(
            place.name(), Hello("worker", os.getpid(), launch, rank, rank),
            begin=None if rank else message, timeout=DEADLINE,
        )  # fmt: skip
        self.step, self.layout, self.replicas = 0, "layout", {}


def _live(pipe: Pipe, folder: Path) -> None:
    place = Place(folder)
    worker: Worker | None = None
    while True:
        what, arguments = pipe.recv()
        try:
            if what == "connect":
                worker = Plain(place, **arguments)
                pipe.send(worker.link.attempt)
            elif what == "connect under an agent":
                worker = Worker(place, **arguments)
                pipe.send(worker.link.attempt)
            elif what == "restore":
                elected = worker.restore()  # type: ignore[union-attr]  # connected before
                worker.open(GEOMETRY)  # type: ignore[union-attr]
                pipe.send((elected.source, elected.point.step if elected.point else 0))
            elif what == "step":
                worker.finish_step()  # type: ignore[union-attr]
                pipe.send(worker.link.connected)  # type: ignore[union-attr]
            elif what == "fork":
                child = os.fork()
                if child == 0:
                    worker.link.goodbye(finished=False)  # type: ignore[union-attr]
                    os._exit(0)
                os.waitpid(child, 0)
                pipe.send(None)
        except Exception as error:  # noqa: BLE001 - told to the test
            pipe.send(error)


class Life:
    """One process of one rank."""

    def __init__(self, place: Place) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_live, args=(theirs, place.folder), daemon=True)
        self.process.start()
        theirs.close()

    def say(self, what: str, **arguments: Any) -> None:
        self._pipe.send((what, arguments))

    def answer(self) -> Any:
        assert self._pipe.poll(DEADLINE), "the worker does not answer"
        got = self._pipe.recv()
        if isinstance(got, Exception):
            raise got
        return got

    def do(self, what: str, **arguments: Any) -> Any:
        self.say(what, **arguments)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE)


def together(lives: list[Life], what: str) -> list[Any]:
    for life in lives:
        life.say(what)
    return [life.answer() for life in lives]


def step_until(lives: list[Life], condition: Callable[[], object], what: str) -> None:
    def once() -> bool:
        together(lives, "step")
        return bool(condition())

    until(once, what)


@pytest.fixture
def live(place: Place) -> Iterator[Callable[[], Life]]:
    made: list[Life] = []

    def make() -> Life:
        made.append(Life(place))
        return made[-1]

    yield make
    for life in made:
        life.kill()


Live = Callable[[], Life]


# -- a launch's name is not what tells starts apart


def test_second_process_of_one_launch_goes_on_from_the_newest_state(
    place: Place, live: Live
) -> None:
    """R5: the variables that a shell exports give every start one name; the second start is an
    attempt of its own and does not go on from where the first one began."""
    keeper = Keeper(place)
    first = live()
    assert first.do("connect", rank=0, world=1, launch="same") == 1
    assert first.do("restore") == ("fresh", 0)
    with closing(keeper):
        step_until([first], lambda: newest_complete(place) >= 5, "snapshots")
        first.kill()
        kept = newest_complete(place)
        second = live()
        assert second.do("connect", rank=0, world=1, launch="same") == 2
        source, step = second.do("restore")
        assert (source, step >= kept) == ("memory", True)


def test_second_process_of_a_launch_that_lives_is_refused(place: Place, live: Live) -> None:
    keeper = Keeper(place)
    first, second = live(), live()
    first.do("connect", rank=0, world=1, launch="same")
    first.do("restore")
    with closing(keeper):
        step_until([first], lambda: newest_complete(place), "a snapshot")
        with pytest.raises(JobOwned):
            second.do("connect", rank=0, world=1, launch="same")
        kept = newest_complete(place)
        step_until([first], lambda: newest_complete(place) > kept, "the first one goes on")


def test_rank_that_comes_before_its_launch_begins_waits_for_it(place: Place, live: Live) -> None:
    keeper = Keeper(place)
    first = [live(), live()]
    for rank, life in enumerate(first):
        life.do("connect", rank=rank, world=2, launch="same")
    together(first, "restore")
    with closing(keeper):
        step_until(first, lambda: newest_complete(place) >= 3, "snapshots")
        for life in first:
            life.kill()
        kept = newest_complete(place)
        second = [live(), live()]
        second[1].say("connect", rank=1, world=2, launch="same")
        second[0].say("connect", rank=0, world=2, launch="same")
        assert [life.answer() for life in second] == [2, 2]
        found = together(second, "restore")
        assert found[0] == found[1]
        assert (found[0][0], found[0][1] >= kept) == ("memory", True)


def test_process_that_begins_anew_under_its_old_pid_is_a_new_attempt(place: Place) -> None:
    """A script that executes itself again keeps its pid and its start time."""
    keeper = Keeper(place)
    first = Plain(place, 0, 1, "same")
    first.restore()
    first.open()
    with closing(keeper):
        train([first], lambda: newest_complete(place) >= 3, "snapshots")
        kept = newest_complete(place)
        first.link.close()
        again = Plain(place, 0, 1, "same")
        with closing(again):
            assert again.link.attempt == 2
            offered = again.ask()
            assert offered.point is not None
            assert (offered.source, offered.point.step >= kept) == ("memory", True)


@pytest.mark.parametrize("token", ["secret", "another"])
def test_nodes_whose_launches_have_other_names_meet_by_their_token(
    place: Place, token: str
) -> None:
    """torchrun is another process on every node, and a launch is named after it."""
    keepers = [Keeper(place, node) for node in (0, 1)]
    ranks = ((0,), (1,))

    def connect(node: int, **begin: Any) -> WorkerLink:
        launch = f"run:{node}"
        message = BeginAttempt(launch, 0, node, ranks, policy=place.policy, **begin)
        hello = Hello("worker", os.getpid(), launch, node, 0, node)
        timeout = DEADLINE if begin["token"] == "secret" else 1.5
        return WorkerLink.connect(place.name(node), hello, begin=message, timeout=timeout)

    with closing(*keepers):
        first = connect(0, token="secret")
        assert first.begun is not None
        where = ("127.0.0.1", first.begun.port)
        if token == "secret":
            second = connect(1, token=token, coordinator=where)
            assert second.attempt == first.attempt == 1
            second.close()
        else:
            with pytest.raises(KeeperError, match="It waits for node 0"):
                connect(1, token=token, coordinator=where)
        first.close()


def test_another_process_cannot_take_a_rank_within_an_agents_attempt(
    place: Place, live: Live
) -> None:
    """A loop around the script within one attempt would go on from where the attempt began."""
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, ((0,),))
    first, second = live(), live()
    first.do("connect under an agent", attempt=1)
    first.do("restore")
    with closing(keeper, agent):
        step_until([first], lambda: newest_complete(place), "a snapshot")
        first.kill()
        with pytest.raises(JobOwned, match="cannot go on in its place"):
            second.do("connect under an agent", attempt=1)


# -- another launcher's restarts


@pytest.mark.parametrize("snapshots", [True, False])
def test_never_is_said_for_the_first_start_alone(place: Place, live: Live, snapshots: bool) -> None:
    """R5: torchrun's restart goes on from what its first start kept, and begins anew where that
    start kept nothing."""
    keeper = Keeper(place)
    older = live()
    older.do("connect", rank=0, world=1, launch="older")
    older.do("restore")
    with closing(keeper):
        step_until([older], lambda: newest_complete(place) >= 3, "an older run's snapshots")
        older.kill()
        before = len(place.events("snapshot.complete"))
        first = live()
        first.do("connect", rank=0, world=1, launch="run:0", resume="never")
        assert first.do("restore") == ("fresh", 0)
        if snapshots:
            done = lambda: len(place.events("snapshot.complete")) >= before + 2  # noqa: E731
            step_until([first], done, "its own snapshots")
        first.kill()
        second = live()
        second.do("connect", rank=0, world=1, launch="run:1", resume="never", again=True)
        source, step = second.do("restore")
        assert (source, step > 0) == (("memory", True) if snapshots else ("fresh", False))


def test_restart_whose_keeper_is_new_goes_on_from_the_store(place: Place, live: Live) -> None:
    """The keeper died with the workers: what the first start committed is not begun anew."""
    keeper = Keeper(place)
    first = live()
    first.do("connect", rank=0, world=1, launch="run:0", resume="never")
    first.do("restore")
    step_until([first], lambda: place.events("checkpoint.committed"), "a checkpoint")
    first.kill()
    keeper.kill()
    with closing(Keeper(place)):
        second = live()
        second.do("connect", rank=0, world=1, launch="run:1", resume="never", again=True)
        source, step = second.do("restore")
        assert (source, step > 0) == ("store", True)


# -- what is left of an earlier launch


def test_orphan_of_an_earlier_launch_is_ended_before_its_slots_are_given_away(
    place: Place, live: Live
) -> None:
    """R7: it maps the slots and may have read a cut; nobody else would stop it."""
    keeper = Keeper(place)
    first = [live(), live()]
    for rank, life in enumerate(first):
        life.do("connect", rank=rank, world=2, launch="one")
    together(first, "restore")
    with closing(keeper):
        step_until(first, lambda: newest_complete(place) >= 3, "snapshots")
        first[0].kill()
        second = [live(), live()]
        for rank, life in enumerate(second):
            life.say("connect", rank=rank, world=2, launch="two")
        assert [life.answer() for life in second] == [2, 2]
        first[1].process.join(0)
        assert first[1].process.exitcode == -signal.SIGKILL
        assert place.events("workers.orphaned")[0].facts["pids"] == [first[1].process.pid]
        assert together(second, "restore")[0][0] == "memory"


def test_page_of_an_earlier_attempt_shows_no_cut(place: Place) -> None:
    """R7: a worker that still reads it must not take the cut that was published there."""
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, ((0,),))
    worker = Worker(place, attempt=1)
    worker.restore()
    worker.open()
    with closing(keeper, agent, worker):
        train([worker], lambda: newest_complete(place) and worker.link.page.cut()[0], "a cut")
        agent.begin(2, ((0,),))
        assert worker.link.page.cut()[0] == 0
        assert worker.link.page.served() == 1


def test_exactly_that_process_is_ended() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        process = process_of(sleeper.pid)
        assert process.started is not None
        reused = Process(process.pid, process.started - 1)
        assert end_processes([reused], 0.0) == set()
        assert sleeper.poll() is None, "a process of the same pid was taken for another"
        assert end_processes([process], DEADLINE) == set()
        assert sleeper.wait(DEADLINE) == -signal.SIGKILL
        unseen = Process(0, None)
        assert end_processes([process, unseen], 0.0) == {unseen}
    finally:
        sleeper.kill()
        sleeper.wait()


def test_slots_that_another_process_may_write_are_given_to_nobody() -> None:
    holdings = Holdings("job")
    old = holdings.open(0, GEOMETRY)
    with contextlib.closing(holdings):
        holdings.retire(0)
        assert not any(held.current for held in holdings.held(0))
        assert holdings.needs(0, GEOMETRY) == 2 * GEOMETRY.total
        new = holdings.open(0, GEOMETRY)
        assert not set(old) & set(new)
        assert [(h.index, h.current) for h in holdings.held(0)] == [
            (0, False), (1, False), (2, True), (3, True),
        ]  # fmt: skip
        assert holdings.real(0, 0) == 2


# -- goodbye and ownership


def test_worker_whose_goodbye_another_said_comes_again_and_still_owns_the_job(
    place: Place,
) -> None:
    """A child inherits the connection; whatever it says there, the worker trains on."""
    keeper = Keeper(place)
    worker = Plain(place, 0, 1, "one")
    worker.restore()
    worker.open()
    with closing(keeper, worker):
        train([worker], lambda: newest_complete(place), "a snapshot")
        assert worker.link._link is not None
        worker.link._link.send(Goodbye(finished=False))
        until(lambda: not worker.link._link or worker.link._link.readable(0.0), "it is closed")
        kept = newest_complete(place)
        train([worker], lambda: newest_complete(place) > kept + 3, "snapshots go on")
        owner = job_of(place).owner()
        assert owner is not None
        assert owner.pid == os.getpid()


def test_forked_child_says_no_goodbye(place: Place, live: Live) -> None:
    keeper = Keeper(place)
    worker = live()
    worker.do("connect", rank=0, world=1, launch="one")
    worker.do("restore")
    with closing(keeper):
        step_until([worker], lambda: newest_complete(place), "a snapshot")
        worker.do("fork")
        assert worker.do("step"), "the parent lost its connection"
        kept = newest_complete(place)
        step_until([worker], lambda: newest_complete(place) > kept, "snapshots go on")


class _Now(Background):
    """Work done at once."""

    def submit(self, lane: Any, work: Any, done: Any, failed: Any) -> None:
        del lane
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - as the real one hands it on
            failed(error)
        else:
            done(result)


class _Clock(SystemClock):
    now = 0.0

    def mono(self) -> float:
        return self.now


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def _owner(place: Place, lost: list[str]) -> tuple[Owner, _Clock, list[str]]:
    clock, said = _Clock(), []
    storing = Storing(str(place.folder / "store"), place.job)
    owner = Owner(
        storing, _Now(), clock=clock, lost=lost.append,
        say=lambda kind, *_, **__: said.append(kind),
    )  # fmt: skip
    return owner, clock, said


def test_owner_that_an_agent_replaced_is_not_renewed(
    place: Place, sleeper: subprocess.Popen[bytes]
) -> None:
    lost: list[str] = []
    owner, clock, _ = _owner(place, lost)
    owner.claim(sleeper.pid, 0, lambda _: None, pytest.fail)
    sleeper.kill()
    sleeper.wait()
    job = job_of(place)
    job.acquire_owner(identity_of(os.getpid(), "agent"), is_alive=is_alive)
    owner.forget()
    clock.now = 11.0
    owner.renew()
    assert lost == []
    assert owner.wait() == 3600.0


def test_owner_that_parted_is_released_when_its_process_has_ended(
    place: Place, sleeper: subprocess.Popen[bytes]
) -> None:
    owner, clock, _ = _owner(place, [])
    owner.claim(sleeper.pid, 0, lambda _: None, pytest.fail)
    owner.part()
    owner.renew()
    assert job_of(place).owner() is not None, "its process lives: a child may have parted for it"
    sleeper.kill()
    sleeper.wait()
    clock.now = 1.0
    owner.renew()
    assert job_of(place).owner() is None


def test_store_that_is_not_there_is_not_a_job_that_is_lost(
    place: Place, sleeper: subprocess.Popen[bytes]
) -> None:
    """An unmounted store holds nobody's record; the owner goes on and tries again."""
    lost: list[str] = []
    owner, clock, said = _owner(place, lost)
    owner.claim(sleeper.pid, 0, lambda _: None, pytest.fail)
    store, away = place.folder / "store", place.folder / "away"
    store.rename(away)
    store.mkdir()
    clock.now = 11.0
    owner.renew()
    assert (lost, said) == ([], ["store.unreachable"])
    assert list(store.iterdir()) == []
    store.rmdir()
    away.rename(store)
    clock.now = 22.0
    owner.renew()
    assert (lost, owner.agent) == ([], f"worker-{sleeper.pid}")


# -- who commands


def test_agent_that_another_replaced_commands_nothing(place: Place) -> None:
    keeper = Keeper(place)
    first = Agent(place)
    first.begin(1, ((0,),))
    second = Agent(place)
    with closing(keeper, first, second):
        second.begin(2, ((0,),))
        first.leave()
        for attempt in (3, 4, 5):  # a keeper that was told to leave ends within one turn
            second.begin(attempt, ((0,),))
        assert keeper.process.poll() is None


def test_descriptors_that_came_are_not_inherited(place: Place) -> None:
    """A program that a worker or the agent executes must not hold the slots' memory."""
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, ((0,),))
    worker = Worker(place, attempt=1)
    worker.restore()
    worker.open()
    with closing(keeper, agent, worker):
        until(lambda: agent.pump() or SlotName(0, 1) in agent.held, "the agent holds the slots")
        for fd in (*worker.link._fds, *agent.held.values()):
            assert not os.get_inheritable(fd)
        held = _inheritable_memory(keeper.process.pid)
        assert held == []


def _inheritable_memory(pid: int) -> list[str]:
    """The memfds of a process that its children would get."""
    found = []
    for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
        target = os.readlink(f"/proc/{pid}/fd/{entry.name}")
        flags = int(entry.read_text().split("flags:")[1].split()[0], 8)
        if "memfd:" in target and not flags & os.O_CLOEXEC:
            found.append(target)
    return found


# -- where the keeper is


def test_one_store_has_one_keeper_by_whichever_path_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    urls = [
        f"{tmp_path}/real", f"{tmp_path}/link", "real", "./link", "~/real", f"{tmp_path}/real/",
        f"file://{tmp_path}/real", f"file://localhost{tmp_path}/link", f"{tmp_path}/link/../real",
    ]  # fmt: skip
    assert len({keeper_name(url, "job", 0) for url in urls}) == 1
    assert keeper_name("other", "job", 0) != keeper_name("real", "job", 0)


def test_url_of_another_place_is_left_as_it_is() -> None:
    def never(path: str) -> str:
        raise AssertionError(path)

    for url in ("s3://bucket/a/../b", "memory://name", "file://host/share"):
        assert canonical_store(url, never) == url
    assert canonical_store("file:///a%20b", lambda path: path) == "file:///a b"


# -- a keeper that died after the commit


@pytest.mark.parametrize("order", list(itertools.permutations(("slots", "store", "question"))))
def test_wait_for_a_commit_that_a_dead_keeper_made_is_answered(order: tuple[str, ...]) -> None:
    """Whichever the new keeper learns first: the rank's slots, the store, or the question."""
    point = Point(3, 1)
    told = {
        "slots": facts.SlotsSeen(
            0, 0, (facts.Held(0, 0, point, "layout", 1, True, False),)
        ),
        "store": facts.StoreRead(
            1, (facts.Candidate(point, 1),), True, branched=True, branch_source="fresh"
        ),
        "question": facts.DurableAsked(0, 3, 600.0),
    }  # fmt: skip
    coordinator = Coordinator()
    coordinator.handle(facts.Begun(1, ((0,),), "auto", False, Policy(1, 0.0)), 0.0)
    for now, fact in enumerate([facts.NodeJoined(0, ()), facts.Registered(0)]):
        coordinator.handle(fact, float(now))
    out = [c for at, name in enumerate(order) for c in coordinator.handle(told[name], 2.0 + at)]
    out += coordinator.handle(facts.Tick(), 6.0)
    answers = [c for c in out if isinstance(c, commands.AnswerDurable)]
    assert [answer.rank for answer in answers] == [0]
    if order.index("slots") < order.index("question") or order[0] == "store":
        assert answers[0].durable
