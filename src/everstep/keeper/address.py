"""Where the keeper of a job on a node is found.

Owns: the abstract Unix socket's name (user, store, job, node; ARCHITECTURE, the keeper) and
connecting to it with the peer's user checked. Called by: keeper, train, agent.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import time

import xxhash

from everstep.core.location import canonical_store
from everstep.core.settings import Settings
from everstep.errors import KeeperError
from everstep.keeper.wire import Link

_CREDENTIALS = struct.Struct("3i")


def keeper_name(store_url: str, job: str, node: int, uid: int | None = None) -> str:
    """The socket's name without the leading NUL byte; at most 107 bytes (sun_path's limit)."""
    user = os.getuid() if uid is None else uid
    place = xxhash.xxh3_128_hexdigest(f"{store_of(store_url)}\0{job}".encode())
    return f"everstep/{user}/{place}/{node}"


def store_of(url: str) -> str:
    """The one name of the store at ``url``, by whichever link or scheme it is reached."""
    return canonical_store(url, lambda path: os.path.realpath(os.path.expanduser(path)))


def keeper_of(settings: Settings) -> str:
    """The name under which a process with these settings finds its keeper: ``settings.keeper``
    where an agent gave it, else made from store, job and node."""
    return settings.keeper or keeper_name(settings.store, settings.job, settings.node)


def connect(
    name: str,
    *,
    timeout: float,
    started: subprocess.Popen[bytes] | None = None,
    log: str = "",
) -> Link:
    """A link to the keeper of that name, tried until ``timeout`` s have passed. ``started`` is
    the process that is to become that keeper, ``log`` where it writes.

    Raises :class:`KeeperError` where none answers, where ``started`` ends at its start, or where
    another user's process answers.
    """
    where = f"Its log is {log}." if log else "Its log is named at the start of the run."
    deadline = time.monotonic() + timeout
    while True:
        link = try_connect(name)
        if link is not None:
            return link
        if time.monotonic() >= deadline:
            raise KeeperError(f"no keeper answers at @{name} after {timeout:g} s.", hint=where)
        code = started.poll() if started is not None else None
        if code:  # one that finds the name taken ends with 0
            raise KeeperError(f"the keeper ended with exit code {code} at its start.", hint=where)
        time.sleep(0.01)  # an abstract socket gives nothing to wait on before it exists


def try_connect(name: str) -> Link | None:
    """A link to the keeper of that name, or None where none answers now. Never waits.

    Raises :class:`KeeperError` where another user's process answers.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)  # a full backlog of a stuck keeper must not hold us
    try:
        connection.connect("\0" + name)
    except OSError:
        connection.close()
        return None
    pid, uid = peer_of(connection)
    if uid != os.getuid():
        connection.close()
        raise KeeperError(f"the socket @{name} belongs to user {uid}, not to this one.")
    return Link(connection, pid)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end of a Unix socket."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid
