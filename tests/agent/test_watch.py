"""What an agent says of a keeper that does not come back."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from everstep.agent.record import Recorder
from everstep.agent.watch import KEEPER_SECONDS, Watch


class Keepers(SimpleNamespace):
    """A keeper that is away; ``comes`` says whether one can be started."""

    attached, comes, pid, log, tries = False, False, 1, "/var/log/keeper-0.log", 0

    def pump(self) -> None: ...

    def recover(self) -> bool:
        self.tries += 1
        self.attached = self.comes
        return self.comes


def test_that_no_keeper_can_be_started_is_said_once() -> None:
    said, keeper, unused = io.StringIO(), Keepers(), SimpleNamespace()
    parts: dict[str, Any] = dict.fromkeys(
        ("round_", "meeting", "workers", "learnt", "signals", "owner"), unused
    )
    watch = Watch(
        **parts, keeper=keeper, record=Recorder("job", stream=said), grace=1.0, shutdown=1.0,
        listen_every=1.0,
    )  # fmt: skip
    watch._next_keeper = 0.0
    for turn in range(4):
        watch._hear_keeper(turn * KEEPER_SECONDS)
    assert keeper.tries == 4
    assert said.getvalue().count("no keeper could be started") == 1
    assert keeper.log in said.getvalue()
    keeper.comes = True
    watch._hear_keeper(4 * KEEPER_SECONDS)
    keeper.attached, keeper.comes = False, False
    watch._next_keeper = 0.0
    watch._hear_keeper(5 * KEEPER_SECONDS)
    assert said.getvalue().count("no keeper could be started") == 2, "another one was lost"
