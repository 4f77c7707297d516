"""DINO: self-distillation without labels (Caron et al., ICCV 2021, arXiv 2104.14294).

A student network gets all crops of an image, a teacher only the large ones ("global"). For each
crop, the student predicts the teacher's output for the other global crops. The weights of the
teacher are a moving average of the student's. Its output is centred and sharpened, so that the
outputs do not collapse to a constant.

Shapes: B images, G = 2 global crops, n local crops, V = G + n views, C features, K prototypes.
"""

from __future__ import annotations

import copy
import math
import re
from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from models.base import Model, param_groups
from models.vit import ViT, ViTConfig


@dataclass(frozen=True, kw_only=True)
class DinoConfig:
    """Crops, head, loss and schedules of a self-distillation. The defaults are those of the
    authors' code for ImageNet, except the teacher's temperature: their code leaves it at 0.04, but
    they document that a rise to 0.07 over the first 30 epochs is better.

    total_steps: optimizer steps of the whole training, of which other fields are fractions.
    local_crops: number of local crops. There are two global ones, with the model's image size.
    local_size: side of local crops in pixels.
    global_scale, local_scale: least and greatest share of the image's area in a crop.
    jitter: strength of random brightness and contrast, in four of five crops.
    color: True for random saturation (half of the strength) and hue (a quarter of it) as well, and
        for one grey crop of five.
    blur: True for Gaussian blur of every first global crop, a tenth of the second ones and half of
        the local ones.
    solarize: share of the second global crops that are solarized.
    prototypes, hidden, bottleneck: widths of the head.
    student_temperature: of the student's softmax.
    teacher_temperature: of the teacher's softmax, after a linear rise from
        `first_teacher_temperature` over the first `teacher_warmup` of the steps.
    momentum: of the teacher's weights at the first step; it rises to 1 at the last along a cosine.
    centre_momentum: of the centre.
    frozen_fraction: share of the steps, at the start, in which the prototypes are not trained.
    layer_decay: factor on the learning rate from a block to the previous one. Patch projection,
        class token and position embeddings count as the block before the first.
    patch_rate: a further factor for the patch projection.
    """

    total_steps: int
    local_crops: int = 8
    local_size: int = 96
    global_scale: tuple[float, float] = (0.4, 1.0)
    local_scale: tuple[float, float] = (0.05, 0.4)
    jitter: float = 0.4
    color: bool = True
    blur: bool = True
    solarize: float = 0.2
    prototypes: int = 65536
    hidden: int = 2048
    bottleneck: int = 256
    student_temperature: float = 0.1
    teacher_temperature: float = 0.07
    first_teacher_temperature: float = 0.04
    teacher_warmup: float = 0.3
    momentum: float = 0.996
    centre_momentum: float = 0.9
    frozen_fraction: float = 0.01
    layer_decay: float = 1.0
    patch_rate: float = 1.0

    def __post_init__(self) -> None:
        temperatures = "student_temperature", "teacher_temperature", "first_teacher_temperature"
        for name in ("total_steps", "prototypes", *temperatures):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)}; it must be positive")
        shares = ("teacher_warmup", "momentum", "centre_momentum", "frozen_fraction")
        for name in (*shares, "layer_decay", "patch_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}; it must lie in [0, 1]")

    def teacher_temperature_at(self, step: int) -> float:
        """Temperature of the teacher's softmax in optimizer step `step`."""
        steps = round(self.teacher_warmup * self.total_steps)
        share = min(1.0, step / steps) if steps else 1.0
        first = self.first_teacher_temperature
        return first + share * (self.teacher_temperature - first)

    def momentum_at(self, step: int) -> float:
        """Momentum of the teacher's weights after optimizer step `step`."""
        remaining = 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / self.total_steps)))
        return 1.0 - remaining * (1.0 - self.momentum)

    def frozen_at(self, step: int) -> bool:
        """True if the prototypes are not trained in optimizer step `step`."""
        return step < round(self.frozen_fraction * self.total_steps)


