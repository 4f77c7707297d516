"""Tests that what README.md and the pages of docs/ say holds: links, paths, commands, snippets,
figures of speed. test_evidence.py has those of quality."""

import importlib.util
import json
import re
import shlex
import warnings
from contextlib import contextmanager
from functools import cache, partialmethod
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader

import methods
from common_kernels import nm_mask
from experiments.bench.__main__ import parser as bench_parser
from experiments.config.compose import compose
from experiments.support.checkpoint import sha256
from models.gpt2 import GPT, GPTConfig
from models.vit import ViT, ViTConfig
from reproduce.__main__ import COMMANDS, parse
from reproduce.execute.blocks import BLOCKS
from reproduce.specs.table import TABLES, read_tables

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / folder / "README.md" for folder in ("methods", "reproduce")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
TOP = {path.name for path in ROOT.iterdir()}


@cache
def text(page):
    return page.read_text(encoding="utf-8")


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), re.S | re.M)


def prose(page):
    """Without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text(page), flags=re.S | re.M)


def anchors(page):
    """The names that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def block(page, start):
    """The one python block of a page whose code begins so."""
    (found,) = (b for b in blocks(ROOT / page, "python") if b.startswith(start))
    return found


def test_the_readme_is_short_and_pages_and_methods_are_listed():
    assert len(text(ROOT / "README.md").split()) <= 600
    linked = set(re.findall(r"\]\((\w+\.md)", text(ROOT / "docs" / "index.md")))
    assert linked == {path.name for path in PAGES if path.parent == ROOT / "docs"} - {"index.md"}
    table = text(ROOT / "README.md").split("| method | in one line |")[1].split("\n\n")[0]
    rows = [name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in row.split(", ")]
    assert {"dense"} | {name.strip("`") for name in rows} == set(methods.available())
    pages = (ROOT / "docs" / "methods").glob("*.md")
    assert {path.stem for path in pages} == set(methods.available())


