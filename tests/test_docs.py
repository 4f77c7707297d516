"""Tests that what README.md and the pages of docs/ say holds: links, paths, commands, snippets,
figures."""

import ast
import copy
import importlib.util
import json
import math
import re
import shlex
import statistics
import warnings
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import mkdocs.commands.build
import mkdocs.config
import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from torch.utils.data import DataLoader

import methods
from common_kernels import nm_mask
from experiments.bench.__main__ import parser as bench_parser
from experiments.exporting import semi_structured
from experiments.runs.finished import FinishedRun
from experiments.runs.stats import difference_form, holm, p_value, paired_interval
from experiments.support.checkpoint import sha256
from models.gpt2 import GPT, GPTConfig
from models.vit import ViT, ViTConfig
from reproduce import judge
from reproduce.__main__ import COMMANDS, parse
from reproduce.execute.blocks import BLOCKS, EVIDENCE, read_block
from reproduce.judge.claims import read_claims
from reproduce.judge.scale import gap_closed, half_width_gap
from reproduce.judge.text import worded
from reproduce.judge.verdicts import differences
from reproduce.records import read_evidence
from reproduce.report import page as report_page
from reproduce.report.gather import shown_blocks
from reproduce.specs.table import TABLES, read_tables
from tests.cpu_operators import register_cpu_operators

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / folder / "README.md" for folder in ("methods", "reproduce")),
    *sorted((ROOT / "docs").glob("*.md")),
]
TOP = {path.name for path in ROOT.iterdir()}
LOSS = "metrics.val_loss"
LINEAR, KNN = "metrics.linear_top1", "metrics.knn_top1"


@cache
def text(page):
    return page.read_text(encoding="utf-8")


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), re.S | re.M)


def anchors(page):
    """The names that GitHub gives to the headings of a page."""
    titles = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text(page), flags=re.S | re.M), re.M
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_is_short_and_every_page_is_in_the_index():
    assert len(text(ROOT / "README.md").split()) <= 600
    linked = set(re.findall(r"\]\((\w+\.md)", text(ROOT / "docs" / "index.md")))
    assert linked == {path.name for path in PAGES if path.parent == ROOT / "docs"} - {"index.md"}


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
    config = mkdocs.config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path))
    mkdocs.commands.build.build(config)  # strict: a warning ends it
    assert 'id="common_kernels.pack24"' in text(tmp_path / "api" / "index.html")


SETTINGS = re.compile(r"(experiment|method|model|train)=[\w/]+( (\w+[.])?\w+=[\w.+-]+)*")


def commands():
    """Command lines of blocks and in sentences; settings alone are those of a pre-training."""
    for page in PAGES:
        for block in blocks(page, ""):
            for line in block.replace("\\\n", " ").splitlines():
                if line.split(" ")[0] in ("python", "bash", "torchrun", "echo"):
                    yield page, line
        prose = re.sub(r"^```.*?^```", "", text(page), flags=re.S | re.M)
        for line in re.findall(r"`([^`\n]+)`", prose):
            if line.startswith(("python -m", "python docs")) and "NAME" not in line:
                yield page, line
            elif SETTINGS.fullmatch(line) and not re.search("NAME|FOLDER", line):
                yield page, f"python -m experiments.pretrain {line}"


def test_commands_are_understood():
    tables = read_tables(TABLES)
    checked = 0
    with initialize_config_module("experiments.conf", version_base="1.3"):
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
                    assert arguments[1] == "BLOCK" or (BLOCKS / f"{arguments[1]}.yaml").exists()
                elif (  # `w` stands for the paper that a reader adds
                    arguments[0] not in (*COMMANDS, "--list")
                    and not {"--list", "paper=w"} & {*arguments}
                ):
                    parse(arguments, tables)
            elif module.startswith("reproduce."):
                assert (ROOT / f"{module.replace('.', '/')}.py").exists(), line
            elif module == "experiments.compare":
                assert all("=" in word or word.startswith("runs/") for word in arguments)
            elif module.startswith("experiments."):
                name = module.removeprefix("experiments.")
                assert (ROOT / "experiments" / f"{name}.py").exists(), line
                sweep = "-m" in arguments
                overrides = [word for word in arguments if "=" in word]
                # The launcher of a sweep is an extra; tests/experiments/config/test_cluster.py.
                overrides = [o for o in overrides if not o.startswith(("+cluster=", "hydra."))]
                if sweep:  # composes the first run of a sweep
                    overrides = [re.sub(r"(,.*)$", "", word) for word in overrides]
                if name == "prepare_data":
                    name = "pretrain"
                if name == "generate":  # a text that hydra does not read
                    overrides = [word for word in overrides if not word.startswith("prompt=")]
                compose(name, overrides)
            else:
                assert module in ("pytest", "venv"), line
            checked += 1
    assert checked > 40


# ------------------------------------------------------------------ snippets


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_attention_heads=2, **sizes, **options))


