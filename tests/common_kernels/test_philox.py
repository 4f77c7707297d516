import torch

from common_kernels import philox4x32
from common_kernels.philox import rounds
from tests.each import each

# Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds): counter, key, words.
ZEROS, ONES = "00000000", "ffffffff"
KNOWN = [
    (" ".join([ZEROS] * 4), f"{ZEROS} {ZEROS}", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (" ".join([ONES] * 4), f"{ONES} {ONES}", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
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


def test_the_counter_fills_the_two_low_words_and_a_seed_may_be_a_tensor():
    counter = torch.tensor([[0], [7], [2**32 + 5], [2**62 + 3]])
    for seed in (0, 9, 2**40 + 17):
        want = rounds(seed, (counter & 0xFFFFFFFF, counter >> 32, counter * 0, counter * 0))
        for given in (seed, torch.tensor(seed)):
            assert all(map(torch.equal, philox4x32(given, counter), want))
