"""The model spread over ranks: FSDP2, alone or over tensor parallelism."""
