"""A state that does not fit is refused with every difference named, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from state_cases import content, cut, put_back
from torch import nn

from everstep.core.layout import RankState
from everstep.errors import CorruptObject, RestoreError, StateMismatch
from everstep.state import restore
from everstep.state.inspect import Attached


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))


def job(module: nn.Module) -> dict[str, object]:
    return {"model": module, "optimizer": torch.optim.SGD(module.parameters(), lr=0.1)}


def tie(module: nn.Sequential) -> None:
    module.append(nn.Linear(3, 3))
    module[3].weight = module[2].weight


CHANGES: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "missing": (lambda m: m.__delitem__(2), r"missing: model\.2\.weight is in the state"),
    "new": (lambda m: m.append(nn.Linear(1, 1)), r"new: model\.3\.weight is in the module"),
    "shape": (
        lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(3, 5))),
        r"changed: model\.0\.weight had shape \(3, 2\) and has \(3, 5\)",
    ),
    "dtype": (
        lambda m: m[0].half(),
        r"changed: model\.0\.weight had dtype float32 and has float16",
    ),
    "tied": (
        lambda m: setattr(m[0], "bias", m[2].bias),
        r"changed: model\.2\.bias is tied to model\.0\.bias and was not",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_modules_are_refused_by_name(name: str) -> None:
    saved = cut(Attached(job(model())))
    change, message = CHANGES[name]
    other = model()
    change(other)
    before = content(dict(other.named_parameters()))
    with pytest.raises(StateMismatch, match=message):
        put_back(Attached(job(other)), saved)
    assert content(dict(other.named_parameters())) == before


def test_a_tie_that_is_gone_is_refused() -> None:
    """Tied weights are stored once; loading them into two tensors would go unnoticed at first."""
    tied, untied = model(), model()
    tie(tied)
    untied.append(nn.Linear(3, 3))
    saved = cut(Attached(job(tied)))
    with pytest.raises(StateMismatch, match=r"model\.3\.weight was tied to model\.2\.weight"):
        put_back(Attached(job(untied)), saved)


def test_objects_that_are_missing_new_or_others_are_named() -> None:
    module = model()
    saved = cut(Attached(job(module)))
    with pytest.raises(StateMismatch, match=r"missing: optimizer \(SGD\)"):
        put_back(Attached({"model": module}), saved)
    with pytest.raises(StateMismatch, match=r"new: ema \(Linear\)"):
        put_back(Attached({**job(module), "ema": nn.Linear(1, 1)}), saved)
    adam = torch.optim.AdamW(module.parameters())
    with pytest.raises(StateMismatch, match="optimizer was a SGD and is a AdamW"):
        put_back(Attached({"model": module, "optimizer": adam}), saved)


def test_parameters_that_moved_in_an_optimizer_are_named() -> None:
    module = model()
    saved = cut(Attached(job(module)))
    fewer = torch.optim.SGD(list(module.parameters())[1:], lr=0.1)
    with pytest.raises(StateMismatch, match=r"param_groups\.0 lost model\.0\.weight"):
        put_back(Attached({"model": module, "optimizer": fewer}), saved)
    turned = torch.optim.SGD(list(module.parameters())[::-1], lr=0.1)
    with pytest.raises(StateMismatch, match="another order"):
        put_back(Attached({"model": module, "optimizer": turned}), saved)
    halves = [{"params": [p]} for p in module.parameters()]
    split = torch.optim.SGD(halves, lr=0.1)
    with pytest.raises(StateMismatch, match="had 1 param_groups and has 6"):
        put_back(Attached({"model": module, "optimizer": split}), saved)


def test_many_differences_are_counted_instead_of_listed() -> None:
    deep = nn.Sequential(*(nn.Linear(1, 1) for _ in range(30)))
    saved = cut(Attached({"model": deep}))
    with pytest.raises(StateMismatch, match="and 38 more"):
        put_back(Attached({"model": nn.Sequential(nn.Linear(1, 1))}), saved)


def test_buffers_outside_the_state_dict_may_differ() -> None:
    old, new = model(), model()
    old.register_buffer("cache", torch.ones(3), persistent=False)
    new.register_buffer("rope", torch.ones(2), persistent=False)
    put_back(Attached({"model": new}), cut(Attached({"model": old})))
    assert content(dict(new.named_parameters())) == content(dict(old.named_parameters()))


class Stubborn:
    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, _state: dict[str, int]) -> None:
        raise KeyError("m")


def test_an_object_that_refuses_its_state_is_named() -> None:
    saved = cut(Attached({"sampler": Stubborn()}))
    with pytest.raises(RestoreError, match=r"sampler \(Stubborn\) refused.*KeyError"):
        put_back(Attached({"sampler": Stubborn()}), saved)


def test_a_damaged_record_is_an_error_and_never_state() -> None:
    saved = cut(Attached({"model": model()}))
    state = msgspec.msgpack.decode(saved.state, type=RankState)
    with pytest.raises(CorruptObject, match="step 0"):
        restore.decode(msgspec.structs.replace(state, objects=state.objects[:-3]))


def test_targets_change_nothing_before_they_are_filled() -> None:
    module = model()
    saved = cut(Attached(job(module)))
    with torch.no_grad():
        module[0].weight.fill_(3.0)
    attached = Attached(job(module))
    before = content(dict(module.named_parameters()))
    state = msgspec.msgpack.decode(saved.state, type=RankState)
    restore.targets(attached, state, restore.decode(state))
    assert content(dict(module.named_parameters())) == before
