"""Mounts that a job depends on: still there, still writable, still answering.

Owns: reading mountinfo, and the threads that ask a mount whether it answers. Never does: mount
anything. Called by: the watch.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from everstep.agent.watch.source import Source, Standing
from everstep.core.clock import Clock
from everstep.faults.records import Signal

EVERY = 5.0
DEADLINE = 10.0
"""Seconds for an answer to statvfs(2): a busy file server takes one or two."""
MOUNTS = Path("/proc/self/mountinfo")
PROMPT = 0.05
"""Seconds that a look itself waits for an answer: healthy mounts give theirs at once."""

_STALE = {
    errno.ESTALE: "Stale file handle",
    errno.ENOTCONN: "Transport endpoint is not connected",
    errno.EIO: "Input/output error",
    errno.ESHUTDOWN: "Cannot send after transport endpoint shutdown",
}
_OCTAL = re.compile(r"\\([0-7]{3})")

Probe = Callable[[Path], object]


@dataclass(frozen=True)
class Mount:
    """One mount: where, of what kind, from what; ``writable`` as both the mount and its file system
    say (an error remounts the latter)."""

    point: Path
    fstype: str
    device: str
    writable: bool


class Mounts(Source):
    """The mounts under ``paths`` (what each is to the job, and where it is)."""

    name, every = "mounts", EVERY

    def __init__(
        self,
        paths: Iterable[tuple[str, Path]],
        clock: Clock,
        mountinfo: Path = MOUNTS,
        probe: Probe = os.statvfs,
    ) -> None:
        self._named = list(paths)
        self._paths: list[tuple[str, Path]] = []
        self._clock = clock
        self._mountinfo = mountinfo
        self._probe = probe
        self._probes: dict[Path, _Probe] = {}
        self._first: dict[Path, Mount] = {}
        self._wrong = Standing()

    def look(self) -> Iterable[Signal]:
        if not self._paths:  # here, in the source's own thread: links may lead to a dead server
            self._paths = [(what, Path(os.path.realpath(path))) for what, path in self._named]
        mounts = parse(self._mountinfo.read_text(errors="surrogateescape"))
        now: dict[str, str] = {}
        for what, path in self._paths:
            mount = mount_of(path, mounts)
            if mount is None:
                continue
            first = self._first.setdefault(path, mount)
            if text := changed(what, path, first, mount) or self._silent(what, mount):
                now[what] = text
        told = [f"mount watch: {what} is well again" for what in self._wrong.over(now)]
        return [Signal("agent", text) for text in (*self._wrong.changed(now), *told)]

    def standing(self) -> Iterable[Signal]:
        return [Signal("agent", text) for text in self._wrong.texts]

    def _silent(self, what: str, mount: Mount) -> str:
        """The mount itself is asked for its room, which no cache of this machine answers."""
        asked = self._probes.setdefault(mount.point, _Probe(mount.point, self._probe))
        waited, error = asked.ask(self._clock.mono())
        where = f"mount watch: mount {mount.point} ({mount.fstype} {mount.device}) of {what}"
        if waited >= DEADLINE:
            return f"{where} is stale: no answer for {waited:.0f} s"
        return f"{where} is stale: {_STALE[error]}" if error in _STALE else ""


class _Probe:
    """Asks one mount in a thread: where its server is gone, the thread never comes back, and there
    is only this one."""

    def __init__(self, path: Path, probe: Probe) -> None:
        self._path = path
        self._probe = probe
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._error = 0

    def ask(self, now: float) -> tuple[float, int]:
        """For how many seconds the answer is missing, and the last error's number (0: none)."""
        if self._thread is None:
            self._began = now
            self._thread = threading.Thread(
                target=self._run, name="everstep-watch-mount", daemon=True
            )
            self._thread.start()
            self._thread.join(PROMPT)
        if self._thread.is_alive():
            return max(0.0, now - self._began), self._error
        self._thread = None
        return 0.0, self._error

    def _run(self) -> None:
        try:
            self._probe(self._path)
            self._error = 0
        except OSError as error:
            self._error = error.errno or 0


def parse(mountinfo: str) -> list[Mount]:
    """The mounts in their order; of several on one point the last is the one that is seen."""
    found = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) < 6 or len(rest) < 2:
            continue
        options = {*fields[5].split(","), *(rest[2].split(",") if len(rest) > 2 else ())}
        found.append(Mount(Path(_plain(fields[4])), rest[0], _plain(rest[1]), "ro" not in options))
    return found


def mount_of(path: Path, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that ``path`` lies on."""
    best = None
    for mount in mounts:
        deeper = best is None or len(mount.point.parts) >= len(best.point.parts)
        if deeper and (path == mount.point or mount.point in path.parents):
            best = mount
    return best


def changed(what: str, path: Path, first: Mount, now: Mount) -> str:
    """What became of the mount that ``path`` lay on at first; empty: nothing. An automounter takes
    away what nobody uses, and brings it back."""
    if now.fstype == "autofs":
        return ""
    if len(now.point.parts) < len(first.point.parts):
        return (
            f"mount watch: {first.point} ({first.fstype} {first.device}) is not a mount point any "
            f"more: {what} at {path} lies on {now.point}"
        )
    if first.writable and not now.writable:
        return (
            f"mount watch: {now.point} ({now.fstype} {now.device}) of {what} was remounted "
            f"read-only"
        )
    return ""


def _plain(field: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), field)
