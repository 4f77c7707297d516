"""Losses by hand, and the teacher's isolation."""

import copy
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from methods import ast
from methods.nn import distillation
from methods.nn.distillation import kl, mobilebert, squarehead, tinybert
from models.gpt2 import GPT, GPTConfig
from tests.methods.loop import training_step


def gpt(n_layer=2, n_embd=16, vocab_size=32):
    torch.manual_seed(0)
    shape = {"n_layer": n_layer, "n_embd": n_embd, "vocab_size": vocab_size}
    return GPT(GPTConfig(n_head=2, block_size=8, bias=True, **shape))


def logits(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_divergences_by_hand():
    """softmax(teacher / t) = (3/4, 1/4), softmax(student / t) = (1/2, 1/2)."""
    for t in (1.0, 2.0, 3.0):
        student = torch.zeros(1, 2, requires_grad=True)
        teacher = torch.tensor([[t * math.log(3), 0.0]])
        loss = kl(student, teacher, t, "forward")
        expected = t * t * (0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5))
        assert loss.item() == pytest.approx(expected, abs=1e-6)
        loss.backward()
        torch.testing.assert_close(student.grad, torch.tensor([[-t / 4, t / 4]]), rtol=0, atol=1e-6)
        expected = t * t * (0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
        assert kl(student, teacher, t, "reverse").item() == pytest.approx(expected, abs=1e-6)


def test_layer_losses_by_hand():
    student, teacher = torch.zeros(1, 2), torch.tensor([[1.0, 3.0]])
    assert tinybert(student, teacher).item() == 5.0
    assert squarehead(student, teacher).item() == pytest.approx(5.0 / (5.0 + 2**-7))
    # Normalised, the teacher is (-1, 1) and the student (0, 0); means 2 and 0, variances 1 and 0.
    assert mobilebert(student, teacher).item() == pytest.approx(1.0 + 4.0 + 1.0, rel=1e-4)
    for loss in (tinybert, squarehead, mobilebert):
        assert loss(teacher, teacher).item() == 0.0
        assert loss(student.bfloat16(), teacher.bfloat16()).dtype == torch.float32


def batch(seed=0):
    tokens = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(seed))
    return {"input": tokens[:, :-1], "target": tokens[:, 1:]}


def converted(**options):
    model = gpt()
    dense = copy.deepcopy(model)
    method = ast.Method(ast.Config(total_steps=4, **options))
    method.convert(model)
    return model, method, dense


def test_the_teacher_is_the_dense_model_frozen_and_apart():
    model, method, dense = converted()
    optimizer = method.optimizer(model.param_groups(0.1), lr=1e-2)
    for step in range(3):
        with training_step(method, step, optimizer):
            method.loss(model, batch(step)).backward()
    teacher = method.teacher
    assert not teacher.training
    for parameter, original in zip(teacher.parameters(), dense.parameters(), strict=True):
        assert torch.equal(parameter, original)
        assert parameter.grad is None and not parameter.requires_grad
    assert teacher not in set(model.modules())
    method.finalize(model)
    assert method.teacher is None  # its memory is free


def test_the_loss_is_the_mix_of_both_and_evaluation_runs_no_teacher():
    model, method, dense = converted(task_weight=0.3, kl_weight=0.6, temperature=1.5)
    outputs = []
    method.teacher.register_forward_hook(lambda module, args, output: outputs.append(output))
    found, task = model(**batch())
    expected = 0.3 * task + 0.6 * kl(found, dense(**batch())[0], 1.5, "forward")
    torch.testing.assert_close(method.loss(model, batch()), expected, rtol=1e-6, atol=0)
    assert len(outputs) == 1 and outputs[0][1] is None  # a teacher computes no loss
    model.eval()
    assert torch.equal(method.loss(model, batch()), model(**batch())[1])
    assert len(outputs) == 1


def test_a_given_teacher_is_used_and_not_saved():
    teacher = gpt(n_layer=1, n_embd=8)
    model, method, _ = converted(task_weight=0.0, kl_weight=1.0)
    method.set_teacher(teacher)
    expected = kl(model(**batch())[0], teacher(**batch())[0], 2.0, "forward")
    torch.testing.assert_close(method.loss(model, batch()), expected, rtol=1e-6, atol=0)
    state = method.state_dict()
    assert "teacher" not in state
    other = converted(task_weight=0.0, kl_weight=1.0)[1]
    with pytest.raises(ValueError, match="another kind of teacher"):
        other.load_state_dict(state)
    other.set_teacher(teacher)
    other.load_state_dict(state)


def test_a_teacher_that_cannot_be_compared_is_one_line():
    for options, teacher, told in (
        ({}, {"vocab_size": 40}, r"logits \[4, 8, 40\], the model \[4, 8, 32\]"),
        ({}, {"vocab_size": 4}, "vocabulary lacks tokens"),
        ({"layer_weight": 1.0}, {"n_layer": 1}, r"the teacher has no module transformer\.h\.1"),
        ({"layer_weight": 1.0}, {"n_embd": 8}, r"gives \[4, 8, 16\], the teacher's \[4, 8, 8\]"),
    ):
        model, method, _ = converted(**options)
        method.set_teacher(gpt(**teacher))
        with pytest.raises(ValueError, match=told):
            method.loss(model, batch())
    model, method = gpt(), ast.Method(ast.Config(total_steps=4))
    method.set_teacher(model)  # the model itself, which would be frozen
    with pytest.raises(ValueError, match="a copy"):
        method.convert(model)


def hidden(model, inputs):
    """The outputs of the blocks, computed without hooks."""
    states = [model.transformer.wte(inputs) + model.transformer.wpe(torch.arange(inputs.shape[1]))]
    for block in model.transformer.h:
        states.append(block(states[-1]))
    return states[1:]


def test_layer_losses_compare_the_blocks():
    only = {"task_weight": 0.0, "kl_weight": 0.0}
    for name in ("squarehead", "tinybert", "mobilebert"):
        model, method, dense = converted(layer_weight=0.5, layer_loss=name, **only)
        pairs = zip(hidden(model, batch()["input"]), hidden(dense, batch()["input"]), strict=True)
        expected = 0.5 * sum(distillation.LAYER_LOSSES[name](s, t) for s, t in pairs)
        loss = method.loss(model, batch())
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        loss.backward()
        assert model.transformer.h[0].mlp.c_fc.weight.grad.any()


def recompute(model, reentrant):
    for block in model.transformer.h:
        forward = block.forward
        block.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=reentrant)


def test_recomputed_blocks_keep_their_layer_losses():
    """Reentrant checkpointing runs what is inside without gradients: that is an error, not a
    silently missing term."""
    grads = []
    for inside in (False, True):
        model, method, _ = converted(layer_weight=1.0)
        if inside:
            recompute(model, reentrant=False)
        method.loss(model, batch()).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *grads))
    model, method, _ = converted(layer_weight=1.0, layer_modules=["*.mlp"])
    recompute(model, reentrant=True)
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.mlp has no gradient"):
        method.loss(model, batch())
