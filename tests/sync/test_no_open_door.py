"""Nothing on a wire is pickled, and nothing listens to everybody."""

from __future__ import annotations

import re
from pathlib import Path

import rlctl.sync

ROOM = Path(rlctl.sync.__file__).parent
FORBIDDEN = {
    "pickles what it sends": r"\bpickle|dill|(send|broadcast|gather)_object|torch\.(load|save)\(",
    "shares by pickled handles": r"multiprocessing|reductions|share_memory_",
    "a store that listens on every interface": r"TCPStore|init_process_group\(.*init_method|tcp://",
    "every interface": r"0\.0\.0\.0|\"::\"|'::'",
}


def test_no_source_of_the_room_does_what_is_forbidden() -> None:
    found = []
    for path in sorted(ROOM.rglob("*.py")):
        code = re.sub(r'"""(?s:.*?)"""|#.*', "", path.read_text())
        found += [f"{path.name}: {what}: {m.group()}" for what, p in FORBIDDEN.items() if (m := re.search(p, code))]
    assert found == []
