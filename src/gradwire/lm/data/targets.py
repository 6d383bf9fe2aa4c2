"""Characters of a document that are targets, their weights, and the tokens that hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges of characters [start, end), in order and without overlap."""

Weights: TypeAlias = tuple[float, ...]
"""What the loss of each span's tokens is multiplied by; of a text without spans, one number."""

ASSISTANT = "assistant"  # the role whose turns are targets
LARGEST = float(np.finfo(np.float32).max)


class Content(NamedTuple):
    """The content of a document, as a model reads it.

    Attributes:
        text: The text.
        spans: The characters of it that are targets; None: all.
        turns: For each span of a chat, the number of the message that says it.
        templated: Whether special tokens in the text are those of a chat template, which also ends the text.
    """

    text: str
    spans: Spans | None = None
    turns: tuple[int, ...] = ()
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
    """Return the messages of a chat, without weights and entries that are null.

    Raises:
        ValueError: If they are not a list of objects with a string role and content, only the assistant's with a
            weight, or the assistant says nothing.
    """
    messages = value["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("needs 'messages' that are a list of objects with 'role' and 'content'")
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"has a message {number} (counted from 0) whose role or content is not a string")
        if role != ASSISTANT and message.get("weight") is not None:
            raise ValueError(f"has a message {number} (counted from 0) with a weight that is not the {ASSISTANT}'s")
    if not answers(messages):
        empty = next((number for number, message in enumerate(messages) if message["role"] == ASSISTANT), None)
        wrong = f"no message of the {ASSISTANT}" if empty is None else f"an empty message {empty} of the {ASSISTANT}"
        raise ValueError(f"has {wrong} and so nothing to learn: remove it")
    return [
        {key: entry for key, entry in message.items() if entry is not None and key != "weight"} for message in messages
    ]


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


def weights_of(value: Mapping[str, Any], content: Content) -> Weights | None:
    """Return what the targets of a document weigh: its ``weight``, times that of each message or span; None: all 1.

    Args:
        value: The document.
        content: Its text and targets.

    Raises:
        ValueError: If a weight is not a finite number, or the number of ``target_weights`` is not that of spans.
    """
    spans = content.spans
    factors = [1.0] * (1 if spans is None else len(spans))
    if value.get("target_weights") is not None:
        given = value["target_weights"]
        if value.get("text") is None or spans is None:
            raise ValueError("has 'target_weights' without 'target_spans' and a text: give both")
        if not isinstance(given, list) or len(given) != len(spans):
            raise ValueError(f"needs 'target_weights' that are a list of {len(spans)}, one for each of 'target_spans'")
        factors = [_number(weight, f"weight of span {position}") for position, weight in enumerate(given)]
    elif content.turns:
        given = {turn: value["messages"][turn].get("weight") for turn in content.turns}
        factors = [
            1.0 if given[turn] is None else _number(given[turn], f"weight of message {turn}") for turn in content.turns
        ]
    whole = _number(value["weight"], "weight") if "weight" in value else 1.0
    weights = tuple(_number(whole * factor, "weight") for factor in factors)
    return None if set(weights) == {1.0} else weights


def _number(value: Any, what: str) -> float:
    """Return a finite number of float32."""
    number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    if not number or not abs(value) <= LARGEST:
        shown = json.dumps(value, default=str)[:30]
        raise ValueError(f"has {shown} as {what}; it must be a finite number of float32")
    return float(value)


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


def span_of(places: Sequence[tuple[int, int]], spans: Spans) -> NDArray[np.int64]:
    """Return the number of the first span that has a character of each token; -1 if none has.

    Args:
        places: Each token's characters [start, end) in the text.
        spans: The targets' characters in the text.
    """
    starts, ends = np.array(places, dtype=np.int64).reshape(-1, 2).T
    spans_of_tokens = np.full(len(starts), -1)
    for number, (start, end) in reversed([*enumerate(spans)]):
        spans_of_tokens[(starts < end) & (ends > start)] = number
    return spans_of_tokens
