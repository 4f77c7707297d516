"""Tests that every method must pass; a new file in methods/ is tested without being named here.

Combinations of options are listed in VARIANTS; a method that is not there runs with its
defaults.
"""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

import methods
from common_kernels import check24
from methods import act24, ast, bi_mask, fst
from methods.nn import lowrank, phases
from methods.nn.linear import SparseLinear
from models.gpt2 import GPT, GPTConfig
from tests.methods.loop import Parts, training_step

STEPS, SEQUENCES, BLOCK = 4, 8, 16
TINY = GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=32, block_size=BLOCK, bias=True)

VARIANTS = {  # each value of an option, most with another option's
    "act24": [{}, {"dense_fraction": 0.5, "dense_features": 0.0}, {"fp8": "hopper"}],
    "ast": [
        {},
        {"decay_route": "gradient", "alpha": 1e-2, "refresh_every": 2, "metric": "wanda"},
        {"decay_route": "decoupled", "alpha": 1.0, "refresh_every": 0, "divergence": "reverse"},
        {"slorb_k": 4, "refresh_every": 3},
        {"slorb_k": 8, "slorb_train_x": False, "dense_columns": 0.25},
    ],
    "bi_mask": [{"alpha": 1e-2, "permute_every": 2, "candidates": 8}],
    "cast": [{"refresh_every": 2, "decay": 1.0}],
    "one_shot": [
        {},
        {"metric": "sparsegpt", "dense_columns": 0.25},
        {"metric": "proxsparse", "mask_steps": 2, "permute": True},
        {"metric": "maskllm", "mask_steps": 2, "prior": "magnitude"},
    ],
    "projected": [{"healing_fraction": 0.5}],
    "semi_sparse": [
        {},
        {"algorithm": "exact", "refresh_every": 2, "sparse_fraction": 0.5},
        {"mode": "activation", "sparse_fraction": 0.5},
    ],
    "ste": [{}, {"dense_columns": 0.25}],
    "step": [{"min_fraction": 0.34, "max_fraction": 0.34}],
    "ternary": [{}, {"activation_bits": 0}, {"activation_bits": 0, "sparse": False}],
    "fst": [
        {},
        {"alpha": 1e-2, "refresh_every": 2, "dense_fraction": 0.5},
        {"dense_fraction": 0.0, "mvue": "off", "refresh_every": 1},
    ],
    "sr_ste": [
        {"alpha": 1e-2},
        {"alpha": 1e-2, "decay_on": "weights"},
        {"alpha": 1e-2, "prune_gradient": True, "dense_columns": 0.5},
    ],
    "s_ste": [
        {},
        {"fp8": "paper", "mvue_weight": True},
        {"fp8": "hybrid", "mvue": "sequential", "beta": "mse_dynamic"},
        {"fp8": "hopper_delayed"},
    ],
    "slope": [
        {},
        {"n": 1, "m": 2, "mask": "magnitude", "column_refresh": 2},
        {"n": 2, "m": 8, "column_refresh": 0},
        {"adapter_rank": 4, "adapter_fraction": 0.5},
        {"fp8": "hopper_delayed", "adapter_rank": 2, "adapter_fraction": 0.5},
    ],
}
CASES = [
    pytest.param(name, options, id="-".join([name, *map(str, options.values())]))
    for name in methods.available()
    for options in VARIANTS.get(name, [{}])
]
every_method = pytest.mark.parametrize(("name", "options"), CASES)


def mostly_in_all(cases, kept):
    """Parametrization over the cases; `run.sh` alone runs those whose ids are kept."""
    marks = {True: (), False: pytest.mark.extra}
    cases = [pytest.param(*c.values, id=c.id, marks=marks[c.id in kept]) for c in cases]
    return pytest.mark.parametrize(("name", "options"), cases)


def chosen(request, *tests):
    """The cases that this session runs of some tests of the file that asks."""
    items = [item for item in request.session.items if item.path == request.path]
    ids = {item.callspec.id for item in items if item.originalname in tests}
    return [case for case in CASES if case.id in ids]


