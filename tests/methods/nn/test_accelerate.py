"""Products on packed operands, for every method, are those on masked dense operands.

On a CPU cuSPARSELt's are emulated, on a GPU it runs."""

import pytest
import torch
from torch import nn

import methods
from common_kernels import matmul
from common_kernels.matmul import choice
from common_kernels.pack import VENDOR, cpu, learn
from methods.nn import at_run_time, gemms, operands
from methods.nn.gemms import DENSE, Products
from methods.nn.linear import SparseLinear
from tests.methods.loop import training_step

pytest.importorskip("triton", reason="cuSPARSELt is emulated where Triton's interpreter runs")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
STEPS, TOKENS = 4, 100  # no multiple of what a GEMM takes
BF16 = torch.bfloat16
EPS = torch.finfo(BF16).eps
Y, BOTH = Products(fprop=True), Products(fprop=True, dgrad=True)
CASES = [
    ("ste", {}, Y),
    ("sr_ste", {"alpha": 1e-2}, Y),
    ("ast", {"total_steps": STEPS}, Y),
    ("bi_mask", {"permute_every": 2, "candidates": 4}, Y),
    ("step", {"total_steps": STEPS, "min_fraction": 0.3, "max_fraction": 0.5}, Y),
    ("semi_sparse", {}, BOTH),
    ("semi_sparse", {"algorithm": "exact", "sparse_fraction": 0.5, "total_steps": STEPS}, BOTH),
    ("semi_sparse", {"mode": "activation"}, at_run_time.OF_INPUT),
    ("semi_sparse", {"mode": "activation", "algorithm": "rows"}, at_run_time.OF_ROWS),
    ("fst", {"dense_fraction": 0.5, "total_steps": STEPS}, Products(True, True, True)),
    ("fst", {"dense_fraction": 0.0, "mvue": "sequential"}, BOTH),
    ("s_ste", {}, Products(True, False, True)),
    ("s_ste", {"gamma": 0.5, "mvue": "off"}, Y),
    ("s_ste", {"mvue_weight": True}, Products(True, False, True)),
    ("slope", {"column_refresh": 2, "mask": "magnitude"}, BOTH),
    ("slope", {"n": 1, "m": 4}, DENSE),
    ("slope", {"adapter_rank": 4, "adapter_fraction": 0.5, "total_steps": STEPS}, BOTH),
    ("gmp", {"total_steps": STEPS}, DENSE),
    ("projected", {"total_steps": STEPS, "healing_fraction": 0.5}, Y),
    ("ternary", {}, DENSE),
    ("dense", {}, None),
]
every_method = pytest.mark.parametrize(
    ("name", "options", "products"),
    [pytest.param(*case, id="-".join([case[0], *map(str, case[1].values())])) for case in CASES],
)


def build(name, options, master=torch.float32, between=nn.GELU):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), between(), nn.Linear(128, 64)).to(DEVICE, master)
    method = methods.build(name, **{"include": ("*",), "exclude": (), **options})
    method.convert(model, BF16)
    return model, method


class GeluInFp32(nn.GELU):
    def forward(self, x):
        return super().forward(x.float())


