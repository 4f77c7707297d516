"""FP8 as the precision of a layer's products, by the option `fp8`; without it they are in the
layer's own dtype.

Additional buffers of such a layer, not saved: the codes of the operands of fprop and dgrad, `codes`
and `codes_dgrad`, and their `code_scales` (fp32 [2]). On FP8 units (`Products.fp8`) a product that
runs sparse uses packed codes in `packed` or `packed_transposed` instead, and there is no `operand`.
With delayed scaling also those of delayed.py.
"""

from typing import Any

import torch
from torch import Tensor

from common_kernels import quantize_fp8
from common_kernels.fp8.cpu import FORMATS
from common_kernels.pack import Packed24, check_form
from common_kernels.pack.cpu import buffer_bytes

from . import delayed
from .operands import Fp8


def setup(layer: Any) -> None:
    """Register the buffers of a layer's codes."""
    for codes in ("codes", "codes_dgrad", "code_scales"):
        layer.register_buffer(codes, None, persistent=False)
    hold_operands(layer)
    if layer.precision.delayed:
        delayed.setup(layer, layer.code_scales.device)


def dgrad_on_units(layer: Any) -> bool:
    """True if dgrad's codes are kept as [in, out] for FP8 units: packed, or dense in a format that
    cuBLAS can multiply with dY's e5m2."""
    products, fp8 = layer.products, layer.fp8
    return products.fp8 and (products.dgrad or (fp8 is not None and fp8.dgrad == "e4m3"))


def room(layer: Any) -> tuple[Packed24 | Tensor, Packed24 | Tensor]:
    """The tensors that receive the codes of the weight [out, in] and of its transpose."""
    fprop, dgrad = operands(layer)
    if not dgrad.on_units:
        dgrad = dgrad._replace(codes=dgrad.codes.t())
    formats = layer.precision.fprop, layer.precision.dgrad
    first, second = (
        Packed24(own.codes, own.shape, FORMATS[name], own.layout) if own.shape else own.codes
        for own, name in zip((fprop, dgrad), formats, strict=True)
    )
    return first, second


def operands(layer: Any) -> tuple[Fp8, Fp8]:
    """The operands of fprop and of dgrad."""
    held = layer._buffers  # quicker than attributes
    if held["code_scales"] is None:  # in another layer's forward pass than this sharded one's
        w, own = layer.weight.detach(), layer.precision
        return Fp8(*quantize_fp8(w, own.fprop)), Fp8(*quantize_fp8(w, own.dgrad))
    scale, scale_dgrad = held["code_scales"].unbind()
    rows, columns, layouts = layer.out_features, layer.in_features, layer.accelerated.layouts
    packed, turned = held["packed"], held["packed_transposed"]
    if packed is None:
        fprop = Fp8(held["codes"], scale, layer.products.fp8)
    else:
        fprop = Fp8(packed, scale, True, (rows, columns), layouts.fprop)
    if turned is None:
        return fprop, Fp8(held["codes_dgrad"], scale_dgrad, dgrad_on_units(layer))
    return fprop, Fp8(turned, scale_dgrad, True, (columns, rows), layouts.dgrad)


@torch.no_grad()
def hold_operands(layer: Any) -> None:
    """Allocate the packed operands that the layer's products take, and free the others; in FP8 also
    the codes, in a phase without FP8 those of the simulation."""
    products, own = layer.products, layer.precision
    rows, columns = layer.packed_shape
    device = next(layer.parameters()).device

    def hold(name: str, dtype: torch.dtype, *shape: int) -> None:
        held = getattr(layer, name)
        if held is None or (held.dtype, held.shape) != (dtype, shape):
            setattr(layer, name, torch.empty(shape, dtype=dtype, device=device))

    turned = own is None or dgrad_on_units(layer)
    for product, packed, codes, shape, turns in (
        ("fprop", "packed", "codes", (rows, columns), True),
        ("dgrad", "packed_transposed", "codes_dgrad", (columns, rows), turned),
    ):
        dtype = layer.dtype if own is None else FORMATS[getattr(own, product)]
        layout = products.layout(product)
        if products.of_input or (product == "dgrad" and products.repack):
            layout = ""  # nothing is packed here
        if layout:
            check_form(shape, dtype, layout)
            hold(packed, torch.uint8, buffer_bytes(*shape, dtype, layout))
        else:
            setattr(layer, packed, None)
        if own is not None and layout:
            setattr(layer, codes, None)
        elif own is not None:
            hold(codes, dtype, *(shape if turns else shape[::-1]))
    if own is not None:
        hold("code_scales", torch.float32, 2)
