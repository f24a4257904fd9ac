"""R1 and R4 for bytes: every dtype, stride and shape reaches the payload and comes back."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_cases import content, cut, optimizer_content, put_back
from torch import nn
from torch.optim.swa_utils import AveragedModel

from everstep.errors import StateMismatch, UnsavableObject
from everstep.state import plan
from everstep.state.capture import Capture
from everstep.state.inspect import Attached

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support:UserWarning",
    "ignore:TypedStorage:UserWarning",
    "ignore:.*quantized tensor:UserWarning",
)

EVERY = sorted({held for held in vars(torch).values() if isinstance(held, torch.dtype)}, key=str)
"""As torch itself lists them: one that a later torch adds fails here until it is thought of."""
QUANTIZED = [dtype for dtype in EVERY if str(dtype).startswith(("torch.qint", "torch.quint"))]
DTYPES = [dtype for dtype in EVERY if dtype not in QUANTIZED]


class Bag:
    """A user's object: whatever it was given, by name."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


class Buffers(nn.Module):
    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """All bit patterns, NaNs with payloads among them; 0 and 1 for bool."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    top = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, top, (*shape, size), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_round_trips_in_buffers_and_objects(dtype: torch.dtype) -> None:
    def make(seed: int) -> tuple[Buffers, Bag]:
        tall = random_bits((6, 5), dtype, seed)
        tensors = {
            "dense": random_bits((3, 4), dtype, seed + 1),
            "transposed": tall.t(),
            "strided": tall[::2, 1::3],
            "scalar": random_bits((), dtype, seed + 2),
            "empty": random_bits((0, 3), dtype, seed),
        }
        return Buffers(**tensors), Bag(x=random_bits((2, 2), dtype, seed + 3))

    module, bag = make(1)
    before = content([dict(module.named_buffers()), bag.values])
    saved = cut(Attached({"module": module, "bag": bag}))
    other, fresh = make(50)
    homes = {name: tensor.data_ptr() for name, tensor in other.named_buffers()}
    put_back(Attached({"module": other, "bag": fresh}), saved)
    assert content([dict(other.named_buffers()), fresh.values]) == before
    assert {name: tensor.data_ptr() for name, tensor in other.named_buffers()} == homes


def per_tensor(dtype: torch.dtype, seed: int, *shape: int) -> torch.Tensor:
    made = torch._empty_affine_quantized(
        shape, scale=0.1 + seed / 7, zero_point=seed % 3, dtype=dtype
    )
    return filled(made, seed)


def per_channel(dtype: torch.dtype, seed: int, axis: int, zeros: torch.dtype) -> torch.Tensor:
    shape = (3, 5)
    scales = torch.rand(shape[axis], generator=torch.Generator().manual_seed(seed)) + 0.1
    points = torch.full_like(scales, seed % 3).to(zeros)
    made = torch._empty_per_channel_affine_quantized(
        shape, scales=scales, zero_points=points, axis=axis, dtype=dtype
    )
    return filled(made, seed)


def filled(made: torch.Tensor, seed: int) -> torch.Tensor:
    """All bit patterns in its memory. (``torch.quantize_per_channel`` cannot make every tensor that
    there is: with qint32 and float zero points it ends the process.)"""
    memory = torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage())
    memory.copy_(random_bits(tuple(memory.shape), torch.uint8, seed))
    return made


class Holder(Buffers):
    """A module with buffers and a frozen parameter of a quantized dtype."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        ints, floats = torch.int64, torch.float32
        tensors = {
            "whole": per_tensor(dtype, seed, 3, 5),
            "empty": per_tensor(dtype, seed, 0, 3),
            "scalar": per_tensor(dtype, seed),
            **{f"axis{a}": per_channel(dtype, seed + a, a, ints) for a in range(2)},
            "float_zeros": per_channel(dtype, seed + 3, 0, floats),
        }
        super().__init__(**tensors, tied=tensors["whole"])
        frozen = per_tensor(dtype, seed + 4, 2, 4)
        self.frozen = nn.Parameter(frozen, requires_grad=False)
        self.register_buffer("passing", per_tensor(dtype, seed + 5, 4), persistent=False)


