"""``python -m everstep.keeper``: the keeper's process.

Owns: arguments, session and log of the process. Called by: spawn.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

from everstep.core.clock import SystemClock
from everstep.core.settings import from_environment
from everstep.keeper.server import IDLE_SECONDS, NameTaken, Options, Server


def main(arguments: list[str] | None = None) -> int:
    """Serve until the work is done. 0 as well where another keeper has the name already."""
    given = _parser().parse_args(arguments)
    _own_session()
    if given.log:
        _log_to(given.log)
    options = Options(
        store=given.store,
        job=given.job,
        node=given.node,
        events=from_environment(os.environ).events,
        listen_fd=given.listen_fd,
        idle_seconds=given.idle_seconds,
    )
    try:
        server = Server(options, clock=SystemClock())
    except NameTaken:
        return 0
    return server.run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="everstep-keeper", description=__doc__)
    parser.add_argument("--store", required=True, help="URL or path of the checkpoint store")
    parser.add_argument("--job", required=True, help="name of the job")
    parser.add_argument("--node", type=int, default=0, help="which keeper of the job this is")
    parser.add_argument("--listen-fd", type=int, help="inherited listening TCP socket")
    parser.add_argument("--log", default="", help="file for stdout and stderr")
    parser.add_argument(
        "--idle-seconds", type=float, default=IDLE_SECONDS,
        help="end after so long without agent and worker",
    )  # fmt: skip
    return parser


def _own_session() -> None:
    with contextlib.suppress(PermissionError):  # spawn has made us a session's leader already
        os.setsid()


def _log_to(path: str) -> None:
    with open(path, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


if __name__ == "__main__":
    sys.exit(main())
