"""What the agent says of its own: each wording is known to the judge, wherever it is written."""

from __future__ import annotations

import pytest
from classify_scenes import TWO, closed, stack, tb

from everstep.faults.catalog import load
from everstep.faults.judge import judge
from everstep.faults.records import UNKNOWN, Incident, Signal, Source, Verdict

PEERS = tuple(Signal("log", closed("10.7.0.12"), rank, "h-a", 100.0) for rank in (0, 1))
KILLED = "RuntimeError: DataLoader worker (pid 88) is killed by signal: Killed."


def judged(*signals: Signal) -> Verdict:
    return judge(Incident("x", signals, TWO, addresses={"10.7.0.12": "h-b"}), load())


def said(
    text: str, node: str | None = "h-b", time: float = 99.0, source: Source = "agent"
) -> Signal:
    return Signal(source, text, None, node, time)


def root(verdict: Verdict) -> tuple[str, str, tuple[int, ...], str | None]:
    return verdict.fault, verdict.action, verdict.root_ranks, verdict.root_node


WORDS: tuple[tuple[str, Signal, str, str, tuple[int, ...], str | None], ...] = (
    ("lost", said("the agent of node h-b has shown no life for 10 s"), "NODE_NOT_READY", "restart_elsewhere", (4, 5, 6, 7), "h-b"),
    ("notice", said('termination notice for this node: {"action": "terminate"}'), "SPOT_RECLAIM_MAINT", "restart_elsewhere", (4, 5, 6, 7), "h-b"),
    ("empty notice", said("termination notice for this node: the file is empty"), "SPOT_RECLAIM_MAINT", "restart_elsewhere", (4, 5, 6, 7), "h-b"),
    ("time is up", said("slurm watch: allocation time limit reached", source="slurm"), "TIME_LIMIT", "wait_and_retry", (), None),
    ("mount is stale", said("mount watch: mount /data (nfs4 filer:/d) of the store is stale: no answer for 12 s"), "STALE_MOUNT", "wait_and_retry", (), "h-b"),
    ("not mounted", said("mount watch: /data (nfs4 filer:/d) is not a mount point any more: the store at /data/x lies on /"), "STALE_MOUNT", "wait_and_retry", (), "h-b"),
    ("read-only", said("mount watch: /scratch (ext4 /dev/nvme0n1p1) of the store was remounted read-only"), "FS_READONLY_IO", "restart_elsewhere", (), "h-b"),
    ("disk", said("disk watch: the store at /ckpt: 0.0K of 1.0T free: No space left on device"), "DISK_FULL", "restart_in_place", (), "h-b"),
    ("processes", said("cgroup: fork rejected by pids controller in /job: pids.events max 4 (+2), limit 512", source="kernel"), "PROC_LIMITS", "stop", (4, 5, 6, 7), "h-b"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("signal", "fault", "action", "ranks", "node"),
    [x[1:] for x in WORDS],
    ids=[x[0] for x in WORDS],
)
def test_word_of_the_agent_goes_before_errors_of_peers(
    signal: Signal, fault: str, action: str, ranks: tuple[int, ...], node: str | None
) -> None:
    assert root(judged(signal, *PEERS)) == (fault, action, ranks, node)


@pytest.mark.parametrize("name", ["memory.events", "memory.oom_control"])
def test_memory_kill_of_the_cgroup_is_of_the_rank_that_was_killed(name: str) -> None:
    kill = said(
        f"{name}: oom_kill 3 (+1): a process of the cgroup /job was killed for memory (memory.max 64.0G)",
        source="kernel",
    )
    died = Signal("exit", "pid 71: killed by signal 9", 6, "h-b", 99.5, exit_code=-9)
    assert root(judged(kill, died, *PEERS)) == ("HOST_OOM_KILL", "restart_in_place", (6,), "h-b")
    worker = Signal("log", tb(KILLED), 5, "h-b", 99.5)
    end = Signal("exit", "pid 71: exited with code 1", 5, "h-b", 99.7, exit_code=1)
    assert root(judged(kill, worker, end, *PEERS)) == (
        "HOST_OOM_KILL", "restart_in_place", (5,), "h-b",
    )  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "disk watch: the store at /ckpt: 0.0K of 1.0T free: No space left on device",
        "disk watch: /dev/shm: size 64.0M used 64.0M: No space left on device",
        "mount watch: mount /data (nfs4 filer:/d) of the store is stale: no answer for 12 s",
        "clock watch: the wall clock jumped by +31.0 s against the monotonic clock, from 1 s to 32 s",
        "watch: the source kernel log is not available on this node, degraded: this user may not read /dev/kmsg",
        "watch: the source mounts of the store is late, what it would show is not seen: no look at it came back for 20 s",
        "watch: 12 signals of the source kernel log were dropped: it gives more than the 65536 bytes that are kept of it",
        "log of rank 3: 512 KiB came faster than they could be searched and are forgotten; its end is kept",
        "blind for hangs: no rank has attached",
        "slurm watch: the allocation ends in 42 s",
        "memory.events: the cgroup /job reclaims at its memory's limit, 12 times (+2) (memory.max 64.0G)",
    ],
)  # fmt: skip
def test_a_standing_word_does_not_take_the_place_of_an_error_of_the_program(text: str) -> None:
    error = Signal("log", tb("ValueError: x"), 2, "h-a", 100.0)
    end = Signal("exit", "pid 7: exited with code 1", 2, "h-a", 100.5, exit_code=1)
    verdict = judged(error, end, said(text, node="h-a"))
    assert (verdict.fault, verdict.root_ranks) == ("USER_EXCEPTION", (2,))


