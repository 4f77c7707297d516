"""Tests of which layers `convert` takes, what it says of the others, and transformers' Conv1D."""

import copy
import dataclasses
import importlib

import pytest
import torch
from torch import nn

import methods
from common_kernels import check24
from experiments.config.run import load
from methods import ast, bi_mask, dense, s_ste, slope, ste
from methods.nn import ranks
from models.bert import BertConfig, BertLM
from models.gpt2 import GPT, GPTConfig
from models.hf import CausalLM
from models.vit import ViT, ViTConfig

TINY = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 32,
}


def convert(model, include, exclude=(), method=ste, **options):
    return method.Method(method.Config(include=include, exclude=exclude, **options)).convert(model)


# ---------------------------------------------------------------- what cannot be converted


def bert_of_two_classes():
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(num_labels=2, **TINY))


def test_a_head_of_two_classes_is_left_dense():
    model = bert_of_two_classes()
    report = convert(model, ["*"])
    assert len(report.names) == 2 * 6 + 1  # the pooler, too
    reason = "weight [2, 16]; 2:4 needs both dims to be multiples of 4"
    embeddings = "position_embeddings", "token_type_embeddings", "word_embeddings"
    no_linear = {f"bert.embeddings.{name}": "Embedding, no linear" for name in embeddings}
    assert report.dense == no_linear | {"classifier": reason}
    assert report.sizes["bert.embeddings.word_embeddings"] == 32 * 16
    converted = sum(model.get_submodule(name).weight.numel() for name in report.names)
    total = sum(p.numel() for p in model.parameters())
    lines = str(report).splitlines()
    assert lines[:3] == [
        f"13 linears converted, {converted:,} of {total:,} parameters ({converted / total:.0%})",
        "  warning: less than a third of the parameters is converted",
        f"  sparse {1024 / total:6.1%}  bert.encoder.layer.*.intermediate.dense (2)",
    ]
    embedding = "bert.embeddings.position_embeddings: Embedding, no linear"
    assert lines[9] == f"  dense  {512 * 16 / total:6.1%}  {embedding}"
    assert lines[-1] == f"  dense  {32 / total:6.1%}  classifier: {reason}"
    assert type(model.classifier) is nn.Linear


def test_the_report_says_what_is_converted_and_that_dense_converts_nothing():
    sides = {"up": (8, 16), "down": (16, 8), "head": (8, 8)}
    model = nn.ModuleDict({name: nn.Linear(*shape) for name, shape in sides.items()})
    of, left = "256 of 352 parameters (73%)", "  18.2%  head: not in include"
    report = convert(model, ["up", "down"], method=dense)
    both = "\n  measured  36.4%  up\n  measured  36.4%  down\n  dense   "
    assert str(report) == f"no linear converted; 2 linears measured, {of}{both}{left}"
    report = convert(model, ["up", "down"])
    both = "\n  sparse  36.4%  up\n  sparse  36.4%  down\n  dense "
    assert str(report) == f"2 linears converted, {of}{both}{left}"
    assert convert(linears(a=(8, 8), b=(8, 8)), ["*"], ["b"]).dense == {"b": "in exclude"}


def test_a_method_that_needs_its_own_products_leaves_attention_of_torch_and_says_so():
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2), "fc": nn.Linear(8, 8)})
    for method, options, why in (
        (slope, {}, "which this method cannot convert"),
        (bi_mask, {}, "which this method cannot convert"),
        (s_ste, {}, "where mvue=exact cannot act; convert it with mvue=off"),
        (ste, {"fp8": "paper"}, "where fp8=paper cannot act; convert it with fp8=off"),
    ):
        report = convert(copy.deepcopy(model), ["*"], method=method, **options)
        assert report.names == ("fc",)
        kinds = {"in_proj_weight": "MultiheadAttention",
                 "out_proj": "NonDynamicallyQuantizableLinear"}  # fmt: skip
        assert report.dense == {
            f"attn.{name}": f"multiplied by {kind} itself, {why}" for name, kind in kinds.items()
        }
        with pytest.raises(ValueError, match=r"no linear that matches .* attn\.out_proj"):
            convert(nn.ModuleDict({"attn": model["attn"]}), ["*"], method=method, **options)


def test_tied_weights_are_left_alone():
    """Pruning GPT-2's head would prune its embedding."""
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=32, block_size=8))
    report = convert(model, ["*"])
    assert len(report.names) == 4
    assert report.dense["lm_head"] == "shares its weight with transformer.wte"
    assert report.sizes["lm_head"] == 0 and report.sizes["transformer.wte"] == 32 * 16
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_layer_named_in_full_must_fit():
    for shape in ((6, 8), (8, 6)):
        model = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(8, 8), nn.Linear(*shape))})
        message = r"mlp\.1 cannot be converted \(weight \[\d, \d\]; .*multiples of 4\); exclude it"
        with pytest.raises(ValueError, match=message):
            convert(model, ["mlp.0", "mlp.1"])
        assert all(type(m) is nn.Linear for m in model["mlp"])
        assert convert(model, ["mlp.?"]).dense.keys() == {"mlp.1"}


