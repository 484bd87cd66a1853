"""HybridEngine: one set of devices, two lives. Between them only the bytes move that a rank lacks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from rlctl.algorithms.objective import Objective
from rlctl.errors import RlctlError, UsageError
from rlctl.experience.rows import Row
from rlctl.hybrid.backward import backward_within
from rlctl.hybrid.batches import Batch, has_advantages, rows_from
from rlctl.hybrid.layouts import Sizes
from rlctl.hybrid.lora.making import held_by, modules_of, resharder, training_engine
from rlctl.hybrid.optimizer import HybridOptimizer
from rlctl.hybrid.own_device import own_device
from rlctl.hybrid.profiling import Profile, imbalance, moved_of
from rlctl.hybrid.reshard.report import SwitchReport
from rlctl.hybrid.rollout import Prompts, Replicas, Rollout, requests_of
from rlctl.hybrid.sampler import RankSampler, Sampling, make_sampler
from rlctl.hybrid.tp.group import Said
from rlctl.hybrid.tp.weights import apart
from rlctl.hybrid.warming import warm_rollout, warm_training
from rlctl.keys.dtypes import dtype_code
from rlctl.model.base import LossSpec, UpdateResult
from rlctl.model.memory_settings import Memory
from rlctl.model.passes import DTYPES
from rlctl.rollout.base import SamplingParams
from rlctl.schema.training import OptimizerConfig
from rlctl.schema.work import LoraConfig

Mode = Literal["training", "rollout", "reward"]
MODES: tuple[Mode, ...] = ("training", "rollout", "reward")
STAYS = Memory(offload_params=False, offload_optimizer=False)
"""Masters and moments stay on the device while it generates."""


class HybridEngine:
    """A model that is trained by FSDP2 and generates on tensor-parallel replicas, on the same ranks.

    Every rank of the default process group makes one with the same arguments, and then the same calls. It begins in
    mode ``training``. Mode ``reward`` is rollout with its cache freed and its weights kept, so that the devices can
    serve a reward model; coming back moves nothing.

    Args:
        model: a transformers causal LM in float32, of the Llama, Qwen2 or Qwen3 family; only rank 0's needs values.
        tokenizer: has ``encode`` and ``decode``; None when prompts are token ids.
        rollout_engine: what generates, ``transformers`` or ``vllm``; as ``rollout.engine`` of a run.
        rollout_parallel, training_parallel, tp_size, dp_size, embedding_sharding: see ``layouts.Sizes``.
        optimizer: AdamW's settings.
        lora: train an adapter instead. The base comes to generation with the first switch and is kept there
            (``lora.sync="merged"``: comes with every one); later switches move the adapter alone.
        loss: what ``compute_loss`` minimises; default: the clipped policy objective, a mean over tokens.
        dtype: of generation, "float32" or "bfloat16"; masters and gradients are float32.
        max_length, max_slots: of generation, see ``RolloutEngine``.
        micro_batch_tokens, total_updates: see ``ModelEngine``.
        memory: what leaves the device while it generates, and how training saves memory.
        seed: of the noise of sampling.
        device: default: this rank's GPU where the process group is NCCL, else the CPU.
        warm_up: run a small forward pass after each switch, so that what is set up on first use (buffers, kernels,
            connections) is not part of the first real one.
        pad: see ``layouts.Sizes``; what it costs is in ``rank_imbalance()``.
        delta: keep generation shards while training, and move only what changed in them.
        deadline: seconds that one wait for another rank takes at most; the default group, too, gets it as its timeout.

    Raises:
        UsageError: the sizes do not fit the ranks or the model.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        rollout_parallel: str = "tp",
        training_parallel: str = "dp+fsdp",
        tp_size: int = 2,
        dp_size: int = 4,
        embedding_sharding: str = "fsdp",
        *,
        rollout_engine: str = "transformers",
        optimizer: OptimizerConfig | None = None,
        lora: LoraConfig | None = None,
        loss: LossSpec | None = None,
        dtype: str = "float32",
        max_length: int = 2048,
        max_slots: int = 64,
        micro_batch_tokens: int = 8192,
        total_updates: int = 1,
        memory: Memory = STAYS,
        seed: int = 0,
        device: torch.device | str | None = None,
        warm_up: bool = False,
        pad: bool = False,
        delta: bool = False,
        deadline: float = 600.0,
    ) -> None:
        sizes = Sizes(training_parallel, rollout_parallel, tp_size, dp_size, embedding_sharding, rollout_engine, pad)
        sizes.check(dist.get_world_size())
        self._device = torch.device(device) if device is not None else own_device()
        self.config, self._tokenizer = model.config, tokenizer
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        code = dtype_code(DTYPES[dtype])
        self.training = training_engine(
            model, optimizer or OptimizerConfig(), lora=lora, seed=seed, dtype=dtype, device=self._device,
            micro_batch_tokens=micro_batch_tokens, total_updates=total_updates, memory=memory, tp=sizes.training_tp,
        )  # fmt: skip
        adapted, keeps = modules_of(self.training), lora is None or lora.sync != "merged"
        self.plan = sizes.plan(self.config.to_dict(), code, devices_per_node=per_node, adapted=adapted)
        self._resharder = resharder(
            self.plan, adapted, deadline=deadline, delta=delta, keeps=keeps, parked=memory.offload_params
        )
        ranks, tp = self.plan.placement.rollout, sizes.rollout_tp
        self._replicas = Replicas(ranks, tp, device=self._device, deadline=deadline)
        self._replicas.hold_to_deadline(self.training.shards.parameters.values())
        at, whole = str(self._device), sizes.whole_vocab
        how = Sampling(rollout_engine, tp, dtype, max_slots, max_length, at, deadline, whole, pad)
        self._make_sampler = partial(make_sampler, self.config, how, ranks, self._replicas.group)
        self._sampler: RankSampler | None = None
        self.optimizer = HybridOptimizer(self.training.optimizing, self._require_training, self._replicas.together)
        self._loss = loss or LossSpec(Objective("ppo_clip"), "token-mean", horizon=max_length)
        self._mode: Mode = "training"
        self._seed, self._warm_up, self._memory = seed, warm_up, memory
        self._prompts = self._switches = 0
        self._version = -1
        self._profile: Profile | None = None

    @property
    def mode(self) -> Mode:
        """The life that it is in."""
        return self._mode

    @property
    def version(self) -> int:
        """How often generation was given weights, less one: that of the weights it has, or had last."""
        return self._version

    @property
    def sampler(self) -> RankSampler:
        """This rank's rollout engine. Raises RlctlError while training."""
        if self._sampler is None or self._mode == "training":
            raise RlctlError("there is no rollout engine while training", fix="switch_to_rollout() first")
        return self._sampler

    def rollout(
        self,
        prompts: Prompts,
        max_new_tokens: int = 64,
        *,
        samples: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop_token_ids: tuple[int, ...] | None = None,
        first_ordinal: int | None = None,
    ) -> Rollout:
        """Return responses to all prompts, on every rank; switches to rollout first.

        Args:
            prompts: texts, or token ids; the same on all ranks. Replicas share them.
            max_new_tokens: longest response.
            samples: responses to each prompt.
            temperature, top_p, top_k: see ``SamplingParams``.
            stop_token_ids: default: the tokenizer's end token.
            first_ordinal: number of the first prompt, which with the seed fixes the noise; default: prompts are
                counted over all calls.
        """
        self.switch_to_rollout()
        if stop_token_ids is None:
            end = getattr(self._tokenizer, "eos_token_id", None)
            stop_token_ids = () if end is None else (end,)
        first = self._prompts if first_ordinal is None else first_ordinal
        params = SamplingParams(max_new_tokens, temperature, top_p, top_k, stop_token_ids)
        requests = requests_of(prompts, self._tokenizer, params, samples=samples, seed=self._seed, first_ordinal=first)
        self._prompts = max(self._prompts, first + len(prompts))
        found = self._replicas.generate(self.sampler, requests)
        decode = getattr(self._tokenizer, "decode", None)
        texts = [] if decode is None else [decode(r.token_ids, skip_special_tokens=True) for r in found]
        return Rollout(found, texts)

    def compute_loss(self, batch: Batch) -> torch.Tensor:
        """Return the loss of a batch, the same scalar on all ranks; switches to training first.

        ``backward()`` of it, called on all ranks, adds the gradient to the parameters', as it would on one process.
        Each rank computes its share of the rows in one pass: cut what does not fit and weigh the parts' losses, or
        use ``update``. Under ``torch.no_grad()`` it is the value alone. Both raise as ``switch_mode``.

        Args:
            batch: the same on all ranks; see ``batches.Batch``. Tokens without advantages are learnt (cross entropy).
        """
        self.switch_to_training()
        rows = rows_from(batch)
        plain = LossSpec(Objective("reinforce"), self._loss.aggregation, horizon=self._loss.horizon)
        with self._replicas.together("training"):
            loss = self.training.loss(rows, self._loss if has_advantages(batch) else plain)
        return backward_within(loss, partial(self._replicas.together, "backward"))

    def update(self, rows: list[Row], loss: LossSpec | None = None) -> UpdateResult:
        """Take one optimizer step on rows in micro-batches; switches to training first."""
        self.switch_to_training()
        with self._replicas.together("training"):
            return self.training.update(rows, loss or self._loss)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the trained parameters, each a DTensor of which this rank has a part."""
        yield from (p for p in self.training.shards.parameters.values() if p.requires_grad)

    def switch_to_training(self) -> None:
        """Free what generation has and go on training. Nothing moves: masters never left. Harmless when repeated."""
        self.switch_mode("training")

    def switch_to_rollout(self) -> None:
        """Give generation its weights. Gradients are freed. Harmless when repeated."""
        self.switch_mode("rollout")

    def switch_mode(self, mode: Mode) -> None:
        """Go to ``training``, ``rollout`` or ``reward``; all ranks do. Harmless when it is there already.

        Raises:
            UsageError: there is no such mode.
            RlctlError: a rank is dead or stuck; names it and the phase.
        """
        if mode not in MODES:
            raise UsageError(f"no mode {mode!r}", fix=f"known: {', '.join(MODES)}")
        if mode == self._mode:
            return
        begin = time.perf_counter()
        moved = None
        if mode == "training":
            self._to_training()
        elif self._mode == "training":
            moved = moved_of(self._reshard(), dist.get_rank())
        self._mode = mode
        if mode == "rollout":
            self.sampler.wake(("kv_cache",))
        elif mode == "reward":
            self.sampler.sleep(1)
        self._switches += 1
        if self._warm_up and mode != "reward":
            warm_training(self.training) if mode == "training" else warm_rollout(self.sampler)
        if self._profile is not None:
            self._profile.add(self._switches, mode, time.perf_counter() - begin, moved)

    def enable_profiling(self) -> None:
        """Take down every switch from now on. All ranks call it: at the end of each they tell each other what they
        moved, some hundred bytes."""
        self._profile = Profile(self._replicas.tell)
        self._replicas.group.said = Said()

    def get_communication_report(self) -> dict[str, Any]:
        """Return what moved since ``enable_profiling``; a rank may call it alone.

        Bytes are of all ranks: ``total_bytes``, ``num_all_gather``, ``num_p2p``, ``max_latency_ms``,
        ``device_pairs`` and ``phases`` (seconds) over all switches, and of each in ``switches``; ``planned_bytes`` of
        one full switch; ``generation``: what this rank sent within its replica; ``imbalance``: bytes that each rank
        holds in either life.

        Raises:
            UsageError: nothing was taken down.
        """
        if self._profile is None:
            raise UsageError("nothing was profiled", fix="call enable_profiling() before the switches")
        return self._profile.report(self.plan, self._replicas.group.said)

    def rank_imbalance(self) -> dict[str, dict[str, Any]]:
        """Return the bytes of weights on each rank in either life, and the fullest over the mean."""
        return imbalance(self.plan)

    def _reshard(self) -> SwitchReport:
        """Fill generation's shards; then what training can spare leaves the device."""
        if self._sampler is None:
            self._sampler = self._make_sampler()
            assert self._sampler is not None
        self.training.release()
        held = held_by(self.training)
        switched = self._resharder.to_rollout(held)
        self._version += 1
        generating = switched.shards
        if self._memory.offload_params:
            generating = apart(generating, held.values())
        self._sampler.adopt(generating, self._version)
        self.training.offload()
        return switched.report

    def _to_training(self) -> None:
        assert self._sampler is not None
        self._sampler.sleep(2)
        self._resharder.to_training()
        self.training.onload()

    def _require_training(self, what: str) -> None:
        if self._mode != "training":
            raise RlctlError(f"{what} in mode {self._mode} would change weights that generation uses",
                             fix="switch_to_training() first")  # fmt: skip
