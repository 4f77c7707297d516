"""Tests of which layers `convert` takes, what it says of the others, and transformers' Conv1D."""

import copy

import peft
import pytest
import timm
import torch
import transformers as hf
from torch import nn
from torch.ao import quantization

import methods
from common_kernels import check24, nm_mask
from methods import ste
from methods.nn import ranks
from models.bert import BertConfig, BertLM
from models.gpt2 import GPT, GPTConfig
from models.hf import CausalLM
from models.vit import ViT, ViTConfig
from tests.methods.loop import training_step

TINY = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 32,
}


def convert(model, include, exclude=(), name="ste", **options):
    return methods.build(name, include=include, exclude=exclude, **options).convert(model)


def linears(**shapes):
    return nn.ModuleDict({name: nn.Linear(*shape) for name, shape in shapes.items()})


def bert_of_two_classes():
    return hf.BertForSequenceClassification(hf.BertConfig(num_labels=2, **TINY))


def test_a_head_of_two_classes_is_left_dense():
    model = bert_of_two_classes()
    report = convert(model, ["*"])
    assert len(report.names) == 2 * 6 + 1  # the pooler, too
    reason = "weight [2, 16]; 2:4 needs both dims to be multiples of 4, as in [4, 16]"
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
    assert lines[-1] == f"  dense  {32 / total:6.1%}  classifier: {reason}"
    assert type(model.classifier) is nn.Linear


def test_the_report_warns_of_patterns_that_training_destroys_and_of_16_bit_weights():
    """A frozen weight keeps its pattern, and an empty one has none."""
    model = linears(a=(8, 8), b=(8, 8), c=(8, 8), d=(8, 8))
    with torch.no_grad():
        for name in "abc":
            model[name].weight *= nm_mask(model[name].weight)
        model["d"].weight.zero_()
    model["c"].requires_grad_(False)
    partly, whole = copy.deepcopy(model), copy.deepcopy(model).bfloat16()
    told = convert(partly, ["a"], name="one_shot")
    assert told.warnings == (
        "2:4 already but not in include, so that training fills their zeros: b",
    )
    assert f"  warning: {told.warnings[0]}" in str(told).splitlines()
    (warning,) = convert(whole, ["*"], name="one_shot").warnings
    assert warning.startswith("weights in bfloat16 lose small updates")
    assert convert(model, ["*"], name="one_shot").warnings == ()


def test_a_method_that_needs_its_own_products_leaves_attention_of_torch_and_says_so():
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2), "fc": nn.Linear(8, 8)})
    for name, options, why in (
        ("slope", {}, "which this method cannot convert"),
        ("bi_mask", {}, "which this method cannot convert"),
        ("s_ste", {}, "where mvue=exact cannot act; convert it with mvue=off"),
        ("ste", {"fp8": "paper"}, "where fp8=paper cannot act; convert it with fp8=off"),
    ):
        report = convert(copy.deepcopy(model), ["*"], name=name, **options)
        assert report.names == ("fc",)
        kinds = {"in_proj_weight": "MultiheadAttention",
                 "out_proj": "NonDynamicallyQuantizableLinear"}  # fmt: skip
        assert report.dense == {
            f"attn.{name}": f"multiplied by {kind} itself, {why}" for name, kind in kinds.items()
        }
        with pytest.raises(ValueError, match=r"no linear that matches .* attn\.out_proj"):
            convert(nn.ModuleDict({"attn": model["attn"]}), ["*"], name=name, **options)


def test_tied_weights_are_left_alone():
    """Pruning GPT-2's head would prune its embedding."""
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=32, block_size=8))
    report = convert(model, ["*"])
    assert len(report.names) == 4
    assert report.dense["lm_head"] == "shares its weight with transformer.wte"
    assert report.sizes["lm_head"] == 0 and report.sizes["transformer.wte"] == 32 * 16
    assert model.lm_head.weight is model.transformer.wte.weight