def test_links_and_named_files_exist_and_no_place_of_a_machine_is_named():
    """Names in backticks that begin with a file or folder of the repository."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", text(page)):
            if re.match(r"https?:", target):
                continue
            path, _, anchor = target.partition("#")
            linked = (page.parent / path).resolve() if path else page
            assert linked.exists(), (page, target)
            assert not anchor or anchor in anchors(linked), (page, target)
        for name in re.findall(r"`([\w.-]+(?:/[\w.-]+)+/?)`", text(page)):
            if name.split("/")[0] in TOP - {"runs", "data"}:
                assert (ROOT / name).exists(), (page, name)
        assert not re.search(r"(?<![\w~])/(?:work|root|home|tmp)/", text(page)), page


def test_the_site_is_built_without_a_warning(tmp_path):
    mkdocs = pytest.importorskip("mkdocs.config")
    from mkdocs.commands.build import build

    # The configuration is strict: a warning ends it.
    build(mkdocs.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path)))
    assert 'id="common_kernels.pack24"' in text(tmp_path / "api" / "index.html")


SETTINGS = re.compile(r"(experiment|method|model|train)=[\w/]+( (\w+[.])?\w+=[\w.+-]+)*")


def commands():
    """Command lines of blocks and in sentences; settings alone are those of a pre-training."""
    for page in PAGES:
        for block in blocks(page, ""):
            for line in block.replace("\\\n", " ").splitlines():
                if line.split(" ")[0] in ("python", "bash", "torchrun", "echo"):
                    yield page, line
        for line in re.findall(r"`([^`\n]+)`", prose(page)):
            if line.startswith(("python -m", "python docs")) and "NAME" not in line:
                yield page, line
            elif SETTINGS.fullmatch(line) and not re.search("NAME|FOLDER", line):
                yield page, f"python -m experiments.pretrain {line}"


def test_commands_are_understood():
    tables = read_tables(TABLES)
    checked = 0
    for page, line in commands():
        words = shlex.split(line.split("#")[0])
        if "|" in words:
            words = words[words.index("|") + 1 :]
        if not words or "-m" not in words:
            scripts = [word for word in words if word.endswith((".sh", ".py"))]
            assert all((ROOT / script).exists() for script in scripts), (page, line)
            checked += bool(scripts)
            continue
        module, *arguments = words[words.index("-m") + 1 :]
        if module == "experiments.bench":
            bench_parser().parse_args(arguments)
        elif module == "reproduce":
            if arguments[0] == "run":
                assert arguments[1] in ("BLOCK", "w") or (BLOCKS / f"{arguments[1]}.yaml").exists()
            # `w` stands for what a reader adds
            elif arguments[0] not in COMMANDS and not {"--list", "paper=w"} & {*arguments}:
                parse(arguments, tables)
        elif module.startswith("reproduce."):
            assert (ROOT / f"{module.replace('.', '/')}.py").exists(), line
        elif module == "experiments.compare":
            assert all("=" in word or word.startswith("runs/") for word in arguments)
        elif module.startswith("experiments."):
            name = module.removeprefix("experiments.")
            assert (ROOT / "experiments" / f"{name}.py").exists(), line
            # The launcher of a sweep is an extra; tests/experiments/config/test_cli.py.
            overrides = [w for w in arguments if "=" in w and not w.startswith(("+clu", "hydra."))]
            if "-m" in arguments:  # composes the first run of a sweep
                overrides = [re.sub(r"(,.*)$", "", word) for word in overrides]
            if name == "prepare_data":
                name = "pretrain"
            compose(name, overrides)
        else:
            assert module in ("pytest", "venv"), line
        checked += 1
    assert checked > 40


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_attention_heads=2, **sizes, **options))


@contextmanager
def one_rank(folder):
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def is_24(weight):
    return int((weight.reshape(-1, 4) != 0).sum(1).max()) <= 2


def tiny():
    torch.manual_seed(0)
    return GPT(GPTConfig(n_layer=1, n_head=2, n_embd=64, vocab_size=32, block_size=8))


def batch():
    tokens = torch.randint(0, 32, (4, 9))
    return {"input": tokens[:, :-1], "target": tokens[:, 1:]}


def snippet(start):
    return block("docs/own_loop.md", start)


def trained():
    names = {"model": tiny(), "fresh": tiny(), "steps": 3, "accumulate": 2}
    names["micro_batches"] = lambda step: [batch(), batch()]
    exec(snippet("import torch\nimport methods"), names)
    return names


def test_the_method_of_a_few_lines_keeps_what_it_kept(monkeypatch):
    code, _ = blocks(ROOT / "docs" / "extending.md", "python")
    monkeypatch.setattr("methods._registered", {})
    module = ModuleType("keeping")
    exec(code, vars(module))
    methods.register(module)
    layer = torch.nn.Linear(4, 4)
    layer.weight.data[:] = torch.tensor([2.0, -2.0, 1.0, 1.0])
    methods.build("keeping", include=["*"]).convert(layer)
    for other, first in ((2.1, True), (2.3, False)):
        layer.weight.data[:, 2:] = other
        layer.refresh_mask()
        assert layer.mask.tolist() == [[first, first, not first, not first]] * 4


def test_layers_are_used_without_a_model_and_swapped_for_torchao_s(capsys):
    names = {}
    exec(blocks(ROOT / "docs" / "extending.md", "python")[1], names)
    assert type(names["layer"]) is torch.nn.Linear and is_24(names["layer"].weight)
    assert "tensor(" in capsys.readouterr().out
    model = ViT(ViTConfig(width=32, depth=1, heads=2, image_size=8, patch_size=4, n_classes=3)).vit
    kinds = []
    given = {"model": model, "train": lambda model: kinds.append(type(model.blocks[0].mlp.fc1))}
    exec(block("docs/methods/semi_sparse.md", ""), given)
    assert [kind.__name__ for kind in kinds] == ["SemiSparseLinear"]
    assert type(model.blocks[0].mlp.fc1) is torch.nn.Linear


def test_the_merge_of_adapters_keeps_the_pattern_only_as_shown():
    names = trained()
    names["method"] = methods.build("ste", include="ffn")
    names["method"].convert(names["model"])
    merge, mask = snippet("from peft").split("for name, mask")
    exec(merge.replace("LoraConfig(", "LoraConfig(init_lora_weights=False, "), names)
    for holds in (False, True):
        told = methods.check(names["model"])
        assert {told[name] for name in names["masks"]} == {holds}
        exec(f"for name, mask{mask}", names)


def test_a_training_ends_sparse_is_saved_and_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = trained()
    assert is_24(names["model"].transformer.h[0].mlp.c_fc.weight)
    names["model"] = tiny()
    exec(snippet("import torch\nimport methods").split("method.finalize")[0], names)
    exec(snippet("state = {"), names)
    exec(snippet("state = torch.load"), names)
    state, resumed = names["model"].state_dict(), names["fresh"].state_dict()
    assert state.keys() == resumed.keys()
    assert all(torch.equal(state[key], resumed[key]) for key in state)


def test_ddp_and_compile_take_a_converted_model(tmp_path):
    with one_rank(tmp_path), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        for start in ("from torch.nn.parallel", "method.convert(model)\ncompiled"):
            exec(snippet(start), {"torch": torch, "model": tiny(), "method": methods.build("ste")})


@pytest.mark.skipif(torch.cuda.is_available(), reason="fully_shard would take the GPUs")
def test_a_sharded_training_is_saved_resumed_and_ended_as_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with one_rank(tmp_path):
        names = {"model": llama(), "method": methods.build("ste")}
        exec(snippet("from torch.distributed.fsdp import"), names)
        method, optimizer = names["method"], names["optimizer"]
        method.on_step_begin(0)
        ids = batch()["input"]
        method.loss(names["model"], {"input_ids": ids, "labels": ids}).backward()
        optimizer.step()
        method.on_step_end(0)
        for start in ("import torch.distributed.ch", "dcp.load", "from torch.distributed.ch"):
            exec(snippet(start), names)
        weight = names["weights"]["model.layers.0.mlp.up_proj.weight"]
        assert type(weight) is torch.Tensor and is_24(weight)


def test_the_loop_for_a_llama_ends_with_a_saved_sparse_model(tmp_path, monkeypatch):
    """On a CPU, and with blocks that are traced but not compiled."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="eager")
    )
    llama().save_pretrained("model")
    ids = batch()["input"]
    batches = iter([{"input_ids": ids, "labels": ids}] * 4)
    code = snippet("import torch\nfrom transformers").replace('"cuda"', '"cpu"')
    exec(code, {"folder": "model", "steps": 2, "accumulate": 2, "batches": batches})
    saved = type(llama()).from_pretrained("sparse")
    names = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    names += [f"self_attn.{name}_proj" for name in "qkvo"]
    assert all(is_24(saved.get_parameter(f"model.layers.0.{name}.weight")) for name in names)


