"""The scripts of examples/ run as their docstrings say, with fewer steps."""

import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import methods

EXAMPLES = Path(__file__).parents[1] / "examples"
RUN = {
    "train_faster.py": (["--steps", "3"], "s_ste: validation loss"),
    "reproduce_table.py": ([], "Best first:\n  "),
    "compare_method.py": (["--steps", "3", "--seeds", "1"], "| mine "),
    "serve_model.py": (["--steps", "3"], "the same tokens as transformers': True"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all, so that the embedded text is prepared once."""
    return tmp_path_factory.mktemp("examples")


@pytest.mark.parametrize("name", RUN)
def test_an_example_does_what_it_says(name, folder, monkeypatch, capfd):
    options, told = RUN[name]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.setattr(sys, "argv", [name, *options])
    monkeypatch.setattr("methods._registered", {})
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert told in capfd.readouterr().out


def test_the_plugin_for_axolotl_trains_in_a_trainer(tmp_path, monkeypatch):
    """axolotl itself is not installed: its base class does nothing."""
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = object
    monkeypatch.setitem(sys.modules, "axolotl.integrations.base", base)
    recipe = runpy.run_path(str(EXAMPLES / "recipes" / "axolotl_plugin.py"))
    plugin, cfg = recipe["Sparse24"](), SimpleNamespace(sparse24={"method": "ast"})
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 32}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes))
    arguments = TrainingArguments(output_dir=str(tmp_path), max_steps=2, report_to=[], use_cpu=True)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (8, 16))]
    trainer = Trainer(model, arguments, train_dataset=rows)
    for callback in plugin.add_callbacks_post_trainer(cfg, trainer):
        trainer.add_callback(callback)
    trainer.optimizer = plugin.create_optimizer(cfg, trainer)
    trainer.train()
    plugin.post_train(cfg, model)
    assert sum(told is True for told in methods.check(model).values()) == 3


@dataclass
class Spec:
    """The parts of torchtitan's `ModelSpec` that matter."""

    parallelize_fn: object
    post_optimizer_build_fn: object = None


class Linear(torch.nn.Linear):
    """A linear like torchtitan's, a subclass that adds nothing to the product."""


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = Linear(16, 32), Linear(32, 16)

    def init_weights(self, buffer_device):
        for layer in (self.up, self.down):
            layer.reset_parameters()

    def forward(self, x):
        return self.down(self.up(x).relu())


def test_the_recipe_for_torchtitan_converts_before_it_shards_and_calls_the_hooks():
    """By the calls of torchtitan's trainer, in its order, from a model on the meta device."""
    sparse = runpy.run_path(str(EXAMPLES / "recipes" / "torchtitan_spec.py"))["sparse"]
    method = methods.build("sr_ste", include=["up", "down"], total_steps=3)
    spec = sparse(Spec(lambda model: model), method, "cpu")
    with torch.device("meta"):
        model = Model()
    model = spec.parallelize_fn(model)
    model.to_empty(device="cpu")
    model.init_weights(buffer_device=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.optimizers = [optimizer]  # torchtitan's container is an Optimizer that has several
    spec.post_optimizer_build_fn(optimizer, [model], None)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
    method.finalize(model)
    assert methods.check(model) == {"up": True, "down": True}
