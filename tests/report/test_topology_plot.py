"""Pictures of a topology: they are drawn whole, in both formats, and no label lies on another."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from rlctl.errors import RlctlError
from rlctl.hardware.topo_dump import parse_topo
from rlctl.ops.topology_sources import read_request
from rlctl.report import topology_plot

DUMPS = Path(__file__).parents[1] / "hardware" / "dumps"


@pytest.mark.parametrize(
    ("profile", "keys"),
    [
        ("64xH100-separate", ()),
        ("8xA100-hybrid", ("cluster.nodes=8", "placement.trainer_ranks=64", "placement.replicas=32")),
        ("cpu-separate", ()),
    ],
)
def test_at_64_ranks_no_label_lies_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str, keys: tuple[str, ...]
) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: object, **options: object) -> None:
        save(figure, *arguments, **options)  # type: ignore[arg-type]
        drawn.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)
    plan = read_request(profile, model="qwen3-0.6b", overrides=keys).plan()
    path = tmp_path / "plan.png"
    topology_plot.save_plan_plot(path, plan)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.png"]
    (figure,) = drawn
    texts = [t for t in figure.findobj(Text) if t.get_text().strip() and t.get_visible()]
    assert len([t for t in texts if t.get_text().startswith("T")]) >= len(
        [p for p in plan.placement if p.role == "trainer"]
    )
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts]
    for (one, a), (other, b) in combinations(boxes, 2):
        wide = min(a.x1, b.x1) - max(a.x0, b.x0)
        high = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert wide <= 1 or high <= 1, f"{one!r} lies on {other!r}"


def test_a_nodes_links_as_svg(tmp_path: Path) -> None:
    graph = parse_topo((DUMPS / "a100_4gpu_4nic_heads.txt").read_text())
    topology_plot.save_node_plot(tmp_path / "node.svg", graph)
    assert "</svg>" in (tmp_path / "node.svg").read_text()
    with pytest.raises(RlctlError, match="the picture cannot be written"):
        topology_plot.save_node_plot(tmp_path / "nowhere" / "node.svg", graph)