def _check_fits(shape: ViTConfig, config: DinoConfig) -> None:
    if not config.local_crops or config.local_size == shape.image_size:
        return
    if config.local_size % shape.patch_size:
        raise ValueError(
            f"dino.local_size={config.local_size} is no multiple of the model's "
            f"patch_size={shape.patch_size}"
        )
    if not shape.dynamic_image_size:
        raise ValueError(
            f"dino.local_size={config.local_size}, but the model takes {shape.image_size} pixels a "
            "side only: set model.dynamic_image_size=true"
        )


class Prototypes(nn.Module):
    """Cosine similarities with K learned directions, [..., bottleneck] -> [..., K].

    It is a linear without bias whose input and rows are normalised: weight normalisation with all
    lengths fixed at 1. The rows before normalisation begin with standard deviation 0.02, like the
    other layers of the head; in the authors' code they begin larger, with torch's default for
    linears, so that the first steps turn them less.
    """

    def __init__(self, features: int, prototypes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(prototypes, features))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1))


class Head(nn.Sequential):
    """Three linear layers and the prototypes, [..., C] -> [..., K]."""

    last_layer: Prototypes

    def __init__(self, features: int, config: DinoConfig) -> None:
        widths = features, config.hidden, config.hidden, config.bottleneck
        one, two, three = (nn.Linear(*sizes) for sizes in pairwise(widths))
        for layer in (one, two, three):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        layers = nn.Sequential(one, nn.GELU(), two, nn.GELU(), three)
        last_layer = Prototypes(config.bottleneck, config.prototypes)
        super().__init__(OrderedDict(layers=layers, last_layer=last_layer))


class Network(nn.Module):
    """The backbone and the head of a student or a teacher."""

    def __init__(self, backbone: ViT, head: Head) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, *crops: Tensor) -> Tensor:
        """Groups of crops [B, n_i, 3, H_i, W_i], each of one size -> [B, sum of n_i, K].

        The backbone runs once for each size, the head once for all crops.
        """
        features = [
            self.backbone.features(group.flatten(0, 1)).unflatten(0, group.shape[:2])
            for group in crops
            if group.shape[1]
        ]
        return self.head(torch.cat(features, dim=1))


def dino_loss(student: Tensor, teacher: Tensor, temperature: Tensor | float) -> Tensor:
    """Mean cross entropy, in nats, of the student against the teacher over pairs of two views.

    Args:
        student: outputs [B, V, K]. The first G views are those of the teacher; no view is compared
            with itself.
        teacher: probabilities [B, G, K].
        temperature: of the student's softmax.
    """
    batch, views, _ = student.shape
    log_p = F.log_softmax(student / temperature, dim=-1)
    entropies = -torch.einsum("bgk,bvk->gv", teacher, log_p) / batch
    pairs = teacher.shape[1] * (views - 1)
    return (entropies.sum() - entropies.diagonal().sum()) / pairs