def test_acceleration_is_asked_for_as_shown(capsys, monkeypatch):
    """Nothing changes if no product is faster."""
    monkeypatch.delenv("SPARSE24_MATMUL", raising=False)
    method = methods.build("fst", total_steps=6)
    code = snippet("method.convert(model, dtype")
    exec(code, {"torch": torch, "model": tiny(), "method": method})
    assert "transformer.h.0.mlp.c_fc" in method.acceleration.layers
    assert capsys.readouterr().out == f"{method.acceleration}\n"


def test_a_matrix_is_packed_and_multiplied_as_shown():
    torch.manual_seed(0)
    w, x = torch.randn(64, 128).bfloat16(), torch.randn(3, 5, 128).bfloat16()
    names = {"w": w, "x": x, "bias": torch.ones(64).bfloat16()}
    exec(snippet("from common_kernels"), names)
    pruned = torch.where(nm_mask(w), w, 0)
    want = x.float() @ pruned.float().t() + 1
    assert (names["y"].float() - want).abs().max() <= 2**-8 * want.abs().max()
    assert torch.equal(names["weight"].to_dense(), pruned)


def test_an_export_is_loaded_as_shown(tmp_path, capsys, monkeypatch):
    model, folder = llama(), tmp_path / "export"
    weights = {n: p for n, p in model.named_parameters() if "mlp" in n}
    for weight in weights.values():
        weight.data *= nm_mask(weight)
    model.save_pretrained(folder)
    files = {n: sha256(folder / n) for n in ("config.json", "model.safetensors")}
    record = {"format": "sparse24", "version": 1, "tensors": {}, "files": files}
    (folder / "sparse24.json").write_text(json.dumps(record))
    own, code, rounded = blocks(ROOT / "docs" / "serving.md", "python")
    packed: list = []
    monkeypatch.setattr("models.packed.pack", packed.append)  # needs a GPU
    exec(own, {"folder": folder, "device": "cpu"})
    exec(rounded, {"folder": folder, "device": "cpu", "ids": torch.tensor([[1, 2]])})
    assert [model.dtype for model in packed] == [torch.bfloat16] * 2
    assert capsys.readouterr().out == f"{len(weights)} linears rounded\n"
    loaded = {"folder": folder, "device": "cpu"}
    exec(code, loaded)
    assert capsys.readouterr().out == "{}\n"
    same = dict(loaded["model"].named_parameters())
    assert all(torch.equal(same[n], p) for n, p in model.named_parameters())


