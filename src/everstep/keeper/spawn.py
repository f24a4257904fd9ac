"""Starting a keeper that outlives the process which starts it.

Owns: the command line, the environment, the session and the log file of a new keeper. Never
does: wait for it or talk to it. Called by: agent, and train's local rank 0 where no agent runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import xxhash

from everstep.core.settings import Settings, to_environment
from everstep.keeper.address import store_of


def start_keeper(
    settings: Settings,
    node: int,
    *,
    listen_fd: int | None = None,
    unlogged: Callable[[str], object] = str,
) -> subprocess.Popen[bytes]:
    """Start the keeper of ``node`` in a session of its own and return at once.

    A second keeper of the same name ends by itself with 0, so starting one too many is harmless.
    ``listen_fd`` is a listening TCP socket that the keeper inherits (node 0 of several nodes).
    ``unlogged`` is told where its log cannot be written: it runs without one, for a folder that is
    full or read-only is no reason not to train. Raises OSError where it cannot be started.
    """
    command = [
        sys.executable, "-m", "everstep.keeper",
        "--store", settings.store, "--job", settings.job, "--node", str(node),
    ]  # fmt: skip
    if listen_fd is not None:
        command += ["--listen-fd", str(listen_fd)]
    with _openable(log_path(settings, node), unlogged).open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(settings, os.environ),
            pass_fds=() if listen_fd is None else (listen_fd,),
            start_new_session=True,
        )


def log_path(settings: Settings, node: int) -> Path:
    """The keeper's log; its folder is made where that can be done."""
    place = xxhash.xxh3_64_hexdigest(store_of(settings.store).encode())[:8]
    folder = state_dir(settings, os.environ) / f"{settings.job}-{place}"
    with suppress(OSError):  # told by whoever writes into it
        folder.mkdir(parents=True, exist_ok=True)
    return folder / f"keeper-{node}.log"


def _openable(path: Path, unlogged: Callable[[str], object]) -> Path:
    """``path``, or where it cannot be written the file that takes everything."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # says why, where there is no folder
        path.open("ab").close()
    except OSError as error:
        unlogged(
            f"the keeper runs without a log: {error}. What it would say of an error of its own is "
            "lost; --state-dir names another folder."
        )
        return Path(os.devnull)
    return path


def state_dir(settings: Settings, environment: Mapping[str, str]) -> Path:
    """The folder for logs and for what can be made anew; it may not be there yet."""
    if settings.state_dir:
        return Path(settings.state_dir)
    state = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "everstep"


def _environment(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    # A worker's rank would make EVERSTEP_FAULTS of that rank fire in the keeper as well.
    kept = {name: value for name, value in environment.items() if name != "RANK"}
    return {**kept, **to_environment(settings)}