def test_the_quantized_dtypes_are_those_that_torch_makes() -> None:
    assert {str(dtype) for dtype in QUANTIZED} == {
        f"torch.{name}" for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
    }


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_every_quantized_dtype_round_trips_wherever_it_stands(dtype: torch.dtype) -> None:
    """In modules, in a copy of one as EMAs keep it, in objects and in an optimizer's state."""

    def make(seed: int) -> tuple[dict[str, Any], Callable[[], Any]]:
        module, other = Holder(dtype, seed), Holder(dtype, seed + 1)
        # torch copies no parameter whose elements share bytes.
        averaged = nn.Sequential(other) if "x" in str(dtype) else AveragedModel(other)
        bag = Bag(x=[per_tensor(dtype, seed + 2, 3, 3), nn.Parameter(module.axis1, False)])
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        optimizer.state[optimizer.param_groups[0]["params"][0]] = {
            "ema": per_tensor(dtype, seed + 3, 6),
            "plain": torch.full((2,), float(seed)),
        }
        objects = {"module": module, "averaged": averaged, "bag": bag, "optimizer": optimizer}
        return objects, lambda: [
            [dict(m.named_parameters()) | dict(m.named_buffers()) for m in (module, averaged)],
            bag.values,
            optimizer_content(optimizer),
        ]

    saved_objects, now = make(1)
    before = content(now())
    saved = cut(Attached(saved_objects))
    assert content(now()) == before
    objects, now = make(20)
    assert content(now()) != before
    put_back(Attached(objects), saved)
    assert content(now()) == before
    module, values = objects["module"], objects["bag"].values["x"]
    assert module.tied is module.whole
    assert type(module.frozen) is nn.Parameter
    assert [type(value) for value in values] == [torch.Tensor, nn.Parameter]


def test_a_strided_quantized_tensor_keeps_its_elements() -> None:
    bag = Bag(x=per_tensor(torch.qint8, 1, 4, 6).t())
    before = content(bag.values["x"].contiguous())
    other = Bag(x=0)
    put_back(Attached({"bag": other}), cut(Attached({"bag": bag})))
    assert content(other.values["x"]) == before


def test_a_view_into_packed_integers_is_refused_by_name() -> None:
    """Its elements share bytes with others, so no tensor of their own can be made of them."""
    whole = per_tensor(torch.quint4x2, 1, 4, 6)
    for part in (whole.t(), whole[1:]):
        with pytest.raises(UnsavableObject, match=r"bag\.deep\.x.*quint4x2.*shares bytes"):
            Attached({"bag": Bag(deep={"x": part})}).check()


def test_a_torch_that_makes_no_quantized_tensors_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Buffers(q=per_tensor(torch.qint8, 1, 2))
    monkeypatch.delattr(torch, "_empty_affine_quantized")
    with pytest.raises(UnsavableObject, match=r"m\.q .*qint8.*no way to make it again"):
        Attached({"m": module}).check()


def test_quantizing_a_buffer_since_the_cut_is_a_difference() -> None:
    plain = {"q": torch.zeros(4, dtype=torch.int8)}
    integers = Buffers(q=per_tensor(torch.qint8, 1, 4))
    for saved, other in ((Buffers(**plain), integers), (integers, Buffers(**plain))):
        with pytest.raises(StateMismatch, match=r"m\.q is (not )?quantized now"):
            put_back(Attached({"m": other}), cut(Attached({"m": saved})))
    wider = Buffers(q=per_tensor(torch.qint8, 1, 5))
    with pytest.raises(StateMismatch, match="shape"):
        put_back(Attached({"m": wider}), cut(Attached({"m": integers})))


def test_conjugated_negated_and_expanded_tensors_round_trip() -> None:
    def make(seed: int) -> Buffers:
        values = torch.randn(3, 2, dtype=torch.complex64, generator=torch.manual_seed(seed))
        row = torch.randn(1, 4, generator=torch.manual_seed(seed))
        return Buffers(conj=values.conj(), neg=values.conj().imag, wide=row.expand(5, 4))

    module, other = make(1), make(2)
    assert module.conj.is_conj()
    assert module.neg.is_neg()
    before = content(dict(module.named_buffers()))
    put_back(Attached({"module": other}), cut(Attached({"module": module})))
    assert content(dict(other.named_buffers())) == before


def payload_for(attached: Attached) -> tuple[Capture, memoryview]:
    live = attached.resolve(0)
    layout = plan.plan_layout(live.held, world=1, rank=0, node_of_rank=(0,))
    return Capture(live, layout), memoryview(mmap.mmap(-1, layout.payload_bytes))


