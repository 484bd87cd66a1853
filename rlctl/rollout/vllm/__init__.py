"""vLLM as a rollout engine: its plugin, and what weight syncs need of it. This file imports nothing."""
