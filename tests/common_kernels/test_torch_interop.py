"""torch's 2:4 tensors over our packed matrices, and its operators on a CPU."""

import gc
import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.sparse import _semi_structured_conversions as conversions

from common_kernels import nm_mask, transposable_mask24
from common_kernels.pack import convert24, pack24, unpack24
from common_kernels.pack.bitmask import swizzle_mask
from common_kernels.pack.cpu_operators import register_cpu_operators
from common_kernels.pack.interop import (
    CLASSES,
    cslt_form,
    from_cslt,
    from_semi_structured,
    to_semi_structured,
)

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
LAYOUTS = list(CLASSES)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
BF16 = torch.bfloat16
ROUNDING = 2**-9  # of one number to bf16


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def operators():
    library = register_cpu_operators()
    yield
    del library
    gc.collect()


def weight(rows=64, columns=128, dtype=BF16, seed=0):
    """Random entries, no two of the same magnitude in a tile of four by four."""
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    tiles = w.float().abs().unfold(0, 4, 4).unfold(1, 4, 4).flatten(2).sort(-1).values
    distinct = (tiles.diff(dim=-1) > 0).all(-1).repeat_interleave(4, 0).repeat_interleave(4, 1)
    ramp = torch.arange(1, 17, dtype=dtype).view(4, 4).repeat(rows // 4, columns // 4)
    return torch.where(distinct, w, ramp)


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


class Sparsify(torch.autograd.Function):
    """w -> torch's tensor of w under its transposable mask; straight-through."""

    @staticmethod
    def forward(ctx, w, layout):
        w = w.detach()
        mask = transposable_mask24(w)
        return to_semi_structured(pack24(w, mask, layout), pack24(w.t(), mask.t(), layout))

    @staticmethod
    def backward(ctx, grad):
        return grad, None


torch._dynamo.allow_in_graph(Sparsify)


class Linear(nn.Linear):
    """Multiplies in bf16 with a weight that is pruned and packed in every forward pass."""

    layout = "cutlass_sm80"

    def forward(self, x):
        return F.linear(x.to(BF16), Sparsify.apply(self.weight.to(BF16), self.layout))


def mlp(layout):
    torch.manual_seed(0)
    model = nn.Sequential(Linear(64, 128, bias=False), nn.ReLU(), Linear(128, 64, bias=False))
    model[0].layout = model[2].layout = layout
    return model


# ------------------------------------------------------------------ the tensor class


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.int8])
def test_torch_reads_our_cutlass_matrix(dtype):
    w = (20 * weight(dtype=torch.float32)).to(dtype)
    mask = nm_mask(weight(dtype=torch.float32, seed=1))
    packed = pack24(w, mask, "cutlass_sm80")
    tensor = to_semi_structured(packed)
    assert (tensor.shape, tensor.dtype) == (w.shape, dtype)
    assert torch.equal(tensor.to_dense(), torch.where(mask, w, 0))
    back = from_semi_structured(tensor)
    assert torch.equal(unpack24(back), torch.where(mask, w, 0))
    assert back.values.data_ptr() == packed.values.data_ptr()
    assert back.meta.data_ptr() == packed.meta.data_ptr()


@every_layout
def test_both_directions_share_memory(layout, operators):
    w = weight()
    mask = transposable_mask24(w)
    pruned = torch.where(mask, w, 0)
    packed, transposed = pack24(w, mask, layout), pack24(w.t(), mask.t(), layout)
    tensor = to_semi_structured(packed, transposed)
    assert type(tensor) is CLASSES[layout]
    assert torch.equal(tensor.to_dense(), pruned)
    for found, expected in (
        (from_semi_structured(tensor), packed),
        (from_semi_structured(tensor.t()), transposed),
        (from_semi_structured(tensor.t().t()), packed),
    ):
        assert (found.shape, found.layout) == (expected.shape, layout)
        assert found.values.data_ptr() == expected.values.data_ptr()
        assert torch.equal(unpack24(found), unpack24(expected))
    x = torch.randn(8, 64).to(BF16)
    assert relative(x @ tensor, x.double() @ pruned.double()) < ROUNDING
    with pytest.raises(ValueError, match=r"only its transpose: convert tensor\.t\(\)"):
        from_semi_structured(to_semi_structured(packed).t())


