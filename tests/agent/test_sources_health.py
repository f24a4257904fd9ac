"""Sources about a node's health: what they say, and that the catalogue knows what it means."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_fakes import SetClock, classes, facts, until

from everstep.agent.watch.cgroup import Cgroup, files_of
from everstep.agent.watch.disk import SHM, Disk, Room, said
from everstep.agent.watch.mounts import DEADLINE, Mounts, mount_of, parse
from everstep.agent.watch.notices import NoticeFile, SlurmEnd, notice_file, slurm_end
from everstep.agent.watch.source import Blind, Source
from everstep.agent.watch.wallclock import WallClock
from everstep.faults.catalog import load
from everstep.faults.judge import judge
from everstep.faults.records import Incident, Signal

GIB = 1 << 30


def look(source: Source) -> list[str]:
    return [signal.text for signal in source.look()]


# -- control groups


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return tmp_path / "mine"


def group(top: Path, **files: str) -> None:
    top.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (top / name.replace("_", ".", 1)).write_text(text)


def second(top: Path, kills: int = 0, at_limit: int = 0, refused: int = 0) -> None:
    group(
        top, memory_events=f"low 0\nhigh 0\nmax {at_limit}\noom 1\noom_kill {kills}\n",
        memory_max=f"{4 * GIB}\n", memory_current=f"{3 * GIB}\n",
        pids_events=f"max {refused}\n", pids_max="512\n",
    )  # fmt: skip


def test_a_memory_kill_of_version_2_is_one_by_its_counter(tmp_path: Path, mine: Path) -> None:
    mine.write_text("0::/job.slice/a\n")
    second(tmp_path / "job.slice/a", kills=2)
    source = Cgroup(SetClock(), tmp_path, mine)
    assert look(source) == [], "what was counted before this agent began is not its job's"
    second(tmp_path / "job.slice/a", kills=3)
    (signal,) = source.look()
    assert signal == Signal(
        "kernel",
        "memory.events: oom_kill 3 (+1): a process of the cgroup /job.slice/a was killed for "
        "memory (limit 4096 MiB, 3072 MiB in use)",
    )
    assert classes(signal) == ["HOST_OOM_KILL"]
    assert look(source) == []


def test_a_memory_kill_names_the_rank_that_was_killed(tmp_path: Path, mine: Path) -> None:
    mine.write_text("0::/\n")
    second(tmp_path)
    source = Cgroup(SetClock(), tmp_path, mine)
    source.look()
    second(tmp_path, kills=1)
    (text,) = look(source)
    verdict = judge(
        Incident(
            "a",
            (
                Signal("kernel", text, node="n-1", time=10.0),
                Signal("exit", rank=1, node="n-1", time=10.1, exit_code=-9),
                Signal("exit", rank=0, node="n-1", time=10.3, exit_code=-9, ours=True),
            ),
            {"n-1": (0, 1)},
        ),
        load(),
    )
    assert (verdict.fault, verdict.root_ranks, verdict.action) == (
        "HOST_OOM_KILL", (1,), "restart_in_place",
    )  # fmt: skip


def test_a_memory_kill_names_it_where_the_kernel_numbers_processes_otherwise() -> None:
    """In a container: the kernel's numbers are the host's."""
    killed = [
        "python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,"
        "oom_memcg=/a,task_memcg=/a,task=python,pid=918273,uid=0",
        "Memory cgroup out of memory: Killed process 918273 (python) total-vm:422116kB",
    ]
    signals = [
        *(Signal("kernel", text, node="n-1", time=10.0) for text in killed),
        Signal("exit", "killed by signal 9 (pid 41)", 1, "n-1", 10.1, exit_code=-9),
        Signal("exit", "killed by signal 9 (pid 40)", 0, "n-1", 10.3, exit_code=-9, ours=True),
    ]
    verdict = judge(Incident("a", tuple(signals), {"n-1": (0, 1)}), load())
    assert (verdict.fault, verdict.root_ranks) == ("HOST_OOM_KILL", (1,))


def test_refused_processes_are_a_limit(tmp_path: Path, mine: Path) -> None:
    mine.write_text("0::/\n")
    second(tmp_path, refused=1)
    source = Cgroup(SetClock(), tmp_path, mine)
    source.look()
    second(tmp_path, refused=4)
    (signal,) = source.look()
    assert classes(signal) == ["PROC_LIMITS"]
    assert "max 4 (+3), limit 512" in signal.text


def test_pressure_is_told_once_a_minute_and_blames_nobody(tmp_path: Path, mine: Path) -> None:
    mine.write_text("0::/\n")
    clock = SetClock()
    second(tmp_path)
    source = Cgroup(clock, tmp_path, mine)
    source.look()
    told = []
    for turn in range(1, 7):
        clock.pass_(20.0)
        second(tmp_path, at_limit=turn)
        told += source.look()
    assert len(told) == 2
    assert classes(*told) == []


def test_version_1_counts_in_trees_of_its_own(tmp_path: Path, mine: Path) -> None:
    mine.write_text("9:name=systemd:/\n8:pids:/a\n4:cpu,memory:/docker/b\n0::/\n")
    top = tmp_path / "memory/docker/b"
    group(top, memory_oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    group(top, memory_failcnt="7\n", memory_limit_in_bytes="9223372036854771712\n")
    source = Cgroup(SetClock(), tmp_path, mine)
    assert look(source) == []
    group(top, memory_oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    (text,) = look(source)
    assert text == (
        "memory.oom_control: oom_kill 1 (+1): a process of the cgroup /docker/b was killed for "
        "memory (no limit)"
    )
    assert classes(Signal("kernel", text)) == ["HOST_OOM_KILL"]


def test_a_container_sees_its_group_at_the_top(tmp_path: Path) -> None:
    second(tmp_path)
    assert files_of("0::/kubepods/pod1/abc\n", tmp_path).kill == tmp_path / "memory.events"


def test_a_machine_without_counters_is_blind(tmp_path: Path, mine: Path) -> None:
    with pytest.raises(Blind, match="is not there"):
        Cgroup(SetClock(), tmp_path, mine).look()
    mine.write_text("0::/\n")
    with pytest.raises(Blind, match="no counters"):
        Cgroup(SetClock(), tmp_path, mine).look()


# -- disks


def room(free: int, total: int = 100 * GIB, inodes: int = 10**6, of: int = 10**7) -> object:
    return os.statvfs_result((4096, 4096, total // 4096, free // 4096, free // 4096, of, inodes,
                              inodes, 0, 255))  # fmt: skip


def test_a_disk_that_runs_full_is_told_when_it_changes(tmp_path: Path) -> None:
    now = [room(50 * GIB)]
    source = Disk("the store", tmp_path / "not/made/yet", lambda _: now[0])  # type: ignore[arg-type, return-value]
    assert look(source) == []
    now[0] = room(4 * GIB)
    (low,) = source.look()
    assert low.text.endswith("4.0G of 100.0G free: space is low")
    assert [(fact.fault, fact.severity) for fact in facts(low)] == [("DISK_FULL", "notice")]
    now[0] = room(3 * GIB)
    assert look(source) == [], "it is still low"
    now[0] = room(4096)
    (full,) = source.look()
    assert [(fact.fault, fact.severity) for fact in facts(full)] == [("DISK_FULL", "degraded")]
    assert [signal.text for signal in source.standing()] == [full.text]
    now[0] = room(50 * GIB)
    (well,) = source.look()
    assert well.text.endswith("there is room again")
    assert classes(well) == []
    assert list(source.standing()) == []


@pytest.mark.parametrize(("free", "total", "inodes", "end"), [
    (800 * GIB, 20_000 * GIB, 10**6, ""),
    (9 * GIB, 100 * GIB, 10**6, ""),
    (4 * GIB, 100 * GIB, None, ": space is low"),
    (0, 100 * GIB, None, ": No space left on device"),
    (0, 0, None, ""),  # no file system of blocks at all
    (50 * GIB, 100 * GIB, 0, ", but 0 inodes are: No space left on device"),
    (50 * GIB, 100 * GIB, 17, ", but 17 inodes are: inodes are low"),
])  # fmt: skip
def test_what_is_low(free: int, total: int, inodes: int | None, end: str) -> None:
    text = said("the store", Path("/data"), Room(free, total, inodes))
    assert text.endswith(end)
    assert bool(text) == bool(end)
    if text:
        assert classes(Signal("agent", text)) == ["DISK_FULL"]


def test_full_shared_memory_is_that_and_no_full_disk() -> None:
    text = said("shared memory", SHM, Room(4096, 64 << 20, 10**5))
    assert text == "disk watch: /dev/shm: size 64.0M used 64.0M: No space left on device"
    assert classes(Signal("agent", text)) == ["SIGBUS_SHM"]
    dead = Signal("exit", rank=0, node="n-1", time=5.0, exit_code=-7)
    full = Signal("agent", text, node="n-1", time=4.0)
    verdict = judge(Incident("a", (dead, full), {"n-1": (0, 1)}), load())
    assert (verdict.fault, verdict.root_ranks, verdict.action) == ("SIGBUS_SHM", (0,), "stop")


def test_a_full_disk_explains_an_end_without_words_and_no_error_of_the_program() -> None:
    full = Signal(
        "agent", said("the store", Path("/data"), Room(0, GIB, None)), node="n-1", time=1.0
    )
    dead = Signal("exit", rank=0, node="n-1", time=5.0, exit_code=1)
    nodes = {"n-1": (0, 1)}
    assert judge(Incident("a", (full, dead), nodes), load()).fault == "DISK_FULL"
    error = Signal(
        "log", 'Traceback (most recent call last):\n  File "t.py", line 3, in f\nValueError: x',
        rank=0, node="n-1", time=4.9,
    )  # fmt: skip
    assert judge(Incident("a", (full, error, dead), nodes), load()).fault == "USER_EXCEPTION"


# -- mounts

ROOT = "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw"
DATA = "30 22 0:40 / /data\\040sets rw,relatime shared:9 - nfs4 files:/d rw,vers=4.2"


class Table:
    """mountinfo, and mounts that answer or do not."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "mountinfo"
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.error = 0
        self.asked: list[Path] = []
        self.clock = SetClock()
        self.write(ROOT, DATA)

    def write(self, *lines: str) -> None:
        self.path.write_text("\n".join(lines) + "\n")

    def probe(self, path: Path) -> None:
        self.asked.append(path)
        assert self.goes_on.wait(60)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))

    def source(self, path: str = "/data sets/run 1") -> Mounts:
        return Mounts([("the store", Path(path))], self.clock, self.path, self.probe)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    table = Table(tmp_path)
    yield table
    table.goes_on.set()


