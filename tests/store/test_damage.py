"""S3: every bit is covered by a check, hostile records are refused, newer formats are named."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.clock import SystemClock
from everstep.core.ids import Point
from everstep.core.layout import SHARED, Box
from everstep.errors import CorruptObject, EverstepError, NewerFormat, UsageError
from everstep.store import Branch, Job, OwnerIdentity, ReadRequest, Retention, records
from everstep.store.backends import Backend
from everstep.store.backends.memory import MemoryBackend
from everstep.store.digests import digest
from everstep.store.folder import Folder
from everstep.store.records import BranchRecord, Claim, Index, Manifest, Tombstone
from everstep.store.settings import Settings, decode, encode, make
from everstep.testing.faulty import FaultyBackend
from everstep.testing.snapshots import TINY, Tensor, loads_as, requests_of, value, world_of

SETTINGS = make(chunk_bytes=64, store_id="0" * 32)
ME = OwnerIdentity("me", "host", "boot", 1, 1)
POINT = Point(5, 1)
STEP = "jobs/a/steps/000000000005-000001/"


def job_on(backend: MemoryBackend) -> Job:
    return Job(Folder(backend, "a", SETTINGS), SystemClock())


def packs_of(memory: MemoryBackend, point: Point) -> list[str]:
    """Keys of the point's packs, whether an index names them or not."""
    return sorted(key for key in memory.objects if f"/packs/{point}-" in key)


def tiny(world: int = 2, tensors: tuple[Tensor, ...] = TINY) -> MemoryBackend:
    memory = MemoryBackend()
    fill(memory, world, tensors)
    return memory


def fill(memory: MemoryBackend, world: int = 2, tensors: tuple[Tensor, ...] = TINY) -> None:
    """One job with one checkpoint."""
    memory.create("everstep.json", encode(SETTINGS))
    job = job_on(memory)
    job.acquire_owner(ME, is_alive=lambda _: True, attempt=1)
    job.claim(ME)
    job.write_branch(1, Branch(None, "fresh", "first", world))
    for part in world_of(5, 1, world, tensors=tensors):
        job.write_rank(part, facts={"torch": "2"}, unique="u")
        job.try_commit(POINT, world)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.fixture(scope="module")
def stored() -> MemoryBackend:
    memory = tiny()
    assert job_on(memory).verify(POINT, deep=True).ok
    return memory


@pytest.fixture(scope="module")
def littered() -> MemoryBackend:
    """Besides a sound checkpoint: an incomplete step, one whose deletion has just begun, one whose
    packs are gone, and the pack of a second writer, which no index names."""
    clock = ManualClock()
    memory = MemoryBackend(clock=clock)
    fill(memory)
    job = Job(Folder(memory, "a", SETTINGS), clock)
    for step in (2, 3):
        (part,) = world_of(step, 1, 1)
        job.write_rank(part, facts={}, unique="u")
        job.try_commit(Point(step, 1), 1)
        clock.now += 1000
        memory.create(
            f"jobs/a/steps/{Point(step, 1)}/tombstone",
            records.encode(Tombstone("a", Point(step, 1), "old")),
        )
        if step == 2:
            job.execute(job.retain(Retention(keep_last=1)))
            clock.now += 1000
            job.execute(job.retain(Retention(keep_last=1)))
    job.write_rank(world_of(7, 1, 2)[0], facts={}, unique="u")
    whole = memory.objects
    (named,) = [key for key in packs_of(memory, POINT) if "-rank-00001-" in key]
    memory.create(named.replace("-u.pack", "-second.pack"), whole[named])
    job.verify(POINT, deep=True)
    assert {(i.point.step, i.state) for i in job.checkpoints()} == {
        (2, "tombstoned"), (3, "tombstoned"), (5, "committed"), (7, "incomplete"),
    }  # fmt: skip
    assert f"jobs/a/steps/{Point(2, 1)}/swept" in whole
    assert sum("/packs/" in key for key in whole) == 5
    assert sum(key.endswith(".index") for key in whole) == 4
    return memory


class ManualClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def wall(self) -> float:
        return self.now

    def mono(self) -> float:
        return self.now


def some_bits(size: int) -> list[int]:
    """A bit of every fifth byte, the bits in turn; the soak test takes every bit."""
    return [at * 8 + at // 5 % 8 for at in range(0, size, 5)]


def fewer_bits(data: bytes) -> list[int]:
    """As many, where more is there: a pack is zeros for the most part."""
    step = 5 if len(data) < 2000 else 13
    return [at * 8 + at // step % 8 for at in range(0, len(data), step)]


def every_bit(size: int) -> list[int]:
    return list(range(size * 8))


def most_bits(data: bytes) -> list[int]:
    """Every bit of a byte that is not zero, one of a byte that is."""
    return [
        at * 8 + bit for at, byte in enumerate(data) for bit in (range(8) if byte else (at % 8,))
    ]


@pytest.mark.parametrize("bits", [fewer_bits, pytest.param(most_bits, marks=pytest.mark.soak)])
@pytest.mark.timeout(1200)
def test_s3_verify_deep_finds_every_flipped_bit_of_every_object(
    littered: MemoryBackend, bits: Callable[[bytes], list[int]]
) -> None:
    whole = dict(littered.objects)
    assert _all_sound(job_on(littered))
    for key, data in whole.items():
        for bit in bits(data):
            littered.objects = {**whole, key: flipped(data, bit)}
            assert not _all_sound(job_on(littered)), f"{key} bit {bit}"
    littered.objects = whole


def _all_sound(job: Job) -> bool:
    """What ``everstep verify --deep`` asks for."""
    if not job.verify_around(deep=True).ok:
        return False
    committed = [info.point for info in job.checkpoints() if info.state == "committed"]
    return all(job.verify(point, deep=True).ok for point in committed)


@pytest.mark.parametrize(
    ("suffix", "what"),
    [
        ("2-000001/tombstone", "checksum"),
        ("2-000001/swept", "checksum"),
        ("7-000001/rank-00000-of-00002.index", "checksum"),
        ("3-000001-rank-00000-u.pack", "digest"),
        ("7-000001-rank-00000-u.pack", "digest"),
        ("5-000001-rank-00001-second.pack", "digest"),
    ],
)
def test_s3_damage_beside_the_checkpoints_is_named(
    littered: MemoryBackend, suffix: str, what: str
) -> None:
    whole = dict(littered.objects)
    (key,) = [key for key in whole if key.endswith(suffix)]
    littered.objects = {**whole, key: flipped(whole[key], 0 if what == "digest" else 8 * 40)}
    report = job_on(littered).verify_around(deep=True)
    littered.objects = whole
    assert len(report.damage) == 1
    assert key in report.damage[0]
    assert what in report.damage[0]


def test_what_a_sweep_deletes_meanwhile_is_no_damage(littered: MemoryBackend) -> None:
    """At every call of the walk."""
    whole = dict(littered.objects)
    quiet = FaultyBackend(littered)
    Job(Folder(quiet, "a", SETTINGS), SystemClock()).verify_around(deep=True)
    tombstoned = [key for key in whole if "2-000001" in key or "3-000001" in key]
    for number in range(len(quiet.calls)):
        littered.objects = dict(whole)

        def sweep() -> None:
            for key in tombstoned:
                littered.delete(key)

        at = AtCall(littered, number, sweep)
        assert Job(Folder(at, "a", SETTINGS), SystemClock()).verify_around(deep=True).ok
    littered.objects = whole


class AtCall(FaultyBackend):
    """Does something just before the n-th call."""

    def __init__(self, inner: Backend, number: int, do: Callable[[], object]) -> None:
        super().__init__(inner)
        self._left, self._do = number, do

    def _due(self, call: str, key: str) -> str:
        self._left -= 1
        if self._left == -1:
            self._do()
        return super()._due(call, key)


@pytest.mark.parametrize("bits", [some_bits, pytest.param(every_bit, marks=pytest.mark.soak)])
@pytest.mark.timeout(1200)
def test_s3_a_load_finds_every_flipped_bit_that_it_uses(
    stored: MemoryBackend, bits: Callable[[int], list[int]]
) -> None:
    """Manifest, indexes and chunks: an error. The rest of a pack is not used: the load is right."""
    whole = dict(stored.objects)
    checkpoint = job_on(stored).open_checkpoint(POINT)
    chunks = {
        f"jobs/a/{index.packs[0].key}": [*index.chunks, *index.state_chunks]
        for index in checkpoint.indexes
    }
    for key in [k for k in whole if "/steps/" in k or "/packs/" in k]:
        for bit in bits(len(whole[key])):
            stored.objects = {**whole, key: flipped(whole[key], bit)}
            used = key not in chunks or any(
                c.offset <= bit // 8 < c.offset + c.raw_length for c in chunks[key]
            )
            assert _outcome(job_on(stored)) == ("refused" if used else "right"), f"{key} bit {bit}"
    stored.objects = whole


def _outcome(job: Job) -> str:
    try:
        return "right" if loads_as(job.open_checkpoint(POINT), 5) else "wrong"
    except CorruptObject:
        return "refused"


def test_a_damaged_chunk_names_key_offset_and_tensor(stored: MemoryBackend) -> None:
    whole = dict(stored.objects)
    chunk = job_on(stored).open_checkpoint(POINT).indexes[0].chunks[0]
    key = packs_of(stored, POINT)[0]
    stored.objects = {**whole, key: flipped(whole[key], chunk.offset * 8)}
    requests, _ = requests_of(TINY, 0)
    with pytest.raises(CorruptObject, match=rf"{key} at byte {chunk.offset} .*of w"):
        job_on(stored).open_checkpoint(POINT).load(requests)
    report = job_on(stored).verify(POINT, deep=True)
    assert len(report.problems) == 1
    assert report.proof == "damaged"
    assert job_on(stored).verify(POINT).ok, "a shallow look proves the structure alone"
    assert job_on(stored).checkpoints()[0].verified == "damaged"
    stored.objects = whole


def test_verify_says_what_it_proved() -> None:
    job = job_on(tiny())
    assert job.verify(POINT).proof == "structure"
    assert job.checkpoints()[0].verified == "structure"
    deep = job.verify(POINT, deep=True)
    assert (deep.proof, deep.ok) == ("bytes", True)
    assert deep.chunks == sum(
        len(i.chunks) + len(i.state_chunks) for i in job.open_checkpoint(POINT).indexes
    )
    job.verify(POINT)
    assert job.checkpoints()[0].verified == "bytes", "a lesser proof leaves a greater one alone"
    missing = job.verify(Point(6, 1))
    assert not missing.ok
    assert missing.proof is None


@pytest.mark.parametrize("at", [0, 1, -1])
def test_cut_and_lengthened_objects_are_found(at: int) -> None:
    for suffix in ("manifest", "rank-00000-of-00002.index", ".pack"):
        memory = tiny()
        key = next(k for k in memory.objects if k.endswith(suffix))
        memory.objects[key] = memory.objects[key][:at] if at < 1 else memory.objects[key] + b"x"
        with pytest.raises(CorruptObject):
            job_on(memory).open_checkpoint(POINT)
        assert not job_on(memory).verify(POINT).ok


@pytest.mark.parametrize("suffix", ["rank-00001-of-00002.index", ".pack"])
def test_a_missing_part_is_damage_and_the_previous_checkpoint_loads(suffix: str) -> None:
    memory = tiny()
    job = job_on(memory)
    for part in world_of(9, 1, 2):
        job.write_rank(part, facts={}, unique="v")
        job.try_commit(Point(9, 1), 2)
    del memory.objects[next(k for k in memory.objects if "09-" in k and k.endswith(suffix))]
    assert list(job.candidates()) == [Point(9, 1), POINT]
    with pytest.raises(CorruptObject, match="missing"):
        job.open_checkpoint(Point(9, 1))
    assert loads_as(job.open_checkpoint(POINT), 5)


# newer formats


def newer(data: bytes) -> bytes:
    """The same record as a later version would frame it: sound, but not for us."""
    head = data[:12] + (3).to_bytes(4, "little") + data[16:24]
    return head + digest(head + data[40:]) + data[40:]


@pytest.mark.parametrize("name", ["manifest", "rank-00000-of-00002.index"])
def test_a_record_of_a_newer_format_is_named_as_such(name: str) -> None:
    memory = tiny()
    memory.objects[STEP + name] = newer(memory.objects[STEP + name])
    if name != "manifest":
        _remake_manifest(memory)
    with pytest.raises(NewerFormat, match=r"version 3.*Upgrade"):
        job_on(memory).open_checkpoint(POINT)
    _is_not_verified_and_not_damaged(job_on(memory), "version 3")


def _is_not_verified_and_not_damaged(job: Job, why: str) -> None:
    report = job.verify(POINT, deep=True)
    assert (report.ok, report.damage, report.proof) == (False, (), None)
    assert why in report.unknown[0]
    around = job.verify_around(deep=True)
    assert around.damage == ()
    assert job.checkpoints()[0].verified is None


def test_a_store_of_a_newer_format_is_named_as_such() -> None:
    front = encode(SETTINGS).partition(b',"checksum"')[0].replace(b'"format":1', b'"format":2')
    front = front.replace(b'"chunk_bytes":64', b'"chunk_bytes":64,"shards":3')
    data = front + b',"checksum":"' + digest(front).hex().encode() + b'"}\n'
    with pytest.raises(NewerFormat, match="format 2"):
        decode(data, "memory://x")


def test_an_unknown_codec_is_a_newer_format() -> None:
    memory = tiny()
    _change_index(memory, lambda i: _with_chunk(i, codec="zstd"))
    with pytest.raises(NewerFormat, match="zstd"):
        job_on(memory).open_checkpoint(POINT)
    _is_not_verified_and_not_damaged(job_on(memory), "zstd")


def test_a_pack_of_a_later_version_is_not_verified_and_not_damaged() -> None:
    memory = tiny()
    key = packs_of(memory, POINT)[0]
    data = memory.objects[key]
    front = data[-48:-40] + (2).to_bytes(4, "little") + data[-36:-16]
    memory.objects[key] = data[:-48] + front + digest(front)
    _is_not_verified_and_not_damaged(job_on(memory), "version 2")


# hostile records, with sound checksums


def _remake_manifest(memory: MemoryBackend, **changes: Any) -> None:
    manifest = records.decode(memory.objects[STEP + "manifest"], Manifest, "m")
    ranks = tuple(
        msgspec.structs.replace(
            entry,
            length=len(memory.objects[f"jobs/a/{entry.key}"]),
            digest=digest(memory.objects[f"jobs/a/{entry.key}"]),
        )
        for entry in manifest.ranks
    )
    changed = msgspec.structs.replace(manifest, **{"ranks": ranks, **changes})
    memory.objects[STEP + "manifest"] = records.encode(changed)


def _change_index(memory: MemoryBackend, change: Callable[[Index], Index]) -> None:
    key = STEP + "rank-00000-of-00002.index"
    index = records.decode(memory.objects[key], Index, key)
    memory.objects[key] = records.encode(change(index))
    _remake_manifest(memory)


def _with(index: Index, **changes: Any) -> Index:
    return msgspec.structs.replace(index, **changes)


def _with_chunk(index: Index, **changes: Any) -> Index:
    first = msgspec.structs.replace(index.chunks[0], **changes)
    return _with(index, chunks=(first, *index.chunks[1:]))


def _with_extent(index: Index, **changes: Any) -> Index:
    first = msgspec.structs.replace(index.extents[0], **changes)
    return _with(index, extents=(first, *index.extents[1:]))


def _with_pack(index: Index, **changes: Any) -> Index:
    return _with(index, packs=(msgspec.structs.replace(index.packs[0], **changes),))


HUGE = 1 << 60

HOSTILE: dict[str, Callable[[Index], Index]] = {
    "a pack outside the job": lambda i: _with_pack(i, key="../../b/packs/x.pack"),
    "an absolute pack": lambda i: _with_pack(i, key="/etc/passwd"),
    "a pack of no length": lambda i: _with_pack(i, length=0),
    "a pack of another length": lambda i: _with_pack(i, length=i.packs[0].length + 1),
    "a chunk beyond its pack": lambda i: _with_chunk(i, offset=HUGE),
    "a chunk before its pack": lambda i: _with_chunk(i, offset=-1),
    "a chunk in no pack": lambda i: _with_chunk(i, pack=7),
    "a chunk in a negative pack": lambda i: _with_chunk(i, pack=-1),
    "a huge chunk": lambda i: _with_chunk(i, raw_length=HUGE, stored_length=HUGE),
    "a negative chunk": lambda i: _with_chunk(i, stored_length=-1),
    "a short digest": lambda i: _with_chunk(i, digest=b""),
    "a huge state": lambda i: _with(i, state_bytes=HUGE),
    "a negative state": lambda i: _with(i, state_bytes=-1),
    "a huge tensor": lambda i: _with_extent(i, shape=(HUGE, 3), sizes=(HUGE, 3)),
    "a box outside": lambda i: _with_extent(i, offsets=(4, 0)),
    "a negative box": lambda i: _with_extent(i, offsets=(-1, 0)),
    "a box of other dimensions": lambda i: _with_extent(i, sizes=(2,)),
    "a negative shape": lambda i: _with_extent(i, shape=(-5, 3)),
    "an unknown dtype": lambda i: _with_extent(i, dtype="object"),
    "another rank's tensor": lambda i: _with_extent(i, rank=1),
    "a tensor twice": lambda i: _with(
        i, extents=(*i.extents, i.extents[0]), chunks=(*i.chunks, i.chunks[0])
    ),
    "fewer chunks": lambda i: _with(i, chunks=i.chunks[1:]),
    "more chunks": lambda i: _with(i, chunks=(*i.chunks, i.chunks[0])),
    "another job": lambda i: _with(i, job="b"),
    "another step": lambda i: _with(i, point=Point(6, 1)),
    "another rank": lambda i: _with(i, rank=1),
    "another world": lambda i: _with(i, world=3),
    "another layout": lambda i: _with(i, layout="ff"),
    "another chunk size": lambda i: _with(i, chunk_bytes=128),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_s3_hostile_indexes_are_refused(what: str) -> None:
    memory = tiny()
    _change_index(memory, HOSTILE[what])
    tracemalloc.start()
    try:
        with pytest.raises(CorruptObject, match=r"jobs/a/"):
            job_on(memory).open_checkpoint(POINT)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "changes",
    [
        {"job": "b"},
        {"point": Point(6, 1)},
        {"world": 1 << 40},
        {"world": 0, "ranks": ()},
        {"digest": "blake3"},
        {"facts": {"torch": "3"}},
        {"chunk_bytes": 128},
    ],
)
def test_s3_hostile_manifests_are_refused(changes: dict[str, Any]) -> None:
    memory = tiny()
    _remake_manifest(memory, **changes)
    with pytest.raises(CorruptObject, match="manifest"):
        job_on(memory).open_checkpoint(POINT)


def test_s3_an_index_key_of_a_manifest_cannot_lead_elsewhere() -> None:
    memory = tiny()
    manifest = records.decode(memory.objects[STEP + "manifest"], Manifest, "m")
    entry = msgspec.structs.replace(manifest.ranks[0], key="../../../../etc/passwd")
    memory.objects[STEP + "manifest"] = records.encode(
        msgspec.structs.replace(manifest, ranks=(entry, manifest.ranks[1]))
    )
    with pytest.raises(CorruptObject, match="passwd"):
        job_on(memory).open_checkpoint(POINT)


def test_a_branch_that_points_forward_or_lies_elsewhere_is_damage() -> None:
    for changed in ({"restored": Point(3, 4), "source": "store"}, {"attempt": 2}, {"job": "b"}):
        memory = tiny()
        key = "jobs/a/attempts/000001/branch"
        record = records.decode(memory.objects[key], BranchRecord, key)
        memory.objects[key] = records.encode(msgspec.structs.replace(record, **changed))
        (branch,) = job_on(memory).branches().values()
        assert branch.source == "unknown"
        assert key in branch.problem
        with pytest.raises(UsageError, match="unknown"):
            job_on(memory).write_branch(2, branch)


@given(st.binary(max_size=200))
def test_random_bytes_are_never_a_record(data: bytes) -> None:
    for record in (Index, Manifest, Claim):
        with pytest.raises(CorruptObject):
            records.decode(data, record, "key")
    with pytest.raises(EverstepError):
        decode(data, "url")


@given(st.binary(max_size=200))
def test_random_bodies_in_a_sound_frame_are_corrupt(body: bytes) -> None:
    head = records._HEAD.pack(records.MAGIC, b"indx", 1, len(body))
    with pytest.raises(CorruptObject):
        records.decode(head + digest(head + body) + body, Index, "key")


def test_settings_outside_their_range_are_refused() -> None:
    strange = Settings("store", 1, "0" * 32, "xxh3-128", 63)
    with pytest.raises(EverstepError):
        decode(encode(strange), "url")


# loading any box of any sharding


@given(
    st.integers(1, 4),
    st.lists(st.integers(0, 6), max_size=3).map(tuple),
    st.sampled_from(["uint8", "float32", "complex128"]),
    st.integers(1, 3),
    st.data(),
)
def test_any_box_loads_whatever_the_sharding(
    world: int, shape: tuple[int, ...], dtype: str, threads: int, data: st.DataObject
) -> None:
    tensor = Tensor("w", dtype, shape)
    memory = tiny(world, (tensor,))
    pairs = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    box = Box(tuple(a for a, _ in pairs), tuple(b - a for a, b in pairs))
    whole = value(tensor, SHARED, 5)
    itemsize = len(whole) // tensor.whole.numel if whole else 1
    wanted = b"".join(
        whole[i * itemsize : (i + 1) * itemsize] for i in _positions(shape, box) if whole
    )
    out = memoryview(bytearray(len(wanted)))
    report = (
        job_on(memory)
        .open_checkpoint(POINT)
        .load([ReadRequest("w", SHARED, box, out)], threads=threads)
    )
    assert bytes(out) == wanted
    assert report.bytes == len(wanted)


def _positions(shape: tuple[int, ...], box: Box) -> list[int]:
    positions = [0]
    for n, offset, size in zip(shape, box.offsets, box.sizes, strict=True):
        positions = [p * n + i for p in positions for i in range(offset, offset + size)]
    return positions


def test_chunks_that_follow_each_other_are_read_at_once() -> None:
    tensor = Tensor("w", "uint8", (1000,))
    memory = tiny(1, (tensor,))
    counting = FaultyBackend(memory)
    checkpoint = Job(Folder(counting, "a", SETTINGS), SystemClock()).open_checkpoint(POINT)
    out = memoryview(bytearray(1000))
    report = checkpoint.load([ReadRequest("w", SHARED, tensor.whole, out)])
    assert out == random.Random("w/-1/5/0").randbytes(1000)
    assert report.chunks == 16
    assert sum(call == "read_into" for call, _ in counting.calls) == 1
