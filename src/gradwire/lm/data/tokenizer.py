"""Tokenizers: byte-level BPE trained on the corpus, or a copy from a folder such as GPT-2's.

Saved as a Hugging Face folder (``tokenizer.json``, ``tokenizer_config.json``), which transformers loads as a
``PreTrainedTokenizerFast``; loaded here with the ``tokenizers`` library alone, which imports in milliseconds.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from gradwire.base.errors import BadInput
from gradwire.base.files import LARGEST_JSON, atomic_folder, check_size, check_sums, read_object, write_json
from gradwire.lm.data import VOCABULARY, corpus
from gradwire.lm.data.chats import Template
from gradwire.lm.data.document import Invalid

TOKENIZER, CONFIG, ORIGIN = "tokenizer.json", "tokenizer_config.json", "origin.json"
TEMPLATE, OLD_TEMPLATE = "chat_template.jinja", "chat_template.json"  # or an entry of the configuration
ROLES = ("eos_token", "pad_token", "bos_token", "unk_token")  # in the order in which missing ones are added
FURTHER_ROLES = ("sep_token", "cls_token", "mask_token")
FIRST = 10.0  # seconds after which the first line is printed
END, PAD = "<|endoftext|>", "<|pad|>"
Places: TypeAlias = tuple[list[int], list[tuple[int, int]]]
"""Token ids of a text, and each token's characters [start, end)."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with an end-of-document token and a padding token.

    Special tokens spelled out in a text are encoded as ordinary text, so a document cannot end itself.

    Attributes:
        backend: The tokenizer itself.
        eos_id: Id of the end-of-document token.
        pad_id: Id of the padding token.
        template: Its chat template, if it has one.
    """

    backend: tokenizers.Tokenizer
    eos_id: int
    pad_id: int
    template: Template | None = None

    @property
    def vocab_size(self) -> int:
        """The number of rows an embedding needs: the largest id + 1."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text as token ids, without special tokens; parallel over the texts."""
        with _encoding():
            return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_places(self, texts: Sequence[str], special: bool = False) -> list[Places]:
        """Encode each text as `encode_batch` does; return their places, too.

        Args:
            texts: The texts.
            special: Whether special tokens that are spelled out are encoded as such: those of a chat template.
        """
        with _encoding():
            encodings = (self._special if special else self._untrimmed).encode_batch(texts, add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    @cached_property
    def _untrimmed(self) -> tokenizers.Tokenizer:
        """The backend without its post-processor: GPT-2's cuts spaces off the places of tokens."""
        backend = copy.deepcopy(self._special)
        backend.encode_special_tokens = True
        return backend

    @cached_property
    def _special(self) -> tokenizers.Tokenizer:
        """The same, which encodes special tokens that are spelled out as such: copies do."""
        backend = copy.deepcopy(self.backend)
        backend.post_processor = processors.Sequence([])
        return backend

    @cached_property
    def unknown_id(self) -> int | None:
        """The id of the token that represents any text without a token; None if there is none."""
        model = json.loads(self.backend.to_str())["model"]
        token_id = model["unk_id"] if "unk_id" in model else self.backend.token_to_id(model.get("unk_token") or "")
        return None if token_id in (self.eos_id, self.pad_id) else token_id

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids, without special tokens."""
        return self.backend.decode(ids, skip_special_tokens=True)


@contextmanager
def _encoding() -> Iterator[None]:
    """Turn the library's bare Exception for a text that a tokenizer cannot encode into `BadInput`."""
    try:
        yield
    except Exception as error:
        raise BadInput(f"the tokenizer cannot encode a text of the corpus: {error}.") from None


def load(folder: Path) -> Tokenizer:
    """Load a tokenizer from a folder that ``prepare`` wrote, or from a model folder.

    Raises:
        BadInput: If the folder has no tokenizer, or one without an end or a padding token.
    """
    folder = Path(folder)
    backend, named = backend_of(folder), _special_tokens(folder)

    def id_of(role: str) -> int:
        token_id = backend.token_to_id(named[role]) if role in named else None
        if token_id is None:
            raise BadInput(f"the tokenizer in {folder} has no {role}; `gradwire tokenize --tokenizer` completes it.")
        return token_id

    return Tokenizer(backend, eos_id=id_of("eos_token"), pad_id=id_of("pad_token"), template=chat_template(folder))


def alike(first: Path, second: Path) -> bool:
    """Whether the tokenizers of two folders give every token the same id; added special tokens are ignored."""
    first_ids, second_ids = (backend_of(folder).get_vocab(with_added_tokens=False) for folder in (first, second))
    return first_ids == second_ids


def prepare(choice: str, folder: Path, corpus_path: Path, vocab_size: int, skip_invalid: bool = False) -> Tokenizer:
    """Write the chosen tokenizer to ``folder`` atomically, unless it is there already, and load it.

    Args:
        choice: ``bpe``, or a tokenizer folder, which may be ``folder`` itself.
        folder: The folder to write.
        corpus_path: The corpus that ``bpe`` is trained on, as a whole.
        vocab_size: Vocabulary size of ``bpe``, special tokens included.
        skip_invalid: Leave out invalid documents of the corpus.

    Raises:
        BadInput: If the choice is invalid, or ``folder`` holds another tokenizer.
    """
    if choice != "bpe" and Path(choice).resolve() == folder.resolve():
        return load(folder)
    wanted = origin(choice, corpus_path, vocab_size)
    if (folder / TOKENIZER).exists():
        existing = read_object(folder / ORIGIN)
        if existing != wanted:
            raise BadInput(
                f"{folder} holds another tokenizer ({_listed(existing)}) than the requested one ({_listed(wanted)}); "
                "use another --output_dir or remove that folder."
            )
    else:
        backend = _train(corpus_path, vocab_size, skip_invalid) if choice == "bpe" else backend_of(Path(choice))
        named = {} if choice == "bpe" else _special_tokens(Path(choice))
        template = None if choice == "bpe" else chat_template(Path(choice))
        _save(folder, backend, _complete(backend, named, template), wanted, template)
    return load(folder)


def origin(choice: str, corpus_path: Path, vocab_size: int) -> dict[str, Any]:
    """Return what determines a tokenizer; a rerun compares it with that of the existing one."""
    if choice == "bpe":
        return {"tokenizer": "bpe", "vocab_size": vocab_size, "corpus": corpus.sha256(corpus_path)}
    made = {"tokenizer": "folder", "sha256": hashlib.sha256(backend_of(Path(choice)).to_str().encode()).hexdigest()}
    template = chat_template(Path(choice))
    return made if template is None else {**made, "chat_template": template.name.partition(":")[2]}


def _listed(origin: dict[str, Any]) -> str:
    return ", ".join(f"{key} {str(value)[:12]}" for key, value in origin.items())


def _train(corpus_path: Path, vocab_size: int, skip_invalid: bool) -> tokenizers.Tokenizer:
    """Train byte-level BPE as GPT-2's: every byte is a token, so there are no unknown tokens."""
    VOCABULARY.check("--vocab_size", vocab_size)
    backend = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    skipped = Invalid() if skip_invalid else None
    read = 0

    def texts() -> Iterator[str]:
        nonlocal read
        for document in corpus.documents(corpus_path, skipped=skipped):
            read += 1
            yield document.text

    with progress(lambda: f"training the tokenizer on {read:,} documents"):
        backend.train_from_iterator(texts(), trainer)
    if backend.get_vocab_size() < vocab_size:
        print(
            f"gradwire tokenize: {corpus_path} yields {backend.get_vocab_size()} tokens, "
            f"fewer than --vocab_size {vocab_size}.",
            file=sys.stderr,
        )
    return backend


def _byte_level(model: models.Model) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def backend_of(folder: Path) -> tokenizers.Tokenizer:
    """Read ``tokenizer.json``, or GPT-2's older pair ``vocab.json`` and ``merges.txt``.

    Raises:
        BadInput: If there is none that can be read, or one that is not as it was saved with a model.
    """
    pair = folder / "vocab.json", folder / "merges.txt"
    for file in filter(Path.is_file, (folder / TOKENIZER, *pair)):
        check_size(file, LARGEST_JSON)
    check_sums(folder, (TOKENIZER, CONFIG, *(file.name for file in pair)))
    try:
        if (folder / TOKENIZER).is_file():
            backend = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
        elif all(file.is_file() for file in pair):
            backend = _byte_level(models.BPE.from_file(*map(str, pair)))
        else:
            raise BadInput(f"{folder} has no tokenizer: neither {TOKENIZER} nor vocab.json and merges.txt.")
    except BadInput:
        raise
    except Exception as error:  # the library raises bare Exception for an unreadable file
        raise BadInput(f"cannot read the tokenizer in {folder}: {error}.") from None
    if not backend.get_vocab(with_added_tokens=False):
        raise BadInput(f"the tokenizer in {folder} has an empty vocabulary.")
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def chat_template(folder: Path) -> Template | None:
    """Read the chat template of a tokenizer's folder, if it has one; of several, the one named ``default``.

    Raises:
        BadInput: If it is not a text.
    """
    source: Any
    if (folder / TEMPLATE).is_file():
        file, source = folder / TEMPLATE, _text_of(folder / TEMPLATE)
    else:
        file = folder / (OLD_TEMPLATE if (folder / OLD_TEMPLATE).is_file() else CONFIG)
        source = read_object(file).get("chat_template") if file.is_file() else None
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default", source)
    if not isinstance(source, str | None):
        raise BadInput(f"{file}: chat_template must be a string, or a list with a string named default.")
    return Template(source, _special_tokens(folder)) if source else None


def _text_of(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read the chat template {file}: {error}.") from None


def _special_tokens(folder: Path) -> dict[str, str]:
    """Read the special tokens from ``tokenizer_config.json``: each a string, or an object with ``content``.

    Raises:
        BadInput: If the file is not a JSON object, or a special token is anything else.
    """
    config = read_object(folder / CONFIG) if (folder / CONFIG).exists() else {}
    tokens = {}
    for role in (*ROLES, *FURTHER_ROLES):
        token = config.get(role)
        content = token.get("content") if isinstance(token, dict) else token
        if token is None or content == "":
            continue
        if not isinstance(content, str) or any("\ud800" <= char <= "\udfff" for char in content):  # lone surrogates
            raise BadInput(
                f"{folder / CONFIG}: {role} must be a string, or an object with a string as `content`; it is "
                f"{json.dumps(token)[:60]}."
            )
        tokens[role] = content
    return tokens


def _complete(backend: tokenizers.Tokenizer, named: dict[str, str], template: Template | None) -> dict[str, Any]:
    """Add the missing special tokens to ``backend``; return the configuration that names all of them.

    With a chat template, which may ask whether there is one, only those that every tokenizer needs are added.
    """
    eos = named.get("eos_token", END)
    tokens = {"eos_token": eos, "bos_token": eos, "unk_token": eos, "pad_token": PAD, **named}
    if template is not None:
        tokens = {"eos_token": eos, "pad_token": PAD, **named}
    backend.add_special_tokens(list(dict.fromkeys(tokens[role] for role in ROLES if role in tokens)))
    return {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, "clean_up_tokenization_spaces": False}


def _save(
    folder: Path,
    backend: tokenizers.Tokenizer,
    config: dict[str, Any],
    origin: dict[str, Any],
    template: Template | None,
) -> None:
    with atomic_folder(folder) as part:
        backend.save(str(part / TOKENIZER))
        if template is not None:
            (part / TEMPLATE).write_bytes(template.source.encode())
        write_json(part / CONFIG, config)
        write_json(part / ORIGIN, origin)


@contextmanager
def progress(describe: Callable[[], str]) -> Iterator[None]:
    """Print how far a step is after ``FIRST`` seconds, and each time its duration has doubled.

    Args:
        describe: Returns what is being done, such as ``tokenizing, 1,000 documents``; called from another thread.
    """
    ended, start = threading.Event(), time.monotonic()

    def tell() -> None:
        due = FIRST
        while not ended.wait(start + due - time.monotonic()):
            print(f"gradwire tokenize: {describe()}; {due:g} s so far.", file=sys.stderr, flush=True)
            due *= 2

    thread = threading.Thread(target=tell, name="gradwire-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