def test_the_mount_of_a_path_is_the_deepest_and_of_those_the_last() -> None:
    over = "31 30 0:41 / /data\\040sets ro - tmpfs tmpfs rw"
    mounts = parse("\n".join((ROOT, DATA, over, "nonsense", "35 22 0:1 / /data rw - x y rw")))
    found = mount_of(Path("/data sets/run"), mounts)
    assert found is not None
    assert (found.point, found.fstype, found.writable) == (Path("/data sets"), "tmpfs", False)
    found = mount_of(Path("/data setsx"), mounts)
    assert found is not None
    assert found.point == Path("/")


@pytest.mark.parametrize("data", [
    DATA.replace(" rw,relatime", " ro,relatime"), DATA.replace(" rw,vers", " ro,vers"),
])  # fmt: skip
def test_a_mount_that_turned_read_only(table: Table, data: str) -> None:
    source = table.source()
    assert look(source) == []
    table.write(ROOT, data)
    (signal,) = source.look()
    assert [(fact.fault, fact.severity) for fact in facts(signal)] == [("FS_READONLY_IO", "fatal")]
    assert look(source) == []
    assert list(source.standing()) == [signal]
    table.write(ROOT, DATA)
    (well,) = source.look()
    assert classes(well) == []


def test_one_that_always_was_read_only_is_as_it_should_be(table: Table) -> None:
    table.write(ROOT, DATA.replace(" rw,", " ro,"))
    source = table.source()
    assert look(source) == []
    assert look(source) == []


