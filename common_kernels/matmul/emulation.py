"""The products of cuSPARSELt and of our own kernels on a CPU, for tests."""

from torch import Tensor

from common_kernels.matmul.choice import check_available
from common_kernels.matmul.cusparselt import Problem
from common_kernels.pack import BUFFERED, VENDOR, Packed24, cpu, unpack24


def emulate(
    buffer: Tensor,
    dense: Tensor,
    bias: Tensor | None,
    scales: tuple[Tensor, Tensor] | None,
    problem: Problem,
) -> Tensor:
    """The product by plain PyTorch, in fp32 and rounded once."""
    check_available(problem, buffer.device)
    shape, layout = (problem.rows, problem.columns), problem.layout
    if layout == VENDOR:  # emulated with the order of BUFFERED
        layout, buffer = BUFFERED, buffer[: cpu.buffer_bytes(*shape, problem.dtype)]
    a = unpack24(Packed24(buffer, shape, problem.dtype, layout)).float()
    b = dense.float().t() if problem.dense_transposed else dense.float()
    product = a @ b
    if scales is not None:
        product *= 1 / scales[0] / scales[1]
    if bias is not None:
        product += bias.to(problem.out_dtype).float()[:, None]
    return (
        (product.t() if problem.result_transposed else product).to(problem.out_dtype).contiguous()
    )
