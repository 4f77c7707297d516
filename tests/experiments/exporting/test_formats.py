"""Tests of what others read of an export: exact zeros, no foreign config, the card's snippet,
and the compressed form, which holds the same bits in 9/16 of the bytes."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file

from common_kernels import check24, nm_mask
from experiments.config.run import load
from experiments.exporting import export, files
from experiments.exporting.export import Form
from experiments.runs.finished import FinishedRun
from experiments.support.errors import UserError
from experiments.training import pretraining
from models import packed, sparse
from models.packed import Limits
from tests.experiments.conftest import quiet
from tests.experiments.exporting.conftest import FAMILIES


@pytest.fixture
def two(finished):
    """two("bf16") -> (the plain export of a GPT-2, its compressed twin)."""

    def write(dtype="fp32"):
        run = finished("gpt2")
        forms = (Form(dtype=dtype, compressed=compressed) for compressed in (False, True))
        return tuple(export.export(run, form, report=quiet) for form in forms)

    return write


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def same(first, second):
    """The same names, dtypes and bits."""
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(bits(tensor), bits(second[name])), name


def plain(folder, **options):
    import transformers

    import models.auto  # noqa: F401

    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, loading = getattr(transformers, name).from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not any(loading.values())
    return model


def test_the_compressed_twin_has_the_same_bits_also_by_the_snippet_of_its_card(
    exported, monkeypatch
):
    _, _, whole, compressed = exported
    assert not list(compressed.glob("model*.safetensors*"))
    records = [sparse.read_record(folder) for folder in (whole, compressed)]
    assert records[0]["tensors"] == records[1]["tensors"]
    expected = dict(plain(whole).state_dict())
    for folder in (whole, compressed):
        (code,) = (folder / "README.md").read_text().split("```python\n")[1:]
        names = {}
        monkeypatch.chdir(folder)
        exec(code.split("```")[0], names)
        same(dict(names["model"].state_dict()), expected)
        same(dict(sparse.load(folder).state_dict()), expected)


@pytest.mark.parametrize("family, bits", [("gpt2", 4), ("bert", 8), ("vit", 4)])
def test_quantised_weights_are_near_and_their_compressed_twin_has_the_same_bits(
    family, bits, finished, tmp_path
):
    """Split, transposed and as they are."""
    run, own = finished(family), {"dtype": "bf16", "quantize": f"int{bits}"}
    forms = Form(dtype="bf16"), Form(**own), Form(**own, compressed=True)
    names = [form.folder for form in forms]
    assert names[1:] == [f"export-bf16-int{bits}", f"export-bf16-int{bits}-compressed"]
    first, whole, compressed = (export.export(run, form, report=quiet) for form in forms)
    assert export.export(run, forms[0], report=quiet) == first  # no other export is in its place
    exact, rounded = (dict(plain(folder, dtype="auto").state_dict()) for folder in (first, whole))
    read, loaded = plain(compressed, dtype="auto"), sparse.load(compressed)
    for found in (read, loaded):
        same(dict(found.state_dict()), rounded)
    told, held = sparse.read_record(compressed), 0
    assert told["tensors"] == sparse.read_record(whole)["tensors"]
    changed = {n for n, tensor in exact.items() if not torch.equal(tensor, rounded[n])}
    assert len(changed) == len(told["tensors"])
    for name in changed:
        w, near = (state[name].double() for state in (exact, rounded))
        w, near = (w.t(), near.t()) if family == "gpt2" else (w, near)
        largest = w.abs().amax(1, keepdim=True)  # of up to 96 inputs, which share a scale
        top = 2 ** (bits - 1) - 1
        # Half a step, and roundings of the scale and the product to bf16.
        assert ((w - near).abs() <= largest * (0.5 / top + 2**-7)).all()
        assert (near[w == 0] == 0).all()
        rows, columns = w.shape
        held += rows * (columns * bits // 16 + -(-columns // 8) + 2)
    assert told["bytes"]["compressed"] == held
    # transformers casts floats: a small scale would not survive fp16.
    stored = load_file(compressed / sparse.WEIGHTS)
    scales = [tensor for name, tensor in stored.items() if name.endswith(".scales")]
    assert len(scales) == len(changed) and {x.dtype for x in scales} == {torch.int16}
    model = plain(compressed, dtype=torch.float16)
    expected = {n: tensor.half() for n, tensor in rounded.items()}
    same(dict(model.state_dict()), expected)


def test_a_model_of_transformers_is_exported_and_compressed(hf_model, overrides, tmp_path):
    base = tmp_path / "base"
    hf_model("llama").save_pretrained(base)
    others = [option for option in overrides if not option.startswith("model.")]
    short = ["method=ste", "method.include=ffn", "train.steps=1", "train.warmup_steps=0"]
    config = load([*others, *short, "model=hf", f"model.path={base}", "model.block_size=16"])
    pretraining.run(config, quiet)
    run = FinishedRun.open(config.directory())
    forms = (Form(dtype="bf16", compressed=compressed) for compressed in (False, True))
    whole, compressed = (export.export(run, form, report=quiet) for form in forms)
    loaded = plain(whole, dtype="auto")  # transformers 4 loads fp32 otherwise
    same(dict(loaded.state_dict()), dict(sparse.load(compressed).state_dict()))
    read = plain(compressed, dtype="auto")
    same(dict(loaded.state_dict()), dict(read.state_dict()))
    ids = torch.arange(4)[None]
    texts = [m.generate(ids, max_new_tokens=4, do_sample=False) for m in (loaded, read)]
    assert torch.equal(*texts)
    for path in (*whole.rglob("*"), *compressed.rglob("*")):  # no path of this machine
        assert path.is_dir() or str(tmp_path).encode() not in path.read_bytes(), path


@pytest.fixture
def with_dense_columns(tiny):
    """A run whose Conv1Ds have scattered dense columns."""
    options = "method=ste", "method.dense_columns=0.5", "model.n_embd=128"
    config = tiny(*options, "train.learning_rate=1e-2")
    pretraining.run(config, quiet)
    return FinishedRun.open(config.directory())


def test_a_compressed_export_holds_dense_columns_beside_2_4_ones(with_dense_columns):
    """The same bits, rounded or not, by both loaders; what was changed is refused."""
    run, states = with_dense_columns, {}
    for number, quantize in ((16, None), (8, "int8"), (4, "int4")):
        forms = (Form(dtype="bf16", quantize=quantize, compressed=c) for c in (False, True))
        whole, folder = (export.export(run, form, report=quiet) for form in forms)
        states[number] = expected = dict(plain(whole, dtype="auto").state_dict())
        same(dict(sparse.load(folder).state_dict()), expected)
        same(dict(plain(folder, dtype="auto").state_dict()), expected)
        cast = dict(plain(folder, dtype=torch.float16).state_dict())
        same(cast, {name: tensor.half() for name, tensor in expected.items()})
        told, stored = sparse.read_record(folder), load_file(folder / sparse.WEIGHTS)
        size = beside = 0
        for name in told["tensors"]:
            assert name not in stored
            matrix, own = states[16][name].t(), stored[f"{name}.dense_columns"].long()
            outputs, inputs = matrix.shape
            assert len(own) == inputs // 2 and (own.diff() > 1).any()
            assert torch.equal(stored[f"{name}.dense_values"], matrix[:, own])  # not rounded
            assert torch.equal(expected[name].t()[:, own], matrix[:, own])
            half = outputs * inputs // 2
            beside += 2 * half + 4 * len(own)
            size += half * number // 16 + half // 8
            size += 2 * outputs * -(-inputs // 256) if quantize else 0  # scales
        assert told["bytes"]["dense_columns"] == beside
        assert told["bytes"]["compressed"] == size + beside
        for form in (whole, folder) if quantize else ():
            found = packed.pack(model := sparse.load(form), Limits(16, None))
            bits = {model.get_submodule(layer).fragments.bits for layer in found}
            assert bits == {number} and len(found) == len(told["tensors"])
    assert not torch.equal(states[8][name], states[16][name])
    content = bytearray((folder / sparse.WEIGHTS).read_bytes())
    content[-1] ^= 1
    (folder / sparse.WEIGHTS).write_bytes(content)
    for read in (sparse.load, plain):
        with pytest.raises(ValueError, match=f"{sparse.WEIGHTS} is damaged or of another export"):
            read(folder)


def test_transformers_alone_loads_a_compressed_folder_after_one_import(two, tmp_path):
    """The same bits; what was changed is refused; the model is trained and saved as any other."""
    import transformers

    whole, compressed = two("bf16")
    import models.auto  # noqa: F401

    read = transformers.AutoModelForCausalLM.from_pretrained
    expected = dict(plain(whole, dtype="auto").state_dict())
    model, loading = read(compressed, dtype="auto", output_loading_info=True)
    assert not any(loading.values()) and model.dtype == torch.bfloat16
    same(dict(model.state_dict()), expected)
    headless = transformers.AutoModel.from_pretrained(compressed, dtype="auto")
    same(dict(headless.state_dict()), dict(model.transformer.state_dict()))
    assert all(p.requires_grad for p in model.parameters())
    model.save_pretrained(tmp_path / "again")
    same(dict(plain(tmp_path / "again", dtype="auto").state_dict()), expected)
    for file, old, new in ((sparse.WEIGHTS, b"pt", b"tp"), ("config.json", b"e-05", b"e-06")):
        content = (compressed / file).read_bytes()
        (compressed / file).write_bytes(content.replace(old, new, 1))
        with pytest.raises(ValueError, match=f"{file} is damaged or of another export"):
            read(compressed)
        (compressed / file).write_bytes(content)
    (compressed / sparse.RECORD).unlink()
    with pytest.raises(ValueError, match=r"no export of sparse24 in .*No such file"):
        read(compressed)


@pytest.mark.parametrize("options", [
    ("method=slope", "method.adapter_rank=2", "method.adapter_fraction=0.5"),
    ("method=ast", "method.slorb_k=8", "method.task_weight=1.0"),
])  # fmt: skip
def test_low_rank_terms_stay_beside_2_4_weights(tiny, options, tmp_path):
    """The trained model's evaluation, in fp32, and fewer bytes than the merged export. Saved again,
    as `Trainer` does, the terms are merged; a model without head has them, too."""
    import transformers

    config = tiny(*options, "train.steps=4", "train.learning_rate=1e-2")
    pretraining.run(config, quiet)
    run = FinishedRun.open(config.directory())
    model = run.model().eval()
    whole, folder = (
        export.export(run, Form(compressed=compressed), report=quiet)
        for compressed in (False, True)
    )
    loaded, alone = sparse.load(folder), plain(folder)
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(alone(input_ids=ids).logits, loaded(input_ids=ids).logits)
        expected = model(ids)[0]
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=0, atol=1e-5)
        for saved, state in ((copy.deepcopy(loaded), None), (alone, alone.state_dict())):
            saved.save_pretrained(tmp_path, state_dict=state)
            again = plain(tmp_path)(input_ids=ids).logits
            torch.testing.assert_close(again, expected, rtol=0, atol=1e-5)
        headless = transformers.AutoModel.from_pretrained(folder)
        same(dict(headless.state_dict()), dict(alone.transformer.state_dict()))
        terms = [m for m in loaded.modules() if isinstance(m, sparse.LowRankTerm)]
        assert len(terms) == len(run.converted)
        for term in terms:
            assert int(check24(term.weight, dim=0)) == 0  # of GPT-2, [in, out]
            term.right.zero_()
        assert (loaded(input_ids=ids).logits - expected).abs().max() > 1e-4
    told = sparse.read_record(folder)
    assert {entry["illegal_groups"] for entry in told["tensors"].values()} == {0}
    dense, kept = whole / "model.safetensors", folder / sparse.WEIGHTS
    assert kept.stat().st_size < dense.stat().st_size


@pytest.mark.parametrize("family", list(FAMILIES))
def test_factors_of_split_and_transposed_weights_are_their_own(finished, made_again, family):
    """A fused linear of ours may be several of transformers', each with its own rows of R."""
    run, factors = finished(family), {}
    for name in run.converted:
        rows, columns = run.model().get_submodule(name).weight.shape
        factors |= {f"{name}.left": torch.randn(2, columns), f"{name}.right": torch.randn(2, rows)}
    made_again(run.directory, lambda state: {**state, **factors})
    run = FinishedRun.open(run.directory)
    merged, folder = (
        export.export(run, Form(compressed=packed), report=quiet) for packed in (False, True)
    )
    want, found = dict(plain(merged).state_dict()), sparse.load(folder)
    terms = {n: m for n, m in found.named_modules() if isinstance(m, sparse.LowRankTerm)}
    assert len(terms) >= len(run.converted) > 0
    for name, term in terms.items():
        low = term.right.t() @ term.left
        low = low.t() if family == "gpt2" else low
        torch.testing.assert_close(term.weight + low, want[f"{name}.weight"], rtol=0, atol=1e-5)