def one_step(model, method, optimizer, step, runner=None):
    """Output and gradients by name; the weights have moved afterwards."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, TOKENS // 4, 64, generator=generator).to(DEVICE).requires_grad_()
    with training_step(method, step, optimizer):
        method.open_micro_batch()
        with torch.autocast(DEVICE, BF16):
            y = (runner or model)(x)
        y.float().square().mean().backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **grads}


def evaluated(model):
    model.eval()
    with torch.no_grad(), torch.autocast(DEVICE, BF16):
        y = model(torch.ones(8, 64, device=DEVICE))
    model.train()
    return y


def same(got, want, bound=EPS):
    """Sums are taken in another order: now and then the last bit of a bf16 number differs."""
    assert (got.float() - want.float()).norm() <= bound * want.float().norm() + 1e-6


def same_steps(ours, theirs, runner=None):
    """Every step of `ours` is that of `theirs`, a (model, method), from the state ours is in.

    Never two trajectories: a last bit chooses another mask, and training amplifies it.
    """
    (model, method), (reference, reference_method) = ours, theirs
    optimizers = [of[1].optimizer(of[0].parameters(), lr=1e-2) for of in (ours, theirs)]
    # A last bit of an input chooses another mask of a few tokens.
    chosen = [one.accelerated for one in method.layers.values() if isinstance(one, SparseLinear)]
    bound = 2**-4 if any(one.of_input for one in chosen) else EPS

    def copy_over():
        reference.load_state_dict(model.state_dict())
        reference_method.load_state_dict(method.state_dict())
        optimizers[1].load_state_dict(optimizers[0].state_dict())

    for step in range(STEPS):
        copy_over()
        got = one_step(model, method, optimizers[0], step, runner)
        want = one_step(reference, reference_method, optimizers[1], step)
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            layer = method.layers.get(name.removesuffix(".weight"))
            # A last bit of dY draws another sample in some groups, and those are few.
            sampled = name.endswith(".weight") and getattr(layer, "mvue", None)
            same(got[name], tensor, 2**-3 if sampled else bound)
    copy_over()
    same(evaluated(model), evaluated(reference), bound)
    assert method.metrics() == reference_method.metrics()


@pytest.fixture
def calls(monkeypatch):
    """The products on packed operands so far: on a CPU dense ones give the same numbers, so that
    results alone would not show them."""
    made = []

    def count(module, function, label):
        original = getattr(module, function)
        monkeypatch.setattr(
            module, function, lambda *a, **k: made.append(label) or original(*a, **k)
        )

    count(operands, "linear24", "weight")
    count(operands, "compressed_mm24", "weight")
    count(gemms, "sample_mm24", "sample")
    count(at_run_time, "mm24", "input")
    return made


@every_method
def test_packed_products_are_the_dense_ones(name, options, products, calls):
    """Forward and backward, masks that change, phases, evaluation, the finished model, and each
    product as often as its layers are sparse. Master weights are in fp32 and in bf16 by turns."""
    master = (torch.float32, BF16)[CASES.index((name, options, products)) % 2]
    plain, packed = build(name, options, master), build(name, options, master)
    model, method = packed
    found = method.accelerate(TOKENS, "cusparselt")
    assert set(found.values()) == (set() if products is None else {products})
    same_steps(packed, plain)
    on, ends_dense = products or DENSE, getattr(model[0], "is_dense", False)
    layers, steps = 2, STEPS // 2 if ends_dense else STEPS - getattr(method, "start", 0)
    evaluations = layers * (on.fprop and not ends_dense)
    forward_and_dgrad = steps * layers * (on.fprop + on.dgrad) + evaluations
    weight, sample, of_input = (calls.count(name) for name in ("weight", "sample", "input"))
    if on.of_input:
        assert (weight, sample) == (0, 0)
        assert of_input == forward_and_dgrad + steps * layers * on.wgrad
    else:
        assert (weight, sample, of_input) == (forward_and_dgrad, steps * layers * on.wgrad, 0)
    method.finalize(model)
    assert not any(isinstance(m, SparseLinear) for m in model.modules())


@pytest.fixture
def use_packer(monkeypatch):
    """`use_packer(name)`: the order of the metadata is not known from now on; it is learnt, or the
    library packs."""

    def forget():
        choice._library_layout.cache_clear()
        learn.layout_on.cache_clear()

    yield lambda name: monkeypatch.setenv(choice.PACKER_VARIABLE, name) or forget()
    forget()


@pytest.mark.parametrize("packer", ["learnt", "cusparselt"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("fst", {"dense_fraction": 0.0}), ("s_ste", {"fp8": "hopper"}), ("slope", {})],
)
def test_where_the_order_is_not_known_products_are_the_same(name, options, packer, use_packer):
    theirs = build(name, options)
    theirs[1].accelerate(TOKENS, "cusparselt")
    use_packer(packer)
    ours = build(name, options)
    (chosen,) = set(ours[1].accelerate(TOKENS, "cusparselt").values())
    layout = choice.library_layout(next(theirs[0].parameters()).device)
    assert layout not in cpu.ORDERS and (layout == VENDOR) == (packer == "cusparselt")
    assert chosen.layouts == gemms.Layouts(*[layout] * 3) and chosen.kernels("fprop")
    layer = ours[0][0]
    held = (layer.packed, layer.packed_transposed)
    same_steps(ours, theirs)
    assert (layer.packed, layer.packed_transposed) == held  # written in place


@pytest.mark.skipif(CUDA, reason="compiled products on a GPU are timed in `bench train`")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("s_ste", {"fp8": "hopper"}),
        ("fst", {"dense_fraction": 0.0, "mvue": "off", "fp8": "hopper"}),
        ("slope", {}),
    ],
)
def test_compiled_without_a_graph_break(name, options):
    """With fp32 between the layers, as autocast leaves it behind a norm: what compiles the backward
    pass of a layer must not switch autocast off for the next one."""
    eager, (model, method) = (build(name, options, between=GeluInFp32) for _ in range(2))
    for m in (method, eager[1]):
        m.accelerate(TOKENS, "cusparselt")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    same_steps((model, method), eager, compiled)


def test_operands_that_are_not_needed_are_not_held():
    """Nor is any of a phase that is over."""
    model, method = build("fst", {"dense_fraction": 0.5, "total_steps": STEPS})
    layer = model[0]
    assert layer.operand is not None and layer.packed is None
    method.accelerate(TOKENS, "cusparselt")
    assert layer.operand is None
    assert layer.packed.shape == layer.packed_transposed.shape == (128 * 72,)  # bytes
    assert not any("packed" in key or "operand" in key for key in model.state_dict())
    optimizer = method.optimizer(model.parameters(), lr=1e-2)
    for step in range(3):  # into the dense phase
        one_step(model, method, optimizer, step)
    assert layer.is_dense and layer.packed is None and layer.packed_transposed is None
    assert torch.equal(layer.operand, layer.weight.to(BF16))


def test_what_runs_is_what_is_asked_for_or_it_is_refused(monkeypatch):
    _, method = build("ste", {})
    with pytest.raises(ValueError, match="'cutlass': choose one of auto, cusparselt, cuda, dense"):
        method.accelerate(TOKENS, "cutlass")
    odd, fp32 = (methods.build("ste", include=("*",)) for _ in range(2))
    odd.convert(nn.Sequential(nn.Linear(72, 128)).to(DEVICE), BF16)
    fp32.convert(nn.Sequential(nn.Linear(64, 64)).to(DEVICE))
    for each, told in (
        (odd, r"\[128, 72\] is no multiple of 64.*choose auto"),
        (fp32, r"not torch\.float32; convert\(model, dtype=torch\.bfloat16\) gives .* choose auto"),
    ):
        with pytest.raises(RuntimeError, match=told):
            each.accelerate(TOKENS, "cusparselt")
    assert set(odd.accelerate(TOKENS, "auto").values()) == {DENSE}
    monkeypatch.setenv("SPARSE24_MATMUL", "cusparselt")
    assert set(method.accelerate(TOKENS).values()) == {Y}
    assert set(method.accelerate(TOKENS, "dense").values()) == {DENSE}
    _, simulated = build("s_ste", {"fp8": "hopper", "gamma": 0.5})  # FP8 stays simulated
    assert set(simulated.accelerate(TOKENS, "cusparselt").values()) == {DENSE}
    if not CUDA:
        monkeypatch.delenv("TRITON_INTERPRET")
        with pytest.raises(RuntimeError, match="not a cpu; choose auto or dense"):
            method.accelerate(TOKENS, "cusparselt")


def test_an_output_may_be_changed_in_place():
    for name, options in (("ste", {}), ("s_ste", {"fp8": "hopper"}), ("slope", {})):
        model, method = build(name, options)
        method.accelerate(TOKENS, "cusparselt")
        method.open_micro_batch()
        x = torch.randn(2, 3, 64, device=DEVICE, requires_grad=True)
        with torch.autocast(DEVICE, BF16):
            nn.functional.relu(model[0](x), inplace=True).sum().backward()
        assert x.grad.isfinite().all()


FP8 = [(n, {"fp8": "hopper"}, "FP8") for n in ("fst", "s_ste", "slope", "semi_sparse")]


@pytest.mark.parametrize("kernels", ["cusparselt", "cuda"])
def test_no_tokens_and_one_token_without_leading_dims(kernels):
    """An expert without tokens sees such inputs. Weights that no product takes get zeros, as DDP
    needs."""
    if reason := matmul.unavailable(kernels, DEVICE, BF16):
        pytest.skip(reason)
    for name, options, products in CASES[5:] + FP8:
        model, method = build(name, {"total_steps": STEPS} | options, BF16)
        if products in (None, DENSE):
            continue
        method.accelerate(64, kernels)
        method.on_step_begin(0)
        for shape in ((0, 64), (2, 0, 64), (64,)):
            model.zero_grad()
            x = torch.randn(shape, device=DEVICE, dtype=BF16, requires_grad=True)
            method.open_micro_batch()
            y = model(x)
            assert y.shape == shape, (name, options)
            y.sum().backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            assert grads and all(bool(g.any()) == bool(x.numel()) for g in grads), (name, options)
            assert x.grad.shape == shape and x.grad.isfinite().all()