@pytest.mark.parametrize(
    "text",
    [
        "watch: the source kernel log is not available on this node, degraded: this user may not read /dev/kmsg",
        "watch: the source disk of the store gives signals again",
        "log of rank 3: 512 KiB came faster than they could be searched and are forgotten; its end is kept",
        "the output of rank 3 cannot be read: the pipe is closed",
        "blind for hangs: no control page of this attempt is held",
        "mount watch: the store is well again",
    ],
)
def test_what_cannot_be_seen_is_no_fault(text: str) -> None:
    assert judged(said(text)).fault == UNKNOWN


def test_what_is_well_again_is_no_fault() -> None:
    stale = said(
        "mount watch: mount /d (nfs4 f:/d) of the store is stale: no answer for 12 s", time=40.0
    )
    again = said("mount watch: the store is well again", time=60.0)
    assert judged(stale, again).fault == UNKNOWN
    assert (
        judged(stale, said("mount watch: the data is well again", time=60.0)).fault == "STALE_MOUNT"
    )
    full = said(
        "disk watch: the store at /c: 0.0K of 1.0T free: No space left on device", time=40.0
    )
    room = said("disk watch: the store at /c: there is room again", time=60.0)
    assert judged(full, room).fault == UNKNOWN


def test_a_jump_of_the_clock_is_noted_while_training_goes_on() -> None:
    jump = said(
        "clock watch: the wall clock jumped by -61.0 s against the monotonic clock, from 1 s to 2 s"
    )
    alive = Signal("heartbeat", "step=9 phase=step last_beat_age_s=0.2", 0, "h-a", 100.0)
    verdict = judged(jump, alive)
    assert (verdict.fault, verdict.action, verdict.root_ranks) == ("CLOCK_SKEW", "continue", ())


def test_a_hang_by_the_agents_word_and_by_heartbeats() -> None:
    told = said(
        "no step for 31 s: nothing has moved in 2 looks (rank 6 in load (/app/data.py:7))",
        node="h-b",
    )
    assert root(judged(told)) == ("HANG_APP", "restart_in_place", (6,), None)
    beats = [
        Signal("heartbeat", f"step=120 phase={'data' if rank == 6 else 'step:collective'} last_beat_age_s=31.0",
               rank, "h-a" if rank < 4 else "h-b", 200.0) for rank in range(8)
    ]  # fmt: skip
    assert root(judged(*beats)) == ("HANG_APP", "restart_in_place", (6,), None)


def test_a_hang_in_which_all_wait_names_nobody() -> None:
    ranks = ", ".join(f"rank {rank}" for rank in range(8))
    told = said(f"no step for 31 s: nothing has moved in 2 looks ({ranks})")
    waits = [
        Signal("stack", stack("all_reduce (torch/distributed/distributed_c10d.py:2501)", "f (/a.py:1)"),
               rank, "h-a" if rank < 4 else "h-b", 200.0) for rank in range(8)
    ]  # fmt: skip
    verdict = judged(told, *waits)
    assert (verdict.fault, verdict.root_ranks, verdict.root_node) == (UNKNOWN, (), None)


def test_flight_recorder_tells_who_has_nothing_pending() -> None:
    signals = [
        Signal("agent", f"[PG ID 0 PG GUID 0 Rank {rank}] flight recorder: last enqueued work: "
               f"{40 if rank == 5 else 41}, last completed work: 40", rank, "h-a" if rank < 4 else "h-b", 200.0)
        for rank in range(8)
    ]  # fmt: skip
    assert root(judged(*signals))[::2] == ("NCCL_WATCHDOG_TIMEOUT", (5,))


@pytest.mark.parametrize(
    ("finding", "fault", "ranks"),
    [
        ("missing ranks: {5}", "NCCL_WATCHDOG_TIMEOUT", (5,)),
        ("the calls of ranks 5 do not match: Error type: COLLECTIVE_TYPE_MISMATCH, rank 5", "COLLECTIVE_MISMATCH", ()),
        ("the calls of ranks 5 do not match: Error type: COLLECTIVE_STATE_MISMATCH, rank 5", UNKNOWN, ()),
    ],
)  # fmt: skip
def test_finding_of_the_flight_recorder(finding: str, fault: str, ranks: tuple[int, ...]) -> None:
    where = "flight recorder: all_reduce at work sequence id: 41 of group default"
    verdict = judged(said(f"{where}: {finding}", node=None))
    assert (verdict.fault, verdict.root_ranks) == (fault, ranks)


def test_f2_our_own_signals_blame_nobody() -> None:
    ends = [
        Signal("exit", "killed by signal 15", rank, "h-a", 90.0, exit_code=-15, ours=True)
        for rank in range(4)
    ]
    verdict = judged(*ends)
    assert (verdict.fault, verdict.root_ranks, verdict.root_node) == (UNKNOWN, (), None)


def test_little_room_is_noted() -> None:
    verdict = judged(said("disk watch: the store at /ckpt: 9.0G of 1.0T free: space is low"))
    assert (verdict.fault, verdict.action, verdict.root_ranks) == ("DISK_FULL", "continue", ())


def test_files_of_a_mount_that_is_gone_are_not_missing_everywhere() -> None:
    gone = said(
        "mount watch: /data (nfs4 filer:/d) is not a mount point any more: the data at /data lies on /"
    )
    error = tb("FileNotFoundError: [Errno 2] No such file or directory: '/data/shard-3.tar'")
    logs = [Signal("log", error, rank, "h-b", 100.0) for rank in (4, 5)]
    verdict = judged(gone, *logs)
    assert (verdict.fault, verdict.action, verdict.root_node) == (
        "STALE_MOUNT",
        "wait_and_retry",
        "h-b",
    )
    assert judged(*logs).fault == "DATA_MISSING"
