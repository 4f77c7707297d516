"""Which window each sample of a training in epochs is, and which part of a mixture it is from."""

import numpy as np

from experiments.data.order import BLOCK, Order, Part, keys, permuted


def shuffle(size, seed=0, epoch=0, stream=0):
    return permuted(np.arange(size), size, keys(seed, stream), np.full(size, epoch))


def test_a_shuffle_is_a_permutation():
    for size in (1, 2, 3, 7, 10, 16, 17, 99, 100, 101, 5000):
        assert sorted(shuffle(size)) == list(range(size))


def test_the_order_stays_as_it_is():
    """A checkpoint goes on in it, whatever the versions."""
    assert shuffle(10, seed=5, epoch=3).tolist() == [8, 9, 5, 3, 6, 4, 2, 7, 1, 0]


def test_every_place_is_as_likely():
    """Place of one number of 24 (5 x 5 pairs, one of them outside) over 2400 epochs, and whether
    neighbours stay in order; the orders of four things."""
    epochs = np.arange(2400)
    places = permuted(np.full(2400, 7), 24, keys(3, 0), epochs)
    # chi-square with 23 degrees of freedom: mean 23, sigma sqrt(46); within 4 sigma
    assert ((np.bincount(places, minlength=24) - 100) ** 2 / 100).sum() < 23 + 4 * 46**0.5
    after = permuted(np.full(2400, 8), 24, keys(3, 0), epochs)
    assert abs(int((after > places).sum()) - 1200) < 4 * 600**0.5
    orders = [permuted(np.full(2400, i), 4, keys(3, 0), epochs) for i in range(4)]
    _, counts = np.unique(np.stack(orders), axis=1, return_counts=True)
    assert len(counts) == 24 and ((counts - 100) ** 2 / 100).sum() < 23 + 4 * 46**0.5


def order_of(tokens, steps=40, batch=6, seed=0, weights=(1.0,)):
    ends = np.cumsum([0, *tokens])
    parts = [
        Part(f"part{i}", int(ends[i]), count, weight)
        for i, (count, weight) in enumerate(zip(tokens, weights, strict=True))
    ]
    return Order(seed, parts, np.arange(steps + 1) * batch)


def all_starts(order, block, batch=6):
    return np.concatenate([order.starts(s, np.arange(batch), block) for s in range(order.steps)])


def test_each_epoch_has_every_window_once():
    order = order_of([81])  # ten windows of eight tokens, and the last target
    starts = all_starts(order, 8)
    epochs = starts.reshape(24, 10)
    assert (np.sort(epochs) == np.arange(10) * 8).all()
    assert len({tuple(epoch) for epoch in epochs}) > 20
    assert order.epochs(8) == {"part0": 24.0}


def test_a_step_and_an_index_alone_say_which_window():
    """So a resumed run, and any share of the indices, see what one process saw."""
    whole = order_of([1000], weights=(1.0,))
    expected = all_starts(whole, 8)
    fresh = order_of([1000])
    for rank in (0, 1):
        own = fresh.starts(29, np.arange(rank, 6, 2), 8)
        assert own.tolist() == expected[29 * 6 + rank : 30 * 6 : 2].tolist()


def test_a_part_of_a_mixture_is_drawn_by_its_weight_in_epochs_of_its_own():
    weights = (0.5, 0.3, 0.2)
    order = order_of([801, 161, 8001], weights=weights, steps=BLOCK // 64, batch=64)
    parts, numbers = order.numbers(np.arange(2 * BLOCK))
    for block in range(2):
        counts = np.bincount(parts[block * BLOCK : (block + 1) * BLOCK])
        assert counts.tolist() == [32768, 19661, 13107]  # of 65,536, rounded at the sums
    assert not np.array_equal(parts[:BLOCK], parts[BLOCK:])
    # any stretch has about its share: within 4 sigma of the binomial
    stretch = np.bincount(parts[1000:2000], minlength=3)
    assert all(
        abs(n - 1000 * w) < 4 * (1000 * w * (1 - w)) ** 0.5
        for n, w in zip(stretch, weights, strict=True)
    )
    for part in range(3):
        own = numbers[parts == part]
        assert own.tolist() == list(range(len(own)))  # none left out, in order
    starts = all_starts(order, 8, batch=64)
    first, ends = 0, [801, 962, 8963]
    for part, (windows, end) in enumerate(zip((100, 20, 1000), ends, strict=True)):
        own = starts[parts[:BLOCK] == part]
        assert own.min() >= first and own.max() + 8 < end
        whole = own[: len(own) // windows * windows].reshape(-1, windows)
        assert (np.sort(whole) == first + np.arange(windows) * 8).all()
        assert order.epochs(8)[f"part{part}"] == len(own) / windows
        first = end
