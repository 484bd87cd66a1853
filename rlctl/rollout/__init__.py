"""Rollout engines: prompts in, sampled segments with log-probs and weight versions out."""