# Of each method one case for what takes several processes: that in which most happens.
ONE_EACH = {
    *(name for name in methods.available() if name not in VARIANTS),
    *("act24-0.5-0.0", "ast-4-3", "bi_mask-0.01-2-8", "cast-2-1.0", "fst-0.01-2-0.5"),
    *("one_shot-proxsparse-2-True", "ste-0.25"),
    *("projected-0.5", "s_ste-hopper_delayed", "s_ste", "semi_sparse-exact-2-0.5"),
    *("slope-4-0.5-True", "sr_ste-0.01", "step-0.34-0.34", "ternary"),
}


class Run(Parts):
    """A model, its method and its optimizer, trained on batches that follow from the step."""

    shape = TINY

    def __init__(self, name, options, seed=0):
        torch.manual_seed(seed)
        self.model = model_for(name, self.shape)
        self.method = build(name, self.model, measure_every=1, **options)
        self.report = self.method.convert(self.model)
        groups = self.model.param_groups(0.1)
        self.optimizer = self.method.optimizer(groups, lr=1e-2)

    def step(self, step, parts=1, runner=None, share=slice(None)):
        with training_step(self.method, step, self.optimizer):
            losses = []
            for micro in batch(step).chunk(parts):
                micro = micro[share]
                loss = self.method.loss(
                    self.model if runner is None else runner,
                    {"input": micro[:, :-1], "target": micro[:, 1:]},
                )
                (loss / parts).backward()
                losses.append(loss.item())
            named = self.model.named_parameters()
            self.gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return sum(losses) / parts


def model_for(name, shape=TINY):
    """A GPT-2, with the activation that the method needs."""
    return GPT(replace(shape, gelu="relu2") if name == "act24" else shape)


def build(name, model, **options):
    """The method, with calibration data if it asks for some."""
    method = methods.build(name, include="ffn", total_steps=STEPS, **options)
    if method.capabilities.calibration_sequences:
        method.calibrate(model, [{"input": batch(99)[:, :-1], "target": batch(99)[:, 1:]}])
    return method


def rounds_inputs(run):
    """True if its layers multiply other inputs than they get, in evaluation, too."""
    return bool(getattr(run.method.config, "activation_bits", 0))


def adapters(options):
    """Last names of parameters that sleep in the first phase; with them, not all ends plain."""
    return {"left", "right"} if options.get("adapter_rank") else set()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, TINY.vocab_size, (SEQUENCES, BLOCK + 1), generator=generator)


@every_method
def test_a_training_is_resumed_copied_and_ended(name, options):
    """Each step from a saved state and one in a copy is that of the training, to the last bit."""
    run, types = Run(name, options), {n: type(m) for n, m in model_for(name).named_modules()}
    names = run.report.names
    assert len(names) == 2 * TINY.n_layer and all("mlp" in n for n in names)
    for module_name, module in run.model.named_modules():
        assert module_name in names or type(module) is types[module_name]
    before = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    states, losses, metrics = [run.state()], [], []
    for step in range(STEPS):
        twin = copy.deepcopy(run) if step == 1 else None
        losses.append(run.step(step))
        metrics.append(run.method.metrics())
        states.append(run.state())
        if step == 0:
            still = [n for n, p in run.model.named_parameters() if torch.equal(p, before[n])]
            assert {n.rpartition(".")[2] for n in still} == adapters(options)
            # A plain linear neither prunes nor rounds its inputs.
            if "mode" not in options and not rounds_inputs(run):
                assert_evaluation_is_that_of_the_end(copy.deepcopy(run))
        if twin:
            assert twin.step(step) == losses[step]
            pairs = zip(run.model.parameters(), twin.model.parameters(), strict=True)
            assert all(a is not b and torch.equal(a, b) for a, b in pairs)
    resumed = Run(name, options, seed=99)
    for step in reversed(range(1, STEPS)):  # back over the changes of phase
        resumed.load(copy.deepcopy(states[step]))  # optimizers do not copy what they load
        assert resumed.method.phase() == metrics[step - 1]["phase"]
        assert resumed.step(step) == losses[step]
        assert resumed.method.metrics() == metrics[step]
        assert_same_states(resumed.state(), states[step + 1])
    assert_ends_plain(run, options)


