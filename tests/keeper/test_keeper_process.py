"""Real keepers, real workers without torch, real signals."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from keeper_fakes import (
    DEADLINE,
    GEOMETRY,
    PIECE,
    Agent,
    Keeper,
    Place,
    Worker,
    closing,
    content,
    train,
    until,
)

from everstep.cadence.policy import Policy
from everstep.core.ids import Point
from everstep.core.layout import SHARED
from everstep.errors import JobOwned, MemoryTooSmall, NoRecoveryPoint, WorldChanged
from everstep.keeper.client import WorkerLink
from everstep.keeper.slot import Geometry
from everstep.keeper.wire import (
    BeginAttempt,
    Elected,
    Fatal,
    Hello,
    Preempt,
    SlotName,
    WorkersEnded,
)
from everstep.store import Job, ReadRequest, open_store

RANKS2 = ((0, 1),)


def job_of(place: Place) -> Job:
    return open_store(str(place.folder / "store")).job(place.job)


def assert_states_of_their_steps(job: Job) -> None:
    points = list(job.candidates())
    assert points
    for point in points:
        checkpoint = job.open_checkpoint(point)
        for rank in range(checkpoint.world):
            loaded = bytearray(PIECE)
            box = checkpoint.rank_state(rank).refs[0].box
            checkpoint.load([ReadRequest("w", SHARED, box, memoryview(loaded))])
            assert bytes(loaded) == content(point.step, rank)


def start(place: Place, attempt: int, world: int = 2) -> list[Worker]:
    """Workers of an attempt that an agent has begun, restored and with slots open."""
    workers = [Worker(place, rank=r, world=world, attempt=attempt) for r in range(world)]
    restore(workers)
    return workers


def restore(workers: list[Worker]) -> list[Elected]:
    """All ranks vote: offers and answers come only when all have spoken."""
    found: dict[int, object] = {}

    def one(worker: Worker) -> None:
        try:
            found[worker.rank] = worker.restore()
        except Exception as error:  # noqa: BLE001 - raised below, in the test's thread
            found[worker.rank] = error

    threads = [threading.Thread(target=one, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    for answer in found.values():
        if isinstance(answer, Exception):
            raise answer
    elected = [answer for answer in found.values() if isinstance(answer, Elected)]
    assert len(elected) == len(workers)
    for worker in workers:
        worker.open()
    return elected


def newest_complete(place: Place) -> int:
    return max((e.step or 0 for e in place.events("snapshot.complete")), default=0)


def test_two_ranks_are_cut_persisted_and_restored_from_memory(place: Place) -> None:
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, RANKS2)
    workers = start(place, 1)
    with closing(keeper, agent, *workers):
        train(workers, lambda: place.events("checkpoint.committed"), "a checkpoint")
        train(workers, lambda: newest_complete(place) > 40, "a newer snapshot")
        for worker in workers:
            worker.link.close()
        agent.link.send(WorkersEnded(1))
        agent.begin(2, RANKS2, expected=True)
        again = [Worker(place, rank=r, world=2, attempt=2) for r in range(2)]
        elected = restore(again)
        assert {e.source for e in elected} == {"memory"}
        assert len({e.point for e in elected}) == 1
        event = place.await_event("restore.elected", source="memory", attempt=2)
        assert event.facts["seconds"] < 10
        for worker in again:
            worker.link.close()


def test_offer_holds_every_local_slot_with_the_bytes_written(place: Place) -> None:
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, ((0,),))
    with closing(keeper, agent):
        worker = start(place, 1, world=1)[0]
        train([worker], lambda: newest_complete(place), "a snapshot")
        worker.link.close()
        agent.begin(2, ((0,),))
        again = Worker(place, attempt=2)
        offered = again.ask()
        assert offered.source == "memory"
        assert offered.point is not None
        (slot,) = offered.slots.values()
        snapshot = slot.snapshot()
        assert bytes(snapshot.payload[:PIECE]) == content(offered.point.step, 0)
        snapshot.payload.release()
        snapshot.state.release()
        assert isinstance(again.link.vote(True, timeout=DEADLINE), Elected)
        again.link.close()


@pytest.mark.parametrize(
    "point",
    [
        "keeper.cut.before_take",
        "keeper.digest.before_write",
        "keeper.persist.before_claim_check",
        "keeper.persist.before_pack",
        "store.write.before_pack",
        "store.write.before_index",
        "keeper.persist.after_index",
        "store.local.before_fsync",
        "store.local.before_link",
        "keeper.commit.before_claim_check",
        "keeper.commit.before_manifest",
        "store.commit.before_manifest",
        "store.commit.before_last_look",
        "keeper.commit.after_manifest",
    ],
)
def test_keeper_killed_while_persisting_is_adopted_with_its_memory(
    place: Place, point: str
) -> None:
    """Whatever it was doing: training goes on, the next keeper holds the newest complete snapshot
    and verifies it, checkpoints are committed again, and each that is there is whole and the very
    state of its step (R3, R7, S1)."""
    # The store's settings and the branch are written before the first pack is.
    after = 2 if point.startswith("store.local.") else 0
    faults = json.dumps([{"point": point, "action": "kill", "after": after}])
    keeper = Keeper(place, faults=faults)
    agent = Agent(place)
    agent.begin(1, RANKS2)
    workers = start(place, 1)
    agent.pump()
    with closing(agent, *workers):
        train(workers, lambda: keeper.process.poll() is not None, "the keeper's death")
        assert keeper.process.returncode == -signal.SIGKILL
        second = Keeper(place)
        with closing(second):
            agent.hand_over()
            agent.begin(1, RANKS2)
            train(workers, lambda: place.events("checkpoint.committed"), "a checkpoint")
            train(workers, lambda: all(w.link.connected for w in workers), "workers are back")
            for worker in workers:
                worker.link.close()
            assert_states_of_their_steps(job_of(place))
            agent.begin(2, RANKS2, expected=True)
            again = [Worker(place, rank=r, world=2, attempt=2) for r in range(2)]
            elected = restore(again)
            assert elected[0].source == "memory"
            assert elected[0].point == elected[1].point
            for worker in again:
                worker.link.close()
            second.kill()


def test_snapshot_survives_keeper_and_workers_in_the_agents_hands(place: Place) -> None:
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, RANKS2)
    workers = start(place, 1)
    agent.pump()
    with closing(agent):
        train(workers, lambda: newest_complete(place), "a snapshot")
        keeper.kill()
        for worker in workers:
            worker.link.close()
        step = newest_complete(place)
        second = Keeper(place)
        with closing(second):
            agent.hand_over()
            agent.begin(2, RANKS2, expected=True)
            elected = restore([Worker(place, rank=r, world=2, attempt=2) for r in range(2)])
            assert elected[0].source == "memory"
            assert elected[0].point is not None
            assert elected[0].point.step >= step
            place.await_event("keeper.adopted")


def test_flipped_byte_in_memory_is_never_offered(place: Place) -> None:
    """R6: memory is verified by digest before it is handed out; the checkpoint is taken."""
    place.policy = Policy(snapshot_every=1, checkpoint_every=0.0)
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, ((0,),))
    worker = start(place, 1, world=1)[0]
    with closing(keeper, agent):
        train([worker], lambda: place.events("checkpoint.committed"), "a checkpoint")
        worker.step += 1
        worker.checkpoint()
        assert worker.link.await_durable(worker.step, timeout=DEADLINE).durable
        worker.step += 1
        index = worker.checkpoint()
        until(lambda: newest_complete(place) == worker.step, "the snapshot is complete")
        assert worker.link.await_durable(worker.step, timeout=DEADLINE).durable
        assert worker.link.slots is not None
        worker.link.slots[index].payload[PIECE // 2] ^= 1
        last = worker.step
        worker.link.close()
        agent.begin(2, ((0,),))
        again = Worker(place, attempt=2)
        offered = again.ask()
        place.await_event("memory.corrupt", step=last, rank=0)
        assert (offered.source, offered.point) == ("store", Point(last, 1))
        again.link.close()


def test_agent_death_ends_its_workers_and_keeps_the_memory(place: Place) -> None:
    """The keeper ends the workers within 5 s, finishes its persist, and serves the next agent."""
    keeper = Keeper(place)
    script = Path(__file__).with_name("agent_that_dies.py")
    agent = subprocess.Popen(
        [sys.executable, str(script), str(place.folder), place.name()], stdout=subprocess.PIPE
    )
    assert agent.stdout is not None
    with closing(keeper):
        sleeper = int(agent.stdout.readline())
        pidfd = os.pidfd_open(sleeper)
        agent.kill()
        agent.wait()
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(5000), "the worker lives on without its agent"
        os.close(pidfd)
        place.await_event("agent.lost")
        successor = Agent(place)
        successor.begin(2, ((0,),))
        successor.close()


def test_explicit_checkpoint_is_durable_when_it_says_so(place: Place) -> None:
    place.policy = Policy(snapshot_every=1_000_000, checkpoint_every=1e9)
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, RANKS2)
    workers = start(place, 1)
    with closing(keeper, agent, *workers):
        for worker in workers:
            worker.finish_step()
        for worker in workers:
            worker.checkpoint()
        for worker in workers:
            assert worker.link.await_durable(worker.step, timeout=DEADLINE).durable
        assert Point(1, 1) in job_of(place).candidates()


def test_step_that_is_cut_twice_is_committed_once(place: Place) -> None:
    place.policy = Policy(snapshot_every=1_000_000, checkpoint_every=1e9)
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, ((0,),))
    worker = start(place, 1, world=1)[0]
    with closing(keeper, agent, worker):
        worker.finish_step()
        for _ in range(2):
            worker.checkpoint()
            assert worker.link.await_durable(1, timeout=DEADLINE).durable
        worker.finish_step()
        worker.checkpoint()
        assert worker.link.await_durable(2, timeout=DEADLINE).durable
        assert [e.step for e in place.events("checkpoint.committed")] == [1, 2]


def test_keeper_that_nobody_needs_ends_by_itself(place: Place) -> None:
    settings = place.settings()
    keeper = subprocess.Popen(
        [sys.executable, "-m", "everstep.keeper", "--store", settings.store, "--job",
         settings.job, "--idle-seconds", "0.2"],
    )  # fmt: skip
    assert keeper.wait(DEADLINE) == 0


def test_await_durable_of_a_step_that_nobody_cut_ends_in_time(place: Place) -> None:
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, ((0,),))
    worker = start(place, 1, world=1)[0]
    with closing(keeper, agent, worker):
        result = worker.link.await_durable(999, timeout=0.3)
        assert not result.durable
        assert result.reason


def test_no_free_slot_skips_the_cut_and_training_goes_on(place: Place) -> None:
    """R7, R3: a persist that hangs keeps its slot; one more snapshot fits, then cuts pause."""
    hang = json.dumps([{"point": "keeper.persist.before_pack", "action": "hang"}])
    keeper = Keeper(place, faults=hang)
    agent = Agent(place)
    agent.begin(1, ((0,),))
    worker = start(place, 1, world=1)[0]
    with closing(keeper, agent, worker):
        train([worker], lambda: len(place.events("snapshot.complete")) == 2, "two snapshots")
        before = worker.step
        train([worker], lambda: worker.step > before + 300, "steps without a slot")
        assert len(place.events("snapshot.complete")) == 2
        assert worker.link.ask_slot(worker.step, timeout=0.2) is None


def test_full_store_is_an_event_and_the_next_save_works(place: Place) -> None:
    """R3: StoreFull never reaches training; retried with backoff until a newer one supersedes."""
    faults = json.dumps([{"point": "store.write.before_pack", "action": "raise:ENOSPC"}])
    keeper = Keeper(place, faults=faults)
    agent = Agent(place)
    agent.begin(1, ((0,),))
    worker = start(place, 1, world=1)[0]
    with closing(keeper, agent, worker):
        train([worker], lambda: place.events("persist.failed"), "a failure")
        failed = place.events("persist.failed")[0]
        assert failed.rank == 0
        assert "No space" in failed.text or "space" in failed.text
        train([worker], lambda: place.events("checkpoint.committed"), "the next save")


def test_cut_that_one_rank_skips_is_dropped_and_training_goes_on(place: Place) -> None:
    """R2: completeness is judged, not agreed on beforehand."""
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, RANKS2)
    workers = start(place, 1)
    with closing(keeper, agent, *workers):
        skipped = []

        def step() -> bool:
            for worker in workers:
                worker.step += 1
                worker.link.page.post_boundary(
                    worker.local_rank, worker.step, time.monotonic_ns(), 1_000_000
                )
                cut = worker.link.page.cut_at(worker.local_rank, worker.step)
                if cut and worker.rank == 1 and not skipped:
                    skipped.append(worker.step)
                    worker.link.cut_skipped(worker.step, "the test says so")
                elif cut:
                    worker.write(cut[1], sequence=cut[0])
            return bool(skipped and place.events("cut.dropped"))

        until(step, "a dropped cut")
        event = place.events("cut.dropped")[0]
        assert (event.step, event.rank) == (skipped[0], 1)
        train(workers, lambda: newest_complete(place) > skipped[0], "the next cut")


def test_ranks_with_other_layouts_lose_the_cut_not_the_training(place: Place) -> None:
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, RANKS2)
    workers = start(place, 1)
    workers[1].layout = "another"
    with closing(keeper, agent, *workers):
        train(workers, lambda: place.events("cut.dropped"), "a dropped cut")
        assert "layout" in place.events("cut.dropped")[0].text
        workers[1].layout = "layout"
        train(workers, lambda: newest_complete(place), "a complete one")


def test_replicas_that_differ_are_named_and_demoted(place: Place) -> None:
    """R8: the cut is dropped, the event names FQN and ranks, workers learn what is demoted."""
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, RANKS2)
    workers = start(place, 1)
    for worker in workers:
        worker.replicas = {"w": f"digest-{worker.rank}", "same": "x"}
    with closing(keeper, agent, *workers):
        train(workers, lambda: place.events("replica.mismatch"), "a mismatch")
        event = place.events("replica.mismatch")[0]
        assert event.facts["fqn"] == "w"
        assert event.facts["ranks"] == [[0], [1]]
        until(lambda: workers[0].link.page.demoted(), "the page says it")
        assert workers[0].link.ask_demoted() == ("w",)
        for worker in workers:
            worker.replicas = {"same": "x"}
        train(workers, lambda: newest_complete(place), "a cut without it")


def test_preemption_stops_all_ranks_at_one_durable_step(place: Place) -> None:
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, RANKS2)
    workers = start(place, 1)
    with closing(keeper, agent, *workers):
        train(workers, lambda: newest_complete(place), "training")
        workers[1].finish_step()  # one rank is ahead when the signal comes
        agent.link.send(Preempt(30.0))
        arrived: dict[int, int] = {}

        def step() -> bool:
            for worker in workers:
                requested, stop, final = worker.link.page.stop()
                if requested and worker.step >= stop:
                    if arrived.get(worker.rank) != worker.step:
                        arrived[worker.rank] = worker.step
                        worker.link.arrived(worker.step)
                else:
                    worker.finish_step()
            requested, _, final = workers[0].link.page.stop()
            return final

        until(step, "the final stop")
        _, stop, _ = workers[0].link.page.stop()
        assert {worker.step for worker in workers} == {stop}
        for worker in workers:
            worker.checkpoint()
        for worker in workers:
            assert worker.link.await_durable(stop, timeout=DEADLINE).durable
        event = place.await_event("job.preempted")
        assert event.facts["durable"] is True
        assert Point(stop, 1) in job_of(place).candidates()


def test_world_size_that_changed_is_refused_to_all(place: Place) -> None:
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, RANKS2)
    workers = start(place, 1)
    with closing(keeper, agent):
        train(workers, lambda: place.events("checkpoint.committed"), "a checkpoint")
        for worker in workers:
            worker.link.close()
        agent.begin(2, ((0,),))
        with pytest.raises(WorldChanged, match="1 rank,"):
            Worker(place, attempt=2).ask()


def test_expected_recovery_point_that_is_not_there_stops_the_job(place: Place) -> None:
    """R5: never from scratch silently."""
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, ((0,),), resume="require")
    worker = Worker(place, attempt=1)
    nothing = "nothing is in memory or in the store"
    with closing(keeper, agent, worker), pytest.raises(NoRecoveryPoint, match=nothing):
        worker.ask()


def test_candidate_that_one_rank_cannot_load_is_skipped_by_all(place: Place) -> None:
    """R6: all ranks vote, on any failure all take the next candidate."""
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, RANKS2)
    workers = start(place, 1)
    with closing(keeper, agent):
        train(workers, lambda: place.events("checkpoint.committed"), "a checkpoint")
        for worker in workers:
            worker.link.close()
        agent.begin(2, RANKS2)
        again = [Worker(place, rank=r, world=2, attempt=2) for r in range(2)]
        with ThreadPoolExecutor(2) as pool:
            first = list(pool.map(lambda w: w.ask(), again))
            assert len({o.point for o in first}) == 1
            assert {o.source for o in first} == {"memory"}
            votes = list(
                pool.map(
                    lambda w: w.link.vote(w.rank == 0, "cannot read it", timeout=DEADLINE), again
                )
            )
        assert len({(v.source, v.point) for v in votes}) == 1
        assert (votes[0].source, votes[0].point) != (first[0].source, first[0].point)
        event = place.await_event("restore.rejected")
        assert "rank 1: cannot read it" in event.text


def test_memory_limit_is_told_before_it_is_hit(place: Place) -> None:
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, ((0,),))
    worker = Worker(place, attempt=1)
    worker.restore()
    with closing(keeper, agent, worker):
        huge = Geometry.fitting(payload=1 << 46, state=1, layout=1, digests=1)
        with pytest.raises(MemoryTooSmall, match=str(2 * huge.total)):
            worker.link.open_slots(huge)
        place.await_event("memory.too_small", rank=0)
        worker.open()  # the connection is as good as before


def test_slots_grow_and_the_snapshot_in_the_old_ones_is_kept(place: Place) -> None:
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, ((0,),))
    worker = start(place, 1, world=1)[0]
    with closing(keeper, agent):
        train([worker], lambda: newest_complete(place), "a snapshot")
        kept = newest_complete(place)
        worker.open(Geometry.fitting(payload=4 * PIECE, state=4096, layout=4096, digests=4096))
        worker.link.close()
        agent.begin(2, ((0,),))
        again = Worker(place, attempt=2)
        elected = again.restore()
        assert elected.point is not None
        assert (elected.source, elected.point.step >= kept) == ("memory", True)
        again.open(Geometry.fitting(payload=4 * PIECE, state=4096, layout=4096, digests=4096))
        train([again], lambda: newest_complete(place) > elected.point.step, "in the new slots")
        agent.pump()
        assert SlotName(0, 3) in agent.held
        again.link.close()


def test_standalone_worker_begins_claims_and_restarts_the_keeper(place: Place) -> None:
    """Plain python: the keeper claims, the worker brings a dead keeper back, slots and all."""
    keepers = [Keeper(place)]

    def restart() -> None:
        keepers.append(Keeper(place))

    worker = Worker(place, launch="plain-1", restart=restart)
    assert worker.link.attempt == 1
    worker.restore()
    worker.open()
    try:
        train([worker], lambda: newest_complete(place), "a snapshot")
        keepers[0].kill()
        train([worker], lambda: worker.link.connected and len(keepers) > 1, "a new keeper")
        assert worker.link.attempt == 1
        kept = newest_complete(place)
        train([worker], lambda: newest_complete(place) > kept, "snapshots go on")
        worker.link.close()
        next_one = Worker(place, launch="plain-2")
        assert next_one.link.attempt == 2
        assert next_one.ask().source == "memory"
        next_one.link.close()
    finally:
        for keeper in keepers:
            keeper.kill()


def test_finished_job_without_an_agent_leaves_no_keeper(place: Place) -> None:
    keeper = Keeper(place)
    worker = Worker(place, launch="one")
    worker.restore()
    worker.open()
    worker.finish_step()
    worker.checkpoint()
    assert worker.link.await_durable(worker.step, timeout=DEADLINE).durable
    worker.close(finished=True)
    assert keeper.wait() == 0
    place.await_event("job.finished")
    assert job_of(place).owner() is None


def test_job_that_another_live_process_owns_is_refused(place: Place) -> None:
    keeper = Keeper(place)
    other = Place(place.folder)
    worker = Worker(place, launch="one")
    elsewhere = Keeper(other, node=1)
    with closing(keeper, worker, elsewhere):
        process = multiprocessing.get_context("spawn").Process(target=_claim, args=(place.folder,))
        process.start()
        process.join(DEADLINE)
        assert process.exitcode == 0


def _claim(folder: Path) -> None:
    """In another process: the keeper of another node of the same job claims for it."""
    place = Place(folder)
    with pytest.raises(JobOwned):
        WorkerLink.connect(
            place.name(1),
            Hello("worker", os.getpid(), "two"),
            begin=BeginAttempt("two", 0, 0, ((0,),)),
            timeout=DEADLINE,
        )


def test_second_keeper_of_the_same_name_leaves_quietly(place: Place) -> None:
    keeper = Keeper(place)
    agent = Agent(place)
    second = Keeper(place)
    with closing(keeper, agent):
        assert second.wait() == 0


def test_leave_ends_the_keeper_when_the_work_is_durable(place: Place) -> None:
    place.policy = Policy(snapshot_every=1, checkpoint_every=1e9)
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, ((0,),))
    worker = start(place, 1, world=1)[0]
    with closing(agent):
        train([worker], lambda: len(place.events("snapshot.complete")) > 2, "snapshots")
        newest = newest_complete(place)
        worker.link.close()
        agent.leave()
        assert keeper.wait() == 0
        assert place.await_event("checkpoint.committed").step >= newest


def test_keeper_ignores_signals_of_the_terminal_and_ends_in_order_on_sigterm(
    place: Place,
) -> None:
    keeper = Keeper(place)
    agent = Agent(place)
    with closing(agent):
        for number in (signal.SIGINT, signal.SIGHUP):
            keeper.process.send_signal(number)
        agent.begin(1, ((0,),))
        assert os.getsid(keeper.process.pid) == keeper.process.pid
        keeper.process.send_signal(signal.SIGTERM)
        assert keeper.wait() == 0


def test_last_words_reach_the_agent(place: Place) -> None:
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, ((0,),))
    worker = start(place, 1, world=1)[0]
    with closing(keeper, agent, worker):
        worker.link.fatal(Fatal("EVS-403", "names differ", 78, 0))

        def told() -> bool:
            agent.pump()
            return any(isinstance(message, Fatal) for message in agent.heard)

        until(told, "the agent hears it")
        place.await_event("job.fatal", rank=0)


def test_stuck_client_blocks_nobody(place: Place) -> None:
    """A connection that says Hello and never reads, and one that speaks nonsense."""
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, ((0,),))
    with closing(keeper, agent):
        strange = socket.socket(socket.AF_UNIX)
        strange.connect("\0" + place.name())
        strange.sendall(b"\xff" * 64)
        half = socket.socket(socket.AF_UNIX)
        half.connect("\0" + place.name())
        half.sendall(b"\x10\x00\x00\x00half")
        worker = start(place, 1, world=1)[0]
        train([worker], lambda: newest_complete(place), "a snapshot")
        worker.link.close()
        strange.close()
        half.close()


def test_two_hundred_snapshots_leak_nothing(place: Place) -> None:
    place.policy = Policy(snapshot_every=1, checkpoint_every=0.05)
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, ((0,),))
    worker = start(place, 1, world=1)[0]
    with closing(keeper, agent, worker):
        for _ in range(20):
            worker.step += 1
            worker.checkpoint()
        assert worker.link.await_durable(worker.step, timeout=DEADLINE).durable
        before = _resources(keeper.process.pid)
        for _ in range(200):
            worker.step += 1
            grant = worker.link.ask_slot(worker.step, timeout=DEADLINE)
            assert grant is not None
            persist = worker.step % 20 == 0
            worker.write(grant.slot, sequence=grant.sequence, persist=persist)
        worker.step += 1
        worker.checkpoint()
        assert worker.link.await_durable(worker.step, timeout=DEADLINE).durable
        until(lambda: _resources(keeper.process.pid) <= before, "nothing leaked", 5.0)


def _resources(pid: int) -> tuple[int, int, int]:
    """Descriptors, slot mappings and threads of a process."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return (
        len(os.listdir(f"/proc/{pid}/fd")),
        sum("memfd" in line for line in maps),
        len(os.listdir(f"/proc/{pid}/task")),
    )


