"""A worker ends with its agent, from ``import everstep`` on: no orphan keeps the accelerator.

Owns: the watch over the agent that started this process. Never does: anything where no agent
started it, or in everstep's own programs. Called by: :mod:`everstep` when it is imported, and
train, for workers forked from an agent that had imported everstep already.

The keeper ends a dead agent's workers too, but it may be dead itself, or not know them yet.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Mapping, Sequence

VARIABLE = "EVERSTEP_AGENT_PID"
THREAD = "everstep-agent"
_OWN_PROGRAMS = ("everstep.cli", "everstep.keeper")

_guarded = 0
"""The pid of the process in which the watch runs; a forked child has another, and no thread."""


def begin(environment: Mapping[str, str]) -> None:
    """End this process with SIGKILL when the agent named in ``environment`` ends, or now where
    it has ended already. Once in a process, however often it is called."""
    global _guarded
    agent = environment.get(VARIABLE, "")
    if not agent.isdecimal() or int(agent) == 0 or _guarded == os.getpid():
        return
    if is_own_program(sys.orig_argv, sys.argv[:1]):
        return
    _guarded = os.getpid()
    _end_with(int(agent))


def is_own_program(line: Sequence[str], script: Sequence[str]) -> bool:
    """Whether this command line is that of the command ``everstep`` or of a keeper, which a worker
    may have started: they inherit its variables, but end by rules of their own."""
    if any(os.path.basename(name) == "everstep" for name in script):
        return True
    return any(line[at] == "-m" and line[at + 1] in _OWN_PROGRAMS for at in range(len(line) - 1))


def _end_with(agent: int) -> None:
    # A thread on a pidfd: PR_SET_PDEATHSIG follows the agent's thread, not its process.
    try:
        fd = os.pidfd_open(agent)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    threading.Thread(target=_wait_and_end, args=(fd,), name=THREAD, daemon=True).start()


def _wait_and_end(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)