def test_what_is_said_of_globs_and_layers_that_do_not_fit():
    """Nothing is converted then."""
    block = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2), "up": nn.Linear(8, 16)})
    blocks = nn.ModuleDict({"x": nn.ModuleList([block, copy.deepcopy(block)])})
    some = nn.ModuleDict({"fc1": nn.Linear(8, 8), "layers": nn.ModuleList([linears(up=(8, 8))])})
    heads = nn.ModuleDict({"mlp": linears(up=(8, 8)), "lm_head": nn.Linear(8, 8)})
    named = r"cannot be converted \(weight .* multiples of 4, as in \[8, 8\]\); exclude it"
    unknown = r"matches no matrix of the model"
    for model, include, exclude, told in (
        (linears(a=(8, 8), b=(8, 6)), ["a", "b"], [], f"b {named}"),
        (linears(a=(8, 8), b=(6, 8)), ["a", "b"], [], f"b {named}"),
        (nn.Linear(6, 8), ["*"], [], r"converted: the model itself \(weight \[8, 6\]; [^;]*$"),
        (nn.LayerNorm(8), ["*"], [], r"include=\['\*'\] exclude=\[\]; .* linears are: none$"),
        (linears(a=(6, 8)), "ffn", [], r"include=ffn exclude=\[\]; the model's linears are: a$"),
        (heads, ["up"], [], r"; choose include=ffn or include=all$"),
        (linears(up=(8, 8), lm_head=(8, 8)), "ffn", [], r"; choose from include=\['up'\]$"),
        (blocks, ["*.attn.*"], [], r"; choose from include=\['x\.\*\.up'\]$"),  # once for each kind
        (some, ["fc*", "layrs.*"], [], rf"^include: layrs\.\* {unknown}; .* layers\.\*\.up\?$"),
        (some, ["*", "qqq"], [], f"^include: qqq {unknown}$"),
        (some, ["*"], ["fc2"], rf"^exclude: fc2 {unknown}; did you mean fc1\?$"),
    ):
        with pytest.raises(ValueError, match=told):
            convert(model, include, exclude, name="bi_mask" if model is blocks else "ste")
        assert {type(m) for m in model.modules() if type(m).__name__ == "Linear"} <= {nn.Linear}
    assert convert(linears(a=(8, 8), b=(8, 6)), ["?"]).dense.keys() == {"b"}
    assert convert(some, ["*"], ["fc1", "*head"], name="slope").names == ("layers.0.up",)


def test_adapters_are_converted_only_if_named_and_routers_never():
    def adapted():
        lora = peft.LoraConfig(r=4, target_modules=["up_proj", "down_proj"])
        return peft.get_peft_model(hf.LlamaForCausalLM(hf.LlamaConfig(**TINY)), lora)

    for include in ("ffn", ["*"]):
        report = convert(adapted(), include)
        left = {n: why for n, why in report.dense.items() if "lora" in n}
        assert len(left) == 8 and not any("lora" in name for name in report.names)
        assert {why[:10] for why in left.values()} == {"an adapter"}
    assert len(convert(adapted(), ["*.lora_A.*"]).names) == 4
    one = "base_model.model.model.layers.0.mlp.up_proj.lora_B.default"
    assert convert(adapted(), [one]).names == (one,)

    routers = [f"model.layers.{i}.mlp.gate" for i in range(2)]
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**TINY, num_local_experts=4))
    for include in (["*"], ["*mlp*"], ["*q_proj", "*gate"]):
        report = convert(copy.deepcopy(model), include)
        assert [report.dense[n] for n in routers] == ["the router of a mixture of experts"] * 2
    with pytest.raises(ValueError, match=r"mlp\.gate cannot be converted \(the router of a mix"):
        convert(model, [routers[0]])


def test_every_method_refuses_weights_without_numbers():
    """A method would measure noise on them: S-STE's scale was 8.7e13 after `to_empty`."""
    for name in methods.available():
        with torch.device("meta"):
            model = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))})
        with pytest.raises(ValueError, match=r"^mlp\.0\.weight is on the meta device, .* to_empty"):
            methods.build(name, total_steps=6).convert(model)
        assert {type(m) for m in model["mlp"]} == {nn.Linear}


@pytest.mark.filterwarnings("ignore")
def test_quantisation_aware_training_comes_after_finalize():
    def prepared(model):
        model.qconfig = quantization.get_default_qat_qconfig("x86")
        return quantization.prepare_qat(model.train())

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for computed in (  # weights that a module computes
        prepared(copy.deepcopy(model)),
        nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8))),
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
    ):
        with pytest.raises(ValueError, match=r"no plain nn\.Linear"):
            convert(computed, ["*"])
    method = methods.build("ste", include=["0"])
    method.convert(model)
    trained = prepared(method.finalize(model))
    assert type(trained[0]) is type(trained[1]) is not nn.Linear
    trained(torch.randn(4, 8))
    assert int(check24(trained[0].weight_fake_quant(trained[0].weight))) == 0
    replaced, method = nn.Sequential(nn.Linear(8, 8)), methods.build("ste", include=["0"])
    method.convert(replaced)
    replaced[0] = nn.Linear(8, 8)  # as torchao does
    with pytest.raises(ValueError, match="linears were replaced"):
        method.finalize(replaced)