def test_two_nodes_restore_from_their_own_memory(place: Place) -> None:
    """Keepers of two nodes on one machine: node 0 decides for both (R2), each rank finds its
    snapshot on its own node."""
    keepers = [Keeper(place, 0), Keeper(place, 1)]
    agents = [Agent(place, 0), Agent(place, 1)]
    ranks = ((0,), (1,))
    with closing(*keepers, *agents):
        _begin_both(agents, 1, ranks)
        workers = _two_node_workers(place, 1)
        train(workers, lambda: place.events("checkpoint.committed"), "a checkpoint of both")
        kept = newest_complete(place)
        for worker in workers:
            worker.link.close()
        _begin_both(agents, 2, ranks)
        again = [Worker(place, rank=r, world=2, attempt=2, node=r, local_rank=0) for r in range(2)]
        elected = restore(again)
        assert elected[0].source == "memory"
        assert elected[0].point == elected[1].point
        assert elected[0].point is not None
        assert elected[0].point.step >= kept
        for worker in again:
            worker.link.close()


def test_other_nodes_come_back_after_node_0s_keeper_died(place: Place) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.set_inheritable(True)
    port = listener.getsockname()[1]
    keepers = [Keeper(place, 0, listen_fd=listener.fileno()), Keeper(place, 1)]
    agents = [Agent(place, 0), Agent(place, 1)]
    ranks = ((0,), (1,))
    with closing(keepers[1], *agents):
        _begin_both(agents, 1, ranks)
        assert agents[0].begun is not None
        assert agents[0].begun.port == port
        workers = _two_node_workers(place, 1)
        train(workers, lambda: newest_complete(place), "a snapshot")
        agents[0].pump()
        keepers[0].kill()
        third = Keeper(place, 0, listen_fd=listener.fileno())
        with closing(third, *workers):
            agents[0].hand_over()
            agents[0].begin(1, ranks, token="secret")
            kept = newest_complete(place)
            train(workers, lambda: newest_complete(place) > kept, "snapshots of both go on")
    listener.close()


def _begin_both(agents: list[Agent], attempt: int, ranks: tuple[tuple[int, ...], ...]) -> None:
    agents[0].begin(attempt, ranks, token="secret")
    assert agents[0].begun is not None
    where = ("127.0.0.1", agents[0].begun.port)
    agents[1].begin(attempt, ranks, token="secret", coordinator=where)


def _two_node_workers(place: Place, attempt: int) -> list[Worker]:
    workers = [
        Worker(place, rank=r, world=2, attempt=attempt, node=r, local_rank=0) for r in range(2)
    ]
    restore(workers)
    return workers


def test_geometry_given_again_is_the_same_memory(place: Place) -> None:
    keeper = Keeper(place)
    agent = Agent(place)
    agent.begin(1, ((0,),))
    worker = start(place, 1, world=1)[0]
    with closing(keeper, agent, worker):
        first = worker.link.slots
        assert worker.link.open_slots(GEOMETRY) == first
