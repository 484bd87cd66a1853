"""Streams of tensors that a transport must carry exactly, shared by the tests of this room."""

from __future__ import annotations

import torch

DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool,
          torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]  # fmt: skip


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random bits, so NaN payloads, infinities and -0.0 are among them."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.empty((), dtype=dtype).element_size()
    count = int(torch.Size(shape).numel())
    bits = torch.randint(0, 256, (count * size,), generator=generator, dtype=torch.uint8)
    return bits.view(dtype).view(shape)


def hard_tensors(seed: int, content: int = 0) -> dict[str, torch.Tensor]:
    """Zero-size, scalar, non-contiguous, odd lengths of mixed dtypes, and sizes around and above small buckets.

    ``content``: other bits in the same shapes.
    """
    shapes = torch.Generator().manual_seed(seed)
    g = torch.Generator().manual_seed(seed + 1000 * content)
    tensors: dict[str, torch.Tensor] = {
        "empty": torch.empty(0, 4),
        "scalar": random_tensor((), torch.bfloat16, g),
        "transposed": random_tensor((5, 7), torch.float32, g).t(),
        "strided": random_tensor((64, 6), torch.bfloat16, g)[:, ::2],
        "expanded": random_tensor((1, 3), torch.float16, g).expand(4, 3),
        "conjugate": random_tensor((3,), torch.complex64, g).conj(),
        "parameter": torch.nn.Parameter(torch.randn(3, 3, generator=g)),
        "large": random_tensor((40, 101), torch.float32, g),
        "large transposed": random_tensor((77, 60), torch.bfloat16, g).t(),
        "last empty": torch.empty(3, 0, 2, dtype=torch.int64),
    }
    for i in range(40):
        dtype = DTYPES[int(torch.randint(len(DTYPES), (), generator=shapes))]
        odd = 2 * int(torch.randint(0, 400, (), generator=shapes)) + 1
        tensors[f"odd.{i}"] = random_tensor((odd,), dtype, g)
    return tensors


def blank(seed: int, content: int = 0) -> dict[str, torch.Tensor]:
    """Targets for ``hard_tensors(seed)``, in other memory layouts."""
    targets = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in hard_tensors(seed).items()}
    targets["large"] = torch.zeros(101, 40).t()
    targets["parameter"] = torch.nn.Parameter(torch.zeros(3, 3))
    return targets


def bits(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes, in element order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(sent: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    """Names in order, dtypes, shapes and bits."""
    assert list(got) == list(sent)
    for name, tensor in sent.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert bits(got[name]) == bits(tensor), name


def wider(seed: int, content: int = 0) -> dict[str, torch.Tensor]:
    """Targets of which some have a wider dtype than what is sent."""
    targets = blank(seed, content)
    return {n: t.double() if t.dtype in (torch.float32, torch.bfloat16) else t for n, t in targets.items()}


def wrong_shape(seed: int) -> dict[str, torch.Tensor]:
    """Targets of which one has another shape."""
    return {**blank(seed), "large": torch.zeros(101, 40)}


def other_names(seed: int) -> dict[str, torch.Tensor]:
    """Targets that lack three of the names that are sent, and have five of their own."""
    targets = {n: t for n, t in blank(seed).items() if n not in ("odd.1", "odd.2", "odd.3")}
    return {**targets, **{f"own.{i}": torch.zeros(3) for i in range(5)}}
