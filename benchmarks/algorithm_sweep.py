"""Learning rate, group size, clip, advantage and loss, swept on the built-in task: 40 steps each.

    python benchmarks/algorithm_sweep.py [SETTINGS ...]

Bound: the mean reward of the last 20 steps is at least 0.85, within 3 minutes of CPU time; exit 1 when a setting
misses it. docs/algorithms.md gives the figures and says why a setting does not learn.
"""

import sys
import tempfile
import time
from pathlib import Path

from rlctl.config import to_json
from rlctl.ops.resolve import resolve
from rlctl.ops.run_path import RunPath
from rlctl.ops.train import run_training

ADVANTAGES = ["algorithm.advantage=" + name for name in ("grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")]
BASELINES = ["algorithm.normalize_std=false", "algorithm.leave_one_out=true", "algorithm.preset=ppo"]
PRESETS = ["algorithm.preset=" + name for name in ("dr_grpo", "dapo", "gspo", "cispo", "rloo")]
TERMS = ["algorithm.loss=reinforce", "algorithm.kl.place=loss", "algorithm.kl.place=reward"]
SIZES = ["trainer.optimizer.lr=5e-5 run.steps=60", "trainer.optimizer.lr=1e-4", "rollout.samples_per_prompt=4"]
CLIPS = ["clip_high=0.2", "clip_high=0.5", "dual_clip=3", "entropy_coef=0.001"]
CORRECTIONS = ["decoupled_geo_rs_token_tis", "bypass_ppo_clip", "bypass_pg_is"]
SWEEP = [*ADVANTAGES, *BASELINES, *PRESETS, *TERMS, *SIZES]
SWEEP += [f"algorithm.{setting} trainer.mini_batch_prompts=4" for setting in CLIPS]
SWEEP += [f"algorithm.rollout_correction.preset={name}" for name in CORRECTIONS]
BASE = {"trainer.optimizer.lr": "2e-4", "run.steps": "40", "run.validate_prompts": "0", "run.threads": "1"}

missed = 0
for words in sys.argv[1:] or SWEEP:
    settings = BASE | dict(word.split("=", 1) for word in words.split())
    plan = resolve(env={}, overrides=[f"{key}={value}" for key, value in settings.items()])
    plan.require_valid()
    run, begin = RunPath(Path(tempfile.mkdtemp()) / "run", resume=False), time.process_time()
    reward = run_training(plan.config, run, document=to_json(plan.resolved))["reward"]
    seconds = time.process_time() - begin
    missed += reward["last"] < 0.85 or seconds > 180
    reached = next((step for step, value in enumerate(reward["curve"], 1) if value >= 0.85), 0)
    print(
        f"{reward['first']:.2f} -> {reward['last']:.3f}  0.85 at step {reached:2}  {seconds:3.0f} CPU s  {words}",
        flush=True,
    )
sys.exit(missed > 0)
