"""Rules on NCCL's and PyTorch's variables: that they exist, and that their values are such."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlctl.hardware.rules.nccl_names import BUILD_NAMES, NCCL_LIST, PLUGIN_PREFIXES, RETIRED, known_names
from rlctl.hardware.rules.outcome import Outcome, fail, ok, warn
from rlctl.registry import suggest

_TRUE_FALSE = {"0", "1", "y", "yes", "n", "no", "t", "true", "f", "false"}
_SHOWN = 60


def variable_names(env: Mapping[str, str]) -> list[Outcome]:
    """Check that every ``NCCL_*`` and ``TORCH_NCCL_*`` variable is one that something reads."""
    rule, found, known = "nccl-names", [], known_names()
    for name in sorted(n for n in env if n.startswith(("NCCL_", "TORCH_NCCL_"))):
        if name in known or name in BUILD_NAMES or name.startswith(PLUGIN_PREFIXES):
            continue
        if name in RETIRED:
            retired = RETIRED[name]
            if retired.effect == "old":
                found.append(warn(rule, f"{name} is an old name: {retired.why}", f"set {retired.instead}"))
            else:
                message = f"{name} has no effect: {retired.why}"
                found.append(fail(rule, message, f"set {retired.instead}"))
            continue
        near = _near(name)
        fix = f"did you mean {near}?" if near else "leave it out, unless a plugin reads it"
        found.append(warn(rule, f"{name} is not known ({NCCL_LIST})", fix))
    used = [name for name in env if name in known]
    return found or [ok(rule, f"{len(used)} variables of NCCL are set, and all exist ({NCCL_LIST})")]


def _near(name: str) -> str | None:
    """Return the variable that a name was meant to be. What all names begin with says nothing."""
    by_rest = {_rest(known): known for known in (*RETIRED, *known_names())}
    near = suggest(_rest(name), by_rest)
    if near is None:
        return None
    meant = by_rest[near]
    return RETIRED[meant].instead if meant in RETIRED else meant


def _rest(name: str) -> str:
    return name.removeprefix("TORCH_").removeprefix("NCCL_")


def variable_values(env: Mapping[str, str]) -> list[Outcome]:
    """Check the values of known variables, and what switches a transport off."""
    rule, found = "nccl-values", []
    for name, known in sorted(known_names().items()):
        value = env.get(name)
        if value is not None and (wanted := _wanted(name, value.strip(), known.values)) is not None:
            found.append(fail(rule, f"{name}={value[:_SHOWN]} is no value that it takes", f"it takes {wanted}"))
    found += _switched_off(env)
    return found or [ok(rule, "the values are ones that NCCL takes")]


def _wanted(name: str, value: str, values: str) -> str | None:
    """Return what a variable takes when ``value`` is nothing of it, else None."""
    if values == "*":
        return None
    if values == "bool":
        switch = _TRUE_FALSE if name.startswith("TORCH_") else {"0", "1"}
        return None if value.lower() in switch else "0 or 1"
    if ".." not in values:
        words = values.split("|")
        return None if value.upper() in words else ", ".join(words)
    low, _, high = values.partition("..")
    number = _integer(value, hexadecimal=not name.startswith("TORCH_"))
    inside = number is not None and int(low) <= number <= int(high or 1 << 62)
    return None if inside else f"a whole number from {low}" + (f" to {high}" if high else "")


def _integer(text: str, *, hexadecimal: bool) -> int | None:
    """Return a number as NCCL reads it (strtoll of any base, in its param.cc), or as std::stoi does."""
    if hexadecimal and re.fullmatch(r"[+-]?0[xX][0-9a-fA-F]{1,15}", text):
        return int(text, 16)
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else None


def _switched_off(env: Mapping[str, str]) -> list[Outcome]:
    costs = {
        "NCCL_P2P_DISABLE": "GPUs of a node go through host memory, not over NVLink",
        "NCCL_SHM_DISABLE": "GPUs of a node without peer access go over the network",
        "NCCL_IB_DISABLE": "nodes talk over TCP sockets, not over InfiniBand or RoCE",
        "NCCL_NVLS_ENABLE": "reductions are not done in the NVSwitch",
    }
    off = {"NCCL_NVLS_ENABLE": "0"}
    return [
        warn(
            "nccl-transports", f"{name}={env[name].strip()}: {cost}", f"unset {name} once it has found what it was for"
        )
        for name, cost in costs.items()
        if env.get(name, "").strip() == off.get(name, "1")
    ]


def timeouts(env: Mapping[str, str], sync_timeout: float | None = None) -> list[Outcome]:
    """Check that NCCL gives up on a link before the run does, and that the watchdog's parts go together.

    Args:
        env: the variables.
        sync_timeout: seconds of a weight sync in the profile; None without one.
    """
    rule, found = "nccl-timeouts", []
    timeout, retries = _number(env.get("NCCL_IB_TIMEOUT"), 20), _number(env.get("NCCL_IB_RETRY_CNT"), 7)
    if timeout is not None and retries is not None and 0 <= timeout <= 31 and 0 <= retries <= 7:
        seconds = 4.096e-6 * 2**timeout * max(retries, 1)
        said = (
            f"a lost InfiniBand link is an error after {seconds:.3g} s (NCCL_IB_TIMEOUT {timeout}, {retries} retries)"
        )
        if timeout == 0:
            found.append(fail(rule, "NCCL_IB_TIMEOUT=0 waits for ever", "leave it unset, or 18 to 23"))
        elif sync_timeout is not None and seconds > sync_timeout:
            fix = f"lower NCCL_IB_TIMEOUT, or raise sync.timeout above {seconds:.0f} s"
            found.append(warn(rule, f"{said}, later than the {sync_timeout:g} s of a weight sync", fix))
        else:
            found.append(ok(rule, said))
    handling = env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", env.get("NCCL_ASYNC_ERROR_HANDLING", "")).strip()
    if handling == "0":
        message = "TORCH_NCCL_ASYNC_ERROR_HANDLING=0: a collective that fails on one rank hangs the others"
        found.append(warn(rule, message, "leave it unset: 3 is the default"))
    both = [n for n in ("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT") if f"TORCH_NCCL_{n}" in env and f"NCCL_{n}" in env]
    found += [
        warn(rule, f"NCCL_{name} and TORCH_NCCL_{name} are both set", f"keep TORCH_NCCL_{name} alone") for name in both
    ]
    return found


def _number(text: str | None, default: int) -> int | None:
    if text is None:
        return default
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text.strip()) else None
