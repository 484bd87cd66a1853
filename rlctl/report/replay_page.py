"""A recorded run as one page of HTML: no script, nothing fetched, every text of the run escaped."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import rlctl
from rlctl.errors import RlctlError
from rlctl.ops.output_place import whole_file
from rlctl.report.replay import failure_text, its
from rlctl.report.replay_charts import ages_chart, figure_chart, legend, timeline_chart, version_color
from rlctl.units import format_duration

if TYPE_CHECKING:
    from rlctl.ops.replay.samples import Sample
    from rlctl.ops.replay.showing import Shown, ShownStep
    from rlctl.ops.replay.steps import TrainedStep

_FIGURES = ("reward", "loss", "grad_norm", "logprob_gap", "logprob_gap_max", "staleness", "ppo_kl", "response_tokens")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #66717f; --paper: #fbfbfa; --card: #fff; --line: #d9dde2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --dim: #98a3b1; --paper: #14181d; --card: #1c2229; --line: #333c47; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1160px; padding: 20px; background: var(--paper); color: var(--ink);
  font: 14px/1.5 system-ui, sans-serif; }
h1 { font-size: 20px; margin: 0 0 2px; overflow-wrap: anywhere; } h2 { font-size: 16px; margin: 28px 0 8px; }
.dim, small { color: var(--dim); } .bad { color: #c0392b; }
svg { width: 100%; height: auto; background: var(--card); border: 1px solid var(--line); border-radius: 4px; }
svg text { fill: var(--ink); font-size: 12px; } svg .small { font-size: 10px; fill: var(--dim); }
svg .on { fill: #1c2430; } svg .tick { stroke: var(--line); } svg .lane { fill: none; stroke: var(--line); }
svg .mark { fill: #c0392b; } polyline { fill: none; stroke: #4e79a7; stroke-width: 1.5; } circle { fill: #4e79a7; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(260px, 1fr)); gap: 10px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 6px 0; font-size: 12px; }
.key i { display: inline-block; width: 11px; height: 11px; margin-right: 3px; border-radius: 2px; }
details { background: var(--card); border: 1px solid var(--line); border-radius: 4px;
  margin: 6px 0; padding: 6px 10px; }
summary { cursor: pointer; } table { border-collapse: collapse; font-size: 12px; }
td, th { border-bottom: 1px solid var(--line); padding: 2px 10px 2px 0; text-align: left; vertical-align: top; }
.num { text-align: right; font-variant-numeric: tabular-nums; }
pre { margin: 4px 0 10px; padding: 8px; border: 1px solid var(--line); border-radius: 4px; font-size: 12px;
  white-space: pre-wrap; overflow-wrap: anywhere; }
pre .t { border-bottom: 2px solid; } pre .o { font-style: italic; color: var(--dim); }
.wide { overflow-x: auto; }
"""


def save_page(path: Path, shown: Shown) -> int:
    """Write the page; it appears whole or not at all. Return its bytes. Raises RlctlError."""
    try:
        with whole_file(path) as file:
            file.writelines(piece.encode(errors="replace") for piece in page(shown))
            size = file.tell()
    except OSError as error:
        fix = "free space there, or name another place"
        raise RlctlError(f"the page cannot be written: {error.strerror}", where=str(path), fix=fix) from error
    return size


def page(shown: Shown) -> Iterator[str]:
    """Yield the page in pieces."""
    history = shown.history
    name = escape(history.path.resolve().name)
    yield (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{name}</title><style>{_STYLE}</style></head><body>'
    )
    config = history.resolved.config
    first, last = shown.steps[0].step.step, shown.steps[-1].step.step
    failed = f" and {len(history.failed)} failed" if history.failed else ""
    yield (
        f"<h1>{name}</h1><p class='dim'>{escape(history.mode)}, {escape(config.model.path)}, "
        f"{escape(config.rollout.engine)}, steps {first} to {last} of {len(history.steps)} trained{failed}, "
        f"{len(history.attempts)} attempt(s); rlctl {escape(rlctl.__version__)}</p>"
    )
    for fault in history.faults:
        yield f"<p class='bad'>{escape(fault.file.name)}: {escape(fault.what)}; the rest is used</p>"
    yield f"<h2>Timeline</h2>{timeline_chart(shown.timeline)}{legend(shown.timeline)}"
    yield from _busy(shown)
    yield "<h2>Figures by step</h2><div class='figures'>"
    for figure in _FIGURES:
        yield figure_chart(figure, {s.step.step: s.step.metrics.get(figure, math.nan) for s in shown.steps})
    yield "</div><h2>Staleness of tokens</h2>"
    yield "<p class='dim'>Which share of a step's response tokens is how many weight versions old.</p>"
    yield ages_chart([(step.step.step, step.ages) for step in shown.steps])
    yield "<h2>Samples</h2><p class='dim'>"
    yield "Tokens are underlined in the colour of the weight version that made them; the redder a token, the further "
    yield "the trainer's log-prob of it is from the rollout's. Point at one for its numbers.</p>"
    for step in shown.steps:
        yield from _step(step, opened=len(shown.steps) == 1 or step is shown.steps[-1])
    yield "</body></html>\n"


