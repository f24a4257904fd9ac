"""How much of a worker's output is remembered, as which signals, and at what cost."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from started import loaded

from everstep.agent.watch.logs import BATCH, RING, SAVED, TELLING, Memory, Search, share
from everstep.agent.watch.tail import Tail
from everstep.faults.catalog import Catalog

TRACE = (
    b'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n'
    b"    step()\nValueError: shard 7 is empty\n"
)
BENIGN = b"step 100 loss 2.345 lr 0.001 tokens/s 12345\n"


def memory(catalog: bool = False, cpu: Callable[[], float] = lambda: 0.0) -> Memory:
    return Memory(Search(loaded() if catalog else None, cpu=cpu, now=lambda: 0.0))


def texts(of: Memory, most: int = RING) -> list[str]:
    return [one.text for one in of.signals(most, 3, "n") if one.source == "log"]


def times(of: Memory) -> list[float | None]:
    return [one.mono for one in of.signals(RING, 3, "n")]


@given(
    st.lists(
        st.tuples(
            st.binary(min_size=1, max_size=40) | st.sampled_from([b"ab\n", b"abc", b"\r"]),
            st.integers(1, 20_000),
            st.floats(0, 3),
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(4096, RING),
)
@settings(deadline=None, max_examples=60)
def test_the_end_of_any_stream_is_there_in_bounded_memory(
    pieces: list[tuple[bytes, int, float]], most: int
) -> None:
    one, now, whole = memory(catalog=True), 0.0, b""
    for unit, count, silence in pieces:
        now += silence
        piece = (unit * count)[: 1 << 18]
        one.remember(piece, now)
        whole += piece
        assert sum(len(part.data) for part in one._parts) == one._size < RING + BATCH
    made = one.signals(most, 3, "n")
    msgspec.json.encode(made)
    logs = [signal for signal in made if signal.source == "log"]
    assert {(signal.rank, signal.node) for signal in made} == {(3, "n")}
    kept = "".join(signal.text for signal in logs)
    if whole.isascii():  # else a cut may lie within a character
        assert whole.decode().endswith(kept)
        assert len(kept) >= min(len(whole), most // 4)
    assert len(kept) <= 4 * most


@given(st.lists(st.sampled_from([b"a", b"b\n", b"\r50%", b"  c\n", TRACE]), max_size=50),
       st.lists(st.floats(0, 2), min_size=50, max_size=50))  # fmt: skip
@settings(deadline=None)
def test_nothing_of_a_short_stream_is_lost_or_told_twice(
    pieces: list[bytes], silences: list[float]
) -> None:
    one = memory()
    for piece, now in zip(pieces, itertools.accumulate(silences), strict=False):
        one.remember(piece, now)
    assert "".join(texts(one)).encode() == b"".join(pieces)
    assert times(one) == sorted(times(one), key=lambda time: time or 0.0)


def test_what_comes_after_a_silence_has_its_own_time() -> None:
    one = memory()
    for at, piece in ((1.0, b"step 1\n"), (1.05, b"step 2\n"), (9.0, TRACE)):
        one.remember(piece, at)
    assert texts(one) == ["step 1\nstep 2\n", TRACE.decode()]
    assert times(one) == [1.0, 9.0]


def test_a_traceback_that_is_written_slowly_is_one() -> None:
    one = memory()
    for at, line in enumerate(TRACE.splitlines(keepends=True)):
        one.remember(line, at * 0.6)
    assert texts(one) == [TRACE.decode()]


def test_bars_that_never_end_a_line_are_apart() -> None:
    one = memory()
    for at in range(4):
        one.remember(b"\r%d%%" % at, float(at) / 2)
    one.remember(TRACE, 8.0)
    assert texts(one) == ["\r0%", "\r1%", "\r2%", "\r3%", TRACE.decode()]


def test_a_telling_line_that_was_pushed_out_is_still_there_with_its_time() -> None:
    one = memory(catalog=True)
    one.remember(TRACE, 1.0)
    for at in range(40):
        one.remember(BENIGN * 1000, 100.0 + at)
    first = one.signals(RING, 3, "n")[0]
    assert "ValueError: shard 7 is empty" in first.text
    assert first.mono == 1.0
    assert "loss" not in first.text
    assert one.unsearched == 0


def test_telling_lines_of_a_storm_are_bounded_and_begin_and_end_stay() -> None:
    one = memory(catalog=True)
    for number in range(400):
        one.remember(b"E%04d ValueError: x\n" % number + BENIGN * 600, float(number))
    kept = sum(len(part.data) for part in (*one._first, *one._later))
    assert kept <= 2 * TELLING
    found = "".join(texts(one))
    assert "E0000" in found
    assert "E0399" in found


def test_a_flood_is_not_searched_beyond_its_share_of_a_core_and_that_is_said() -> None:
    """F5: what was not looked at is known."""
    spent, clock = itertools.count(0.0, 0.05), itertools.count(0.0, 0.001)
    search = Search(loaded(), cpu=lambda: next(spent), now=lambda: next(clock))
    one = Memory(search)
    for number in range(60):
        one.remember(BENIGN * 2000, float(number))
    # Each search costs 0.05 s: what was saved up is used, then a thousandth a call comes in.
    assert one.unsearched > 40 * BATCH
    searched = 60 * len(BENIGN) * 2000 - one.unsearched - one._size
    assert 0 < searched <= (SAVED / 0.05 + 1) * 2 * len(BENIGN) * 2000, "two pieces a search"
    last = one.signals(RING, 3, "n")[-1]
    assert last.source == "agent"
    assert f"log of rank 3: {one.unsearched >> 10} KiB" in last.text


def test_a_catalogue_that_cannot_be_loaded_takes_nothing_else_away() -> None:
    broken: Future[Catalog] = Future()
    broken.set_exception(ValueError("torn"))
    one = Memory(Search(broken))
    for _ in range(20):
        one.remember(BENIGN * 1000, 1.0)
    one.remember(TRACE, 2.0)
    assert texts(one)[-1].endswith(TRACE.decode())


@pytest.mark.parametrize("streams", [1, 2, 16, 1000])
def test_all_streams_share_what_is_handed_out(streams: int) -> None:
    each = share(2 << 20, streams)
    assert each * streams <= 2 << 20 or each == 4096
    assert each <= RING


def test_a_files_end_is_followed_whatever_happens_to_it(tmp_path: Path) -> None:
    path, lock = tmp_path / "stdout.log", threading.Lock()
    tail = Tail(str(path), memory())
    tail.look(lock)  # not there yet
    path.write_bytes(b"first\n")
    tail.look(lock)
    with path.open("ab") as file:
        file.write(b"y" * (3 * RING) + b"\nafter\n")
    tail.look(lock)
    assert "".join(texts(tail.memory)).endswith("y\nafter\n")
    assert tail.memory.unsearched > 0
    path.write_bytes(b"anew\n")  # cut short and begun again
    tail.look(lock)
    tail.look(lock)
    assert "".join(texts(tail.memory)).endswith("\nafter\nanew\n")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A reader more would take from a pipe what another is to get."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR)
    os.write(held, b"for another")
    tail = Tail(str(path), memory())
    tail.look(threading.Lock())
    assert texts(tail.memory) == []
    assert os.read(held, 100) == b"for another"
    os.close(held)
