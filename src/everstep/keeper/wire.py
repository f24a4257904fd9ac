"""What keeper, workers, agents and other keepers say to each other, and how it is framed.

Owns: the messages and the framing (length, msgpack, descriptors beside it). Never does: decide
anything. Called by: the keeper's server, its clients in train and agent.

One frame is four bytes of length (little endian) and a msgpack message; descriptors travel with
the frame's first byte (SCM_RIGHTS; Unix sockets only).
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from typing import Literal

import msgspec

from everstep.cadence.policy import Policy
from everstep.core.events import Event
from everstep.core.health import DETECTION_DELAY
from everstep.core.ids import Point
from everstep.errors import KeeperError

VERSION = 1
MAX_FRAME = 256 * 1024 * 1024
MAX_DESCRIPTORS = 250

Role = Literal["worker", "agent", "keeper"]


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages; the tag is the class name."""


class WentOn(msgspec.Struct, frozen=True, array_like=True):
    """What an attempt went on from: ``point`` of ``source``, None for a start from nothing.

    Kept beside the memory (control page, workers), because the store may not have the attempt's
    branch yet when its keeper dies."""

    attempt: int
    source: str
    point: Point | None
    world: int


# -- said by anyone who connects


class Hello(Message, frozen=True):
    """First frame of a connection. ``launch`` names one start of the workers: the keeper answers
    a worker only once :class:`BeginAttempt` of the same launch was said. ``attempt`` is the one
    that a worker belongs to already, 0 where it comes for the first time, and ``went_on`` what it
    went on from in it. ``token`` is asked of keepers that come by TCP. ``policy`` and
    ``keep_last`` are what rank 0's script chose where nothing else was said; they go before what
    :class:`BeginAttempt` says, because an agent does not know the script."""

    role: Role
    pid: int
    launch: str = ""
    rank: int = 0
    local_rank: int = 0
    node: int = 0
    token: str = ""
    attempt: int = 0
    went_on: WentOn | None = None
    policy: Policy | None = None
    keep_last: int | None = None
    version: int = VERSION


class Welcome(Message, frozen=True):
    """Answer to Hello. For a worker one descriptor follows: the control page. ``skip`` and
    ``replay_until`` are those of the attempt (:class:`BeginAttempt`)."""

    pid: int
    attempt: int
    world: int
    store: str
    job: str
    skip: tuple[int, ...] = ()
    replay_until: int | None = None


class Refused(Message, frozen=True):
    """An error in place of an answer. ``code`` is the EVS code."""

    code: str
    what: str
    hint: str = ""


# -- said by the agent (or by local rank 0 where there is none)


class BeginAttempt(Message, frozen=True):
    """The workers of one attempt are about to start. Answered by :class:`AttemptBegun`.

    ``attempt == 0`` asks the keeper to claim the number itself (no agent). ``ranks_of_node[k]``
    are the global ranks on node k. ``coordinator`` is (host, port) of node 0's keeper, empty on
    node 0. ``resume`` and ``expected`` (this agent lived through a snapshot) are for R5: where it
    is expected, ``resume == "never"`` does not begin anew a second time. ``again`` says that
    another launcher (torchrun) restarts the job: what the keeper knows of the start before decides
    whether a snapshot is expected. ``agent`` is the id with which the agent claims: its later
    claims are no stranger's. ``claimed`` is false where the store was away: the agent has promised
    the number, and the keeper claims it before it writes anything of the attempt (S6).

    A decision may ask for more. ``recover``: a rollback; the attempt goes on from exactly this
    checkpoint, or where it is damaged from the next older one that is not known to be unsound.
    What is newer, in memory too, is no candidate, and the attempt never begins anew. ``skip`` are
    steps whose batches are left out. ``replay_until`` is the step that had failed: that all ranks
    have passed it is told by the event ``replay.differed``. ``hold``: seconds from this message
    for which the first batch waits, unless :class:`Release` comes before. ``detection_delay``:
    seconds after which a sound checkpoint counts as healthy, for retention (S7).
    """

    launch: str
    attempt: int
    node: int
    ranks_of_node: tuple[tuple[int, ...], ...]
    resume: str = "auto"
    expected: bool = False
    again: bool = False
    coordinator: tuple[str, int] | None = None
    token: str = ""
    policy: Policy = Policy()
    keep_last: int = 3
    environment: dict[str, str] = {}
    agent: str = ""
    claimed: bool = True
    recover: Point | None = None
    skip: tuple[int, ...] = ()
    replay_until: int | None = None
    hold: float = 0.0
    detection_delay: float = DETECTION_DELAY


class AttemptBegun(Message, frozen=True):
    """``port`` is the TCP port on which node 0's keeper hears other keepers (0: not listening),
    ``token`` what they must say (made by the keeper where BeginAttempt brought none)."""

    attempt: int
    port: int = 0
    token: str = ""


class WorkersStarted(Message, frozen=True):
    """The keeper ends these processes when the agent dies."""

    pids: dict[int, int]


class WorkersEnded(Message, frozen=True):
    """No worker of the attempt runs any more; slots in writing are free again."""

    attempt: int


