"""What the coordinator is told: one frozen record for each thing that can happen.

Owns: the records and their wire form (they come by TCP from the other nodes' keepers). Never
does: decide. Called by: node (which makes them), coordinate (which takes them).
"""

from __future__ import annotations

import msgspec

from everstep.cadence.policy import Policy
from everstep.core.ids import Point
from everstep.errors import KeeperError
from everstep.keeper.wire import WentOn


class Fact(msgspec.Struct, frozen=True, tag=True):
    """Base of all facts; the tag is the class name."""


class Held(msgspec.Struct, frozen=True, array_like=True):
    """One slot as its header describes it. ``point`` is None where it holds no committed snapshot.

    ``current`` is false for a slot that was replaced by a larger one, ``busy`` is true while a
    thread of the node reads it. ``sequence`` is the number of the try that it was cut in.
    """

    rank: int
    index: int
    point: Point | None
    layout: str
    world: int
    current: bool = True
    busy: bool = False
    sequence: int = 0


class Begun(Fact, frozen=True):
    """An attempt begins. The same attempt begins again after the keeper of node 0 was replaced.
    ``alone``: no agent runs that would end the other ranks when one ends. ``recover`` and
    ``replay_until`` as in :class:`~everstep.keeper.wire.BeginAttempt`."""

    attempt: int
    ranks_of_node: tuple[tuple[int, ...], ...]
    resume: str
    expected: bool
    policy: Policy
    alone: bool = False
    recover: Point | None = None
    replay_until: int | None = None


class NodeJoined(Fact, frozen=True):
    """A node's keeper says what it holds; said again after a broken connection. ``went_on``: what
    this and earlier attempts went on from there."""

    node: int
    slots: tuple[Held, ...]
    went_on: tuple[WentOn, ...] = ()


class NodeLeft(Fact, frozen=True):
    node: int


class ElectionKnown(Fact, frozen=True):
    """A worker that comes again says what its attempt went on from."""

    went_on: WentOn


class Registered(Fact, frozen=True):
    """A worker was welcomed."""

    rank: int


class PolicySaid(Fact, frozen=True):
    """Rank 0 says what its script chose, each time that it is welcomed."""

    policy: Policy


class SlotsSeen(Fact, frozen=True):
    """All slots of one rank on one node: opened, adopted, or read again."""

    node: int
    rank: int
    slots: tuple[Held, ...]


class RankGone(Fact, frozen=True):
    """A worker's connection ended; its slots were read again, since it may have died in a cut."""

    node: int
    rank: int
    slots: tuple[Held, ...]
    finished: bool


class RankEnded(Fact, frozen=True):
    """A rank's process has ended, or it says that it cannot go on (``why``)."""

    rank: int
    why: str = ""


class WorkersOver(Fact, frozen=True):
    """No worker of the attempt runs any more on that node."""

    node: int


class CutMade(Fact, frozen=True):
    """``sequence`` is the number of the try: of the published cut or of the slot's grant."""

    rank: int
    step: int
    index: int
    layout: str
    seconds: float
    nbytes: int
    replicas: dict[str, str]
    persist: bool
    sequence: int = 0


class CutMissed(Fact, frozen=True):
    """``sequence`` 0 where the rank does not know which try it is."""

    rank: int
    step: int
    reason: str
    sequence: int = 0


class SlotAsked(Fact, frozen=True):
    rank: int
    step: int
    timeout: float


class DurableAsked(Fact, frozen=True):
    rank: int
    step: int
    timeout: float


class OfferAsked(Fact, frozen=True):
    rank: int
    world: int


class Voted(Fact, frozen=True):
    rank: int
    ok: bool
    reason: str


class RankArrived(Fact, frozen=True):
    rank: int
    step: int


class Boundary(msgspec.Struct, frozen=True, array_like=True):
    """The last step a rank has finished and how long it took."""

    rank: int
    step: int
    step_seconds: float


class Boundaries(Fact, frozen=True):
    """What the control page says. ``drained``: every message sent before it was read as well, so a
    rank beyond a cut that has not spoken has missed the cut."""

    ranks: tuple[Boundary, ...]
    drained: bool


class PreemptAsked(Fact, frozen=True):
    grace: float


class Left(Fact, frozen=True):
    """The job is over for its agent, or nobody is attached any more: make durable what is held."""


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """A committed checkpoint on the current lineage; ``world`` 0 where it was not read. ``sound``:
    as its health says, None where that is not known."""

    point: Point
    world: int
    sound: bool | None = None


class StoreRead(Fact, frozen=True):
    """What the store holds. ``branched`` says that the attempt has its branch already, and
    ``branch`` what it names; ``branches`` are those of all attempts, ``unreadable`` those of them
    that are damaged: what they name is not known. ``damaged`` tells of
    candidates that do not open, ``final`` that reading again cannot help."""

    attempt: int
    candidates: tuple[Candidate, ...] = ()
    expected: bool = False
    branched: bool = False
    branch: Point | None = None
    branch_source: str = ""
    branches: dict[int, Point | None] = {}
    unreadable: tuple[int, ...] = ()
    damaged: tuple[str, ...] = ()
    error: str = ""
    error_code: str = ""
    final: bool = False


class MemoryChecked(Fact, frozen=True):
    """A node has compared its slots of ``point`` with their digests; ``bad`` ranks differ."""

    node: int
    point: Point
    bad: tuple[int, ...]
    why: str = ""


class BranchWritten(Fact, frozen=True):
    attempt: int
    error: str = ""
    error_code: str = ""
    retryable: bool = False


class Digested(Fact, frozen=True):
    node: int
    rank: int
    index: int


class RankPersisted(Fact, frozen=True):
    node: int
    rank: int
    index: int
    point: Point
    nbytes: int = 0


class PersistFailed(Fact, frozen=True):
    """``superseded``: a higher claim was seen, nothing more may be written."""

    node: int
    rank: int
    index: int
    point: Point
    code: str
    what: str
    superseded: bool = False


class Committed(Fact, frozen=True):
    point: Point


class CommitFailed(Fact, frozen=True):
    point: Point
    code: str
    what: str
    superseded: bool = False


class Fenced(Fact, frozen=True):
    """Another runs the job now: nothing more may be written."""

    what: str


class Tick(Fact, frozen=True):
    """Time went on."""


AnyFact = (
    Begun | NodeJoined | NodeLeft | Registered | SlotsSeen | RankGone | WorkersOver | CutMade
    | CutMissed | SlotAsked | DurableAsked | OfferAsked | Voted | RankArrived | Boundaries
    | PreemptAsked | Left | StoreRead | MemoryChecked | BranchWritten | Digested | RankPersisted
    | PersistFailed | Committed | CommitFailed | Fenced | Tick | ElectionKnown | RankEnded
    | PolicySaid
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyFact] = msgspec.msgpack.Decoder(AnyFact)


def encode(fact: Fact) -> bytes:
    return _encoder.encode(fact)


def decode(body: bytes) -> AnyFact:
    """Raises :class:`KeeperError` where it is none."""
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as bad:
        raise KeeperError(f"a fact of another keeper cannot be read: {bad}.") from bad