def _busy(shown: Shown) -> Iterator[str]:
    line = shown.timeline
    yield "<table><tr><th>who</th><th>busy</th><th>share</th></tr>"
    for lane in line.lanes:
        yield (
            f"<tr><td>{escape(lane.name)}</td><td class='num'>{escape(format_duration(lane.busy))}</td>"
            f"<td class='num'>{lane.busy / line.seconds:.0%}</td></tr>"
        )
    yield "</table>"


def _came_to(step: TrainedStep) -> str:
    if step.failure is not None:
        return f" <span class='bad'>{escape(failure_text(step.failure))}</span>"
    return f" &rarr; version {step.version}" if step.version is not None else ""


def _step(shown: ShownStep, *, opened: bool) -> Iterator[str]:
    step = shown.step
    rewarded = f", reward {step.metrics['reward']:.4g}" if "reward" in step.metrics else ""
    gap = f", log-prob gap mean {shown.mean_gap:.2e}, largest {shown.max_gap:.2e}" if shown.mean_gap is not None else ""
    yield (
        f"<details{' open' if opened else ''}><summary><b>step {step.step}</b>{_came_to(step)}: "
        f"{shown.total} responses{rewarded}{gap} <small>told by {its(shown)}{escape(shown.source)}</small></summary>"
    )
    if shown.fault:
        yield f"<p class='bad'>its record is not used: {escape(shown.fault)}</p>"
    yield "<details><summary>stages and figures</summary><div class='wide'><table>"
    for name, seconds in step.stages.items():
        yield f"<tr><td>{escape(name)}</td><td class='num'>{escape(format_duration(seconds))}</td></tr>"
    for name, value in step.metrics.items():
        yield f"<tr><td>{escape(name)}</td><td class='num'>{value:.6g}</td></tr>"
    yield "</table></div></details>"
    for sample in shown.samples:
        yield from _sample(sample)
    if len(shown.samples) < shown.total:
        yield f"<p class='dim'>{len(shown.samples)} of {shown.total} responses are shown.</p>"
    yield "</details>"


def _sample(sample: Sample) -> Iterator[str]:
    facts = [f"reward {sample.reward:.4g}" if sample.reward is not None else "no reward"]
    if sample.advantage is not None:
        facts.append(f"advantage {sample.advantage:.3g}")
    facts.append(f"{sample.tokens} tokens")
    facts += [
        f"{p.tokens} by the task" if p.observation else f"{p.tokens} by version {p.version} on replica {p.replica}"
        for p in sample.pieces
    ]
    if sample.gap_mean is not None:
        facts.append(f"gap mean {sample.gap_mean:.2e}, largest {sample.gap_max:.2e}")
    if sample.reason:
        facts.append(f"ended: {sample.reason}")
    task = f"{sample.task}, " if sample.task else ""
    yield f"<p><b>{escape(task)}prompt {sample.ordinal}, sample {sample.sample}</b>: {escape('; '.join(facts))}</p>"
    if sample.prompt is not None:
        yield f"<pre>{escape(sample.prompt)}</pre>"
    if sample.response_ids is not None:
        yield "<pre>"
        yield from _tokens(sample)
        yield "</pre>"


def _tokens(sample: Sample) -> Iterator[str]:
    assert sample.response_ids is not None
    made = [(piece, i) for piece in sample.pieces for i in range(piece.tokens)]
    for index, (token, (piece, _)) in enumerate(zip(sample.response_ids, made, strict=True)):
        text = sample.tokens_text[index] if sample.tokens_text else f"{token} "
        if piece.observation:
            yield f"<span class='o' title='token {index}, id {token}, said by the task'>{escape(text)}</span>"
            continue
        said = f"token {index}, id {token}, version {piece.version}, {sample.staleness[index]} old"
        gap = sample.gaps[index] if sample.gaps else None
        rollout = sample.rollout_logprobs[index]
        if rollout is not None:
            said += f", rollout {rollout:.6f}"
        if gap is not None:
            said += f", trainer {sample.trainer_logprobs[index]:.6f}, gap {gap:.2e}"
        style = f"border-color:{version_color(piece.version)}" + _heat(gap)
        yield f"<span class='t' style='{style}' title='{said}'>{escape(text)}</span>"


def _heat(gap: float | None) -> str:
    """Return the background of a gap: none up to 1e-6, full from 0.1 on, by its logarithm."""
    if not gap:
        return ""
    strength = min(1.0, (math.log10(abs(gap)) + 6) / 5)
    return f";background:rgba(225,87,89,{strength * 0.75:.2f})" if strength > 0.02 else ""