def trainer_arguments(folder, **options):
    from transformers import TrainingArguments

    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(output_dir=str(folder), max_steps=2, **quiet, **options)


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
    """The one python block of own_loop.md whose code begins with `start`."""
    (found,) = (b for b in blocks(ROOT / "docs" / "own_loop.md", "python") if b.startswith(start))
    return found


def trained():
    names = {
        "model": tiny(),
        "steps": 3,
        "accumulate": 2,
        "micro_batches": lambda step: [batch(), batch()],
        "fresh": tiny(),
    }
    exec(snippet("import torch\nimport methods"), names)
    return names


def test_every_snippet_is_run_here():
    counts = {"README.md": 2, "docs/own_loop.md": 14, "docs/methods.md": 2}
    counts |= {"docs/evaluation.md": 2, "docs/serving.md": 1}
    found = {page: len(blocks(page, "python")) for page in PAGES if blocks(page, "python")}
    assert found == {ROOT / name: count for name, count in counts.items()}


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


def test_the_snippets_on_methods_run():
    build, swap = blocks(ROOT / "docs" / "methods.md", "python")
    names = {"methods": methods}
    exec(build, names)
    names["method"].convert(tiny())
    model = ViT(ViTConfig(width=32, depth=1, heads=2, image_size=8, patch_size=4, n_classes=3)).vit
    trained = []
    exec(
        swap, {"model": model, "train": lambda model: trained.append(type(model.blocks[0].mlp.fc1))}
    )
    assert [kind.__name__ for kind in trained] == ["SemiSparseLinear"]
    assert type(model.blocks[0].mlp.fc1) is torch.nn.Linear


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
        names = {"model": tiny(), "method": methods.build("ste")}
        exec(snippet("from torch.distributed.fsdp import"), names)
        method, optimizer = names["method"], names["optimizer"]
        method.on_step_begin(0)
        method.loss(names["model"], batch()).backward()
        optimizer.step()
        method.on_step_end(0)
        for start in ("import torch.distributed.ch", "dcp.load", "from torch.distributed.ch"):
            exec(snippet(start), names)
        weight = names["weights"]["transformer.h.0.mlp.c_fc.weight"]
        assert type(weight) is torch.Tensor and is_24(weight)


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


def test_a_finished_model_is_packed_and_run_as_shown(monkeypatch):
    """On the CPU by stand-ins for torch's operators, in a layout that these take."""
    operators = register_cpu_operators()
    names = {"run": "runs/x", "device": "cpu", "tokens": batch()["input"]}
    model = tiny()
    for layer in (model.transformer.h[0].mlp.c_fc, model.transformer.h[0].mlp.c_proj):
        layer.weight.data *= nm_mask(layer.weight)
    dense = copy.deepcopy(model).bfloat16()
    opened = SimpleNamespace(model=lambda: model)
    monkeypatch.setattr(FinishedRun, "open", lambda run: opened if run == "runs/x" else None)
    monkeypatch.setattr(semi_structured, "layout_for", lambda *_: "cutlass_sm80")
    # The other one is run in tests/experiments/finetuning/test_finetune.py.
    _, code = blocks(ROOT / "docs" / "evaluation.md", "python")
    exec(code, names)
    assert names["names"] == ["transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj"]
    with torch.no_grad():
        want, _ = dense(names["tokens"])
    # Two sums of bf16 products in different orders, behind a norm: some units of 2^-8.
    torch.testing.assert_close(names["logits"].float(), want.float(), rtol=2**-6, atol=2**-6)
    del operators


def test_an_export_is_loaded_and_fine_tuned_under_its_mask_as_shown(tmp_path, capsys):
    """The second by what own_loop.md shows with another method."""
    model, folder = llama(), tmp_path / "export"
    weights = {n: p for n, p in model.named_parameters() if "mlp" in n}
    for weight in weights.values():
        weight.data *= nm_mask(weight)
    model.save_pretrained(folder)
    files = {n: sha256(folder / n) for n in ("config.json", "model.safetensors")}
    record = {"format": "sparse24", "version": 1, "tensors": {}, "files": files}
    (folder / "sparse24.json").write_text(json.dumps(record))
    (code,) = blocks(ROOT / "docs" / "serving.md", "python")
    loaded = {"folder": folder, "device": "cpu"}
    exec(code, loaded)
    assert capsys.readouterr().out == "{}\n"
    same = dict(loaded["model"].named_parameters())
    assert all(torch.equal(same[n], p) for n, p in model.named_parameters())
    (code,) = (b for b in blocks(ROOT / "docs" / "own_loop.md", "python") if "MethodCallback" in b)
    code = re.sub(r'methods\.build\("\w+"', 'methods.build("one_shot"', code)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (8, 16))]
    names = {"arguments": trainer_arguments(tmp_path / "out"), "dataset": rows, "folder": folder}
    exec(code, {**names, "model": model, "method": methods.build("one_shot", total_steps=2)})
    tuned = type(model).from_pretrained(tmp_path / "out")
    for name in weights:
        found = tuned.get_parameter(name)
        assert torch.equal(found != 0, same[name] != 0) and not torch.equal(found, same[name])


