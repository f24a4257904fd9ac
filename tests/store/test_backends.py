"""Every backend against the public suite, and what is particular to the local one."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from everstep.errors import (
    BadName,
    BadStoreUrl,
    ObjectExists,
    ObjectMissing,
    StoreError,
    StoreFull,
    StoreNotWritable,
)
from everstep.store import open_store
from everstep.store.backends import Backend
from everstep.store.backends.local import LocalBackend, path_of
from everstep.store.backends.memory import MemoryBackend
from everstep.store.backends.posix import PosixOs
from everstep.testing.backends import BackendConformance
from everstep.testing.faulty import BackendFault, FaultyBackend
from everstep.testing.recording_os import SimulatedDisk


class TestLocal(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return LocalBackend(str(tmp_path / "store"), create=True)


class TestLocalOnSimulatedDisk(BackendConformance):
    @pytest.fixture
    def backend(self) -> Backend:
        return LocalBackend("/store", system=SimulatedDisk(), create=True)


class TestMemory(BackendConformance):
    @pytest.fixture
    def backend(self) -> Backend:
        return MemoryBackend()


class TestFaultyWithoutFaults(BackendConformance):
    @pytest.fixture
    def backend(self) -> Backend:
        return FaultyBackend(MemoryBackend())


class _Failing(PosixOs):
    """The real calls, one of which fails."""

    def __init__(self, call: str, number: int, after: int = 0) -> None:
        self.left, self.number, self.calls = after, number, 0
        setattr(self, call, self._fail(getattr(super(), call)))

    def _fail(self, real):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            self.calls += 1
            self.left -= 1
            if self.left == -1:
                raise OSError(self.number, os.strerror(self.number))
            return real(*args, **kwargs)

        return call


@pytest.mark.parametrize(
    ("call", "number", "error"),
    [
        ("pwrite", errno.ENOSPC, StoreFull),
        ("open_new", errno.EDQUOT, StoreFull),
        ("open_new", errno.EACCES, StoreNotWritable),
        ("mkdir", errno.EROFS, StoreNotWritable),
        ("mkdir", errno.ENOTDIR, StoreNotWritable),
        ("fsync", errno.EIO, StoreError),
        ("fsync_folder", errno.EIO, StoreError),
    ],
)
def test_failures_are_named_and_the_next_write_works(
    tmp_path: Path, call: str, number: int, error: type[StoreError]
) -> None:
    LocalBackend(str(tmp_path), create=True)
    backend = LocalBackend(str(tmp_path), system=_Failing(call, number))
    with pytest.raises(error, match="jobs/a/manifest") as caught:
        backend.create("jobs/a/manifest", b"x")
    assert type(caught.value) is error
    assert caught.value.hint
    if call != "fsync_folder":
        assert list(tmp_path.rglob(".tmp-*")) == []
        backend.create("jobs/a/manifest", b"y")
        assert backend.get("jobs/a/manifest") == b"y"


def test_s9_a_failed_fsync_is_never_repeated_on_the_same_file(tmp_path: Path) -> None:
    system = _Failing("fsync", errno.EIO)
    backend = LocalBackend(str(tmp_path), system=system, create=True)
    with pytest.raises(StoreError):
        backend.create("a", b"x")
    assert system.calls == 1
    assert list(tmp_path.iterdir()) == []


def test_s9_one_who_finds_an_object_syncs_its_folders() -> None:
    """Whoever linked it may have died before its own fsync of the folder."""
    disk = SimulatedDisk()
    backend = LocalBackend("/store", system=disk, create=True)

    def die_at_folder(call: str, _: str) -> None:
        if call == "fsync_folder":
            raise KeyboardInterrupt

    disk.hook = die_at_folder
    with pytest.raises(KeyboardInterrupt):
        backend.create("jobs/a", b"x")
    disk.hook = None
    assert "/store/jobs/a" not in disk.crash([]).tree()
    with pytest.raises(ObjectExists):
        backend.create("jobs/a", b"x")
    assert disk.crash([]).tree()["/store/jobs/a"] == b"x"


def test_large_aligned_parts_go_past_the_page_cache_where_the_file_system_allows(
    tmp_path: Path,
) -> None:
    backend = LocalBackend(str(tmp_path), create=True)
    body = mmap.mmap(-1, 3 << 20)
    body[:] = os.urandom(len(body))
    backend.create("a", iter([memoryview(body), b"tail"]))
    report = backend.report()
    assert backend.get("a") == bytes(body) + b"tail"
    if not report["direct_refused"]:
        assert report["direct_bytes"] == 3 << 20
    assert int(report["direct_bytes"]) + int(report["buffered_bytes"]) == (3 << 20) + 4


def test_refused_direct_writes_are_reported_and_buffered() -> None:
    backend = LocalBackend("/store", system=SimulatedDisk(), create=True)
    backend.create("a", bytes(2 << 20))
    assert "page cache" in str(backend.report()["direct_refused"])
    assert backend.report()["buffered_bytes"] == 2 << 20


def test_orphan_temporaries_older_than_the_grace_are_swept(tmp_path: Path) -> None:
    backend = LocalBackend(str(tmp_path), create=True)
    (tmp_path / "jobs").mkdir()
    for name, age in (("old", 1000), ("young", 10)):
        path = tmp_path / "jobs" / f".tmp-1-{name}"
        path.write_bytes(b"x")
        os.utime(path, (5000 - age, 5000 - age))
    assert backend.sweep_temporaries(5000 - 600) == 1
    assert [p.name for p in (tmp_path / "jobs").iterdir()] == [".tmp-1-young"]
    assert list(backend.list("")) == []


@pytest.mark.parametrize("key", ["../x", "a/../x", "a//b", "/etc/passwd", ".hidden", "", "a/\0"])
def test_keys_cannot_leave_the_store(tmp_path: Path, key: str) -> None:
    backend = LocalBackend(str(tmp_path), create=True)
    for call in (backend.get, backend.stat, backend.delete, lambda k: backend.create(k, b"")):
        with pytest.raises(BadName):
            call(key)


def test_a_store_that_vanished_is_not_made_again(tmp_path: Path) -> None:
    root = tmp_path / "store"
    backend = LocalBackend(str(root), create=True)
    root.rmdir()
    with pytest.raises(StoreError, match="a/b"):
        backend.create("a/b", b"x")
    assert not root.exists()


def test_urls(tmp_path: Path) -> None:
    assert path_of("file:///a%20b/c") == "/a b/c"
    for url in ("file://host/a", "s3x://bucket", "memory://", ""):
        with pytest.raises(BadStoreUrl):
            open_store(url, create=True)
    with pytest.raises(ObjectMissing, match=r"everstep\.json"):
        open_store(str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_a_faulty_store_is_named_by_its_url(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('[{"action": "full", "call": "create", "key": "claim"}]')
    store = open_store(f"faulty+file://{tmp_path}/store?plan={plan}", create=True)
    with pytest.raises(StoreFull):
        store.backend.create("jobs/a/attempts/000001/claim", b"x")
    store.backend.create("jobs/a/attempts/000001/claim", b"x")
    with pytest.raises(BadStoreUrl, match="plan"):
        open_store(f"faulty+file://{tmp_path}/store")


def test_faults_count_and_cross_processes(tmp_path: Path) -> None:
    once, during = tmp_path / "once", tmp_path / "during"
    faults = [
        BackendFault("fail", call="get", after=1, once=str(once)),
        BackendFault("full", call="write", times=0, during=str(during)),
        BackendFault("tear", call="create", key="torn"),
        BackendFault("lost", call="create", key="lost"),
    ]
    backend = FaultyBackend(MemoryBackend(), faults)
    backend.create("a", b"1234")
    assert backend.get("a") == b"1234"
    with pytest.raises(StoreError):
        backend.get("a")
    assert once.exists()
    during.touch()
    for _ in range(3):
        with pytest.raises(StoreFull):
            backend.put("b", b"")
    during.unlink()
    backend.put("b", b"")
    for key, left in (("torn", b"12"), ("lost", b"1234")):
        with pytest.raises(StoreError):
            backend.create(key, b"1234")
        assert backend.get(key) == left
