"""The plain typed dataclasses of the configuration."""

from rlctl.schema.root import Config

__all__ = ["Config"]
