"""SGLang as a rollout engine, driven over the HTTP API of its own server."""
