import json
import os
import subprocess
import sys
from pathlib import Path

import torch

import common_kernels
from common_kernels import philox4x32
from common_kernels.philox import rounds
from tests.each import each

# Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds): counter, key, words.
KNOWN = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def numbers(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@each(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    low, high = numbers(key)
    got = rounds(low | high << 32, tuple(torch.tensor([word]) for word in numbers(counter)))
    assert [word.item() for word in got] == numbers(words)


def test_counter_fills_the_two_low_words():
    counter = torch.tensor([0, 7, 2**32 + 5, 2**62 + 3])
    words = counter & 0xFFFFFFFF, counter >> 32, counter * 0, counter * 0
    for got, want in zip(philox4x32(9, counter), rounds(9, words), strict=True):
        assert torch.equal(got, want)


@each("seed", [0, 12345, 2**40 + 17])
def test_tensor_seed_equals_int_seed(seed):
    counter = torch.arange(5).view(5, 1)
    for a, b in zip(
        philox4x32(seed, counter), philox4x32(torch.tensor(seed), counter), strict=True
    ):
        assert a.shape == (5, 1) and torch.equal(a, b)


def test_words_of_triton():
    seed, first = 2**33 + 77, 2**34 + 1  # both halves of the key and of the counter in use
    script = Path(__file__).with_name("triton_words.py")
    root = str(Path(common_kernels.__file__).parents[1])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, script, str(seed), str(first)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = philox4x32(seed, first + torch.arange(8))
    assert json.loads(done.stdout) == 2 * [[word.tolist() for word in words]]