def linears(**shapes):
    return nn.ModuleDict({name: nn.Linear(*shape) for name, shape in shapes.items()})


def test_what_is_said_if_nothing_can_be_converted():
    for model, include, exclude, message in (
        (
            nn.Linear(6, 8),
            ["*"],
            [],
            r"can be converted: the model itself \(weight \[8, 6\]; [^;]*$",
        ),
        (nn.LayerNorm(8), ["*"], [], r"include=\['\*'\] exclude=\[\]; .* linears are: none$"),
        (linears(a=(6, 8)), "ffn", [], r"include=ffn exclude=\[\]; the model's linears are: a$"),
        (
            linears(**dict.fromkeys("abcdefg", (8, 8))),
            ["a"],
            ["a"],
            r"exclude=\['a'\]; .* linears are: a, b, c, d, e, f, \.\.\.; choose from",
        ),
        (
            nn.ModuleDict({"x": nn.ModuleList([linears(up=(8, 8)), linears(up=(8, 8))])}),
            ["y"],
            [],
            r"linears are: x\.\*\.up; choose from include=\['x\.\*\.up'\]$",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            convert(model, include, exclude)


def test_a_glob_that_matches_nothing_beside_others_that_match_is_an_error():
    model = nn.ModuleDict({"fc1": nn.Linear(8, 8), "layers": nn.ModuleList([linears(up=(8, 8))])})
    for include, meant in (
        (
            ["fc*", "layrs.*"],
            r"layrs\.\* matches no matrix of the model; did you mean layers\.\*\.up",
        ),
        (["fc1", "fc2"], "fc2 matches no matrix of the model; did you mean fc1"),
        (["*", "qqq"], "qqq matches no matrix of the model$"),
    ):
        with pytest.raises(ValueError, match=f"include: {meant}"):
            convert(model, include)
    with pytest.raises(ValueError, match=r"^exclude: fc2 matches no .* did you mean fc1\?$"):
        convert(model, ["*"], ["fc2"])
    report = convert(model, ["*"], ["fc1", "*head"], method=slope)  # its default
    assert report.names == ("layers.0.up",)


def test_adapters_are_converted_only_if_named_and_routers_never():
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    def adapted():
        wrapped = ["up_proj", "down_proj"]
        lora = peft.LoraConfig(r=4, target_modules=wrapped)
        return peft.get_peft_model(LlamaForCausalLM(LlamaConfig(**TINY)), lora)

    for include in ("ffn", ["*"]):
        report = convert(adapted(), include)
        left = {n: why for n, why in report.dense.items() if "lora" in n}
        assert len(left) == 8 and not any("lora" in name for name in report.names)
        assert {why[:10] for why in left.values()} == {"an adapter"}
    assert len(convert(adapted(), ["*.lora_A.*"]).names) == 4
    one = "base_model.model.model.layers.0.mlp.up_proj.lora_B.default"
    assert convert(adapted(), [one]).names == (one,)

    for include in (["*"], ["*mlp*"], ["*q_proj", "*gate"]):
        model = MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=4))
        report = convert(model, include)
        routers = [f"model.layers.{i}.mlp.gate" for i in range(2)]
        assert [report.dense[n] for n in routers] == ["the router of a mixture of experts"] * 2
    with pytest.raises(ValueError, match=r"mlp\.gate cannot be converted \(the router of a mix"):
        convert(MixtralForCausalLM(MixtralConfig(**TINY)), [routers[0]])


def test_every_method_refuses_weights_without_numbers():
    """What it would measure on them is noise: S-STE's scale was 8.7e13 after `to_empty`."""
    for name in methods.available():
        with torch.device("meta"):
            model = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))})
        with pytest.raises(ValueError, match=r"^mlp\.0\.weight is on the meta device, .* to_empty"):
            methods.build(name, total_steps=6).convert(model)
        assert {type(m) for m in model["mlp"]} == {nn.Linear}


@pytest.mark.filterwarnings("ignore")
def test_quantisation_aware_training_comes_after_finalize():
    from torch.ao import quantization

    def prepared(model):
        model.qconfig = quantization.get_default_qat_qconfig("x86")
        return quantization.prepare_qat(model.train())

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"a torch\.ao\.\S+\.Linear, no plain nn\.Linear"):
        convert(prepared(copy.deepcopy(model)), ["*"])
    method = ste.Method(ste.Config(include=["0"]))
    method.convert(model)
    trained = prepared(method.finalize(model))
    assert type(trained[0]) is type(trained[1]) is not nn.Linear
    trained(torch.randn(4, 8))
    assert int(check24(trained[0].weight_fake_quant(trained[0].weight))) == 0
    replaced = nn.Sequential(nn.Linear(8, 8))
    method = ste.Method(ste.Config(include=["0"]))
    method.convert(replaced)
    replaced[0] = nn.Linear(8, 8)  # as torchao does
    with pytest.raises(ValueError, match="linears were replaced"):
        method.finalize(replaced)


