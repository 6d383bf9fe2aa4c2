"""``grads less``: from a Trainer's checkpoints to the documents, against LESS's formula on gradients by autograd."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import torch
from chat_templates import CHATML, make_tokenizer, marked, unmarked, write
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gradwire import cli
from gradwire.attribution.options import number_of
from gradwire.base.errors import BadInput
from gradwire.bench import grads_less
from gradwire.lm.models import causal, optimizer

LENGTH = 64
WORDS = ("gradient", "wire", "shards", "naïve", "日本", "code", "travels", "over")


def chat(number, subject="where is"):
    said = f"over the {WORDS[(3 * number) % 7]} {WORDS[(number // 3) % 8]}"
    return [
        {"role": "user", "content": f"{subject} {WORDS[number % 8]} {number}?"},
        {"role": "assistant", "content": said},
    ]


TRAIN = [{"id": f"chat/{n}#x", "messages": chat(n), "origin": {"page": n + 0.5}} for n in range(17)]
COPIES = [{**TRAIN[n], "id": f"copy/{n}", "origin": "elsewhere"} for n in range(17)]
TASKS = {
    "law": [{"id": "q/1", "messages": chat(5, "why")}, {"messages": chat(11)}],
    "wires": [{"id": f"q/{n}", "messages": chat(3 * n, "which")} for n in range(3)],
}


@pytest.fixture(scope="module")
def warmup(tmp_path_factory):
    """Checkpoints of a Trainer after 3 and 5 steps, of a model that reads ChatML; the mean rates before each."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    base = tmp_path_factory.mktemp("warmup")
    make_tokenizer(base / "tokenizer", unmarked(CHATML))
    words = PreTrainedTokenizerFast.from_pretrained(base / "tokenizer")
    torch.manual_seed(5)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=350, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=1,
            max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )
    )  # fmt: skip
    samples = [{"input_ids": ids, "labels": ids} for ids in torch.randint(5, 300, (12, 20))]
    arguments = TrainingArguments(
        str(base / "out"), max_steps=5, save_steps=3, per_device_train_batch_size=3, learning_rate=1e-2,
        logging_steps=1, lr_scheduler_type="linear", use_cpu=True, report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=samples, processing_class=words)
    trainer.train()
    logged = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    return base / "out", [sum(part) / len(part) for part in (logged[:3], logged[3:])]


def select(checkpoints, base, *words):
    """Run the command on the chats and their copies."""
    corpus = write(base / "train.jsonl", [*TRAIN, *COPIES])
    tasks = [str(write(base / f"{name}.jsonl", documents)) for name, documents in TASKS.items()]
    given = ["--data_path", str(corpus), "--validation", *tasks, "--checkpoints", str(checkpoints)]
    return cli.main(["grads", "less", *given, "--output_dir", str(base / "selected"), *words])


def gradient(model, tokenizer, messages):
    """A chat's gradient, in float64 by parameter name."""
    out = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    tokens, said = torch.tensor(out["input_ids"]), torch.tensor(out["assistant_masks"]).bool()
    log_p = model(tokens[None]).logits[0, :-1].log_softmax(-1)
    loss = -log_p.gather(1, tokens[1:, None])[said[1:]].mean()
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, [*named.values()]), strict=True))


def by_hand(folders, rates):
    """LESS's score of each chat: sections 4.1 and 4.2, without projection."""
    scores = 0.0
    for folder, rate in zip(folders, rates, strict=True):
        model, tokenizer = causal.load(folder), AutoTokenizer.from_pretrained(folder)
        moments, tokenizer.chat_template = optimizer.load(folder, model), marked(CHATML)
        model.double()
        steps, wanted = [], []
        for document in TRAIN:
            parts = []
            for name, g in gradient(model, tokenizer, document["messages"]).items():
                m, v = moments.exp_avg[name].double(), moments.exp_avg_sq[name].double()
                parts.append(((0.9 * m + 0.1 * g) / torch.sqrt(0.999 * v + 0.001 * g * g + 1e-8)).flatten())
            steps.append(torch.cat(parts))
        for documents in TASKS.values():
            rows = [
                torch.cat([g.flatten() for g in gradient(model, tokenizer, one["messages"]).values()])
                for one in documents
            ]
            wanted.append(torch.stack([row / row.norm() for row in rows]).mean(0))
        cosines = torch.stack([step / step.norm() for step in steps]) @ torch.stack(wanted).T
        scores = scores + rate * cosines.numpy()
    return (scores / sum(rates)).max(1)