def test_modules_without_a_matrix_are_not_reported():
    class Conv1D(nn.Module):
        """Has the name of transformers' layer, but holds other weights."""

    scale, conv = nn.Identity(), Conv1D()
    scale.weight = 0.5  # not even a tensor
    conv.weight = nn.Parameter(torch.zeros(8, 8, 3))
    rest = {"norm": nn.LayerNorm(8), "scale": scale, "none": Conv1D(), "conv": conv}
    report = convert(nn.ModuleDict({"fc": nn.Linear(8, 8), **rest}), ["*"])
    assert report.names == ("fc",)
    assert report.dense == {"conv": "Conv1D, no linear"}


def models():
    """Name, model of two blocks, and how many linears of a block are of its FFN, and in all."""
    plain = {k: v for k, v in TINY.items() if k != "intermediate_size"}
    tokens = {"vocab_size": 32, "bos_token_id": None, "eos_token_id": None}
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    image = {"image_size": 8, "patch_size": 4}
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16}
    text = {"vocab_size": 32, "block_size": 8}
    vit = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return (
        ("gpt2", hf.GPT2Model(hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, **tokens)), 2, 4),
        ("bert", bert_of_two_classes(), 2, 6),
        ("llama", hf.LlamaForCausalLM(hf.LlamaConfig(**TINY)), 3, 7),
        ("t5", hf.T5ForConditionalGeneration(
            hf.T5Config(**t5, feed_forward_proj="gated-gelu")), 3, 9),
        ("opt", hf.OPTForCausalLM(hf.OPTConfig(ffn_dim=32, word_embed_proj_dim=8, **plain)), 2, 6),
        ("vit", hf.ViTForImageClassification(hf.ViTConfig(**image, **TINY)), 2, 6),
        ("timm", timm.models.VisionTransformer(**vit), 2, 4),
        ("our gpt2", GPT(GPTConfig(**shape, **text)), 2, 4),
        ("our bert", BertLM(BertConfig(**shape, **text)), 2, 4),
        ("our vit", ViT(ViTConfig(depth=2, heads=2, width=16, **image, n_classes=4)), 2, 4),
    )  # fmt: skip


def test_presets_take_the_linears_of_the_blocks_and_no_others():
    for name, model, ffn, everything in models():
        for preset, count in (("ffn", ffn), ("all", everything)):
            chosen = ste.Method(ste.Config(include=preset)).matching_linears(model)
            assert len(chosen) == 2 * count, (name, preset, list(chosen))
            if name != "t5":  # one block of each stack
                assert all(".0." in n or ".1." in n for n in chosen), name  # of a block
                attention = any("attention" in n or "attn" in n for n in chosen)
                assert attention == (preset == "all"), name
    model = hf.BertModel(hf.BertConfig(**{**TINY, "num_hidden_layers": 11}))  # two digits
    chosen = ste.Method(ste.Config()).matching_linears(model)
    assert len(chosen) == 2 * 11 and "encoder.layer.10.output.dense" in chosen


def inputs():
    tokens = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(3))
    return {"input_ids": tokens, "labels": tokens}


def test_check_says_which_matrices_are_sparse(hf_model):
    """Conv1D has its inputs along the rows; a merged adapter makes a weight dense."""
    model, method = hf_model("gpt2"), methods.build("ste", include=["*c_fc"])
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
    small = linears(a=(8, 4), b=(6, 4))
    assert methods.check(small["b"], 1, 4) == {"": False}
    small["a"].weight.data.zero_()
    assert str(methods.check(small)) == "1 2:4: a\n1 not 2:4: b\n1 of the 2:4 all zero: a"
    blocks = nn.ModuleDict({"h": nn.ModuleList([linears(fc=(8, 4)), linears(fc=(8, 4))])})
    with torch.no_grad():
        blocks["h"][0]["fc"].weight[:, ::2] = 0.0
    assert str(methods.check(blocks)) == "1 2:4: h.0.fc\n1 not 2:4: h.1.fc"


