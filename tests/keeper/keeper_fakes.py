"""Workers and agents without torch: real processes or real connections, real slots.

A snapshot of step s of rank r holds one replicated-free tensor whose bytes say s and r.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from everstep.cadence.policy import Policy
from everstep.core.events import Event, decode_line
from everstep.core.layout import Box, RankLayout, RankState, TensorRef, place
from everstep.core.settings import Settings
from everstep.keeper.address import connect, keeper_name
from everstep.keeper.client import Offered, WorkerLink
from everstep.keeper.slot import Geometry, Slot
from everstep.keeper.spawn import start_keeper
from everstep.keeper.wire import (
    AdoptSlots,
    AnyMessage,
    AttemptBegun,
    BeginAttempt,
    CutDone,
    Elected,
    Hello,
    Leave,
    Link,
    Message,
    Refused,
    SlotName,
    SlotsHeld,
    Welcome,
)

PIECE = 64 * 1024
"""Bytes of each rank's tensor."""

DEADLINE = 20.0


def until(condition: Callable[[], object], what: str, seconds: float = DEADLINE) -> None:
    """Wait for a condition, never for a time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not in {seconds} s: {what}")
        time.sleep(0.002)


def layout_of(rank: int, world: int, name: str = "layout") -> RankLayout:
    ref = TensorRef("w", "uint8", (world * PIECE,), Box((rank * PIECE,), (PIECE,)))
    return place([(ref, ref.box, True)], layout=name, world=world, rank=rank)


def content(step: int, rank: int) -> bytes:
    return bytes([(step * 7 + rank * 3) % 251]) * PIECE


def state_of(rank: int, world: int, step: int) -> bytes:
    ref = TensorRef("w", "uint8", (world * PIECE,), Box((rank * PIECE,), (PIECE,)))
    return msgspec.msgpack.encode(RankState(step, (ref,), {}, b"objects"))


GEOMETRY = Geometry.fitting(payload=PIECE, state=4096, layout=4096, digests=4096)


@dataclass
class Place:
    """Where tests keep store, journal and keeper logs, and the processes to end."""

    folder: Path
    job: str = "job"
    policy: Policy = field(default_factory=lambda: Policy(snapshot_every=1, checkpoint_every=0.0))

    def settings(self, node: int = 0) -> Settings:
        return Settings(
            store=str(self.folder / "store"),
            job=self.job,
            events=str(self.folder / "events.jsonl"),
            state_dir=str(self.folder / "state"),
            node=node,
        )

    def name(self, node: int = 0) -> str:
        settings = self.settings()
        return keeper_name(settings.store, settings.job, node)

    def events(self, kind: str = "") -> list[Event]:
        path = self.folder / "events.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        found = [decode_line(line) for line in lines]
        return [event for event in found if not kind or event.kind == kind]

    def await_event(self, kind: str, **wanted: object) -> Event:
        def match() -> list[Event]:
            return [
                e
                for e in self.events(kind)
                if all(e.facts.get(n, getattr(e, n, None)) == v for n, v in wanted.items())
            ]

        until(match, f"event {kind} {wanted}; there are {[e.kind for e in self.events()]}")
        return match()[-1]


class Keeper:
    """A real keeper process."""

    def __init__(
        self, place: Place, node: int = 0, *, faults: str = "", listen_fd: int | None = None
    ) -> None:
        old = os.environ.get("EVERSTEP_FAULTS")
        if faults:
            os.environ["EVERSTEP_FAULTS"] = faults
        try:
            self.process = start_keeper(place.settings(), node, listen_fd=listen_fd)
        finally:
            os.environ.pop("EVERSTEP_FAULTS", None)
            if old is not None:
                os.environ["EVERSTEP_FAULTS"] = old

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=DEADLINE)

    def wait(self, seconds: float = DEADLINE) -> int:
        return self.process.wait(timeout=seconds)


class Agent:
    """An agent's line to one keeper: holds descriptors, begins attempts."""

    def __init__(self, place: Place, node: int = 0) -> None:
        self.place, self.node = place, node
        self.held: dict[SlotName, int] = {}
        self.heard: list[AnyMessage] = []
        self.begun: AttemptBegun | None = None
        self.link = self._connect()

    def _connect(self) -> Link:
        link = connect(self.place.name(self.node), timeout=DEADLINE)
        self.link = link
        self.ask(Hello("agent", os.getpid()), Welcome)
        return link

    def ask(self, message: Message, kind: type[Message]) -> AnyMessage:
        self.link.send(message)
        while True:
            answer, fds = self.link.receive(timeout=DEADLINE)
            if isinstance(answer, kind):
                return answer
            assert not isinstance(answer, Refused), answer
            self._take(answer, fds)

    def begin(self, attempt: int, ranks: tuple[tuple[int, ...], ...], **more: object) -> None:
        message = BeginAttempt(
            f"attempt-{attempt}", attempt, self.node, ranks, policy=self.place.policy,
            agent="agent-of-the-test", **more,
        )  # fmt: skip
        answer = self.ask(message, AttemptBegun)
        assert isinstance(answer, AttemptBegun)
        self.begun = answer

    def hand_over(self) -> None:
        """To a new keeper: reconnect and give it all slots."""
        self.link.close()
        self._connect()
        names = tuple(self.held)
        self.link.send(AdoptSlots(names), tuple(self.held[name] for name in names))

    def pump(self) -> None:
        while True:
            try:
                self._take(*self.link.receive(timeout=0.01))
            except Exception:  # noqa: BLE001 - nothing more is there
                return

    def leave(self) -> None:
        self.link.send(Leave())

    def close(self) -> None:
        self.link.close()
        for fd in self.held.values():
            os.close(fd)
        self.held = {}

    def _take(self, message: AnyMessage, fds: list[int]) -> None:
        if isinstance(message, SlotsHeld):
            for name, fd in zip(message.names, fds, strict=True):
                old = self.held.pop(name, None)
                if old is not None:
                    os.close(old)
                self.held[name] = fd
        else:
            self.heard.append(message)


