"""Chats as text: by a tokenizer's chat template, or in a plain format; what the assistant says are the targets."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from gradwire.base.errors import BadInput
from gradwire.lm.data import ChatFormat

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""Objects with a string ``role`` and ``content``; one is an assistant's and not blank (`document.messages_of`)."""

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges of characters [start, end), in order and without overlap."""

ASSISTANT = "assistant"  # the role whose turns are targets

REMEDY = "mark it in the template by {% generation %}, or choose --chat_format plain"
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")  # the mark of what the assistant says, in a template
# Why: docs/decisions.md, "A template knows one date".
DATED = """\
{%- macro strftime_now(format) -%}
{{ format.replace("%d", "26").replace("%b", "Jul").replace("%B", "July").replace("%m", "07").replace("%Y", "2024") }}
{%- endmacro %}
"""


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


class Format(Protocol):
    """A way to read chats.

    Attributes:
        name: ``plain``, or ``template:`` and the SHA-256 of the template.
    """

    name: str

    def read(self, messages: Messages) -> Content:
        """Return a chat's text, and what the assistant says in it.

        Raises:
            ValueError: If the template does not show that.
        """
        ...


def answers(messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return the numbers of the assistant's messages that are not blank."""
    return tuple(
        number for number, message in enumerate(messages) if message["role"] == ASSISTANT and message["content"].strip()
    )


class Plain:
    r"""A message is ``<|role|>``, a line break and its content; a line break ends all but the last one.

    That of an assistant's message is a target too: it ends the turn, as the end-of-text token ends the last one.
    """

    name = "plain"

    def read(self, messages: Messages) -> Content:
        """Return a chat's text, and its assistant's messages; blank ones are no targets."""
        text, spans, last = "", [], len(messages) - 1
        for number, message in enumerate(messages):
            text += f"<|{message['role']}|>\n"
            start = len(text)
            text += message["content"] if number == last else f"{message['content']}\n"
            spans.append((start, len(text)))
        return Content(text, tuple(spans[turn] for turn in answers(messages)))


# Why: docs/decisions.md, "Chats are read as their model reads them".
class Template:
    """A tokenizer's chat template, in Jinja.

    Targets are the parts that the template marks by ``{% generation %}``. Of a template without such marks they are
    what follows the generation prompt in the chat up to that turn, without white space after the mark that ends it.

    Args:
        source: The template.
        tokens: The tokenizer's special tokens by role, such as ``bos_token``.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source, self._tokens = source, dict(tokens)
        self.name = f"template:{hashlib.sha256(source.encode()).hexdigest()}"
        self._marks = GENERATION.search(source) is not None
        self._dated = DATED + source if "strftime_now" in source else source

    def read(self, messages: Messages) -> Content:
        """Return a chat's text by the template, and what the assistant says in it.

        Raises:
            ValueError: If the template refuses the chat, changes what the assistant says, or does not show where.
        """
        text, marked = self._rendered(messages)
        turns = answers(messages)
        if self._marks:
            spans = _of_marks(messages, turns, text, marked)
        else:
            spans = tuple(self._said(messages, turn, text) for turn in turns)
        return Content(text, spans, templated=True)

    def _said(self, messages: Messages, turn: int, text: str) -> tuple[int, int]:
        """Where a chat's text has what the assistant says in a turn.

        Raises:
            ValueError: If the text does not go on from the generation prompt, or lacks the message's content.
        """
        content = messages[turn]["content"].strip()
        try:
            prompt, _ = self._rendered(messages[:turn], prompt=True)
            prompted = prompt != self._rendered(messages[:turn])[0]
            through, _ = self._rendered(messages[: turn + 1])
        except ValueError as error:
            raise ValueError(f"cannot be read up to its message {turn} (counted from 0): it {error}") from None
        closed = through.rstrip()
        upto = through if closed.endswith(content) else closed  # white space alone may end a turn
        if not (upto.startswith(prompt) and text.startswith(upto)):
            raise ValueError(
                f"has a message {turn} (counted from 0) whose place is unknown, as the chat template writes the "
                f"beginning of a chat differently when it goes on: {REMEDY}"
            )
        said = upto[len(prompt) :]
        if content not in said:
            raise _changed(turn)
        if not (prompted or said.lstrip().startswith(content)):
            raise ValueError(
                f"has a message {turn} (counted from 0) whose beginning is unknown, as the chat template has no "
                f"generation prompt: {REMEDY}"
            )
        return len(prompt), len(upto)

    def _rendered(self, messages: Messages, prompt: bool = False) -> tuple[str, Spans]:
        """The text of messages, with the generation prompt if asked for, and the parts marked as the assistant's.

        Raises:
            ValueError: If the template refuses them.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            (text,), marked = render_jinja_template(
                [[dict(message) for message in messages]],
                chat_template=self._dated,
                return_assistant_tokens_mask=self._marks,
                add_generation_prompt=prompt,
                **self._tokens,
            )
        except ImportError:
            raise
        except Exception as error:  # a template is a program
            raise ValueError(f"is refused by the chat template: {error}".rstrip(".")) from None
        return text, tuple(marked[0]) if marked else ()


def _of_marks(messages: Messages, turns: tuple[int, ...], text: str, marked: Spans) -> Spans:
    """The parts that a template marks: each message's content is in one of them.

    Raises:
        ValueError: If the parts overlap, or do not have the messages' contents, in order.
    """
    spans = tuple((start, end) for start, end in marked if start < end)
    edges = [edge for span in spans for edge in span]
    if edges != sorted(edges):
        raise ValueError(f"has marks of the chat template, {spans}, that overlap: correct the template")
    parts = iter([text[start:end] for start, end in spans])
    for turn in turns:
        if not any(messages[turn]["content"].strip() in part for part in parts):
            raise _changed(turn)
    return spans


def _changed(turn: int) -> ValueError:
    return ValueError(
        f"has a message {turn} (counted from 0) whose content the chat template changes or leaves out: write it as the "
        "template does, or choose --chat_format plain"
    )


PLAIN = Plain()


def kind(name: str) -> ChatFormat:
    """Return which format a `Format` of this name is."""
    return "plain" if name == PLAIN.name else "template"


def chosen(choice: ChatFormat | None, template: Template | None) -> Format:
    """Return the format of chats: by default a tokenizer's template, or the plain format if it has none.

    Args:
        choice: ``template``, ``plain`` or None for the default.
        template: The tokenizer's template.

    Raises:
        BadInput: If there is no template to choose.
    """
    if choice == "template" and template is None:
        raise BadInput("--chat_format template: the tokenizer has no chat template; choose plain.")
    return PLAIN if template is None or choice == "plain" else template
