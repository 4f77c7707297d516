"""Registration of the operators in `torch.ops.sparse24`.

`custom_op` keeps the contract of torch.library.custom_op (opaque to torch.compile, known to fake
tensors, no gradient but a registered one, version counters that show a mutation) at less than half
of its price: that one passes through Python at each of the keys Autograd, ADInplaceOrView and
CompositeExplicitAutograd, some 20 to 100 us of a CPU for each call. Here the kernel at Autograd
calls the function itself where nothing but autograd stands between: strided tensors in a CPU's or
a GPU's memory and no mode that would see the call.
"""

import functools
import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

LIBRARY = torch.library.Library("sparse24", "DEF")

# A call whose keys, as bits, are all among these goes straight to the function.
_DIRECT = functools.reduce(
    operator.or_,
    (
        DispatchKeySet(key).raw_repr()
        for key in (
            DispatchKey.CPU, DispatchKey.CUDA, DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA,
            DispatchKey.ADInplaceOrView, DispatchKey.BackendSelect,
        )
    ),
)  # fmt: skip


def custom_op(
    name: str, *, mutates_args: Iterable[str] = ()
) -> Callable[[Callable[..., Any]], "CustomOp"]:
    """Register the decorated function as the operator `name`, "sparse24::...".

    Its schema is inferred from its annotations (torch.library.infer_schema). It takes positional
    arguments without defaults, lists of tensors aside, and returns tensors that share no memory
    with them, or None. `mutates_args` names the tensors that it writes to.
    """
    return lambda function: CustomOp(name, function, tuple(mutates_args))


class CustomOp:
    """What `custom_op` makes of a function; to be called as `torch.ops.sparse24.<name>`."""

    def __init__(self, name: str, function: Callable[..., Any], mutates_args: tuple[str, ...]):
        self.name, self.function = name, function
        parameters = list(inspect.signature(function).parameters)
        self.mutated = [parameters.index(argument) for argument in mutates_args]
        self.backward: Callable[..., Any] | None = None
        self.setup_context: Callable[..., None] | None = None
        short = name.removeprefix("sparse24::")
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        LIBRARY.define(short + schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.overload = getattr(torch.ops.sparse24, short).default
        LIBRARY.impl(short, self._backend, "CompositeExplicitAutograd")
        LIBRARY.impl(short, self._autograd, "Autograd", with_keyset=True)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator of what gives the shapes, dtypes and strides of the result."""
        torch.library.register_fake(self.name, function, lib=LIBRARY)
        return function

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None]
    ) -> None:
        """`backward(ctx, *gradients)` and `setup_context(ctx, inputs, output)`, as in an
        autograd.Function.
        """
        self.backward, self.setup_context = backward, setup_context

    # TorchDynamo must not look into the two kernels where it meets them at run time.

    @torch._disable_dynamo
    def _backend(self, *args: Any) -> Any:
        return self._run(*args)

    @torch._disable_dynamo
    def _autograd(self, keyset: DispatchKeySet, *args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            self._refuse_to_write(args)
            return _Node.apply(*args, self, keyset)
        return self._below_autograd(keyset, args)

    def _refuse_to_write(self, args: tuple[Any, ...]) -> None:
        for tensor in (args[i] for i in self.mutated):
            if tensor is not None and tensor.requires_grad:
                kind = "a leaf" if tensor.is_leaf else "a tensor"
                raise RuntimeError(
                    f"{self.name} writes into {kind} that requires grad, and has no gradient; call "
                    "it under torch.no_grad()"
                )

    def _below_autograd(self, keyset: DispatchKeySet, args: tuple[Any, ...]) -> Any:
        # No guard against autograd on the direct path: gradients are off, or none is asked for.
        if not keyset.raw_repr() & ~_DIRECT:
            return self._run(*args)
        self._bump_versions(args)
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def _run(self, *args: Any) -> Any:
        if self.mutated:
            self._bump_versions(args)
        return self.function(*args)

    def _bump_versions(self, args: tuple[Any, ...]) -> None:
        """Autograd sees by them that a tensor that was saved for a backward has changed."""
        tensors = [args[i] for i in self.mutated if args[i] is not None]
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        *inputs, op, keyset = args
        output = op._below_autograd(keyset, tuple(inputs))
        ctx.op = op
        if op.setup_context:
            op.setup_context(ctx, tuple(inputs), output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.op.backward is None:
            raise RuntimeError(f"{ctx.op.name} has no gradient: no autograd formula is registered")
        return *ctx.op.backward(ctx, *gradients), None, None
