"""The verifier of responses that have to be JSON of a certain form."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import msgspec

from rlctl.tasks.final_part import final_part
from rlctl.tasks.packages import need

_FENCE = re.compile(r"\A```(?:json)?[ \t]*\n(.*)\n```\Z", re.DOTALL)


def json_schema(prompt: str, response: str, answer: str) -> float:  # noqa: ARG001
    """1.0 if the final part, alone or as one fenced block, is JSON for which the schema ``answer`` holds.

    What a number cannot hold (``NaN``, ``1e999``) and nesting beyond reason are no JSON. References to other documents
    are not followed: they raise.
    """
    text = final_part(response)
    if fenced := _FENCE.match(text):
        text = fenced[1]
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return 0.0
    try:
        return float(_validator(answer).is_valid(value))
    except RecursionError:
        return 0.0


def check_schema(answer: str) -> str | None:
    """Return why ``answer`` is no JSON schema to judge by, or None. Raises UnavailableError without jsonschema."""
    jsonschema = need("jsonschema", "jsonschema", "the verifier 'json_schema'")
    try:
        schema = msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(schema, dict) or not schema:
        return "not a JSON object with rules in it"
    try:
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except jsonschema.SchemaError as error:
        return str(error.message)
    return None


@lru_cache(maxsize=256)
def _validator(answer: str) -> Any:
    jsonschema = need("jsonschema", "jsonschema", "the verifier 'json_schema'")
    referencing = need("referencing", "referencing", "the verifier 'json_schema'")
    schema = msgspec.json.decode(answer)
    # An empty registry of ours: the default one would fetch what a reference names from the network.
    return jsonschema.validators.validator_for(schema)(schema, registry=referencing.Registry())
