"""``everstep show``: one checkpoint, its tensors, objects, environment and where it came from."""

from __future__ import annotations

import math

import click
import msgspec
from rich.console import Console
from rich.markup import escape

from everstep.cli.places import (
    at_option,
    branch_problems,
    find_point,
    job_option,
    one_job,
    store_argument,
)
from everstep.cli.report import json_option, mark, reported, reporter, size, table
from everstep.core.events import counted
from everstep.core.ids import Point
from everstep.core.layout import ITEMSIZE, SHARED
from everstep.state.objects import Objects as Attached
from everstep.state.objects import decode_objects
from everstep.store import Branch, Checkpoint, Job, open_store

FORMAT = "everstep.show/1"

_CALLED = {"isa": "CPU capability", "vector extensions": "CPU capability"}
"""What facts of the environment are called for people."""


class Tensor(msgspec.Struct, frozen=True):
    """One tensor. ``owner`` is None for a tensor of the whole job, else the rank it belongs to;
    ``written_by`` and ``loaded_by`` are ranks; ``bytes`` those that are stored."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    owner: int | None
    written_by: tuple[int, ...]
    loaded_by: tuple[int, ...]
    bytes: int


class Objects(msgspec.Struct, frozen=True):
    """A rank's part that is no tensor: its length, and what was attached, by keyword. ``types``
    are the objects' classes, ``aliases`` names of the same tensor, ``beside`` what is kept though
    nobody attached it (random generators, data position)."""

    rank: int
    bytes: int
    names: tuple[str, ...]
    aliases: dict[str, str]
    types: dict[str, str] = {}
    beside: tuple[str, ...] = ()


class Origin(msgspec.Struct, frozen=True):
    """What one attempt of the lineage went on from; ``step`` None for a start from nothing, or
    where the ``source`` is ``unknown``: its branch cannot be read."""

    attempt: int
    source: str
    step: int | None
    from_attempt: int | None
    reason: str


class Shown(msgspec.Struct, frozen=True):
    """What ``everstep show --json`` prints. ``environment`` is what rank 0 ran with (R4), as far
    as it wrote it down; else what its launcher did. ``problems`` are damaged branches of the job.
    ``health``: ``figures`` (logged loss and gradient norm: ``finite``, ``none`` logged, ``bad``),
    ``parameters`` (``all`` or a ``part`` looked at and finite, ``none``, ``bad``) and ``replicas``
    (``agreed``, ``differ``); empty where it was not written down.
    """

    store: str
    job: str
    step: int
    attempt: int
    world: int
    layout: str
    digest: str
    chunks: int
    bytes: int
    packs: tuple[str, ...]
    environment: dict[str, str]
    lineage: tuple[Origin, ...]
    tensors: tuple[Tensor, ...]
    objects: tuple[Objects, ...]
    problems: tuple[str, ...] = ()
    health: dict[str, str] = {}
    format: str = FORMAT


@click.command("show")
@store_argument
@job_option
@at_option
@json_option
@reported
def command(store: str, job: str | None, at: str | None, as_json: bool) -> int:
    """Show one checkpoint of STORE: by default the one that would load.

    STORE is a path or URL (default: EVERSTEP_STORE, else ./everstep-store). Exit code 1 where a
    record of the job is damaged.
    """
    opened = open_store(store)
    found = one_job(opened, job)
    shown = show(opened.url, found, find_point(found, at))
    reporter(as_json=as_json).result(shown, lambda console: _render(shown, console))
    return 1 if shown.problems else 0


def show(url: str, job: Job, point: Point) -> Shown:
    """Everything the records of a checkpoint say. Raises ``CorruptObject``, ``ObjectMissing``."""
    checkpoint = job.open_checkpoint(point)
    indexes = checkpoint.indexes
    return Shown(
        store=url,
        job=job.name,
        step=point.step,
        attempt=point.attempt,
        world=checkpoint.world,
        layout=checkpoint.manifest.layout,
        digest=checkpoint.manifest.digest,
        chunks=sum(len(index.chunks) + len(index.state_chunks) for index in indexes),
        bytes=checkpoint.manifest.bytes,
        packs=tuple(pack.key for index in indexes for pack in index.packs),
        environment=_environment(checkpoint),
        lineage=_lineage(dict(job.branches()), point.attempt),
        tensors=_tensors(checkpoint),
        objects=tuple(_objects(checkpoint, rank) for rank in range(checkpoint.world)),
        problems=branch_problems(job),
        health=_health(checkpoint),
    )


def _health(checkpoint: Checkpoint) -> dict[str, str]:
    health = checkpoint.manifest.health
    return {} if health is None else {n: getattr(health, n) for n in health.__struct_fields__}


def _tensors(checkpoint: Checkpoint) -> tuple[Tensor, ...]:
    found: dict[tuple[str, int], Tensor] = {}
    for index in checkpoint.indexes:
        for extent in index.extents:
            nbytes = math.prod(extent.sizes) * ITEMSIZE[extent.dtype]
            key = (extent.fqn, extent.rank)
            owner = None if extent.rank == SHARED else extent.rank
            old = found.get(key) or Tensor(extent.fqn, extent.dtype, extent.shape, owner, (), (), 0)
            found[key] = msgspec.structs.replace(
                old, written_by=_with(old.written_by, index.rank), bytes=old.bytes + nbytes
            )
        for ref in index.refs:
            tensor = found.get((ref.fqn, ref.rank))
            if tensor is not None:
                found[ref.fqn, ref.rank] = msgspec.structs.replace(
                    tensor, loaded_by=_with(tensor.loaded_by, index.rank)
                )
    return tuple(found[key] for key in sorted(found))


def _with(ranks: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return tuple(sorted({*ranks, rank}))


def _objects(checkpoint: Checkpoint, rank: int) -> Objects:
    state = checkpoint.rank_state(rank)
    decoded = _decoded(state.objects)
    types = decoded.types if decoded else {}
    beside = _beside(_extra(decoded))
    return Objects(rank, len(state.objects), tuple(types), state.aliases, types, beside)


def _beside(extra: dict[str, object]) -> tuple[str, ...]:
    """What is kept though nobody attached it, in words."""
    drawn, data = extra.get("rng"), extra.get("data")
    found = [f"random generators ({', '.join(map(str, drawn))})"] if isinstance(drawn, dict) else []
    return (*found, *(["data position"] if data is not None else []))


def _extra(decoded: Attached | None) -> dict[str, object]:
    extra = msgspec.msgpack.decode(decoded.extra) if decoded else None
    return extra if isinstance(extra, dict) else {}


def _decoded(objects: bytes) -> Attached | None:
    """None where the bytes are of a form that this version does not know."""
    try:
        return decode_objects(objects)
    except msgspec.DecodeError:
        return None


def _environment(checkpoint: Checkpoint) -> dict[str, str]:
    """The worker's own facts go before the launcher's, whose threads and CPU are another's."""
    own = _extra(_decoded(checkpoint.rank_state(0).objects)).get("environment")
    facts = dict(checkpoint.facts)
    if isinstance(own, dict):
        facts.pop("isa", None)
        facts |= {str(name): str(value) for name, value in own.items() if name != "world"}
    return facts


