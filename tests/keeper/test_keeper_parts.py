"""The parts below the process: slots, control page, framing, memory limits, journal."""

from __future__ import annotations

import os
import select
import socket
import threading
from pathlib import Path

import pytest
from keeper_fakes import GEOMETRY, PIECE, fill, layout_of

from everstep.core.clock import SystemClock
from everstep.core.events import Event, decode_line
from everstep.core.ids import Point
from everstep.errors import CorruptObject, KeeperError, MemoryTooSmall
from everstep.keeper import wire
from everstep.keeper.address import keeper_name
from everstep.keeper.background import Background
from everstep.keeper.client import error_of
from everstep.keeper.connection import Connection
from everstep.keeper.control import LONGEST_NAME, Beat, ControlPage, create_page
from everstep.keeper.holdings import Holdings, check_digests, known_digests, write_digests
from everstep.keeper.journal import Journal
from everstep.keeper.memory import Limit, check_room, group_limit, meminfo_limit, read_limits
from everstep.keeper.slot import Geometry, Slot, create
from everstep.keeper.wire import AdoptSlots, Demoted, Hello, Leave, Refused, SlotName

CHUNK = 4096


@pytest.fixture
def slot():
    fd = create(GEOMETRY, "test")
    made = Slot(fd)
    fill(made, 7, 1, 0, 1, 3, "layout")
    yield made
    made.close()
    os.close(fd)


# -- slots


def test_slot_tells_what_it_holds(slot: Slot) -> None:
    about = slot.described()
    assert about is not None
    assert (about.point, about.world, about.rank, about.sequence) == (Point(7, 1), 1, 0, 3)
    snapshot = slot.snapshot()
    assert snapshot.layout == layout_of(0, 1)
    snapshot.payload.release()
    snapshot.state.release()


def test_slot_whose_writer_died_holds_nothing(slot: Slot) -> None:
    slot.begin()
    assert slot.described() is None
    with pytest.raises(CorruptObject):
        slot.snapshot()


@pytest.mark.parametrize("at", [64, 70, 100, 256])
def test_flipped_header_is_no_snapshot(slot: Slot, at: int) -> None:
    slot.memory[at] ^= 1
    assert slot.described() is None


def test_digests_find_any_flipped_byte_and_belong_to_one_snapshot(slot: Slot) -> None:
    write_digests(slot, CHUNK)
    assert check_digests(slot, 1 << 20) == ""  # the chunk size is the one that was used
    for region, at in ((slot.payload, 0), (slot.payload, PIECE - 1), (slot.state, 3)):
        region[at] ^= 4
        assert check_digests(slot, CHUNK) != ""
        region[at] ^= 4
    assert check_digests(slot, CHUNK) == ""
    fill(slot, 8, 1, 0, 1, 4, "layout")
    assert slot.read_digests(16) is None


def test_digests_that_do_not_fit_are_taken_of_the_whole() -> None:
    fd = create(Geometry.fitting(payload=PIECE, state=4096, layout=4096, digests=1), "small")
    made = Slot(fd)
    fill(made, 1, 1, 0, 1, 1, "layout")
    write_digests(made, 64)
    assert known_digests(made, 64) is None
    made.payload[17] ^= 1
    assert "differs" in check_digests(made, 64)
    made.close()
    os.close(fd)


def test_known_digests_are_those_of_the_chunks(slot: Slot) -> None:
    write_digests(slot, CHUNK)
    known = known_digests(slot, CHUNK)
    assert known is not None
    assert len(known) == PIECE // CHUNK + 1
    assert known_digests(slot, 2 * CHUNK) is None


# -- holdings


def test_open_gives_the_same_pair_again_and_a_new_one_when_it_is_too_small() -> None:
    holdings = Holdings("job")
    first = holdings.open(0, GEOMETRY)
    assert holdings.open(0, GEOMETRY) == first
    assert holdings.needs(0, GEOMETRY) == 0
    larger = Geometry.fitting(payload=2 * PIECE, state=1, layout=1, digests=1)
    assert holdings.needs(0, larger) == 2 * larger.total
    assert holdings.open(0, larger) != first
    assert [h.current for h in holdings.held(0)] == [False, False, True, True]
    assert (holdings.real(0, 1), holdings.visible(0, 3)) == (3, 1)
    holdings.drop(SlotName(0, 0))
    assert len(holdings.names()) == 3
    holdings.close()


def test_dropped_slot_gives_its_memory_back_whoever_holds_it() -> None:
    holdings = Holdings("job")
    fd = os.dup(holdings.open(0, GEOMETRY)[0])
    assert os.fstat(fd).st_blocks > 0
    holdings.drop(SlotName(0, 0))
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)
    holdings.close()


