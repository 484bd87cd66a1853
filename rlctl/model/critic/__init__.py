"""The critic: a model that says what a state is worth, trained beside the actor."""