class SlotName(msgspec.Struct, frozen=True, array_like=True):
    """Whose slot a descriptor is. ``index`` 0 or 1; -1 is the node's control page."""

    rank: int
    index: int


class SlotsHeld(Message, frozen=True):
    """Keeper to agent, descriptors beside it: hold these, a new keeper will need them.

    Replaces what was held before for the same names. The memory of a name that is not said again
    is given back to the system whoever holds its descriptor."""

    names: tuple[SlotName, ...]


class AdoptSlots(Message, frozen=True):
    """Agent (or a worker, for its own) to a new keeper, descriptors beside it. No answer."""

    names: tuple[SlotName, ...]


class Release(Message, frozen=True):
    """The verdict is there: the workers of ``attempt`` need not wait any more (``hold``)."""

    attempt: int


class Preempt(Message, frozen=True):
    """SIGTERM was received: stop all ranks at one step, persist within ``grace`` seconds."""

    grace: float


class Leave(Message, frozen=True):
    """The agent's job is over: end when the work is durable, without waiting for a new agent."""


# -- said by workers


class OpenSlots(Message, frozen=True):
    """Ask for two slots of this geometry; answered by :class:`SlotsOpen` with two descriptors.

    Slots that exist with at least these capacities are given again, contents kept."""

    payload: int
    state: int
    layout: int
    digests: int


class SlotsOpen(Message, frozen=True):
    """The two descriptors beside it are slot 0 and slot 1."""


class AskSlot(Message, frozen=True):
    """A cut that the worker itself wants at ``step`` (checkpoint(), the last step, a stop).

    Answered by :class:`SlotGranted` as soon as a slot is free, or after ``timeout`` s."""

    step: int
    timeout: float


class SlotGranted(Message, frozen=True):
    """``index`` of the slot to write, -1 where none came free in time. ``sequence`` is the number
    of the try, which the worker says again when it has cut."""

    index: int
    sequence: int = 0


class CutDone(Message, frozen=True):
    """The slot ``index`` holds a committed snapshot of ``step``. No answer.

    ``replicas`` are digests of replicated tensors to compare between ranks (R8); ``persist`` asks
    for a checkpoint of it, whatever the cadence says.
    """

    step: int
    index: int
    layout: str
    sequence: int
    seconds: float
    nbytes: int
    replicas: dict[str, str] = {}
    persist: bool = False


class CutSkipped(Message, frozen=True):
    """The rank learnt too late of a cut, or its cut failed; ``sequence`` 0 where it had none yet.
    No answer."""

    step: int
    reason: str
    sequence: int = 0


class AwaitDurable(Message, frozen=True):
    """Answered by :class:`DurableResult` when the checkpoint of ``step`` is committed, is lost,
    or ``timeout`` s have passed."""

    step: int
    timeout: float


class DurableResult(Message, frozen=True):
    durable: bool
    reason: str = ""


class Arrived(Message, frozen=True):
    """The rank stands at the boundary of ``step`` and waits for the stop to become final."""

    step: int


class AskOffer(Message, frozen=True):
    """What is to be restored? Answered by :class:`Offer`. ``world`` is the worker's own."""

    world: int


class Offer(Message, frozen=True):
    """A candidate. ``source``: ``fresh`` (start from nothing), ``memory`` (descriptors of the
    node's slots of ``point`` beside it, named by ``slots``, digests checked, leased until the
    vote), ``store`` (load ``point`` from the store)."""

    source: Literal["fresh", "memory", "store"]
    point: Point | None = None
    slots: tuple[SlotName, ...] = ()


class Vote(Message, frozen=True):
    """Whether this rank holds the offered tensors. Answered by :class:`Elected`, or by the next
    :class:`Offer`, or by :class:`Refused` where no candidate is left. ``digest_ok`` false blames
    the candidate's bytes (and not this rank's objects)."""

    ok: bool
    reason: str = ""


class Elected(Message, frozen=True):
    """All ranks hold the candidate and the branch is written: ``load_state_dict`` may run."""

    point: Point | None
    source: str


class Fatal(Message, frozen=True):
    """Worker to keeper to agent: the job must end with ``exit_code``; a restart cannot help."""

    code: str
    what: str
    exit_code: int
    rank: int = 0


class Demoted(Message, frozen=True):
    """Answer to :class:`AskDemoted`: FQNs whose replicas were found to differ (R8)."""

    fqns: tuple[str, ...]


class AskDemoted(Message, frozen=True):
    """Asked when the control page's ``demoted`` counter moved."""


class Report(Message, frozen=True):
    """An event for the journal; the keeper passes it to its agent. No answer."""

    event: Event


class Goodbye(Message, frozen=True):
    """The worker ends by itself; ``finished`` says that it reached its last step."""

    finished: bool


# -- said between keepers (node k to node 0 and back)


class Relayed(Message, frozen=True):
    """A fact of node k (:mod:`everstep.keeper.facts`), told to node 0's coordinator."""

    fact: bytes


class Command(Message, frozen=True):
    """Node 0 to node k: a command of the coordinator (:mod:`everstep.keeper.commands`)."""

    command: bytes


