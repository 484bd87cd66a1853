"""Profile, files, environment and arguments in; one typed configuration out, with the origin of every value."""

from rlctl.config.load import Layer, Resolved, load_config
from rlctl.config.profiles import DEFAULT_PROFILE, list_profiles
from rlctl.config.saved import from_json, read_saved, to_json
from rlctl.config.show import show_config

__all__ = [
    "DEFAULT_PROFILE",
    "Layer",
    "Resolved",
    "from_json",
    "list_profiles",
    "load_config",
    "read_saved",
    "show_config",
    "to_json",
]
