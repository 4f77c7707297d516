"""Compiles every Triton kernel for six architectures, without a GPU: `python -m
tests.common_kernels.compiled`.

The operators of `test_operators.cases` launch on CPU tensors, but a launch only compiles, in the
first configuration of a kernel that comes.
"""

import importlib
import pkgutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import common_kernels
from common_kernels import backend
from common_kernels.adamw import Rates, Rule, Weight24
from common_kernels.adamw import triton as adamw
from common_kernels.adamw.weights import Step
from common_kernels.decode import triton as decode
from common_kernels.fp8 import operands_triton
from common_kernels.masks import triton as masks
from common_kernels.mvue import triton as mvue
from common_kernels.pack import Packed24
from tests.common_kernels.test_operators import cases

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
CASTS_TO_FP8 = 89  # on others `backend.resolve_fp8` takes the plain path
ALIKE = {86: 80, 120: 100}  # in LLVM's language, for kernels that every architecture shares


class Driver:
    """Answers what compiling asks of a GPU's driver."""

    architecture = 80

    def get_current_device(self):
        return self.architecture

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.architecture, 32)


class Shared:
    """Stages of Triton's compiler that, once a kernel is in the GPU dialect for one architecture,
    start from there for the next, and from LLVM's language for one that is alike. Kernels with
    products or with PTX of their own, which may choose by the architecture, are compiled from their
    source each time."""

    def __init__(self, folder):
        self.path, self.known = Path(folder, "kernel.ttgir"), None
        self.make_ir, self.make_ttir = ASTSource.make_ir, CUDABackend.make_ttir
        self.make_ttgir, self.make_llir = CUDABackend.make_ttgir, CUDABackend.make_llir
        self.low = {}
        ASTSource.make_ir = lambda *arguments, **named: self.ir(*arguments, **named)
        CUDABackend.make_ttir = staticmethod(self.ttir)
        CUDABackend.make_ttgir = staticmethod(self.ttgir)
        CUDABackend.make_llir = lambda *arguments: self.llir(*arguments)

    def ir(self, source, target, options, codegen_fns, module_map, context):
        if self.known is None:
            return self.make_ir(source, target, options, codegen_fns, module_map, context)
        text, _, of = self.known
        self.path.write_text(text.replace(f'"cuda:{of}"', f'"cuda:{target.arch}"'))
        module = ir.parse_mlir_module(str(self.path), context)
        module.context = context
        return module

    def ttir(self, module, *rest):
        return module if self.known else self.make_ttir(module, *rest)

    def ttgir(self, module, metadata, options, capability):
        if self.known:
            metadata.update((k, v) for k, v in self.known[1].items() if k not in metadata)
            return module
        made = self.make_ttgir(module, metadata, options, capability)
        text = str(made)
        if not any(word in text for word in ("tt.dot", "ttng.warp_group_dot", "inline_asm")):
            self.known = text, dict(metadata), capability
        return made

    def llir(self, backend, module, metadata, options, capability):
        like = ALIKE.get(capability)
        if not self.known or like not in self.low:
            made = self.make_llir(backend, module, metadata, options, capability)
            self.low[capability] = made, dict(metadata)
        made, more = self.low[like if self.known and like in self.low else capability]
        metadata.update((k, v) for k, v in more.items() if k not in metadata)
        return made


def compile_instead_of_launch(done, failed, shared):
    """Replace Triton's launch. done: the kernels that were compiled; failed: the reasons of those
    that cannot be, by kernel and architecture."""
    fake, run = Driver(), JITFunction.run
    driver.set_active(fake)

    def compiled(kernel, *args, grid, warmup, **options):
        name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
        if name in done:
            return
        done.add(name)
        shared.known = None
        shared.low.clear()
        for fake.architecture in ARCHITECTURES:
            try:
                run(kernel, *args, grid=grid, warmup=True, **options)
            except Exception as error:
                failed[name, fake.architecture] = str(error).strip().splitlines()[-1]

    JITFunction.run = compiled


def others():
    """Calls for the kernels that no operator of the table launches."""
    x, bf16 = torch.randn(64, 64), torch.bfloat16
    operands_triton.inverse(x[0, 0], x[0, 1])
    masks.nm_mask(x, 2, 8, 1)
    masks.nm_mask(x, 2, 4, 0)
    mvue.mvue24(x, torch.tensor([1, 4]), 1, "exact", 0)
    values, meta = torch.zeros(512, dtype=torch.int64), torch.zeros(128, dtype=torch.int32)
    decode.few_tokens24(values, meta, None, x[:16].to(bf16), x[0].to(bf16), 64)
    decode.few_tokens24(values[:128], meta, meta[:32], x[:16].to(bf16), None, 64)  # of 4 bits
    fields = {name: x.clone() for name in ("weight", "grad", "exp_avg", "exp_avg_sq")}
    operands = {name: Packed24.empty((64, 64), bf16) for name in ("packed", "transposed")}
    weight = Weight24(**fields, **operands, step=torch.tensor(1.0), mask=x > 0)
    rule = Rule(alpha=0.1, choose="exact")
    step = Step(Rates(lr=0.1), rule, torch.tensor(1.0), torch.tensor(0.0))
    adamw.adamw24_([[weight]], step)


def kernels():
    """The names of all kernels of `common_kernels`."""
    found = set()
    for module in pkgutil.walk_packages(common_kernels.__path__, "common_kernels."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, JITFunction) and value.fn.__name__.endswith("_kernel"):
                found.add(f"{value.fn.__module__}.{value.fn.__name__}")
    return found


def main():
    table, done, failed = cases(), set(), {}
    backend.resolve = backend.resolve_fp8 = lambda device, backend=None: "triton"
    with TemporaryDirectory() as folder:
        compile_instead_of_launch(done, failed, Shared(folder))
        for name, (call, operands) in table.items():
            if not name.startswith(("matmul24", "linear24", "mm24", "few_tokens", "convert")):
                try:
                    call("triton", *(operand.clone() for operand in operands.values()))
                except RuntimeError as error:  # after its kernel, the product itself
                    if "cannot serve" not in str(error):
                        raise
        others()
    for (name, architecture), reason in failed.items():
        if "fp8e4nv" not in reason or architecture >= CASTS_TO_FP8:
            print(f"{name} for {architecture}: {reason}")
    for name in kernels() - done:
        print(f"{name} was not compiled")


if __name__ == "__main__":
    main()
