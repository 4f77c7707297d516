"""Registration of the operators in `torch.ops.sparse24`."""

import functools
import inspect
import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._C._dynamo import eval_frame
from torch._library.autograd import make_autograd_impl

LIBRARY = torch.library.Library("sparse24", "FRAGMENT")

# A call whose keys, as bits, are all among these goes straight to the function: strided tensors in
# a CPU's or a GPU's memory, and no mode that would see the call.
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

_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def custom_op(name: str, *, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable], Any]:
    """Decorate a function to become the operator `name`, "sparse24::...", as
    torch.library.custom_op does: known to torch.compile, to fake tensors and to autograd.

    A call that has no gradient to record then costs half: it goes from the key Autograd to the
    function itself, where torch passes through Python again at the keys below. An operator that
    writes into a tensor that requires grad is refused, as torch's own are.
    """

    def register(function: Callable) -> Any:
        known = torch.library.custom_op(name, function, mutates_args=mutates_args)
        by_torch = make_autograd_impl(known._opoverload, known)
        parameters = list(inspect.signature(function).parameters)
        mutated = [parameters.index(argument) for argument in mutates_args]

        def autograd(keyset: DispatchKeySet, *args: Any) -> Any:
            written = [args[i] for i in mutated if args[i] is not None]
            if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
                _refuse_to_write(name, written)
                return by_torch(keyset, *args)
            if keyset.raw_repr() & ~_DIRECT:
                return by_torch(keyset, *args)
            if written:  # autograd sees by its version that a tensor that it has saved has changed
                torch.autograd.graph.increment_version([t for t in written if not t.is_inference()])
            return function(*args)

        # Dynamo, which can meet this at run time, looks neither into it nor into what it calls. It
        # is a mark on the code, where torch.compiler.disable would be two calls more.
        eval_frame.set_code_exec_strategy(autograd.__code__, _SKIP)
        with warnings.catch_warnings():  # torch warns of the override that is asked for
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            LIBRARY.impl(name, autograd, "Autograd", with_keyset=True, allow_override=True)
        return known

    return register


def _refuse_to_write(name: str, written: list[torch.Tensor]) -> None:
    for tensor in written:
        if tensor.requires_grad:
            kind = "a leaf" if tensor.is_leaf else "a tensor"
            raise RuntimeError(
                f"{name} writes into {kind} that requires grad, and has no gradient; call it under "
                "torch.no_grad()"
            )
