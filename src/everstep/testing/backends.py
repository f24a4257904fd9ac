"""What every backend must do: a pytest class to inherit from.

Owns: the suite. A backend's own tests say::

    class TestMine(BackendConformance):
        @pytest.fixture
        def backend(self): return MyBackend(...)

Called by: the tests of each backend, one's own included. Needs pytest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from everstep.errors import (
    CorruptObject,
    ObjectExists,
    ObjectMissing,
    StaleVersion,
    StoreError,
)
from everstep.store.backends import Backend, Buffer

KEY = "jobs/a/steps/x/manifest"


class BackendConformance:
    """Inherit, and give the ``backend`` fixture: an empty backend for each test."""

    @pytest.fixture
    def backend(self) -> Backend:
        raise NotImplementedError("give the backend that is to be tested")

    def test_created_bytes_are_read_back(self, backend: Backend) -> None:
        backend.create(KEY, b"abcdef")
        assert backend.get(KEY) == b"abcdef"
        assert backend.get(KEY, 2) == b"cdef"
        assert backend.get(KEY, 2, 3) == b"cde"
        assert backend.get(KEY, 6, 0) == b""

    def test_parts_of_any_buffer_type_are_joined_in_order(self, backend: Backend) -> None:
        parts: list[Buffer] = [b"ab", bytearray(b""), memoryview(b"cd"), b"e"]
        backend.create(KEY, iter(parts))
        assert backend.get(KEY) == b"abcde"

    def test_an_empty_object_exists(self, backend: Backend) -> None:
        backend.create(KEY, b"")
        assert backend.get(KEY) == b""
        assert backend.stat(KEY).size == 0

    def test_large_and_unaligned_parts_are_exact(self, backend: Backend) -> None:
        body = memoryview(bytes(range(256)) * (9 << 12))[1:]
        parts: list[Buffer] = [body, b"tail", body[: 1 << 20]]
        backend.create(KEY, iter(parts))
        assert backend.get(KEY) == bytes(body) + b"tail" + bytes(body[: 1 << 20])

    def test_s2_create_never_replaces(self, backend: Backend) -> None:
        backend.create(KEY, b"first")
        with pytest.raises(ObjectExists, match="manifest"):
            backend.create(KEY, b"second")
        assert backend.get(KEY) == b"first"

    def test_s2_of_many_creators_one_wins_and_its_bytes_stay(self, backend: Backend) -> None:
        won: list[int] = []

        def create(n: int) -> None:
            try:
                backend.create(KEY, b"%d" % n)
            except ObjectExists:
                return
            won.append(n)

        _all_at_once(create, 8)
        assert len(won) == 1
        assert backend.get(KEY) == b"%d" % won[0]

    def test_missing_objects_are_missing(self, backend: Backend) -> None:
        for read in (
            lambda: backend.get(KEY),
            lambda: backend.stat(KEY),
            lambda: backend.get_versioned(KEY),
            lambda: backend.read_into(KEY, memoryview(bytearray(1)), 0),
        ):
            with pytest.raises(ObjectMissing, match="manifest"):
                read()

    def test_a_folder_is_no_object(self, backend: Backend) -> None:
        backend.create(KEY, b"x")
        with pytest.raises(ObjectMissing):
            backend.get("jobs/a/steps")
        with pytest.raises(ObjectMissing):
            backend.stat("jobs/a/steps")

    def test_read_into_fills_exactly_or_fails(self, backend: Backend) -> None:
        backend.create(KEY, b"abcdef")
        buffer = bytearray(3)
        backend.read_into(KEY, memoryview(buffer), 3)
        assert buffer == b"def"
        with pytest.raises(CorruptObject, match="manifest"):
            backend.read_into(KEY, memoryview(buffer), 4)
        with pytest.raises(CorruptObject, match="manifest"):
            backend.get(KEY, 4, 3)

    def test_a_create_whose_parts_fail_leaves_nothing(self, backend: Backend) -> None:
        def parts() -> object:
            yield b"half"
            raise StoreError("the source failed")

        with pytest.raises(StoreError, match="the source failed"):
            backend.create(KEY, parts())  # type: ignore[arg-type]
        assert list(backend.list("")) == []
        backend.create(KEY, b"whole")
        assert backend.get(KEY) == b"whole"

    def test_put_replaces_whole(self, backend: Backend) -> None:
        backend.put(KEY, b"a longer value")
        version = backend.put(KEY, b"short")
        assert backend.get_versioned(KEY) == (b"short", version)

    def test_put_on_condition_of_absence(self, backend: Backend) -> None:
        backend.put(KEY, b"1", "absent")
        with pytest.raises(StaleVersion, match="manifest"):
            backend.put(KEY, b"2", "absent")
        assert backend.get(KEY) == b"1"

    def test_put_on_condition_of_a_version(self, backend: Backend) -> None:
        first = backend.put(KEY, b"1")
        second = backend.put(KEY, b"2", first)
        with pytest.raises(StaleVersion):
            backend.put(KEY, b"3", first)
        assert backend.get_versioned(KEY) == (b"2", second)

    def test_a_version_of_something_deleted_is_stale(self, backend: Backend) -> None:
        version = backend.put(KEY, b"1")
        backend.delete(KEY)
        with pytest.raises(StaleVersion):
            backend.put(KEY, b"2", version)

    def test_conditional_puts_lose_no_update(self, backend: Backend) -> None:
        backend.put(KEY, b"0")

        def add(_: int) -> None:
            while True:
                data, version = backend.get_versioned(KEY)
                try:
                    backend.put(KEY, b"%d" % (int(data) + 1), version)
                except StaleVersion:
                    continue
                return

        _all_at_once(add, 6)
        assert backend.get(KEY) == b"6"

    def test_list_is_sorted_and_by_text_prefix(self, backend: Backend) -> None:
        for key in ("b/2", "a/x/1", "a/x/2", "a/xy", "top"):
            backend.create(key, key.encode())
        assert [i.key for i in backend.list("")] == ["a/x/1", "a/x/2", "a/xy", "b/2", "top"]
        assert [i.key for i in backend.list("a/x")] == ["a/x/1", "a/x/2", "a/xy"]
        assert [(i.key, i.size) for i in backend.list("a/x/")] == [("a/x/1", 5), ("a/x/2", 5)]
        assert list(backend.list("none/")) == []

    def test_folders_are_those_with_objects_below(self, backend: Backend) -> None:
        for key in ("a/x/1", "a/y/z/1", "a/file"):
            backend.create(key, b"")
        assert list(backend.list_folders("a/")) == ["x", "y"]
        assert list(backend.list_folders("none/")) == []
        backend.delete("a/y/z/1")
        assert list(backend.list_folders("a/")) == ["x"]

    def test_delete_is_idempotent(self, backend: Backend) -> None:
        backend.delete(KEY)
        backend.create(KEY, b"x")
        backend.delete(KEY)
        backend.delete(KEY)
        with pytest.raises(ObjectMissing):
            backend.get(KEY)
        backend.create(KEY, b"again")
        assert backend.get(KEY) == b"again"

    def test_creates_and_deletes_beside_each_other_do_not_meet(self, backend: Backend) -> None:
        def churn(n: int) -> None:
            for _ in range(5):
                backend.create(f"jobs/a/steps/{n}/manifest", b"x")
                backend.delete(f"jobs/a/steps/{n}/manifest")

        _all_at_once(churn, 4)
        assert list(backend.list("")) == []

    def test_times_grow(self, backend: Backend) -> None:
        backend.put("refs/a", b"1")
        backend.put("refs/b", b"1")
        assert backend.stat("refs/a").modified <= backend.stat("refs/b").modified
        assert backend.stat("refs/a").modified > 0

    def test_sweeping_temporaries_leaves_objects(self, backend: Backend) -> None:
        backend.create(KEY, b"x")
        backend.put("refs/a", b"y")
        backend.sweep_temporaries(backend.stat("refs/a").modified + 10)
        assert backend.get(KEY) == b"x"
        assert backend.get("refs/a") == b"y"


def _all_at_once(work: Callable[[int], None], threads: int) -> None:
    barrier = threading.Barrier(threads)

    def run(n: int) -> None:
        barrier.wait(timeout=30)
        work(n)

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(run, n) for n in range(threads)]:
            future.result(timeout=60)
