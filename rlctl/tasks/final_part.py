"""What a response says in the end."""

from __future__ import annotations


def final_part(response: str) -> str:
    """Return what a response says after its last ``</think>``, or all of it, without white space around."""
    return response.rpartition("</think>")[2].strip()
