"""Chat templates of several families, in two forms of one text, and a small tokenizer that has one."""

from __future__ import annotations

import json
from pathlib import Path

from data_samples import WORDS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    *("<|endoftext|>", "<|pad|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"),
    *(
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<start_of_turn>",
        "<end_of_turn>",
    ),
]
# What the assistant says is between « and », which become the marks of the template, or nothing.
CHATML = """\
{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nBe of help.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}«{{- m.content + '<|im_end|>' }}»{% else %}{{- m.content + '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}
{%- if strftime_now is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}
{{- "<|eot_id|>" }}
{%- for m in messages %}
{%- set said = m.content | trim + '<|eot_id|>' %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{%- if m.role == 'assistant' %}«{{- said }}»{% else %}{{- said }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
MISTRAL = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content + '\\n\\n' %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}{{- '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}
{%- else %}«{{- ' ' + m.content + eos_token }}»{% endif %}
{%- endfor %}"""
PLAIN_TURNS = """\
{%- for m in messages %}
{{- m.role | upper + ': ' }}
{%- if m.role == 'assistant' %}«{{- m.content + '\\n' }}»{% else %}{{- m.content + '\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'ASSISTANT: ' }}{% endif %}"""
FAMILIES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "turns": PLAIN_TURNS}
SHOWN = '{{- "<think>\\n\\n</think>\\n\\n" }}'
REFUSED = {
    # As Qwen3's: only the last answer shows its thoughts, so an earlier answer differs once the chat goes on.
    "thoughts": (
        CHATML.replace("«", "«{% if loop.last %}" + SHOWN + "{% endif %}"),
        "has a message 2 (counted from 0) whose place is unknown, as the chat template writes the beginning",
    ),
    "newest first": (CHATML.replace("in messages %}", "in messages[::-1] %}"), "whose place is unknown"),
    "strips": (
        CHATML.replace("«{{- m.content", "«{{- m.content.split()[-1]"),
        "whose content the chat template changes",
    ),
    "no prompt": (CHATML[: CHATML.index("{%- if add_gen")], "whose beginning is unknown, as the chat template has no"),
    "program": (CHATML + "{{- nothing.at.all }}", "is refused by the chat template: 'nothing' is undefined"),
    "syntax": (CHATML + "{% for %}", "is refused by the chat template: "),
}


def marked(template: str) -> str:
    """A template that marks what the assistant says."""
    return template.replace("«", "{% generation %}").replace("»", "{% endgeneration %}")


def unmarked(template: str) -> str:
    """The template without marks."""
    return template.replace("«", "").replace("»", "")


def make_tokenizer(folder: Path, template: str | None, **tokens: str) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on a few words, and save it as transformers does."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)  # transformers loses targets that begin trimmed
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([" ".join(WORDS)] * 3 + ["user assistant system"], trainer)
    named = {"eos_token": "</s>", "pad_token": "<|pad|>", "bos_token": "<s>", **tokens}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    made.chat_template = template
    made.save_pretrained(folder)
    return made


def write(path: Path, documents: list[dict]) -> Path:
    """Write a corpus as lines of JSON."""
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path