def test_adopting_twice_keeps_one_and_closes_the_rest() -> None:
    maker, taker = Holdings("job"), Holdings("job")
    fds = maker.open(3, GEOMETRY)
    names = (SlotName(3, 0), SlotName(3, 1))
    open_before = len(os.listdir("/proc/self/fd"))
    assert taker.adopt(names, [os.dup(fd) for fd in fds]) == list(names)
    assert taker.adopt(names, [os.dup(fd) for fd in fds]) == []
    # A mapping keeps a descriptor of its own.
    assert len(os.listdir("/proc/self/fd")) == open_before + 4
    assert taker.adopt((SlotName(3, 0),), [os.open("/dev/null", os.O_RDONLY)]) == []
    assert [os.fstat(f).st_ino for f in taker.open(3, GEOMETRY)] == [
        os.fstat(f).st_ino for f in fds
    ]
    taker.close()
    maker.close()


# -- control page


def test_page_gives_a_cut_only_for_its_step() -> None:
    fd = create_page()
    keeper, worker = ControlPage(fd), ControlPage(fd)
    keeper.publish_cut(5, 100, {0: 1, 1: 0})
    assert worker.cut_at(0, 100) == (5, 1)
    assert worker.cut_at(1, 100) == (5, 0)
    assert worker.cut_at(0, 99) is None
    keeper.clear_cut()
    assert worker.cut_at(0, 100) is None
    worker.post_boundary(1, 0, 123, 456)
    assert keeper.boundary(1)[:3] == (0, 123, 456)
    assert keeper.boundary(0)[0] is None
    keeper.publish_stop(9, final=False)
    assert worker.stop() == (True, 9, False)
    keeper.publish_stop(9, final=True)
    assert worker.stop() == (True, 9, True)
    keeper.serve(4)
    assert worker.served() == 4
    keeper.close()
    worker.close()
    os.close(fd)


