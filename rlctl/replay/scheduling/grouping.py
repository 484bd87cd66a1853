"""The buffer told again: what is admitted, evicted and selected, from what was asked for and what arrived."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from rlctl.experience.buffer import GroupBuffer
from rlctl.experience.event_base import Event
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Aborted, Dispatched, Evicted, Finished, GroupEnded, SegmentMade, Selected
from rlctl.experience.groups import PromptGroup, Response
from rlctl.experience.schedule_events import Admitted, Arrived, LoopChanged, Retained, ScheduleBegan, Wanted
from rlctl.experience.segments import FinishReason, RequestKey, Segment
from rlctl.experience.standing import oldest_of, stand_in, stood
from rlctl.replay.scheduling.expecting import DisagreementError, Expected, require
from rlctl.schema import Config
from rlctl.tasks.base import Sample
from rlctl.trainers.admitting import admission_of
from rlctl.trainers.refill import Refill
from rlctl.trainers.step import StepState


class _Prompts:
    """The data's place, without the data."""

    def __init__(self, ordinal: int, remaining: int | None) -> None:
        self.ordinal, self.remaining = ordinal, remaining

    def take(self, n: int) -> list[tuple[int, Sample]]:
        count = n if self.remaining is None else min(n, self.remaining)
        taken = [(self.ordinal + place, Sample(0, "", "")) for place in range(count)]
        self.ordinal += count
        self.remaining = None if self.remaining is None else self.remaining - count
        return taken


