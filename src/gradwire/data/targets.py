"""Which characters of a document are targets, from prompt and completion or a chat, and which tokens these are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges of characters [start, end), in order and without overlap."""

ASSISTANT = "assistant"  # the role whose turns are targets


def of_completion(value: Mapping[str, Any]) -> tuple[str, Spans]:
    """Return the text of a prompt and its completion, one directly after the other, and the completion's span.

    Raises:
        ValueError: If one of them is not a string, or the completion is blank.
    """
    for key in ("prompt", "completion"):
        if not isinstance(value.get(key), str):
            raise ValueError(f"needs a string {key!r} beside the other one of 'prompt' and 'completion'")
    prompt, completion = value["prompt"], value["completion"]
    if not completion.strip():
        raise ValueError("has a blank completion and so nothing to learn: remove it")
    return prompt + completion, ((len(prompt), len(prompt) + len(completion)),)


def of_messages(messages: Any) -> tuple[str, Spans]:
    r"""Return the text of a chat, and the spans of what the assistant says.

    A message is ``<|role|>``, a line break and its content; a line break ends all but the last one. That of an
    assistant's message is a target too: it ends the turn, as the end-of-text token ends the last one.

    Raises:
        ValueError: If it is not a list of objects with a string role and content, or the assistant says nothing.
    """
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("needs 'messages' that are a list of objects with 'role' and 'content'")
    text, spans = "", []
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"has a message {number} (counted from 0) whose role or content is not a string")
        text += f"<|{role}|>\n"
        start = len(text)
        text += content if number + 1 == len(messages) else f"{content}\n"
        if role == ASSISTANT and content.strip():
            spans.append((start, len(text)))
    if not spans:
        raise ValueError(f"has no message of the {ASSISTANT} and so nothing to learn: remove it")
    return text, tuple(spans)


def of_spans(text: str, given: Any) -> tuple[str, Spans]:
    """Return a text with the spans that its document states.

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
    return text, tuple((start, end) for start, end in given)


def missing(value: Mapping[str, Any]) -> str | None:
    """Return what a document lacks to be of use: ``text``, ``completion``, or an ``answer`` in its messages."""
    for key in ("text", "completion"):
        if key in value and (value[key] is None or _blank(value[key])):
            return key
    return "answer" if "messages" in value and not _answered(value["messages"]) else None


def _answered(chat: Any) -> bool:
    """Whether a chat has a message of the assistant, or is malformed, which `of_messages` reports."""
    if not isinstance(chat, list) or not all(isinstance(message, dict) for message in chat):
        return chat is not None
    return any(one.get("role") == ASSISTANT and not _blank(one.get("content")) for one in chat)


def _blank(part: Any) -> bool:
    return isinstance(part, str) and not part.strip()


def covered(places: Sequence[tuple[int, int]], spans: Spans) -> list[bool]:
    """Whether each token has a character of a span.

    Args:
        places: Each token's characters [start, end) in the text.
        spans: The targets' characters in the text.
    """
    starts, ends = np.array(places, dtype=np.int64).reshape(-1, 2).T
    found = np.zeros(len(starts), dtype=bool)
    for start, end in spans:
        found |= (starts < end) & (ends > start)
    return found.tolist()
