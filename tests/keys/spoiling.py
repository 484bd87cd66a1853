"""Ways to spoil a JSON text, a pickle, an archive or plain bytes, mostly where their structure says it hurts."""

from __future__ import annotations

import io
import json
import pickle
import random
import zipfile
from copy import deepcopy
from typing import Any

WORDS: list[Any] = [
    None, True, -1, 0, 1, 3, 7, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**400, 0.5, 1e308, "", "x", "F32", "F64", "F4",
    "BF16", "llama", "../up.safetensors", "/etc/passwd", "a\0b", "x" * 5000, "é\u202e", "\ud800", [], {}, [[]], [0],
    [1, -1], [2**40, 2**40], {"a": {}}, "__metadata__", "model.safetensors.index.json", ".", "/dev/zero",
]  # fmt: skip
EVIL = [
    b"cos\nsystem\n(X\x04\x00\x00\x00trueR", b"cbuiltins\neval\nX\x01\x00\x00\x001\x85R",
    b"cnumpy.core.multiarray\n_reconstruct\n)R", b"cposix\nsystem\n", b"\x8c\x02os\x8c\x06system\x93", b"(" * 3000,
    b"r\xff\xff\xff\x7f", b"X\xff\xff\xff\x7f", b"h\x00h\x00\x86q\x00" * 50, b"\x8d" + b"\xff" * 8,
]  # fmt: skip


def spoil_json(value: Any, rng: random.Random) -> tuple[bytes, str]:
    """Change, remove or double one to three places of a JSON value, or its text; return the text and what was done."""
    value = json.loads(json.dumps(value))
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = list(_places(value))
        if not places:
            break
        parent, key = rng.choice(places)
        if rng.random() < 0.15:
            del parent[key]
            done.append(f"without {key!r:.40}")
            continue
        new = deepcopy(rng.choice(WORDS))
        if isinstance(parent, dict) and rng.random() < 0.15:
            parent[str(new)] = parent.pop(key)
            done.append(f"{key!r:.40} renamed {new!r:.40}")
        else:
            parent[key] = new
            done.append(f"{key!r:.40} = {str(new)[:40]!r}")
    text = json.dumps(value)
    choice = rng.random()
    if choice < 0.05 and text.startswith("{") and len(text) > 2:
        text = "{" + text[1:-1] + ", " + text[1:]
        done.append("all doubled")
    elif choice < 0.1:
        text = text.replace("[", "[" * 3000, 1)
        done.append("nested")
    elif choice < 0.15:
        text = text.replace("1", "NaN", 1)
        done.append("NaN")
    return text.encode("utf-8", "surrogatepass"), "; ".join(done)


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


def spoil_bytes(data: bytes, rng: random.Random, *, within: int) -> tuple[bytes, str]:
    """Cut, grow, flip, overwrite or repeat bytes, mostly among the first ``within``."""
    at = rng.randrange(max(min(within, len(data)), 1))
    what = rng.choice(["cut", "grow", "flip", "fill", "insert", "repeat"])
    if what == "cut":
        data = data[: rng.choice([at, rng.randrange(len(data) + 1)])]
    elif what == "grow":
        data += bytes(rng.randint(1, 50))
    elif what == "flip":
        changed = bytearray(data)
        for _ in range(rng.choice([1, 1, 4, 16])):
            changed[rng.randrange(max(min(within, len(data)), 1))] ^= 1 << rng.randrange(8)
        data = bytes(changed)
    elif what == "fill":
        count = rng.choice([1, 2, 4, 8])
        data = data[:at] + bytes([rng.choice([0, 127, 255])]) * count + data[at + count :]
    elif what == "insert":
        data = data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at:]
    else:
        data = data[:at] + data[at // 2 : at] + data[at:]
    return data, f"{what} at {at}"


def spoil_pickle(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Splice an attack into a pickle, change a number or a word of it, or damage its bytes."""
    choice = rng.random()
    if choice < 0.4:
        at, evil = rng.randrange(len(data)), rng.choice(EVIL)
        return data[:at] + evil + data[at:], f"spliced {evil[:12]!r} at {at}"
    if choice < 0.5:
        return pickle.dumps(rng.choice([w for w in WORDS if w != "\ud800"]), rng.randint(2, 5)), "another value"
    if choice < 0.7:
        old = rng.choice(
            [b"K\x00", b"K\x03", b"K\x05", b".distcp", b"float32", b"offset", b"Metadata", b"storage", b"cpu"]
        )
        new = rng.choice(
            [b"K\xff", b"N", b"J\xff\xff\xff\xff", b"J\xff\xff\xff\x7f", b"../..xy", b"float64", b"\x89", b""]
        )
        at = data.find(old, rng.randrange(len(data)))
        at = at if at >= 0 else data.find(old)
        return data[:at] + new + data[at + len(old) :] if at >= 0 else data[:-1], f"{old!r} -> {new!r}"
    return spoil_bytes(data, rng, within=len(data))


def spoil_archive(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Damage the pickle inside a file of torch.save, or the bytes of the archive."""
    if rng.random() < 0.4:
        return spoil_bytes(data, rng, within=len(data))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    name = next(n for n in records if n.endswith("data.pkl"))
    records[name], what = spoil_pickle(records[name], rng)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for record, content in records.items():
            archive.writestr(record, content)
    return out.getvalue(), what