@pytest.fixture(scope="module")
def selected(warmup, tmp_path_factory):
    """The folder of a selection of 20 % at all checkpoints, without projection."""
    folder, rates = warmup
    size = sum(tensor.numel() for tensor in load_file(folder / "checkpoint-3" / "model.safetensors").values())
    base = tmp_path_factory.mktemp("less")
    assert select(folder, base, "--top_k", "20%", "--projection", "none", "--dim", str(size)) == 0
    return base / "selected", rates


def test_scores_are_those_of_less(warmup, selected):
    folder, rates = selected
    table = pq.read_table(folder / "influence" / "scores.parquet").to_pylist()
    scores = {row["sample_id"]: row["score"] for row in table}
    wanted = by_hand([warmup[0] / f"checkpoint-{step}" for step in (3, 5)], rates)
    for number, score in enumerate(wanted):
        assert [scores[f"chat/{number}#x"], scores[f"copy/{number}"]] == pytest.approx([score] * 2, rel=1e-3, abs=1e-4)
    assert {row["subtask"] for row in table} == {"law", "wires"}
    stated = json.loads((folder / "less.json").read_text())
    assert [each["learning_rate"] for each in stated["checkpoints"]] == pytest.approx(rates)


def test_the_best_documents_are_written_once_and_as_they_were_given(selected):
    folder, _ = selected
    table = pq.read_table(folder / "influence" / "scores.parquet").to_pylist()
    scores = {row["sample_id"]: row["score"] for row in table}
    order = sorted(range(17), key=lambda number: -scores[f"chat/{number}#x"])
    lines = [json.loads(line) for line in (folder / "top.jsonl").read_text().splitlines()]
    assert len(lines) == 7  # 20 % of 34
    by_id = {one["id"]: one for one in [*TRAIN, *COPIES]}
    assert all(line == by_id[line["id"]] for line in lines)
    assert [line["id"].partition("/")[2].removesuffix("#x") for line in lines] == [str(number) for number in order[:7]]
    stated = json.loads((folder / "less.json").read_text())
    assert stated["documents"] == 34 and 1 <= stated["repeated"] <= 7


def test_a_folder_of_the_warm_up_has_its_checkpoints(warmup):
    folder, rates = warmup
    found = grads_less.checkpoints_of([folder])
    assert [(each.folder.name, each.step) for each in found] == [(f"checkpoint-{step}", step) for step in (3, 5)]
    assert [each.learning_rate for each in found] == pytest.approx(rates)


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ([], "states no learning rate after step 0: train with `logging_steps`"),
        ([{"step": 9, "learning_rate": 1e-3}], "states no learning rate after step 0"),
        ([{"step": 2, "loss": 3.5}], "states no learning rate after step 0"),
    ],
)
def test_a_checkpoint_without_a_rate_is_refused(tmp_path, history, message):
    (tmp_path / "checkpoint-4").mkdir()
    state = {"global_step": 4, "log_history": history}
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(BadInput, match=message):
        grads_less.checkpoints_of([tmp_path])


@pytest.mark.parametrize(
    ("text", "total", "number"),
    [("7", 3, 7), ("5%", 1000, 50), ("5%", 3, 1), ("0.5%", 1000, 5), ("12.5%", 34, 4), ("100%", 9, 9)],
)
def test_a_number_or_a_share(text, total, number):
    assert number_of(text, total) == number


@pytest.mark.parametrize("text", ["", "0", "-3", "0%", "101%", "5 %", "1.5", "many", "nan%"])
def test_what_is_neither_is_refused(text):
    with pytest.raises(ValueError, match="is neither a number, such as 100, nor a share, such as 5%"):
        number_of(text, 10)
