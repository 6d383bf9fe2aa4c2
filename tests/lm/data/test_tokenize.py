"""Tokenizers and shards: what is in them, that a killed run goes on to the same bytes, and what is refused.

Of `shards.py`, `tokenize.py`, `tokenizer.py`, `writer.py`.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import math
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from data_samples import files_of, tokenize_words, values, write_corpus
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from gradwire.base.errors import BadInput
from gradwire.base.files import lock, sha256_file
from gradwire.cli import main
from gradwire.lm.data import shards, tokenizer
from gradwire.lm.data.corpus import documents
from gradwire.lm.data.shards import Shards
from gradwire.lm.data.tokenizer import load
from gradwire.lm.data.writer import cuts, split_of

COUNT = 40

LETTERS = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c.json", values(COUNT))


@pytest.fixture(scope="module")
def output(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenized")
    assert main(tokenize_words(corpus, folder)) == 0
    return folder


def samples(output: Path) -> dict[str, dict[str, list[int]]]:
    """Per split: sample id -> tokens, read without gradwire."""
    found = {}
    for split in ("train", "val"):
        found[split] = {}
        for file in sorted((output / "shards" / split).glob("shard-*.pt")):
            shard = torch.load(file, weights_only=True, mmap=True)
            for row, length, name in zip(shard["input_ids"], shard["lengths"], shard["sample_ids"], strict=True):
                found[split][name] = row[:length].tolist()
    return found


def test_a_sample_is_of_one_document_and_all_tokens_are_kept(corpus, output):
    tokenizer = load(output / "tokenizer")
    found = {name: tokens for split in samples(output).values() for name, tokens in split.items()}
    for document in documents(corpus):
        names = [document.id] if document.id in found else [f"{document.id}#{k}" for k in range(len(found))]
        parts = [found.pop(name) for name in names if name in found]
        tokens = [token for part in parts for token in part]
        assert tokens[-1] == tokenizer.eos_id and tokenizer.eos_id not in tokens[:-1]
        assert tokenizer.decode(tokens) == document.text
        assert len(parts) == math.ceil(len(tokens) / 16)
        assert all(2 <= len(part) <= 16 for part in parts)
    assert not found


def test_shard_files(output):
    for split in ("train", "val"):
        meta = shards.meta(output / "shards", split)
        files = sorted((output / "shards" / split).glob("shard-*.pt"))
        assert [file.name for file in files] == [shard["file"] for shard in meta["shards"]]
        for file, noted in zip(files, meta["shards"], strict=True):
            shard = torch.load(file, weights_only=True, mmap=True)
            assert shard["input_ids"].dtype == torch.int16 and shard["lengths"].dtype == torch.int32
            assert shard["input_ids"].shape == (noted["samples"], 16) and len(shard["sample_ids"]) == noted["samples"]
            assert noted["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
            padding = torch.arange(16) >= shard["lengths"][:, None]
            assert (shard["input_ids"][padding] == meta["pad_id"]).all()
        assert all(shard["samples"] == 7 for shard in meta["shards"][:-1])
        assert meta["processed_samples"] == len(samples(output)[split]) and meta["finalized"] is True
        assert meta["tokens"] == sum(map(len, samples(output)[split].values()))
        assert meta["split"] == split and meta["dataset"] == "c" and meta["vocab_size"] == 300
    assert sum(shards.meta(output / "shards", split)["processed_documents"] for split in ("train", "val")) == COUNT


def test_shards_reads_what_the_files_hold(output):
    for split, expected in samples(output).items():
        dataset = Shards(output / "shards", split)
        assert [(sample.sample_id, sample.input_ids.tolist()) for sample in dataset] == list(expected.items())
        assert dataset[len(dataset) - 1].input_ids.dtype == torch.int64


def test_the_split_depends_on_the_id_alone(corpus, output):
    for split, expected in samples(output).items():
        assert {name.partition("#")[0] for name in expected} == {
            document.id for document in documents(corpus) if split_of(document.id, 0.3) == split
        }
    # fixed for good: a change would move documents between the splits of published results
    assert [split_of(f"id-{i}", 0.3) for i in range(6)] == ["train", "train", "val", "train", "train", "train"]
    share = np.mean([split_of(f"id-{i}", 0.1) == "val" for i in range(20_000)])
    assert abs(share - 0.1) < 0.01


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 34, 97])
def test_cuts_cover_a_document_and_leave_no_sample_without_a_target(length):
    places = cuts(length, 16)
    assert [token for start, end in places for token in range(start, end)] == list(range(length))
    assert len(places) == math.ceil(length / 16)
    assert all(end - start >= min(2, length) for start, end in places)


def test_unigram_against_numpy(output):
    found = samples(output)
    train = np.array([token for tokens in found["train"].values() for token in tokens[1:]])
    val = np.array([token for tokens in found["val"].values() for token in tokens[1:]])
    p = (np.bincount(train, minlength=300) + 1) / (len(train) + 300)
    assert p.sum() == pytest.approx(1)
    meta = shards.meta(output / "shards", "val")
    assert meta["unigram_loss"] == pytest.approx(-np.log(p[val]).mean(), rel=1e-12)
    assert meta["unigram_ppl"] == pytest.approx(np.exp(-np.log(p[val]).mean()), rel=1e-12)


def test_transformers_loads_the_tokenizer_and_agrees(output):
    ours, theirs = load(output / "tokenizer"), AutoTokenizer.from_pretrained(output / "tokenizer")
    text = values(7)[3]["text"]
    assert theirs(text)["input_ids"] == ours.encode_batch([text])[0]
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.eos_id, ours.pad_id)
    assert theirs.bos_token == theirs.unk_token == theirs.eos_token == "<|endoftext|>"
    assert len(theirs) == ours.vocab_size == 300


def test_a_document_cannot_spell_a_special_token(output):
    tokenizer = load(output / "tokenizer")
    text = "before <|endoftext|> and <|pad|> after"
    (tokens,) = tokenizer.encode_batch([text])
    assert not {tokenizer.eos_id, tokenizer.pad_id} & set(tokens) and tokenizer.decode(tokens) == text


def test_a_gpt2_folder_gets_its_missing_special_tokens(corpus, tmp_path):
    alphabet = sorted(json.loads(load_bytes_alphabet()), key=ord)
    gpt2 = tmp_path / "gpt2"
    gpt2.mkdir()
    vocabulary = [*alphabet, "th", "Ġth", "<|endoftext|>"]
    (gpt2 / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocabulary)}))
    (gpt2 / "merges.txt").write_text("#version: 0.2\nt h\nĠ th\n")
    assert main(tokenize_words(corpus, tmp_path / "out", tokenizer=gpt2)) == 0
    tokenizer = load(tmp_path / "out" / "tokenizer")
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (258, 259, 260)
    (tokens,) = tokenizer.encode_batch(["the the"])
    assert tokens == [vocabulary.index(token) for token in ("th", "e", "Ġth", "e")]
    # the DAG's second step: the tokenizer is in place already
    assert main(tokenize_words(corpus, tmp_path / "out", tokenizer=tmp_path / "out" / "tokenizer")) == 0


def load_bytes_alphabet() -> str:
    from tokenizers.pre_tokenizers import ByteLevel

    return json.dumps(ByteLevel.alphabet())


def test_two_steps_give_what_one_gives(corpus, output, tmp_path):
    words = tokenize_words(corpus, tmp_path / "out")
    assert main([*words, "--tokenizer", "bpe", "--tokenizer_only"]) == 0
    assert not (tmp_path / "out" / "shards").exists()
    assert main([*words, "--tokenizer", str(tmp_path / "out" / "tokenizer")]) == 0
    assert files_of(tmp_path / "out") == files_of(output)


def attempt(words: list[str], die_at: int | None = None, after: bool = False) -> int:
    """The exit code of a command in a forked child, which SIGKILL ends before or after its ``die_at``-th rename."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        gc.disable()  # a collection would copy the pages of all that the tests before have left
        os.fsync = lambda _: None  # a killed process loses nothing that it has handed to the kernel
        rename, calls = Path.replace, itertools.count(1)

        def replace(self: Path, target: Path) -> Path:
            number = next(calls)
            if number == die_at and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            renamed = rename(self, target)
            if number == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return renamed

        Path.replace = replace
        os._exit(main(words))
    finally:
        os._exit(99)


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.sweep)])
def test_killed_at_any_write_it_goes_on_to_the_same_bytes(tmp_path, monkeypatch, stride):
    """With a stride, two kills before a write alternate with two after one."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # a forked child has none of its threads
    small = write_corpus(tmp_path / "small.json", values(6))
    assert main(tokenize_words(small, tmp_path / "whole")) == 0
    whole, folder = files_of(tmp_path / "whole"), tmp_path / "killed"
    words = tokenize_words(small, folder)
    shard_count = sum(len(shards.meta(tmp_path / "whole" / "shards", split)["shards"]) for split in ("train", "val"))
    # two files of the tokenizer and its folder; each shard and its meta; the two final metas
    writes = 2 + 1 + 2 * shard_count + 2
    for turn, number in enumerate(range(1, writes + 1, stride)):
        for after in (False, True) if stride == 1 else (turn % 4 > 1,):
            shutil.rmtree(folder, ignore_errors=True)
            assert attempt(words, number, after) == -signal.SIGKILL
            assert attempt(words) == 0
            assert files_of(folder) == whole, number
    shutil.rmtree(folder)
    assert attempt(words, writes + 1) == 0, "there are no more writes"


def test_a_long_step_says_how_far_it_is(tmp_path, monkeypatch, capsys):
    def slow_at_its_end(*arguments, **options):  # so that a line is due after all documents, on any machine
        start = time.monotonic()
        yield from checked(*arguments, **options)
        time.sleep(0.1 + 2 * (time.monotonic() - start))

    checked = tokenizer.corpus.documents
    monkeypatch.setattr(tokenizer.corpus, "documents", slow_at_its_end)
    monkeypatch.setattr(tokenizer, "FIRST", 0.001)
    path = write_corpus(tmp_path / "c.json", values(60))
    assert main(tokenize_words(path, tmp_path / "out", max_length=512, shard_size=64)) == 0
    lines = capsys.readouterr().err.splitlines()
    training = [line for line in lines if "training the tokenizer on" in line]
    assert training[-1].startswith("gradwire tokenize: training the tokenizer on 60 documents; ")
    assert any("gradwire tokenize: tokenizing, " in line and " documents written; " in line for line in lines)
    durations = [float(line.rpartition("; ")[2].removesuffix(" s so far.")) for line in training]
    assert durations == [0.001 * 2**n for n in range(len(durations))] and len(durations) > 3


@pytest.mark.parametrize(
    ("model", "code", "said"),
    [
        (models.BPE({**LETTERS, "?": 26}, [], unk_token="?"), 0, "120 of 520 targets are its unknown token."),
        (models.WordLevel(LETTERS), 2, "the tokenizer cannot encode a text of the corpus: WordLevel error: Missing"),
    ],
)
def test_what_a_tokenizer_does_not_know_is_said(model, code, said, tmp_path, capsys):
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "own").mkdir()
    backend.save(str(tmp_path / "own" / "tokenizer.json"))
    path = write_corpus(tmp_path / "c.json", [{"id": f"{n}", "text": "some words né日本"} for n in range(40)])
    assert main(tokenize_words(path, tmp_path / "out", tokenizer=tmp_path / "own", vocab_size=300)) == code
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and said in printed


def test_a_finished_run_is_left_alone_and_other_settings_are_refused(corpus, output, tmp_path, capsys):
    before = {file: file.stat().st_mtime_ns for file in output.rglob("*.pt")}
    assert main(tokenize_words(corpus, output)) == 0
    assert before == {file: file.stat().st_mtime_ns for file in output.rglob("*.pt")}
    content = files_of(output)
    other = write_corpus(tmp_path / "c.json", values(COUNT - 1))
    for words, named in [
        (tokenize_words(corpus, output, max_length=17), "max_length 16, not 17"),
        (tokenize_words(corpus, output, val_fraction=0.25), "val_fraction 0.3, not 0.25"),
        (tokenize_words(corpus, output, vocab_size=301), "another tokenizer"),
        (tokenize_words(other, output, tokenizer=output / "tokenizer"), "dataset_digest"),
    ]:
        assert main(words) == 2
        assert named in capsys.readouterr().err
        (output / "tokenize.failed.json").unlink()
    assert files_of(output) == content


@pytest.mark.parametrize("long_first", [True, False])
def test_a_part_and_a_document_of_one_name_are_refused(long_first, tmp_path, capsys):
    clash = [{"id": "a", "text": "long text " * 40}, {"id": "a#1", "text": "short"}]
    corpus = write_corpus(tmp_path / "c.json", [*values(9), *(clash if long_first else clash[::-1])])
    output = tmp_path / "out"
    assert main(tokenize_words(corpus, output)) == 2
    assert (
        "two samples have the id 'a#1': that of a document, and of a part of the document 'a'"
        in capsys.readouterr().err
    )
    assert not (output / "shards").exists()


def test_a_hash_in_an_id_is_no_clash_where_all_samples_differ(tmp_path):
    texts = {"a": "long text " * 40, "a#1": "also long " * 40, "b": "x", "b#0": "y"}
    corpus = write_corpus(tmp_path / "c.json", [*values(9), *({"id": i, "text": t} for i, t in texts.items())])
    assert main(tokenize_words(corpus, tmp_path / "out")) == 0
    names = [name for split in samples(tmp_path / "out").values() for name in split]
    assert {"a#1", "a#1#0", "b", "b#0"} <= set(names)


def test_a_folder_without_a_tokenizer(corpus, tmp_path, capsys):
    assert main(tokenize_words(corpus, tmp_path / "out", tokenizer=tmp_path)) == 2
    assert "has no tokenizer" in capsys.readouterr().err
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main(tokenize_words(corpus, tmp_path / "out", tokenizer=tmp_path)) == 2
    assert "cannot read the tokenizer" in capsys.readouterr().err


CONFIGURATIONS = {
    "a list": ("[1]", "must hold a JSON object"),
    "no content": ('{"eos_token": {"single_word": true}}', "eos_token must be a string, or an object with a string"),
    "an integer": ('{"pad_token": 3}', "pad_token must be a string, or an object with a string as `content`; it is 3"),
    "content an integer": ('{"bos_token": {"content": 3}}', "bos_token must be a string"),
    "half a character": ('{"unk_token": "\\ud800"}', "unk_token must be a string"),
    "a key twice": ('{"eos_token": "a", "eos_token": "b"}', "the key 'eos_token' is given twice"),
    "nested too deeply": ("[" * 100_000, "nests too deeply"),
}


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_a_tokenizer_with_an_unusable_configuration(case, corpus, output, tmp_path, capsys):
    text, words = CONFIGURATIONS[case]
    folder = shutil.copytree(output / "tokenizer", tmp_path / "tokenizer")
    (folder / "tokenizer_config.json").write_text(text)
    assert main(tokenize_words(corpus, tmp_path / "out", tokenizer=folder)) == 2
    printed = capsys.readouterr().err
    assert words in printed and "tokenizer_config.json" in printed and printed.count("\n") == 1 and len(printed) < 400
    assert {file.name for file in (tmp_path / "out").iterdir()} - {".lock"} == {"tokenize.failed.json"}


def test_a_run_waits_for_another_one_in_its_folder_and_says_so(corpus, output, tmp_path, capsys):
    words = tokenize_words(corpus, tmp_path / "out", tokenizer=output / "tokenizer")
    with ThreadPoolExecutor(1) as other, lock(tmp_path / "out" / ".lock"):
        code = other.submit(main, words)
        time.sleep(0.5)
        assert not code.done() and not (tmp_path / "out" / "shards").exists()
    assert code.result() == 0
    assert capsys.readouterr().err.count(f"waiting for process {os.getpid()}, which works in {tmp_path / 'out'}\n") == 1


def test_a_tokenizer_that_knows_no_token(corpus, output, tmp_path, capsys):
    folder = shutil.copytree(output / "tokenizer", tmp_path / "tokenizer")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"] |= {"vocab": {}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "added_tokens": []}))
    assert main(tokenize_words(corpus, tmp_path / "out", tokenizer=folder)) == 2
    assert "has an empty vocabulary" in capsys.readouterr().err


def test_check_finds_missing_altered_and_unfinished_shards(corpus, tmp_path):
    output = tmp_path / "out"
    assert main(tokenize_words(corpus, output)) == 0
    folder = output / "shards"
    shards.check(folder)
    path = folder / "train" / "shard-00001.pt"
    content = path.read_bytes()

    path.write_bytes(content[:-200] + bytes([content[-200] ^ 1]) + content[-199:])
    with pytest.raises(BadInput, match=r"shard-00001\.pt was modified"):
        shards.check(folder)
    path.unlink()
    with pytest.raises(BadInput, match=r"shard-00001\.pt is missing"):
        shards.check(folder)
    with pytest.raises(BadInput, match=r"shard-00001\.pt is missing"):
        list(Shards(folder, "train"))
    path.write_bytes(content[:100])
    with pytest.raises(BadInput, match="damaged"):
        list(Shards(folder, "train"))

    meta = shards.meta(folder, "val")
    torch.save({**meta, "finalized": False}, folder / "val" / "shards.meta.pt")
    with pytest.raises(BadInput, match="not complete"):
        Shards(folder, "val")
    with pytest.raises(BadInput, match="is not a shards folder"):
        shards.check(tmp_path)


def changed(key, change):
    """A function that replaces one tensor or list of a shard by what ``change`` makes of it."""
    return lambda shard: {**shard, key: change(shard[key])}


def first(values, value):
    """A copy whose first entry is another."""
    values = values.clone()
    values.view(-1)[0] = value
    return values


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("lengths", lambda lengths: first(lengths, 17)), "a length 17, outside 1 to 16"),
        (changed("lengths", lambda lengths: first(lengths, -3)), "a length -3, outside 1 to 16"),
        (changed("lengths", lambda lengths: first(lengths, 0)), "a length 0, outside 1 to 16"),
        (changed("lengths", lambda lengths: lengths[1:]), "lengths is not an int32 vector of 7"),
        (changed("lengths", lambda lengths: lengths.double()), "lengths is not an int32 vector of 7"),
        (changed("lengths", lambda lengths: lengths.tolist()), "lengths is not an int32 vector of 7"),
        (
            changed("input_ids", lambda tokens: tokens.float() + 0.5),
            "input_ids is not an int16 or int32 matrix of 7 × 16",
        ),
        (changed("input_ids", lambda tokens: tokens[:, 1:]), "input_ids is not an int16 or int32 matrix of 7 × 16"),
        (changed("input_ids", lambda tokens: tokens.int().to_sparse()), "it refers to .*sparse_tensor"),
        (changed("input_ids", lambda tokens: first(tokens, 300)), "a token 300, outside 0 to 299"),
        (changed("input_ids", lambda tokens: first(tokens, -1)), "a token -1, outside 0 to 299"),
        (changed("sample_ids", lambda ids: ids[1:]), "sample_ids is not a list of 7 strings"),
        (changed("sample_ids", lambda ids: [*ids[1:], 5]), "sample_ids is not a list of 7 strings"),
        (lambda shard: shard["input_ids"], "not a dictionary of input_ids, lengths and sample_ids"),
        (lambda shard: {"input_ids": shard["input_ids"]}, "not a dictionary of input_ids, lengths and sample_ids"),
    ],
)
def test_a_shard_that_is_not_as_its_meta_says_is_refused_when_it_is_opened(output, tmp_path, change, message):
    folder = tmp_path / "shards"
    shutil.copytree(output / "shards", folder)
    path, meta = folder / "train" / "shard-00001.pt", shards.meta(folder, "train")
    torch.save(change(torch.load(path)), path)
    meta["shards"][1]["sha256"] = sha256_file(path)
    torch.save(meta, folder / "train" / shards.META)
    split = Shards(folder, "train")
    assert split[6].sample_id
    for read in (lambda: split[7], lambda: shards.check(folder)):
        with pytest.raises(BadInput, match=f"train/shard-00001.pt is (unusable:|damaged) .*{message}"):
            read()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda meta: meta["shards"][1].update(file="../val/shard-00000.pt"), "of shard 1"),
        (lambda meta: meta["shards"][1].update(samples=-7), "of shard 1"),
        (lambda meta: meta["shards"][1].update(samples="7"), "of shard 1"),
        (lambda meta: meta["shards"].pop(), "samples, but processed_samples is"),
        (lambda meta: meta.update(max_length=16.0), "max_length is 16.0"),
        (lambda meta: meta.update(pad_id=-1), "pad_id is -1"),
        (lambda meta: meta.update(finalized=1), "finalized is 1"),
        (lambda meta: meta.update(shards={}), "shards is {}"),
        (lambda meta: meta.update(split="val"), "it belongs to the split val"),
        (lambda meta: meta.pop("vocab_size"), "vocab_size is None"),
        (lambda meta: meta.clear(), "not metadata of format version 1"),
        (lambda meta: meta.update(tokens=meta["tokens"] - 1), "tokens, but shards.meta.pt says"),
    ],
)
def test_a_meta_that_cannot_be_true_is_refused(corpus, output, tmp_path, change, message, capsys):
    folder = tmp_path / "shards"
    shutil.copytree(output / "shards", folder)
    meta = shards.meta(folder, "train")
    change(meta)
    torch.save(meta, folder / "train" / shards.META)
    with pytest.raises(BadInput, match=message):
        shards.check(folder)


def test_restart_replaces_shards_that_are_unusable(corpus, output, tmp_path, capsys):
    shutil.copytree(output, tmp_path, dirs_exist_ok=True)
    (tmp_path / "shards/val/shards.meta.pt").write_bytes(b"")
    assert main(tokenize_words(corpus, tmp_path)) == 2
    assert "shards.meta.pt is damaged" in capsys.readouterr().err
    assert main([*tokenize_words(corpus, tmp_path), "--restart"]) == 0
    assert files_of(tmp_path) == files_of(output)
