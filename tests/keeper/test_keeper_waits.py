"""Ranks that wait where no agent runs: nobody but the keeper sees that it is in vain."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
from keeper_fakes import DEADLINE, Agent, Keeper, Place, closing, until
from test_keeper_launches import Live, Plain, live

from everstep.cadence.policy import Policy
from everstep.core.settings import Settings
from everstep.errors import KeeperError, RestoreError, StoreError
from everstep.keeper import client, commands, facts
from everstep.keeper.address import connect, try_connect
from everstep.keeper.client import WorkerLink
from everstep.keeper.coordinate import Coordinator
from everstep.keeper.wire import BeginAttempt, Fatal, Hello, Refused
from everstep.testing.faulty import BackendFault

__all__ = ["live"]


# -- what the coordinator decides


def _two(*, alone: bool) -> Coordinator:
    coordinator = Coordinator()
    begun = facts.Begun(1, ((0, 1),), "auto", False, Policy(), alone=alone)
    told = [begun, facts.NodeJoined(0, ()), facts.StoreRead(1)]
    told += [facts.Registered(0), facts.OfferAsked(0, 2), facts.Registered(1)]
    for fact in told:
        coordinator.handle(fact, 0.0)
    return coordinator


def _refusals(said: list[commands.Command]) -> list[commands.RefuseTo]:
    return [command for command in said if isinstance(command, commands.RefuseTo)]


@pytest.mark.parametrize("alone", [True, False])
def test_rank_that_ends_before_the_election_is_waited_for_only_where_an_agent_runs(
    alone: bool,
) -> None:
    coordinator = _two(alone=alone)
    coordinator.handle(facts.RankGone(0, 1, (), False), 0.0)
    refused = _refusals(coordinator.handle(facts.RankEnded(1), 0.0))
    assert [(r.rank, r.code) for r in refused] == ([(0, RestoreError.code)] if alone else [])
    assert all("rank 1" in r.what for r in refused)


def test_rank_whose_next_process_is_there_has_not_ended() -> None:
    coordinator = _two(alone=True)
    assert not _refusals(coordinator.handle(facts.RankEnded(1), 0.0))


def test_rank_that_ends_after_the_election_is_no_matter_of_the_restore() -> None:
    coordinator = _two(alone=True)
    for fact in (
        facts.OfferAsked(1, 2), facts.Voted(0, True, ""), facts.Voted(1, True, ""),
        facts.BranchWritten(1), facts.RankGone(0, 1, (), False),
    ):  # fmt: skip
        coordinator.handle(fact, 0.0)
    assert not _refusals(coordinator.handle(facts.RankEnded(1, "left"), 0.0))
    assert coordinator.at.elected


# -- real processes


def test_rank_killed_before_the_election_is_named_to_the_others(place: Place, live: Live) -> None:
    with closing(Keeper(place)):
        first, second = live(), live()
        first.do("connect", rank=0, world=2, launch="one")
        second.do("connect", rank=1, world=2, launch="one")
        first.say("restore")
        second.kill()
        with pytest.raises(RestoreError, match="rank 1 cannot take part"):
            first.answer()


def test_rank_that_cannot_restore_says_why_to_all(place: Place) -> None:
    with closing(Keeper(place)):
        ranks = [Plain(place, rank, 2, "one") for rank in range(2)]
        heard: list[Exception] = []

        def ask() -> None:
            try:
                ranks[0].restore()
            except RestoreError as error:
                heard.append(error)

        waiting = threading.Thread(target=ask)
        waiting.start()
        ranks[1].link.fatal(Fatal("EVS-403", "EVS-403: the shapes differ.", 1, 1))
        waiting.join(DEADLINE)
        assert "rank 1" in str(heard[0])
        assert "the shapes differ" in str(heard[0])
        for rank in ranks:
            rank.link.close()


def test_rank_that_parts_before_the_election_is_not_waited_for(place: Place, live: Live) -> None:
    with closing(Keeper(place)):
        first = live()
        first.do("connect", rank=0, world=2, launch="one")
        second = Plain(place, 1, 2, "one")
        first.say("restore")
        second.close()
        with pytest.raises(RestoreError, match="rank 1"):
            first.answer()


def test_ranks_in_the_lobby_hear_that_the_one_who_begins_has_ended(
    place: Place, live: Live
) -> None:
    faults = json.dumps([{"point": "store.claim.before_create", "action": "hang"}])
    with closing(Keeper(place, faults=faults)):
        first = live()
        first.say("connect", rank=0, world=2, launch="one")
        until((place.folder / "store").exists, "the claim is on its way")
        second = connect(place.name(), timeout=DEADLINE)
        second.send(Hello("worker", os.getpid(), "one", 1, 1))
        for _ in range(3):  # turns of the keeper's loop: the second rank waits
            Agent(place).close()
        first.kill()
        refused, _ = second.receive(timeout=DEADLINE)
        assert isinstance(refused, Refused)
        assert refused.code == RestoreError.code
        assert "has ended before it was begun" in refused.what
        second.close()


# -- what is said at the deadline


def _connect(place: Place, rank: int, **more: object) -> WorkerLink:
    hello = Hello("worker", os.getpid(), "one", rank, rank)
    begin = None if rank else BeginAttempt("one", 0, 0, ((0, 1),))
    return WorkerLink.connect(place.name(), hello, begin=begin, timeout=1.0, **more)  # type: ignore[arg-type]


def test_rank_that_waited_in_vain_says_for_whom(place: Place) -> None:
    with closing(Keeper(place)):
        until(lambda: _answers(place), "the keeper is there")
        with pytest.raises(KeeperError, match="local rank 0 has not begun"):
            _connect(place, 1)


def _answers(place: Place) -> bool:
    link = try_connect(place.name())
    if link is not None:
        link.close()
    return link is not None


def test_why_the_store_takes_no_claim_is_said_at_the_deadline(tmp_path: Path) -> None:
    class Unclaimed(Place):
        def settings(self, node: int = 0) -> Settings:
            plan = self.folder / "plan.json"
            fault = BackendFault("fail", "create", "/claim", times=0)
            if not plan.exists():  # a keeper may be reading it
                plan.write_bytes(msgspec.json.encode([fault]))
            url = f"faulty+file://{quote(str(self.folder / 'store'))}?plan={quote(str(plan))}"
            return dataclasses.replace(super().settings(node), store=url)

    place = Unclaimed(tmp_path)
    with closing(Keeper(place)), pytest.raises(StoreError, match="claim"):
        _connect(place, 0)


def test_nobody_answers_names_the_log(place: Place) -> None:
    with pytest.raises(KeeperError, match="no keeper answers") as caught:
        _connect(place, 0, log="/var/log/keeper-0.log")
    assert "/var/log/keeper-0.log" in str(caught.value)


def test_keeper_that_ends_at_its_start_is_not_waited_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "RESTART_SECONDS", 0.01)
    started: list[subprocess.Popen[bytes]] = []

    def restart() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"]))
        started[-1].wait()
        return started[-1]

    with pytest.raises(KeeperError, match="exit code 3 at its start, 3 times") as caught:
        _connect(place, 0, restart=restart, log="/var/log/keeper-0.log")
    assert len(started) == client.CRASHES
    assert "/var/log/keeper-0.log" in str(caught.value)
