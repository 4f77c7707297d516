"""The contract of every data source (experiments/data/source.py): a training batch depends on the
seed and its request, an evaluation batch on the data alone.
Token corpora: which windows a batch holds, and what is refused before training starts."""

import dataclasses
import json
import random
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.data.corpus import CausalText, check_fits, load_tokens
from experiments.data.manifest import DataConfig, file_record
from experiments.data.mlm import MaskedText, MLMConfig
from experiments.data.prepare import prepare
from experiments.images.dataset import ImageConfig
from experiments.images.multicrop import MultiCrops
from experiments.images.source import ImageSource
from experiments.support.errors import UserError
from models.bert import BertConfig
from models.dino import DinoConfig
from models.vit import ViTConfig

BERT = BertConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=320, block_size=16)
VIT = ViTConfig(8, 1, 1, image_size=8, patch_size=4, n_classes=3, dynamic_image_size=True)
DINO = DinoConfig(total_steps=10, local_crops=3, local_size=4)
AUGMENTED = {"crop_scale": (0.3, 1.0), "rotate": 15.0, "shift": 0.1, "random_erasing": 0.5,
             "mixup": 0.0, "cutmix": 0.0}  # fmt: skip
HELD = {"crop_scale": None, "crop_pct": 1.0, "rand_augment": None, "color_jitter": 0.0,
        "random_erasing": 0.0}  # fmt: skip