def assert_same_states(found, wanted):
    """Equal to the last bit."""
    (one, kinds), (other, wanted_kinds) = tree_flatten(found), tree_flatten(wanted)
    assert kinds == wanted_kinds
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def assert_evaluation_is_that_of_the_end(run):
    run.model.eval()
    with torch.no_grad():
        before, _ = run.model(batch(1)[:, :-1])
        after, _ = run.method.finalize(run.model)(batch(1)[:, :-1])
    assert torch.equal(before, after)


def ends_dense_now(run):
    """True in a dense phase, and if the weights never are sparse."""
    return run.method.phase() == "dense" or isinstance(run.method, act24.Method)


def assert_ends_plain(run, options):
    """With plain linears, legal groups and no state of the method's."""
    names, ends_dense = run.report.names, ends_dense_now(run)
    if run.method.sparse_layers:
        with pytest.raises(ValueError, match=r"is still converted: call method\.finalize"):
            methods.check(run.model)
    run.method.finalize(run.model)
    assert not any(isinstance(m, SparseLinear) for m in run.model.modules())
    if not adapters(options) and "slorb_k" not in options:
        assert all(type(run.model.get_submodule(n)) is nn.Linear for n in names)
        assert run.model.state_dict().keys() == GPT(TINY).state_dict().keys()
    if not ends_dense and "dense_columns" not in options:
        assert sum(int(check24(run.model.get_submodule(n).weight)) for n in names) == 0
        checked = methods.check(run.model)
        assert all(checked[n] for n in names) and sum(checked.values()) == len(names)
        nonzeros = [run.model.get_submodule(n).weight.count_nonzero() for n in names]
        assert 0 < sum(map(int, nonzeros)) <= run.report.sparse_parameters / 2


def assert_same_step(loss, gradients, expected, run):
    """Two ways of one step from equal states: fp32 sums in another order, no trajectories, which
    masks that a last bit has chosen would part."""
    assert loss == pytest.approx(expected, abs=1e-5)
    assert gradients.keys() >= run.gradients.keys()
    for name, gradient in gradients.items():
        wanted = run.gradients.get(name, torch.zeros(()))  # DDP gives zeros to what sleeps
        layer = run.method.layers.get(name.removesuffix(".weight"))
        # A last bit of dY draws another sample in some groups; other random bits would in half.
        sampled = name.endswith(".weight") and getattr(layer, "mvue", None)
        bound = 2**-3 if sampled else 2**-12
        assert (gradient - wanted).norm() <= bound * wanted.norm() + 1e-7, name


@every_method
def test_a_step_in_one_pass_changes_no_bit(name, options):
    """`FusedAdamW` with the hooks, beside torch's and the same hooks, over refreshes and phases."""
    runs = [Run(name, options) for _ in range(2)]
    if any(run.method.capabilities.needs_adamw and name != "step" for run in runs):
        return  # an update rule of its own
    makers = methods.FusedAdamW, partial(torch.optim.AdamW, fused=True)
    for run, make in zip(runs, makers, strict=True):
        run.optimizer = make(run.model.param_groups(0.1), lr=1e-2)
    for step in range(4):
        assert runs[0].step(step) == runs[1].step(step)
        for of_model in (nn.Module.named_parameters, nn.Module.named_buffers):
            for (n, a), (_, b) in zip(*(of_model(r.model) for r in runs), strict=True):
                assert torch.equal(a, b), n
    assert runs[0].method.metrics() == runs[1].method.metrics()


