"""The reward model: frozen, it says what whole responses are worth."""