def test_weights_that_a_form_cannot_hold_are_named(finished, made_again):
    run = finished("gpt2")
    before = sorted(run.directory.iterdir())
    for change, form, message in (
        (torch.ones_like, Form(compressed=True), "no weight of this model is 2:4, .* to compress"),
        (torch.tensor(1e6).mul, Form(dtype="fp16"), r"wte\.weight .* too large for float16"),
    ):
        made_again(run.directory, lambda state, f=change: {k: f(v) for k, v in state.items()})
        with pytest.raises(UserError, match=message):
            export.export(FinishedRun.open(run.directory), form, report=quiet)
        assert [p for p in sorted(run.directory.iterdir()) if p.name != ".lock"] == before


def test_a_damaged_folder_is_one_line_with_the_file(two):
    """... and no class is loaded that its config names but transformers has not."""
    whole, compressed = two()
    config = compressed / "config.json"
    config.write_bytes(config.read_bytes().replace(b"GPT2LMHeadModel", b"os"))
    record = json.loads((compressed / sparse.RECORD).read_text())
    record["files"][config.name] = export.checkpoint.sha256(config)  # as if it was written so
    (compressed / sparse.RECORD).write_text(json.dumps(record))
    with pytest.raises(ValueError, match="names 'os', which is no model of transformers"):
        sparse.load(compressed)
    weights = whole / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or of another"):
        sparse.load(whole)


def test_zeros_become_positive_and_nothing_else_changes():
    torch.manual_seed(0)
    model = FAMILIES["gpt2"][0]()
    layer = model.transformer.h[0].mlp.c_fc
    with torch.no_grad():
        layer.weight.mul_(nm_mask(layer.weight))
        layer.weight[0, 0], layer.weight[0, 1] = 1e-45, -1e-45  # subnormal in fp32, 0 in bf16
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    files.round_weights(model, ["transformer.h.0.mlp.c_fc"], torch.float32)
    after = model.state_dict()
    own = "transformer.h.0.mlp.c_fc.weight"
    assert torch.equal(bits(after[own]), bits(before[own] + 0.0))
    same(
        {k: v for k, v in before.items() if k != own}, {k: v for k, v in after.items() if k != own}
    )
    files.round_weights(model, ["transformer.h.0.mlp.c_fc"], torch.bfloat16)
    assert not bits(layer.weight.detach()[0, :2]).any()
    assert torch.equal(layer.weight, before[own].bfloat16().float())