def test_lightning_trains_as_the_loop_does():
    """With gradients that are clipped and accumulated, but in the last step, in which data end."""
    lightning = pytest.importorskip("pytorch_lightning")
    names = {}
    exec(snippet("import pytorch_lightning"), names)
    batches = [batch() for _ in range(5)]
    loop = {"model": tiny(), "steps": 3, "accumulate": 2}
    loop["micro_batches"] = lambda step: batches[2 * step : 2 * step + 2]
    exec(snippet("import torch\nimport methods").replace("s_ste", "sr_ste"), loop)
    model, method = tiny(), methods.build("sr_ste", total_steps=3)
    method.convert(model)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = lightning.Trainer(
        max_steps=3, accumulate_grad_batches=2, gradient_clip_val=1.0, accelerator="cpu",
        enable_model_summary=False, **off,
    )  # fmt: skip
    trainer.fit(names["Sparse"](model, method), DataLoader(batches, batch_size=None))
    method.finalize(model)
    assert all(map(torch.equal, model.parameters(), loop["model"].parameters()))


def test_a_model_of_transformers_is_trained_as_shown(tmp_path):
    from transformers import TrainingArguments

    model = llama(max_position_embeddings=16)
    model.save_pretrained(tmp_path / "model")
    names = {"dataset": [{"input_ids": r, "labels": r} for r in torch.randint(0, 32, (8, 16))]}
    options = {"max_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    names["arguments"] = TrainingArguments(str(tmp_path / "out"), **options)
    names |= {"model": model, "method": methods.build("s_ste", total_steps=2)}
    exec(snippet("from methods.integ"), names | {"folder": tmp_path / "model"})
    stored = type(model).from_pretrained(tmp_path / "out")
    assert is_24(stored.model.layers[0].mlp.up_proj.weight)


def test_the_loop_of_the_readme_runs_and_is_saved_sparse(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"torch": torch, "model": tiny(), "steps": 3, "batches": iter([batch()] * 3)}
    exec(block("README.md", ""), names)
    saved = torch.load("model.pt", weights_only=True)
    assert saved.keys() == tiny().state_dict().keys()
    assert is_24(saved["transformer.h.0.mlp.c_fc.weight"])


def script(name):
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_generated_is_up_to_date():
    """If not: `python docs/make_configuration.py` and `python docs/make_methods.py`."""
    configuration, measured = script("make_configuration"), script("make_methods")
    assert text(configuration.PAGE) == configuration.page()
    curves = measured.PAGES / "curves"
    for name, (block, variant) in measured.SHOWN.items():
        assert measured.measured(name) in text(measured.PAGES / f"{name}.md"), name
        assert text(curves / f"{name}.svg") == measured.drawing(block, variant)
    assert text(curves / "dense_columns.svg") == measured.by_dense_columns()


@cache
def rows(benchmark):
    record = text(ROOT / "experiments" / "bench_results" / "h200.md")
    part = record.split(f"\n## {benchmark}\n")[1].split("\n## ")[0]
    lines = (line.split("|")[1:-1] for line in part.splitlines() if "|" in line)
    cells = [[cell.strip() for cell in line] for line in lines]
    return {(row[0], row[2]): row for row in cells}


def shown(page, section, first):
    """The rows of the tables under a heading whose first cell matches, as lists of cells."""
    part = text(ROOT / page).split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = re.findall(rf"^\| (?:{first}.*)\|$", part, re.M)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_speeds_and_products_of_integers_are_those_of_the_records():
    """Each as a factor over dense, of a layer or of a step."""
    factors = []
    widths = {
        "1,280": "GPT-2 774M, 16 x 1024, all linears",
        "4,096": "6 blocks 4096 -> 14336, 8 x 1024, all linears",
    }
    names = ["s_ste", "slope", "fst", "dense fp8", "s_ste, fp8", "fst, fp8"]
    steps = shown("README.md", "What it gives", r"\d")
    for width, *figures in steps:
        factors += [("train", widths[width], *pair) for pair in zip(names, figures, strict=True)]
    names = ["ste", "semi_sparse", "slope", "fst", "s_ste", "s_ste, fp8", "dense fp8"]
    for shape, *figures in shown("docs/speed.md", "Kernel times", r"\d"):
        factors += [("linear", shape, *pair) for pair in zip(names, figures, strict=True)]
    times = shown("docs/speed.md", "Step times", "(?:GPT-2|ViT|SAM|6 blocks)")
    factors += [("train", shape, name, faster) for shape, name, _, faster, *_ in times]
    factors = [factor for factor in factors if factor[-1]]
    for benchmark, shape, name, figure in factors:
        assert f"dense {figure}" in rows(benchmark)[name, shape][7].split("; "), (shape, name)
    assert (len(steps), len(times), len(factors)) == (2, 29, 9 + 42 + 29)
    path = ROOT / "experiments" / "bench_results" / "h200_integers.json"
    section = "How small does it get with integers?"
    told = shown("docs/serving.md", section, r"(?:\d+ -> \d+ )?\| \d")
    want = [
        [str(row["tokens"]), *(f"{row['dense'] / row[k]:.2f}" for k in ("sparse", "int8", "int4"))]
        for row in json.loads(text(path))["rows"]
    ]
    assert [cells[1:] for cells in told] == want
    few: dict[str, dict[str, str]] = {}
    for row in json.loads(text(path.with_name("h200_decode.json")))["benchmarks"]["decode"]["rows"]:
        figure = f"{row['peers']['dense'] / row['ms']:.2f}"
        few.setdefault(row["shape"], {})[row["name"]] = figure
    names = ["1 tokens", *(f"{n} tokens, packed" for n in (8, 16, 32, 64, 128))]
    want = [[shape, *(own[name] for name in names)] for shape, own in few.items()]
    assert shown("docs/serving.md", "Why is it not faster when served?", r"\d+ -> \d+ ") == want
    record = json.loads(text(path.with_name("h200_quantised.json")))["results"]
    for cells in shown("docs/serving.md", section, r"(?:bf16|int8|int4) \| [\d.]+ \| (?:-|0\.)"):
        own = record.pop(cells[0])
        assert cells[1] == f"{own['ppl']:.3f}"
        assert cells[3:] == [f"{own[k] / 1e6:.2f}" for k in ("bytes", "dense_bytes")]
    assert not record
