"""docs/convert-keys.md says of every architecture what its table says."""

from __future__ import annotations

from pathlib import Path

from rlctl.keys.architectures import ARCHITECTURES
from rlctl.keys.families import FAMILIES

DOCS = Path(__file__).parents[2] / "docs" / "convert-keys.md"
SCHEMES = ("hf", "hf-fused", "megatron", "vllm", "vllm-runtime")


def test_every_family_has_a_table() -> None:
    assert ARCHITECTURES.keys() == FAMILIES.keys()


def test_the_status_table_is_that_of_the_code() -> None:
    head, _, rest = DOCS.read_text().partition("<!-- status -->\n")
    assert head
    written = [line for line in rest.partition("<!-- end of status -->")[0].splitlines() if line.startswith("| `")]
    right = [
        f"| `{name}` | {' | '.join(table.status.get(scheme, 'no') for scheme in SCHEMES)} |"
        for name, table in ARCHITECTURES.items()
    ]
    assert written == right
