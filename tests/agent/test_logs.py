"""What workers print: shown as it is and at once, and there as evidence."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import pty
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from forked import Start, alive, wait_for
from started import DEADLINE, loaded, started, stream, wait

from everstep.agent.output import AHEAD, Output
from everstep.agent.report import block, failure, written
from everstep.agent.watch.logs import Memory
from everstep.core import exits
from everstep.faults.judge import judge
from everstep.faults.records import Incident, Signal

FORKED = ("--run-path", "--start-method", "fork")

DIES = """
import os, signal
os.write(2, b"\\xff\\x00 odd\\n")
os.write(1, b"half a line")
os.kill(os.getpid(), signal.SIGKILL)
"""


def said(signals: tuple[Signal, ...], rank: int = 10) -> str:
    return "".join(one.text for one in signals if one.source == "log" and one.rank == rank)


@contextlib.contextmanager
def piped(*fds: int) -> Iterator[int]:
    """These streams of the process end in one pipe, of which this is the reading end."""
    reader, writer = os.pipe()
    with contextlib.ExitStack() as streams:
        for fd in fds:
            streams.enter_context(stream(fd, writer))
        os.close(writer)
        yield reader
    with contextlib.suppress(OSError):
        os.close(reader)


def read_until(fd: int, wanted: bytes) -> bytes:
    """What comes up to a read that has brought these bytes."""
    read = bytearray()
    while wanted not in read[-(1 << 17) :]:
        piece = os.read(fd, 1 << 16)
        assert piece, read
        read += piece
    return bytes(read)


@pytest.mark.parametrize("flags", [(), FORKED], ids=["program", "function"])
def test_last_bytes_before_a_sigkill_are_shown_and_evidence(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], flags: tuple[str, ...]
) -> None:
    with started(tmp_path, DIES, *flags) as (group, _):
        wait(group)
        # Shown before the end is told: nothing is waited for here.
        assert capfdbinary.readouterr() == (b"half a line", b"\xff\x00 odd\n")
        evidence = group.evidence(0.3)
        assert said(evidence) in ("half a line\\xff\x00 odd\n", "\\xff\x00 odd\nhalf a line")
        msgspec.json.encode(evidence)
        (end,) = [one for one in evidence if one.source == "exit"]
        pid = group.pids[10]
        assert end.text == f"pid {pid}: killed by signal 9 (SIGKILL)"
        assert (end.rank, end.node, end.exit_code, end.ours) == (10, "here", -9, False)


def test_what_everstep_killed_is_ours_in_the_evidence(tmp_path: Path) -> None:
    """F2."""
    with started(tmp_path, "import time; time.sleep(600)", count=2) as (group, _):
        group.kill(signal.SIGKILL)
        wait(group)
        ends = [one for one in group.evidence(0.3) if one.source == "exit"]
        assert sorted((one.rank, one.ours) for one in ends) == [(10, True), (11, True)]


def test_lines_come_at_once_and_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    """Without a newline, after a carriage return, and on two streams that end in one place."""
    script = """
import os, time
os.write(1, b"loading"); os.write(2, b"\\r 1%"); os.write(1, b"\\r 2%"); os.write(2, b"!")
time.sleep(600)
"""
    with piped(1, 2) as reader, started(tmp_path, script) as (group, _):
        assert read_until(reader, b"!") == b"loading\r 1%\r 2%!"
        assert group.running, "it came while the worker runs"


def test_a_burst_of_ten_megabytes_comes_whole_and_costs_little_memory(tmp_path: Path) -> None:
    script = """
import os
line = b"x" * 99 + b"\\n"
for number in range(100):
    os.write(1, b"%08d" % number + line * 1000)
print("Traceback (most recent call last):")
"""
    with piped(1) as reader, started(tmp_path, script) as (group, _):
        whole = read_until(reader, b"call last):\n")
        assert len(whole) == 100 * (8 + 100_000) + len("Traceback (most recent call last):\n")
        assert [whole[at : at + 8] for at in range(0, 100 * 100_008, 100_008)] == [
            b"%08d" % number for number in range(100)
        ]
        wait(group)
        evidence = group.evidence(0.3)
        assert said(evidence).endswith("Traceback (most recent call last):\n")
        assert len(said(evidence)) < 512 << 10


def test_a_closed_console_harms_no_worker(tmp_path: Path) -> None:
    script = """