def test_snapshot_never_aliases_live_tensors() -> None:
    """Known defect "CPU tensors aliased by the copy" (pytorch#144657): training on after a cut
    must not change the cut."""
    module = nn.Linear(4, 4)
    capture, payload = payload_for(Attached({"model": module}))
    live = Attached({"model": module}).resolve(0)
    capture.copy_into(payload, live)
    before = bytes(payload)
    with torch.no_grad():
        module.weight.fill_(7)
    assert bytes(payload) == before


@pytest.mark.parametrize("how", ["data", "parameter", "set_", "shape"])
def test_replaced_tensor_is_never_stale(how: str) -> None:
    """Known defect "a cached layout re-saves old bytes" (NeMo-RL#3312)."""
    module = nn.Linear(3, 2)
    attached = Attached({"model": module})
    capture, payload = payload_for(attached)
    capture.copy_into(payload, attached.resolve(0))
    new = torch.full((2, 3), 5.0)
    if how == "data":
        module.weight.data = new
    elif how == "parameter":
        module.weight = nn.Parameter(new)
    elif how == "set_":
        with torch.no_grad():
            module.weight.set_(new)
    else:
        module.weight = nn.Parameter(torch.full((4, 3), 5.0))
    live = attached.resolve(1)
    if how == "shape":
        assert not capture.matches(live)
        return
    assert capture.matches(live)
    capture.copy_into(payload, live)
    at = next(e for e in capture.layout.extents if e.fqn == "model.weight").payload_offset
    assert torch.frombuffer(payload, dtype=torch.float32, count=6, offset=at).eq(5).all()


def test_two_payloads_take_turns() -> None:
    module = nn.Linear(2, 2)
    attached = Attached({"model": module})
    capture, first = payload_for(attached)
    second = memoryview(mmap.mmap(-1, len(first)))
    for value, payload in enumerate([first, second, first, second]):
        with torch.no_grad():
            module.weight.fill_(value)
            module.bias.fill_(value)
        capture.copy_into(payload, attached.resolve(value))
        floats = torch.frombuffer(payload, dtype=torch.float32)
        assert set(floats.tolist()) - {0.0} == ({float(value)} - {0.0})


def test_a_short_payload_is_refused_before_anything_is_written() -> None:
    attached = Attached({"model": nn.Linear(8, 8)})
    capture, payload = payload_for(attached)
    with pytest.raises(ValueError, match="bytes"):
        capture.copy_into(payload[:-64], attached.resolve(0))
    assert not any(payload)


def test_released_payloads_can_be_unmapped() -> None:
    attached = Attached({"model": nn.Linear(2, 2)})
    live = attached.resolve(0)
    layout = plan.plan_layout(live.held, world=1, rank=0, node_of_rank=(0,))
    memory = mmap.mmap(-1, layout.payload_bytes)
    capture = Capture(live, layout)
    capture.copy_into(memoryview(memory), live)
    capture.release()
    memory.close()
    assert memory.closed


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.eye(3).to_sparse(), "layout"),
        (torch.empty(3, device="meta"), "meta"),
    ],
    ids=["sparse", "meta"],
)
def test_tensors_without_bytes_are_refused_by_name(tensor: torch.Tensor, reason: str) -> None:
    with pytest.raises(UnsavableObject, match=rf"bag\.deep\.x.*{reason}"):
        Attached({"bag": Bag(deep={"x": tensor})}).check()


def test_lazy_parameters_are_refused_until_they_have_a_shape() -> None:
    module = nn.LazyLinear(3)
    with pytest.raises(UnsavableObject, match="first forward"):
        Attached({"model": module}).check()
    module(torch.ones(1, 2))
    Attached({"model": module}).check()


def test_views_of_one_storage_are_kept_apart() -> None:
    base = torch.arange(12.0)
    module = Buffers(whole=base, part=base[:6], again=base[:6], flat=base.view(3, 4))
    live = Attached({"m": module}).resolve(0)
    assert live.aliases == {"m.again": "m.part"}
    other = Buffers(**{n: torch.zeros_like(t) for n, t in module.named_buffers()})
    other.again = other.part
    put_back(Attached({"m": other}), cut(Attached({"m": module})))
    assert content(other._buffers) == content(module._buffers)
