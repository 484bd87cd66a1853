"""Names, shapes and layouts of a model's weights, and hardened, streaming access to the files that hold them."""
