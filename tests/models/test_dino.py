"""DINO: loss, centre, schedules, the frozen last layer, the teacher, crops in one pass."""

import dataclasses
import math

import pytest
import torch

import methods
from models.dino import DINO, DinoConfig, Head
from models.vit import ViT, ViTConfig

SHAPE = ViTConfig(
    16, 2, 2, image_size=16, patch_size=4, n_classes=0, drop_path=0.5, dynamic_image_size=True
)
CONFIG = DinoConfig(
    total_steps=100, local_crops=3, local_size=8, prototypes=12, hidden=16, bottleneck=8
)


def dino(seed=0, **settings):
    torch.manual_seed(seed)
    return DINO(ViT(SHAPE), dataclasses.replace(CONFIG, **settings))


def crops(count=4, local=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {
        "global_crops": torch.randn(count, 2, 3, 16, 16, generator=generator),
        "local_crops": torch.randn(count, local, 3, 8, 8, generator=generator),
    }


def perturb(model, seed=2):
    """Weights of the student as if an optimizer had changed them."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.student.parameters():
            parameter.add_(torch.randn_like(parameter))


def test_the_model_s_loss_centres_and_sharpens_the_teacher_alone_in_fp32():
    model, batch = dino(), crops()
    model.centre.copy_(torch.linspace(-1, 1, 12))
    output, loss = model.eval()(**batch)
    with torch.no_grad():
        views = [*batch["global_crops"].unbind(1), *batch["local_crops"].unbind(1)]
        own = [model.student(view[:, None])[:, 0] for view in views]
        told = [model.teacher(view[:, None])[:, 0] for view in views[:2]]
        target = [((output - model.centre) / 0.04).softmax(-1) for output in told]
    # Crops of one size go through the backbone together; each by itself gives the same.
    torch.testing.assert_close(output, torch.stack(own, 1))
    terms = [
        -(target[t] * (own[s] / 0.1).log_softmax(-1)).sum(-1).mean()
        for t in range(2)
        for s in range(5)
        if s != t
    ]
    torch.testing.assert_close(loss, torch.stack(terms).mean())
    with torch.autocast("cpu", torch.bfloat16):
        output, loss = model(**batch)
    assert loss.dtype == output.dtype == torch.float32


def test_the_head_is_that_of_the_paper():
    """Three linears with GELU between them, then cosines with the prototypes (Caron et al., section
    3.1); in the released code weights begin with standard deviation 0.02 and biases with 0."""
    torch.manual_seed(0)
    head = Head(96, dataclasses.replace(CONFIG, hidden=128, bottleneck=64, prototypes=256))
    *weights, prototypes = (p for p in head.parameters() if p.dim() == 2)
    biases = [p for p in head.parameters() if p.dim() == 1]
    assert [tuple(w.shape) for w in weights] == [(128, 96), (128, 128), (64, 128)]
    assert prototypes.shape == (256, 64)
    for weight in (*weights, prototypes):
        # Of 8,192 numbers or more: five standard errors are 4 %.
        assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.04)
    assert not any(bias.any() for bias in biases)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    x = y = torch.randn(5, 3, 96)
    for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if number:
            y = y * (1 + (y / math.sqrt(2)).erf()) / 2
        y = y @ weight.T + bias
    cosines = torch.cosine_similarity(y[:, :, None], prototypes, dim=-1)
    torch.testing.assert_close(head(x), cosines)


def test_the_centre_moves_to_the_mean_of_the_step_s_teacher_outputs_however_they_are_split():
    model, batch = dino(centre_momentum=0.75), crops()
    model.on_step_begin(0)
    with torch.no_grad():
        outputs = model.teacher(batch["global_crops"])  # [4, 2, 12]
    model(**batch)
    assert not model.centre.any()  # not within a step: its micro-batches see the same one
    assert not model.sums.requires_grad  # or they would keep the graphs of all steps
    model.on_step_end(0)
    expected = 0.25 * outputs.flatten(0, 1).mean(0)
    torch.testing.assert_close(model.centre, expected)
    whole, parts = dino(), dino()
    whole.on_step_begin(0)
    parts.on_step_begin(0)
    # Stochastic depth would draw for each micro-batch anew.
    for model in (whole, parts):
        model.student.eval()
    whole(**batch)
    for rows in (slice(0, 1), slice(1, 4)):
        parts(**{name: tensor[rows] for name, tensor in batch.items()})
    for model in (whole, parts):
        model.on_step_end(0)
    torch.testing.assert_close(parts.centre, whole.centre)
    assert parts.metrics() == pytest.approx(whole.metrics(), rel=1e-5)


def test_the_metrics_tell_the_two_collapses_apart():
    model, batch = dino(), crops()
    model.on_step_begin(0)
    _, loss = model(**batch)
    model.on_step_end(0)
    found = model.metrics()
    assert found["teacher_entropy"] + found["teacher_kl"] == pytest.approx(loss.item(), rel=1e-6)
    # All prototypes alike: every output is uniform.
    for network in (model.student, model.teacher):
        torch.nn.init.ones_(network.head.last_layer.weight)
    model.centre.zero_()
    model.on_step_begin(1)
    model(**batch)
    model.on_step_end(1)
    found = model.metrics()
    assert found["teacher_entropy"] == pytest.approx(math.log(12), abs=1e-5)
    assert found["teacher_kl"] == pytest.approx(0, abs=1e-5)


def test_the_ends_of_the_schedules():
    config = dataclasses.replace(CONFIG, momentum=0.9, teacher_warmup=0.3, frozen_fraction=0.05)
    found = [config.momentum_at(step) for step in (0, 50, 100)]
    assert found == pytest.approx([0.9, 0.95, 1.0])  # half way down a cosine
    at = config.teacher_temperature_at
    assert [at(0), at(15), at(30), at(99)] == pytest.approx([0.04, 0.055, 0.07, 0.07])
    assert [config.frozen_at(step) for step in (0, 4, 5)] == [True, True, False]
    model, other = dino(), dino(seed=5)
    model.on_step_begin(15)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.teacher_temperature, torch.tensor(0.055))


def test_frozen_prototypes_get_no_gradient_and_no_decay():
    model = dino(frozen_fraction=0.01)  # the first of 100 steps
    weight = model.student.head.last_layer.weight
    optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=0.1)
    before = weight.detach().clone()
    for step, moved in ((0, False), (1, True)):
        model.on_step_begin(step)
        model(**crops())[1].backward()
        assert weight.grad is not None
        model.on_gradients(step)
        optimizer.step()
        optimizer.zero_grad()
        model.on_step_end(step)
        assert torch.equal(weight, before) is not moved


def test_the_teacher_begins_as_the_student_and_is_its_moving_average():
    model = dino(momentum=0.8).train()
    assert model.student.training and not any(m.training for m in model.teacher.modules())
    perturb(model, seed=3)
    model.on_step_begin(0)
    student, teacher = model.student.state_dict(), model.teacher.state_dict()
    assert all(torch.equal(teacher[name], student[name]) for name in student)
    old = {name: p.clone() for name, p in model.teacher.named_parameters()}
    model(**crops())[1].backward()
    assert all(p.grad is None and not p.requires_grad for p in model.teacher.parameters())
    assert all(p.grad is not None for p in model.student.parameters())
    perturb(model)
    model.on_step_end(50)  # half way from 0.8 to 1
    new = dict(model.student.named_parameters())
    for name, parameter in model.teacher.named_parameters():
        torch.testing.assert_close(parameter, 0.9 * old[name] + 0.1 * new[name].detach())


def test_a_sparse_method_prunes_both():
    """Their layers start alike, static random masks included, and each follows its own weights."""
    for name in ("semi_sparse", "s_ste", "slope"):
        model = dino(momentum=0.5)
        method = methods.build(name, total_steps=100)
        report = method.convert(model)
        pairs = [
            (model.get_submodule(n), model.get_submodule(n.replace("student.", "teacher.")))
            for n in report.names
            if n.startswith("student.")
        ]
        assert 2 * len(pairs) == len(report.names) >= 8  # two blocks, both linears of each
        optimizer = method.optimizer(model.param_groups(0.0), lr=1e-2)
        for step in range(2):
            model.on_step_begin(step)
            method.on_step_begin(step)
            if step == 0:
                assert all(torch.equal(s.sparse_weight, t.sparse_weight) for s, t in pairs)
            method.loss(model, crops()).backward()
            model.on_gradients(step)
            method.on_gradients(step, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            model.on_step_end(step)
            method.on_step_end(step)
        for student, teacher in pairs:
            assert not torch.equal(student.sparse_weight, teacher.sparse_weight)
            # What the teacher computes with is made of its own averaged weights.
            torch.testing.assert_close(teacher.sparse_weight, teacher.effective_weight())
        assert method.metrics()["illegal_groups"] == 0
        method.finalize(model)
        model.backbone().features(crops()["global_crops"][:, 0])