def test_page_gives_what_a_rank_says_of_itself() -> None:
    fd = create_page()
    agent, worker = ControlPage(fd), ControlPage(fd)
    assert agent.beat(1) == Beat(None, 0, 0, 0, 0, "", 0, 0)
    worker.post_phase(1, "evaluation", 7, 9)
    worker.post_boundary(1, 4, 123, 456)
    worker.post_pace(1, 3, 99)
    worker.post_cut(1, 11)
    assert agent.beat(1) == Beat(4, 123, 3, 99, 11, "evaluation", 7, 9)
    agent.publish_cut(5, 100, {0: 1, 1: 1})
    assert worker.slot(1) == 1, "the words of both sides stand apart"
    worker.post_phase(1, "é" * 40, 8, 0)
    assert agent.beat(1)[5:] == ("é" * (LONGEST_NAME // 2), 8, 0)
    assert agent.beat(0) == Beat(None, 0, 0, 0, 0, "", 0, 0)
    agent.close()
    worker.close()
    os.close(fd)


def test_page_gives_a_phase_of_one_moment_while_it_changes() -> None:
    """A reader never sees the name of one phase with the times of another."""
    fd = create_page()
    reader, worker = ControlPage(fd), ControlPage(fd)
    over = threading.Event()

    def write() -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            worker.post_phase(0, f"phase {turn}", turn, turn)

    thread = threading.Thread(target=write)
    thread.start()
    seen: set[int] = set()
    while len(seen) < 20:
        beat = reader.beat(0)
        assert beat.phase in ("", f"phase {beat.since}")
        assert beat.limit == beat.since
        seen.add(beat.since)
    over.set()
    thread.join()
    reader.close()
    worker.close()
    os.close(fd)


# -- framing


def test_frames_and_descriptors_arrive_in_order() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    connection, link = Connection(ours), wire.Link(theirs)
    fd = create_page()
    link.send(Hello("agent", 1))
    link.send(AdoptSlots((SlotName(0, -1),)), (fd,))
    link.send(Hello("agent", 2))
    messages = connection.read()
    assert [type(m).__name__ for m in messages] == ["Hello", "AdoptSlots", "Hello"]
    (taken,) = connection.take_fds(1)
    assert os.fstat(taken).st_ino == os.fstat(fd).st_ino
    with pytest.raises(KeeperError, match="announced"):
        connection.take_fds(1)
    os.close(taken)
    os.close(fd)
    connection.close()
    link.close()


def test_last_words_are_read_though_nothing_can_be_said_any_more() -> None:
    """An agent says that it leaves, and closes; the keeper is about to tell it an event."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    connection, link = Connection(ours), wire.Link(theirs)
    link.send(Leave())
    link.close()
    connection.send(Demoted(("one",)))
    assert not connection.closed
    assert connection.read() == [Leave()]
    assert connection.closed
    connection.close()


def test_side_that_does_not_read_is_given_up_without_waiting(monkeypatch) -> None:
    monkeypatch.setattr("everstep.keeper.connection.MAX_OUTGOING", 1 << 20)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    connection = Connection(ours)
    for _ in range(100):
        connection.send(Demoted(("x" * 100_000,)))
    assert connection.closed
    connection.close()
    theirs.close()


@pytest.mark.parametrize("raw", [b"\xff" * 16, b"\x01\x00\x00\x00\xc1", b"\x02\x00\x00\x00{}"])
def test_strange_bytes_are_an_error_of_that_connection(raw: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    connection = Connection(ours)
    theirs.sendall(raw)
    with pytest.raises(KeeperError):
        connection.read()
    connection.close()
    theirs.close()


def test_link_is_readable_when_something_came_or_the_other_side_closed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    link = wire.Link(ours)
    assert not link.readable(0.0)
    theirs.close()
    assert link.readable(0.0)
    link.close()


def test_refused_becomes_the_error_of_its_code() -> None:
    error = error_of(Refused("EVS-301", "too small", "more"))
    assert isinstance(error, MemoryTooSmall)
    assert (error.what, error.hint) == ("too small", "more")
    assert type(error_of(Refused("EVS-999", "new"))) is KeeperError


def test_name_fits_a_socket_and_tells_jobs_apart() -> None:
    names = {keeper_name("s" * 500, "j" * 128, n, uid) for n in (0, 1) for uid in (0, 4294967295)}
    assert len(names) == 4
    assert max(len(name) for name in names) <= 107


# -- background


def test_lanes_do_not_wait_for_each_other_and_results_come_back_on_the_loop() -> None:
    background = Background()
    gate = threading.Event()
    got: list[object] = []
    background.submit("slow", gate.wait, got.append, got.append)
    background.submit("quick", lambda: 1, got.append, got.append)

    def fail() -> int:
        raise OSError(28, "No space left on device")

    background.submit("quick", fail, got.append, got.append)
    while len(got) < 2:
        background.deliver()
    assert got[0] == 1
    assert "No space" in str(got[1])
    gate.set()
    while background.running:
        background.deliver()
    assert got[2] is True


def test_bug_in_a_thread_is_raised_on_the_loop() -> None:
    background = Background()

    def bug() -> None:
        raise ZeroDivisionError

    background.submit("lane", bug, print, print)
    select.select([background], [], [], 10)
    with pytest.raises(ZeroDivisionError):
        background.deliver()


# -- memory


def test_room_is_refused_with_numbers_and_what_to_do() -> None:
    check_room(1000, [Limit(1 << 30, 1 << 31, "the machine's memory")])
    with pytest.raises(MemoryTooSmall) as small:
        check_room(1 << 30, [Limit(1 << 29, 1 << 31, "the memory limit of /sys/x")])
    for part in (str(1 << 30), str(1 << 29), str(1 << 31), "/sys/x", "Raise the limit"):
        assert part in str(small.value)


def test_limits_are_read_from_both_versions_of_control_groups(tmp_path: Path) -> None:
    meminfo = "MemTotal:  1000 kB\nMemFree: 100 kB\nMemAvailable: 300 kB\n"
    assert meminfo_limit(meminfo)[:2] == (300 * 1024, 1000 * 1024)
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("inactive_file 500\nanon 3500\n")
    limit = group_limit(tmp_path)
    assert limit is not None
    assert limit[:2] == (1500, 5000)
    (tmp_path / "memory.max").write_text("max\n")
    assert group_limit(tmp_path) is None
    (tmp_path / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert group_limit(tmp_path) is None
    assert read_limits()[0].total > 0


def test_groups_above_the_process_count_as_well(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 9 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/container\n")
    pod = tmp_path / "sys/fs/cgroup/pod"
    (pod / "container").mkdir(parents=True)
    (pod / "memory.max").write_text("100")
    (pod / "memory.current").write_text("40")
    assert [limit.free for limit in read_limits(tmp_path)] == [9 * 1024, 60]


# -- journal


def test_journal_writes_whole_lines_and_passes_events_on(tmp_path: Path) -> None:
    heard: list[Event] = []
    path = tmp_path / "events.jsonl"
    journal = Journal(str(path), source="keeper", job="j", clock=SystemClock(), listen=heard.append)
    journal.attempt = 3
    journal.say("snapshot.complete", "two\nlines", step=4, facts={"n": 1})
    journal.close()
    (line,) = path.read_bytes().splitlines()
    assert decode_line(line) == heard[0]
    assert (heard[0].attempt, heard[0].step, heard[0].facts) == (3, 4, {"n": 1})


def test_journal_that_cannot_be_written_is_no_failure(tmp_path: Path, capfd) -> None:
    journal = Journal(
        str(tmp_path / "no" / "such"), source="keeper", job="j", clock=SystemClock(),
        listen=lambda _: None,
    )  # fmt: skip
    journal.say("a.b", "text")
    assert "events are not written" in capfd.readouterr().err