import os, sys
for _ in range(300):
    os.write(1, b"y" * 10_000 + b"\\n")
print("the end", file=sys.stderr)
"""
    with piped(1) as reader:
        os.close(reader)
        with started(tmp_path, script) as (group, output):
            wait(group)
            assert [end.code for end in group.ended] == [0]
            assert said(group.evidence(0.3)).endswith("the end\n")
            assert output.flush(10)
            assert output.lost == "Broken pipe"


CLOSES = """
import os
os.write(1, b"before\\n")
{closes}
os.fork() or os._exit(0)
os.wait()
open("done", "w").close()
os._exit(5)
"""


@pytest.mark.parametrize("flags", [(), FORKED], ids=["program", "function"])
@pytest.mark.parametrize("closes", ["os.close(1)", "os.closerange(0, 4096)"])
def test_a_worker_may_close_its_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes: str, flags: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    with piped(1) as reader, started(tmp_path, CLOSES.format(closes=closes), *flags) as (group, _):
        wait(group)
        assert [end.code for end in group.ended] == [5]
        assert (tmp_path / "done").exists()
        assert read_until(reader, b"before\n") == b"before\n"
        assert "before" in said(group.evidence(0.3))


def test_a_fault_of_the_memory_is_said_and_lets_all_bytes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F5."""
    told: list[str] = []

    def fails(*_: object) -> None:
        raise MemoryError("no page")

    monkeypatch.setattr(Memory, "_forget", fails)
    script = "import os\nfor _ in range(300): os.write(1, b'y' * 9_999 + b'\\n')\nprint('end')"
    with piped(1) as reader, started(tmp_path, script, told=told.append) as (group, _):
        assert len(read_until(reader, b"end\n")) == 3_000_004
        wait(group)
        (blind,) = [one for one in group.evidence(0.3) if one.source == "agent"]
        assert blind.text == "the output of rank 10 was not remembered: MemoryError: no page"
    assert len(told) == 1
    assert "not remembered any more: MemoryError: no page" in told[0]


def test_a_fault_of_the_reading_is_said_and_reading_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    faults = [MemoryError("no page"), OSError(12, "Cannot allocate memory")]
    real = Output._read

    def fails(self: Output, ready: set[int]) -> int:
        if ready and faults:
            raise faults.pop()
        return real(self, ready)

    monkeypatch.setattr(Output, "_read", fails)
    script = "import os\nos.write(1, b'y' * 5_000_000)\nprint('end')"
    with piped(1) as reader, started(tmp_path, script, told=told.append) as (group, _):
        assert len(read_until(reader, b"end\n")) == 5_000_004
        wait(group)
    assert [text.partition(". It is")[0] for text in told] == [
        "what workers print cannot be read: OSError: [Errno 12] Cannot allocate memory",
        "what workers print cannot be read: MemoryError: no page",
    ]


def test_a_stopped_console_stops_the_worker_and_not_the_agent(tmp_path: Path) -> None:
    script = """
import os
for number in range(1000):
    os.write(1, b"%06d" % number + b"y" * 9_993 + b"\\n")
"""
    with piped(1) as reader, started(tmp_path, script) as (group, output):
        (pipe,) = group._streams._pipes[0][:1]
        size = fcntl.fcntl(pipe.reader, fcntl.F_GETPIPE_SZ)
        wait_for(lambda: output.forward_to(1).full and pipe.waiting > 0.6 * size)
        assert group.collect() == [], "it waits, as it would on the console"
        began = time.monotonic()
        group.kill(signal.SIGKILL)
        wait(group)
        evidence = group.evidence(0.3)
        assert not output.flush(0.0)
        assert time.monotonic() - began < 5, "the end is seen though nothing is read"
        # What was in the pipe is evidence though it is not shown yet.
        last = said(evidence).splitlines()[-1][:6]
        assert read_until(reader, last.encode()).startswith(b"000000")
        assert int(last) * 10_000 > AHEAD + 0.5 * size
        threading.Thread(target=os.read, args=(reader, 1 << 20), daemon=True).start()
        assert output.flush(10)


def test_a_grandchild_that_keeps_the_pipe_open_delays_no_end(tmp_path: Path) -> None:
    script = """
import subprocess
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print("child", child.pid, flush=True)
"""
    with piped(1) as reader, started(tmp_path, script) as (group, output):
        pid = int(read_until(reader, b"\n").split()[1])
        wait(group)
        began = time.monotonic()
        group.close()
        output.close(10)
        assert time.monotonic() - began < 5
        assert alive(pid)
        os.kill(pid, signal.SIGKILL)


