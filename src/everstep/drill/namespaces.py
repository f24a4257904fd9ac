"""Private mounts and networks of a run, so that a full /dev/shm or a cut cable hurts nobody else.

Owns: what may be made on this machine, and taking it away. Never does: touch the machine's own
mounts, interfaces or routes: all of it lives in namespaces that end with their processes. Called
by: trial, matrix.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

from everstep.errors import DrillError

SHARED_MEMORY = "1m"
SMALL_SHARED_MEMORY = (
    "unshare", "--mount", "--propagation", "private", "sh", "-c",
    f'mount -t tmpfs -o size={SHARED_MEMORY} tmpfs /dev/shm && exec "$@"', "sh",
)  # fmt: skip
"""Before a command: it, and all that it starts, has a /dev/shm of its own that is soon full."""

_SUBNET = "10.231.77"
_SECONDS = 10.0


@dataclass(frozen=True)
class Networks:
    """Two networks with one cable between them. ``prefixes`` run a command in one."""

    prefixes: tuple[tuple[str, ...], tuple[str, ...]]
    addresses: tuple[str, str] = (f"{_SUBNET}.1", f"{_SUBNET}.2")
    interfaces: tuple[str, str] = ("cable0", "cable1")

    def cut(self) -> None:
        """Nothing gets through from now on."""
        _run(*self.prefixes[0], "ip", "link", "set", self.interfaces[0], "down")

    def join(self) -> None:
        """All gets through again."""
        _run(*self.prefixes[0], "ip", "link", "set", self.interfaces[0], "up")


@contextlib.contextmanager
def networks() -> Iterator[Networks]:
    """Two networks, gone at the end. Raises :class:`DrillError` where they cannot be made."""
    with contextlib.ExitStack() as undo:
        pids = [undo.enter_context(_holder()) for _ in range(2)]
        within = [("nsenter", f"--net=/proc/{pid}/ns/net") for pid in pids]
        made = Networks((within[0], within[1]))
        first, second = made.interfaces
        _run(*within[0], "ip", "link", "add", first, "type", "veth", "peer", "name", second)
        _run(*within[0], "ip", "link", "set", second, "netns", str(pids[1]))
        for node, prefix in enumerate(within):
            name = made.interfaces[node]
            _run(*prefix, "ip", "addr", "add", f"{made.addresses[node]}/24", "dev", name)
            _run(*prefix, "ip", "link", "set", name, "up")
            _run(*prefix, "ip", "link", "set", "lo", "up")
        yield made


def missing(needs: str) -> str:
    """Why what a scenario needs cannot be had on this machine; empty where it can."""
    try:
        if needs == "mounts":
            _run(*SMALL_SHARED_MEMORY, "true")
        elif needs == "networks":
            with networks():
                pass
    except DrillError as error:
        return error.what
    return ""


@contextlib.contextmanager
def _holder() -> Iterator[int]:
    """A process that keeps a network namespace of its own; its process id."""
    command = ["unshare", "--net", "sh", "-c", "echo ready; exec cat"]
    if shutil.which(command[0]) is None:
        raise DrillError("`unshare` is not installed.")
    holder = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None, "it was given a pipe"
        assert holder.stderr is not None, "it was given a pipe"
        if holder.stdout.readline() != b"ready\n":
            said = holder.stderr.read().decode(errors="replace").strip()
            raise DrillError(f"no network namespace can be made here: {said}.")
        yield holder.pid
    finally:
        holder.kill()
        holder.communicate()


def _run(*command: str) -> None:
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    except FileNotFoundError:
        raise DrillError(f"`{command[0]}` is not installed.") from None
    except subprocess.TimeoutExpired:
        waited = time.monotonic() - began
        raise DrillError(f"`{' '.join(command)}` did not end in {waited:.0f} s.") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise DrillError(f"`{' '.join(command)}` failed: {said}.")
