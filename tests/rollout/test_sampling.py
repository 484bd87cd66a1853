"""The noise is uniform and independent, and tokens follow the distribution that the parameters ask for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlctl.experience.segments import RequestKey
from rlctl.rollout.embedded.noise import stream_key, uniforms
from rlctl.rollout.embedded.sampling import sample


def _noise(keys: list[RequestKey], tokens: int, seed: int = 0) -> np.ndarray:
    streams = np.array([stream_key(seed, key) for key in keys], dtype=np.uint64)
    return uniforms(streams.repeat(tokens), np.tile(np.arange(tokens), len(keys))).reshape(len(keys), tokens)


def test_noise_is_uniform_in_every_direction() -> None:
    keys = [RequestKey(o, s, t) for o in range(50) for s in range(8) for t in range(2)]
    u = _noise(keys, 64)
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.histogram(u, bins=256, range=(0, 1))[0]
    expected = u.size / 256
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi2 - 255) < 6 * math.sqrt(2 * 255)
    for axis in (0, 1):  # each request's mean over tokens, and each position's mean over requests
        mean = u.mean(axis=axis)
        assert np.abs((mean - 0.5) * math.sqrt(12 * u.shape[axis])).max() < 5


def test_neighbouring_counters_are_independent() -> None:
    base = _noise([RequestKey(o, 0) for o in range(300)], 64)
    others = {
        "token": np.roll(base, 1, axis=1),
        "ordinal": np.roll(base, 1, axis=0),
        "sample": _noise([RequestKey(o, 1) for o in range(300)], 64),
        "turn": _noise([RequestKey(o, 0, 1) for o in range(300)], 64),
        "seed": _noise([RequestKey(o, 0) for o in range(300)], 64, seed=1),
        "swapped fields": _noise([RequestKey(0, o) for o in range(300)], 64)[1:],
    }
    for name, other in others.items():
        a, b = base[-len(other) :].ravel(), other.ravel()
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(a.size), name
        assert (a == b).mean() < 1e-3, name


def test_every_field_makes_a_stream_of_its_own() -> None:
    keys = {stream_key(s, RequestKey(o, i, t)) for s in range(5) for o in range(20) for i in range(8) for t in range(3)}
    assert len(keys) == 5 * 20 * 8 * 3
    assert stream_key(2**40, RequestKey(2**50, 3)) != stream_key(2**40 + 1, RequestKey(2**50, 3))


def _sample(logits: torch.Tensor, u: torch.Tensor, *, temperature=1.0, top_p=1.0, top_k=0, plain=False):
    n = len(u)
    full = torch.full((n,), 1.0)
    return sample(logits.expand(n, -1), u, full * temperature, full * top_p, torch.full((n,), top_k), plain=plain)


def _reference(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> list[float]:
    """Probability of each id, by plain loops."""
    p = torch.softmax(logits.double() / temperature, -1).tolist()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if top_k:
        order = order[:top_k]
    total, kept, mass = sum(p[i] for i in order), [], 0.0
    for i in order:
        if kept and top_p < 1 and mass >= top_p * total:
            break
        kept.append(i)
        mass += p[i]
    return [p[i] / mass if i in kept else 0.0 for i in range(len(p))]


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(1.0, 1.0, 0), (0.5, 1.0, 0), (2.0, 1.0, 0), (1.0, 0.7, 0), (1.0, 0.01, 0), (1.0, 1.0, 3), (0.8, 0.6, 7)],
)
def test_tokens_follow_the_distribution(temperature: float, top_p: float, top_k: int) -> None:
    logits = torch.randn(23, generator=torch.Generator().manual_seed(70)) * 2
    u = (torch.arange(20000) + 0.5) / 20000  # an even grid makes the inverse of the distribution visible exactly
    tokens, logprobs = _sample(logits, u, temperature=temperature, top_p=top_p, top_k=top_k)
    share = torch.bincount(tokens, minlength=23) / 20000
    expected = _reference(logits, temperature, top_p, top_k)
    torch.testing.assert_close(share, torch.tensor(expected, dtype=torch.float32), atol=1.01e-4, rtol=0)
    assert (tokens.diff() >= 0).all()  # ids in order
    torch.testing.assert_close(logprobs, torch.log_softmax(logits / temperature, -1)[tokens], atol=1e-6, rtol=0)


def test_noise_at_its_ends_never_gives_an_impossible_token() -> None:
    ends = torch.tensor([0.0, 1 - 2.0**-24])
    for seed in range(200):
        g = torch.Generator().manual_seed(seed)
        logits = torch.randn(40, generator=g) * 5
        logits[torch.randperm(40, generator=g)[:20]] = float("-inf")
        logits[[0, -1]] = float("-inf")
        for more in ({}, {"top_k": 2}, {"top_p": 0.5}):
            tokens, logprobs = _sample(logits, ends, **more)
            assert torch.isfinite(logprobs).all(), f"{seed=}"
            assert torch.isfinite(logits[tokens]).all(), f"{seed=}"


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0, 3.0])
    tokens, logprobs = _sample(logits, torch.rand(8), temperature=0.0)
    assert tokens.tolist() == [1] * 8
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[tokens])


def test_the_plain_way_has_the_bits_of_the_full_one() -> None:
    g = torch.Generator().manual_seed(71)
    for vocab in (3, 67, 300, 1001):
        logits, u = torch.randn(9, vocab, generator=g), torch.rand(9, generator=g)
        ones, zeros = torch.ones(9), torch.zeros(9, dtype=torch.long)
        plain, full = (sample(logits, u, ones, ones, zeros, plain=p) for p in (True, False))
        assert torch.equal(plain[0], full[0])
        assert torch.equal(plain[1], full[1])