def test_modules_without_a_matrix_are_not_reported():
    class Conv1D(nn.Module):
        """Has the name of transformers' layer, but holds other weights, or none."""

        def __init__(self, *shapes):
            super().__init__()
            for name, shape in zip(("weight", "bias"), shapes, strict=False):
                self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    scale = nn.Identity()
    scale.weight = 0.5  # not even a tensor
    own = {"a": Conv1D(), "b": Conv1D((8, 8, 3)), "c": Conv1D((8, 8), (4,))}
    model = nn.ModuleDict({"fc": nn.Linear(8, 8), "norm": nn.LayerNorm(8), "scale": scale, **own})
    report = convert(model, ["*"])
    assert report.names == ("fc",)
    assert report.dense == {"b": "Conv1D, no linear", "c": "Conv1D, no linear"}


# ---------------------------------------------------------------- presets


def transformers_models():
    import transformers as hf

    plain = {k: v for k, v in TINY.items() if k != "intermediate_size"}
    tokens = {"vocab_size": 32, "bos_token_id": None, "eos_token_id": None}
    return {
        "gpt2": (hf.GPT2Model(hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, **tokens)), 2, 4),
        "bert": (bert_of_two_classes(), 2, 6),
        "llama": (hf.LlamaForCausalLM(hf.LlamaConfig(**TINY)), 3, 7),
        "t5": (
            hf.T5ForConditionalGeneration(
                hf.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=32,
                            feed_forward_proj="gated-gelu")
            ),
            3,
            9,
        ),
        "opt": (hf.OPTForCausalLM(hf.OPTConfig(ffn_dim=32, word_embed_proj_dim=8, **plain)), 2, 6),
        "vit": (
            hf.ViTForImageClassification(hf.ViTConfig(image_size=8, patch_size=4, **TINY)), 2, 6
        ),
    }  # fmt: skip


def other_models():
    import timm

    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16}
    text = {"vocab_size": 32, "block_size": 8}
    vit = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return {
        "timm": (timm.models.VisionTransformer(**vit), 2, 4),
        "our gpt2": (GPT(GPTConfig(**shape, **text)), 2, 4),
        "our bert": (BertLM(BertConfig(**shape, **text)), 2, 4),
        "our vit": (
            ViT(ViTConfig(depth=2, heads=2, width=16, image_size=8, patch_size=4, n_classes=4)),
            2,
            4,
        ),
    }


def test_presets_take_the_linears_of_the_blocks_and_no_others():
    for models in (transformers_models, other_models):
        for name, (model, ffn, everything) in models().items():
            for preset, count in (("ffn", ffn), ("all", everything)):
                method = ste.Method(ste.Config(include=preset))
                chosen = method.matching_linears(model)
                assert len(chosen) == 2 * count, (name, preset, list(chosen))
                if name == "t5":  # one block of each stack
                    continue
                assert all(".0." in n or ".1." in n for n in chosen), name  # of a block
                assert any("attention" in n or "attn" in n for n in chosen) == (preset == "all"), (
                    name
                )


def test_layers_of_bert_with_two_digits_are_in_the_preset():
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(**{**TINY, "num_hidden_layers": 11}))
    chosen = ste.Method(ste.Config()).matching_linears(model)
    assert len(chosen) == 2 * 11 and "encoder.layer.10.output.dense" in chosen


def test_python_and_yaml_mean_the_same():
    """Options have one default, in Python and yaml; only the length of a run has none in Python."""
    for name in methods.available():
        composed = load([f"method={name}"]).method_options
        default = importlib.import_module(f"methods.{name}").Config()
        for field in dataclasses.fields(default):
            if field.name != "total_steps":
                assert getattr(composed, field.name) == getattr(default, field.name), name


# ---------------------------------------------------------------- Conv1D of transformers


def tokens():
    return torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(3))


