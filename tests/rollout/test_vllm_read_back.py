"""Whole tensors from the parts that workers hold."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from rlctl.errors import RlctlError
from rlctl.rollout.vllm.read_back import whole_digests
from rlctl.sync.deadline import Deadline
from rlctl.sync.member import described
from rlctl.sync.tensor_meta import TensorMeta


class Workers:
    """An engine whose workers hold these regions: name -> [(rows, tensor)] each."""

    def __init__(self, *held: dict[str, list[tuple[slice, torch.Tensor]]]) -> None:
        self.held = held

    def call(self, method: str, arguments: tuple[str], deadline: Deadline) -> list[Any]:
        assert method == "rlctl_read"
        return [[self._region(arguments[0], *part) for part in worker.get(arguments[0], [])] for worker in self.held]

    def _region(self, name: str, rows: slice, part: torch.Tensor) -> list[Any]:
        part = part.contiguous()
        box = [[rows.start, rows.stop], *([0, size] for size in part.shape[1:])]
        return [box, TensorMeta.of(name, part).dtype, part.reshape(-1).view(torch.uint8).numpy().tobytes()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_make_the_digest_of_the_whole(dtype: torch.dtype) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    torch.manual_seed(seed)
    split, same = torch.randn(8, 3).to(dtype), torch.randn(5).to(dtype)
    targets = {name: TensorMeta.of(name, tensor) for name, tensor in {"split": split, "same": same}.items()}
    whole = {"same": [(slice(0, 5), same)]}
    one, two = {"split": [(slice(0, 4), split[:4])], **whole}, {"split": [(slice(4, 8), split[4:])], **whole}
    due = {"split": described("split", split), "same": described("same", same)}
    assert whole_digests(Workers(one, two), targets, targets, Deadline(9)) == due  # type: ignore[arg-type]
    with pytest.raises(RlctlError, match="no worker of the engine holds 12 of the 24 values of split"):
        whole_digests(Workers(one, whole), targets, ["split"], Deadline(9))  # type: ignore[arg-type]
    other = {"same": [(slice(0, 5), same + 1)]}
    with pytest.raises(RlctlError, match="different values of same"):
        whole_digests(Workers(one, other), targets, ["same"], Deadline(9))  # type: ignore[arg-type]
    with pytest.raises(RlctlError, match="holds no tensor odd"):
        whole_digests(Workers(one, two), targets, ["odd"], Deadline(9))  # type: ignore[arg-type]