class Worker:
    """One rank over the real client."""

    def __init__(
        self,
        place: Place,
        *,
        rank: int = 0,
        world: int = 1,
        attempt: int = 0,
        launch: str = "",
        node: int = 0,
        local_rank: int | None = None,
        restart: Callable[[], object] | None = None,
        resume: str = "auto",
        **choices: Any,
    ) -> None:
        self.place, self.rank, self.world = place, rank, world
        self.local_rank = rank if local_rank is None else local_rank
        self.launch = launch or f"attempt-{attempt}"
        begin = None
        if not attempt and self.local_rank == 0:
            begin = BeginAttempt(
                self.launch, 0, node, (tuple(range(world)),), policy=place.policy, resume=resume
            )
        hello = Hello("worker", os.getpid(), self.launch, rank, self.local_rank, node, **choices)
        self.link = WorkerLink.connect(
            place.name(node), hello, begin=begin, restart=restart, timeout=DEADLINE
        )
        self.step = 0
        self.layout = "layout"
        self.replicas: dict[str, str] = {}

    # -- restore

    def restore(self) -> Elected:
        self.ask()
        answer = self.link.vote(True, timeout=DEADLINE)
        assert isinstance(answer, Elected), "a vote for the candidate did not elect it"
        self.step = answer.point.step if answer.point else 0
        return answer

    def ask(self) -> Offered:
        return self.link.ask_offer(timeout=DEADLINE)

    # -- training

    def open(self, geometry: Geometry = GEOMETRY) -> None:
        self.link.open_slots(geometry)

    def finish_step(self) -> int | None:
        """One step and its boundary; the step of the cut taken, if any."""
        self.step += 1
        now = time.monotonic_ns()
        self.link.page.post_boundary(self.local_rank, self.step, now, 1_000_000)
        if not self.link.reconnect_if_needed(time.monotonic()):
            return None
        cut = self.link.page.cut_at(self.local_rank, self.step)
        if cut is None:
            return None
        self.write(cut[1], sequence=cut[0])
        return self.step

    def write(
        self, index: int, *, sequence: int = 0, persist: bool = False, say: bool = True
    ) -> None:
        assert self.link.slots is not None
        slot = self.link.slots[index]
        fill(slot, self.step, self.link.attempt, self.rank, self.world, sequence, self.layout)
        if say:
            self.say_done(index, sequence=sequence, persist=persist)

    def say_done(self, index: int, *, sequence: int = 0, persist: bool = False) -> None:
        self.link.cut_done(
            CutDone(self.step, index, self.layout, sequence, 1e-5, PIECE, self.replicas, persist)
        )

    def checkpoint(self) -> int:
        """An explicit cut of the step at hand."""
        grant = self.link.ask_slot(self.step, timeout=DEADLINE)
        assert grant is not None, "no slot came free"
        self.write(grant.slot, sequence=grant.sequence, persist=True)
        return grant.slot

    def close(self, *, finished: bool = False) -> None:
        self.link.goodbye(finished=finished)


def fill(
    slot: Slot, step: int, attempt: int, rank: int, world: int, sequence: int, layout: str
) -> None:
    slot.begin()
    slot.payload[:PIECE] = content(step, rank)
    slot.commit(
        step=step, attempt=attempt, world=world, rank=rank, sequence=sequence,
        layout=msgspec.msgpack.encode(layout_of(rank, world, layout)),
        state=state_of(rank, world, step),
    )  # fmt: skip


def train(workers: list[Worker], condition: Callable[[], object], what: str) -> None:
    """Step all ranks together until ``condition`` holds."""

    def once() -> bool:
        if condition():
            return True
        for worker in workers:
            worker.finish_step()
        return False

    until(once, what)


@contextmanager
def closing(*things: object) -> Iterator[None]:
    """Close or kill all things at the end, whatever happened."""
    try:
        yield
    finally:
        for thing in things:
            if isinstance(thing, Keeper):
                thing.kill()
            elif isinstance(thing, Worker):
                thing.link.close()
            elif isinstance(thing, Agent):
                thing.close()
