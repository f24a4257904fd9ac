"""``--on-fault``: what is said at the start is recorded, and holds until something else is said."""

from __future__ import annotations

import json

from forked import Start

from everstep.core import exits

FORKED = ("--run-path", "--start-method", "fork")
EXITS = "import everstep, os\neverstep.Options\nos._exit(3)"


def test_advice_is_said_and_not_followed_and_the_word_is_kept(start: Start) -> None:
    first = start(*FORKED, "--on-fault", "advise", script=EXITS)
    assert first.wait() == exits.NO_PROGRESS, first.said()
    decided = [event for event in first.events("decision.made") if event.facts["incident"]]
    assert {event.facts["action"] for event in decided} == {"restart_in_place", "stop"}
    assert all(event.facts["advice"] for event in decided[:2]), json.dumps(decided[0].facts)
