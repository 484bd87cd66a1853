"""vLLM on the trainer's own ranks: each process holds a worker, which computes with the shards that it is given."""