class Grouping:
    """The real ``GroupBuffer``, ``Admission`` and ``Refill``, driven by one attempt's events.

    Args:
        config: of the attempt.
        began: where it stood.

    Attributes:
        buffer: with groups that stand as they stood, without their tokens.
        version: that generates; -1 before there is one.
        rounds: local updates selected for the step that is under way.
        step: that is under way.
    """

    def __init__(self, config: Config, began: ScheduleBegan) -> None:
        trainer = config.trainer
        self.buffer = GroupBuffer(admission_of(config, began.steps))
        self.version = -1
        self.step, self.rounds = began.step + 1, 0
        self.prompts = _Prompts(began.ordinal, None if began.remaining < 0 else began.remaining)
        self._samples = config.rollout.samples_per_prompt
        self._updates = trainer.parameter_sync_step or 1
        self._batch = trainer.prompts_per_step // self._updates
        self._partial = trainer.partial_rollout is not False
        self._expected = Expected()
        self._refilled = EventLog(None)
        self._refilled.subscribe(self._refill_told)
        self._refill: Refill | None = None
        if config.algorithm.filter_groups:
            self._refill = Refill(config, self.buffer, self.prompts, self, self._refilled)
        self._waits = StepState(0)
        self._paused = False
        self._made: dict[tuple[int, int], list[Segment]] = {}
        self._load(began)
        self.handlers: Mapping[type[Event], Callable[[Any], None]] = {
            Wanted: self._wanted,
            Admitted: self._admitted,
            Dispatched: self._told,
            Retained: self._refills,
            Arrived: self._arrived,
            Aborted: self._aborted,
            SegmentMade: self._segment,
            Finished: self._finished,
            GroupEnded: self._told,
            Evicted: self._evicted,
            Selected: self._selected,
            LoopChanged: self._loop,
        }

    def take(self, event: Event) -> None:
        """Take an event that was told holding the buffer. Raises DisagreementError."""
        if not self._expected.met_by(event) and (handler := self.handlers.get(type(event))):
            handler(event)

    # What a refill asks of the rollouter.

    def submit(self, prompts: Sequence[tuple[int, Sample]], version: int) -> None:
        """Admit prompts; their events must come."""
        for ordinal, _ in prompts:
            self.buffer.submit(PromptGroup(ordinal, 0, "", [], self._samples, version))
            self._expected.add("admission", Dispatched, ordinal=ordinal, version=version, samples=self._samples)

    def may_evict(self) -> bool:
        """It did when it told so."""
        return True

    # One kind of event each.

    def _load(self, began: ScheduleBegan) -> None:
        for group in began.groups:
            self.buffer.submit(stood(group))
        self.buffer.selected = began.selected
        self.buffer.continue_from(began.step)

    def _told(self, event: Event) -> None:
        raise DisagreementError(event, "buffer", "nothing was decided that it tells of")

    def _wanted(self, event: Wanted) -> None:
        require(event.step == self.step, event, "step", f"step {self.step} is under way")
        require(event.round == self.rounds, event, "step", f"local update {self.rounds} comes next")
        attainable = self.buffer.attainable(self._batch, self.prompts.remaining)
        require(event.groups == attainable, event, "selection", f"{attainable} groups can come")
        self._waits = StepState(event.step, round=event.round, target=event.groups)
        if self._refill is not None:
            self._refill.begin(self._waits)

    def _admitted(self, event: Admitted) -> None:
        require(event.version == self.version, event, "admission", f"version {self.version} generates")
        require(event.by == "step" or not self._paused, event, "admission", "the loop is paused")
        room = self.buffer.room(event.version)
        require(event.room == room, event, "admission", f"room for {event.room} groups; {room} comes out here")
        prompts = self.prompts.take(room)
        require(event.taken == len(prompts), event, "admission", f"{len(prompts)} of {room} prompts are there")
        self.submit(prompts, event.version)

    def _arrived(self, event: Arrived) -> None:
        for (ordinal, sample, turn), oldest in zip(event.keys, event.oldest, strict=True):
            self._group(event, ordinal, sample)
            self.buffer.goes_on(stand_in(RequestKey(ordinal, sample, turn), oldest))

    def _aborted(self, event: Aborted) -> None:
        require(not (event.lost and self._partial), event, "interruption", "interrupted responses go on")
        for ordinal, sample, _ in event.keys:
            group = self._group(event, ordinal, sample)
            require(sample in group.under_way, event, "interruption", f"{ordinal}, {sample} is not under way")
            if event.lost:
                self.buffer.starts_again(ordinal, sample)

    def _segment(self, event: SegmentMade) -> None:
        self._group(event, event.ordinal, event.sample)
        made = self._made.setdefault((event.ordinal, event.sample), [])
        require(event.index == len(made), event, "response", f"segment {len(made)} comes next")
        ids, logprobs = [0] * event.tokens, [] if event.observation else [0.0] * event.tokens
        made.append(Segment(ids, logprobs, event.version, event.replica, event.turn, event.observation))

    def _finished(self, event: Finished) -> None:
        group = self._group(event, event.ordinal, event.sample)
        segments = self._made.pop((event.ordinal, event.sample), [])
        turn = max((segment.turn for segment in segments), default=0)
        key = RequestKey(event.ordinal, event.sample, turn)
        response = Response(key, segments, cast("FinishReason", event.reason), event.reward)
        require(response.sampled == event.tokens, event, "response", f"its segments have {response.sampled} tokens")
        under_way = group.under_way.get(event.sample)
        arrived = under_way is not None and oldest_of(under_way) == oldest_of(response)
        require(arrived, event, "response", "its tokens are not those that arrived")
        if self.buffer.complete(response).finished:
            self._expected.add("completion", GroupEnded, ordinal=event.ordinal, status="finished")
            self._expire(self.version)

    def _evicted(self, event: Evicted) -> None:
        if event.why == "no signal":
            self._refills(event)
            return
        self._expire(self.step - 1)
        require(self._expected.met_by(event), event, "eviction", f"no group is too old for version {self.step - 1}")

    def _selected(self, event: Selected) -> None:
        require(event.step == self.step, event, "selection", f"step {self.step} is under way")
        waits = self._waits.number == event.step and self._waits.round == self.rounds
        require(waits, event, "selection", "nothing waits for groups")
        count = self.buffer.attainable(self._waits.target, self.prompts.remaining)
        version = event.step - 1
        try:
            groups = self.buffer.select(count, version)
        except LookupError as error:
            raise DisagreementError(event, "selection", str(error)) from error
        ordinals = [group.ordinal for group in groups]
        require(event.ordinals == ordinals, event, "selection", f"{event.ordinals}, and {ordinals} come out here")
        ages = [version - group.oldest_version for group in groups]
        require(event.ages == ages, event, "selection", f"their ages are {ages}, and {event.ages} are told")
        self.rounds += 1

    def _loop(self, event: LoopChanged) -> None:
        if event.change != "version":
            self._paused = event.change == "paused"
            return
        if self.version < 0:
            self.buffer.continue_from(event.version)
        self.version = event.version
        self._expire(event.version)

    def _refills(self, event: Evicted | Retained) -> None:
        """Have groups without signal replaced, once the first of them is told."""
        require(self._refill is not None, event, "filtering", "groups without signal are trained")
        assert self._refill is not None
        self._refill.enough(self._waits)
        require(self._expected.met_by(event), event, "filtering", "no group is without signal")

    def _refill_told(self, event: Event) -> None:
        if isinstance(event, Evicted):
            self._expected.add("filtering", Evicted, ordinal=event.ordinal, why=event.why, age=event.age)
        elif isinstance(event, Retained):
            self._expected.add("filtering", Retained, ordinal=event.ordinal)

    def _expire(self, version: int) -> None:
        for ordinal, age in self.buffer.expire(version):
            self._expected.add("eviction", Evicted, ordinal=ordinal, why="stale", age=age)

    def _group(self, event: Event, ordinal: int, sample: int) -> PromptGroup:
        try:
            group = self.buffer.group_of(ordinal)
        except KeyError as error:
            raise DisagreementError(event, "buffer", f"group {ordinal} is not in the buffer") from error
        require(0 <= sample < group.size, event, "buffer", f"group {ordinal} has {group.size} responses")
        require(sample not in group.responses, event, "buffer", f"response {ordinal}, {sample} has ended")
        return group
