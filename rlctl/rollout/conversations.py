"""What follows a turn of the model: the task's answer and another turn, or the end. A single response is one turn."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlctl.experience.groups import Response
from rlctl.experience.segments import RequestKey, Segment
from rlctl.rollout.base import Output, Request, SamplingParams
from rlctl.tasks.base import Message, Sample, Score
from rlctl.tasks.chat import Chat, observation_ids
from rlctl.tasks.conversation import opening, said_in_turns
from rlctl.tasks.rewarding import Scorer


class Conversations:
    """Turns of conversations. It holds none: all that one is lies in its ``Response``. Threads may share it; the scorer
    is asked by one at a time.

    ``max_new_tokens`` bounds a conversation as a whole, observations included. One that has no room for an observation
    and a token after it, or that takes ``max_turns`` turns, is cut: it ends with its rewards so far and the finish
    reason ``length``.

    Args:
        tokenizer: a transformers tokenizer.
        scorer: takes the steps.
        chat: how observations are put to the model.
        max_turns: most turns of the model; None: as many as there is room for.
    """

    def __init__(self, tokenizer: Any, scorer: Scorer, chat: Chat, max_turns: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._scorer = scorer
        self._chat = chat
        self._max_turns = max_turns
        self._asking = threading.Lock()

    def request(
        self, key: RequestKey, prompt_ids: Sequence[int], params: SamplingParams, seed: int, so_far: Response | None
    ) -> Request:
        """Return the request of a conversation's next turn, or of the rest of one that was interrupted; ``so_far`` is
        None for the first, whose key is ``key``."""
        if so_far is None:
            return Request(key, tuple(prompt_ids), params, seed)
        before, begun = _at_turn(so_far)
        ids = [token for segment in before for token in segment.token_ids]
        left = replace(params, max_new_tokens=params.max_new_tokens - len(ids))
        return Request(so_far.key, (*prompt_ids, *ids), left, seed, tuple(begun))

    def advance(
        self, ended: Sequence[tuple[Sample, Response | None, Output]], params: SamplingParams
    ) -> list[Response]:
        """Return each conversation after a turn: scored, or with the finish reason ``abort``, waiting for the turn that
        its key names: one with an observation at its end for a new turn, one that was interrupted for the rest of its
        turn, of which nothing is judged yet.

        Args:
            ended: prompt, conversation before the turn, and the turn.
            params: of the first turn.

        Raises:
            StepError: the task's step returned something else than it should.
        """
        grown = [with_turn(so_far, output) for _, so_far, output in ended]
        whole = [i for i, response in enumerate(grown) if response.finish_reason != "abort"]
        batch = [(ended[i][0], self._messages(ended[i][0], grown[i], params.stop_token_ids)) for i in whole]
        with self._asking:
            scores = self._scorer.step(batch)
        for i, score in zip(whole, scores, strict=True):
            grown[i] = self._judged(grown[i], score, params)
        return grown

    def _messages(self, sample: Sample, response: Response, stop_ids: Sequence[int]) -> list[Message]:
        turns = said_in_turns(self._tokenizer, response.token_ids, response.turns, response.observations, stop_ids)
        return [*opening(sample), *turns]

    def _judged(self, response: Response, score: Score, params: SamplingParams) -> Response:
        response = replace(response, reward=(response.reward or 0.0) + score.reward, failed=score.failed)
        if score.observation is None or response.finish_reason == "length":
            return response
        ids = observation_ids(self._tokenizer, self._chat, score.observation, params.stop_token_ids)
        turn = response.key.turn
        room = params.max_new_tokens - len(response.token_ids) - len(ids)
        if room < 1 or not ids or (self._max_turns is not None and turn + 1 >= self._max_turns):
            return replace(response, finish_reason="length")
        last = response.segments[-1]
        observation = Segment(ids, [], last.version, last.replica, turn, observation=True)
        return replace(
            response,
            key=response.key._replace(turn=turn + 1),
            segments=[*response.segments, observation],
            observations=[*response.observations, score.observation],
            finish_reason="abort",
        )


def _at_turn(so_far: Response) -> tuple[list[Segment], list[Segment]]:
    """Return the segments before the turn that is under way, and those of that turn."""
    turn = so_far.key.turn
    segments = so_far.segments
    return [s for s in segments if s.turn < turn], [s for s in segments if s.turn == turn]


def with_turn(so_far: Response | None, output: Output) -> Response:
    """Return a conversation with a turn added; of an interrupted turn the output has the beginning too. What the turn
    has of it already counts once."""
    segments = [replace(segment, turn=output.key.turn) for segment in output.segments]
    if so_far is None:
        return Response(output.key, segments, output.finish_reason)
    return replace(so_far, segments=[*_at_turn(so_far)[0], *segments], finish_reason=output.finish_reason)