def test_a_mount_that_vanished(table: Table) -> None:
    source = table.source()
    source.look()
    table.write(ROOT)
    (signal,) = source.look()
    assert "/data sets (nfs4 files:/d) is not a mount point any more" in signal.text
    assert [(fact.fault, fact.severity) for fact in facts(signal)] == [("STALE_MOUNT", "degraded")]


def test_what_an_automounter_took_away_is_not_gone(table: Table) -> None:
    source = table.source()
    source.look()
    table.write(ROOT, "29 22 0:39 / /data\\040sets rw - autofs auto rw")
    assert look(source) == []


def test_a_mount_that_does_not_answer_is_stale_and_asked_by_one_thread(table: Table) -> None:
    source = table.source()
    table.goes_on.clear()
    assert look(source) == []
    table.clock.pass_(DEADLINE)
    (signal,) = source.look()
    assert signal.text == (
        "mount watch: mount /data sets (nfs4 files:/d) of the store is stale: no answer for 10 s"
    )
    assert classes(signal) == ["STALE_MOUNT"]
    table.clock.pass_(100.0)
    assert look(source) == [], "only the seconds changed"
    assert table.asked == [Path("/data sets")]
    table.goes_on.set()
    until(lambda: "mount watch: the store is well again" in look(source), "its answer")


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOTCONN, errno.EIO, errno.ESHUTDOWN])
def test_a_mount_that_answers_with_an_error_is_stale(table: Table, number: int) -> None:
    source = table.source()
    table.error = number
    (signal,) = source.look()
    assert classes(signal) == ["STALE_MOUNT"]
    assert facts(signal)[0].severity == "degraded"


