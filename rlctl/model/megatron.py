"""The Megatron engine is not built. Its name is known, so that a layout for it can be planned."""

from __future__ import annotations

from typing import Any, NoReturn

from rlctl.model.base import ModelEngine
from rlctl.model.megatron_needs import not_built


class MegatronEngine(ModelEngine):
    """Says what training by Megatron-core would need, and what to take instead."""

    def __new__(cls, *_args: Any, **_options: Any) -> NoReturn:
        raise not_built()
