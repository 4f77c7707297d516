"""Vision transformer: loss, features, parameter groups, and timm's and transformers' weights."""

import math

import pytest
import torch

from models.vit import ViT, ViTConfig, from_hf, to_hf
from tests.models.random_models import randomised


def tiny(**overrides):
    shape = {"width": 16, "depth": 2, "heads": 2, "image_size": 16, "patch_size": 8}
    return ViTConfig(**{**shape, "n_classes": 5, **overrides})


def images(size=16, count=3):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def test_loss_of_classes_and_of_mixtures_of_them():
    model = randomised(ViT(tiny()))
    one, other = torch.tensor([0, 4, 2]), torch.tensor([4, 3, 3])
    logits, loss = model(images(), one)
    by_hand = sum(
        math.log(sum(math.exp(v) for v in row)) - row[label]
        for row, label in zip(logits.tolist(), one.tolist(), strict=True)
    )
    torch.testing.assert_close(loss.item(), by_hand / 3, rtol=1e-5, atol=0)
    mixed = 0.3 * torch.eye(5)[one] + 0.7 * torch.eye(5)[other]
    expected = 0.3 * loss + 0.7 * model(images(), other)[1]
    torch.testing.assert_close(model(images(), mixed)[1], expected)


def test_features_without_classes_and_of_other_sizes_where_asked_for():
    model = randomised(ViT(tiny(n_classes=0)))
    output, _ = model(images())
    assert output.shape == (3, 16)
    assert torch.equal(output, model.features(images()))
    model = randomised(ViT(tiny(dynamic_image_size=True)))
    fixed = ViT(tiny())
    fixed.load_state_dict(model.state_dict())
    assert model.features(images(24)).shape == (3, 16)
    torch.testing.assert_close(fixed.eval().features(images()), model.features(images()))


def test_stochastic_depth_rises_or_is_that_of_every_block():
    for uniform, rates in ((False, [0.0, 0.15, 0.3]), (True, [0.3] * 3)):
        model = ViT(tiny(depth=3, drop_path=0.3, drop_path_uniform=uniform))
        found = [
            [getattr(drop, "drop_prob", 0.0) for drop in (block.drop_path1, block.drop_path2)]
            for block in model.vit.blocks
        ]
        assert found == [pytest.approx([rate, rate]) for rate in rates]


def test_transformers_there_and_back():
    for n_classes in (5, 0):
        ours = randomised(ViT(tiny(n_classes=n_classes, norm_eps=1e-3)))
        theirs = to_hf(ours)
        back = from_hf(theirs)
        with torch.no_grad():
            output = theirs(images())
            theirs_says = output.logits if n_classes else output.last_hidden_state[:, 0]
            expected, _ = ours(images())
            torch.testing.assert_close(theirs_says, expected, rtol=0, atol=1e-5)
            torch.testing.assert_close(back(images())[0], expected, rtol=0, atol=1e-5)
        assert back.config == ours.config
        assert not theirs.training


def test_transformers_with_its_own_settings_and_what_it_lacks():
    from transformers import ViTConfig as HFViTConfig
    from transformers import ViTModel

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    shape |= {"intermediate_size": 24, "image_size": 8, "patch_size": 4}
    theirs = randomised(ViTModel(HFViTConfig(**shape)))  # with a pooler, epsilon 1e-12
    with torch.no_grad():
        expected = theirs(images(8)).last_hidden_state[:, 0]
        ours = from_hf(theirs)
        torch.testing.assert_close(ours.features(images(8)), expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="no layer scale and no average pooling"):
        to_hf(ViT(tiny(pool="avg")))
