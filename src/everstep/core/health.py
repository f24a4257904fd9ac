"""How sound a saved state is: what its numbers looked like when it was cut.

Owns: the record that goes with a snapshot into the store. Never does: look at a tensor, or at a
clock. Called by: train (which fills it in), store (which keeps it), keeper, cli.

*Healthy* is more than sound: sound, and old enough for what is found late (``DETECTION_DELAY``). A
state that is not a number verifies perfectly.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

DETECTION_DELAY = 10.0
"""Seconds from the commit on. What everstep looks at itself is seen before the commit; this is for
what shows later: a replica that differs is found by a part that moves from cut to cut."""

Figures = Literal["finite", "none", "bad"]
Parameters = Literal["all", "part", "none", "bad"]
Replicas = Literal["agreed", "differ"]


class Health(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``figures``: the loss and gradient norm that were logged since the cut before (``none``: none
    was). ``parameters``: how many of the trained ones were found finite. ``replicas``: whether what
    should be equal on all ranks ever was found not to be, in this attempt (R8)."""

    figures: Figures
    parameters: Parameters
    replicas: Replicas

    @property
    def sound(self) -> bool:
        return self.figures != "bad" and self.parameters != "bad" and self.replicas != "differ"


_FIGURES: tuple[Figures, ...] = ("none", "finite", "bad")
_PARAMETERS: tuple[Parameters, ...] = ("all", "part", "none", "bad")
_REPLICAS: tuple[Replicas, ...] = ("agreed", "differ")


def together(parts: Iterable[Health | None]) -> Health | None:
    """The health of a state of several ranks: the worst of each fact (one rank that logs is
    enough), None where one rank's is not known."""
    known = list(parts)
    found = [part for part in known if part is not None]
    if not found or len(found) < len(known):
        return None
    return Health(
        max((part.figures for part in found), key=_FIGURES.index),
        max((part.parameters for part in found), key=_PARAMETERS.index),
        max((part.replicas for part in found), key=_REPLICAS.index),
    )
