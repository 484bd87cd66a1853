"""Items of reasoning-gym by number, and what a response to one earns. Importing this needs the package."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import msgspec

from rlctl.tasks.final_part import final_part
from rlctl.tasks.packages import need

_GYM = need("reasoning_gym", "reasoning-gym", "a task of reasoning_gym")
# "composite" is made of others, which would have to be named.
NAMES: list[str] = sorted(set(_GYM.factory.DATASETS) - {"composite"})
VERSION: str = _GYM.__version__
_ANSWER = re.compile(r".*<answer>(.*?)</answer>", re.DOTALL)


class Place(msgspec.Struct, frozen=True):
    """Where an item comes from: it is made anew from this wherever it is needed."""

    name: str
    seed: int


@lru_cache(maxsize=4096)
def item(place: Place) -> tuple[Any, dict[str, Any]]:
    """Return the data set of one item and the item. Equal places give equal items."""
    # One item with a seed of its own: some data sets keep lists as long as they are.
    data = _GYM.create_dataset(place.name, seed=place.seed, size=1)
    return data, data[0]


def score(prompt: str, response: str, answer: str) -> float:  # noqa: ARG001
    """Return what reasoning-gym gives for a response: for its last ``<answer>`` if it has one, else its final part.

    Args:
        answer: the place of the item, as JSON.
    """
    data, entry = item(msgspec.json.decode(answer, type=Place))
    text = final_part(response)
    if marked := _ANSWER.match(text):
        text = marked[1].strip()
    return float(data.score_answer(text, entry))
