"""``everstep classify``: what failed, on which ranks and node, and what helps."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.markup import escape

from everstep.cli.report import json_option, reported, reporter, table
from everstep.errors import BadIncident
from everstep.faults.catalog import Catalog, load
from everstep.faults.judge import judge
from everstep.faults.read import Read, read
from everstep.faults.records import UNKNOWN, Verdict
from everstep.faults.score import Score, score

FORMAT = "everstep.score/1"
UNDECIDED = 1
"""Exit code where some verdict is unknown."""
SHOWN = 3
"""Lines of evidence that a person sees."""


class Scored(msgspec.Struct, frozen=True):
    """What ``everstep classify --score FILE --json`` prints. Shares are of all cases, ``root`` of
    those with labelled root ranks."""

    domain: float
    action: float
    fault: float = msgspec.field(name="class")
    root: float
    counts: Score
    format: str = FORMAT


@click.command("classify")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--score", "labelled", type=click.Path(path_type=Path), help="Compare with FILE's `expect`."
)
@click.option(
    "--catalog", "extra", multiple=True, type=click.Path(path_type=Path),
    help="More signatures (TOML), looked for first; may be repeated.",
)  # fmt: skip
@json_option
@reported
def command(
    files: tuple[Path, ...], labelled: Path | None, extra: tuple[Path, ...], as_json: bool
) -> int:
    """Say what failed in FILES: plain logs (one merged log is one incident) or lines of JSON.

    Exit code 0; 1 when some verdict is unknown; 2 for a file that cannot be read or used.
    """
    catalog = load(*extra)
    if labelled is not None:
        return _score(labelled, catalog, as_json)
    if not files:
        raise BadIncident("no file is named.", hint="Give a log or JSON lines; `-` is not read.")
    unknown = False
    for path in files:
        for item in read(path, catalog):
            verdict = judge(item.incident, catalog)
            unknown |= verdict.fault == UNKNOWN
            _print(item, verdict, as_json)
    return UNDECIDED if unknown else 0


def _print(item: Read, verdict: Verdict, as_json: bool) -> None:
    if as_json:
        document = {"id": item.incident.id, **msgspec.to_builtins(verdict)}
        sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
        return
    console = Console(file=sys.stdout, highlight=False, width=None, soft_wrap=True)
    console.print(f"[bold]{escape(item.incident.id)}[/]: {verdict.fault} ({verdict.domain})")
    for line in described(verdict):
        console.print(f"  {escape(line)}")


def described(verdict: Verdict) -> list[str]:
    """The verdict in lines for people."""
    lines = [f"action    {verdict.action}", f"root      {_root(verdict)}"]
    if verdict.victim_ranks:
        lines.append(f"victims   ranks {', '.join(map(str, verdict.victim_ranks))}")
    if verdict.frame:
        lines.append(f"at        {verdict.frame}")
    if verdict.step is not None:
        lines.append(f"step      {verdict.step}")
    if verdict.message:
        lines.append(f"message   {verdict.message[:200]}")
    for item in verdict.evidence[:SHOWN]:
        who = " ".join(
            part for part in (item.node, None if item.rank is None else f"rank {item.rank}") if part
        )
        lines.append(f"seen      [{item.source}{' ' + who if who else ''}] {item.text[:160]}")
    return [*lines, f"advice    {verdict.advice}"]


def _root(verdict: Verdict) -> str:
    if not verdict.root_ranks and verdict.root_node is None:
        return "nobody is blamed"
    ranks = f"rank {', '.join(map(str, verdict.root_ranks))}" if verdict.root_ranks else ""
    node = f"node {verdict.root_node}" if verdict.root_node else ""
    return ", ".join(part for part in (ranks, node) if part) + (
        f" ({verdict.root_domain})" if verdict.root_domain else ""
    )


def _score(path: Path, catalog: Catalog, as_json: bool) -> int:
    items = [
        (item.incident.id, judge(item.incident, catalog), item.expect)
        for item in read(path, catalog)
    ]  # fmt: skip
    pairs = [(name, verdict, expect) for name, verdict, expect in items if expect is not None]
    if not pairs:
        raise BadIncident(f"{path} has no incident with `expect`.", hint="Give labelled cases.")
    counts = score(pairs)
    result = Scored(
        domain=counts.rate(counts.domain), action=counts.rate(counts.action),
        fault=counts.rate(counts.fault),
        root=counts.root / counts.labelled if counts.labelled else 1.0, counts=counts,
    )  # fmt: skip
    reporter(as_json=as_json).result(result, lambda console: _render(result, console))
    return 0


def _render(result: Scored, console: Console) -> None:
    counts = result.counts
    shown = table("what", "share", "count", right=("share", "count"))
    for name, share, count, of in (
        ("domain", result.domain, counts.domain, counts.cases),
        ("action", result.action, counts.action, counts.cases),
        ("class", result.fault, counts.fault, counts.cases),
        ("root, where labelled", result.root, counts.root, counts.labelled),
    ):
        shown.add_row(name, f"{share:.1%}", f"{count} of {of}")
    for name, count in (
        ("root named where none is", counts.named), ("wrong blames", counts.wrong_blames),
        ("missed stops", counts.missed_stops), ("wrong stops", counts.wrong_stops),
    ):  # fmt: skip
        shown.add_row(name, "", str(count))
    console.print(shown)
    for miss in counts.misses:
        console.print(
            f"{miss.id}: {miss.what}: expected {miss.expected}, got {miss.got}", markup=False
        )
