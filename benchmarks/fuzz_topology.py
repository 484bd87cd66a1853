"""Damaged dumps, configurations and environments against ``rlctl topology``: an answer or an error a user can read.

    python benchmarks/fuzz_topology.py --cases 20000 --seed 1

Every case is derived from its number alone, so that one that fails can be run again (``--first N --cases 1``). Any
exception but the errors of rlctl is a fault.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from rlctl.errors import RlctlError
from rlctl.hardware.link_graph import NodeGraph
from rlctl.hardware.rules.nccl_names import RETIRED, known_names
from rlctl.hardware.topo_dump import parse_topo
from rlctl.hardware.topo_table import topo_table
from rlctl.keys.presets import preset_config, preset_names
from rlctl.ops.environment_report import shown_variables
from rlctl.ops.planned_model import planned_model
from rlctl.ops.topology_checks import Surroundings, run_checks
from rlctl.ops.topology_merge import facts_of
from rlctl.ops.topology_sources import Request, read_request
from rlctl.ops.topology_summary import summarise

DUMPS = Path(__file__).parents[1] / "tests" / "hardware" / "dumps"
_CHARACTERS = "\t\t  \n\r\x1b[4mGPUNICXSYNODE0123456789,-/:_^=;.#\x00é٣²\ud800"
_WORDS = ["GPU0", "GPU99999999999", "NIC0", "NV18", "NV0", "SYS", "X", "N/A", "CPU Affinity", "0-999999999", "4,6,8",
          "mlx5_0", "", "-1", "=", "^", "MIG-GPU-", "GPU-5d", "1e9", "true", "inf", "eth0", "0-3"]  # fmt: skip
_VALUES: list[object] = [None, True, -1, 0, 1, 3, 2**40, 1.5, "8", "", [], {}, [1], {"a": 1}, 10**400, "bfloat16"]


def dump(rng: random.Random, texts: list[str]) -> None:
    """Read a damaged dump; what is read is drawn and read again."""
    text = mutate(rng, rng.choice(texts))
    graph = parse_topo(text)
    drawn = parse_topo(topo_table(graph))
    assert drawn.links == graph.links
    graph.islands()
    json.dumps(graph.document())


def mutate(rng: random.Random, text: str) -> str:
    """Return a text with lines, cells and characters moved, lost and made up."""
    for _ in range(rng.randint(1, 4)):
        lines = text.split("\n")
        at = rng.randrange(len(lines))
        way = rng.randrange(8)
        if way == 0:
            del lines[at]
        elif way == 1:
            lines.insert(rng.randrange(len(lines)), lines[at])
        elif way == 2:
            lines[at] = lines[at][: rng.randint(0, len(lines[at]))]
        elif way == 3:
            cells = lines[at].split("\t")
            cells[rng.randrange(len(cells))] = rng.choice(_WORDS)
            lines[at] = "\t".join(cells)
        elif way == 4:
            lines[at] = lines[at].replace("\t", rng.choice([" ", "   ", ""]))
        elif way == 5:
            place = rng.randint(0, len(lines[at]))
            lines[at] = lines[at][:place] + rng.choice(_CHARACTERS) + lines[at][place:]
        elif way == 6:
            cut = rng.randint(0, len(lines[at]))
            lines[at : at + 1] = [lines[at][:cut], lines[at][cut:]]
        else:
            rng.shuffle(lines)
        text = "\n".join(lines)
    return text


def configuration(rng: random.Random, folder: Path, request: Request) -> None:
    """Plan and check a damaged config.json."""
    values = preset_config(rng.choice(preset_names()[:4]))
    for _ in range(rng.randint(1, 3)):
        values[rng.choice([*values, "text_config", "quantization_config", "rope"])] = rng.choice(_VALUES)
    text = json.dumps(values)
    if rng.random() < 0.2:
        place = rng.randint(0, len(text))
        text = text[:place] + rng.choice(_CHARACTERS) + text[place + rng.randint(0, 3) :]
    path = folder / "config.json"
    path.write_text(text, encoding="utf-8", errors="replace")
    model = planned_model(str(path), rng.choice([None, "BF16", "F32"]))
    if len(model.weights) < 1000:
        run_checks(Surroundings(NodeGraph((), ()), {}), request.resolution, model)


def environment(rng: random.Random, graphs: list[NodeGraph], request: Request) -> None:
    """Check a node under made-up variables."""
    names = ["CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_TIMEOUT", "UCX_NET_DEVICES",
             "GLOO_SOCKET_IFNAME", "CUDA_DEVICE_ORDER", "NCCL_IB_RETRY_CNT", *known_names(), *RETIRED]  # fmt: skip
    env = {rng.choice(names[:8] if rng.random() < 0.7 else names): _value(rng) for _ in range(rng.randint(1, 6))}
    if rng.random() < 0.3:
        env[rng.choice(["NCCL_", "TORCH_NCCL_"]) + _value(rng)] = _value(rng)
    around = Surroundings(rng.choice(graphs), env, rng.choice([None, (), ("lo", "eth0", "bond0", "bond0.2")]))
    child = _value(rng) if rng.random() < 0.5 else None
    run_checks(around, request.resolution if rng.random() < 0.2 else None, request.model, child=child)
    shown_variables(env)


def _value(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return ",".join(rng.choice(_WORDS) for _ in range(rng.randint(0, 5)))
    return "".join(rng.choice(_CHARACTERS.replace("\x00", "")) for _ in range(rng.randint(0, 20)))


def document(rng: random.Random) -> None:
    """Compare a made-up document of a node."""
    keys = ["machine", "environment", "devices", "nics", "links", "numa", "interfaces", "variables", "packages", "host",
            "mig", "name", "libraries", "addresses", "rdma", "up", "mig_mode", "profile"]  # fmt: skip

    def thing(depth: int) -> object:
        if depth == 0 or rng.random() < 0.2:
            return rng.choice(_VALUES)
        if rng.random() < 0.4:
            return [thing(depth - 1) for _ in range(rng.randint(0, 3))]
        return {rng.choice(keys): thing(depth - 1) for _ in range(rng.randint(0, 5))}

    facts_of({key: thing(4) for key in keys})


def fuzz(first: int, cases: int, seed: int) -> dict[str, int]:
    """Run cases ``first`` to ``first + cases``; return how many of each kind were answered and how many refused."""
    texts = [path.read_bytes().decode() for path in sorted(DUMPS.glob("*.txt"))]
    graphs = [parse_topo(text) for text in texts if "CPU Affinit\n" not in text]
    request = read_request("8xH100-colocate", model="qwen3-0.6b")
    summarise(request.plan())
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, first + cases):
            rng = random.Random(f"{seed} {number}")
            kind = ("dump", "configuration", "environment", "document")[number % 4]
            answered = True
            try:
                if kind == "dump":
                    dump(rng, texts)
                elif kind == "configuration":
                    configuration(rng, Path(folder), request)
                elif kind == "environment":
                    environment(rng, graphs, request)
                else:
                    document(rng)
            except RlctlError as error:
                assert error.message
                answered = False
            except Exception as error:
                raise AssertionError(f"case {number} of seed {seed} ({kind}): {error!r}") from error
            key = f"{kind} {'answered' if answered else 'refused'}"
            counts[key] = counts.get(key, 0) + 1
    return counts


def main(arguments: list[str] | None = None) -> int:
    """Run the cases and print how they ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    start = time.process_time()
    counts = fuzz(given.first, given.cases, given.seed)
    print(f"{given.cases} cases of seed {given.seed} in {time.process_time() - start:.1f} CPU s, no traceback")
    for kind, count in sorted(counts.items()):
        print(f"  {kind:<24} {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