def test_what_a_sparse_forward_product_saves_is_that_of_the_record():
    lines = re.findall(
        r"^  \| (\d+ x \d+ -> \d+) \| (\S+) \| (\S+) \|$",
        text(ROOT / "docs" / "evaluation.md"),
        re.M,
    )
    assert len(lines) == 4
    record = json.loads(text(ROOT / "experiments/bench_results/h200.json"))["benchmarks"]["linear"]
    measured = {row["shape"]: row for row in record["rows"] if row["name"] == "ste"}
    for shape, dense, ste in lines:  # of one run
        assert f"{measured[shape]['peers']['dense']:.3g}" == dense
        assert f"{measured[shape]['figures']['products ms']:.3g}" == ste
    memory = rows("memory")["s_ste", "linear 8192 x 8192 -> 28672"]
    assert "weights MiB 448;" in memory[4] and "packed MiB 252;" in memory[4]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fst", {"refresh_every": 2, "dense_fraction": 0.3, "alpha": 1e-2}),
        ("ast", {}),
        ("slope", {"adapter_rank": 2, "adapter_fraction": 0.5}),
    ],
)
def test_lightning_trains_as_the_loop_does(name, options):
    """With gradients that are clipped and accumulated, but in the last step, in which data end."""
    lightning = pytest.importorskip("pytorch_lightning")
    names = {}
    exec(snippet("import pytorch_lightning"), names)
    rows = torch.randint(0, 32, (5, 4, 17), generator=torch.Generator().manual_seed(0))
    batches = [{"input": row[:, :-1], "target": row[:, 1:]} for row in rows]
    found = []
    for alone in (True, False):
        torch.manual_seed(0)
        model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=32, block_size=16))
        method = methods.build(name, total_steps=3, **options)
        method.convert(model)
        found.append((model, method))
        if not alone:
            quiet = ("logger", "enable_checkpointing", "enable_progress_bar")
            trainer = lightning.Trainer(
                max_steps=3, accumulate_grad_batches=2, gradient_clip_val=1.0, accelerator="cpu",
                enable_model_summary=False, **dict.fromkeys(quiet, False),
            )  # fmt: skip
            trainer.fit(names["Sparse"](model, method), DataLoader(batches, batch_size=None))
            continue
        optimizer = method.optimizer(model.parameters(), lr=1e-3)
        for step in range(3):
            method.on_step_begin(step)
            for batch in batches[2 * step : 2 * step + 2]:
                (method.loss(model, batch) / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            method.on_gradients(step, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            method.on_step_end(step)
    (model, method), (other, its) = found
    assert all(
        torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True)
    )
    assert method.metrics() == its.metrics()


def test_a_model_of_transformers_is_trained_as_shown(tmp_path):
    for page in ("README.md", "docs/own_loop.md"):
        (code,) = (b for b in blocks(ROOT / page, "python") if "MethodCallback" in b)
        model = llama(max_position_embeddings=16)
        model.save_pretrained(tmp_path / "model")
        names = {
            "arguments": trainer_arguments(tmp_path / "out", per_device_train_batch_size=4),
            "dataset": [{"input_ids": r, "labels": r} for r in torch.randint(0, 32, (8, 16))],
            "folder": tmp_path / "model",
            "model": model,
            "method": methods.build("s_ste", total_steps=2),
        }
        exec(code, names)
        stored = type(model).from_pretrained(tmp_path / "out")
        assert is_24(stored.model.layers[0].mlp.up_proj.weight)


# ------------------------------------------------------------------ what is quoted


def test_the_configuration_reference_is_up_to_date():
    """If not: `python docs/make_configuration.py`."""
    path = ROOT / "docs" / "make_configuration.py"
    spec = importlib.util.spec_from_file_location("make_configuration", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert text(module.PAGE) == module.page()


def test_two_paths_through_the_code_are_short_and_lead_through_what_they_name():
    page = text(ROOT / "docs" / "architecture.md")
    for heading in ("From a yaml to a kernel", "From a spec to a table"):
        part = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        items = re.findall(r"^\d\. `(\S+)`: (.*?)(?=^\d\. |\Z)", part, re.S | re.M)
        assert len(items) == (6 if "table" in heading else 8)
        for name, told in items:
            content = text(ROOT / name)
            for word in re.findall(r"`(\w+)`", told):
                assert re.search(rf"\b{word}\b", content), (name, word)


@cache
def messages():
    """The texts in the source, with `…` for what is put in."""
    found = []
    for package in ("common_kernels", "methods", "models", "experiments", "reproduce"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def test_the_quoted_errors_are_those_of_the_source():
    page = ROOT / "docs" / "troubleshooting.md"
    quoted = [title.replace("\\`", "`") for title in re.findall(r"^### `(.*)`$", text(page), re.M)]
    assert len(quoted) > 25
    for message in quoted:
        words = [part for part in message.split("…") if part.strip()]
        pattern = re.compile(".*".join(map(re.escape, words)), re.S)
        assert any(pattern.search(source) for source in messages()), message


@cache
def rows(benchmark):
    record = (ROOT / "experiments" / "bench_results" / "h200.md").read_text(encoding="utf-8")
    part = record.split(f"\n## {benchmark}\n")[1].split("\n## ")[0]
    cells = [
        [c.strip() for c in line.split("|")[1:-1]] for line in part.splitlines() if "|" in line
    ]
    return {(row[0], row[2]): row for row in cells}


@pytest.mark.parametrize("page", ["README.md", "docs/speed.md"])
def test_speedups_are_those_of_the_record(page):
    found = text(ROOT / page)
    header = re.search(r"^\| tokens x in -> out \|(.*)\|$", found, re.M)[1]
    names = re.findall(r"`([^`]+)`", header)
    lines = re.findall(r"^\| (\d+ x \d+ -> \d+) \|(.*)\|$", found, re.M)
    assert lines
    for shape, figures in lines:
        for name, figure in zip(names, figures.split("|"), strict=True):
            peer = rows("linear")[name, shape][7]
            assert f"dense {figure.strip()}" in peer.split("; "), (shape, name)


def test_step_times_are_those_of_the_record():
    page = text(ROOT / "docs" / "speed.md").split("## Step times")[1].split("\n## ")[0]
    lines = re.findall(r"^\| ((?:GPT-2|ViT|SAM|6 blocks).*)\|$", page, re.M)
    assert len(lines) == 29
    for line in lines:
        shape, name, *figures, peak = (cell.strip() for cell in line.split("|"))
        launched, faster, graphs, faster_in_graphs = figures
        row = rows("train")[name, shape]
        assert row[4] == launched
        assert f"dense {faster}" in row[7].split("; ")
        found = row[8].split("; ")
        assert {f"step in CUDA graphs ms {graphs}", f"peak MiB {peak}"} <= {*found}
        shown = next(f for f in found if f.startswith("in graphs, times as fast as dense"))
        assert float(shown.split()[-1]) == pytest.approx(float(faster_in_graphs), abs=0.0051)


@cache
def evidence():
    """The claims' rules and the committed records."""
    return read_claims(), read_evidence(EVIDENCE)


def part(heading):
    """A part of the page on evidence, in which line breaks are spaces except before a table."""
    page = text(ROOT / "docs" / "evidence.md").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.sub(r"\n(?=[^|\n-])", " ", page)


def compared(block, variant, against):
    """The mean difference of two variants as `claims` writes it, with its interval."""
    found = differences(evidence()[1].values, block, variant, against, LOSS)
    effect, (low, high) = statistics.fmean(found), paired_interval(found)
    form = difference_form(effect, low, high)
    return f"{effect:{form}} [{low:{form}}, {high:{form}}]"


def points(block, variant, against, metric):
    """The mean difference of two variants in points of accuracy, with its interval."""
    found = differences(evidence()[1].values, block, variant, against, metric)
    low, high = paired_interval(found)
    return f"{statistics.fmean(found):+.2f} [{low:+.2f}, {high:+.2f}]"


def test_the_differences_and_the_figure_are_those_of_the_records(tmp_path):
    """If not: the tables of docs/evidence.md by hand, the figure by the command there."""
    told = part("Measured so far").split("Block c: ")[0]
    rules, records = evidence()
    by_name = {s.block.name: s for s in shown_blocks(rules, records, {"claims": []})}
    main, other = by_name[report_page.MAIN], by_name["b"]

    def cell(row):
        return f"{row.difference:+.4f} [{row.low:+.4f}, {row.high:+.4f}]"

    def sorted_rows(shown, variants):
        return sorted((shown.rows[variant] for variant in variants), key=lambda row: row.difference)

    want = []
    for row in sorted_rows(main, set(main.leading) - {main.baseline}):
        g = gap_closed(records.values, "a", row.label, main.metric, rules.margin, rules.seeds)
        share = "1" if row.label == "half" else f"{g.value:.2f} [{g.low:.2f}, {g.high:.2f}]"
        want.append((row.label, cell(row), share, str(row.pairs)))
    assert want == re.findall(r"^\| `(\w+)` \| .*? \| (\+.*?) \| (\d.*) \| (\d) \|$", told, re.M)
    of_b = told.split("Block b: ")[1]
    found = re.findall(r"^\| `(\w+)` \| [^|]* \| (\+[^|]*) \| (\d) \|$", of_b, re.M)
    rows = sorted_rows(other, [variant for variant, *_ in found])
    assert found == [(row.label, cell(row), str(row.pairs)) for row in rows]
    assert other.baseline == "dense_trained_on" and {"ast", "naive", "gmp"} < {x for x, *_ in found}
    report_page.write_figure(tmp_path / "figure.svg")
    figures = ROOT / "reproduce" / "report" / "figure.svg", tmp_path / "figure.svg"
    kept, drawn = (re.findall(r'aria-label="(.*?)"', text(path)) for path in figures)
    assert drawn == kept and len(kept) == 1  # coordinates may differ between matplotlib's versions
    short = text(ROOT / "README.md").split("Measured (")[1].split("\n## ")[0]
    groups = re.findall(r"((?:`\w+`(?:,? and |, )?)+(?:half the width)?)[\w ]* (0\.\d\d)", short)
    variants = {"fst": "fst", "one_shot": "naive"}
    for names, rounded in groups:
        for name in re.findall(r"`(\w+)`", names) + ["half"] * ("half" in names):
            variant = variants.get(name, name)
            row = other.rows[variant] if variant in ("ast", "naive") else main.rows[variant]
            assert (f"{row.difference:.2f}", row.pairs) == (rounded, 5), name
    assert len(groups) == 3


def test_the_variants_beside_half_the_width_are_where_their_intervals_put_them():
    rules, records = evidence()
    shown = shown_blocks(rules, records, {"claims": []})
    (main,) = (s for s in shown if s.block.name == report_page.MAIN)
    where = {"better than `half`": set(), "no difference shown": set(), "worse": set()}
    for variant in set(main.leading) - {"dense", "half", "shallow"}:
        assert main.rows[variant].low > 0
        g = gap_closed(records.values, "a", variant, main.metric, rules.margin, rules.seeds)
        name = (
            "worse" if g.low > 1 else "better than `half`" if g.high < 1 else "no difference shown"
        )
        where[name].add(variant)
    words = part("What the evidence says")
    told = re.findall(r"^- (.*?): (`.*)$", words, re.M)
    assert {name: set(re.findall(r"`(\w+)`", variants)) for name, variants in told} == where
    variants = sorted(set().union(*where.values()))
    to_half = [
        differences(records.values, "a", variant, "half", main.metric) for variant in variants
    ]
    adjusted = dict(zip(variants, holm([p_value(found) for found in to_half]), strict=True))
    left = [variant for variant in variants if adjusted[variant] < rules.level]
    assert left == ["s_ste", "semi_sparse", "ste"] and len(variants) == 8
    assert "After Holm's correction for the eight only" in words


def test_what_is_said_of_the_claims_is_what_the_records_say():
    rules, records = evidence()
    claims = judge.content(rules, records.values)["claims"]
    told = part("What the evidence says")
    comparison = re.compile(r"(?:([cd]): )?`(\w+)` - `(\w+)` ([+-][\d.]+ \[[^]]*\])")
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (.*?) \| ([^|]+) \|$", told, re.M)
    assert [(int(row[0]), row[-1]) for row in rows] == [(c["id"], worded(c)) for c in claims]
    assert all(c["without"].endswith(c["verdict"]) for c in claims if c["without"])
    for claim, (_, words, measured, _) in zip(claims, rows, strict=True):
        assert not re.search(r"\d\.\d", words)
        pairs = [(c["block"], c["variant"], c["against"]) for c in claim["contrasts"]]
        found = comparison.findall(measured)
        marked = {(b if b in "cd" else "", *pair) for b, *pair in pairs}
        assert {(mark, variant, against) for mark, variant, against, _ in found} <= marked
        assert found or not pairs
        factors = set()
        for lines in (m["lines"] for m in claim["measured"]):
            whose = ("effect", "published")
            ends = [[x[who] for x in lines if x[who] is not None] for who in whose]
            factors.add(tuple(" to ".join(dict.fromkeys(f"{end:.3f}" for end in (min(x), max(x))))
                              for x in ends if x))  # fmt: skip
        read = re.findall(r"\w+: ([\d. to]+), paper ([\d. to]+\d)", measured)
        assert {*read} <= factors and bool(read) == bool(claim["measured"])
        assert measured == "-" or len(measured.split("; ")) == len(found) + len(read)
    for mark, variant, against, effect in comparison.findall(told):
        block = mark or ("a" if ("a", variant) in records.kept else "b")
        want = (
            points("d", variant, against, LINEAR)
            if block == "d"
            else compared(block, variant, against)
        )
        assert effect == want, (variant, against)
    (slow,) = ([x for m in c["measured"] for x in m["lines"]] for c in claims if c["id"] == 4)
    less = [x["label"] for x in slow if x["verdict"] in ("not reproduced", "direction only")]
    assert {re.search(r"d=(\d+)", label)[1] for label in less} == {"768", "1024"}
    told = part("Claims")
    (gap,) = (g for g in judge.content(rules, records.values)["blocks"] if g["block"] == "a")
    assert f"Block a has {gap['ratio']:.1f} ({gap['other_ratio']:.1f} if" in told


def test_what_is_said_of_single_runs_and_fp8_is_what_the_records_say():
    _, records = evidence()
    told, values = part("Measured so far"), records.values
    *others, unstable = (values["a", "fst"][seed]["metrics"]["val_loss"] for seed in range(5))
    ends = f"{min(others):.3f} to {max(others):.3f}"
    assert f"ended at {unstable:.3f}; the other four ended at {ends}" in told
    in_b = {(variant, seed): run for (name, variant), runs in values.items() if name == "b"
            for seed, run in runs.items()}  # fmt: skip
    unpaired = {key for key, run in in_b.items() if run["init"] != in_b["ast", key[1]]["init"]}
    assert unpaired == {("imp", 2), ("ast_as_released", 2)}
    pairs = [(variant, variant.partition("_fp8")[0]) for block, variant in values if block == "fp8"]
    fp8 = [
        differences(values, "fp8", *pair, "metrics.val_loss") for pair in pairs if len({*pair}) > 1
    ]
    means = sorted(map(statistics.fmean, fp8))
    intervals = [paired_interval(found) for found in fp8]
    low, high = math.floor(100 * means[0]) / 100, math.ceil(100 * means[-1]) / 100
    assert f"lie between {low:+.2f} and {high:+.2f} nats" in told
    assert len(fp8) == 10 and {len(found) for found in fp8} == {3}
    assert all(low < 0 < high for low, high in intervals)
    reach = sorted((high - low) / 2 for low, high in intervals)
    assert f"reach {reach[0]:.2f} to {reach[-1]:.2f} to either side" in told


def test_what_is_said_of_the_noise_of_block_a_is_what_the_records_say():
    """A two-way model: what is left of a loss after the means of its variant and of its seed."""
    _, records = evidence()
    variants = {variant: runs for (block, variant), runs in records.values.items()
            if block == "a" and not variant.endswith("as_released")}  # fmt: skip

    def left(of):
        values = np.array([[of(runs[seed]) for seed in range(5)] for runs in variants.values()])
        return values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()

    end = left(lambda run: run["metrics"]["val_loss"])
    early = left(lambda run: dict(map(tuple, run["curves"]["val_loss"]))[1750])
    shared = math.sqrt((end**2).sum() / (4 * (len(variants) - 1)))
    told = part("Measured so far")
    correlation = np.corrcoef(end.ravel(), early.ravel())[0, 1]
    assert (
        f"correlates by {correlation:.2f} with that at the end ({len(variants)} variants)" in told
    )
    assert f"one two-way model over the block ({shared:.4f} nats)" in told
    names = ("bi_mask", "s_ste", "sr_ste", "slope", "fst", "ste", "step", "semi_sparse")
    means = [statistics.fmean(differences(records.values, "a", n, "half", LOSS)) for n in names]
    ps = [math.erfc(abs(mean) / shared / math.sqrt(2 * 2 / 5)) for mean in means]  # 128 degrees
    assert [p < 0.05 for p in ps[:5]] == [True] * 3 + [False] * 2
    assert [p < 0.05 for p in holm(ps)[:5]] == [True] * 2 + [False] * 3


def test_what_a_loss_is_worth_is_what_the_records_say():
    """By the rule in e1.yaml, anew from the records."""
    from scipy.optimize import curve_fit

    _, records = evidence()

    def losses(block, variant, metric="val_loss"):
        runs = records.values[block, variant]
        return np.array([runs[seed]["metrics"][metric] for seed in sorted(runs)])

    widths = {0.25: "width_025", 0.5: "half", 0.75: "width_075", 1.0: "dense"}
    lengths = {0.5: "tokens_050", 0.71: "tokens_071", 1.0: "dense", 1.41: "tokens_141"}
    by = [
        {x: losses("e1" if "_" in variant else "a", variant) for x, variant in variants.items()}
        for variants in (widths, lengths)
    ]
    fixed, share = 4 * 4 * 256**2 + 9 * 256, 4 * 8 * 256**2  # attention and norms; feed-forward
    sizes = [fixed + share * w for w in widths] + [fixed + share] * 3
    tokens = [1.0] * 4 + [0.5, 0.71, 1.41]
    runs = [*by[0].values(), *(by[1][x] for x in tokens[4:])]
    means = np.array([x.mean() for x in runs])
    n, d = np.array(sizes) / (fixed + share), np.array(tokens)

    def law(_, e, a, k, b, m):
        return e + a * n**-k + b * d**-m

    found, _ = curve_fit(law, n, means, (2.2, 0.1, 1, 0.2, 1.3))
    errors = np.array([x.std(ddof=1) / math.sqrt(5) for x in runs])
    far = np.abs(law(n, *found) - means) > 2 * errors
    assert [d[i] for i in np.flatnonzero(far)] == [0.71]
    told = part("Measured so far").split("Block e1: ")[1].split("Block a_large: ")[0]
    assert f"exponents ({found[2]:.1f} and {found[4]:.1f})" in told
    for one in by:
        *first, last = (f"{x.mean():.3f}" for x in one.values())
        assert f"{', '.join(first)} and {last}" in told

    def read(known, loss, seeds):
        points = sorted((float(x[seeds].mean()), -math.log(k)) for k, x in known.items())
        return math.exp(-np.interp(loss, *zip(*points, strict=True)))

    draws = np.random.default_rng(0).integers(0, 5, (2000, 5))
    by[0] = {(fixed + share * w) / share: x for w, x in by[0].items()}
    for variant, *cells in re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \|$", told, re.M):
        own = losses("a", variant)
        for known, less, cell in zip(by, (fixed / share, 0), cells, strict=True):
            value, *many = (read(known, own[s].mean(), s) - less for s in (slice(5), *draws))
            low, high = np.quantile(many, [0.025, 0.975])
            assert cell == f"{value:.2f} [{low:.2f}, {high:.2f}]"

    variants = [("", "val_loss"), ("", "ema_val_loss"), ("_zero", "val_loss")]
    variants += [("_deterministic", "val_loss")]
    spreads = [
        (losses("e2", f"half{v}", m) - losses("e2", f"dense{v}", m)).std(ddof=1)
        for v, m in variants
    ]
    pairs = [
        [losses("e2_again", f"{k}{v}", m) - losses("e2", f"{k}{v}", m) for k in ("dense", "half")]
        for v, m in variants
    ]
    spreads += [np.sqrt(np.mean(np.square(pair))) for pair in pairs[:-1]]
    assert all(f"{spread:.4f}" in told.split("Block e2")[1] for spread in spreads)
    assert not np.any(pairs[-1])  # with deterministic kernels


def test_what_is_said_of_block_a_large_is_what_the_records_say():
    rules, records = evidence()
    told = part("Measured so far").split("Block a_large: ")[1].split("Block b: ")[0]
    variants = [variant for variant in read_block("a_large").variants if variant != "dense"]
    assert (
        variants
        == [variant for variant in read_block("a").variants if variant != "dense"][: len(variants)]
    )

    def lost(variant):
        return differences(records.values, "a_large", variant, "dense", LOSS)

    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \| (\d) \|$", told, re.M)
    assert rows == [
        (
            variant,
            *(compared(b, variant, "dense") for b in ("a_large", "a")),
            str(len(lost(variant))),
        )
        for variant in sorted(variants, key=lambda variant: statistics.fmean(lost(variant)))
    ]
    flat = " ".join(told.split())

    def against(variant, other):
        return paired_interval(differences(records.values, "a_large", variant, other, LOSS))

    alike = ("ste", "s_ste", "sr_ste")
    assert all(low < 0 < high for low, high in (against(variant, "half") for variant in alike))
    gaps = [differences(records.values, "a_large", variant, "half", LOSS) for variant in alike]
    most = max(abs(statistics.fmean(gap)) for gap in gaps)
    assert f"by at most {most:.4f}, with intervals that include zero" in flat
    assert f"`fst` is worse by {compared('a_large', 'fst', 'half')}" in flat
    others = [*alike, "fst"]
    assert all(against("slope", variant)[0] > 0 for variant in others)
    behind = [differences(records.values, "a_large", "slope", variant, LOSS) for variant in others]
    behind = [statistics.fmean(each) for each in behind]
    assert (
        f"it loses {min(behind):+.4f} to {max(behind):+.4f} to each of the four other methods"
        in flat
    )
    gap = half_width_gap(records.values, "a_large", LOSS, rules.margin)
    assert f"is {gap['ratio']:.1f} standard deviations of a paired difference" in flat
    a = half_width_gap(records.values, "a", LOSS, rules.margin)
    assert 0.3 < gap["gap"] / a["gap"] < 0.37


def test_what_is_said_of_block_c_is_what_the_records_say():
    rules, records = evidence()
    told, variants = (
        part("Measured so far"),
        [variant for variant in read_block("c").variants if variant != "dense"],
    )

    def lost(variant):
        return statistics.fmean(differences(records.values, "c", variant, "dense", LOSS))

    want = []
    for variant in sorted(variants, key=lost):
        seeds = str(len(records.values["c", variant]))
        top1 = points("c", variant, "dense", "metrics.val_top1")
        want.append((variant, compared("c", variant, "dense"), top1, seeds))
    cells = r"^\| `(\w+)` \| [^|]* \| (\+[^|]*) \| (-[^|]*) \| (\d) \|$"
    assert re.findall(cells, told, re.M) == want
    dense = [run["metrics"]["val_top1"] for run in records.values["c", "dense"].values()]
    assert f"dense reaches {statistics.fmean(dense):.2f} %" in told
    gap = half_width_gap(records.values, "c", LOSS, rules.margin)
    words = f"{gap['gap']:.3f} nats, {gap['ratio']:.1f} standard deviations"
    assert f"half the width costs {words}" in told
    scale = compared("c", "s_ste_soft", "s_ste_no_mvue")
    assert f"`s_ste_soft` ends {scale} above `s_ste_no_mvue`" in told
    to_half = {variant: paired_interval(differences(records.values, "c", variant, "half", LOSS))
               for variant in ("s_ste", "sr_ste", "fst", "bi_mask", "ste", "step")}  # fmt: skip
    assert {variant for variant, (low, _) in to_half.items() if low > 0} == {"ste"}
    assert all(high > 0 for _, high in to_half.values())
    to_s_ste = {variant: paired_interval(differences(records.values, "c", variant, "s_ste", LOSS))
                for variant in ("sr_ste", "fst", "bi_mask", "ste")}  # fmt: skip
    assert [variant for variant, (low, high) in to_s_ste.items() if low < 0 < high] == [
        "sr_ste",
        "fst",
    ]


def test_what_is_said_of_block_d_is_what_the_records_say():
    _, records = evidence()
    told, variants = (
        part("Measured so far"),
        [variant for variant in read_block("d").variants if variant != "dense"],
    )
    told = told.split("Block d: ")[1]

    def lost(variant):
        return differences(records.values, "d", variant, "dense", LINEAR)

    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \| (\d) \|$", told, re.M)
    assert rows == [
        (
            variant,
            *(points("d", variant, "dense", metric) for metric in (LINEAR, KNN)),
            str(len(lost(variant))),
        )
        for variant in sorted(variants, key=lambda variant: -statistics.fmean(lost(variant)))
    ]
    dense = records.values["d", "dense"].values()
    linear, knn = (
        statistics.fmean(run["metrics"][name] for run in dense)
        for name in ("linear_top1", "knn_top1")
    )
    assert f"dense reaches {linear:.2f} % and {knn:.2f} %" in told
    adjusted = dict(
        zip(variants, holm([p_value(lost(variant)) for variant in variants]), strict=True)
    )
    assert [variant for variant in variants if adjusted[variant] < 0.05] == ["sparse_090"] and len(
        variants
    ) == 7
    words = part("What the evidence says")
    loss = f"{-statistics.fmean(lost('sparse_090')):.1f} points"
    assert f"`sparse_090`, which becomes dense after 90 % of the steps, loses {loss}" in words
    theirs = {
        cell["row"][:3]: f"{cell['value']:.1f} %"
        for cell in json.loads(text(ROOT / "reproduce/specs/published.json"))["cells"]
        if cell["table"] == "DINOv2 ViT-L ImageNet-1k accuracy"
    }
    assert f"has the same order: {theirs['90%']} against {theirs['100']}, one run each" in words
    assert theirs["70%"] == theirs["80%"] == "82.7 %" and "those of 70 and 80 % (82.7 %)" in told
    by_sparse = differences(records.values, "d", "sparse_090", "sparse_100", LINEAR)
    assert round(statistics.fmean(by_sparse), 1) == round(statistics.fmean(lost("sparse_090")), 1)
    assert p_value(by_sparse) < 0.05
    widths = [f"{width} width 32 slow teacher" for width in ("half", "dense")]
    small = differences(records.values, "pilot_d_small", *widths, LINEAR)
    ratio = -statistics.fmean(small) / statistics.stdev(small)
    found = points("pilot_d_small", *widths, LINEAR)
    assert f"difference is {found} points, {ratio:.1f} standard deviations" in told
    dense_run = next(run for run in read_block("d").runs(ROOT) if run.variant == "dense")
    assert (dense_run.config.model.width, len(small)) == (128, 3)


def test_how_much_two_runs_of_one_seed_differ():
    again = json.loads(text(EVIDENCE / "repeated_a.json"))["val_loss"]
    records = map(json.loads, text(EVIDENCE / "a.jsonl").splitlines())
    losses = {(r["variant"], r["seed"]): r["metrics"]["val_loss"] for r in records}
    for name, (first, _) in again.items():
        variant, seed = name.split("-seed")
        assert first == losses[variant, int(seed)]
    of_methods = [pair for name, pair in again.items() if "as_released" not in name]
    spread = math.sqrt(statistics.fmean((second - first) ** 2 for first, second in of_methods))
    variants = {variant for variant, _ in losses if "as_released" not in variant} - {"dense"}
    seeds = {variant: [seed for name, seed in losses if name == variant] for variant in variants}
    paired = [
        [losses[variant, s] - losses["dense", s] for s in seeds[variant]] for variant in variants
    ]
    median = statistics.median(map(statistics.stdev, paired))
    told = " ".join(text(ROOT / "docs" / "evidence.md").split())
    assert f"{len(again)} runs of block a were made twice" in told
    assert f'the {len(of_methods)} that are not "as released" the two losses differ by' in told
    assert f"by {spread:.4f} nats (root mean square)" in told
    assert f"the same standard deviation, a median of {median:.4f} over the variants" in told
    launched = json.loads(text(EVIDENCE / "launched_a.json"))["val_loss"]
    assert len(launched) == 4 and "lowest and the highest of four that were launched" in told
    assert all(min(launched) < loss < max(launched) for loss in again["dense-seed3"])


def test_the_citation_and_the_hooks_are_valid():
    from omegaconf import OmegaConf

    citation = OmegaConf.to_container(OmegaConf.load(ROOT / "CITATION.cff"))
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert (citation["title"], citation["version"]) == ("sparse24", version)
    hooks = OmegaConf.to_container(OmegaConf.load(ROOT / ".pre-commit-config.yaml"))
    entries = [hook["entry"] for hook in hooks["repos"][0]["hooks"]]
    script = (ROOT / "tests" / "run.sh").read_text(encoding="utf-8")
    checks = re.findall(r'^ *check "\$bin/(.*)$', script, re.M)
    assert entries == [check.replace('"', "") for check in checks]
