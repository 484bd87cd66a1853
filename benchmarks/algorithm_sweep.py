"""Learning rate, group size, clip, advantage and loss, swept on the built-in task: 40 steps each.

    python benchmarks/algorithm_sweep.py [SETTINGS ...]

Bound: the mean reward of the last 20 steps is at least 0.85, within 3 minutes of CPU time; exit 1 for a setting that
misses it. docs/algorithms.md gives the figures and says why a setting does not learn.
"""

import json
import subprocess
import sys
import tempfile
from resource import RUSAGE_CHILDREN, getrusage

ADVANTAGES = ["algorithm.advantage=" + name for name in ("grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")]
MORE_ADVANTAGES = ["algorithm.normalize_std=false", "algorithm.leave_one_out=true", "algorithm.preset=ppo"]
PRESETS = ["algorithm.preset=" + name for name in ("dr_grpo", "dapo", "gspo", "cispo", "rloo")]
LOSSES = ["algorithm.loss=gspo", "algorithm.loss=cispo", "algorithm.loss=reinforce", "algorithm.dual_clip=3"]
TERMS = [
    "algorithm.kl.place=loss",
    "algorithm.kl.place=reward algorithm.kl.estimator=k1",
    "algorithm.entropy_coef=1e-3",
]
SIZES = ["trainer.optimizer.lr=5e-5 run.steps=60", "trainer.optimizer.lr=1e-4", "rollout.samples_per_prompt=4"]
CLIPS = ["algorithm.clip_high=0.2 trainer.mini_batch_prompts=4", "algorithm.clip_high=0.5 trainer.mini_batch_prompts=4"]
CORRECTIONS = ["decoupled_seq_is", "decoupled_k3_rs_token_tis", "bypass_ppo_clip", "bypass_pg_is"]
SWEEP = [*ADVANTAGES, *MORE_ADVANTAGES, *PRESETS, *LOSSES, *TERMS, *SIZES, *CLIPS]
SWEEP += [f"algorithm.rollout_correction.preset={name}" for name in CORRECTIONS]
BASE = {"trainer.optimizer.lr": "2e-4", "run.steps": "40", "run.validate_prompts": "0", "run.threads": "1"}

missed = 0
for words in sys.argv[1:] or SWEEP:
    settings = BASE | dict(word.split("=", 1) for word in words.split())
    folder, before = tempfile.mkdtemp(), getrusage(RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "-m", "rlctl", "train", "--json", "--run-dir", f"{folder}/run"]
    done = subprocess.run([*command, *(f"{k}={v}" for k, v in settings.items())], capture_output=True, check=True)
    reward, seconds = json.loads(done.stdout)["reward"]["last"], getrusage(RUSAGE_CHILDREN).ru_utime - before
    missed += reward < 0.85 or seconds > 180
    print(f"{reward:.3f}  {seconds:4.0f} CPU s  {words}", flush=True)
sys.exit(missed > 0)
