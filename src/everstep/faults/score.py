"""How good verdicts are: a comparison with what labelled cases expect.

Owns: the figures, what counts as a wrong blame or stop. Never does: I/O. Called by:
``everstep classify --score``, tests.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from everstep.faults.read import Expected
from everstep.faults.records import Verdict


class Miss(msgspec.Struct, frozen=True):
    """One field of one case that is not as expected."""

    id: str
    what: str
    expected: str
    got: str


class Score(msgspec.Struct, frozen=True):
    """Counts over ``cases``; the first four are right ones, ``labelled`` those with root ranks.
    ``wrong_blames``: a victim or a node that is not labelled was blamed; ``named``: a root was
    named where none is labelled; ``missed_stops`` and ``wrong_stops`` are about ``stop``."""

    cases: int = 0
    domain: int = 0
    action: int = 0
    fault: int = msgspec.field(default=0, name="class")
    root: int = 0
    labelled: int = 0
    named: int = 0
    wrong_blames: int = 0
    missed_stops: int = 0
    wrong_stops: int = 0
    misses: tuple[Miss, ...] = ()

    def rate(self, count: int) -> float:
        """A share of all cases, 1 where there are none."""
        return count / self.cases if self.cases else 1.0


def score(pairs: Iterable[tuple[str, Verdict, Expected]]) -> Score:
    """Compare each verdict with what is expected."""
    items = list(pairs)
    misses = tuple(miss for name, got, want in items for miss in _misses(name, got, want))

    def missed(what: str) -> int:
        return sum(miss.what == what for miss in misses)

    labelled = sum(bool(want.root_ranks) for _, _, want in items)
    return Score(
        cases=len(items),
        domain=len(items) - missed("domain"),
        action=len(items) - missed("action"),
        fault=len(items) - missed("class"),
        root=labelled - missed("root"),
        labelled=labelled,
        named=missed("named root"),
        wrong_blames=missed("blamed victim") + missed("blamed node"),
        missed_stops=missed("missed stop"),
        wrong_stops=missed("wrong stop"),
        misses=misses,
    )


def _misses(name: str, got: Verdict, want: Expected) -> Iterable[Miss]:
    pairs = (("domain", want.domain, got.domain), ("action", want.action, got.action),
             ("class", want.fault, got.fault))  # fmt: skip
    for what, expected, found in pairs:
        if expected != found:
            yield Miss(name, what, expected, found)
    ranks, wanted = sorted(got.root_ranks), sorted(want.root_ranks)
    if wanted and ranks != wanted:
        yield Miss(name, "root", str(wanted), str(ranks))
    if ranks and not wanted:
        yield Miss(name, "named root", "[]", str(ranks))
    if blamed := set(ranks) & set(want.victim_ranks):
        yield Miss(name, "blamed victim", str(wanted), str(sorted(blamed)))
    if got.root_node is not None and got.root_node != want.root_node:
        yield Miss(name, "blamed node", str(want.root_node), got.root_node)
    if want.root_node is not None and got.root_node is None:
        yield Miss(name, "node", want.root_node, "None")
    if (want.action == "stop") != (got.action == "stop"):
        what = "missed stop" if want.action == "stop" else "wrong stop"
        yield Miss(name, what, want.action, got.action)
