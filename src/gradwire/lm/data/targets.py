"""Characters of a document that are targets, and the tokens that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges of characters [start, end), in order and without overlap."""

ASSISTANT = "assistant"  # the role whose turns are targets


class Content(NamedTuple):
    """The content of a document, as a model reads it.

    Attributes:
        text: The text.
        spans: The characters of it that are targets; None: all.
        templated: Whether special tokens in the text are those of a chat template, which also ends the text.
    """

    text: str
    spans: Spans | None = None
    templated: bool = False


def of_completion(value: Mapping[str, Any]) -> Content:
    """Return the text of a prompt and its completion, one directly after the other; the completion is the target.

    Raises:
        ValueError: If one of them is not a string, or the completion is blank.
    """
    for key in ("prompt", "completion"):
        if not isinstance(value.get(key), str):
            raise ValueError(f"needs a string {key!r} beside the other one of 'prompt' and 'completion'")
    prompt, completion = value["prompt"], value["completion"]
    if not completion.strip():
        raise ValueError("has a blank completion and so nothing to learn: remove it")
    return Content(prompt + completion, ((len(prompt), len(prompt) + len(completion)),))


def messages_of(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat, without entries that are null.

    Raises:
        ValueError: If they are not a list of objects with a string role and content, or the assistant says nothing.
    """
    messages = value["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("needs 'messages' that are a list of objects with 'role' and 'content'")
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"has a message {number} (counted from 0) whose role or content is not a string")
    if not answers(messages):
        empty = next((number for number, message in enumerate(messages) if message["role"] == ASSISTANT), None)
        wrong = f"no message of the {ASSISTANT}" if empty is None else f"an empty message {empty} of the {ASSISTANT}"
        raise ValueError(f"has {wrong} and so nothing to learn: remove it")
    return [{key: entry for key, entry in message.items() if entry is not None} for message in messages]


def answers(messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return the numbers of the assistant's messages that are not blank."""
    return tuple(
        number for number, message in enumerate(messages) if message["role"] == ASSISTANT and message["content"].strip()
    )


def of_spans(text: str, given: Any) -> Content:
    """Return a text with the targets that its document states.

    Raises:
        ValueError: If they are not ranges of the text's characters, in order and without overlap.
    """
    pairs = isinstance(given, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in given)
    edges = [edge for pair in given for edge in pair] if pairs else []
    if not edges or any(type(edge) is not int for edge in edges):
        raise ValueError("needs 'target_spans' that are a list of [start, end] in characters of 'text'")
    ordered = edges == sorted(edges) and all(start < end for start, end in given)
    if not ordered or edges[0] < 0 or edges[-1] > len(text):
        raise ValueError(f"has 'target_spans' that overlap, are empty, or leave its text of {len(text)} characters")
    return Content(text, tuple((start, end) for start, end in given))


def missing(value: Mapping[str, Any]) -> str | None:
    """Return what a document lacks to be of use: ``text``, ``completion``, or an ``answer`` in its messages."""
    for key in ("text", "completion"):
        if key in value and (value[key] is None or _blank(value[key])):
            return key
    return "answer" if "messages" in value and not _answered(value["messages"]) else None


def _answered(chat: Any) -> bool:
    """Whether a chat has a message of the assistant, or is malformed, which `messages_of` reports."""
    if not isinstance(chat, list) or not all(isinstance(message, dict) for message in chat):
        return chat is not None
    return any(message.get("role") == ASSISTANT and not _blank(message.get("content")) for message in chat)


def _blank(text: Any) -> bool:
    return isinstance(text, str) and not text.strip()


def are_targets(places: Sequence[tuple[int, int]], spans: Spans) -> NDArray[np.bool_]:
    """Whether each token has a character of a span.

    Args:
        places: Each token's characters [start, end) in the text.
        spans: The targets' characters in the text.
    """
    starts, ends = np.array(places, dtype=np.int64).reshape(-1, 2).T
    inside = np.zeros(len(starts), dtype=bool)
    for start, end in spans:
        inside |= (starts < end) & (ends > start)
    return inside
