"""The watch over a node's sources: nothing blocks it, memory is bounded, a blind one tells (F5)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import pytest
from source_fakes import SetClock, classes, until

from everstep.agent.watch import node as nodes
from everstep.agent.watch.node import NodeWatch, timed
from everstep.agent.watch.registry import Around, paths_of, sources
from everstep.agent.watch.ring import EACH, LONGEST, Ring
from everstep.agent.watch.source import Blind, Source, reason_of
from everstep.core.settings import Settings
from everstep.faults.records import Signal


class Said(Source):
    """Says what it is given, is blind where it is told so, and hangs until it is let go on."""

    def __init__(self, name: str = "said", every: float = 0.001) -> None:
        self.name, self.every = name, every
        self.texts: list[str] = []
        self.holds: list[str] = []
        self.blind = ""
        self.error: Exception | None = None
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.looks = 0
        self.closed = False

    def look(self) -> Iterable[Signal]:
        self.looks += 1
        assert self.goes_on.wait(60)
        if self.error:
            raise self.error
        texts, self.texts = self.texts, []
        yield from (Signal("kernel", text) for text in texts)
        if self.blind:
            raise Blind(self.blind)

    def standing(self) -> Iterable[Signal]:
        return [Signal("kernel", text) for text in self.holds]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def watching() -> Iterator[Callable[..., NodeWatch]]:
    made: list[tuple[NodeWatch, tuple[Said, ...]]] = []

    def make(*given: Said, clock: SetClock | None = None, **more: float) -> NodeWatch:
        watch = NodeWatch(given, "gpu-7", clock, **more)  # type: ignore[arg-type]
        made.append((watch, given))
        return watch

    yield make
    for watch, given in made:
        for source in given:
            source.goes_on.set()
        watch.close()
    left = [t.name for t in threading.enumerate() if t.name.startswith("everstep-watch-said")]
    assert not left


def texts(watch: NodeWatch, since: float = -1.0) -> list[str]:
    return [signal.text for signal in watch.since(since)]


def test_signals_get_the_node_and_both_clocks(watching: Callable[..., NodeWatch]) -> None:
    source, clock = Said(), SetClock(mono=50.0, wall=9000.0)
    watch = watching(source, clock=clock)
    source.texts = ["one"]
    until(lambda: watch.since(), "a signal")
    (signal,) = watch.since()
    assert signal == Signal("kernel", "one", node="gpu-7", mono=50.0, wall=9000.0)
    assert timed([signal], started=48.0)[0].time == 2.0
    assert timed([signal], started=60.0)[0].time == -10.0
    assert timed([msgspec.structs.replace(signal, source="agent")], started=60.0) == ()


def test_what_is_old_is_not_given_any_more(watching: Callable[..., NodeWatch]) -> None:
    source, clock = Said(), SetClock()
    watch = watching(source, clock=clock, most_age=60.0)
    source.texts = ["old \udcff name"]
    until(lambda: texts(watch) == ["old ? name"], "the signal, as text that can be stored")
    clock.pass_(61.0)
    assert not [text for text in texts(watch) if text.startswith("old")]


def test_since_gives_what_arrived_since(watching: Callable[..., NodeWatch]) -> None:
    source, clock = Said(), SetClock(mono=50.0)
    watch = watching(source, clock=clock)
    source.texts = ["old"]
    until(lambda: texts(watch) == ["old"], "the first")
    clock.pass_(5.0)
    source.texts = ["new"]
    until(lambda: texts(watch) == ["old", "new"], "the second")
    assert texts(watch, since=55.0) == ["new"]


def test_gather_looks_now_and_tells_what_still_holds(watching: Callable[..., NodeWatch]) -> None:
    source = Said(every=3600.0)
    watch = watching(source)
    until(lambda: source.looks == 1, "the first look")
    source.texts, source.holds = ["news"], ["the disk is still full"]
    assert watch.gather(20.0) == ()
    assert texts(watch) == ["news", "the disk is still full"]


def test_gather_waits_no_longer_than_it_may(watching: Callable[..., NodeWatch]) -> None:
    stuck, well = Said("said-stuck"), Said("said-well", every=3600.0)
    stuck.goes_on.clear()
    watch = watching(stuck, well)
    until(lambda: stuck.looks == 1 and well.looks == 1, "both looks")
    well.texts = ["told"]
    began = time.monotonic()
    assert watch.gather(0.1) == ("said-stuck",)
    assert time.monotonic() - began < 5.0, "the one that hangs holds up nobody"
    assert texts(watch) == ["told"]


def test_f5_a_source_that_hangs_is_told_once_and_when_it_is_back(
    watching: Callable[..., NodeWatch],
) -> None:
    source, clock = Said(every=1.0), SetClock()
    source.goes_on.clear()
    watch = watching(source, clock=clock)
    until(lambda: source.looks == 1, "its look")
    clock.pass_(nodes.LATE_SECONDS - 0.1)
    assert not watch.since()
    clock.pass_(0.2)
    assert not watch.since(), "this agent may have been stopped, and the thread has yet to run"
    clock.pass_(nodes.AGAIN_SECONDS)
    assert texts(watch) == [
        "watch: the source said hangs, what it would show is not seen: "
        "no look at it came back for 11 s"
    ]
    assert watch.states() == {"said": "late"}
    clock.pass_(nodes.REMIND_SECONDS / 2)
    assert len(watch.since()) == 1
    assert watch.gather(20.0) == ("said",), "and it is not waited for"
    source.goes_on.set()
    until(lambda: len(watch.since()) == 2, "its return")
    assert texts(watch)[1] == "watch: the source said gives signals again"


def test_f5_an_agent_that_was_stopped_takes_no_source_for_hung(
    watching: Callable[..., NodeWatch],
) -> None:
    source, clock = Said(), SetClock()
    watch = watching(source, clock=clock)
    until(lambda: source.looks > 1, "looks")
    clock.pass_(3600.0)
    watch.since()
    looks = source.looks
    until(lambda: source.looks > looks + 1, "further looks")
    clock.pass_(nodes.AGAIN_SECONDS)
    assert not watch.since()


def test_f5_losing_a_source_is_a_signal(watching: Callable[..., NodeWatch]) -> None:
    source = Said()
    watch = watching(source)
    until(lambda: watch.states() == {"said": "seeing"}, "it sees")
    source.blind = "it is not there"
    until(lambda: watch.since(), "the loss")
    looks = source.looks
    until(lambda: source.looks > looks + 3, "further looks, of which nothing is told")
    source.blind = ""
    until(lambda: len(watch.since()) == 2, "the return")
    assert texts(watch) == [
        "watch: the source said stopped giving signals, what it would show is not seen: "
        "it is not there",
        "watch: the source said gives signals again",
    ]
    assert {signal.source for signal in watch.since()} == {"agent"}


def test_what_a_source_gave_before_it_was_lost_is_kept(
    watching: Callable[..., NodeWatch],
) -> None:
    source = Said(every=3600.0)
    watch = watching(source)
    until(lambda: watch.states() == {"said": "seeing"}, "it sees")
    source.texts, source.blind = ["its last words"], "it is not there"
    watch.gather(20.0)
    assert sorted(texts(watch)) == [
        "its last words",
        "watch: the source said stopped giving signals, what it would show is not seen: "
        "it is not there",
    ]


def test_f5_a_source_that_never_was_there_is_only_named(
    watching: Callable[..., NodeWatch],
) -> None:
    source = Said()
    source.error = PermissionError(13, "Permission denied", "/dev/kmsg")
    watch = watching(source)
    until(lambda: source.looks > 3, "several looks")
    assert texts(watch) == [
        "watch: the source said is not available on this node, degraded: "
        "this user may not read /dev/kmsg"
    ]


def test_f5_an_incident_is_told_which_sources_it_lacks(
    watching: Callable[..., NodeWatch],
) -> None:
    source, clock = Said(every=3600.0), SetClock()
    source.blind = "it is not there"
    watch = watching(source, clock=clock)
    until(lambda: len(watch.since()) == 1, "the first word of it")
    watch.gather(20.0)
    assert len(watch.since()) == 1, "that was just told"
    clock.pass_(nodes.REMIND_SECONDS + 1.0)
    watch.gather(20.0)
    first, again = watch.since()
    assert first.text == again.text
    assert again.mono == clock.mono()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_f5_a_thread_that_died_is_told(watching: Callable[..., NodeWatch]) -> None:
    source = Said()
    source.error = KeyError("a bug")
    watch = watching(source)
    until(lambda: watch.states() == {"said": "dead"}, "its end")
    assert texts(watch) == [
        "watch: the source said ended, what it would show is not seen: "
        "by an error of its own, which is on standard error"
    ]
    assert watch.gather(20.0) == ("said",)


@pytest.mark.parametrize("number", [1, 2, 5, 13, 28, 30, 107, 116, 122])
@pytest.mark.parametrize(("before", "after"), [
    ("new", "blind"), ("seeing", "blind"), ("seeing", "late"), ("blind", "seeing"),
    ("seeing", "dead"),
])  # fmt: skip
def test_that_a_source_is_blind_is_no_failure_of_the_job(
    number: int, before: nodes.State, after: nodes.State
) -> None:
    for name in ("kernel", "disk of the store", "mounts", "termination notice"):
        why = reason_of(OSError(number, os.strerror(number), "/data/run"))
        assert classes(Signal("agent", nodes.word(name, before, after, why))) == []


def test_a_source_may_come_later(watching: Callable[..., NodeWatch]) -> None:
    first, second = Said("said-1"), Said("said-2")
    watch = watching(first)
    watch.add(second)
    second.texts = ["hello"]
    until(lambda: texts(watch) == ["hello"], "its signal")
    assert watch.states().keys() == {"said-1", "said-2"}


def test_close_leaves_only_what_hangs(
    watching: Callable[..., NodeWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "CLOSE_SECONDS", 0.05)
    stuck, well = Said("said-stuck"), Said("said-well", every=3600.0)
    stuck.goes_on.clear()
    watch = watching(stuck, well)
    until(lambda: stuck.looks == 1, "its look")
    began = time.monotonic()
    watch.close()
    assert time.monotonic() - began < nodes.CLOSE_SECONDS + 5.0
    assert well.closed
    assert not stuck.closed, "its thread alone may do that"


def test_a_storm_is_bounded_and_told(watching: Callable[..., NodeWatch]) -> None:
    source = Said()
    watch = watching(source, most_bytes=10_000)
    source.texts = ["GPU has fallen off the bus", *(f"storm of line {n}" for n in range(500))]
    until(lambda: len(watch.since()) > 10, "the storm")
    seen = texts(watch)
    assert seen[0] == "GPU has fallen off the bus", "a storm pushes out itself alone"
    assert seen[-2] == "storm of line 499"
    assert seen[-1].startswith(f"watch: {501 + 1 - len(seen)} signals of the source said were")


def test_secrets_are_gone_before_anything_is_kept(watching: Callable[..., NodeWatch]) -> None:
    source = Said()
    watch = watching(source)
    source.texts = ["mount.s3 https://me:Pa55word@host/bucket failed"]
    until(lambda: watch.since(), "the signal")
    assert texts(watch) == ["mount.s3 https://me:[redacted]@host/bucket failed"]


def test_a_ring_counts_what_it_keeps_and_forgets_by_age() -> None:
    ring = Ring(most_bytes=10 * (EACH + 4), most_age=60.0)
    for second in range(10):
        ring.add(float(second), Signal("log", f"x{second:03}"))
    assert ring.bytes == 10 * (EACH + 4)
    assert ring.dropped == 0
    ring.add(10.0, Signal("log", "y000"))
    assert (ring.bytes, ring.dropped, ring.dropped_at) == (10 * (EACH + 4), 1, 10.0)
    ring.add(69.5, Signal("log", "z000"))
    assert [signal.text for *_, signal in ring.since(0.0)] == ["y000", "z000"]
    assert ring.bytes == 2 * (EACH + 4)
    assert ring.dropped == 1, "age is no loss"


def test_a_huge_text_is_cut_in_the_middle() -> None:
    ring = Ring()
    ring.add(0.0, Signal("log", "a" * LONGEST + "é" * LONGEST + "b"))
    ((_, _, signal),) = ring.since(0.0)
    assert len(signal.text.encode()) <= LONGEST
    assert signal.text.startswith("aaa")
    assert signal.text.endswith("éb")
    assert "bytes left out" in signal.text


def test_every_source_of_the_registry_answers_on_this_machine(tmp_path: Path) -> None:
    folder = tmp_path
    settings = Settings(
        kernel_log=str(folder / "kernel.log"), termination_notice=str(folder / "notice")
    )
    environment = {"SLURM_JOB_END_TIME": "4102444800"}
    made = sources(Around(settings, paths_of(folder / "store", folder / "state"), environment))
    names = [source.name for source in made]
    assert len(set(names)) == len(names)
    assert {"kernel", "cgroup", "disk of the store", "mounts", "clock"} <= set(names)
    assert {"termination notice", "end of the allocation"} <= set(names)
    watch = NodeWatch(made, "here")
    try:
        assert watch.gather(20.0) == ()
        states = watch.states()
        assert states.pop("kernel") == "blind", "the file is not there yet"
        states.pop("cgroup")  # some machines count nothing for the group of the tests
        assert set(states.values()) == {"seeing"}
    finally:
        watch.close()
