"""Batches: every evaluated sample exactly once, training ranks disjoint and resumable, ids that travel along.

Also `prefetch.py`.
"""

from __future__ import annotations

import threading
import time
from itertools import islice

import pytest
import torch
from data_samples import tokenize_words, values, write_corpus

from gradwire.base.errors import BadInput, RunFault
from gradwire.base.prefetch import prefetch
from gradwire.cli import main
from gradwire.lm.data.batches import eval_batches, train_batches
from gradwire.lm.data.shards import Shards, wait_finalized
from gradwire.lm.data.tokenize import shards_of


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c.json", values(30, longest=40))


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    output = tmp_path_factory.mktemp("tokenized")
    assert main(tokenize_words(corpus, output)) == 0
    return output / "shards"


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 4, 1000])
@pytest.mark.parametrize("split", ["train", "val"])
def test_evaluation_sees_every_sample_once(split, batch_size, world, folder):
    shards = Shards(folder, split)
    expected = {sample.sample_id: sample.input_ids for sample in shards}
    ranks = [list(eval_batches(shards, batch_size, rank, world)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    names = [name for batches in ranks for batch in batches for name in batch.sample_id]
    assert sorted(name for name in names if name) == sorted(expected)
    assert sum(batch.n_targets for batches in ranks for batch in batches) == sum(len(t) - 1 for t in expected.values())
    for batch in (batch for batches in ranks for batch in batches):
        assert batch.input_ids.shape == batch.labels.shape == (batch_size, batch.input_ids.shape[1])
        assert batch.input_ids.shape[1] >= 2 and batch.input_ids.dtype == batch.labels.dtype == torch.int64
        for name, tokens, labels in zip(batch.sample_id, batch.input_ids, batch.labels, strict=True):
            real = expected.get(name, torch.tensor([], dtype=torch.int64))
            length = len(real)
            assert tokens[:length].equal(real) and labels[:length].equal(real)
            assert (tokens[length:] == shards.meta["pad_id"]).all() and (labels[length:] == -100).all()


def test_more_ranks_than_samples_evaluate_filler(folder):
    shards = Shards(folder, "val")
    world = len(shards) + 2
    (batch,) = eval_batches(shards, 3, world - 1, world)
    assert batch.sample_id == ["", "", ""] and batch.n_targets == 0 and batch.input_ids.shape == (3, 2)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_train_on_disjoint_samples_within_an_epoch(world, folder):
    shards = Shards(folder, "train")
    per_epoch = len(shards) // world // 4
    ranks = [list(islice(train_batches(shards, 4, rank, world, seed=5), 2 * per_epoch)) for rank in range(world)]
    orders = []
    for epoch in (slice(0, per_epoch), slice(per_epoch, None)):
        names = [name for batches in ranks for batch in batches[epoch] for name in batch.sample_id]
        assert len(names) == len(set(names)) == per_epoch * 4 * world and "" not in names
        orders.append(names)
    assert orders[0] != orders[1]
    assert [b.sample_id for b in islice(train_batches(shards, 4, 0, world, seed=6), per_epoch)] != [
        b.sample_id for b in ranks[0][:per_epoch]
    ]


@pytest.mark.parametrize("start", [1, 9, 10, 11, 25])
def test_training_goes_on_at_start(start, folder):
    shards = Shards(folder, "train")
    unbroken = list(islice(train_batches(shards, 5, 1, 2, seed=3), start + 3))
    resumed = list(islice(train_batches(shards, 5, 1, 2, seed=3, start=start), 3))
    for left, right in zip(unbroken[start:], resumed, strict=True):
        assert left.sample_id == right.sample_id and left.input_ids.equal(right.input_ids)


def test_a_corpus_too_small_for_one_batch_on_each_rank(folder):
    shards = Shards(folder, "train")
    next(train_batches(shards, len(shards) // 3, 0, 3, seed=0))
    with pytest.raises(BadInput, match="too few for one batch"):
        train_batches(shards, len(shards) // 3 + 1, 0, 3, seed=0)


def test_a_shards_folder_or_its_parent_is_taken_as_it_is(folder):
    for path in (folder, folder.parent):
        assert shards_of(path, tokenizer="bpe", max_length=16, vocab_size=300, rank=1) == folder
    for path, message in ((folder / "none", "none does not exist"), (folder.parent.parent, "neither a shards folder")):
        with pytest.raises(BadInput, match=message):
            shards_of(path, tokenizer="bpe", max_length=16, vocab_size=300)


def test_rank_0_tokenizes_a_corpus_into_the_cache_while_another_polls(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = {"tokenizer": "bpe", "max_length": 16, "vocab_size": 300, "timeout": 20.0}
    found = []
    polling = threading.Thread(target=lambda: found.append(shards_of(corpus, rank=1, **settings)))
    polling.start()
    made = shards_of(corpus, rank=0, **settings)
    polling.join()
    assert found == [made] and made.is_relative_to(tmp_path / "gradwire") and len(Shards(made, "train")) > 0
    assert shards_of(corpus, rank=0, **{**settings, "max_length": 8}) != made
    assert shards_of(corpus, rank=0, cache_dir=tmp_path / "own", **settings) == tmp_path / "own" / "shards"

    settings |= {"whole": True, "cache_dir": tmp_path / "own"}
    polling = threading.Thread(target=lambda: found.append(shards_of(corpus, rank=1, **settings)))
    polling.start()
    made = shards_of(corpus, rank=0, **settings)
    polling.join()
    assert found[1:] == [made] and made != tmp_path / "own" / "shards" == shards_of(tmp_path / "own", tokenizer="bpe")
    parts = [Shards(tmp_path / "own" / "shards", split) for split in ("train", "val")]
    ids = {sample.sample_id for sample in Shards(made, "all")}
    assert ids == {sample.sample_id for part in parts for sample in part} and len(ids) > len(parts[0])
    assert shards_of(made, tokenizer="bpe", max_length=16) == made


def test_an_absent_producer_is_a_clear_fault(tmp_path):
    with pytest.raises(RunFault, match="no progress on the token shards"):
        wait_finalized(tmp_path / "shards", timeout=0.1)


def test_prefetched_batches_are_the_same_and_read_in_advance(folder):
    shards = Shards(folder, "train")
    read = []

    def batches():
        for batch in islice(train_batches(shards, 2, 0, 1, seed=1), 5):
            read.append(batch.sample_id)
            yield batch
        raise OSError("the disk is gone")

    expected = [batch.sample_id for batch in islice(train_batches(shards, 2, 0, 1, seed=1), 5)]
    coming, found = prefetch(batches()), []
    with pytest.raises(OSError, match="the disk is gone"):
        for batch in coming:
            found.append(batch.sample_id)
            deadline = time.monotonic() + 10
            while len(read) < min(5, len(found) + 1) and time.monotonic() < deadline:
                time.sleep(0.001)
            assert read == expected[: len(found) + 1], "not read before it was asked for, or too early"
    assert found == expected