def _lineage(branches: dict[int, Branch], attempt: int) -> tuple[Origin, ...]:
    found = []
    at: int | None = attempt
    while at is not None and at in branches:
        branch = branches[at]
        origin = branch.restored
        found.append(
            Origin(
                attempt=at,
                source=branch.source,
                step=None if origin is None else origin.step,
                from_attempt=None if origin is None else origin.attempt,
                reason=branch.fresh_reason,
            )
        )
        at = origin.attempt if origin is not None and origin.attempt < at else None
    return tuple(found)


def _render(shown: Shown, console: Console) -> None:
    console.print(
        f"[bold]{shown.job}[/] step {shown.step}, attempt {shown.attempt}: "
        f"{counted(shown.world, 'rank')}, {size(shown.bytes)} in {counted(shown.chunks, 'chunk')} "
        f"({shown.digest}), {counted(len(shown.packs), 'pack')}"
    )
    for problem in shown.problems:
        console.print(f"{mark('fail')} {escape(problem)}")
    for origin in shown.lineage:
        console.print(f"  attempt {origin.attempt} {_came(origin)}", markup=False)
    told = ", ".join(f"{name} {value}" for name, value in shown.health.items())
    console.print(f"  health: {told or 'not known'}", markup=False)
    for name, value in sorted(shown.environment.items()):
        console.print(f"  {_CALLED.get(name, name)}: {value}", markup=False)
    rows = table("tensor", "dtype", "shape", "owner", "written by", "loaded by", "bytes",
                 right=("bytes",))  # fmt: skip
    for item in shown.tensors:
        owner = "job" if item.owner is None else f"rank {item.owner}"
        rows.add_row(
            item.fqn, item.dtype, "x".join(map(str, item.shape)) or "scalar", owner,
            _ranks(item.written_by), _ranks(item.loaded_by), size(item.bytes),
        )  # fmt: skip
    console.print(rows)
    for part in shown.objects:
        named = (f"{name} ({kind})" for name, kind in part.types.items())
        names = ", ".join((*named, *part.beside)) or "nothing that this version can name"
        console.print(f"objects of rank {part.rank}: {size(part.bytes)}: {names}", markup=False)


def _came(origin: Origin) -> str:
    if origin.source == "unknown":
        return "began where nobody can say: its branch cannot be read"
    if origin.step is None:
        return "began at step 0" + (f" ({origin.reason})" if origin.reason else "")
    return f"went on from step {origin.step} ({origin.source})"


def _ranks(ranks: tuple[int, ...]) -> str:
    """``0-3,6``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
