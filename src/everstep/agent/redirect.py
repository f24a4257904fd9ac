"""Workers' standard streams led to where the agent says, in torch's ways of starting them.

Owns: what torch is told in place of the user's log specification, and the redirection inside of a
worker that is a function. Never does: read a stream. Called by: workers.

A program gets its streams opened by torch in the agent, which takes a pipe. A function has torch
redirect itself, for which torch opens its file for reading and writing, and a pipe cannot be
opened so: such a worker redirects itself here first.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.synchronize
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TextIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

UNBUFFERED = "PYTHONUNBUFFERED"


class Routed(LogsSpecs):
    """A log specification that was asked already; ``root`` is the folder of the one asked."""

    def __init__(self, dest: LogsDest, root: str) -> None:
        super().__init__()
        self._dest = dest
        self._root = root

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        del envs  # the one asked has written into them
        return self._dest

    @property
    def root_log_dir(self) -> str:
        return self._root


class Redirected:
    """A worker's function that first points its standard streams to two paths (empty: not),
    which come before its other arguments. ``inherited``: what a fork of the agent must close.
    ``returned`` counts the workers whose function came back."""

    def __init__(
        self,
        function: Callable[..., object],
        inherited: tuple[int, ...],
        returned: multiprocessing.synchronize.Semaphore,
    ) -> None:
        functools.update_wrapper(self, function)  # torch names it by its __qualname__
        self._function = function
        self._inherited = inherited
        self._returned = returned

    def __call__(self, stdout: str, stderr: str, *arguments: object) -> object:
        _point(1, stdout, sys.stdout)
        _point(2, stderr, sys.stderr)
        for fd in self._inherited:
            os.close(fd)
        result = self._function(*arguments)
        self._returned.release()
        return result


def without_pipes(dest: LogsDest, piped: dict[int, tuple[str, str]]) -> LogsDest:
    """For functions: torch redirects to what the user asked for alone."""
    return replace(
        dest,
        stdouts={rank: "" if piped[rank][0] else path for rank, path in dest.stdouts.items()},
        stderrs={rank: "" if piped[rank][1] else path for rank, path in dest.stderrs.items()},
    )


def for_people(environment: dict[str, str]) -> dict[str, str]:
    """What keeps a Python program from holding lines back because it writes to a pipe, where a
    person watches the agent's own stream and has not said it otherwise."""
    if environment.get(UNBUFFERED) is not None or not (_is_terminal(1) or _is_terminal(2)):
        return {}
    return {UNBUFFERED: "1"}


def _point(fd: int, path: str, stream: TextIO | None) -> None:
    if not path:
        return
    if stream is not None:
        stream.flush()
    # Where the agent's pipes cannot be opened from here, the stream it has inherited serves.
    with contextlib.suppress(OSError):
        opened = os.open(path, os.O_WRONLY)
        os.dup2(opened, fd)
        os.close(opened)


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False
