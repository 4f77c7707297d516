"""Random weights and tokens for models."""

import torch


def randomised(model, std=0.3):
    """Every tensor random and large, so that no bias, gain or activation can be lost unseen."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = "norm" in name.lower() and name.endswith("weight")
            parameter.copy_(gain + std * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def tokens(shape=(3, 12), vocab_size=40, seed=1):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def sinusoids(count, width):
    """The table of positions of Vaswani et al., sines and cosines in turns."""
    positions, pairs = torch.arange(count)[:, None], torch.arange(0, width, 2)
    angles = positions / 10000 ** (pairs.double() / width)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
