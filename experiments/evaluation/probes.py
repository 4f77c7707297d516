"""Probes frozen image features by k nearest neighbours and logistic regression.

Both are fitted on the features of the training images (with the validation transform) and tested on
those of the validation images. For the regression, features are standardised to mean 0 and standard
deviation 1 over the training images; for the neighbours they are used as they are. Shapes: N
training and M test images, C features, K classes.
"""

import math
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.images.dataset import ImageConfig
from experiments.images.source import ImageBatches, epoch_order, read_ahead
from experiments.support.errors import UserError
from models.vit import ViT

# Weight decays of the logistic regression, chosen on a held-out tenth of the training images.
DECAYS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
NEIGHBOURS, TEMPERATURE = 20, 0.07  # as in DINO
_BATCH = 256  # images per forward pass
_ROWS = 2**16  # images per product with all classes
_COSINES = 2**26  # similarities of test and training images that are computed at a time
_ITERATIONS = 500


def probe(
    model: ViT, config: ImageConfig, device: torch.device | str = "cpu", workers: int = 0
) -> dict[str, float]:
    """Percent of the validation images that are classified correctly, `knn_top1` and `linear_top1`,
    and the chosen weight decay, `linear_decay`. Moves the model to `device`."""
    images = ImageBatches(config, model.config, 0, _BATCH, workers, device)
    model = model.to(device).eval()
    x, y = features(model, images, "train")
    test_x, test_y = features(model, images, "val")
    classes = len(images.images.classes)
    predicted, decay = linear(x, y, test_x, classes)
    return {
        "knn_top1": top1(knn(x, y, test_x, classes), test_y),
        "linear_top1": top1(predicted, test_y),
        "linear_decay": decay,
    }


@torch.no_grad()
def features(model: ViT, images: ImageBatches, split: str) -> tuple[Tensor, Tensor]:
    """(features [N, C] fp32, classes int64 [N]) of a whole split, in a fixed random order."""
    count, device = len(images.images.splits[split].labels), next(model.parameters()).device
    order = epoch_order(count, 0, 0)
    parts = [order[first : first + _BATCH] for first in range(0, count, _BATCH)]
    found = [
        (model.features(batch["input"].to(device)).float(), batch["target"].to(device))
        for batch in read_ahead(partial(images.plain, split), parts, images.workers)
    ]
    return torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])


def knn(x: Tensor, y: Tensor, test_x: Tensor, n_classes: int) -> Tensor:
    """Class of each test image, int64 [M], by a vote of its 20 nearest training images, where one
    with the cosine c has exp(c / 0.07) votes, as in DINO; a tie goes to the lower class. x, y:
    features [N, C] and classes [N] of the training images. test_x: features [M, C]."""
    train = F.normalize(x, dim=1)
    found = []
    for rows in test_x.split(max(1, _COSINES // len(train))):
        cosines, nearest = (F.normalize(rows, dim=1) @ train.T).topk(min(NEIGHBOURS, len(train)))
        weights = (cosines / TEMPERATURE).exp()
        votes = weights.new_zeros(len(rows), n_classes).scatter_add_(1, y[nearest], weights)
        found.append(votes.argmax(1))
    return torch.cat(found)


def linear(x: Tensor, y: Tensor, test_x: Tensor, n_classes: int) -> tuple[Tensor, float]:
    """(predicted classes int64 [M] of the test images by logistic regression on standardised
    features, its weight decay): the one of `DECAYS` with the highest accuracy on every tenth
    training image after a fit on the others (the largest in a tie); the final fit uses all."""
    deviation, mean = torch.std_mean(x, dim=0)
    deviation = deviation.clamp_min(1e-6 * float(deviation.max()))  # for constant features
    x, test_x = (x - mean) / deviation, (test_x - mean) / deviation
    held_out = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    held_out[::10] = True
    fit_x, fit_y = x[~held_out], y[~held_out]  # one copy, for all decays

    def score(decay: float) -> float:
        weight, bias = logistic_regression(fit_x, fit_y, n_classes, decay)
        return top1((x[held_out] @ weight.T + bias).argmax(1), y[held_out])

    best = max(DECAYS, key=lambda decay: (score(decay), decay))
    weight, bias = logistic_regression(x, y, n_classes, best)
    return (test_x @ weight.T + bias).argmax(1), best


def logistic_regression(
    x: Tensor, y: Tensor, n_classes: int, decay: float
) -> tuple[Tensor, Tensor]:
    """(weight [K, C], bias [K]) that minimise mean cross entropy + decay / 2 * |weight|^2, by
    L-BFGS: the problem of scikit-learn's `LogisticRegression(C=1 / (decay * N))`, decay > 0."""
    # scipy is imported here because it is slow to import, and only this function needs it.
    from scipy.optimize import minimize

    if not x.isfinite().all():
        raise UserError("some features are not finite, so the training diverged: nothing to fit")
    shape = n_classes, x.shape[1] + 1  # the last column is the bias
    # Steps and gradients to remember. 50 pairs take half the iterations of 10, but they are held
    # and multiplied on the CPU, which takes a third of a second an iteration for a million weights.
    pairs = 50 if math.prod(shape) < 100_000 else 10
    basis = _basis(x, n_classes, decay)

    # scipy chooses the steps on the CPU, so that the GPU, which computes loss and gradient, is
    # waited for once per iteration; torch's L-BFGS waits for it hundreds of times.
    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        at = torch.from_numpy(flat).to(x).view(shape)
        weight, bias = (at[:, :-1] @ basis.T).requires_grad_(), at[:, -1].clone().requires_grad_()
        loss = decay / 2 * weight.square().sum()
        loss.backward()
        total = loss.detach().double()
        for rows, classes in zip(x.split(_ROWS), y.split(_ROWS), strict=True):
            loss = F.cross_entropy(F.linear(rows, weight, bias), classes, reduction="sum") / len(x)
            loss.backward()
            total += loss.detach()
        assert weight.grad is not None and bias.grad is not None
        grad = torch.cat([weight.grad @ basis, bias.grad[:, None]], 1)
        found = torch.cat([total[None], grad.flatten().double()]).cpu().numpy()
        return float(found[0]), found[1:]

    with torch.enable_grad():
        found = minimize(
            objective,
            np.zeros(math.prod(shape)),
            jac=True,
            method="L-BFGS-B",
            options={
                "maxiter": _ITERATIONS,
                "maxfun": 2 * _ITERATIONS,
                "maxcor": pairs,
                "gtol": 1e-6,
                "ftol": 0,
            },
        )
    fitted = torch.from_numpy(found.x).to(x).view(shape)
    return fitted[:, :-1] @ basis.T, fitted[:, -1]


def _basis(x: Tensor, n_classes: int, decay: float) -> Tensor:
    """Directions in the space of features, the columns of [C, C], in which the loss is about
    equally curved: features are correlated, and in their own coordinates 500 steps are too few."""
    products = (rows.T @ rows for rows in x.split(_ROWS))
    moments = sum(products, x.new_zeros(())) / len(x)
    values, vectors = torch.linalg.eigh(moments.double())
    curvature = values.clamp_min(0) / n_classes + decay  # p (1 - p) is about 1 / K at first
    return (vectors / curvature.sqrt()).to(x)


def top1(predicted: Tensor, y: Tensor) -> float:
    """Percent of the predictions [M] that are right."""
    return 100.0 * (predicted == y).float().mean().item()