@every_method
def test_micro_batches_and_checkpointing_change_nothing(name, options):
    """MVUE's random bits belong to the tokens, not to the micro-batch, nor to the forward pass,
    which runs twice where activations are computed anew."""
    cut = Run(*_without_fp8(name, options))
    whole = Run(*_without_fp8(name, options))
    for step in range(STEPS):
        whole.load(cut.state())
        expected = whole.step(step)
        assert_same_step(cut.step(step, parts=4), cut.gradients, expected, whole)
    plain, run = Run(name, options), Run(name, options)
    for reentrant, block in enumerate(run.model.transformer.h):  # one in each way
        forward = block.forward
        block.forward = lambda x, f=forward, r=bool(reentrant): checkpoint(f, x, use_reentrant=r)
    assert [run.step(step) for step in range(2)] == [plain.step(step) for step in range(2)]
    for a, b in zip(plain.model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(a, b)


TILES = phases, "transposable_mask24"
CHOICES = [  # method, option, what chooses, and after which of six steps
    *(("ast", {"refresh_every": k}, (ast.Linear, "best_mask"), steps)
      for k, steps in ((1, [0, 1, 2, 3, 4, 5]), (2, [1, 3, 5]), (0, []))),
    ("fst", {"refresh_every": 2, "dense_fraction": 0.0}, TILES, [1, 3, 5]),
    ("semi_sparse", {"refresh_every": 3}, TILES, [2, 5]),
    ("bi_mask", {"permute_every": 2, "candidates": 2},
     (bi_mask.Linear, "search_permutation"), [0, 2, 4]),
]  # fmt: skip


def test_choices_follow_the_steps_whatever_is_forwarded(monkeypatch):
    """Released code counts forward passes: micro-batches and evaluations among them."""
    for name, options, (place, function), expected in CHOICES:
        run, steps, given, original = Run(name, options), [], [], getattr(place, function)

        def choose(*args, original=original, steps=steps, given=given):
            steps.append(step)  # noqa: B023
            given.append(args[1:])
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(place, function, choose)
            for step in range(6):
                run.step(step, parts=4)
                with torch.no_grad():
                    run.model.eval()(batch(9)[:, :-1])  # and is trained on in this mode
        assert steps == [step for step in expected for _ in run.method.layers], name
        assert {f"{name}.weight" for name in run.report.names} <= run.gradients.keys()
    assert len(set(given)) == len(given)  # each permutation is drawn from a seed of its own
    assert (fst.Config().refresh_every, bi_mask.Config().permute_every) == (40, 100)


class OneBlock(Run):
    """Half as long to compile: another block would be the same code."""

    shape = replace(TINY, n_layer=1)


COMPILED = [  # other options change what is derived between steps
    case for case in CASES for name, options in [case.values]
    if options == VARIANTS.get(name, [{}])[0] or {"fp8", "adapter_rank", "slorb_k"} & options.keys()
]  # fmt: skip


# The others compile the code of one of these.
@mostly_in_all(
    COMPILED,
    {"act24", "ast-4-3", "fst", "s_ste", "s_ste-paper-True", "semi_sparse", "slope-4-0.5-True",
     "sr_ste-0.01"},
)  # fmt: skip
def test_compile_without_a_graph_break_changes_no_bit(name, options):
    torch._dynamo.reset()
    run, compiled = OneBlock(name, options), OneBlock(name, options)
    runner = torch.compile(compiled.model, fullgraph=True, backend="aot_eager")
    for step in (0, STEPS - 1):  # the last one in another phase, where the method has some
        assert compiled.step(step, runner=runner) == run.step(step)
    torch._dynamo.reset()


@every_method
def test_a_model_in_bf16_trains(name, options):
    """Weights, biases and activations all in bf16, no autocast; simulated FP8 included. And
    `convert(dtype=...)` changes the speed under autocast and nothing else."""
    losses = []
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(0)
        model = model_for(name)
        method = build(name, model, **options)
        method.convert(model, dtype=dtype)
        method.on_step_begin(0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = method.loss(model, {"input": batch(0)[:, :-1], "target": batch(0)[:, 1:]})
        loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
        losses.append(loss.item())
    assert losses[0] == losses[1]
    torch.manual_seed(0)
    model = model_for(name).to(torch.bfloat16)
    method = build(name, model, **options)
    method.convert(model)
    optimizer = method.optimizer(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        with training_step(method, step, optimizer):
            inputs = {"input": batch(0)[:, :-1], "target": batch(0)[:, 1:]}
            method.loss(model, inputs).backward()
            with torch.no_grad():  # of the task alone: a teacher's divergence does not sink to zero
                losses.append(model(**inputs)[1].item())
            for n, parameter in model.named_parameters():
                if n.rpartition(".")[2] not in adapters(options):
                    assert parameter.grad.dtype == torch.bfloat16
                    assert parameter.grad.isfinite().all() and parameter.grad.any()
    assert losses[-1] < losses[0] - 0.1  # one batch, learnt by heart


@every_method
def test_an_averaged_model_evaluates_its_own_weights(name, options):
    """torch's EMA averages parameters and copies buffers; `methods.refresh` derives them again."""
    run = Run(name, options)
    average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in range(2 if adapters(options) else STEPS - 1):  # into the last phase
        run.step(step)
        average.update_parameters(run.model)
    average.eval()
    idx = batch(9)[:, :-1]

    def logits(model):
        with torch.no_grad():
            return model(idx)[0]

    if name != "dense":
        with pytest.raises(RuntimeError, match=r"methods\.refresh\(model\) after any other change"):
            logits(average)
    methods.refresh(average)
    # A plain model with the averaged weights, the sparse ones of them written out.
    state = average.module.state_dict()
    plain = lowrank.attach(model_for(name), {n: v for n, v in state.items() if "slorb" in n})
    plain.load_state_dict(
        {n: v for n, v in state.items() if n in plain.state_dict()},
        strict=False,  # a converted layer may have no `weight` of its own
    )
    for n in run.report.names:
        layer, target = average.module.get_submodule(n), plain.get_submodule(n).weight
        if run.method.sparse_layers:
            target.data.copy_(layer.effective_weight())
            if run.method.phase() == "sparse" and not ends_dense_now(run):
                assert int(check24(layer.grouped(target))) == 0
    found, bound = logits(average), 1e-3 if rounds_inputs(run) else 0
    torch.testing.assert_close(found, logits(plain.eval()), rtol=0, atol=bound)


def _two_ranks(rank, cases, results):
    """Every step of the cases by two processes with half of each of two micro-batches: the state
    before it, the loss, the gradients."""
    half = SEQUENCES // 4
    share = slice(rank * half, (rank + 1) * half)
    found = {}
    for case in cases:
        run = Run(*case.values, seed=rank)  # the ranks start from rank 0's weights
        for parameter in run.model.parameters():
            dist.broadcast(parameter.detach(), src=0)
        runner = DistributedDataParallel(run.model, init_sync=False)
        runner.broadcast_buffers = False  # as an argument some versions of torch warn about it
        found[case.id] = []
        for step in range(STEPS):
            state = run.state()
            loss = run.step(step, parts=2, runner=runner, share=share)
            loss = torch.tensor(loss, dtype=torch.float64)
            dist.all_reduce(loss)
            found[case.id].append((state, float(loss) / 2, run.gradients))
    if rank == 0:
        torch.save(found, results)


def _without_fp8(name, options):
    """FP8 scales by the largest value of a micro-batch, which depends on where it is cut."""
    return name, {k: v for k, v in options.items() if k != "fp8"}


@pytest.fixture(scope="module")
def steps_of_two_ranks(start_ranks, tmp_path_factory, request):
    results = tmp_path_factory.mktemp("two") / "steps.pt"
    start_ranks(_two_ranks, chosen(request, "test_two_ranks_equal_one"), results)
    return torch.load(results, weights_only=True)


@mostly_in_all(CASES, ONE_EACH)
def test_two_ranks_equal_one(name, options, steps_of_two_ranks, request):
    """MVUE included: rank r samples with the numbers of its own tokens in the global batch. And
    FP8, where the one process cuts its batch as the ranks do."""
    single, parts = Run(name, options), 4 if "fp8" in options else 1
    steps = steps_of_two_ranks[request.node.callspec.id]
    first, started = steps[0][0][0], single.model.state_dict()
    assert all(torch.equal(value, first[key]) for key, value in started.items())
    for step, (state, loss, gradients) in enumerate(steps):
        single.load(state)
        assert_same_step(loss, gradients, single.step(step, parts), single)
