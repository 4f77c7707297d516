"""Squared ReLU pruned to 2:4: by hand, against autograd, and packed in the same pass."""

import torch

from common_kernels import nm_mask, quantize_fp8, relu24, unpack24
from common_kernels.backend import HAS_TRITON
from common_kernels.pack import BUFFERED, cpu
from common_kernels.relu24 import reference, relu24_backward, relu24_codes, relu24_packed
from tests.each import each

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["cpu", *(["triton"] if HAS_TRITON else [])]


@each(("dtype", "layout"), [
    (torch.bfloat16, BUFFERED), (torch.float16, BUFFERED), (torch.bfloat16, "cutlass_sm80"),
    (torch.bfloat16, "cutlass_sm90_k128"),
])  # fmt: skip
def test_packed_in_the_same_pass(dtype, layout):
    """The bytes of both backends are those of the dense result, packed for itself."""
    torch.manual_seed(0)
    z, dh = torch.randn(2, 128, 256).to(DEVICE, dtype).unbind(0)
    z[0, :8] = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 2.0])
    h = relu24(z, backend="cpu")
    for backend in BACKENDS:
        dense, packed = relu24_packed(z, layout, backend=backend)
        assert torch.equal(dense, h) and torch.equal(unpack24(packed), h)
        dz, gradient = relu24_backward(dh, h, layout, backend=backend)
        assert gradient is not None and torch.equal(unpack24(gradient), dz)
        assert torch.equal(gradient.buffer, cpu.pack(dz, h != 0, layout))
        assert torch.equal(dz, relu24_backward(dh, h, backend="cpu")[0])
        _, plain = relu24_packed(z, layout, backend="cpu")
        assert torch.equal(packed.buffer, plain.buffer)


def test_gradients_of_all_values_in_bf16():
    """Both backends agree although a GPU's roots are approximate, but for subnormals."""
    torch.manual_seed(0)
    values = torch.arange(2**7, 2**15, dtype=torch.int16).view(torch.bfloat16)
    h = torch.nn.functional.pad(values[:, None], (2, 1))
    for scale in 1.0, 2.0**-6, 2.0**9:
        given = (scale * torch.randn(h.shape)).to(h).to(DEVICE), h.to(DEVICE)
        found = [relu24_backward(*given, backend=b)[0] for b in BACKENDS]
        torch.testing.assert_close(found[-1], found[0], rtol=0, atol=0, equal_nan=True)


@each(("dtype", "layout"), [(torch.bfloat16, BUFFERED), (torch.float32, "cutlass_sm90")])
def test_codes_in_the_same_pass(dtype, layout):
    """Both backends give the codes of the reference, quantised, packed and transposed. They are
    scaled by its largest magnitude, or by an earlier one, and then this one is noted."""
    torch.manual_seed(0)
    z, dh = torch.randn(2, 128, 256).to(dtype).unbind(0)
    z[0, :8] = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 2.0])
    h = reference.relu24(z)
    dz = reference.relu24_backward(dh, h)
    for want, of, fmt in (h, (z, None), "e4m3"), (dz, (dh, h), "e5m2"):
        kept = nm_mask(z.relu()) if of[1] is None else h != 0
        for amax in (None, torch.tensor(3.0)):
            noted = () if amax is None else (amax, torch.tensor(0.5))
            codes, scale = quantize_fp8(want, fmt, *noted, backend="cpu")
            for backend in BACKENDS:
                given = [None if t is None else t.to(DEVICE) for t in (*of, amax)]
                seen = None if amax is None else torch.tensor(0.5, device=DEVICE)
                dense, packed, turned, own = relu24_codes(
                    *given[:2], fmt, layout, given[2], seen, backend=backend
                )
                assert torch.equal(dense.cpu(), want)
                assert torch.equal(packed.buffer.cpu(), cpu.pack(codes, kept, layout))
                assert torch.equal(turned.cpu().view(torch.uint8), codes.t().view(torch.uint8))
                assert own == scale.to(DEVICE) and (seen is None or seen == want.abs().max())