class DINO(Model):
    """The student and the teacher of a ViT; the loss is `dino_loss` between them.

    Everything that depends on the step is set by hooks, which a trainer calls in this order:

        model.on_step_begin(step)
        ... forward and backward of every micro-batch ...
        model.on_gradients(step)        # before the optimizer
        optimizer.step()
        model.on_step_end(step)         # before that of a sparse method, which then derives the
                                        # teacher's masks from its new weights

    Centre and metrics are computed over all micro-batches and ranks of a step, so that their number
    does not change the result. The teacher is always in evaluation mode, without stochastic depth.
    """

    centre: Tensor
    teacher_temperature: Tensor
    sums: Tensor
    figures: Tensor

    def __init__(self, vit: ViT, config: DinoConfig) -> None:
        super().__init__()
        _check_fits(vit.config, config)
        self.config = config
        self.student = Network(vit, Head(vit.config.width, config))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False).eval()
        self.register_buffer("centre", torch.zeros(config.prototypes))
        self.register_buffer("teacher_temperature", torch.tensor(config.teacher_temperature_at(0)))
        # Sums over the current step: the teacher's outputs [K], its entropy, the loss, and the
        # number of images.
        sums = torch.zeros(config.prototypes + 3)
        self.register_buffer("sums", sums, persistent=False)
        # Means over the last step: the entropy of the teacher and the loss.
        self.register_buffer("figures", torch.zeros(2), persistent=False)

    def train(self, mode: bool = True) -> DINO:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, global_crops: Tensor, local_crops: Tensor) -> tuple[Tensor, Tensor]:
        """Crops [B, 2, 3, H, W] and [B, n, 3, h, w] -> (student's output [B, V, K], loss)."""
        student = self.student(global_crops, local_crops)
        with torch.no_grad():
            teacher = self.teacher(global_crops)
        with torch.autocast(student.device.type, enabled=False):
            student, teacher = student.float(), teacher.float()
            log_p = F.log_softmax((teacher - self.centre) / self.teacher_temperature, dim=-1)
            p = log_p.exp()
            loss = dino_loss(student, p, self.config.student_temperature)
        if self.training:
            batch = teacher.shape[0]
            entropy = -(p * log_p).sum(-1).mean()
            means = torch.stack([entropy, loss.detach(), torch.ones_like(entropy)])
            self.sums += torch.cat([teacher.mean(1).sum(0), means * batch])
        return student, loss

    def backbone(self) -> ViT:
        """The teacher's ViT, which is the result of the training."""
        return self.teacher.backbone

    def param_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Optimizer groups of the student as in DINO's released code: biases and norms without
        weight decay; everything else with it, class token and position embeddings included.
        `lr_scale` is the factor on the learning rate of a group."""
        named: dict[float, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in self.student.named_parameters():
            named.setdefault(self._rate(name), []).append((name, parameter))
        return [
            {**group, "lr_scale": rate}
            for rate, some in named.items()
            for group in param_groups(some, weight_decay)
        ]

    def _rate(self, name: str) -> float:
        """The factor on the learning rate of a student's parameter, as in DINOv2."""
        trunk = re.match(r"backbone\.vit\.(blocks\.(\d+)|cls_token|pos_embed|patch_embed)", name)
        if not trunk:  # the last layer norm and the head
            return 1.0
        layer = int(trunk[2]) + 1 if trunk[2] else 0
        depth = self.student.backbone.config.depth
        patch = self.config.patch_rate if trunk[1] == "patch_embed" else 1.0
        return float(patch * self.config.layer_decay ** (depth + 1 - layer))

    @torch.no_grad()
    def on_step_begin(self, step: int) -> None:
        """Set the teacher's temperature for the step. At step 0 the teacher becomes a copy of the
        student, because a sparse method may have given its layers a different state, for example
        other random masks."""
        if step == 0:
            self.teacher.load_state_dict(self.student.state_dict())
        self.teacher_temperature.fill_(self.config.teacher_temperature_at(step))

    def on_gradients(self, step: int) -> None:
        """Drop the gradients of the prototypes while they are frozen."""
        if self.config.frozen_at(step):
            self.student.head.last_layer.weight.grad = None

    @torch.no_grad()
    def on_step_end(self, step: int) -> None:
        """Update the teacher's weights and the centre."""
        if dist.is_initialized():
            dist.all_reduce(self.sums)
        means = self.sums[:-1] / self.sums[-1]
        self.sums.zero_()
        # A step that the loss scaler skips may have infinite outputs; the centre would keep them.
        weight = torch.where(means.isfinite().all(), 1.0 - self.config.centre_momentum, 0.0)
        self.centre.lerp_(means[:-2].nan_to_num(0.0, 0.0, 0.0), weight)
        self.figures.copy_(means[-2:])
        torch._foreach_lerp_(
            list(self.teacher.parameters()),
            [p.detach() for p in self.student.parameters()],
            1.0 - self.config.momentum_at(step),
        )

    def metrics(self) -> dict[str, float]:
        """Signs of a collapse, as means over the batch of the last step, in nats.

        teacher_entropy: entropy of the teacher's output; log K if it is uniform, 0 if one prototype
            has all of it. teacher_kl: Kullback-Leibler divergence of the student from the teacher;
            0 if both are constant.
        """
        entropy, loss = self.figures.tolist()
        return {"teacher_entropy": entropy, "teacher_kl": loss - entropy}
