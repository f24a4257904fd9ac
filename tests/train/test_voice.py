"""The voice of a rank: it never stands in the way of training."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.core.events import decode_line
from everstep.core.settings import Settings
from everstep.train.place import Place
from everstep.train.voice import Voice

PLACE = Place(rank=0, world=1, local_rank=0, node=0, ranks_of_node=((0,),), launch="test")


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null/no-folder/events.jsonl"])
def test_events_that_cannot_be_written_are_one_warning(path: str, capfd) -> None:
    """R3: a full disk or a missing folder under the journal costs events, not training."""
    voice = Voice(Settings(events=path, job="job"), PLACE)
    for step in range(3):
        voice.log_values(step, {"loss": 1.0})
        voice.say("train.warning", "text")
    voice.close()
    assert capfd.readouterr().err.count("everstep: events are not written") == 1


def test_logged_tensors_are_figures_of_the_step(tmp_path: Path, recwarn) -> None:
    import torch

    voice = Voice(Settings(events=str(tmp_path / "events"), job="job"), PLACE)
    voice.log_values(7, {"loss": torch.tensor(0.5, requires_grad=True), "n": 3})
    voice.close()
    (event,) = (decode_line(line) for line in (tmp_path / "events").read_bytes().splitlines())
    assert (event.kind, event.step, event.facts) == (
        "train.log",
        7,
        {"loss": 0.5, "n": 3},
    )
    assert not recwarn.list
