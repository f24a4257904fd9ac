"""Root and victims in whole incidents (the ten rules), and F1 and F2."""

from __future__ import annotations

import pytest
from classify_more import MORE
from classify_scenes import SCENES, Scene
from stress_scenes import STRESS

from everstep.faults.catalog import load
from everstep.faults.judge import judge


@pytest.mark.parametrize("scene", SCENES + MORE + STRESS, ids=lambda scene: scene.name)
def test_scene_has_its_root(scene: Scene) -> None:
    verdict = judge(scene.incident(), load())
    found = (verdict.fault, verdict.action, verdict.root_ranks, verdict.root_node)
    assert found == (scene.fault, scene.action, scene.ranks, scene.node)


@pytest.mark.parametrize("scene", SCENES + MORE + STRESS, ids=lambda scene: scene.name)
def test_f2_no_rank_is_root_and_victim(scene: Scene) -> None:
    verdict = judge(scene.incident(), load())
    assert not set(verdict.root_ranks) & set(verdict.victim_ranks)