@pytest.mark.parametrize("name", ["s_ste", "slope", "fst"])
def test_a_conv1d_trains_as_the_linear_of_the_same_weight(hf_model, name, tmp_path):
    """Bit for bit, and leaves a checkpoint that plain transformers loads."""
    plain, twin = hf_model("gpt2"), CausalLM(hf_model("gpt2"))
    attributes = vars(plain.transformer.h[0].mlp.c_fc).keys() | set()
    losses = []
    for model in (plain, twin.model):  # the same names, and so the same random choices
        method = methods.build(name, include="all", total_steps=6, exclude=[])
        report = method.convert(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with training_step(method, 0, optimizer):
            method.open_micro_batch()
            losses.append(model(**inputs()).loss)
            losses[-1].backward()
        method.finalize(model)
    assert torch.equal(*losses) and len(report.names) == 8
    for layer in report.names:
        conv, linear = plain.get_submodule(layer), twin.model.get_submodule(layer)
        assert type(conv).__name__ == "Conv1D" and vars(conv).keys() == attributes
        assert torch.equal(conv.weight.t(), linear.weight)
        assert int(check24(conv.weight.t())) == 0
    plain.save_pretrained(tmp_path)
    again = hf.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(**inputs()).logits, plain.eval()(**inputs()).logits)


def test_a_conv1d_is_calibrated_and_given_back_along_its_inputs(hf_model):
    model, method = hf_model("gpt2"), methods.build("ste")
    model(**inputs()).loss.backward()
    weight = model.transformer.h[0].mlp.c_fc.weight
    gradient = weight.grad.clone()
    method.convert(model)
    assert torch.equal(weight.grad, gradient.t())
    method.finalize(model)
    assert torch.equal(weight.grad, gradient)

    model, method = hf_model("gpt2"), methods.build("dense")
    types = [type(m) for m in model.modules()]
    method.convert(model)
    assert [type(m) for m in method.finalize(model).modules()] == types

    model = hf_model("gpt2")
    method = methods.build("ast", metric="wanda", kl_weight=0.0, task_weight=1.0, total_steps=4)
    method.calibrate(model, [{"input_ids": inputs()["input_ids"]}])
    assert method.input_norms["transformer.h.0.mlp.c_proj"].shape == (128,)
    assert len(method.convert(model).names) == 4
    model = hf_model("gpt2")
    method = methods.build("one_shot", metric="proxsparse", mask_steps=1)
    method.calibrate(model, [inputs()])
    assert len(method.convert(model).names) == 4
    for name, options in (("slope", {"adapter_rank": 2}), ("ast", {"slorb_k": 4})):
        with pytest.raises(ValueError, match=r"a Conv1D, which cannot keep low-rank.*CausalLM"):
            convert(hf_model("gpt2"), "ffn", name=name, total_steps=9, **options)


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


def test_hooks_of_accelerate_call_the_converted_layer():
    """Hooks of a model that `device_map` spreads keep the forward pass of the class they saw."""
    hooks = pytest.importorskip("accelerate.hooks")
    x = torch.randn(4, 16)
    for name in ("ste", "slope", "semi_sparse"):
        layer = nn.Linear(16, 8)
        hooks.add_hook_to_module(layer, hooks.AlignDevicesHook(io_same_device=True))
        method = methods.build(name, include=["*"])
        method.convert(layer)
        weight = layer.sparse_weight.clone()
        y = layer(x)
        torch.testing.assert_close(y, nn.functional.linear(x, weight, layer.bias))
        y.sum().backward()
        assert all(p.grad is not None for p in layer.parameters())
        method.finalize(layer)
        assert "forward" in vars(layer)  # the hook is still there
        torch.testing.assert_close(layer(x), y)


def test_the_report_says_what_is_converted_and_that_dense_converts_nothing():
    model = linears(up=(8, 16), down=(16, 8), head=(8, 8))
    of, left = "256 of 352 parameters (73%)", "  18.2%  head: not in include"
    report = convert(model, ["up", "down"], name="dense")
    both = "\n  measured  36.4%  up\n  measured  36.4%  down\n  dense   "
    assert str(report) == f"no linear converted; 2 linears measured, {of}{both}{left}"
    report = convert(model, ["up", "down"])
    both = "\n  sparse  36.4%  up\n  sparse  36.4%  down\n  dense "
    assert str(report) == f"2 linears converted, {of}{both}{left}"
    assert convert(linears(a=(8, 8), b=(8, 8)), ["*"], ["b"]).dense == {"b": "in exclude"}
