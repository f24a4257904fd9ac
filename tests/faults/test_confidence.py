"""A higher confidence is right more often: on incidents of which some evidence is lost."""

from __future__ import annotations

import random
from collections import defaultdict

import msgspec
from classify_more import MORE
from classify_scenes import SCENES, THREE, TWO, Scene, closed, tb
from stress_scenes import STRESS

from everstep.faults.catalog import load
from everstep.faults.confidence import EFFECTS, NONE, TOLD, WEAK
from everstep.faults.judge import judge
from everstep.faults.records import UNKNOWN, Incident


def lossy(incident: Incident, share: float, rng: random.Random) -> Incident:
    left = tuple(signal for signal in incident.signals if rng.random() >= share)
    return msgspec.structs.replace(incident, signals=left)


def test_f1_confidence_is_monotone_when_evidence_is_lost() -> None:
    rng, counts = random.Random(7), defaultdict(lambda: [0, 0])
    for scene in (*SCENES, *MORE, *STRESS):
        for share in (0.0, 0.3, 0.5, 0.7):
            verdict = judge(lossy(scene.incident(), share, rng), load())
            if verdict.fault != UNKNOWN:
                right = (verdict.fault, verdict.action) == (scene.fault, scene.action)
                counts[verdict.confidence][0] += right
                counts[verdict.confidence][1] += 1
    shares = [counts[step][0] / counts[step][1] for step in sorted(counts)]
    assert set(counts) == {EFFECTS, WEAK, TOLD}
    assert shares == sorted(shares), dict(counts)
    assert all(
        abs(share - step) <= 0.25 for step, share in zip(sorted(counts), shares, strict=True)
    )


def test_steps() -> None:
    def step(scene: Scene) -> float:
        return judge(scene.incident(), load()).confidence

    error = tb("ValueError: x")
    assert step(Scene("none", TWO, (), UNKNOWN, "")) == NONE
    assert step(Scene("told", TWO, (("log", 1, "h-a", 1.0, error),), "", "")) == TOLD
    slow = (("kernel", None, "h-a", 1.0, "nfs: server filer not responding, still trying"),)
    assert step(Scene("weak", TWO, slow, "", "")) == WEAK
    peers = (
        ("log", 0, "h-a", 1.0, closed("10.7.0.13")),
        ("log", 1, "h-b", 1.0, closed("10.7.0.13")),
    )
    assert step(Scene("peers", THREE, peers, "", "")) == EFFECTS
    assert step(Scene("signal", TWO, (("exit", 1, "h-a", 1.0, 143),), "", "")) == EFFECTS
