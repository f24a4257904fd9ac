"""Stacks of real processes, read from outside by each of the ways, and what a rank answers."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked import wait_for

from everstep.agent.watch import stacks as reading
from everstep.agent.watch.stacks import Sample, Stacks
from everstep.faults.lines import lines_of
from everstep.faults.records import Signal
from everstep.faults.stacks import stacks_in

STANDS = """
import sys, threading, time
sys.path.insert(0, {source!r})
from everstep.train.stacks import answer
answer({folder!r}, {rank})
print("up", flush=True)
def waits_for_ever():
    threading.Event().wait()
def goes_round():
    done = []
    while True:
        done.append(1)
        time.sleep(0.001)
{body}()
"""
SOURCE = str(Path(reading.__file__).parents[3])

Begin = Callable[..., int]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    running: list[subprocess.Popen[bytes]] = []

    def start(body: str, rank: int = 0, code: str = STANDS) -> int:
        path = tmp_path / f"stands-{rank}.py"
        path.write_text(code.format(source=SOURCE, folder=str(tmp_path), rank=rank, body=body))
        process = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE)
        running.append(process)
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 60)[0]
        process.stdout.readline()
        return process.pid

    yield start
    for process in running:
        process.kill()
        process.communicate()


def looked(stacks: Stacks, until: Callable[[Sample], bool]) -> Sample:
    """The first look for which that holds: a process that was just started is on its way still."""
    found: list[Sample] = []

    def look() -> bool:
        found.append(stacks.look())
        return until(found[-1])

    wait_for(look)
    return found[-1]


@pytest.mark.parametrize("spy", [True, False], ids=["py-spy", "faulthandler"])
def test_where_a_rank_stands_is_read_without_its_help(
    begin: Begin, tmp_path: Path, spy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the same for one that is stuck, a turn for one that moves; within three seconds."""
    if not spy:
        monkeypatch.setattr(reading, "find_spy", str)
    elif not reading.find_spy():
        pytest.skip("py-spy is not installed")
    pids = {0: begin("waits_for_ever", 0), 1: begin("goes_round", 1)}
    stacks = Stacks(tmp_path, pids, time.monotonic())
    one = looked(stacks, lambda sample: "waits_for_ever" in sample.looks[0].where)
    began = time.monotonic()
    other = stacks.look()
    assert time.monotonic() - began < 3.0
    assert one.looks[0].stack == other.looks[0].stack
    assert one.looks[0].turn == other.looks[0].turn is not None
    assert one.looks[1].turn != other.looks[1].turn
    assert "goes_round" in other.looks[1].where
    assert not any(look.came_late for look in other.looks)
    for signal_ in other.signals:
        (stack,) = stacks_in(list(lines_of(signal_, 0, {})))
        assert signal_.rank == stack.rank
        assert signal_.source == "stack"
        assert stack.where == other.looks[stack.rank].where
        assert signal_.text.startswith(f"stands at {stack.where}\n")
        assert sys.executable not in signal_.text, "a command line may hold secrets"


def test_frames_of_one_length_are_frames_of_their_own() -> None:
    """They are no lines that a terminal broke."""
    names = (("a1", 10), ("b2", 20), ("c3", 30))
    frames = [f"    {name * 9} (/srv/{'x' * 60}/train.py:{line})" for name, line in names]
    text = "\n".join(['Thread 7 (idle): "MainThread"', *frames])
    (stack,) = stacks_in(list(lines_of(Signal("stack", text, rank=0), 0, {})))
    assert [name for name, _ in stack.frames] == ["a1" * 9, "b2" * 9, "c3" * 9]


def test_a_rank_that_holds_the_interpreters_lock_is_seen_and_answers_late(
    begin: Begin, tmp_path: Path
) -> None:
    holds = """
import ctypes, sys, threading
sys.path.insert(0, {source!r})
from everstep.train.stacks import answer
answer({folder!r}, {rank})
libc = ctypes.PyDLL(None)  # calls keep the lock
def holds_the_lock():
    print("up", flush=True)
    libc.usleep(1_500_000)
    threading.Event().wait()
{body}()
"""
    pids = {0: begin("holds_the_lock", code=holds)}
    stacks = Stacks(tmp_path, pids, time.monotonic())
    (look,) = stacks.look().looks
    assert look.turn is None
    assert "holds_the_lock" in look.where
    late = looked(stacks, lambda sample: sample.looks[0].turn is not None)
    assert late.looks[0].came_late


def test_a_process_that_does_not_answer_is_not_killed_by_being_asked(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent to one that has no handler; what the kernel tells of it is left."""
    monkeypatch.setattr(reading, "find_spy", str)
    code = "import threading\nprint('up', flush=True)\n{body}.Event().wait()\n"
    pid = begin("threading", code=code)
    assert not reading.send(pid, signal.SIGRTMAX - 1)
    sample = Stacks(tmp_path, {0: pid}, 0.0).look()
    assert sample.looks[0].turn is None
    os.kill(pid, 0)
    gone = Stacks(tmp_path, {0: 2**22 - 1}, 0.0).look()
    assert gone.looks[0].stack == ()
    assert gone.signals == ()


def test_a_signal_that_somebody_uses_is_left_alone(tmp_path: Path) -> None:
    code = f"""
import signal, sys
sys.path.insert(0, {SOURCE!r})
taken = signal.SIGRTMAX - 1
signal.signal(taken, lambda *_: None)
from everstep.train import stacks
stacks.answer({str(tmp_path)!r}, 0)
stacks.answer({str(tmp_path)!r}, 0)
assert callable(signal.getsignal(taken))
print(open({str(tmp_path / "0.answers")!r}).read())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert f'"dump":{signal.SIGRTMAX - 2}' in done.stdout
