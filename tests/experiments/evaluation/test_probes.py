"""Nearest neighbours and logistic regression against scikit-learn's."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from experiments.evaluation import probes
from experiments.evaluation.probes import features, knn, linear, logistic_regression
from experiments.images.dataset import ImageConfig
from experiments.images.source import ImageBatches
from experiments.support.errors import UserError
from models.vit import ViT, ViTConfig


@pytest.fixture(scope="module")
def digits():
    """(x [600, 64], y, test_x [200, 64], test_y): pixels, float64."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.from_numpy(x / 16.0), torch.from_numpy(y.astype(np.int64))
    return x[:600], y[:600], x[600:800], y[600:800]


def test_neighbours_vote_as_scikit_learn_s_do(digits, monkeypatch):
    """20 neighbours at a temperature of 0.07 (DINO, appendix F.1)."""
    x, y, test_x, _ = digits
    neighbours = KNeighborsClassifier(20, weights=lambda d: np.exp((1 - d) / 0.07), metric="cosine")
    ours = knn(x, y, test_x, 10)
    assert ours.tolist() == neighbours.fit(x, y).predict(test_x).tolist()
    monkeypatch.setattr(probes, "_COSINES", 600)  # one test image at a time
    assert torch.equal(knn(x, y, test_x, 10), ours)


def test_the_regression_is_scikit_learn_s(digits, monkeypatch):
    decay = 1e-3
    x, y, test_x, _ = digits
    theirs = LogisticRegression(C=1 / (decay * len(x)), tol=1e-8, max_iter=5000).fit(x, y)
    monkeypatch.setattr(probes, "_ROWS", 250)  # the sum over chunks of rows is the whole
    weight, bias = logistic_regression(x, y, 10, decay)
    ours = (test_x @ weight.T + bias).softmax(1)
    expected = torch.from_numpy(theirs.predict_proba(test_x))
    # Both stop close to the one minimum of a convex function; the closer, the larger the decay.
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=0)
    assert torch.equal(ours.argmax(1), expected.argmax(1))


def test_the_regression_reaches_the_minimum_on_correlated_features():
    """The standard deviations of 64 directions lie between 10 and 0.01, and each direction tells
    the classes apart as well as the others. Features of vision transformers are like that."""
    generator, decay = torch.Generator().manual_seed(0), 1e-6
    own, to_classes, turn = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in ((4000, 64), (64, 5), (64, 64))
    )
    y = (own @ to_classes / 8).softmax(1).multinomial(1, generator=generator)[:, 0]
    x = own * torch.logspace(1, -2, 64) @ torch.linalg.qr(turn)[0]
    theirs = LogisticRegression(C=1 / (decay * len(x)), solver="newton-cholesky", tol=1e-9)
    theirs.fit(x, y)

    def objective(weight, bias):
        loss = torch.nn.functional.cross_entropy(x @ weight.T + bias, y)
        return float(loss + decay / 2 * weight.square().sum())

    # For a convex function f(a) - f(b) <= f'(a) . (a - b). Ours stops where no slope is above 1e-6,
    # so this is at most 1e-6 times the distance of the two in the coordinates of the search.
    ours = logistic_regression(x, y, 5, decay)
    other = torch.from_numpy(theirs.coef_), torch.from_numpy(theirs.intercept_)
    apart = torch.linalg.solve(probes._basis(x, 5, decay), (ours[0] - other[0]).T)
    distance = float(apart.abs().sum() + (ours[1] - other[1]).abs().sum())
    assert objective(*ours) <= objective(*other) + 1e-6 * distance


def test_the_decay_is_chosen_on_a_held_out_tenth(digits, monkeypatch):
    """In the same standardised features, of which a constant one has no deviation to divide by."""
    x, y, test_x, _ = digits
    given, fits = [], []
    original = logistic_regression

    def spy(x, y, n_classes, decay):
        given.append((x, y, decay))
        fits.append(original(x, y, n_classes, decay))
        return fits[-1]

    monkeypatch.setattr(probes, "logistic_regression", spy)
    monkeypatch.setattr(probes, "DECAYS", (1e-4, 1e-2, 1.0))
    padded = [torch.cat([part, torch.ones(len(part), 1)], 1) for part in (x, test_x)]
    predicted, decay = linear(padded[0], y, padded[1], 10)
    assert [given_decay for *_, given_decay in given] == [*probes.DECAYS, decay]
    deviation, mean = torch.std_mean(x, dim=0)
    deviation[deviation == 0] = 1.0
    whole, test = (
        torch.cat([(part - mean) / deviation, torch.zeros(len(part), 1)], 1) for part in (x, test_x)
    )
    held_out = torch.arange(600) % 10 == 0
    for (fit_x, fit_y, _), rows in ((given[0], ~held_out), (given[-1], held_out | ~held_out)):
        torch.testing.assert_close(fit_x, whole[rows])
        assert torch.equal(fit_y, y[rows])
    right = [
        int(((whole @ weight.T + bias).argmax(1) == y)[held_out].sum())
        for weight, bias in fits[:-1]
    ]
    assert len({*right}) > 1 and decay == max(zip(right, probes.DECAYS, strict=True))[1]
    weight, bias = fits[-1]
    assert torch.equal(predicted, (test @ weight.T + bias).argmax(1))
    x = x.clone()
    x[3, 5] = torch.nan
    with pytest.raises(UserError, match="not finite, so the training diverged"):
        linear(x, y, test_x, 10)


def test_features_of_every_image_with_its_class_whether_read_or_in_memory(write_idx, tmp_path):
    torch.manual_seed(0)
    model = ViT(ViTConfig(16, 1, 2, image_size=8, patch_size=4, n_classes=0)).eval()
    config = ImageConfig(
        "mine", str(write_idx(tmp_path / "idx")), image_size=8, crop_pct=1.0, crop_scale=None,
        rand_augment=None, color_jitter=0.0, random_erasing=0.0,
    )  # fmt: skip
    held, read = (ImageBatches(config, model.config, 0, 256, 0, "cpu") for _ in range(2))
    assert held.memory
    read.memory = {}
    for split, count in (("train", 12), ("val", 6)):
        x, y = features(model, held, split)
        assert x.shape == (count, 16) and x.dtype == torch.float32 and not x.requires_grad
        plain = held.plain(split, np.arange(count))
        with torch.no_grad():
            expected = model.features(plain["input"])
        order = [int((expected - row).abs().sum(1).argmin()) for row in x]
        assert sorted(order) == list(range(count)) != order
        assert torch.equal(y, plain["target"][order])
        for again, own in zip(features(model, read, split), (x, y), strict=True):
            torch.testing.assert_close(again, own)
