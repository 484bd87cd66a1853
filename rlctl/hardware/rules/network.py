"""Rules on the network: which interfaces and cards the variables of NCCL, Gloo and UCX choose here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlctl.hardware.rules.name_filter import NameFilter, default_interfaces
from rlctl.hardware.rules.outcome import Outcome, fail, ok, skipped, warn

SOCKETS = "NCCL_SOCKET_IFNAME"
CARDS = "NCCL_IB_HCA"


def socket_interface(env: Mapping[str, str], names: Sequence[str] | None, *, nodes: int = 1) -> Outcome:
    """Check NCCL_SOCKET_IFNAME against the interfaces that have an address.

    Args:
        env: the variables.
        names: interfaces; None when they are not known (a dump of another node).
        nodes: of the run: on several, an unset variable is worth a word when there is a choice.
    """
    rule, value = "socket-interface", env.get(SOCKETS, "")
    if names is None:
        return skipped(rule, "the interfaces of that node are not known: run it there")
    chosen = NameFilter.parse(value)
    if chosen is None:
        taken = default_interfaces(names)
        if nodes > 1 and len(taken) > 1:
            fix = f"name the one that joins the nodes, such as {SOCKETS}={'=' + taken[0]}"
            return warn(rule, f"{SOCKETS} is not set, and NCCL may take any of {', '.join(taken)}", fix)
        return ok(rule, f"{SOCKETS} is not set; NCCL takes {', '.join(taken) or 'none'}")
    return _filtered(rule, SOCKETS, value, chosen, names, "interface")


def cards(env: Mapping[str, str], names: Sequence[str] | None) -> Outcome:
    """Check NCCL_IB_HCA against the InfiniBand and RoCE devices."""
    rule, value = "ib-cards", env.get(CARDS, "")
    chosen = NameFilter.parse(value)
    if chosen is None:
        return ok(rule, f"{CARDS} is not set: NCCL takes all of them")
    if not names:
        return skipped(rule, f"{CARDS}={value}, and no InfiniBand or RoCE device is known here")
    return _filtered(rule, CARDS, value, chosen, names, "InfiniBand or RoCE device")


def _filtered(rule: str, variable: str, value: str, chosen: NameFilter, names: Sequence[str], kind: str) -> Outcome:
    found = chosen.choose(names)
    if not found:
        return fail(
            rule,
            f"{variable}={value} matches no {kind}; there are {', '.join(names) or 'none'}",
            f"set {variable} to one of them, with = before an exact name",
        )
    surprises = chosen.surprises(names)
    if surprises:
        more = "; ".join(f"{name} also stands for {', '.join(others)}" for name, others in surprises.items())
        way = "^=" if chosen.exclude else "="
        return warn(
            rule,
            f"{variable}={value} is a list of beginnings: {more}; it takes {', '.join(found)}",
            f"for exact names write {variable}={way}{','.join(chosen.names)}",
        )
    return ok(rule, f"{variable}={value} takes {', '.join(found)}")


def other_interfaces(env: Mapping[str, str], names: Sequence[str] | None, cards: Sequence[str]) -> list[Outcome]:
    """Check the variables that take exact names: Gloo's and TensorPipe's interfaces, UCX's devices."""
    found = []
    for variable in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        listed = [name for name in env.get(variable, "").split(",") if name]
        if not listed or names is None:
            continue
        unknown = [name for name in listed if name not in names]
        if unknown:
            message = f"{variable}={env[variable]}: no interface {', '.join(unknown)}; it takes exact names"
            found.append(fail("gloo-interface", message, f"one of {', '.join(names)}"))
        else:
            found.append(ok("gloo-interface", f"{variable}={env[variable]}"))
    devices = [part.partition(":")[0] for part in env.get("UCX_NET_DEVICES", "").split(",") if part]
    if devices and devices != ["all"] and names is not None:
        unknown = [name for name in devices if name not in names and name not in cards]
        if unknown:
            message = f"UCX_NET_DEVICES={env['UCX_NET_DEVICES']}: no device {', '.join(unknown)}"
            found.append(fail("ucx-devices", message, f"names of {', '.join([*cards, *names])}, cards with their port"))
        else:
            found.append(ok("ucx-devices", f"UCX_NET_DEVICES={env['UCX_NET_DEVICES']}"))
    return found