@pytest.fixture(scope="module")
def sources(corpus_dir, write_idx, tmp_path_factory):
    """Functions from a seed and a number of workers to a source of batches of 12, by name."""
    root = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for place in (f"{split}/{label}" for split in ("train", "val") for label in "abc"):
        (root / place).mkdir(parents=True)
        for i in range(4):
            pixels = generator.integers(0, 256, (14, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / place / f"{i}.png")
    files = ImageConfig("files", str(root), image_size=8, **AUGMENTED)
    mixed = dataclasses.replace(files, mixup=0.8, cutmix=1.0)
    grey = ImageConfig("grey", str(write_idx(root / "idx", 8)), image_size=8, **HELD)
    words = {"name": "words", "source": str(corpus_dir / "text"), "root": str(corpus_dir)}
    plain = DataConfig(**words, tokenizer="bpe", vocab_size=300)
    masked = MLMConfig(**words, tokenizer="wordpiece", vocab_size=120)
    prepare(masked)
    two = dataclasses.replace(masked, next_sentence=True)
    bert_of_two = dataclasses.replace(BERT, next_sentence=True)
    return {
        "text": lambda seed, _: CausalText(load_tokens(plain, seed), 16),
        "masked": lambda seed, _: MaskedText(load_tokens(masked, seed), masked, BERT),
        "sentences": lambda seed, _: MaskedText(load_tokens(two, seed), two, bert_of_two),
        "images": lambda seed, workers: ImageSource(files, VIT, seed, 12, workers),
        "mixed": lambda seed, _: ImageSource(mixed, VIT, seed, 12),
        "grey": lambda seed, _: ImageSource(dataclasses.replace(grey, shift=0.2), VIT, seed, 12),
        "crops": lambda seed, workers: MultiCrops(files, DINO, VIT, seed, 12, workers),
    }


NAMES = ("text", "masked", "sentences", "images", "mixed", "grey", "crops")


def joined(batches):
    batches = list(batches)
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def close(a, b):
    """Equal but for the last bits, which the number of crops that are computed together turns."""
    return a.keys() == b.keys() and all(
        a[k].shape == b[k].shape and torch.allclose(a[k], b[k], rtol=0, atol=1e-4) for k in a
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_depends_on_seed_and_request_alone(sources, name):
    def states():
        python, (_, words, *_) = random.getstate(), np.random.get_state()
        return python, words.tolist(), torch.get_rng_state().tolist()

    before, source = states(), sources[name](0, 0)
    held = getattr(source, "memory", None)
    assert held is None or bool(held) == (name == "grey")
    steps = [(step, range(12)) for step in range(3)]
    whole = joined(source.batches(steps))
    bounds = (0, 2), (2, 6), (6, 12)  # no multiples of the words that a counter gives
    parts = [(step, range(*part)) for step in range(3) for part in bounds]
    assert close(joined(sources[name](0, 0).batches(parts)), whole)
    backwards = list(source.batches(steps[::-1]))[::-1]
    assert close(joined(backwards), whole)
    assert states() == before
    if name in ("images", "crops"):  # processes that read ahead change nothing
        ahead = sources[name](0, 2)
        assert close(joined(ahead.batches(iter(steps))), whole)
    key = "global_crops" if "global_crops" in whole else "input"
    samples = whole[key].flatten(1)
    assert len({tuple(row.tolist()) for row in samples}) > 30  # of 36: each is drawn by itself
    other = joined(sources[name](1, 0).batches(steps))
    assert not torch.equal(other[key], whole[key])
    # Evaluation batches are fixed by the data.
    first = joined(sources[name](0, 0).eval_batches(5, 5))
    assert all(len(value) == 5 for value in first.values())
    for seed, size in ((0, 2), (7, 3)):
        assert close(joined(sources[name](seed, 0).eval_batches(5, size)), first)
    count = sources[name](0, 0).eval_size
    for wrong in (0, count + 1):
        with pytest.raises(UserError, match=rf"set train\.eval_samples to 1 to {count}"):
            list(sources[name](0, 0).eval_batches(wrong, 5))


@pytest.fixture
def config(tmp_path):
    """A corpus whose token at position i is i, so that a window shows where it was cut."""
    config = DataConfig("count", "unused", str(tmp_path), tokenizer="bpe", vocab_size=7000)
    config.directory.mkdir(parents=True)
    splits = {}
    for split, count in (("train", 5000), ("val", 1000)):
        path = config.directory / f"{split}.bin"
        np.arange(count).astype("<u2").tofile(path)
        splits[split] = {**file_record(path), "tokens": count}
    tokenizer = {"kind": "bpe", "vocab_size": 7000, "end_of_text": 0, "file": None}
    made_from = {"path": "unused"}
    manifest = {"schema": 1, "source": made_from, "tokenizer": tokenizer, "splits": splits}
    (config.directory / "manifest.json").write_text(json.dumps(manifest))
    return config


@pytest.fixture
def corpus(config):
    return load_tokens(config, seed=3)


def philox4x64(counter, key, mask=2**64 - 1):
    """Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(b >> 64) ^ c[1] ^ k[0], b & mask, (a >> 64) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return c


def test_a_batch_is_windows_at_philox_words_of_seed_split_step_and_index(corpus):
    for split, stream, size in (("train", 0, 5000), ("val", 1, 1000)):
        batch = CausalText(corpus, 20).batch(split, 11, range(6))
        # NumPy's generator steps its counter before it makes four words.
        words = philox4x64((1, 11, 0, 0), (3, stream)) + philox4x64((2, 11, 0, 0), (3, stream))
        starts = torch.tensor([word % (size - 20) for word in words[:6]])
        assert torch.equal(batch["input"], starts[:, None] + torch.arange(20))
        assert torch.equal(batch["target"], batch["input"] + 1)


def test_evaluation_windows_are_fixed_disjoint_and_spread(corpus, config):
    def starts(corpus, count, batch_size):
        batches = list(CausalText(corpus, 10).eval_batches(count, batch_size))
        assert all(torch.equal(b["target"], b["input"] + 1) for b in batches)
        return torch.cat([b["input"][:, 0] for b in batches]).tolist()

    # 1000 tokens hold 99 windows of 10 tokens with a target each
    assert starts(corpus, 3, 2) == [0, 330, 660]
    assert starts(corpus, 99, 32) == list(range(0, 990, 10))
    assert starts(load_tokens(config, seed=99), 7, 3) == starts(corpus, 7, 4)


def test_a_changed_file_is_named(corpus_dir, tmp_path):
    folder = shutil.copytree(corpus_dir / "words-v300", tmp_path / "words-v300")
    config = DataConfig("words", str(corpus_dir / "text"), str(tmp_path), "bpe", 300)
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    manifest = json.loads((folder / "manifest.json").read_text())
    again = r"; delete .*words-v300 and run `python -m experiments\.prepare_data`"
    for name, content, said in (
        ("train.bin", whole[folder / "train.bin"][:-4] + b"\0" * 4, "was changed" + again),
        ("tokenizer.json", None, "is missing" + again),
        ("manifest.json", json.dumps({**manifest, "name": "others"}).encode(), "is damaged"),
        ("manifest.json", None, r"is missing; run `python -m experiments\.prepare_data`"),
    ):
        path = folder / name
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(UserError, match=f"{name} {said}"):
            load_tokens(config, seed=0)
        path.write_bytes(whole[path])


def test_check_fits(corpus):
    check_fits(corpus, vocab_size=7000, block_size=999)
    with pytest.raises(UserError, match=r"7000 token ids, the model only 6999.*vocab_size to 7040"):
        check_fits(corpus, vocab_size=6999, block_size=999)
    with pytest.raises(UserError, match=r"val split .* has 1000 tokens, a window needs 1001"):
        check_fits(corpus, vocab_size=7000, block_size=1000)