def test_a_place_that_is_not_there_yet_is_no_mount_that_is_gone(table: Table) -> None:
    source = table.source()
    table.error = errno.ENOENT
    assert look(source) == []


# -- the clock


def test_a_jump_of_the_wall_clock() -> None:
    clock = SetClock(mono=1000.0, wall=1_700_000_000.0)
    source = WallClock(clock)
    assert look(source) == []
    clock.pass_(1.0)
    clock.wall_now += 0.9
    assert look(source) == [], "that may be set right"
    clock.pass_(1.0)
    clock.wall_now -= 3600.0
    (signal,) = source.look()
    assert signal.text == (
        "clock watch: the wall clock jumped by -3600.0 s against the monotonic clock, "
        "from 2023-11-14 22:13:22 UTC to 2023-11-14 21:13:22 UTC"
    )
    assert [(fact.fault, fact.severity) for fact in facts(signal)] == [("CLOCK_SKEW", "notice")]
    clock.pass_(1.0)
    assert look(source) == []


# -- notices


def test_a_notice_is_told_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    source = NoticeFile(path)
    assert look(source) == []
    for nothing in ("NONE\n", "{}", "false"):
        path.write_text(nothing)
        assert look(source) == []
    path.write_text("")
    (signal,) = source.look()
    assert classes(signal) == ["SPOT_RECLAIM_MAINT"]
    path.write_text("node drained\nby the operator\n")
    (signal,) = source.look()
    assert signal.text == "termination notice for this node: node drained by the operator"
    assert look(source) == []
    assert list(source.standing()) == [signal]
    path.unlink()
    assert look(source) == []
    assert list(source.standing()) == []


@pytest.mark.parametrize(("says", "fault"), [
    ("kubectl drain: node n-1 cordoned", "API_EVICT_DRAIN"),
    ("JOB 3 DUE TO PREEMPTION", "PREEMPTED"),
    ('{"action": "terminate", "time": "2026-03-11T04:00:00Z"}', "SPOT_RECLAIM_MAINT"),
    ("goodbye", "SPOT_RECLAIM_MAINT"),
])  # fmt: skip
def test_what_a_notice_says_decides_what_it_is(tmp_path: Path, says: str, fault: str) -> None:
    path = tmp_path / "notice"
    path.write_text(says)
    (signal,) = NoticeFile(path).look()
    told = Signal("agent", signal.text, node="n-1", time=90.0)
    end = Signal("exit", rank=0, node="n-1", time=100.0, exit_code=-15)
    assert judge(Incident("a", (told, end), {"n-1": (0, 1)}), load()).fault == fault


def test_a_notice_in_a_folder_that_is_not_there_is_blind(tmp_path: Path) -> None:
    with pytest.raises(Blind, match=r"its folder .* is not there"):
        NoticeFile(tmp_path / "no" / "notice").look()
    assert notice_file("") is None


def test_the_end_of_an_allocation_explains_its_signals() -> None:
    clock = SetClock(wall=1000.0)
    source = slurm_end({"SLURM_JOB_END_TIME": "2000"}, clock)
    assert source is not None
    assert look(source) == []
    clock.pass_(800.0)
    assert look(source) == ["slurm watch: the allocation ends in 200 s"]
    assert classes(*source.standing()) == []
    clock.pass_(196.0)
    (signal,) = source.look()
    assert classes(signal) == ["TIME_LIMIT"]
    end = Signal("exit", rank=0, node="n-1", time=100.0, exit_code=-15)
    told = Signal(signal.source, signal.text, node="n-1", time=99.0)
    verdict = judge(Incident("a", (told, end), {"n-1": (0, 1)}), load())
    assert (verdict.fault, verdict.action) == ("TIME_LIMIT", "wait_and_retry")
    assert look(source) == []


def test_an_allocation_that_runs_on_got_more_time() -> None:
    clock = SetClock(wall=2100.0)
    source = SlurmEnd(2000.0, clock)
    assert look(source) == []
    assert list(source.standing()) == []


@pytest.mark.parametrize("end", ["", "0", "soon"])
def test_outside_of_slurm_there_is_no_end(end: str) -> None:
    assert slurm_end({"SLURM_JOB_END_TIME": end} if end else {}, SetClock()) is None
