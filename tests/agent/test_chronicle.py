"""The history while its store is away, hangs, or comes back (F3, F6)."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from everstep.agent.chronicle import Chronicle
from everstep.agent.owner import Owner
from everstep.agent.record import Recorder
from everstep.core.clock import SystemClock
from everstep.core.settings import Settings
from everstep.errors import StoreError
from everstep.faults.history import Record, WordRecord, unpack
from everstep.store import Job, OwnerIdentity, open_store

ME = OwnerIdentity("job-host-1-abcd", "host", "boot", 1, 1)


@dataclass
class World:
    """A store that can be taken away: ``fault`` is what reaching it does."""

    folder: Path
    fault: Callable[[], None] = lambda: None

    def opened(self) -> Job:
        self.fault()
        return open_store(str(self.folder / "store"), create=True).job("job")

    def chronicle(self, patience: float = 5.0) -> Chronicle:
        settings = Settings(
            store=str(self.folder / "store"), job="job", state_dir=str(self.folder / "state")
        )
        record = Recorder("job", stream=io.StringIO())
        return Chronicle(settings, ME, self.opened, record, SystemClock(), patience=patience)

    def stored(self) -> tuple[Record, ...]:
        job = open_store(str(self.folder / "store"), create=True).job("job")
        return unpack(job.history().entries).records


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def word(chronicle: Chronicle, subject: str) -> WordRecord:
    return WordRecord("exclude", 0, chronicle.stamp(), subject=subject)


def away() -> None:
    raise StoreError("the store is not mounted.", hint="Mount it.")


def test_what_is_recorded_while_the_store_is_away_comes_into_it_later(world: World) -> None:
    first = world.chronicle()
    here = word(first, "a")
    first.write([here])
    world.fault = away
    there = word(first, "b")
    first.write([there])
    assert first.offline
    assert set(map(str, first.read())) == {str(here), str(there)}, "nothing is forgotten meanwhile"
    assert world.stored() == (here,)
    world.fault = lambda: None
    assert {str(record) for record in first.read()} == {str(here), str(there)}
    assert not first.offline
    assert set(map(str, world.stored())) == {str(here), str(there)}
    first.close()


def test_the_next_agent_on_the_host_brings_what_a_dead_one_kept_aside(world: World) -> None:
    """F3: a restart of the agent while the store was away refills no budget."""
    dead = world.chronicle()
    world.fault = away
    kept = word(dead, "a")
    dead.write([kept])
    world.fault = lambda: None
    new = world.chronicle()
    assert new.read() == (kept,)
    assert world.stored() == (kept,)
    new.close()
    dead.close()


def test_a_folder_on_this_host_that_cannot_be_read_keeps_no_store_away(world: World) -> None:
    chronicle = world.chronicle()
    place = chronicle._folder()
    place.touch()
    kept = word(chronicle, "a")
    chronicle.write([kept])
    assert chronicle.read() == (kept,)
    assert not chronicle.offline
    assert world.stored() == (kept,)
    chronicle.close()


def test_a_store_that_hangs_delays_a_decision_for_a_limited_time(world: World) -> None:
    over = threading.Event()

    def hang() -> None:
        over.wait(60.0)

    world.fault = hang
    chronicle = world.chronicle(patience=0.2)
    began = time.monotonic()
    kept = word(chronicle, "a")
    chronicle.write([kept])
    assert chronicle.read() == (kept,)
    assert time.monotonic() - began < 5.0, "far less than the store hangs"
    assert chronicle.offline
    over.set()
    chronicle.close()
    assert world.stored() == (kept,)


def test_a_store_that_is_away_at_the_end_is_not_made_anew_in_its_place(world: World) -> None:
    """F3: the word that stopped the job for good waits on this host for the store itself."""
    settings = Settings(
        store=str(world.folder / "store"), job="job", state_dir=str(world.folder / "state")
    )
    record = Recorder("job", stream=io.StringIO())
    owner = Owner(settings, record)
    chronicle = Chronicle(settings, owner.identity, lambda: owner.job, record, SystemClock())
    owner.take()
    (world.folder / "store").rename(world.folder / "unmounted")
    kept = word(chronicle, "a")
    chronicle.write([kept])
    owner.release()
    chronicle.close()
    owner.close()
    assert not (world.folder / "store").exists()
    (world.folder / "unmounted").rename(world.folder / "store")
    assert world.chronicle().read() == (kept,)
