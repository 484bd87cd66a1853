"""LoRA on devices that both train and generate: the base comes to generation once, then adapters alone."""
