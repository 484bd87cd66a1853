"""Engines that keep things from one sync to the next, and what happens to them in between."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch

from rlctl.sync.calls import call
from rlctl.sync.engine import CheckpointEngine, Member
from rlctl.sync.runs import APART_NBYTES
from tests.sync.side import Side, Weights
from tests.sync.wire_cases import assert_same

Rng = random.Random


DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float64]


# Below and above what travels apart, one larger than a bucket.
SIZES = [1, 300, 5000, APART_NBYTES // 8, APART_NBYTES // 2, 200_000]


def fresh(rng: Rng, like: torch.Tensor) -> torch.Tensor:
    bits = torch.randint(0, 256, (like.nbytes,), generator=torch.Generator().manual_seed(rng.getrandbits(32)))
    return bits.to(torch.uint8).view(like.dtype).view(like.shape)


class Scene:
    """A trainer, two or three replicas, and all that can happen to them between two syncs.

    Attributes:
        source: the trainer's weights.
        targets: each replica's.
    """

    def __init__(self, rng: Rng, given: Side[CheckpointEngine], *, bound: bool) -> None:
        self.rng = rng
        self.side = given
        self.bound = bound
        self.version = 0
        self.source: Weights = {}
        for number in range(8):
            shape = (rng.choice(SIZES),)
            self.source[f"w{number}"] = fresh(rng, torch.empty(shape, dtype=rng.choice(DTYPES)))
        self.source["square"] = torch.zeros(300, 300)
        self.targets = [self.blank() for _ in given.rollouts]
        self.bind()

    @property
    def names(self) -> list[str]:
        return [name for name in self.source if name != "square"]

    def blank(self) -> Weights:
        return {name: torch.zeros_like(tensor) for name, tensor in self.source.items()}

    def bind(self) -> None:
        if not self.bound:
            return
        self.side.trainers[0].bind(self.source)
        for engine, target in zip(self.side.rollouts, self.targets, strict=True):
            engine.bind(target)

    def sync(self) -> None:
        self.version += self.rng.choice([1, 1, 5])
        self.side.sync(self.version, self.source, self.targets)
        for target in self.targets:
            assert_same(dict(sorted(self.source.items())), dict(sorted(target.items())))

    # Between two syncs

    def step(self) -> None:
        for tensor in self.source.values():
            tensor.copy_(fresh(self.rng, tensor))

    def one_stays_as_it_is(self) -> None:
        for name in self.rng.sample(self.names, 4):
            self.source[name].copy_(fresh(self.rng, self.source[name]))

    def source_moves(self) -> None:
        """Nobody is told."""
        for name in self.rng.sample(self.names, 3):
            self.source[name].data = fresh(self.rng, self.source[name])

    def targets_move(self) -> None:
        for target in self.targets:
            for name in self.rng.sample(self.names, 3):
                target[name].data = torch.zeros_like(target[name])

    def one_moves_within_its_memory(self) -> None:
        """Which is known to the transport already; on one side or both."""
        name = self.rng.choice(self.names)
        sides = self.rng.choice([[self.source], self.targets, [self.source, *self.targets]])
        memory = [weights[name].repeat(2, *[1] * (weights[name].dim() - 1)) for weights in sides]
        for half in (0, 1):
            for weights, both in zip(sides, memory, strict=True):
                weights[name].data = both.chunk(2)[half]
            for _ in range(3):
                self.step()
                self.sync()

    def source_is_another(self) -> None:
        self.source = {name: fresh(self.rng, tensor) for name, tensor in self.source.items()}
        self.bind()

    def targets_are_others(self) -> None:
        """Perhaps where others lay before."""
        number = self.rng.randrange(len(self.targets))
        self.targets[number] = {}
        self.targets[number] = self.blank()
        self.bind()

    def one_is_another(self) -> None:
        """In the same mapping, which is bound or not."""
        name = self.rng.choice(self.names)
        self.source[name] = fresh(self.rng, self.source[name])
        name = self.rng.choice(self.names)
        self.targets[0][name] = torch.zeros_like(self.source[name])

    def shapes_change(self) -> None:
        """As many bytes, in the same memory."""
        self.reshaped(lambda t: t.view(-1, 1) if t.dim() == 1 else t.view(-1))

    def shapes_change_in_place(self) -> None:
        """Of the same tensors, and nobody is told."""
        chosen = self.rng.sample(self.names, 3)
        for tensor in [weights[name] for weights in (self.source, *self.targets) for name in chosen]:
            tensor.data = tensor.data.view(-1, 1) if tensor.dim() == 1 else tensor.data.view(-1)

    def strides_change_in_place(self) -> None:
        """Of the same tensors, on one side or both."""
        for weights in self.rng.choice([[self.source], self.targets, [self.source, *self.targets]]):
            weights["square"].data = weights["square"].data.t()

    def sizes_change(self) -> None:
        name = self.rng.choice(self.names)
        shape = (self.rng.choice(SIZES),)
        self.source[name] = fresh(self.rng, torch.empty(shape, dtype=self.source[name].dtype))
        for target in self.targets:
            target[name] = torch.zeros(shape, dtype=self.source[name].dtype)
        self.bind()

    def dtypes_change(self) -> None:
        """As many bytes, in the same memory."""
        self.reshaped(lambda t: t.view(torch.int8) if t.dtype != torch.int8 else t.view(torch.uint8))

    def reshaped(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        chosen = self.rng.sample(self.names, 3)
        for weights in (self.source, *self.targets):
            weights.update({name: how(weights[name]) for name in chosen})
        self.bind()

    def names_change(self) -> None:
        """One of each side has another name, the same tensor or not."""
        name = self.rng.choice(self.names)
        for weights in (self.source, *self.targets):
            weights[name + "'"] = weights.pop(name)
        self.bind()

    def names_are_swapped(self) -> None:
        """On one side, or both, between tensors that look alike."""
        name = self.rng.choice(self.names)
        twin = f"twin of {name}"
        for weights in (self.source, *self.targets):
            weights[twin] = weights.get(twin, torch.zeros_like(weights[name]))
        self.bind()
        self.sync()
        for weights in self.rng.choice([[self.source], self.targets[:1], [self.source, *self.targets]]):
            weights[name], weights[twin] = weights[twin], weights[name]
        self.bind()
        self.sync()
        for weights in (self.source, *self.targets):
            del weights[twin]
        self.bind()

    def order_changes(self) -> None:
        """Of all but the first, too."""
        first, *others = self.source
        for names in (
            [first, *self.rng.sample(others, len(others))],
            self.rng.sample(list(self.source), len(self.source)),
        ):
            self.source = {name: self.source[name] for name in names}
            self.bind()
            self.step()
            self.sync()

    def one_more(self) -> None:
        name, like = f"more{self.version}", torch.empty(self.rng.choice(SIZES), dtype=self.rng.choice(DTYPES))
        self.source[name] = fresh(self.rng, like)
        for target in self.targets:
            target[name] = torch.zeros_like(like)
        self.bind()

    def one_less(self) -> None:
        name = self.rng.choice(self.names)
        for weights in (self.source, *self.targets):
            del weights[name]
        self.bind()

    def one_is_not_sent(self) -> None:
        """Whatever is there stays as it is."""
        name = self.rng.choice(self.names[1:])
        left = self.source.pop(name)
        before = [target[name].clone() for target in self.targets]
        for _ in range(2):
            self.step()
            self.version += 1
            self.side.sync(self.version, self.source, self.targets)
            for target, held in zip(self.targets, before, strict=True):
                assert_same(dict(sorted({**self.source, name: held}.items())), dict(sorted(target.items())))
        self.source[name] = left

    def not_bound_any_more(self) -> None:
        self.bound = not self.bound
        for engine in self.side.all:
            engine.bind({})
        self.bind()

    def shadows_take_turns(self) -> None:
        live = self.targets
        for targets in ([self.blank() for _ in live], live, live):
            self.targets = targets
            self.step()
            self.sync()

    def replica_leaves(self) -> None:
        if len(self.targets) > 1:
            number = self.rng.randrange(len(self.targets))
            self.side.rollouts[number].close()
            del self.side.rollouts[number], self.targets[number]
            self.side.sit(self.side.rollouts)

    def replica_joins(self) -> None:
        if len(self.targets) < 3:
            joining = self.side.engine(Member("rollout", 0, 1), self.side.options)
            place = self.rng.randrange(len(self.targets) + 1)
            self.targets.insert(place, self.blank())
            self.side.rollouts.insert(place, joining)
            self.side.sit(self.side.rollouts)
            self.bind()

    def replicas_change_seats(self) -> None:
        self.targets.reverse()
        self.side.sit(self.side.rollouts[::-1])

    def trainer_starts_anew(self) -> None:
        self.side.trainers[0].close()
        self.side.trainers[0] = self.side.engine(Member("trainer", 0, 1), self.side.options)
        self.bind()

    def a_sync_breaks(self) -> None:
        """In the middle: the trainer's stream ends in an error."""

        def broken() -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(self.source.items())[: len(self.source) // 2]
            raise ArithmeticError

        self.side.meet()
        engines = self.side.all
        futures = [
            call(lambda: self.side.trainers[0].send_weights(broken(), self.version + 1), "send"),
            *(
                call(lambda e=e, t=t: e.receive_into(self.version + 1, t), "receive")
                for e, t in zip(self.side.rollouts, self.targets, strict=True)
            ),
        ]
        assert isinstance(futures[0].exception(30), ArithmeticError)
        for engine in self.side.rollouts:
            engine.cancel()
        assert all(future.exception(30) for future in futures)
        for engine in engines:
            engine.finalize()
