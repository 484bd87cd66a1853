"""``rlctl train``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rlctl.config import list_profiles as shipped_profiles
from rlctl.config import show_config as config_text
from rlctl.config import to_json
from rlctl.errors import UsageError
from rlctl.ops.adapter_checks import with_adapter_checks
from rlctl.ops.dry_run import DryRun, plan_run
from rlctl.ops.evaluate import run_evaluation
from rlctl.ops.input_checks import with_input_checks
from rlctl.ops.memory_profile import require_fit
from rlctl.ops.profile_choice import AUTO, choose_profile
from rlctl.ops.requirements import require_built, require_hardware
from rlctl.ops.resuming import resolve_run
from rlctl.ops.run_path import RunPath, choose_run_path
from rlctl.ops.sbatch import batch_script
from rlctl.ops.submit import job_server, submit
from rlctl.ops.train import run_training
from rlctl.report import Report
from rlctl.report.plots import can_plot, save_reward_plot
from rlctl.report.training import TrainingView
from rlctl.runtime.cluster.supported import needs_processes
from rlctl.schema import Config

EXAMPLES = {
    "rlctl train": "learn the built-in task on this machine",
    "rlctl train --profile 8xH100-colocate --dry-run": "check a cluster's layout from a login node",
    "rlctl train --model Qwen/Qwen3-0.6B --task prompts.jsonl task.verifier=exact": "your model, your data",
    "rlctl train trainer.optimizer.lr=1e-5 run.steps=200": "set any key of the configuration",
    "rlctl train --run-dir runs/a --resume auto": "go on from the last checkpoint of a run",
    "rlctl train --resume runs/a run.validate_only=true --json": "evaluate a checkpoint and train nothing",
    "rlctl train --profile 16xH100-separate --print-sbatch > job.sh": "write the Slurm script",
    "rlctl train --profile 16xH100-separate --submit --ray-address http://head:8265": "hand it to a Ray cluster",
}


def main(
    report: Report,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", hidden=True)] = None,
    profile: Annotated[str | None, typer.Option(metavar="auto|NAME|FILE", help="Hardware layout.")] = None,
    config: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="YAML file of keys; may be repeated.")
    ] = None,
    mode: Annotated[str | None, typer.Option(metavar="NAME", help="Trainer mode (trainer.mode).")] = None,
    model: Annotated[str | None, typer.Option(metavar="FOLDER|NAME", help="Model (model.path).")] = None,
    task: Annotated[str | None, typer.Option(metavar="NAME|FILE", help="Task (task.name).")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Training steps (run.steps).")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of all that is random (run.seed).")] = None,
    run_dir: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Run folder; else a new one in runs/.")] = None,
    resume: Annotated[str | None, typer.Option(metavar="auto|FOLDER", help="Go on from a checkpoint.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in --run-dir.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the layout and every check; run nothing.")] = False,
    show_config: Annotated[bool, typer.Option("--show-config", help="Print every key and where it was set.")] = False,
    list_profiles: Annotated[bool, typer.Option("--list-profiles", help="Print the profiles that come along.")] = False,
    print_sbatch: Annotated[bool, typer.Option("--print-sbatch", help="Print a Slurm batch script.")] = False,
    ray_address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Run on this Ray cluster; with --submit its dashboard.")
    ] = None,
    to_submit: Annotated[bool, typer.Option("--submit", help="Hand the run to a Ray cluster as a job.")] = False,
) -> None:
    """Train a language model by reinforcement learning.

    Without options it learns the built-in task on this machine. Later sources win: defaults, profile, --config files,
    RLCTL_SECTION__KEY variables, options and KEY=VALUE words.
    """
    actions = {
        "--list-profiles": list_profiles,
        "--show-config": show_config,
        "--dry-run": dry_run,
        "--print-sbatch": print_sbatch,
        "--submit": to_submit,
    }
    _require_one(actions)
    if list_profiles:
        _list_profiles(report)
        return
    _require_one({"--resume": resume is not None, "--overwrite": overwrite})
    flags = {"--mode": mode, "--model": model, "--task": task, "--steps": steps, "--seed": seed}
    words = _repeated(profile, config or (), flags, overrides or ())
    run = choose_run_path(run_dir, resume, name=_run_name(profile))
    profile = _chosen(report, profile, run)
    # A job finds the address of its own cluster in its environment.
    flags["--ray-address"] = None if to_submit else ray_address
    resolution = resolve_run(run, profile=profile, files=config or (), overrides=overrides or (), flags=flags)
    resolved = resolution.resolved
    for note in resolved.notes:
        report.warn(str(note))
    document = to_json(resolved)
    if show_config:
        report.document(document)
        report.text(config_text(resolved))
        return
    resolution = with_adapter_checks(resolution)
    if dry_run:
        resolution = with_input_checks(resolution)
        plan = plan_run(resolution)
        _show_plan(report, plan)
    resolution.require_valid()
    if dry_run:
        if plan.forecast.memory is not None:
            require_fit(plan.forecast.memory)
        return
    if print_sbatch:
        words = _repeated(profile, config or (), flags, overrides or ())
        script = batch_script(resolved.config, name=_run_name(resolved.profile), arguments=words)
        report.document({"script": script})
        report.text(script)
        return
    if to_submit:
        _submit(report, resolved.config, words, ray_address, run, resume=resume, overwrite=overwrite)
        return
    require_hardware(resolution)
    require_built(resolution)
    if resolved.config.run.validate_only:
        _evaluate(report, resolved.config, run, resume=resume is not None)
        return
    with TrainingView(report) as view:
        result = run_training(
            resolved.config, run, document=document, overwrite=overwrite, listeners=[view.on_event], on_start=view.begin
        )
    if can_plot() and result["reward"]["curve"]:
        save_reward_plot(Path(result["run_dir"], "reward.png"), result["reward"]["curve"])
    report.document(result)
    view.summary(result, _next_commands(result))


def _require_one(options: Mapping[str, bool]) -> None:
    asked = [name for name, given in options.items() if given]
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)} exclude each other", fix="keep one of them")


def _chosen(report: Report, profile: str | None, run: RunPath) -> str | None:
    """Return the profile that ``auto`` stands for; a run that goes on keeps the one that it began with."""
    if profile != AUTO:
        return profile
    if run.saved_config is not None:
        return None
    choice = choose_profile()
    report.line(f"profile {choice.name}: {choice.why}")
    return choice.name


def _submit(
    report: Report,
    config: Config,
    words: Sequence[str],
    address: str | None,
    run: RunPath,
    *,
    resume: str | None,
    overwrite: bool,
) -> None:
    """Hand the same command to a cluster, where RAY_ADDRESS says which it is."""
    by_ray = config.cluster.launcher != "ray" and needs_processes(config)
    more = ["cluster.launcher=ray"] if by_ray else []
    if resume is None or resume == "auto":
        more += ["--run-dir", str(run.path)]
    if resume is not None:
        more += ["--resume", resume]
    job = submit(job_server(address, os.environ), [*words, *more, *(["--overwrite"] if overwrite else [])])
    report.document({**job, "run_dir": str(run.path)})
    report.text(job["job_id"])
    report.line(f"run folder {run.path}; follow it: ray job logs --follow --address {job['address']} {job['job_id']}")


def _evaluate(report: Report, config: Config, run: RunPath, *, resume: bool) -> None:
    with TrainingView(report) as view:
        document = run_evaluation(config, run, resume=resume, listeners=[view.on_event])
    report.document(document)
    found = document["eval"]
    rows = [("all", found["accuracy"]), *found["by_label"].items()]
    report.text(f"{document['checkpoint'] or document['model']} on {found['prompts']} held-out prompts:")
    report.table(["held-out accuracy", ""], [[name, f"{value:.3f}"] for name, value in rows])


def _list_profiles(report: Report) -> None:
    profiles = shipped_profiles()
    report.table(["profile", "when to use it"], [[info.name, info.summary] for info in profiles])
    report.document({"profiles": [{"name": info.name, "summary": info.summary} for info in profiles]})


def _show_plan(report: Report, plan: DryRun) -> None:
    report.document(plan.to_json())
    report.text(f"{plan.mode}: {plan.mode_summary}\nrollout engine {plan.engine}, weight sync by {plan.backend}\n")
    report.table(
        ["rank", "role", "node", "device", "group"], [[s.rank, s.role, s.node, s.device, s.group] for s in plan.layout]
    )
    report.text("")
    report.table(["batches", ""], plan.arithmetic())
    report.text("")
    report.table(["algorithm", ""], list(plan.algorithm.items()))
    report.text("")
    report.table(["check", "", "found"], [[c.rule, c.status, c.message] for c in plan.checks])
    report.text("")
    report.table(["forecast", ""], plan.forecast.lines())
    report.text(f"\nneeds {plan.hardware.needed}; found here {plan.hardware.found}")


def _run_name(profile: str | None) -> str:
    return Path(profile).stem if profile else "train"


def _repeated(
    profile: str | None, files: Sequence[str], flags: Mapping[str, Any], overrides: Sequence[str]
) -> list[str]:
    """Return the words that give the same configuration again."""
    options = [("--profile", profile), *(("--config", file) for file in files), *flags.items()]
    return [*(word for name, value in options if value is not None for word in (name, str(value))), *overrides]


def _next_commands(result: Mapping[str, Any]) -> list[str]:
    folder, final = shlex.quote(result["run_dir"]), shlex.quote(result["final"])
    more = f"rlctl train --resume {folder} run.steps={2 * result['steps']}   # go on training"
    if result["adapter_of"] is not None:
        base = shlex.quote(result["adapter_of"])
        return [more, f"rlctl convert-keys {base} merged --to hf --adapter {final} --merge   # fold the adapter in"]
    return [
        more,
        f"rlctl train --model {final} --task prompts.jsonl task.verifier=exact   # train the result on your prompts",
    ]
