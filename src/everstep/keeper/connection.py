"""One connection on the keeper's side: framing that never waits.

Owns: bytes in, bytes out, descriptors beside them, and the bounds of both. Never does: know what
a message means. Called by: server.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque

from everstep.errors import KeeperError
from everstep.keeper import wire
from everstep.keeper.identity import process_of
from everstep.keeper.wire import AnyMessage, Hello, Message

MAX_INCOMING = 64 * 1024 * 1024
"""Bytes of one frame; the largest are digests of replicated tensors, 100 bytes a tensor."""

MAX_OUTGOING = 64 * 1024 * 1024
"""Bytes not yet taken by the other side before it is given up as stuck."""

_READ = 1 << 18


class Connection:
    """``hello`` is set by the server when it was said; ``peer`` is the other side's pid and
    ``process`` exactly which process that is, as the kernel says.

    Setting ``closed`` gives the connection up; the server's loop closes it at the end of the turn.
    """

    def __init__(self, connection: socket.socket, *, peer: int = 0) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._incoming = bytearray()
        self._fds: deque[int] = deque()
        self._outgoing: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._outgoing_bytes = 0
        self.hello: Hello | None = None
        self.peer = peer
        self.process = process_of(peer)
        self.closed = False
        self._unheard = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        return bool(self._outgoing)

    def read(self) -> list[AnyMessage]:
        """All whole messages that have come. Sets :attr:`closed` at the end of the stream.

        Raises :class:`KeeperError` where the other side does not speak this protocol.
        """
        messages = []
        while self._receive():
            messages += self._take_frames()
        return messages

    def take_fds(self, count: int) -> list[int]:
        """Descriptors that came with the message at hand; the caller owns them."""
        if len(self._fds) < count:
            raise KeeperError(f"{count} descriptors were announced, {len(self._fds)} came.")
        return [self._fds.popleft() for _ in range(count)]

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Queue a message; ``fds`` are duplicated, so the caller may close its own at once.

        A side that does not read is closed when too much waits for it (bounded, never blocking).
        """
        if self.closed or self._unheard:
            return
        frame = memoryview(wire.encode(message))
        self._outgoing.append((frame, tuple(os.dup(fd) for fd in fds)))
        self._outgoing_bytes += len(frame)
        if self._outgoing_bytes > MAX_OUTGOING:
            self.closed = True
        else:
            self.flush()

    def flush(self) -> None:
        """Write what the other side takes now."""
        while self._outgoing and not self.closed:
            frame, fds = self._outgoing.popleft()
            try:
                sent = self._write(frame, fds)
            except BlockingIOError:
                self._outgoing.appendleft((frame, fds))
                return
            except OSError:
                # The other side has closed. What it said before may still wait to be read: an
                # agent's or a worker's farewell. The end of the stream comes after it.
                _close_all(fds)
                self._silence()
                return
            self._outgoing_bytes -= sent
            _close_all(fds)  # they went with the first byte
            if sent < len(frame):
                self._outgoing.appendleft((frame[sent:], ()))

    def close(self) -> None:
        self.closed = True
        _close_all(self._fds)
        self._fds.clear()
        self._silence()
        self._socket.close()

    def _silence(self) -> None:
        """Nothing more is sent: nobody would hear it."""
        self._unheard = True
        for _, fds in self._outgoing:
            _close_all(fds)
        self._outgoing.clear()

    def _receive(self) -> bool:
        try:
            data, fds = wire.receive(self._socket, _READ)
        except BlockingIOError:
            return False
        except OSError:
            self.closed = True
            return False
        self._fds.extend(fds)
        if not data:
            self.closed = True
            return False
        self._incoming += data
        return True

    def _take_frames(self) -> list[AnyMessage]:
        messages = []
        at = 0
        while len(self._incoming) - at >= wire.LENGTH_BYTES:
            end = at + wire.frame_length(self._incoming, at, MAX_INCOMING)
            if end > len(self._incoming):
                break
            messages.append(wire.decode(bytes(self._incoming[at + wire.LENGTH_BYTES : end])))
            at = end
        del self._incoming[:at]
        return messages

    def _write(self, frame: memoryview, fds: tuple[int, ...]) -> int:
        if fds:
            return socket.send_fds(self._socket, [frame], list(fds))
        return self._socket.send(frame)


def _close_all(fds: tuple[int, ...] | deque[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
