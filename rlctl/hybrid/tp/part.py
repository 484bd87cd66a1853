"""Which part of a model one tensor-parallel rank runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlctl.rollout.embedded.fused_weights import FusedShape
from rlctl.sync.sharding import split_box
from rlctl.sync.weights import Split


@dataclass(frozen=True)
class Part:
    """One rank's share: whole heads, a stretch of the feed-forward, a stretch of the vocabulary.

    The cuts are those of ``sync.layout.ParallelLayout(tp=size, whole_vocab=..., fused=True)``; where ``size`` does not
    divide heads or feed-forward they are those with ``padded=True``: parts that are smaller than others end in zeros,
    which change no sum.

    Attributes:
        whole: sizes of the model.
        rank, size: of the replica's ranks.
        whole_vocab: embedding and head are not cut.
    """

    whole: FusedShape
    rank: int
    size: int
    whole_vocab: bool = False

    @property
    def shape(self) -> FusedShape:
        """Sizes of this rank's share with its zeros. A key-value head that there are not enough of is on several
        ranks."""
        s = self.whole
        low, high = self.vocabulary
        kv = Split("kv", 0, s.kv_heads)
        return replace(
            s,
            heads=_most(Split("even", 0, s.heads, s.kv_heads), s.heads, self.size),
            kv_heads=_most(kv, s.kv_heads, self.size),
            ffn=_most(Split("even", 0, s.ffn), s.ffn, self.size),
            vocab=high - low,
        )

    @property
    def rows(self) -> int:
        """Most token ids of any rank."""
        return self.whole.vocab if self.whole_vocab else -(-self.whole.vocab // self.size)

    @property
    def vocabulary(self) -> tuple[int, int]:
        """First token id of this rank, and the one after its last; the last ranks may have fewer, or none."""
        if self.whole_vocab:
            return 0, self.whole.vocab
        low, high = (min(place * self.rows, self.whole.vocab) for place in (self.rank, self.rank + 1))
        return low, high


def _most(split: Split, count: int, size: int) -> int:
    """Return how many of ``count`` the first of ``size`` ranks has."""
    (low, high), *_ = split_box(((0, count),), split, 0, size, 1, "", padded=True)
    return high - low
