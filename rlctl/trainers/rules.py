"""What must hold whatever the mode: layout, batch and backend. Each rule is one small pure function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rlctl.algorithms.traits import needs_groups
from rlctl.errors import Finding
from rlctl.hardware.placement import PlacementError, place
from rlctl.rollout.registry import declared_traits
from rlctl.rollout.traits import ENGINE_TRAITS
from rlctl.schema import Config
from rlctl.sync.traits import BACKEND_TRAITS
from rlctl.trainers.arithmetic import step_arithmetic


@dataclass(frozen=True)
class Rule:
    """A constraint on a configuration.

    Attributes:
        title: what holds when ``test`` finds nothing.
        test: returns what is wrong, or None.
        severity: "violated" stops a run; "note" is advice.
    """

    title: str
    test: Callable[[Config], Finding | None]
    severity: Literal["violated", "note"] = "violated"

    @property
    def name(self) -> str:
        """The rule's name, that of its function."""
        return self.test.__name__


def shares_devices(config: Config) -> bool:
    """Whether trainer and replicas live on the same devices."""
    return config.placement.layout != "separate"


def devices_suffice(config: Config) -> Finding | None:
    try:
        place(config.cluster, config.placement)
    except PlacementError as error:
        if error.role == "reward":
            return Finding(
                f"the reward model's own pool has no device left: {error.message}",
                "placement.reward_devices",
                "set it to 0, so that the reward model shares the trainer's devices, or raise cluster.devices_per_node",
            )
        return Finding(
            error.message,
            "placement",
            "lower placement.trainer_ranks, replicas or replica_tp, or raise cluster.nodes or devices_per_node",
        )
    return None


def devices_are_used(config: Config) -> Finding | None:
    total = config.cluster.nodes * config.cluster.devices_per_node
    try:
        used = len({(slot.node, slot.device) for slot in place(config.cluster, config.placement)})
    except PlacementError:
        return None
    return Finding(f"{total - used} of {total} devices stay idle", "placement") if used < total else None


def trainer_tp_divides_ranks(config: Config) -> Finding | None:
    ranks, tp = config.placement.trainer_ranks, config.placement.trainer_tp
    if ranks % tp == 0:
        return None
    return Finding(f"trainer_tp {tp} does not divide {ranks} trainer ranks", "placement.trainer_tp", _valid(ranks))


def tensor_parallel_stays_in_a_node(config: Config) -> Finding | None:
    per_node = config.cluster.devices_per_node
    for key, tp in (("trainer_tp", config.placement.trainer_tp), ("replica_tp", config.placement.replica_tp)):
        if per_node % tp:
            message = f"{key} {tp} does not divide the {per_node} devices of a node"
            return Finding(message, f"placement.{key}", _valid(per_node))
    return None


def _valid(number: int) -> str:
    return f"valid: {', '.join(str(d) for d in range(1, number + 1) if number % d == 0)}"


def someone_generates(config: Config) -> Finding | None:
    if config.placement.replicas + config.placement.hybrid_replicas > 0:
        return None
    return Finding("there is no rollout replica", "placement.replicas", "set it to 1 or more")


def replicas_fit_on_trainer_devices(config: Config) -> Finding | None:
    placement = config.placement
    need = placement.replicas * placement.replica_tp
    if not shares_devices(config) or need <= placement.trainer_ranks:
        return None
    return Finding(
        f"{placement.replicas} replicas x {placement.replica_tp} devices do not fit on the trainer's "
        f"{placement.trainer_ranks} devices, which they share",
        "placement.replicas",
        f"set placement.replicas={placement.trainer_ranks // placement.replica_tp} or placement.layout=separate",
    )


def replicas_use_all_shared_devices(config: Config) -> Finding | None:
    placement = config.placement
    idle = placement.trainer_ranks - placement.replicas * placement.replica_tp
    if not shares_devices(config) or idle <= 0:
        return None
    return Finding(f"{idle} trainer devices stay idle while responses are made", "placement.replicas")


