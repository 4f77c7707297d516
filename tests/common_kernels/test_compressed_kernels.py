"""The Triton kernels of the compressed form against plain PyTorch, bit for bit."""

import pytest
import torch

from common_kernels import (
    compress_nm,
    double_prune_bits,
    expand_nm,
    nm_mask,
    pack_mask,
    unpack_mask,
)

pytest.importorskip("triton", reason="no Triton for this platform")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Groups that lie within bytes or are whole bytes, that cross bytes, rows that end within a byte,
# one value kept, all kept, groups too large for a thread.
PATTERNS = [
    (1, 2, 16), (2, 4, 24), (2, 8, 32), (4, 8, 16), (2, 16, 48), (2, 32, 64), (1, 1, 8),
    (2, 4, 12), (3, 7, 21), (3, 4, 8), (2, 30, 60), (4, 64, 64), (8, 8, 16),
]  # fmt: skip
by_pattern = pytest.mark.parametrize(("n", "m", "columns"), PATTERNS, ids=str)


def data(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x.view(-1)[::7] = -0.0
    x.view(-1)[3::11] = float("nan")
    return x.to(DEVICE)


def same_bits(got, want):
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def both(operator, *args, **options):
    return [operator(*args, **options, backend=backend) for backend in ("triton", "cpu")]


@by_pattern
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_compress_and_expand(dtype, n, m, columns):
    for shape in ((5, columns), (2, 3, columns), (150, columns)):
        x = data(shape).to(dtype)
        bits = pack_mask(nm_mask(torch.rand(shape, device=DEVICE), n, m), backend="cpu")
        same_bits(*both(compress_nm, x, bits, n, m))
        values = compress_nm(x, bits, n, m, backend="cpu")
        same_bits(*both(expand_nm, values, bits, n, m))
        same_bits(*both(compress_nm, x.mT.contiguous().mT, bits, n, m))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compressed_entries_of_another_dtype(dtype, source):
    x = data((37, 24)).nan_to_num(torch.inf).to(source)  # casts give NaNs any bits
    for n, m in ((2, 4), (3, 6)):
        bits = pack_mask(nm_mask(torch.rand(x.shape, device=DEVICE), n, m))
        got, want = both(compress_nm, x, bits, n, m, dtype=dtype)
        same_bits(got, want)
        same_bits(want, compress_nm(x, bits, n, m).to(dtype))


@pytest.mark.parametrize("columns", [8, 64, 12, 5, 4100])
def test_bits(columns):
    mask = data((7, columns)) > 0
    same_bits(*both(pack_mask, mask))
    bits = pack_mask(mask, backend="cpu")
    same_bits(*both(unpack_mask, bits, columns))
    same_bits(*both(pack_mask, mask.t().contiguous().t()))
    same_bits(*both(compress_nm, mask, pack_mask(mask | True), 1, 1))


def test_a_mask_that_begins_anywhere_in_memory():
    store = data((1, 41)).flatten() > 0
    mask = store[1:].view(5, 8)
    same_bits(*both(pack_mask, mask))


def test_empty_tensors():
    for shape in ((0, 8), (3, 0)):
        x = torch.ones(shape, device=DEVICE)
        bits = pack_mask(x.bool(), backend="triton")
        assert unpack_mask(bits, shape[1], backend="triton").shape == shape
        values = compress_nm(x, bits, backend="triton")
        assert values.shape == (shape[0], shape[1] // 2)
        assert expand_nm(values, bits, backend="triton").shape == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "n", "m"), [((8, 48), 2, 4), ((260, 32), 2, 4), ((8, 24), 2, 4), ((16, 32), 2, 8)]
)
def test_double_prune_bits(dtype, shape, n, m):
    mask = nm_mask(torch.rand(shape, device=DEVICE), n, m)
    x = data(shape).to(dtype)
    x[:4, ::2] = torch.tensor(2.0**-149, dtype=dtype)  # as small as a kept zero counts, or zero
    x[4:8] = x[4:8].round()
    bits = pack_mask(mask, backend="cpu")
    values = compress_nm(x, bits, n, m, backend="cpu")
    same_bits(*both(double_prune_bits, values, bits, n, m))
    same_bits(*both(double_prune_bits, values[:0], bits[:0], n, m))
