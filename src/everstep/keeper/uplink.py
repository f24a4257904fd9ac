"""The line of a node's keeper to the keeper of node 0.

Owns: dialling, dialling again after it broke, and saying who we are. Never does: decide. Called
by: server, on nodes above 0.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from everstep.core.clock import Clock
from everstep.errors import EverstepError
from everstep.keeper.background import Background
from everstep.keeper.connection import Connection
from everstep.keeper.wire import BeginAttempt, Hello, Message

DIAL_SECONDS = 5.0
REDIAL_SECONDS = 0.5


class Uplink:
    """``connected`` takes a new connection into the server's loop."""

    def __init__(
        self,
        begin: BeginAttempt,
        background: Background,
        *,
        clock: Clock,
        connected: Callable[[Connection], None],
    ) -> None:
        assert begin.coordinator is not None, "node 0 has no uplink"
        self._address = begin.coordinator
        self._hello = Hello(
            "keeper", os.getpid(), launch=begin.launch, node=begin.node, token=begin.token
        )
        self._background = background
        self._clock = clock
        self._connected = connected
        self._dialling = False
        self._closed = False
        self._due = 0.0
        self.connection: Connection | None = None
        self.welcomed = False

    def wait(self) -> float:
        """Seconds until the next try is due."""
        if self.connection is not None or self._dialling:
            return 3600.0
        return max(0.0, self._due - self._clock.mono())

    def dial(self) -> None:
        """Connect in the background where there is no connection and a try is due."""
        if self.connection is not None or self._dialling or self._closed or self.wait() > 0:
            return
        self._dialling = True
        self._background.submit("dial", self._dial, self._dialled, self._failed)

    def lost(self) -> None:
        """The connection broke: try again soon."""
        self.connection = None
        self.welcomed = False
        self._due = self._clock.mono() + REDIAL_SECONDS

    def say(self, message: Message) -> None:
        """Say something to node 0, where it knows us; else it asks for everything when it does."""
        if self.connection is not None and self.welcomed:
            self.connection.send(message)

    def close(self) -> None:
        self._closed = True
        if self.connection is not None:
            self.connection.closed = True
            self.connection = None

    def _dial(self) -> socket.socket:
        connection = socket.create_connection(self._address, timeout=DIAL_SECONDS)
        keep_alive(connection)
        return connection

    def _dialled(self, made: socket.socket) -> None:
        self._dialling = False
        if self._closed:
            made.close()
            return
        self.connection = Connection(made)
        self.connection.send(self._hello)
        self._connected(self.connection)

    def _failed(self, _: EverstepError) -> None:
        self._dialling = False
        self._due = self._clock.mono() + REDIAL_SECONDS


def keep_alive(connection: socket.socket) -> None:
    """A node that vanished without a word is noticed within about 15 s."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 5),
        (socket.TCP_KEEPINTVL, 3),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 15_000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
