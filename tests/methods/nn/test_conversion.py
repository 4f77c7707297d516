"""Tests of which layers `convert` takes, what it says of the others, and transformers' Conv1D."""

import copy

import peft
import pytest
import timm
import torch
import transformers as hf
from torch import nn

import methods
from common_kernels import check24, nm_mask
from methods import ste
from methods.nn import ranks
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
    assert report.dense["classifier"] == reason and type(model.classifier) is nn.Linear
    assert report.dense["bert.embeddings.word_embeddings"] == "Embedding, no linear"
    total = sum(p.numel() for p in model.parameters())
    lines = str(report).splitlines()
    assert lines[1:3] == [
        "  warning: less than a third of the parameters is converted",
        f"  converted {1024 / total:6.1%}  bert.encoder.layer.*.intermediate.dense (2)",
    ]
    assert lines[-1] == f"  dense     {32 / total:6.1%}  classifier: {reason}"


def test_the_report_warns_of_patterns_that_training_destroys_and_of_16_bit_weights():
    """A frozen weight keeps its pattern, and an empty one has none."""
    model = linears(a=(8, 8), b=(8, 8), c=(8, 8), d=(8, 8))
    with torch.no_grad():
        for name in "abc":
            model[name].weight *= nm_mask(model[name].weight)
        model["d"].weight.zero_()
    model["c"].requires_grad_(False)
    partly, whole = copy.deepcopy(model), copy.deepcopy(model).bfloat16()
    (warning,) = convert(partly, ["a"], name="one_shot").warnings
    assert warning == "2:4 already but not in include, so that training fills their zeros: b"
    (warning,) = convert(whole, ["*"], name="one_shot").warnings
    assert warning.startswith("weights in bfloat16 lose small updates")
    assert convert(model, ["*"], name="one_shot").warnings == ()


def test_a_method_that_needs_its_own_products_leaves_attention_of_torch_and_says_so():
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2), "fc": nn.Linear(8, 8)})
    for name, options, why in (
        ("slope", {}, "which this method cannot convert"),
        ("s_ste", {}, "where mvue=exact cannot act; convert it with mvue=off"),
        ("ste", {"fp8": "paper"}, "where fp8=paper cannot act; convert it with fp8=off"),
    ):
        report = convert(copy.deepcopy(model), ["*"], name=name, **options)
        assert report.names == ("fc",) and len(report.dense) == 2
        told = report.dense["attn.in_proj_weight"]
        assert told == f"multiplied by MultiheadAttention itself, {why}"


def test_tied_weights_are_left_alone():
    """Pruning GPT-2's head would prune its embedding."""
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=32, block_size=8))
    report = convert(model, ["*"])
    assert len(report.names) == 4
    assert report.dense["lm_head"] == "shares its weight with transformer.wte"
    assert model.lm_head.weight is model.transformer.wte.weight


def test_what_is_said_of_globs_and_layers_that_do_not_fit():
    """Nothing is converted then."""
    some = nn.ModuleDict({"fc1": nn.Linear(8, 8), "layers": nn.ModuleList([linears(up=(8, 8))])})
    named = r"cannot be converted \(weight .* multiples of 4, as in \[8, 8\]\); exclude it"
    unknown = r"matches no matrix of the model"
    for model, include, exclude, told in (
        (linears(a=(8, 8), b=(8, 6)), ["a", "b"], [], f"b {named}"),
        (nn.LayerNorm(8), ["*"], [], r"include=\['\*'\] exclude=\[\]; .* linears are: none$"),
        (linears(up=(8, 8), lm_head=(8, 8)), "ffn", [], r"; choose from include=\['up'\]$"),
        (some, ["fc*", "layrs.*"], [], rf"^include: layrs\.\* {unknown}; .* layers\.\*\.up\?$"),
        (some, ["*"], ["fc2"], rf"^exclude: fc2 {unknown}; did you mean fc1\?$"),
    ):
        with pytest.raises(ValueError, match=told):
            convert(model, include, exclude)
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
    one = "base_model.model.model.layers.0.mlp.up_proj.lora_B.default"
    assert convert(adapted(), [one]).names == (one,)

    routers = [f"model.layers.{i}.mlp.gate" for i in range(2)]
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**TINY, num_local_experts=4))
    report = convert(copy.deepcopy(model), ["*q_proj", "*gate"])
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


def models():
    """Name, model of two blocks, and how many linears of a block are of its FFN, and in all."""
    plain = {k: v for k, v in TINY.items() if k != "intermediate_size"}
    tokens = {"vocab_size": 32, "bos_token_id": None, "eos_token_id": None}
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    image = {"image_size": 8, "patch_size": 4}
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
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight.add_(1e-3)
    assert not methods.check(model)[fc[1]]
    assert methods.check(model, 4, 4)[fc[1]]
    small = linears(a=(8, 4), b=(6, 4))
    small["a"].weight.data.zero_()
    assert str(methods.check(small)) == "1 2:4: a\n1 not 2:4: b\n1 of the 2:4 all zero: a"


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

    model = hf_model("gpt2")
    method = methods.build("ast", metric="wanda", kl_weight=0.0, task_weight=1.0, total_steps=4)
    method.calibrate(model, [{"input_ids": inputs()["input_ids"]}])
    assert method.input_norms["transformer.h.0.mlp.c_proj"].shape == (128,)
    with pytest.raises(ValueError, match=r"a Conv1D, which cannot keep low-rank.*CausalLM"):
        convert(hf_model("gpt2"), "ffn", name="slope", total_steps=9, adapter_rank=2)


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
