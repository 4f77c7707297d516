"""Fine-tuning of pre-trained models on GLUE and SQuAD, from the files to the table."""

import json
import re
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from common_kernels import nm_mask
from experiments import finetune
from experiments.config.run import load, resolve
from experiments.finetuning import glue, tuning
from experiments.finetuning.tuning import Encoded, collate
from experiments.support.checkpoint import read_sealed
from experiments.training import pretraining
from experiments.training.distributed import World
from experiments.training.sharding import accelerate
from experiments.training.tracking import read_metrics
from tests.experiments.conftest import CPU, quiet, settings

HERE = Path(__file__).parent
GLUE, SQUAD = HERE / "glue", HERE / "squad"
SHAPE = [
    *settings("model", n_layer=2, n_head=2, n_embd=32, vocab_size=512, block_size=64),
    *settings("train", steps=60, batch_size=16, warmup_steps=5, learning_rate=3e-3, eval_samples=4),
    *settings("train", min_learning_rate=0, log_every=60, eval_every=60),
]
# What a model of this size learns with in seconds.
QUICK = settings("recipe", max_length=64, learning_rate=3e-3, batch_size=16)
FAMILIES = {
    "gpt2": ["data.tokenizer=bpe", "method=s_ste"],
    "bert": ["model=bert_nano", "model.n_inner=64", "method=sr_ste"],
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """runs("gpt2") -> directory of a finished run on the sentences of the GLUE files."""
    from experiments.data.prepare import prepare

    root = tmp_path_factory.mktemp("toys")
    source = root / "text"
    source.mkdir()
    splits = [own for task in glue.TASKS for own in glue.load(task, str(GLUE)).values()]
    sentences = [text for own in splits for texts in own.texts for text in texts]
    for name in ("a.txt", "b.txt"):
        (source / name).write_text("\n".join(sentences * 2) + "\n", encoding="utf-8")
    data = ["data.name=toys", f"data.source={source}", f"data.root={root}", "data.vocab_size=400"]

    @cache
    def run(family):
        config = load([*FAMILIES[family], *data, *SHAPE, *CPU, f"runs={root / 'runs'}"])
        prepare(config.data)
        pretraining.run(config, quiet)
        return config.directory()

    return run


@pytest.fixture
def gpt2(runs, tmp_path):
    """A finished run of its own, without any fine-tuning."""
    return Path(shutil.copytree(runs("gpt2"), tmp_path / "run", ignore=lambda *_: ["finetune"]))


def config(run, task, *more):
    source = SQUAD if task == "squad" else GLUE
    given = [f"run={run}", f"task={task}", f"data.source={source}", *QUICK, *CPU]
    return finetune.load([*given, *more])


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_pretrained_model_learns_a_task_and_stays_sparse(runs, family):
    run = runs(family)
    own = config(run, "sst2", "recipe.epochs=8", "recipe.batch_size=4")
    result = finetune.run(own, quiet).result
    # Of 32 sentences a coin gets 26 or more right with a probability of 0.03 %.
    assert result["metrics"]["score"] == result["metrics"]["accuracy"] > 80.0
    assert result["sparsity"]["density"] == pytest.approx(0.5, abs=1e-3)
    assert result["sparsity"]["illegal_groups"] == 0 < result["sparsity"]["groups"]
    source = read_sealed(run / "result.json")
    assert result["converted"] == source["converted"] and len(source["converted"]) == 4
    assert result["pretrained"]["weights_hash"] == own.weights_hash()
    assert result["examples"] == {"train": 64, "dev": 32} and result["steps"] == 128
    log = read_metrics(own.directory() / "metrics.jsonl")
    assert [(r["step"], r["epoch"]) for r in log] == [(16 * e, e) for e in range(1, 9)]
    assert log[-1]["loss"] < 0.6 * log[0]["loss"]


def test_other_data_or_weights_of_the_same_name_are_not_taken_for_done(gpt2, tmp_path, made_again):
    folders = [Path(shutil.copytree(GLUE, tmp_path / name / "glue")) for name in "ab"]
    lines = (GLUE / "RTE/dev.tsv").read_text().splitlines(keepends=True)
    (folders[1] / "RTE/dev.tsv").write_text("".join(lines[:-1]))
    short = "recipe.epochs=1", "impl.checkpoint_every=1"
    one, other = (config(gpt2, "rte", f"data.source={folder}", *short) for folder in folders)
    result = finetune.run(one, quiet).result
    assert one.directory() != other.directory() and one.digest() != other.digest()
    assert finetune.finished(other) is None
    made_again(gpt2, lambda state: {k: v + 1e-3 for k, v in state.items()})
    assert finetune.finished(one) is None
    again = finetune.run(one, quiet).result
    assert again["pretrained"]["weights_hash"] != result["pretrained"]["weights_hash"]


def test_stsb_mnli_and_squad_through_the_whole_loop(gpt2):
    """STS-B's outputs are numbers, and MNLI has two dev splits."""
    done = [finetune.run(config(gpt2, t, "recipe.epochs=1"), quiet) for t in ("stsb", "mnli")]
    scores = [run.result["metrics"]["score"] for run in done]
    stsb, _, mean = finetune.table(done).splitlines()
    assert stsb.startswith(f"stsb       {scores[0]:>5.1f}  spearman ") and "pearson" in stsb
    assert mean == f"mean of 2  {sum(scores) / 2:>5.1f}"
    more = ["recipe.max_length=20", "recipe.stride=4", "recipe.epochs=2"]
    result = finetune.run(config(gpt2, "squad", *more), quiet).result
    assert result["examples"] == {"train": 24, "dev": 9}
    assert result["sequences"]["train"] > 24 and result["sequences"]["dev"] > 9  # windows
    assert result["metrics"]["score"] == result["metrics"]["f1"]


def test_a_batch_is_padded_on_the_right_to_its_longest_sequence():
    made = (([5, 6, 7], 2), ([8], 1))
    pair = [Encoded(np.array(ids, dtype=np.int32), n, n - 1) for ids, n in made]
    batch = collate(pair, pad=9)
    assert batch["input"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["token_types"].tolist() == [[0, 0, 1], [0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[True] * 3, [True, False, False]]
    assert batch["target"].tolist() == [1, 0]
    assert batch["input"].dtype == batch["target"].dtype == torch.int64
    numbers = [Encoded(s.ids, s.second, 2.5) for s in pair]
    assert collate(numbers, 0)["target"].dtype == torch.float32


def trainer(run, *more):
    """A fine-tuning before its first step."""
    training = tuning.Finetuning(resolve(config(run, "rte", *more)))
    training.hashes = training.inputs()
    here = World(0, 1, torch.device("cpu"))
    built = training.build(here)
    accelerate(built.method, built.tokens, training.config.impl)
    return training.trainer(built, here)


def batches(trainer):
    """The micro-batches of its next steps."""
    return trainer.source.batches(trainer._requests())


def test_the_order_of_an_epoch_follows_from_seed_and_epoch_alone(gpt2):
    def order(t, epoch):
        requests = [(3 * (epoch - 1) + step, range(16)) for step in range(3)]
        batches = list(t.source.batches(requests))
        return [tuple(row[mask].tolist()) for b in batches for row, mask in rows(b)]

    def rows(batch):
        return zip(batch["input"], batch["attention_mask"], strict=True)

    one, other = trainer(gpt2), trainer(gpt2, "seed=1")
    first = order(one, 1)
    torch.rand(7)
    np.random.rand(7)
    assert order(one, 1) == first != order(one, 2)
    assert order(other, 1) != first
    assert sorted(order(other, 1)) == sorted(first) == sorted(order(one, 2))


def test_a_checkpoint_of_transformers_is_fine_tuned_and_its_zeros_stay(hf_model, runs, tmp_path):
    from transformers import PreTrainedTokenizerFast

    from experiments.data.tokenizer import END_OF_TEXT

    folder, model = tmp_path / "checkpoint", hf_model("gpt2", vocab_size=512)
    [tokenizer] = runs("gpt2").parents[3].glob("toys-v400*/tokenizer.json")
    model.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), eos_token=END_OF_TEXT)
    fast.save_pretrained(folder)
    given = [f"model.path={folder}", "task=rte", f"data.source={GLUE}", f"runs={tmp_path / 'r'}"]
    given += [*QUICK, *CPU, "recipe.max_length=32", "recipe.epochs=1"]
    pruned = [block.mlp.c_fc.weight for block in model.transformer.h]  # [in, out]
    for weight in pruned:
        weight.data *= nm_mask(weight, dim=0)
    model.save_pretrained(folder)
    own = finetune.load([*given, "mode=masked"])
    result = finetune.run(own, quiet).result
    assert len(result["converted"]) == 2 and result["sparsity"]["illegal_groups"] == 0
    tuned = load_file(own.directory() / "model.safetensors")
    for name, before in zip(result["converted"], pruned, strict=True):
        weight = tuned[f"{name}.weight"]
        assert name.endswith("mlp.c_fc") and not torch.equal(weight, before.T)
        assert torch.equal(weight != 0, before.T != 0)


def test_weights_and_predictions_are_kept(gpt2):
    own = config(gpt2, "rte", "recipe.epochs=1")
    finetune.run(own, quiet)
    result, path = read_sealed(own.directory() / "result.json"), "predictions/dev.csv"
    assert [*result["files"]] == ["model.safetensors", path]
    header, *rows = (own.directory() / path).read_text().splitlines()
    assert header == "prediction,label" and len(rows) == 16
    right = sum(predicted == label for predicted, label in (row.split(",") for row in rows))
    assert result["metrics"]["accuracy"] == pytest.approx(100 * right / 16)
    # The weights are those of the predictions.
    t = trainer(gpt2)
    t.method.finalize(t.model)
    t.model.load_state_dict(load_file(own.directory() / "model.safetensors"))
    assert t.evaluate() == result["metrics"] and t.evaluation.losses == result["losses"]
    page = (HERE.parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)[0]
    names = {"run": gpt2, "tuned": own.directory()}
    exec(code, names)
    shown = names["model"].state_dict()
    assert all(torch.equal(shown[key], value) for key, value in t.model.state_dict().items())
    # A damaged file is made again.
    (own.directory() / path).write_text("prediction\n")
    assert finetune.finished(own) is None


def test_two_ranks_fine_tune_a_sparse_model_as_one_does(gpt2, run_on_two_ranks):
    """One step of all 48 sequences, in micro-batches of 20: the second rank's last one is empty."""
    more = ["mode=masked", "recipe.epochs=1", "recipe.batch_size=48", "recipe.warmup_fraction=0"]
    more += ["impl.micro_batch=20"]
    own = config(gpt2, "rte", *more)
    given = [f"run={gpt2}", "task=rte", f"data.source={GLUE}", *QUICK, *CPU, *more]
    kept = ("model.safetensors", "predictions/dev.csv", "metrics.jsonl", "result.json")

    def run(shard=None):
        if shard is None:
            finetune.run(own, quiet)
        else:
            run_on_two_ranks("experiments.finetune", *given, f"impl.shard={shard}")
        texts = {name: (own.directory() / name).read_bytes() for name in kept}
        weights = load_file(own.directory() / "model.safetensors")
        shutil.rmtree(gpt2 / "finetune")
        return weights, texts, json.loads(texts["result.json"])

    one, first, single = run()
    before = load_file(gpt2 / "model.safetensors")
    for two, second, double in map(run, ("ddp", "fsdp2")):
        assert (single["world_size"], double["world_size"]) == (1, 2)
        for name in single["converted"]:
            # The mask of the start, and of the two it is the same.
            outside = before[f"{name}.weight"] == 0
            assert not any(weights[f"{name}.weight"][outside].any() for weights in (one, two))
        assert one.keys() == two.keys()
        for name, weight in one.items():
            # Adam's first step is lr * sign: where a gradient is about 0 its sign may differ.
            assert ((weight - two[name]).abs() > 1e-4).float().mean() < 0.01, name
        assert first["predictions/dev.csv"] == second["predictions/dev.csv"]
        assert single["metrics"] == double["metrics"]
        assert single["sparsity"] == double["sparsity"]
        losses = [json.loads(texts["metrics.jsonl"])["loss"] for texts in (first, second)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