def mini_batch_divides_train_batch(config: Config) -> Finding | None:
    step = step_arithmetic(config)
    if step.prompts % step.mini_batch_prompts == 0:
        return None
    return Finding(
        f"mini_batch_prompts {step.mini_batch_prompts} does not divide prompts_per_step {step.prompts}",
        "trainer.mini_batch_prompts",
        _valid_near(step.prompts, step.mini_batch_prompts),
    )


def _valid_near(number: int, wanted: int) -> str:
    divisors = [d for d in range(1, min(number, 4096) + 1) if number % d == 0]
    return f"nearest that do: {', '.join(str(d) for d in sorted(sorted(divisors, key=lambda d: abs(d - wanted))[:3]))}"


def mini_batch_divides_over_ranks(config: Config) -> Finding | None:
    step = step_arithmetic(config)
    if step.mini_batch_samples % step.data_parallel == 0:
        return None
    return Finding(
        f"the {step.mini_batch_samples} samples of an update ({step.mini_batch_prompts} prompts x "
        f"{config.rollout.samples_per_prompt}) do not divide over {step.data_parallel} data-parallel trainer ranks",
        "trainer.mini_batch_prompts" if config.trainer.mini_batch_prompts else "trainer.prompts_per_step",
        "change it or rollout.samples_per_prompt so that they do",
    )


def micro_batch_holds_a_sequence(config: Config) -> Finding | None:
    longest = config.task.max_prompt_tokens + config.rollout.max_new_tokens
    if config.trainer.micro_batch_tokens >= longest:
        return None
    return Finding(
        f"a micro-batch of {config.trainer.micro_batch_tokens} tokens cannot hold the longest sequence, {longest} "
        f"tokens ({config.task.max_prompt_tokens} of prompt + {config.rollout.max_new_tokens} of response)",
        "trainer.micro_batch_tokens",
        f"set trainer.micro_batch_tokens={longest} or more",
    )


def backend_fits_layout(config: Config) -> Finding | None:
    traits = BACKEND_TRAITS.get(config.sync.backend)
    layout = config.placement.layout
    if traits is None or layout in traits.layouts:
        return None
    return Finding(
        f"backend {config.sync.backend} does not serve the {layout} layout", "sync.backend", _fitting(config)
    )


def _fitting(config: Config) -> str:
    layout, device = config.placement.layout, config.cluster.device
    names = [name for name, traits in BACKEND_TRAITS.items() if layout in traits.layouts and device in traits.devices]
    return f"on {device} devices, {layout}, take {', '.join(names)}"


def backend_fits_device(config: Config) -> Finding | None:
    traits = BACKEND_TRAITS.get(config.sync.backend)
    if traits is None or config.cluster.device in traits.devices:
        return None
    return Finding(
        f"backend {config.sync.backend} moves weights between {' or '.join(traits.devices)} devices, "
        f"and the cluster's are {config.cluster.device}",
        "sync.backend",
        _fitting(config),
    )


def backend_reaches_every_node(config: Config) -> Finding | None:
    traits = BACKEND_TRAITS.get(config.sync.backend)
    if traits is None or not traits.one_node or shares_devices(config):
        return None
    try:
        nodes = {slot.node for slot in place(config.cluster, config.placement)}
    except PlacementError:
        return None
    if len(nodes) == 1:
        return None
    return Finding(
        f"backend {config.sync.backend} works within one node, and the ranks are on {len(nodes)}",
        "sync.backend",
        _fitting(config),
    )


def interface_is_named(config: Config) -> Finding | None:
    if config.cluster.nodes == 1 or config.cluster.links.interface:
        return None
    return Finding(
        f"sockets would bind to loopback, and the cluster has {config.cluster.nodes} nodes",
        "cluster.links.interface",
        "name the network interface between the nodes",
    )