def test_what_a_worker_leaves_behind_may_print_on(tmp_path: Path) -> None:
    """As on the console itself; it is no evidence of the attempt that it has outlived."""
    script = """
import subprocess
child = subprocess.Popen(["sh", "-c", "read line; echo late $line"], start_new_session=True)
"""
    theirs, ours = os.pipe()
    with piped(1) as reader, stream(0, theirs), started(tmp_path, script) as (group, _):
        wait(group)
        group.close()
        os.write(ours, b"words\n")
        assert read_until(reader, b"\n") == b"late words\n"
        assert "late" not in said(group.evidence(0.3))
    os.close(theirs)
    os.close(ours)


@pytest.mark.parametrize("flags", [(), FORKED], ids=["program", "function"])
def test_nothing_is_left_behind(tmp_path: Path, flags: tuple[str, ...]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    threads = set(threading.enumerate())
    with started(tmp_path, "import os; os.write(1, b'here')", *flags, count=2) as (group, _):
        wait(group)
        open_here = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                     if os.path.islink(f"/proc/self/fd/{fd}")}  # fmt: skip
        assert any(name.startswith("pipe:") for name in open_here)
        assert said(group.evidence(0.3)).count("here") == 1
        del group
    gc.collect()  # torch's handlers hold files of their own
    assert set(os.listdir("/proc/self/fd")) - before == set()
    wait_for(lambda: not (set(threading.enumerate()) - threads))
    assert os.listdir(tmp_path) == ["script.py"]


def test_a_spawned_function_prints_through_the_agent_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "import sys; print('spawned'); print('oops', file=sys.stderr)"
    with started(tmp_path, script, "--run-path") as (group, _):
        wait(group)
        assert capfd.readouterr() == ("spawned\n", "oops\n")
        assert "spawned" in said(group.evidence(0.3))


def test_the_users_files_are_as_torchrun_writes_them_and_evidence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)"
    logs = tmp_path / "logs"
    flags = ("--log-dir", str(logs), "--redirects", "0:1,1:3", "--tee", "1:2")
    with started(tmp_path, script, *flags, count=2) as (group, output):
        wait(group)
        evidence = group.evidence(0.3)
        assert sorted(said(evidence, 10).split("\n")) == ["", "err", "out 10"]
        assert sorted(said(evidence, 11).split("\n")) == ["", "err", "out 11"]
        group.close()  # torch shows the last lines of a tee at its end
        assert output.flush(10)
        sys.stderr.flush()
        shown = capfd.readouterr()
        assert shown.out == ""
        assert sorted(shown.err.splitlines()) == ["[default1]:err", "err"]
    found = {str(path.relative_to(logs)).split("attempt_0/")[1]: path.read_text()
             for path in logs.rglob("*.log")}  # fmt: skip
    assert found == {
        "0/stdout.log": "out 10\n", "1/stdout.log": "out 11\n", "1/stderr.log": "err\n",
    }  # fmt: skip


def test_a_rank_that_is_not_to_be_shown_is_evidence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "import os; print('rank', os.environ['RANK'])"
    with started(tmp_path, script, "--local-ranks-filter", "1", count=2) as (group, _):
        wait(group)
        assert said(group.evidence(0.3)) == "rank 10\n"
        assert capfd.readouterr().out == "rank 11\n"


def test_programs_hold_no_lines_back_from_a_terminal(tmp_path: Path) -> None:
    script = "import os, time; print('seen', os.environ['PYTHONUNBUFFERED']); time.sleep(600)"
    ours, theirs = pty.openpty()
    flags = ("--no-python", sys.executable)
    with stream(1, theirs), started(tmp_path, script, *flags) as (group, _):
        assert read_until(ours, b"\n") == b"seen 1\r\n"
        assert group.running
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"message": {"message": "x", "extraInfo": {"py_callstack": "Trace\\nValueError: x"}}}',
         "Trace\nValueError: x"),
        (b'{"message": "ValueError: plain"}', "ValueError: plain"),
        (b'{"message": "x", "timestamp": "soon"}', "x"),
        (b'["message"]', '["message"]'),
        (b'{"message": {"message": "torn", "extraInfo": {"py_callstack": "Trace\\nVal',
         'Trace\nVal'),
        (b'{"message": {"message": "\xff odd', "\\xff odd"),
        (b'{"message": {"message": "x", "extraInfo": []}}', "x"),
        (b"[" * 300_000, "[[["),
    ],
    ids=["traceback", "text", "time", "list", "torn", "encoding", "shape", "deep"],
)  # fmt: skip
def test_error_files_are_read_whatever_is_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes, expected: str
) -> None:
    monkeypatch.setattr("socket.getfqdn", lambda: "here")  # torch's block asks for it
    path = tmp_path / "error.json"
    path.write_bytes(raw)
    found = written(str(path))
    assert found is not None
    text, _ = found
    assert expected in text
    assert len(text) <= 256 << 10
    msgspec.json.encode(text)
    one = failure(rank=0, local_rank=0, pid=1, code=1, error_file=str(path), now=1.0, ours=False)
    assert "FAILED" in block("x", [one])


