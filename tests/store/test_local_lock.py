"""A ref's lock that another process keeps: nobody waits for it for ever."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from everstep.errors import StoreError
from everstep.store.backends import posix
from everstep.store.backends.local import LocalBackend


def test_lock_of_a_stopped_process_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posix, "LOCK_SECONDS", 0.05)
    backend = LocalBackend(str(tmp_path))
    backend.put("refs/owner", b"one")
    held = os.open(next(tmp_path.glob("refs/.lock-*")), os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(
        StoreError, match=rf"lock has been held .* by process {os.getpid()}"
    ) as told:
        backend.put("refs/owner", b"two")
    assert told.value.retryable
    os.close(held)
    backend.put("refs/owner", b"three")
    assert backend.get("refs/owner") == b"three"