def engine_fits(config: Config) -> Finding | None:
    traits = ENGINE_TRAITS.get(config.rollout.engine.partition(":")[0]) or declared_traits(config.rollout.engine)
    if traits is None:
        return None
    if config.cluster.device not in traits.devices:
        fitting = [name for name, other in ENGINE_TRAITS.items() if config.cluster.device in other.devices]
        return Finding(
            f"engine {config.rollout.engine} does not run on {config.cluster.device} devices",
            "rollout.engine",
            f"these do: {', '.join(fitting)}",
        )
    spread = traits.tensor_parallel or (traits.spread and config.placement.layout == "hybrid")
    if config.placement.replica_tp > 1 and not spread:
        return Finding(
            f"engine {config.rollout.engine} runs a replica on one device, and replica_tp is "
            f"{config.placement.replica_tp}",
            "placement.replica_tp",
            "set placement.replica_tp=1 or take another rollout.engine",
        )
    return None


def decodes_when_told(config: Config) -> Finding | None:
    traits = ENGINE_TRAITS.get(config.rollout.engine.partition(":")[0]) or declared_traits(config.rollout.engine)
    if not config.run.deterministic or traits is None or traits.lockstep:
        return None
    if traits.spread and config.placement.layout == "hybrid":
        return None
    return Finding(
        f"engine {config.rollout.engine} decodes by itself, and equal runs need one that decodes when told to",
        "rollout.engine",
        "set rollout.engine=transformers, or run.deterministic=false",
    )


def groups_can_differ(config: Config) -> Finding | None:
    if config.rollout.samples_per_prompt == 1 and needs_groups(config.algorithm.advantage):
        message = f"one response a prompt: {config.algorithm.advantage} compares the responses of a prompt, no signal"
        return Finding(message, "rollout.samples_per_prompt")
    if config.rollout.temperature == 0:
        message = "temperature 0 makes all responses of a group equal: no signal to learn from"
        return Finding(message, "rollout.temperature")
    return None


def slow_rewards_are_no_stall(config: Config) -> Finding | None:
    if config.trainer.stall_timeout > config.task.reward_timeout:
        return None
    return Finding(
        f"a reward call may take {config.task.reward_timeout:g} s, and a run is taken for stalled after "
        f"{config.trainer.stall_timeout:g} s in which no response ends",
        "trainer.stall_timeout",
        f"set it to more than {config.task.reward_timeout:g}",
    )


GENERAL: tuple[Rule, ...] = (
    Rule("the cluster has a device for every rank", devices_suffice),
    Rule("every device has work", devices_are_used, "note"),
    Rule("trainer_tp divides the trainer's ranks", trainer_tp_divides_ranks),
    Rule("tensor-parallel groups stay within a node", tensor_parallel_stays_in_a_node),
    Rule("there is a rollout replica", someone_generates),
    Rule("replicas that share devices fit on the trainer's", replicas_fit_on_trainer_devices),
    Rule("replicas use all the devices that they share", replicas_use_all_shared_devices, "note"),
    Rule("mini batches divide the train batch", mini_batch_divides_train_batch),
    Rule("the samples of an update divide over the trainer's ranks", mini_batch_divides_over_ranks),
    Rule("a micro-batch holds the longest sequence", micro_batch_holds_a_sequence),
    Rule("the sync backend serves the layout", backend_fits_layout),
    Rule("the sync backend works on the devices", backend_fits_device),
    Rule("the sync backend reaches every node", backend_reaches_every_node),
    Rule("sockets bind to a named interface between nodes", interface_is_named),
    Rule("the rollout engine fits devices and replicas", engine_fits),
    Rule("the rollout engine of a deterministic run decodes in lockstep", decodes_when_told),
    Rule("the responses of a group can differ", groups_can_differ, "note"),
    Rule("a slow reward is not taken for a stall", slow_rewards_are_no_stall),
)
