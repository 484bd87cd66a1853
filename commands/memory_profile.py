"""``rlctl memory-profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlctl.report import Report
from rlctl.report.memory import show_memory
from rlctl.report.plots import require_plot

EXAMPLES = {
    "rlctl memory-profile": "the built-in run, phase by phase",
    "rlctl memory-profile --profile 8xH100-colocate --model qwen3-8b": "will it fit? from a login node",
    "rlctl memory-profile --profile 8xH100-colocate --model ./config.json rollout.max_new_tokens=4096": "with a change",
    "rlctl memory-profile --profile cpu-quickstart --measure": "run it for two steps and set both side by side",
}


def main(
    report: Report,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", hidden=True)] = None,
    profile: Annotated[str | None, typer.Option(metavar="auto|NAME|FILE", help="Hardware layout.")] = None,
    config: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="YAML file of keys; may be repeated.")
    ] = None,
    mode: Annotated[str | None, typer.Option(metavar="NAME", help="Trainer mode (trainer.mode).")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="FOLDER|PRESET|CONFIG.json", help="Model (model.path); no weights are read.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run two steps in a process of its own and measure every phase.")
    ] = False,
    timeout: Annotated[str, typer.Option("--timeout", help="Deadline of --measure.")] = "30min",
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg|png", help="Draw the phases.")] = None,
) -> None:
    """Show where the memory of a run goes, phase by phase.

    Predictions are arithmetic on the architecture and the profile: no GPU, no weights, a second. Exit code 4: it does
    not fit; what would help is listed, most bytes first. See docs/memory-profile.md.
    """
    from rlctl.ops.memory_profile import profile_memory, require_fit
    from rlctl.ops.profile_choice import AUTO, choose_profile
    from rlctl.ops.resolve import resolve
    from rlctl.ops.sync_bench_arguments import seconds_of

    require_plot(plot)
    deadline = seconds_of(timeout, "--timeout")
    if profile == AUTO:
        choice = choose_profile()
        report.line(f"profile {choice.name}: {choice.why}")
        profile = choice.name
    flags = {"--mode": mode, "--model": model}
    resolution = resolve(profile, files=config or (), overrides=overrides or (), flags=flags)
    measured = None
    if measure:
        from rlctl.ops.memory_measure import measure_memory

        report.line("measuring: two steps, in a process of their own")
        compared = measure_memory(resolution, timeout=deadline)
        found, measured = compared.profile, compared.measured
    else:
        found = profile_memory(resolution)
    peaks = measured.peaks if measured is not None else None
    document = found.document(peaks)
    if measured is not None:
        document["measurement"] = {
            "of": measured.probe,
            "imports_bytes": measured.imports,
            "allocator": measured.allocator,
            "extras": measured.extras,
        }
    report.document(document)
    show_memory(report, found, measured)
    if plot is not None:
        from rlctl.report.memory_plot import save_memory_plot

        save_memory_plot(plot, found.estimate, peaks, title=f"{found.model}, {found.profile or 'cpu-quickstart'}")
    require_fit(found)
