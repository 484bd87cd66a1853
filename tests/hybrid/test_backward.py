"""A loss whose backward pass runs in the engine's own context is to a script what any other tensor is."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from rlctl.errors import RlctlError
from rlctl.hybrid.backward import backward_within

Ways = dict[str, Callable[[torch.Tensor], object]]
WAYS: Ways = {
    "backward": lambda loss: loss.backward(),
    "weighed": lambda loss: (loss / 4).backward(),
    "summed": lambda loss: sum([loss * 2, loss.pow(2), torch.ones(())]).backward(),
    "in place": lambda loss: loss.mul_(3).add_(1).backward(),
    "autograd": lambda loss: torch.autograd.backward([loss]),
    "given a gradient": lambda loss: loss.backward(torch.tensor(0.25)),
    "scaled": lambda loss: torch.amp.GradScaler("cpu", init_scale=1024.0).scale(loss).backward(),
    "twice": lambda loss: (loss.backward(retain_graph=True), (2 * loss).backward()),
}


class Passes:
    """Contexts that count, and tell whether one is open."""

    def __init__(self) -> None:
        self.count = 0
        self.open = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.count += 1
        self.open = True
        yield
        self.open = False


@pytest.fixture
def weights() -> torch.Tensor:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    return torch.randn(5, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def loss_of(weights: torch.Tensor) -> torch.Tensor:
    return weights.exp().square().mean()


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_the_loss(weights: torch.Tensor, way: str) -> None:
    WAYS[way](loss_of(weights))
    expected, weights.grad = weights.grad, None
    passes, opened = Passes(), []
    weights.register_hook(lambda _: opened.append(passes.open))
    WAYS[way](backward_within(loss_of(weights), passes))
    assert expected is not None and weights.grad is not None
    assert weights.grad.allclose(expected, rtol=1e-6, atol=0.0)
    assert opened == [True] * passes.count == [True] * (2 if way == "twice" else 1)
    assert not passes.open


@pytest.mark.parametrize("way", WAYS)
def test_what_the_context_raises_is_what_the_script_sees(weights: torch.Tensor, way: str) -> None:
    @contextmanager
    def within() -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RlctlError("rank 1 holds all up") from error

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("gone")

    weights.register_hook(fail)
    with pytest.raises(RlctlError, match="rank 1 holds all up"):
        WAYS[way](backward_within(loss_of(weights), within))


def test_each_of_several_losses_has_a_pass_of_its_own(weights: torch.Tensor) -> None:
    passes = Passes()
    first, second = (backward_within(loss_of(weights * k), passes) for k in (1, 2))
    (first + 3 * second).backward()
    found, weights.grad = weights.grad, None
    (loss_of(weights) + 3 * loss_of(weights * 2)).backward()
    assert found is not None and weights.grad is not None
    assert found.allclose(weights.grad, rtol=1e-6, atol=0.0)
    assert passes.count == 2


def test_it_reads_like_a_tensor(weights: torch.Tensor) -> None:
    plain = loss_of(weights)
    loss = backward_within(plain, Passes())
    assert type(loss) is torch.Tensor and loss.requires_grad and not loss.is_leaf
    assert loss.item() == plain.item() == float(loss.detach()) == float(f"{loss:.20f}")
    assert str(loss).startswith(str(plain).split(",")[0])
    assert not loss.detach().requires_grad
    assert loss.dtype == plain.dtype and loss.shape == plain.shape


def test_without_a_graph_there_is_nothing_to_do(weights: torch.Tensor) -> None:
    with torch.no_grad():
        plain = loss_of(weights)
        assert backward_within(plain, Passes()) is plain


def test_what_a_pass_used_is_freed_as_without(weights: torch.Tensor) -> None:
    loss = backward_within((kept := weights.exp()).square().mean(), Passes())
    kept = weakref.ref(kept)
    loss.backward(retain_graph=True)
    assert kept() is not None
    loss.backward()
    assert kept() is None
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_gradient_has_no_graph_of_its_own(weights: torch.Tensor) -> None:
    backward_within(loss_of(weights), Passes()).backward(torch.ones(()), retain_graph=True, create_graph=True)
    assert weights.grad is not None
    with pytest.raises(RuntimeError, match="does not require grad"):
        weights.grad.sum().backward()
