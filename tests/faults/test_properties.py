"""The verdict does not depend on the order of arrival, on duplicates, or on lost victim lines."""

from __future__ import annotations

import msgspec
import pytest
from classify_scenes import SCENES, Scene
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.faults.catalog import load
from everstep.faults.judge import judge
from everstep.faults.records import Incident, Signal, Verdict

scenes = st.sampled_from(SCENES)


def with_signals(incident: Incident, signals: list[Signal]) -> Incident:
    return msgspec.structs.replace(incident, signals=tuple(signals))


def root(verdict: Verdict) -> tuple[object, ...]:
    return (
        verdict.fault, verdict.domain, verdict.action, verdict.root_ranks, verdict.root_node,
        verdict.root_domain,
    )  # fmt: skip


@given(scenes, st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_verdict_is_the_same_in_any_order_of_arrival(scene: Scene, rng: object) -> None:
    incident = scene.incident()
    signals = list(incident.signals)
    rng.shuffle(signals)  # type: ignore[attr-defined]
    assert judge(with_signals(incident, signals), load()) == judge(incident, load())


@given(scenes, st.data())
@settings(max_examples=60, deadline=None)
def test_verdict_is_the_same_when_signals_are_told_twice(scene: Scene, data: st.DataObject) -> None:
    incident = scene.incident()
    again = data.draw(st.lists(st.sampled_from(incident.signals), max_size=6))
    twice = with_signals(incident, [*incident.signals, *again])
    assert judge(twice, load()) == judge(incident, load())


@given(st.sampled_from([scene for scene in SCENES if len(scene.signals) > 2]), st.data())
@settings(max_examples=120, deadline=None)
def test_verdict_is_the_same_when_lines_of_victims_are_lost(
    scene: Scene, data: st.DataObject
) -> None:
    """Lost: whole signals of victims. One witness at least is left where peers or watchdogs are all
    there is."""
    incident = scene.incident()
    whole = judge(incident, load())
    theirs = [
        signal for signal in incident.signals
        if signal.rank in whole.victim_ranks and signal.source in ("log", "exit")
    ]  # fmt: skip
    keep = 2 if whole.confidence < 0.75 or not whole.root_ranks else 0
    lost = data.draw(
        st.lists(st.sampled_from(theirs), unique_by=id, max_size=max(len(theirs) - keep, 0))
        if theirs
        else st.just([])
    )
    left = [signal for signal in incident.signals if all(signal is not each for each in lost)]
    assert root(judge(with_signals(incident, left), load())) == root(whole)


@given(st.text(max_size=400), st.sampled_from(["log", "kernel", "agent", "stack", "kubernetes"]))
@settings(max_examples=150, deadline=None)
def test_any_text_is_judged(text: str, source: str) -> None:
    verdict = judge(Incident("x", (Signal(source, text, rank=0),)), load())  # type: ignore[arg-type]
    assert verdict.action


@pytest.mark.parametrize(
    "text",
    [
        "[rank99999999999]: ValueError: x",
        "[default88888888888]: ValueError: x",
        "srun: error: n: tasks 0-99999999999: Killed",
        "missing ranks: {1-99999999999}",
        "sent SIGKILL to ranks 0-99999999999",
        "step 99999999999999999999999 loss 1",
        '{"log": 3}',
        '{"',
        "rank : 99999999999\nexitcode : 1",
    ],
)
def test_absurd_numbers_are_judged_at_once(text: str) -> None:
    assert judge(Incident("x", (Signal("log", text), Signal("agent", text))), load()).action
