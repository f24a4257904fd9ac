"""Flips one bit of the newest checkpoint of a store on this machine's disk.

Owns: the damage. Never does: touch a store while a run uses it, or one that the drill was not
given. Called by: the drill's loop, after everything of the run is dead.
"""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import msgspec

from everstep.core.ids import Point
from everstep.errors import DrillError
from everstep.store import Checkpoint, open_store
from everstep.store.backends.local import path_of
from everstep.store.keys import job_prefix


class Damage(msgspec.Struct, frozen=True):
    """``key`` within the store, ``offset`` in bytes, ``bit`` of that byte."""

    point: Point
    key: str
    offset: int
    bit: int

    @property
    def text(self) -> str:
        return f"bit {self.bit} of byte {self.offset} of {self.key} flipped"


def flip_newest(store: str, job: str, *, seed: int) -> Damage:
    """Flip one bit of a chunk of the job's newest checkpoint; which one, the seed decides.

    Raises :class:`DrillError` where there is no checkpoint that could be damaged.
    """
    opened = open_store(store).job(job)
    candidates = opened.candidates()
    if not candidates:
        raise DrillError(f"job {job} has no checkpoint that could be damaged.")
    damage = _choose(opened.open_checkpoint(candidates[0]), job, random.Random(seed))
    _flip(local_root(store) / damage.key, damage.offset, damage.bit)
    return damage


def local_root(store: str) -> Path:
    """The folder of a store on this machine, also behind the fault-injecting backend."""
    return Path(path_of(store.removeprefix("faulty+")))


def _choose(checkpoint: Checkpoint, job: str, rng: random.Random) -> Damage:
    chunks = [
        (index.packs[chunk.pack].key, chunk)
        for index in checkpoint.indexes
        for chunk in (*index.chunks, *index.state_chunks)
        if chunk.stored_length
    ]
    if not chunks:
        raise DrillError(f"the checkpoint {checkpoint.point} holds no bytes.")
    key, chunk = rng.choice(chunks)
    offset = chunk.offset + rng.randrange(chunk.stored_length)
    return Damage(checkpoint.point, job_prefix(job) + key, offset, rng.randrange(8))


def _flip(path: Path, offset: int, bit: int) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    path.chmod(mode | stat.S_IWUSR)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        byte = os.pread(fd, 1, offset)[0]
        os.pwrite(fd, bytes([byte ^ 1 << bit]), offset)
        os.fsync(fd)
    finally:
        os.close(fd)
        path.chmod(mode)