def test_what_has_no_tensor_of_torchs():
    w = weight()
    packed = pack24(w, nm_mask(w), "cutlass_sm80")
    with pytest.raises(ValueError, match=r"'neutral': convert24 .* 'cutlass_sm80' or 'cusparselt"):
        to_semi_structured(pack24(w, nm_mask(w)))
    e5m2 = pack24(w.to(torch.float8_e5m2), nm_mask(w), "cusparselt_sm90")
    with pytest.raises(ValueError, match=r"CUSPARSELT takes .*not torch\.float8_e5m2"):
        to_semi_structured(e5m2)
    with pytest.raises(ValueError, match=r"transposed must be \(\(128, 64\), 'cutlass_sm80'"):
        to_semi_structured(packed, packed)
    with pytest.raises(TypeError, match="expected, not Tensor"):
        from_semi_structured(w)
    values, meta = conversions.sparse_semi_structured_from_dense_cutlass(torch.eye(64))
    fp32 = CLASSES["cutlass_sm80"](torch.Size((64, 64)), values, meta, None, None, None)
    with pytest.raises(ValueError, match=r"not torch\.float32"):  # 1:2, not 2:4
        from_semi_structured(fp32)


# ------------------------------------------------------------------ torch's operators on a CPU


def test_torch_has_no_such_operators_of_its_own():
    """They come with one call and go with its result."""
    library = register_cpu_operators()
    w = torch.where(nm_mask(weight()), weight(), 0)
    assert torch._cslt_compress(w).shape == (64, 64 + 8)
    del library
    gc.collect()
    with pytest.raises(NotImplementedError, match="CPU"):
        torch._cslt_compress(w)


