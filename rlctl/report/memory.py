"""What ``rlctl memory-profile`` shows to people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlctl.memory.imbalance import HINTS, heavier_ranks
from rlctl.report.output import Report
from rlctl.units import format_bytes

if TYPE_CHECKING:
    from rlctl.memory.estimate import Estimate
    from rlctl.memory.staging import WakePeaks
    from rlctl.ops.memory_profile import MemoryProfile
    from rlctl.ops.memory_run import Measured

# A letter for each part: the chart needs neither colour nor block characters.
LETTERS = {
    "trainer_weights": "W",
    "optimizer": "O",
    "gradients": "G",
    "activations": "A",
    "logits": "L",
    "engine_weights": "E",
    "kv_cache": "K",
    "engine_work": "e",
    "buckets": "B",
    "reference_weights": "R",
    "critic": "V",
    "critic_gradients": "g",
    "critic_activations": "a",
    "reward_weights": "M",
    "sent_before": "D",
    "adapter_sums": "S",
    "context": "c",
    "fragmentation": "f",
}
_NAME, _SIZE = 24, 10
_ADVICE = 6


def show_memory(report: Report, found: MemoryProfile, measured: Measured | None) -> None:
    """Print the phases as a chart, then what follows from them."""
    estimate = found.estimate
    limit = f"{format_bytes(estimate.limit)} ({found.limit_of})" if estimate.limit else "not stated"
    report.text(f"{found.model} under {found.profile or 'a configuration'}; memory of a device: {limit}\n")
    report.text(memory_chart(estimate, width=min(max(report.out_terminal.width, 60), 100)))
    if measured is not None:
        _show_measured(report, estimate, measured)
    if found.wake is not None:
        _show_wake(report, found.wake, estimate.limit)
    for rank in heavier_ranks(found.rank_peaks):
        more = f"{format_bytes(rank.above)} over the median"
        report.text(f"rank {rank.rank} carries {format_bytes(rank.nbytes)}, {more}; often: {', '.join(HINTS)}")
    if found.largest:
        rows = [[item.key, item.now, "not bounded" if item.most < 0 else item.most or "none"] for item in found.largest]
        report.table(["others as they are", "now", "largest that fits"], rows)
    for note in found.notes:
        report.text(f"note: {note}")
    peak = estimate.peak
    verdict = {True: "fits", False: "DOES NOT FIT", None: "no limit stated"}[estimate.fits]
    report.text(f"\npeak {format_bytes(peak.nbytes)} in {peak.name} ({peak.devices}): {verdict}")
    if found.advice:
        report.table(
            ["change", "peak falls by", "how"],
            [[a.change, format_bytes(a.saved_bytes), a.why] for a in found.advice[:_ADVICE]],
        )


def memory_chart(estimate: Estimate, *, width: int) -> str:
    """Return a bar for each phase, a letter for each part, at most ``width`` columns; a ``|`` stands at the limit."""
    room = width - _NAME - _SIZE - 3
    most = max(estimate.peak.nbytes, estimate.limit if estimate.limit <= 4 * estimate.peak.nbytes else 0, 1)
    lines = []
    devices = ""
    for phase in estimate.phases:
        if phase.devices != devices:
            devices = phase.devices
            lines.append(f"{devices} devices")
        bar = _bar(phase.parts, phase.nbytes, most, room)
        if 0 < estimate.limit <= most:
            at = min(round(estimate.limit / most * room), room - 1)
            bar = bar[:at].ljust(at) + ("|" if len(bar) <= at else bar[at]) + bar[at + 1 :]
        lines.append(f"  {phase.name:<{_NAME - 2}} {format_bytes(phase.nbytes):>{_SIZE}} {bar}".rstrip())
    used = {part for phase in estimate.phases for part in phase.parts}
    legend = [f"{letter} {name.replace('_', ' ')}" for name, letter in LETTERS.items() if name in used]
    if 0 < estimate.limit <= most:
        legend.append("| limit")
    return "\n".join([*lines, *_wrapped(legend, width)]) + "\n"


def _bar(parts: Mapping[str, int], nbytes: int, most: int, room: int) -> str:
    """Return letters in proportion: rounding is carried on, so that the bar as a whole is as long as its sum."""
    bar, upto = "", 0
    for name, letter in LETTERS.items():
        upto += parts.get(name, 0)
        bar += letter * (round(upto / most * room) - len(bar))
    return bar or ("." if nbytes else "")


def _wrapped(words: list[str], width: int) -> list[str]:
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) + 2 > width:
            lines.append("")
        lines[-1] += ("  " if lines[-1] else "") + word
    return lines


def _show_measured(report: Report, estimate: Estimate, measured: Measured) -> None:
    rows: list[list[object]] = []
    for phase in estimate.phases:
        taken = measured.peaks.get(phase.name)
        off = None if not taken else f"{phase.nbytes / taken - 1:+.1%}"
        extras = measured.extras.get(phase.name, {})
        beside = [f"{name} {format_bytes(n)}" for name, n in extras.items()]
        shown = None if taken is None else format_bytes(taken)
        rows.append([phase.name, format_bytes(phase.nbytes), shown, off, ", ".join(beside) or None])
    with_extras = any(row[-1] for row in rows)
    heads = ["phase", "predicted", "measured", "predicted is", "also"]
    report.table(heads if with_extras else heads[:-1], rows if with_extras else [row[:-1] for row in rows])
    settings = ", ".join(f"{name}={value}" for name, value in measured.allocator.items())
    report.text(
        f"measured: {measured.probe} above the {format_bytes(measured.imports)} of the imports"
        + (f", with {settings}" if settings else "")
        + "\n"
    )


def _show_wake(report: Report, wake: WakePeaks, limit: int) -> None:
    def verdict(nbytes: int) -> str:
        return format_bytes(nbytes) + ("" if not limit else " (fits)" if nbytes <= limit else " (does not fit)")

    order = " -> ".join(name for name, _ in wake.stages)
    report.text(f"waking the engine: at once {verdict(wake.at_once)}; {order}: {verdict(wake.staged)}\n")
