"""Rules on which GPUs a process and its children see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlctl.hardware.link_graph import Gpu
from rlctl.hardware.rules.outcome import Outcome, fail, ok, skipped, warn
from rlctl.hardware.visible_devices import Visible, child_value, parse_visible, resolve_visible

VARIABLE = "CUDA_VISIBLE_DEVICES"
_SHOWN = 80
_WORDS = ("all", "none", "void", "nodevfiles")


def visible_devices(env: Mapping[str, str], gpus: Sequence[Gpu], *, needed: int = 0) -> list[Outcome]:
    """Check CUDA_VISIBLE_DEVICES.

    Args:
        env: the variables.
        gpus: of the node; none when they are not known.
        needed: how many devices of a node the run takes.
    """
    rule, text = "visible-devices", env.get(VARIABLE)
    visible = parse_visible(text)
    if text is None:
        return [ok(rule, f"{VARIABLE} is not set: every GPU is seen"), *_order(env, gpus)]
    shown = f"{VARIABLE}={text[:_SHOWN]}"
    found = [_note(rule, shown, text, message, lost) for message, lost in visible.notes]
    seen = resolve_visible(visible, gpus) if gpus else []
    if gpus and visible.entries and len(seen) < len(visible.entries):
        found.append(_unresolved(rule, shown, visible, seen, gpus))
    count = len(seen) if gpus else len(visible.entries or ())
    if visible.mig and count > 1:
        message = f"{shown}: a process can use one MIG device, and the first is taken"
        found.append(warn(rule, message, "start a process for each MIG device"))
    if needed and count < needed:
        found.append(
            fail(rule, f"{shown} shows {count} GPUs, and a node of the run takes {needed}", "show more, or none")
        )
    return [*(found or [ok(rule, f"{shown} shows {count} GPUs")]), *_order(env, gpus)]


def _note(rule: str, shown: str, text: str, message: str, lost: bool) -> Outcome:
    if text.strip().lower() in _WORDS:
        fix = f"unset {VARIABLE} to show all; the word is one of NVIDIA_VISIBLE_DEVICES"
    else:
        fix = "write 0,1,2 or GPU-<id>,GPU-<id>"
    return fail(rule, f"{shown}: {message}", fix) if lost else warn(rule, f"{shown}: {message}", fix)


def _unresolved(rule: str, shown: str, visible: Visible, seen: Sequence[str], gpus: Sequence[Gpu]) -> Outcome:
    entries = visible.entries or ()
    odd = entries[min(len(seen), len(entries) - 1)]
    what = f"there are {len(gpus)} GPUs" if isinstance(odd, int) else "it must be the beginning of exactly one id"
    message = f"{shown}: {odd} names no device or a second time one; {len(seen)} of {len(entries)} are seen; {what}"
    return fail(rule, message, "list them with nvidia-smi -L")


def _order(env: Mapping[str, str], gpus: Sequence[Gpu]) -> list[Outcome]:
    names = {gpu.name for gpu in gpus if gpu.name}
    if len(names) < 2 or env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return []
    message = f"the GPUs differ ({', '.join(sorted(names))}), and CUDA numbers the fastest first, nvidia-smi by bus"
    return [warn("device-order", message, "set CUDA_DEVICE_ORDER=PCI_BUS_ID")]


def child_devices(parent: str | None, child: str, gpus: Sequence[Gpu]) -> Outcome:
    """Check the value that a launcher gives to an engine's process against this process's own.

    The child must see no device that the parent does not: it would land on another job's.
    """
    rule = "child-devices"
    outer, inner = parse_visible(parent), parse_visible(child)
    if gpus:
        mine, theirs = resolve_visible(outer, gpus), resolve_visible(inner, gpus)
    else:
        mine, theirs = _bare(outer), _bare(inner)
    right = child_value(parent, range(len(inner.entries or ())))
    if inner.entries is not None and not theirs:
        return fail(rule, f"{VARIABLE}={child[:_SHOWN]} of a child names no device", f"set {right or parent}")
    if outer.entries is None and not gpus:
        return ok(rule, f"the parent shows every GPU, the child {len(theirs)}")
    if not gpus and {type(entry) for entry in (*(outer.entries or ()), *(inner.entries or ()))} == {int, str}:
        return skipped(rule, "one names numbers and the other ids, and no GPU is here to tell which is which")
    foreign = [name for name in theirs if name not in mine]
    if foreign:
        fix = f"set {right}" if right is not None else f"take entries of {(parent or '')[:_SHOWN]}"
        return fail(
            rule,
            f"a child with {VARIABLE}={child[:_SHOWN]} uses {', '.join(foreign[:8])}, which are not among this "
            f"process's ({(parent or 'all')[:_SHOWN]}): the variable counts the node's GPUs, not the parent's",
            f"{fix}: local number i is entry i of the parent's list",
        )
    same = "the same devices" if set(mine) == set(theirs) else f"{len(theirs)} of the parent's {len(mine)}"
    return ok(rule, f"a child with {VARIABLE}={child[:_SHOWN]} uses {same}")


def _bare(visible: Visible) -> list[str]:
    return [f"GPU {entry}" if isinstance(entry, int) else entry for entry in visible.entries or ()]
