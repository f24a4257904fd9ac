"""What is done to slots beside the loop: the pack is written while its digests are taken."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from keeper_fakes import DEADLINE, GEOMETRY, PIECE, fill, until

from everstep.core.clock import SystemClock
from everstep.core.ids import Point
from everstep.keeper import commands, slotwork
from everstep.keeper.background import Background
from everstep.keeper.facts import AnyFact, Digested, PersistFailed, RankPersisted
from everstep.keeper.holdings import Holdings, write_digests
from everstep.keeper.journal import Journal
from everstep.keeper.slot import Slot
from everstep.keeper.slotwork import SlotWork, Writer
from everstep.keeper.storing import Storing
from everstep.keeper.wire import SlotName
from everstep.store import pack

POINT = Point(7, 1)
WRITER = Writer(1, frozenset({"agent"}), {})


class Desk:
    """A :class:`SlotWork` on one filled slot and a store with the attempt's branch."""

    def __init__(self, folder: Path) -> None:
        self.facts: list[AnyFact] = []
        self.background = Background()
        self.holdings = Holdings("job")
        self.holdings.open(0, GEOMETRY)
        slot = self.holdings.slot(SlotName(0, 0))
        assert slot is not None
        self.slot: Slot = slot
        fill(slot, POINT.step, POINT.attempt, 0, 1, 1, "layout")
        self.storing = Storing(str(folder / "store"), "job")
        self.storing.write_branch(1, None, "fresh", 1, {})
        journal = Journal(
            str(folder / "events"), source="keeper", job="job", clock=SystemClock(),
            listen=lambda _: None,
        )  # fmt: skip
        self.work = SlotWork(
            self.holdings, self.storing, journal, self.background, tell=self.facts.append,
            idle=lambda _: None,
        )  # fmt: skip

    def await_facts(self, count: int) -> list[AnyFact]:
        def there() -> bool:
            select.select([self.background], [], [], 0.05)
            self.background.deliver()
            return len(self.facts) >= count

        until(there, f"{count} facts, not {self.facts}")
        return self.facts

    def damage(self) -> tuple[str, ...]:
        """What a deep look at the committed checkpoint finds."""
        self.storing.job().try_commit(POINT, 1)
        return self.storing.job().verify(POINT, deep=True).problems


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.holdings.close()


def test_pack_is_written_while_the_slot_is_digested_and_the_footer_waits_for_the_digests(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_digest = threading.Event()
    taken_anew: list[bool] = []
    handed_over: list[int] = []
    entries, stream = pack.entries, pack.stream

    def digest_late(slot: Slot, chunk_bytes: int) -> None:
        assert may_digest.wait(DEADLINE)
        write_digests(slot, chunk_bytes)

    def noted_entries(*parts: Any) -> pack.Entries:
        assert may_digest.is_set(), "the footer holds digests that nobody has taken"
        taken_anew.append(parts[-1] is None)
        return entries(*parts)

    def noted_stream(snapshot: Any, footer: Any, _: Any) -> Iterator[memoryview]:
        return stream(snapshot, footer, handed_over.append)

    monkeypatch.setattr(slotwork, "write_digests", digest_late)
    monkeypatch.setattr(pack, "entries", noted_entries)
    monkeypatch.setattr(pack, "stream", noted_stream)
    desk.work.digest(commands.Digest(0, 0, 0))
    desk.work.persist(commands.Persist(0, 0, 0, POINT), WRITER)
    until(lambda: sum(handed_over) >= PIECE, "the payload is written")
    assert desk.facts == []
    may_digest.set()
    kinds = {type(fact) for fact in desk.await_facts(2)}
    assert kinds == {Digested, RankPersisted}
    assert taken_anew == [False], "digested twice"
    assert desk.damage() == ()


def test_persist_takes_the_digests_itself_where_taking_them_failed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(slotwork, "write_digests", fails)
    desk.work.digest(commands.Digest(0, 0, 0))
    desk.work.persist(commands.Persist(0, 0, 0, POINT), WRITER)
    assert {type(fact) for fact in desk.await_facts(2)} == {Digested, RankPersisted}
    assert desk.damage() == ()


def test_memory_that_changes_between_digest_and_write_is_never_a_sound_checkpoint(
    desk: Desk,
) -> None:
    """S3: whichever of the two saw the wrong byte, a reader does."""
    desk.work.digest(commands.Digest(0, 0, 0))
    desk.await_facts(1)
    desk.slot.payload[5] ^= 1
    desk.work.persist(commands.Persist(0, 0, 0, POINT), WRITER)
    assert isinstance(desk.await_facts(2)[1], RankPersisted | PersistFailed)
    assert desk.damage()
