"""The verdict does not depend on the order of arrival, on duplicates, or on lost victim lines."""

from __future__ import annotations

import msgspec
import pytest
from classify_more import MORE
from classify_scenes import SCENES, Scene
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.faults.catalog import load
from everstep.faults.judge import judge
from everstep.faults.records import UNKNOWN, Incident, Signal, Verdict

ALL = SCENES + MORE
scenes = st.sampled_from(ALL)


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


def without_victims(incident: Incident, whole: Verdict, data: st.DataObject) -> Incident:
    """Some signals of victims are lost."""
    theirs = [
        signal
        for signal in incident.signals
        if signal.rank in whole.victim_ranks and signal.source in ("log", "exit")
    ]
    lost = data.draw(st.lists(st.sampled_from(theirs), unique_by=id) if theirs else st.just([]))
    left = [signal for signal in incident.signals if all(signal is not each for each in lost)]
    return with_signals(incident, left)


SURE = [scene for scene in ALL if "clock" not in scene.name]
"""Where a clock is wrong, only what victims say gives an order."""


@given(st.sampled_from(SURE), st.data())
@settings(max_examples=150, deadline=None)
def test_verdict_is_the_same_when_lines_of_victims_are_lost(
    scene: Scene, data: st.DataObject
) -> None:
    """Where the root itself is seen: a fact of a node, or an end of a process."""
    incident = scene.incident()
    whole = judge(incident, load())
    if whole.fault == UNKNOWN or load().meanings[whole.fault].kind not in ("node", "program"):
        return
    assert root(judge(without_victims(incident, whole, data), load())) == root(whole)


@given(scenes, st.data())
@settings(max_examples=150, deadline=None)
def test_f2_nobody_is_blamed_because_a_victims_lines_are_lost(
    scene: Scene, data: st.DataObject
) -> None:
    incident = scene.incident()
    whole = judge(incident, load())
    if whole.fault == UNKNOWN:
        return  # of two that name each other one alone is a witness against the other
    less = judge(without_victims(incident, whole, data), load())
    assert not set(less.root_ranks) & set(whole.victim_ranks)
    assert less.root_node in (None, whole.root_node)


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
