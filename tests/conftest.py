"""What tests that run whole jobs share: a folder of their own, and no process left behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "train"))  # train_jobs: jobs of warm processes
sys.path.append(str(Path(__file__).parent / "faults"))  # told: histories in short words

_INHERITED = ("EVERSTEP_", "PET_", "TORCHELASTIC_", "MASTER_")
_RANKS = frozenset(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"))


@pytest.fixture
def job_environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a job whose store, logs and events lie in ``tmp_path``; run it there.

    Afterwards every keeper that was started in ``tmp_path`` is ended.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_INHERITED) and name not in _RANKS
    }
    yield {
        **kept,
        "EVERSTEP_EVENTS": str(tmp_path / "events.jsonl"),
        "EVERSTEP_STATE_DIR": str(tmp_path / "state"),
        "EVERSTEP_VERDICT_DEADLINE": "0.3",  # nothing comes late here
        "OMP_NUM_THREADS": "1",
    }
    _end_keepers_in(tmp_path)


@pytest.fixture
def end_keepers(tmp_path: Path) -> Callable[[], list[int]]:
    """SIGKILLs the keepers started in ``tmp_path``, waits until they are gone, gives their pids."""
    return lambda: _end_keepers_in(tmp_path)


def _end_keepers_in(folder: Path) -> list[int]:
    pids = [pid for pid in _pids() if _is_keeper_in(pid, folder)]
    for pid in pids:
        _kill_and_wait(pid)
    return pids


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _is_keeper_in(pid: int, folder: Path) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        here = os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return False  # it has ended, or is not ours
    return b"everstep.keeper" in command and (
        str(folder).encode() in command or here.startswith(str(folder))
    )


def _kill_and_wait(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            # Readable when the process has ended, whoever its parent is.
            ready, _, _ = select.select([fd], [], [], 30)
            assert ready, f"keeper {pid} outlived SIGKILL by 30 s"
        finally:
            os.close(fd)
