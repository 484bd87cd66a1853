"""Pictures of a run as SVG in a page: its timeline, figures by step, and the age of its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from rlctl.units import format_duration

if TYPE_CHECKING:
    from rlctl.ops.replay.timeline import Lane, Span, Timeline

_WIDTH, _MARGIN, _LANE = 1080, 120, 26
_STAGES = {
    "submit": "#9aa5b1", "generate": "#c9ced6", "reward": "#b07aa1", "balance": "#d4a6c8", "old_log_probs": "#76b7b2",
    "ref_log_probs": "#86bcb6", "values": "#f1ce63", "advantages": "#edc948", "update_critic": "#f28e2b",
    "update_actor": "#e15759",
}  # fmt: skip
_VERSIONS = ("#4e79a7", "#59a14f", "#f28e2b", "#b07aa1", "#76b7b2", "#9c755f", "#edc948")
_SYNC = "#333f4d"


def version_color(version: int) -> str:
    """Return the colour of a weight version; neighbours have different ones."""
    return _VERSIONS[version % len(_VERSIONS)]


def timeline_chart(line: Timeline) -> str:
    """Return the lanes of trainer, syncs and replicas over time, steps and other moments marked."""
    height = _LANE * len(line.lanes) + 46
    scale = (_WIDTH - _MARGIN - 10) / line.seconds
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="timeline">']
    for step, time in line.ends.items():
        x = _MARGIN + (time - line.begin) * scale
        parts.append(
            f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{height - 28}"><title>end of step {step}</title>'
            "</line>"
        )
    parts += _step_labels(line, scale)
    for index, lane in enumerate(line.lanes):
        y = 18 + index * _LANE
        parts.append(f'<text x="{_MARGIN - 8}" y="{y + 15}" text-anchor="end">{escape(lane.name)}</text>')
        parts.append(f'<rect class="lane" x="{_MARGIN}" y="{y}" width="{_WIDTH - _MARGIN - 10}" height="{_LANE - 6}"/>')
        parts += _spans(lane, index, y, line, scale)
    for mark in line.marks:
        x = _MARGIN + (mark.time - line.begin) * scale
        y = height - 22
        points = f"{x:.1f},{y - 6} {x - 4:.1f},{y + 2} {x + 4:.1f},{y + 2}"
        parts.append(f'<polygon class="mark" points="{points}"><title>{escape(mark.what)}</title></polygon>')
    parts.append(f'<text x="{_MARGIN}" y="{height - 4}">0 s</text>')
    end = format_duration(line.seconds)
    parts.append(f'<text x="{_WIDTH - 10}" y="{height - 4}" text-anchor="end">{escape(end)}</text></svg>')
    return "".join(parts)


def _step_labels(line: Timeline, scale: float) -> list[str]:
    parts, after = [], -math.inf
    for step, time in line.ends.items():
        x = _MARGIN + (time - line.begin) * scale
        if x - after >= 34:
            parts.append(f'<text class="small" x="{x:.1f}" y="10" text-anchor="middle">{step}</text>')
            after = x
    return parts


def _spans(lane: Lane, index: int, y: int, line: Timeline, scale: float) -> list[str]:
    parts, drawn = [], set()
    for span in lane.spans:
        begin, end = max(span.begin, line.begin), min(span.end, line.end)
        x, width = _MARGIN + (begin - line.begin) * scale, max(0.6, (end - begin) * scale)
        color = _color(span, index)
        place = (round(x), color)
        if width < 1 and place in drawn:  # a thousand steps in a thousand pixels: one rectangle each is enough
            continue
        drawn.add(place)
        said = escape(f"{span.what}{_of(span)}, {format_duration(span.end - span.begin)}")
        parts.append(
            f'<rect x="{x:.2f}" y="{y + 2}" width="{width:.2f}" height="{_LANE - 10}" fill="{color}">'
            f"<title>{said}</title></rect>"
        )
    return parts


def _color(span: Span, lane: int) -> str:
    if lane == 0:
        return _STAGES.get(span.what, "#bab0ac")
    return version_color(span.version or 0) if span.tokens else _SYNC


def _of(span: Span) -> str:
    step = f" of step {span.step}" if span.step is not None else ""
    return step + (f", {span.tokens} tokens" if span.tokens else "")


def legend(line: Timeline) -> str:
    """Return what the colours of the timeline say."""
    seen = dict.fromkeys(span.what for lane in line.lanes[:1] for span in lane.spans)
    named = [(what, _STAGES.get(what, "#bab0ac")) for what in seen] + [("weight sync", _SYNC)]
    keys = "".join(
        f'<span class="key"><i style="background:{color}"></i>{escape(what)}</span>' for what, color in named
    )
    versions = "".join(f'<i style="background:{color}"></i>' for color in _VERSIONS)
    return f'<p class="legend">{keys}<span class="key">{versions}weight version that generates</span></p>'


def figure_chart(name: str, values: Mapping[int, float], *, width: int = 350, height: int = 130) -> str:
    """Return a curve of one figure over steps; gaps where it is no number."""
    known = {step: value for step, value in values.items() if math.isfinite(value)}
    if not known:
        return ""
    low, high = min(known.values()), max(known.values())
    span = high - low or abs(high) or 1.0
    first, last = min(known), max(known)
    left, right, top, bottom = 8, width - 8, 24, height - 18

    def place(step: int, value: float) -> tuple[float, float]:
        x = left + (right - left) * ((step - first) / (last - first) if last > first else 0.5)
        return x, bottom - (bottom - top) * ((value - low) / span)

    points = " ".join("{:.1f},{:.1f}".format(*place(step, value)) for step, value in known.items())
    dots = "".join(
        '<circle cx="{:.1f}" cy="{:.1f}" r="2.5"><title>step {}: {:.6g}</title></circle>'.format(*place(s, v), s, v)
        for s, v in known.items()
    )
    return (
        f'<svg class="figure" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)}">'
        f'<text x="{left}" y="12">{escape(name)}</text>'
        f'<text class="small" x="{right}" y="12" text-anchor="end">{low:.4g} to {high:.4g}</text>'
        f'<polyline points="{points}"/>{dots}'
        f'<text class="small" x="{left}" y="{height - 4}">step {first}</text>'
        f'<text class="small" x="{right}" y="{height - 4}" text-anchor="end">{last}</text></svg>'
    )


def ages_chart(ages: Sequence[tuple[int, Mapping[int, int]]], *, width: int = 1080) -> str:
    """Return, of each step, which share of its tokens is how many versions old, as one bar."""
    row, left = 20, _MARGIN
    parts = [f'<svg viewBox="0 0 {width} {row * len(ages) + 6}" role="img" aria-label="staleness of tokens">']
    for index, (step, counts) in enumerate(ages):
        y, total, x = index * row + 4, sum(counts.values()) or 1, float(left)
        parts.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">step {step}</text>')
        for age in sorted(counts):
            wide = (width - left - 10) * counts[age] / total
            said = f"{counts[age]} tokens ({counts[age] / total:.0%}) are {age} versions old"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{row - 5}" fill="{_age_color(age)}">'
                f"<title>{said}</title></rect>"
            )
            if wide > 60:
                parts.append(
                    f'<text class="small on" x="{x + 5:.1f}" y="{y + 11}">{age}: {counts[age] / total:.0%}</text>'
                )
            x += wide
    return "".join([*parts, "</svg>"])


def _age_color(age: int) -> str:
    return f"hsl({max(0, 130 - 26 * min(max(age, 0), 5))} 45% 62%)"
