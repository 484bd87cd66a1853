"""Finding a model: a folder, the built-in one, or a hub name; never a long wait on a hub that is not there.

No torch here: a wrong path is told before anything slow is imported.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from rlctl.errors import UnavailableError, UsageError

_HUB_NAME = re.compile(r"^[\w.-]+/[\w.-]+$")
_HUB_SECONDS = 5


def find_model(path: str, builtin: Path | None = None, *, where: str = "model.path", ask_hub: bool = True) -> str:
    """Return what ``from_pretrained`` should be given for ``model.path``.

    Args:
        path: the configured value.
        builtin: folder of the built-in model of that name, if there is one.
        where: key that the value stands under, for messages.
        ask_hub: whether to ask the hub for a model that is not cached; if not, that is an UnavailableError.

    Raises:
        UsageError: a folder that is not there or holds no model.
        UnavailableError: a hub name that is neither cached nor reachable within a few seconds.
    """
    if builtin is not None:
        return str(builtin)
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file() and (folder / "adapter_config.json").is_file():
            merge = f"rlctl convert-keys BASE MERGED --to hf --adapter {path} --merge"
            raise UsageError(f"{path} is an adapter, not a model", where=where, fix=f"fold it into its base: {merge}")
        if not (folder / "config.json").is_file():
            raise UsageError(f"folder {path} holds no config.json", where=where, fix="give a transformers folder")
        return str(folder)
    looks_local = path.startswith((".", "/", "~")) or folder.exists() or not _HUB_NAME.match(path)
    if looks_local:
        what = "is a file, not a model folder" if folder.exists() else "does not exist"
        raise UsageError(f"model {path} {what}", where=where, fix="give a folder, org/name, or cycle-tiny")
    _require_hub(path, where, ask=ask_hub)
    return path


def find_adapter(path: str) -> str:
    """Return the folder of ``model.lora.adapter``. Raises UsageError when it holds no adapter."""
    folder = Path(path).expanduser()
    if not (folder / "adapter_config.json").is_file():
        what = "holds no adapter_config.json" if folder.is_dir() else "does not exist"
        raise UsageError(
            f"folder {path} {what}", where="model.lora.adapter", fix="give the folder of an adapter, such as RUN/final"
        )
    return str(folder)


def _require_hub(name: str, where: str, *, ask: bool) -> None:
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    if not ask:
        raise UnavailableError(f"model {name} is not in the local cache; whether the hub has it is seen when it runs")
    fix = "download it first and give the folder, or set HF_HUB_OFFLINE=0 where the hub can be reached"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise UnavailableError(f"model {name} is not in the local cache and HF_HUB_OFFLINE is set", fix=fix)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(name, timeout=_HUB_SECONDS)
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no answer"
        raise UsageError(f"the hub does not give model {name} ({status})", where=where) from error
    except Exception as error:
        raise UnavailableError(f"model {name} is not cached and the hub cannot be reached", fix=fix) from error
