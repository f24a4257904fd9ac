"""Files into incidents: merged logs, and lines of JSON.

Owns: the two forms of input. Never does: judge. Called by: ``everstep classify``, tests.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from everstep.errors import BadIncident
from everstep.faults.catalog import Catalog, load
from everstep.faults.records import Incident, Signal, Source
from everstep.faults.sieve import pieces_of, sieved

SMALL = 2 << 20
"""Bytes of a log that are judged line by line; of a longer one the lines are chosen first."""
PIECE = 1 << 18

_CONVENTION = re.compile(r"node-(\d+)")


class _Evidence(msgspec.Struct):
    source: Source
    text: str | None = ""
    rank: int | None = None
    node: str | None = None
    time: float | None = None
    exit_code: int | None = None


class Expected(msgspec.Struct, frozen=True):
    """What a labelled case wants."""

    fault: str = msgspec.field(name="class")
    domain: str
    action: str
    root_ranks: tuple[int, ...] = ()
    root_node: str | None = None
    victim_ranks: tuple[int, ...] = ()


class _Case(msgspec.Struct):
    id: str
    evidence: list[_Evidence]
    nodes: dict[str, list[int]] | None = None
    pods: dict[str, str] | None = None
    addresses: dict[str, str] | None = None
    expect: Expected | None = None


class Read(msgspec.Struct, frozen=True):
    """An incident and, where the file has it, what is expected of its verdict."""

    incident: Incident
    expect: Expected | None = None


def read(path: Path, catalog: Catalog | None = None) -> Iterator[Read]:
    """The incidents of one file: of each line where it holds JSON objects with evidence, else one
    for the whole file, which is then a merged log. A log of more than 2 MB is read in pieces, and
    only its lines that ``catalog`` (default: the one that comes along) may find something in are
    kept. Raises :class:`~everstep.errors.BadIncident`."""
    try:
        with path.open("rb") as file:
            head = file.read(PIECE).lstrip().split(b"\n", 1)[0]
            file.seek(0)
            if is_json(head):
                yield from cases(str(path), file)
            else:
                yield Read(log(path.name, _whole(file, catalog)))
    except OSError as error:
        raise BadIncident(
            f"{path} cannot be read: {error.strerror}.", hint="Name a log or a file of JSON lines."
        ) from error


def is_json(head: bytes) -> bool:
    """Whether a first line is, as far as it is there, a JSON object with evidence."""
    return head.lstrip().startswith(b"{") and b'"evidence"' in head and b'"id"' in head


def log(name: str, raw: bytes) -> Incident:
    """A merged log as one incident; bytes that are no UTF-8 become replacement characters."""
    return Incident(name, (Signal("log", raw.decode("utf-8", "replace")),))


def _whole(file: BinaryIO, catalog: Catalog | None) -> bytes:
    start = file.read(SMALL)
    if len(start) < SMALL:
        return start
    pieces = itertools.chain(pieces_of(start), iter(lambda: file.read(PIECE), b""))
    return sieved(pieces, catalog or load())


def cases(name: str, lines: Iterable[bytes]) -> Iterator[Read]:
    """The incidents of JSON lines. Raises :class:`~everstep.errors.BadIncident`."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            case = msgspec.json.decode(line, type=_Case)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadIncident(
                f"{name}, line {number} is no incident: {error}.",
                hint="Each line is one JSON object with `id` and `evidence`.",
            ) from error
        yield Read(_incident(case), case.expect)


def _incident(case: _Case) -> Incident:
    nodes = {node: tuple(ranks) for node, ranks in (case.nodes or {}).items()}
    signals = tuple(
        Signal(
            item.source, item.text or "", item.rank, item.node, item.time, exit_code=item.exit_code
        )
        for item in case.evidence
    )
    addresses = case.addresses if case.addresses is not None else _addresses(case, nodes)
    return Incident(case.id, signals, nodes, addresses=addresses, pods=case.pods or {})


def _addresses(case: _Case, nodes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """The convention of the format: ``node-i`` has the address ``10.0.0.(i+1)``."""
    names = set(nodes) | {item.node for item in case.evidence if item.node}
    return {
        f"10.0.0.{int(found[1]) + 1}": name
        for name in sorted(names) if (found := _CONVENTION.fullmatch(name))
    }  # fmt: skip