def test_an_error_file_too_long_for_torch_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(b'{"message": "' + b"y" * (5 << 20))
    one = failure(rank=0, local_rank=0, pid=1, code=1, error_file=str(path), now=1.0, ours=False)
    assert f"the error file {path} is longer than 4194304 bytes" in one.process.message
    found = written(str(path))
    assert found is not None
    assert len(found[0]) == 256 << 10
    assert written(str(tmp_path / "missing")) is None
    assert written(os.devnull) is None


RAISES = """
import os, time
rank = int(os.environ["RANK"])
if rank == 11:
    raise ValueError("shard 7 is empty")
open(f"waits-{rank}", "w").close()
time.sleep(600)
"""


@pytest.mark.parametrize("flags", [(), FORKED], ids=["program", "function"])
def test_what_workers_leave_is_enough_to_name_the_rank_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """From the traceback on the console of a program, from the error file of a function."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    with started(tmp_path, RAISES, *flags, count=2) as (group, _):
        wait_for(lambda: (tmp_path / "waits-10").exists())
        wait_for(lambda: group.collect())
        group.kill(signal.SIGKILL)
        wait(group)
        evidence = group.evidence(0.3)
    assert "torch._dynamo" not in sys.modules, "loading it takes seconds, in the agent's loop"
    assert all(0 <= one.time <= DEADLINE for one in evidence)
    incident = Incident("one", evidence, {"here": (10, 11)})
    verdict = judge(incident, loaded().result())
    assert (verdict.domain, verdict.root_ranks) == ("user_code", (11,))


TELLS = """
import os, time
print("rank", os.environ["RANK"], "was here")
"""


def test_all_that_workers_print_comes_before_the_job_says_that_it_stops(start: Start) -> None:
    agent = start("--nproc-per-node", "2", "--json", script=TELLS)
    assert agent.wait() == exits.FINISHED
    lines = agent.said().splitlines()
    assert sorted(line for line in lines if line.startswith("rank")) == [
        "rank 0 was here",
        "rank 1 was here",
    ]
    assert lines.index("rank 1 was here") < next(
        at for at, line in enumerate(lines) if "exit code 0" in line
    )


@pytest.fixture
def console(tmp_path: Path) -> Iterator[int]:
    """The first agent's standard output: a pipe whose reading end this is."""
    path = tmp_path / "out-0"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDWR)
    yield reader
    os.close(reader)


FLOODS = """
import os
for number in range(40):
    os.write(1, b"y" * 9_999 + b"\\n")
"""


def test_a_job_waits_for_its_console_to_take_everything(start: Start, console: int) -> None:
    agent = start(script=FLOODS)
    agent.until(lambda: agent.events("worker.exited"))
    wait_for(lambda: _waiting(console) > 60_000)
    assert not agent.events("job.stopped")
    left = 40 * 10_000
    while left > 0:
        left -= len(os.read(console, 1 << 16))
    assert agent.wait() == exits.FINISHED, agent.said()


def test_a_job_whose_console_nobody_reads_can_be_stopped(start: Start, console: int) -> None:
    agent = start(script=FLOODS.replace("40", "4000"))
    agent.until(lambda: _waiting(console) > 60_000)
    began = time.monotonic()
    agent.kill(signal.SIGTERM)
    assert agent.wait() == exits.PREEMPTED, agent.said()
    assert time.monotonic() - began < 10


def _waiting(fd: int) -> int:
    """Bytes in a pipe."""
    count: int = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0]
    return count