AnyMessage = (
    Hello | Welcome | Refused | BeginAttempt | AttemptBegun | WorkersStarted | WorkersEnded
    | SlotsHeld | AdoptSlots | Preempt | Leave | OpenSlots | SlotsOpen | AskSlot | SlotGranted
    | CutDone | CutSkipped | AwaitDurable | DurableResult | Arrived | AskOffer | Offer | Vote
    | Elected | Fatal | Demoted | AskDemoted | Report | Goodbye | Relayed | Command | Release
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_LENGTH = struct.Struct("<I")
_DESCRIPTOR = struct.Struct("i")


def encode(message: Message) -> bytes:
    """One frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes | memoryview) -> AnyMessage:
    """The message of a frame's body. Raises :class:`KeeperError` where it is not one."""
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as bad:
        raise KeeperError(f"a keeper message cannot be read: {bad}.") from bad


LENGTH_BYTES = _LENGTH.size


def frame_length(buffer: bytearray, at: int, limit: int) -> int:
    """Bytes of the whole frame that begins at ``at``. Raises :class:`KeeperError` over ``limit``:
    the other side is no keeper's client."""
    body: int = _LENGTH.unpack_from(buffer, at)[0]
    if body > limit:
        raise KeeperError(f"a keeper message of {body} bytes is over the limit of {limit}.")
    return LENGTH_BYTES + body


def receive(connection: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """At most ``count`` bytes and the descriptors beside them, which no program that this process
    executes inherits: a slot's memory is freed with its last holder."""
    # socket.recv_fds takes flags and does not pass them on.
    room = socket.CMSG_LEN(MAX_DESCRIPTORS * _DESCRIPTOR.size)
    data, beside, _, _ = connection.recvmsg(count, room, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, raw in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(raw) - len(raw) % _DESCRIPTOR.size  # what did not fit is cut off
            fds += [fd for (fd,) in _DESCRIPTOR.iter_unpack(raw[:whole])]
    return data, fds


class Link:
    """A blocking connection with deadlines: the client's side.

    ``peer`` is the pid at the other end, 0 where it is not known. Not thread-safe: one thread
    talks. Descriptors received are owned by the caller.
    """

    def __init__(self, connection: socket.socket, peer: int = 0) -> None:
        self._socket = connection
        self._file = file_of(connection.fileno())
        self.peer = peer

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, fds: tuple[int, ...] = (), *, timeout: float = 10.0) -> None:
        """Send one frame; raises :class:`KeeperError` where the other side is gone."""
        frame = memoryview(encode(message))
        try:
            self._socket.settimeout(timeout)
            if fds:
                sent = socket.send_fds(self._socket, [frame], list(fds))
                frame = frame[sent:]
            self._socket.sendall(frame)
        except OSError as gone:
            raise KeeperError(f"the keeper's connection broke on send: {gone}.") from gone

    def receive(self, *, timeout: float) -> tuple[AnyMessage, list[int]]:
        """The next frame and its descriptors, or :class:`KeeperError` after ``timeout`` s."""
        fds: list[int] = []
        deadline = time.monotonic() + timeout
        try:
            head = self._exactly(_LENGTH.size, deadline, fds)
            (length,) = _LENGTH.unpack(head)
            if length > MAX_FRAME:
                raise KeeperError(f"a keeper message of {length} bytes is over the limit.")
            return decode(self._exactly(length, deadline, fds)), fds
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def ask(
        self, message: Message, fds: tuple[int, ...] = (), *, timeout: float = 30.0
    ) -> tuple[AnyMessage, list[int]]:
        """Send and wait for the answer; a :class:`Refused` comes back as it is."""
        self.send(message, fds)
        return self.receive(timeout=timeout)

    def readable(self, seconds: float) -> bool:
        """Whether something can be read, or the other side has closed, within that time."""
        waiting = select.poll()  # select() itself refuses descriptors above 1023
        waiting.register(self._socket, select.POLLIN)
        return bool(waiting.poll(seconds * 1000))

    def close(self) -> None:
        # A script may have closed all that it found open, and opened something else since.
        if file_of(self._socket.fileno()) == self._file:
            self._socket.close()
        else:
            self._socket.detach()

    def _exactly(self, count: int, deadline: float, fds: list[int]) -> bytes:
        got = bytearray()
        while len(got) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                raise KeeperError("the keeper did not answer in time.")
            try:
                self._socket.settimeout(left)
                part, new = receive(self._socket, min(count - len(got), 1 << 20))
            except TimeoutError as late:
                raise KeeperError("the keeper did not answer in time.") from late
            except OSError as gone:
                raise KeeperError(f"the keeper's connection broke: {gone}.") from gone
            fds.extend(new)
            if not part:
                raise KeeperError("the keeper closed the connection.")
            got += part
        return bytes(got)


def file_of(fd: int) -> tuple[int, int] | None:
    """Which file a descriptor stands for; None where it is closed."""
    try:
        about = os.fstat(fd)
    except OSError:
        return None
    return about.st_dev, about.st_ino
