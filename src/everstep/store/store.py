"""A store: one place for the checkpoints of many jobs.

Owns: opening and making one. Called by: every room that needs a job's durable state.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.core.clock import Clock, SystemClock
from everstep.core.ids import check_job
from everstep.errors import UsageError
from everstep.store import chunks, digests, settings
from everstep.store.backends import Backend, open_backend
from everstep.store.digests import Digest
from everstep.store.folder import Folder
from everstep.store.job import Job
from everstep.store.settings import Settings


class Store:
    """An opened store. ``url`` opened it; ``backend`` is for tests and the doctor."""

    def __init__(self, url: str, backend: Backend, found: Settings, clock: Clock) -> None:
        self.url = url
        self.backend = backend
        self.settings = found
        self._clock = clock

    def job(self, name: str) -> Job:
        """The job of that name, whether it exists or not. Raises ``BadName``."""
        return Job(Folder(self.backend, check_job(name), self.settings), self._clock)

    def jobs(self) -> Sequence[str]:
        """Names of all jobs with anything stored, sorted."""
        return self.backend.list_folders("jobs/")

    def digest(self) -> Digest:
        """The store's digest function, as chunks are digested."""
        return digests.digester(self.settings.digest)


def open_store(
    url: str,
    *,
    create: bool = False,
    clock: Clock | None = None,
    digest: str | None = None,
    chunk_bytes: int | None = None,
) -> Store:
    """Open the store at ``url``: a path, ``file:///path`` or ``memory://name``.

    With ``create`` it is made where there is none, with ``digest`` (default ``xxh3-128``) and
    ``chunk_bytes`` (default 1 MiB). Raises ``ObjectMissing`` where there is none and it may not be
    made (an unmounted path looks like that), ``BadStoreUrl``, ``StoreNotWritable``,
    ``NewerFormat``; ``UsageError`` where an existing store has other settings than those asked for.
    """
    clock = clock if clock is not None else SystemClock()
    wanted = settings.make(
        digest=digest or digests.DEFAULT, chunk_bytes=chunk_bytes or chunks.DEFAULT_CHUNK_BYTES
    )
    backend = open_backend(url, create=create, clock=clock)
    found = settings.create(backend, wanted) if create else settings.read(backend)
    for name, asked in (("digest", digest), ("chunk_bytes", chunk_bytes)):
        if asked is not None and getattr(found, name) != asked:
            raise UsageError(
                f"the store {url} has {name} {getattr(found, name)}, not {asked}.",
                hint="Settings are fixed when a store is made: drop the argument, or use another.",
            )
    return Store(url, backend, found, clock)
