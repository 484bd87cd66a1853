"""Building the parts of a run from its configuration, and taking them down again."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from rlctl.experience.buffer import GroupBuffer
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Noted
from rlctl.model.loading import stop_tokens
from rlctl.ops.inputs import Inputs, steps_in_all
from rlctl.ops.overlong_prompts import fitting_prompts
from rlctl.ops.recorded_rollouts import recorded_groups, require_aligned
from rlctl.ops.reward_model import build_scorer
from rlctl.rollout.base import SamplingParams
from rlctl.rollout.recorded.engine import RecordedEngine
from rlctl.rollout.recorded.prompts import RecordedConversations, RecordedCursor, RecordedTask
from rlctl.rollout.rollouter import Rollouter
from rlctl.runtime.checkpoints import Checkpoints
from rlctl.runtime.cluster.group import ClusterGroup
from rlctl.runtime.cluster.supported import needs_processes
from rlctl.runtime.hybrid.group import HybridGroup
from rlctl.runtime.in_process import InProcessGroup
from rlctl.runtime.models import load_models
from rlctl.runtime.signals import StopSignal
from rlctl.runtime.threads import thread_count
from rlctl.schema import Config
from rlctl.tasks.chat import Chat, observation_ids
from rlctl.tasks.mixed_rewards import scorer_for
from rlctl.tasks.mixture import cursor_for
from rlctl.trainers.admitting import admission_of
from rlctl.trainers.algorithm import Algorithm
from rlctl.trainers.parts import Parts
from rlctl.trainers.registry import get_trainer_cls


class Session:
    """The parts of one run in this process.

    Args:
        config: resolved.
        inputs: model and task, found.
        events: where everything is told.
        checkpoints: folder of the run's checkpoints.
        stop: set by signals.
        output: file for what a user's reward function prints.
    """

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        events: EventLog,
        checkpoints: Path,
        stop: StopSignal,
        *,
        output: Path | None = None,
    ) -> None:
        self._stack = ExitStack()
        try:
            self._build(config, inputs, events, checkpoints, stop, output)
        except BaseException:
            self._stack.close()
            raise

    def _build(
        self,
        config: Config,
        inputs: Inputs,
        events: EventLog,
        checkpoints: Path,
        stop: StopSignal,
        output: Path | None,
    ) -> None:
        self.threads = thread_count(config.run.threads)
        torch.set_num_threads(self.threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        trainer_cls = get_trainer_cls(config.trainer.mode)
        task = inputs.task
        scorer = scorer_for(
            task, config.task.reward_timeout, output, tell=lambda message: events.emit(Noted(message=message))
        )
        self._stack.callback(scorer.close)
        models = load_models(config, inputs)
        loaded = models.actor
        self.tokenizer, self.source = loaded.tokenizer, loaded.source
        chat = Chat(config.task.chat, config.task.system)
        chat.require(loaded.tokenizer, config.model.path)
        stop_ids = stop_tokens(loaded)
        if task.several_turns:
            # A template that cannot tell a conversation is refused here, not in the middle of one.
            observation_ids(loaded.tokenizer, chat, "observation", stop_ids)
        task, held_out = fitting_prompts(config, task, loaded.tokenizer, chat, events)
        cursor = cursor_for(task, config.run.seed, config.task.epochs)
        conversations = None
        if (recorded := recorded_groups(config, loaded)) is not None:
            task = RecordedTask(recorded)
            cursor = RecordedCursor(task, config.run.seed, config.task.epochs)
            conversations = RecordedConversations(recorded, loaded.tokenizer, scorer, chat, config.task.max_turns)
        total_steps = steps_in_all(config, cursor.remaining, ends=recorded is not None)
        updates = math.ceil(
            config.trainer.prompts_per_step / (config.trainer.mini_batch_prompts or config.trainer.prompts_per_step)
        )
        reward_model = None
        if inputs.reward_model is not None:
            reward_model = build_scorer(
                config, inputs.reward_model, loaded, task, stop_ids=stop_ids, threads=self.threads, output=output
            )
            self._stack.callback(reward_model.close)
        make_group: type[ClusterGroup | HybridGroup | InProcessGroup]
        make_group = ClusterGroup if needs_processes(config) else InProcessGroup
        if config.placement.layout == "hybrid":
            make_group = HybridGroup
        group = make_group(
            config,
            loaded,
            events,
            total_updates=total_steps * updates,
            reference=models.reference,
            critic=models.critic,
            logs=None if output is None else output.parent,
            stack=self._stack,
        )
        if recorded is not None:
            assert isinstance(group.engine, RecordedEngine)
            group.engine.serve(recorded)
            require_aligned(recorded, group.model, config, events)
        buffer = GroupBuffer(admission_of(config, total_steps))
        rollouter = Rollouter(
            group.engine,
            task,
            scorer,
            loaded.tokenizer,
            buffer,
            events,
            params=SamplingParams(
                max_new_tokens=config.rollout.max_new_tokens,
                temperature=config.rollout.temperature,
                top_p=config.rollout.top_p,
                top_k=config.rollout.top_k,
                stop_token_ids=stop_ids,
            ),
            samples=config.rollout.samples_per_prompt,
            seed=config.run.seed,
            max_prompt_tokens=config.task.max_prompt_tokens,
            truncate_prompts=config.task.overlong_prompts == "truncate",
            chat=chat,
            max_turns=config.task.max_turns,
            cursor=cursor,
            partial_rollout=config.trainer.partial_rollout is not False,
            conversations=conversations,
        )
        self._stack.callback(rollouter.stop)
        if isinstance(group, InProcessGroup):  # what a pool's replicas end comes out of the pool
            group.on_aborted(rollouter.take)
        self.parts = Parts(
            config=config,
            total_steps=total_steps,
            cursor=cursor,
            held_out=held_out,
            buffer=buffer,
            rollouter=rollouter,
            model=group.model,
            reference=group.reference,
            critic=group.critic,
            reward_model=reward_model,
            rollouts=group,
            events=events,
            checkpoints=Checkpoints(checkpoints, keep=config.run.keep_checkpoints),
            stop=stop,
            algorithm=Algorithm(config),
        )
        self.trainer = trainer_cls(self.parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
