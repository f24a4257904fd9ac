"""Marks, processes, footprints: what the benchmarks see of real processes."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from everstep.bench import marks, processes
from everstep.bench.footprint import Peak, footprint, pss
from everstep.bench.machine import filesystem, read_machine, require_disk, require_memory
from everstep.bench.marks import MarkReader, MarkWriter
from everstep.bench.scratch import scratch
from everstep.bench.watch import WatchedJob
from everstep.errors import BenchError, UsageError

SLEEP = "import time; print('up', flush=True); time.sleep(600)"


def _start(mark: str, *, apart: bool = False) -> subprocess.Popen[bytes]:
    started = subprocess.Popen(
        [sys.executable, "-c", SLEEP], stdout=subprocess.PIPE, start_new_session=apart,
        env={**os.environ, processes.VARIABLE: mark},
    )  # fmt: skip
    assert started.stdout is not None
    assert started.stdout.readline()
    return started


def test_whatever_bears_the_mark_is_ended_also_in_a_session_of_its_own() -> None:
    with processes.marked() as mark:
        near, far = _start(mark), _start(mark, apart=True)
        assert sorted(processes.bearers(mark)) == sorted([near.pid, far.pid])
    assert (near.wait(10), far.wait(10)) == (-9, -9)
    for one in (near, far):
        assert one.stdout is not None
        one.stdout.close()


def test_a_process_without_the_mark_is_never_killed() -> None:
    with processes.marked() as mine, processes.marked() as theirs:
        other = _start(theirs)
        with pytest.raises(BenchError, match="ended before"):
            processes.kill(other.pid, mine)
        assert other.poll() is None
    other.wait(10)
    assert other.stdout is not None
    other.stdout.close()


def test_the_start_of_a_process_is_known_to_a_tick() -> None:
    before = time.monotonic()
    with processes.marked() as mark:
        one = _start(mark)
        after = time.monotonic()
        began = processes.began_at(one.pid)
    one.wait(10)
    assert one.stdout is not None
    one.stdout.close()
    assert before - 0.02 <= began <= after + 0.02


def test_a_jobs_environment_has_no_ranks_and_no_settings_of_the_caller() -> None:
    parent = {"PATH": "/bin", "RANK": "3", "EVERSTEP_STORE": "s", "OMP_NUM_THREADS": "9",
              "PET_NNODES": "2", "MASTER_ADDR": "h", "HOME": "/h"}  # fmt: skip
    assert processes.clean(parent) == {"PATH": "/bin", "HOME": "/h"}


def test_marks_travel_whole_and_in_order_through_the_pipe(tmp_path: Path) -> None:
    reader = MarkReader(tmp_path / "marks")
    writer = MarkWriter({marks.VARIABLE: str(tmp_path / "marks"), "RANK": "1"})
    writer.write("began", at=1.5)
    for step in range(50):
        writer.write("step", step=step)
    read = reader.read()
    assert read[0] == marks.Mark(1.5, os.getpid(), 1, "began")
    assert [mark.step for mark in read[1:]] == list(range(50))
    assert sorted(mark.at for mark in read[1:]) == [mark.at for mark in read[1:]]
    assert reader.read() == []
    reader.close()


def test_a_job_whose_benchmark_is_gone_fails_and_does_not_wait(tmp_path: Path) -> None:
    MarkReader(tmp_path / "marks").close()
    with pytest.raises(OSError, match="No such device"):
        MarkWriter({marks.VARIABLE: str(tmp_path / "marks")})


TELLER = (
    "from everstep.bench.marks import MarkWriter\n"
    "import os, time\n"
    "MarkWriter(os.environ).write('imported')\n"
    "print('said', flush=True)\n"
    "time.sleep(float(os.environ['FOR']))\n"
)


def test_a_watched_job_is_seen_to_tell_speak_and_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TELLER]
    with (
        processes.marked() as mark,
        WatchedJob("teller", command, tmp_path, {"FOR": "0"}, mark) as job,
    ):
        job.wait_until(lambda: bool(job.ended), "end", 30)
        (told,) = job.of("imported")
        assert list(job.ended) == [told.pid]
        assert job.ended[told.pid] >= told.at
        assert [line for _, line in job.said] == ["said"]


def test_a_job_that_ends_too_early_is_reported_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no luck')"]
    with (
        processes.marked() as mark,
        WatchedJob("unlucky", command, tmp_path, {}, mark) as job,
        pytest.raises(BenchError, match=r"unlucky: no built model .*exit code: 1[\s\S]*no luck"),
    ):
        job.wait_until(lambda: bool(job.of("built")), "built model", 30)


def test_a_footprint_counts_descriptors_and_mappings() -> None:
    before = footprint([os.getpid()])
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(5)]
    memory = mmap.mmap(-1, 8 << 20)
    memory.write(b"x" * (8 << 20))
    after = footprint([os.getpid()])
    for fd in fds:
        os.close(fd)
    memory.close()
    assert after.fds - before.fds == 5
    assert after.pss - before.pss > 7 << 20
    assert after.mappings >= before.mappings
    assert after.processes == 1


def test_a_process_that_has_ended_counts_for_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          capture_output=True, check=True)  # fmt: skip
    assert footprint([int(done.stdout)]).processes == 0


def test_the_peak_of_a_marked_process_is_seen_after_it_is_gone() -> None:
    code = (
        "import mmap\nm = mmap.mmap(-1, 64 << 20)\nm.write(b'x' * (64 << 20))\n"
        "print('up', flush=True)\ninput()\nm.close()\nprint('down', flush=True)\ninput()\n"
    )
    with processes.marked() as mark:
        one = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, env={**os.environ,
                               processes.VARIABLE: mark})  # fmt: skip
        assert one.stdin is not None
        assert one.stdout is not None
        with one.stdin as tell, one.stdout as told:
            assert told.readline() == b"up\n"
            with Peak(mark) as peak:
                deadline = time.monotonic() + 30
                while peak.bytes < 64 << 20 and time.monotonic() < deadline:
                    time.sleep(0.005)
                tell.write(b"\n")
                tell.flush()
                assert told.readline() == b"down\n"
            assert pss(one.pid) < 64 << 20 <= peak.bytes
    one.wait(10)


MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:26 / /data rw - xfs /dev/sdb rw
31 30 0:27 / /data rw shared:1 - nfs4 server:/x rw
32 22 0:28 / /data/my\\040disk rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/", "ext4"), ("/srv", "ext4"), ("/data/a", "nfs4"), ("/data/my disk/b", "tmpfs"),
     ("/database", "ext4")],
)  # fmt: skip
def test_the_filesystem_is_that_of_the_nearest_mount(folder: str, kind: str) -> None:
    assert filesystem(Path(folder), MOUNTS) == kind


def test_the_machine_is_read(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert machine.cores == len(os.sched_getaffinity(0))
    assert machine.filesystem != "unknown"
    assert machine.memory_bytes > 1 << 27


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"GB free.*--folder"):
        require_disk(tmp_path, 1 << 60)
    with pytest.raises(UsageError, match=r"memory is available.*--state-mb"):
        require_memory(1 << 60)


def test_the_folder_is_left_as_it_was(tmp_path: Path) -> None:
    def fail() -> None:
        with scratch(tmp_path) as folder:
            (folder / "file").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="cannot write"), scratch(tmp_path / "missing"):
        pass
