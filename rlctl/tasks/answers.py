"""Answers that a verifier could not judge by, found before the first step."""

from __future__ import annotations

import re

from rlctl.tasks.json_schema import check_schema
from rlctl.tasks.numbers import last_number
from rlctl.tasks.verifiers import VERIFIERS


def answer_fault(verifier: str | None, answer: str) -> str | None:
    """Return why the built-in ``verifier`` cannot judge by ``answer``, or None. Of a user's function nothing is asked.

    Raises:
        UnavailableError: the verifier needs a package that is not there.
    """
    if verifier not in VERIFIERS.names():
        return None
    if not answer.strip():
        return "the answer is empty"
    if verifier == "numeric" and last_number(answer) is None:
        return f"the answer {answer!r} has no number in it, as the verifier 'numeric' needs"
    if verifier == "regex":
        try:
            re.compile(answer)
        except (re.error, OverflowError, RecursionError) as error:
            return f"the answer {answer!r} is not a regular expression: {error}"
    if verifier == "json_schema" and (fault := check_schema(answer)):
        return f"the answer is not a JSON schema: {fault}"
    return None
