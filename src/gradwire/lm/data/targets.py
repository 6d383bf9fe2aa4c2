"""Characters of a document that are targets, their weights, and the tokens that hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges of characters [start, end), in order and without overlap."""

Weights: TypeAlias = tuple[float, ...]
"""What the loss of each span's tokens is multiplied by; of a text without spans, one number."""

ASSISTANT = "assistant"  # the role whose turns are targets
LARGEST = float(np.finfo(np.float32).max)


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


# Why: docs/decisions.md, "Targets are characters before they are tokens".
def of_messages(messages: Any) -> tuple[str, Spans]:
    r"""Return the text of a chat, and the spans of the assistant's messages.

    A message is ``<|role|>``, a line break and its content; a line break ends all but the last one. That of an
    assistant's message is a target too: it ends the turn, as the end-of-text token ends the last one.

    Raises:
        ValueError: If it is not a list of objects with a string role and content, or no message is the assistant's.
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
        if role != ASSISTANT and message.get("weight") is not None:
            raise ValueError(f"has a message {number} (counted from 0) with a weight that is not the {ASSISTANT}'s")
        if _answers(message):
            spans.append((start, len(text)))
    if not spans:
        raise ValueError(f"has no message of the {ASSISTANT} and so nothing to learn: remove it")
    return text, tuple(spans)


def is_chat(text: str, spans: Spans) -> bool:
    """Whether each target of a text follows the assistant's mark, as in a text by `of_messages`."""
    return all(text.endswith(f"<|{ASSISTANT}|>\n", 0, start) for start, _ in spans)


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


def weights_of(value: Mapping[str, Any], spans: Spans | None) -> Weights | None:
    """Return what the targets of a document weigh: its ``weight``, times that of each message or span; None: all 1.

    Args:
        value: The document, whose text and targets are valid.
        spans: Its targets.

    Raises:
        ValueError: If a weight is not a finite number, or the number of ``target_weights`` is not that of spans.
    """
    factors = [1.0] * (1 if spans is None else len(spans))
    if value.get("target_weights") is not None:
        given = value["target_weights"]
        if value.get("text") is None or spans is None:
            raise ValueError("has 'target_weights' without 'target_spans' and a text: give both")
        if not isinstance(given, list) or len(given) != len(spans):
            raise ValueError(f"needs 'target_weights' that are a list of {len(spans)}, one for each of 'target_spans'")
        factors = [_number(weight, f"weight of span {position}") for position, weight in enumerate(given)]
    elif value.get("text") is None and value.get("messages") is not None:
        answers = [(number, message) for number, message in enumerate(value["messages"]) if _answers(message)]
        factors = [
            1.0 if message.get("weight") is None else _number(message["weight"], f"weight of message {number}")
            for number, message in answers
        ]
    whole = _number(value["weight"], "weight") if "weight" in value else 1.0
    weights = tuple(_number(whole * factor, "weight") for factor in factors)
    return None if set(weights) == {1.0} else weights


def _answers(message: Mapping[str, Any]) -> bool:
    """Whether a valid message has targets."""
    return message["role"] == ASSISTANT and bool(message["content"].strip())


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
    """Whether a chat has a message of the assistant, or is malformed, which `of_messages` reports."""
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
