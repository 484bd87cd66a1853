"""A record made up, and its list of digests written anew."""

import hashlib
import json
import secrets

import numpy as np

from rlctl.experience.figures import figures_out
from rlctl.experience.records.columns import to_columns
from rlctl.experience.records.manifest import (
    BATCH,
    MANIFEST,
    SUMS,
    EventRange,
    GroupInfo,
    Manifest,
    RoundInfo,
)
from rlctl.experience.records.writing import write_bundle, write_config

from .rows import random_round


def written(folder, step=3, seed=None):
    """Write the record of a step of two rounds, and return its rounds."""
    seed = secrets.randbits(32) if seed is None else seed
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    scored = bool(rng.random() < 0.5)
    rounds = [random_round(rng, 6, scored=scored), random_round(rng, 4, first=3, scored=scored)]
    document = json.dumps({"config": {"run": {"seed": step}}}).encode()
    (folder / "config.json").write_bytes(document)
    records = folder / "records"
    columns, replicas = to_columns(rounds)
    infos = [
        RoundInfo(
            groups=[GroupInfo(row.group, 1, "a", "", 3) for row in one.rows[::2]],
            mini_batches=[list(range(len(one.rows)))],
            micro_batches=[[[list(range(len(one.rows)))]]],
            metrics=figures_out({"loss": 0.1, "grad_norm": float("inf")}),
            kl_coef=0.5,
            kl_coef_after=0.25,
        )
        for one in rounds
    ]
    manifest = Manifest(
        schema=1,
        rlctl_version="0",
        step=step,
        version=step,
        attempt=0,
        mode="sync",
        config_sha256=write_config(records, document),
        fingerprint={"threads": 1},
        layout={},
        total_steps=9,
        events=EventRange(0, 1, "x"),
        checkpoint=None,
        rounds=infos,
        replicas=replicas,
        decisions=[],
        params_sha256="y",
        critic_sha256="",
        state_sha256={},
        metrics=figures_out({"loss": float("nan")}),
    )
    write_bundle(records, manifest, columns)
    return rounds


def resummed(place):
    """Have a record's list of digests fit its files, as a careful forger would."""

    lines = [f"{hashlib.sha256((place / name).read_bytes()).hexdigest()}  {name}\n" for name in (BATCH, MANIFEST)]
    (place / SUMS).write_text("".join(lines))