def step(model, method, loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    method.on_step_begin(0)
    method.open_micro_batch()
    value = loss()
    value.backward()
    method.on_gradients(0, optimizer)
    optimizer.step()
    method.on_step_end(0)
    return value.detach()


def test_check_says_which_matrices_are_sparse(hf_model):
    """Conv1D has its inputs along the rows; a merged adapter makes a weight dense."""
    model = hf_model("gpt2")
    method = methods.build("ste", include=["*c_fc"])
    method.convert(model)
    method.finalize(model)
    checked = methods.check(model)
    fc = [f"transformer.h.{i}.mlp.c_fc" for i in (0, 1)]
    assert [name for name, holds in checked.items() if holds] == fc
    assert "transformer.wte" not in checked and "lm_head" in checked
    assert str(checked).startswith(
        "2 2:4: transformer.h.*.mlp.c_fc\n7 not 2:4: transformer.h.*.attn"
    )
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight.add_(1e-3)
    assert not methods.check(model)[fc[1]]
    assert methods.check(model, 4, 4)[fc[1]]
    odd, empty = nn.Linear(6, 4), nn.Linear(8, 4)
    assert methods.check(odd, 1, 4) == {"": False}
    empty.weight.data.zero_()
    checked = methods.check(nn.ModuleDict({"a": empty, "b": odd}))
    assert str(checked) == "1 2:4: a\n1 not 2:4: b\n1 of the 2:4 all zero: a"


@pytest.mark.parametrize("name", ["s_ste", "slope", "fst"])
def test_a_conv1d_trains_as_the_linear_of_the_same_weight(hf_model, name, tmp_path):
    """A converted Conv1D trains as the linear of its weight, and leaves a checkpoint that plain
    transformers loads, bit for bit."""
    from transformers import GPT2LMHeadModel

    plain, twin = hf_model("gpt2"), CausalLM(hf_model("gpt2"))
    attributes = vars(plain.transformer.h[0].mlp.c_fc).keys() | set()
    built = [methods.build(name, include="all", total_steps=6, exclude=[]) for _ in range(2)]
    report = built[0].convert(plain)
    assert len(report.names) == 8
    # The same names, and so the same random choices.
    built[1].convert(twin.model)
    x = tokens()
    losses = [
        step(plain, built[0], lambda: plain(input_ids=x, labels=x).loss),
        step(twin, built[1], lambda: twin.model(input_ids=x, labels=x).loss),
    ]
    assert torch.equal(*losses)
    for method, model in zip(built, (plain, twin), strict=True):
        method.finalize(model)
    for layer in report.names:
        conv, linear = plain.get_submodule(layer), twin.model.get_submodule(layer)
        assert type(conv).__name__ == "Conv1D"
        assert vars(conv).keys() == attributes
        assert torch.equal(conv.weight.t(), linear.weight)
        assert int(check24(conv.weight.t())) == 0
    plain.save_pretrained(tmp_path)
    again = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(x).logits, plain.eval()(x).logits)


def test_the_gradient_of_a_conv1d_goes_with_its_weight(hf_model):
    model, method = hf_model("gpt2"), ste.Method(ste.Config())
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    weight = model.transformer.h[0].mlp.c_fc.weight
    gradient = weight.grad.clone()
    method.convert(model)
    assert torch.equal(weight.grad, gradient.t())
    method.finalize(model)
    assert torch.equal(weight.grad, gradient)


def test_the_dense_baseline_measures_a_conv1d_along_its_inputs(hf_model):
    model = hf_model("gpt2")
    types = [type(m) for m in model.modules()]
    method = dense.Method(dense.Config())
    method.convert(model)
    assert [type(m) for m in model.modules()] == types
    with torch.no_grad():
        for layer in method.layers.values():
            layer.weight[2::4], layer.weight[3::4] = 0.0, 0.0
    assert method.metrics()["illegal_groups"] == 0
    method.finalize(model)
    assert [type(m) for m in model.modules()] == types


def test_low_rank_terms_beside_a_conv1d_are_refused(hf_model):
    for method, options in ((slope, {"adapter_rank": 2}), (ast, {"slorb_k": 4})):
        with pytest.raises(ValueError, match=r"a Conv1D, which cannot keep low-rank.*CausalLM"):
            convert(hf_model("gpt2"), "ffn", method=method, total_steps=9, **options)


def test_calibration_before_the_conversion_of_a_conv1d(hf_model):
    model = hf_model("gpt2")
    method = methods.build("ast", metric="wanda", kl_weight=0.0, task_weight=1.0, total_steps=4)
    method.calibrate(model, [{"input_ids": tokens()}])
    assert method.input_norms["transformer.h.0.mlp.c_proj"].shape == (128,)
    assert len(method.convert(model).names) == 4


def test_a_layer_that_cannot_be_converted_elsewhere_comes_home(monkeypatch):
    model, went = nn.Sequential(nn.Linear(8, 8)), []
    monkeypatch.setattr(model[0], "to", went.append)

    def fails(*args):
        raise MemoryError

    monkeypatch.setattr(ste.Method.Linear, "setup", fails)
    elsewhere = torch.device("cuda", 0)
    with pytest.raises(MemoryError), ranks.alone(elsewhere):
        convert(model, include=["*"])
    assert went == [elsewhere, torch.device("cpu")]
