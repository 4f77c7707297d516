"""torch's 2:4 tensors over our packed matrices: the same memory, in the order that torch reads."""

import pytest
import torch
from torch.sparse import _semi_structured_conversions as conversions

from common_kernels import nm_mask, transposable_mask24
from common_kernels.pack import pack24
from common_kernels.pack.interop import CLASSES, to_semi_structured

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
BF16 = torch.bfloat16


def weight():
    return torch.randn(128, 128, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("layout", CLASSES)
def test_torch_has_our_matrices_and_their_transposes_in_the_same_memory(layout):
    mask = transposable_mask24(weight())
    for dtype in (BF16, torch.float16, torch.int8):
        w = (20 * weight()).to(dtype)
        own = pack24(w, mask, layout), pack24(w.t(), mask.t(), layout)
        tensor = to_semi_structured(*own)
        assert (type(tensor), tensor.shape, tensor.dtype) == (CLASSES[layout], w.shape, dtype)
        dense = torch.where(mask, w, 0)
        for packed, want, values, meta in (
            (own[0], dense, tensor.packed, tensor.meta),
            (own[1], dense.t(), tensor.packed_t, tensor.meta_t),
        ):
            assert values.data_ptr() == packed.buffer.data_ptr() and values.dtype == dtype
            if layout == "cusparselt_sm90":
                assert meta is None and len(values) == len(want)
                assert values.nbytes == packed.buffer.nbytes
            else:
                assert meta.data_ptr() == packed.meta.data_ptr() and meta.shape == packed.meta.shape
                read = conversions.sparse_semi_structured_to_dense_cutlass(values, meta)
                assert torch.equal(read, want)
        assert to_semi_structured(own[0]).packed_t is None


def test_what_has_no_tensor_of_torchs():
    w = weight().to(BF16)
    with pytest.raises(ValueError, match=r"'neutral': convert24 .* 'cutlass_sm80' or 'cusparselt"):
        to_semi_structured(pack24(w, nm_mask(w)))
    e5m2 = pack24(w.to(torch.float8_e5m2), nm_mask(w), "cusparselt_sm90")
    with pytest.raises(ValueError, match=r"CUSPARSELT takes .*not torch\.float8_e5m2"):
        to_semi_structured(e5m2)
