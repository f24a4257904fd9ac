"""What the coordinator says: one frozen record for each thing that can be ordered.

Owns: the records and their wire form. Never does: anything. Called by: coordinate (which makes
them), node (which carries them out), server (which brings them to the node they name).
"""

from __future__ import annotations

import msgspec

from everstep.core.events import Level
from everstep.core.ids import Point
from everstep.errors import KeeperError
from everstep.keeper.wire import SlotName, WentOn


class Command(msgspec.Struct, frozen=True, tag=True):
    """Base of all commands. ``node`` carries it out."""

    node: int


class PublishCut(Command, frozen=True):
    """``slots``: (rank, slot index) of the node's ranks."""

    sequence: int
    step: int
    slots: tuple[tuple[int, int], ...]


class ClearCut(Command, frozen=True):
    pass


class PublishStop(Command, frozen=True):
    step: int
    final: bool


class Forget(Command, frozen=True):
    """Clear the slot's commit word: what it holds must never be restored."""

    rank: int
    index: int


class DropSlots(Command, frozen=True):
    """Close slots that were replaced and are not needed any more."""

    rank: int
    indexes: tuple[int, ...]


class Digest(Command, frozen=True):
    """Digest the slot's memory; answered by the fact ``Digested``."""

    rank: int
    index: int


class Persist(Command, frozen=True):
    """Store the rank's part; answered by ``RankPersisted`` or ``PersistFailed``."""

    rank: int
    index: int
    point: Point


class Commit(Command, frozen=True):
    """Complete the checkpoint; answered by ``Committed`` or ``CommitFailed``."""

    point: Point
    world: int


class ReadStore(Command, frozen=True):
    """Answered by ``StoreRead``. ``upto``: nothing newer is a candidate."""

    attempt: int
    upto: Point | None = None


class CheckMemory(Command, frozen=True):
    """Compare the slots with their digests; answered by ``MemoryChecked``."""

    point: Point
    slots: tuple[SlotName, ...]


class WriteBranch(Command, frozen=True):
    """Answered by ``BranchWritten``."""

    attempt: int
    point: Point | None
    source: str
    world: int


class GrantSlot(Command, frozen=True):
    """``index`` -1: none came free in time. ``sequence`` is the number of the try."""

    rank: int
    index: int
    sequence: int = 0


class AnswerDurable(Command, frozen=True):
    rank: int
    durable: bool
    reason: str = ""


class OfferTo(Command, frozen=True):
    """``slots`` are the node's slots of ``point``, for memory alone."""

    rank: int
    source: str
    point: Point | None
    slots: tuple[SlotName, ...] = ()


class ElectTo(Command, frozen=True):
    """``before``: what earlier attempts went on from whose branches the store does not have yet."""

    rank: int
    source: str
    point: Point | None
    before: tuple[WentOn, ...] = ()


class RefuseTo(Command, frozen=True):
    rank: int
    code: str
    what: str
    hint: str = ""


class DemoteFqns(Command, frozen=True):
    """All FQNs demoted so far (R8)."""

    fqns: tuple[str, ...]


class Tell(Command, frozen=True):
    """An event for the journal."""

    kind: str
    text: str
    level: Level = "info"
    rank: int | None = None
    step: int | None = None
    facts: dict[str, object] = {}


AnyCommand = (
    PublishCut | ClearCut | PublishStop | Forget | DropSlots | Digest | Persist | Commit
    | ReadStore | CheckMemory | WriteBranch | GrantSlot | AnswerDurable | OfferTo | ElectTo
    | RefuseTo | DemoteFqns | Tell
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyCommand] = msgspec.msgpack.Decoder(AnyCommand)


def encode(command: Command) -> bytes:
    return _encoder.encode(command)


def decode(body: bytes) -> AnyCommand:
    """Raises :class:`KeeperError` where it is none."""
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as bad:
        raise KeeperError(f"a command of another keeper cannot be read: {bad}.") from bad
