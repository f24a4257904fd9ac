"""Where no agent runs: a keeper that stands still, and a script that closes what is not its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_fakes import Keeper, Place, Worker, closing, train, until

from everstep.keeper import pulse
from everstep.keeper.address import try_connect


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def keepers(place: Place) -> Iterator[list[Keeper]]:
    started = [Keeper(place)]
    until(lambda: _answers(place), "it listens")
    yield started
    for keeper in started:
        if keeper.process.poll() is None:
            keeper.process.send_signal(signal.SIGCONT)
            keeper.kill()


@pytest.fixture
def worker(place: Place, keepers: list[Keeper]) -> Iterator[Worker]:
    made = Worker(place, launch="plain", restart=lambda: keepers.append(Keeper(place)))
    made.restore()
    made.open()
    with closing(made):
        yield made


def _answers(place: Place) -> bool:
    link = try_connect(place.name())
    if link is not None:
        link.close()
    return link is not None


def saves_again(place: Place, worker: Worker) -> None:
    before = len(place.events("snapshot.complete"))
    train([worker], lambda: len(place.events("snapshot.complete")) > before + 1, "a snapshot")


@pytest.mark.parametrize("remedy", ["roused", "replaced"])
def test_stopped_keeper_is_tended_by_the_rank_that_started_it(
    place: Place,
    keepers: list[Keeper],
    worker: Worker,
    monkeypatch: pytest.MonkeyPatch,
    remedy: str,
) -> None:
    """R3: and until then training goes on."""
    saves_again(place, worker)
    worker.link._pulse._rouse_after = 0.5 if remedy == "roused" else 1e9
    worker.link._pulse._end_after = 1e9 if remedy == "roused" else 0.5
    monkeypatch.setattr(pulse, "LOOK_SECONDS", 0.1)
    notices: list[str] = []
    keepers[0].process.send_signal(signal.SIGSTOP)

    def noticed() -> bool:
        notices.extend(filter(None, [worker.link.take_notice()]))
        return bool(notices)

    train([worker], noticed, "that it stands still")
    assert f"pid {keepers[0].process.pid}" in notices[0]
    saves_again(place, worker)
    assert len(keepers) == (1 if remedy == "roused" else 2)


def test_stopped_keeper_of_an_earlier_start_is_met_all_the_same(
    place: Place, keepers: list[Keeper], worker: Worker
) -> None:
    saves_again(place, worker)
    worker.link.close()
    keepers[0].process.send_signal(signal.SIGSTOP)
    again = Worker(place, launch="again", restart=lambda: keepers.append(Keeper(place)))
    with closing(again):
        assert again.restore().source == "memory"
    assert len(keepers) == 1


def test_script_that_closes_every_descriptor_trains_on_and_is_saved_again(
    place: Place, keepers: list[Keeper], worker: Worker, tmp_path: Path
) -> None:
    """R3. What has been opened under the same numbers since is not the worker's to close."""
    del keepers
    saves_again(place, worker)
    for fd in (worker.link._link.fileno(), *worker.link._fds):
        os.close(fd)
    path = tmp_path / "users"
    users = [os.open(path, os.O_CREAT | os.O_WRONLY) for _ in range(4)]
    until(lambda: worker.finish_step() is None, "the link is given up")
    saves_again(place, worker)
    worker.link.close()
    for fd in users:
        assert os.path.samestat(os.fstat(fd), os.stat(path))
        os.close(fd)