@pytest.mark.parametrize("algorithm", ["", "largest_abs_values_greedy"])
def test_the_tile_packer(algorithm, operators):
    """Against torch's own Python, which ranks by signed value and writes into its argument."""
    w = weight()
    ranked = w.abs() if algorithm else w.clone()
    mask = conversions._sparse_semi_structured_tile(ranked.float().clone()) != 0
    pruned = torch.where(mask, w, 0)
    packed, meta, packed_t, meta_t, bits = torch._sparse_semi_structured_tile(w, algorithm)
    for values, words, dense in ((packed, meta, pruned), (packed_t, meta_t, pruned.t())):
        rows, columns = dense.shape
        assert words.shape == (rows, 2, columns // 32) and words.stride() == (2, 1, 2 * rows)
        flat = words.as_strided((rows, columns // 16), (columns // 16, 1))
        assert torch.equal(conversions.sparse_semi_structured_to_dense_cutlass(values, flat), dense)
    assert torch.equal(bits, swizzle_mask(mask))
    assert torch.equal(torch._sparse_semi_structured_apply_dense(w, bits), pruned)
    for got, want in zip(
        torch._sparse_semi_structured_apply(w, bits), (packed, packed_t), strict=True
    ):
        assert torch.equal(got, want)
    packed, _, packed_t, _, _ = torch._sparse_semi_structured_tile(w, algorithm, use_cutlass=False)
    assert packed.ndim == 1  # as torch's kernel has it
    assert torch.equal(unpack24(from_cslt(packed.view(64, -1), 128)), pruned)
    assert torch.equal(unpack24(from_cslt(packed_t.view(128, -1), 64)), pruned.t())
    if algorithm:
        assert torch.equal(mask, transposable_mask24(w, "greedy"))
        for dim in (0, 1):
            assert (mask.unflatten(dim, (-1, 4)).sum(dim + 1) <= 2).all()
    with pytest.raises(NotImplementedError, match="causal1122"):
        torch._sparse_semi_structured_tile(w, "causal1122")


def test_ties_go_to_the_lower_index_as_in_torchs_python():
    sizes = torch.randint(1, 4, (32, 64), generator=torch.Generator().manual_seed(0)).float()
    signs = torch.randint(0, 2, (32, 64), generator=torch.Generator().manual_seed(1)) * 2 - 1
    kept = conversions._sparse_semi_structured_tile(sizes.clone()) != 0
    assert torch.equal(transposable_mask24(sizes * signs, "greedy"), kept)


def test_torchs_tile_tensors_become_packed(operators):
    w = weight()
    mask = transposable_mask24(w, "greedy")
    tensor = CLASSES["cutlass_sm80"].prune_dense_static_sort(w, "largest_abs_values_greedy")
    assert torch.equal(unpack24(from_semi_structured(tensor)), torch.where(mask, w, 0))
    assert torch.equal(unpack24(from_semi_structured(tensor.t())), torch.where(mask, w, 0).t())
    tensor = CLASSES["cusparselt_sm90"].prune_dense_static_sort(w)
    with pytest.raises(ValueError, match=r"tile packer .* compute capability 8\.0"):
        from_semi_structured(tensor)


def test_products(operators):
    """Values, bias by rows of the sparse matrix, scale, type and layout of the result."""
    w, x, bias = weight(), torch.randn(128, 16).to(BF16), torch.randn(64).to(BF16)
    w = torch.where(nm_mask(w), w, 0)
    packed = pack24(w, w != 0, "cutlass_sm80")
    values, meta = torch._to_sparse_semi_structured(w)
    assert torch.equal(values, packed.values) and torch.equal(meta, packed.meta)
    compressed = torch._cslt_compress(w)
    assert torch.equal(compressed, cslt_form(convert24(packed, "cusparselt_sm90")))
    dense, added = w.double() @ x.double(), bias.double()[:, None]

    def close(got, want, dtype=BF16):
        assert got.dtype == dtype
        assert relative(got, want) < (ROUNDING if dtype == BF16 else 1e-6)

    close(torch._sparse_semi_structured_mm(values, meta, x), dense)
    y = torch._sparse_semi_structured_mm(values, meta, x, out_dtype=torch.float32)
    close(y, dense, torch.float32)
    y = torch._sparse_semi_structured_addmm(bias, values, meta, x, alpha=2, beta=3)
    close(y, 2 * dense + 3 * added)
    rows = x.t().contiguous().view(2, 8, 128)
    y = torch._sparse_semi_structured_linear(rows, values, meta, bias=bias, activation="relu")
    close(y, (dense + added).t().relu().view(2, 8, 64))
    close(torch._cslt_sparse_mm(compressed, x), dense)
    y = torch._cslt_sparse_mm(compressed, x, bias=bias, transpose_result=True)
    close(y, (dense + added).t())
    fp8 = (w.to(torch.float8_e4m3fn), x.to(torch.float8_e4m3fn))
    compressed = cslt_form(pack24(fp8[0], w != 0, "cusparselt_sm90"))
    y = torch._cslt_sparse_mm(compressed, fp8[1], alpha=torch.tensor(0.5), out_dtype=torch.float32)
    close(y, fp8[0].double() @ fp8[1].double() / 2, torch.float32)


def test_integer_products(operators):
    generator = torch.Generator().manual_seed(0)
    w = torch.randint(-100, 100, (32, 128), generator=generator, dtype=torch.int8)
    x = torch.randint(-100, 100, (128, 16), generator=generator, dtype=torch.int8)
    mask = nm_mask(w.float())
    packed = pack24(w, mask, "cutlass_sm80")
    y = torch._sparse_semi_structured_mm(packed.values, packed.meta, x, out_dtype=torch.int32)
    assert torch.equal(y, torch.where(mask, w, 0).int() @ x.int())


@every_layout
@pytest.mark.parametrize("shape", [(24, 128), (2, 7, 128)])
@pytest.mark.parametrize("biased", [False, True])
def test_forward_and_backward_equal_the_masked_dense_layer(layout, shape, biased, operators):
    w, bias = weight().requires_grad_(), torch.randn(64).to(BF16).requires_grad_(biased)
    x = torch.randn(shape).to(BF16).requires_grad_()
    y = F.linear(x, Sparsify.apply(w, layout), bias if biased else None)
    dy = torch.randn(y.shape).to(BF16)
    y.backward(dy)

    mask = transposable_mask24(w.detach())
    leaves = [t.detach().double().requires_grad_() for t in (x, w, bias)]
    dense = leaves[1] * mask
    expected = F.linear(leaves[0], dense, leaves[2] if biased else None)
    dense.retain_grad()
    expected.backward(dy.double())
    assert relative(y, expected) < ROUNDING
    assert relative(x.grad, leaves[0].grad) < ROUNDING
    assert relative(w.grad, dense.grad) < ROUNDING  # straight through: not masked
    if biased:
        assert torch.equal(bias.grad, dy.flatten(0, -2).sum(0))


# ------------------------------------------------------------------ compiled, distributed


@pytest.mark.parametrize(
    ("layout", "backend"),
    [(LAYOUTS[0], "aot_eager"), (LAYOUTS[1], "aot_eager"), (LAYOUTS[1], "inductor")],
)
def test_compiled_once_for_all_batch_sizes(layout, backend, operators):
    """Metadata in two dims, as ours is: torch's own tile packer does not compile for CUTLASS."""
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend(backend)
    layer = mlp(layout)[0].to(BF16)
    compiled = torch.compile(layer, fullgraph=True, backend=graphs, dynamic=True)
    for tokens in (8, 24, 16):
        x = torch.randn(2, tokens, 64).to(BF16).requires_grad_()
        found = []
        for run in (compiled, layer):
            y = run(x)
            y.float().square().mean().backward()
            found.append((y, x.grad, layer.weight.grad))
            x.grad = layer.weight.grad = None
        assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))
    assert graphs.frame_count <= 2
    torch._dynamo.reset()


def global_batch():
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def loss(runner, x):
    return (runner(x).float() - x).square().mean()


def _two_ranks(rank, meeting_point, results):
    """Gradients on halves of one batch: DDP, FSDP2, FSDP2 with parameters in bf16."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=2)
    library = register_cpu_operators()
    mesh = dist.init_device_mesh("cpu", (2,))
    x = global_batch()[16 * rank : 16 * rank + 16]
    found = {}
    for layout in LAYOUTS:
        for name in ("ddp", "fsdp", "bf16"):
            model = mlp(layout)
            if name == "ddp":
                runner = DistributedDataParallel(model)
            else:
                half = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
                policy = half if name == "bf16" else MixedPrecisionPolicy()
                runner = fully_shard(model, mesh=mesh, mp_policy=policy)
            loss(runner, x).backward()
            gradients = [p.grad for p in model.parameters()]
            if name != "ddp":
                gradients = [g.full_tensor() for g in gradients]
            found[f"{layout} {name}"] = gradients
    del library
    if rank == 0:
        torch.save(found, results)
    dist.barrier()
    os._exit(0)  # gloo's threads outlive the group and abort an interpreter that ends


def test_two_ranks_equal_one(start_ranks, tmp_path, operators):
    results = tmp_path / "gradients.pt"
    start_ranks(_two_ranks, (tmp_path / "store").as_uri(), results)
    found = torch.load(results, weights_only=True)
    assert len(found) == 6
    x = global_batch()
    for case, gradients in found.items():
        model = mlp(case.split()[0])
        loss(model, x).backward()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            # Each side rounds its gradients to bf16 once: of halves, and of the whole.
            assert relative(gradient, parameter.grad) < 2 * ROUNDING, case
