"""Registration of the operators in `torch.ops.sparse24`."""

import functools
import importlib
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

# A call whose dispatch keys are all in this set goes straight to the function: strided tensors on
# a CPU or a GPU, and no active mode that must see the call.
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


def operator_of(
    on_cpu: Callable, fake: Callable | None = None, *, mutates_args: tuple[str, ...] = ()
) -> Any:
    """The operator `sparse24::NAME` of the function NAME of a family's cpu.py.

    It takes that function's parameters and then `backend`: "triton" calls the function of the same
    name in the family's triton.py, which is imported then, and "cpu" calls `on_cpu`. `fake` takes
    the same parameters as `on_cpu` and returns what fake tensors shall become; None for an operator
    that only writes into `mutates_args`.
    """
    name, family = on_cpu.__name__, on_cpu.__module__.rpartition(".")[0]

    @functools.cache
    def kernel() -> Callable:
        return getattr(importlib.import_module(f"{family}.triton"), name)

    def dispatch(*arguments: Any) -> Any:
        *given, backend = arguments
        return kernel()(*given) if backend == "triton" else on_cpu(*given)

    signature = inspect.signature(on_cpu)
    backend = inspect.Parameter("backend", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=str)
    dispatch.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            *(p.replace(default=inspect.Parameter.empty) for p in signature.parameters.values()),
            backend,
        ]
    )
    known = custom_op(f"sparse24::{name}", mutates_args=mutates_args)(dispatch)
    if fake is not None:
        known.register_fake(lambda *arguments: fake(*arguments[:-1]))
    return known


def custom_op(name: str, *, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable], Any]:
    """A decorator that registers a function as the operator `name` ("sparse24::..."), as
    torch.library.custom_op does: torch.compile, fake tensors and autograd know it. One that returns
    None needs no `register_fake`.

    A call that records no gradient has half the overhead of torch's own decorator: the Autograd key
    calls the function directly, without another round through Python at the lower keys. Writing
    into a tensor that requires grad raises RuntimeError, as for torch's in-place operators.
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
            if written:  # so that autograd notices if a tensor that it saved has changed
                torch.autograd.graph.increment_version([t for t in written if not t.is_inference()])
            return function(*args)

        # Keep Dynamo out of this function and of all it calls. A mark on the code object costs
        # nothing at run time; torch.compiler.disable would add two calls.
        eval_frame.set_code_exec_strategy(autograd.__code__, _SKIP)
        with warnings.catch_warnings():  # torch warns of the override, which is intended
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            LIBRARY.impl(name, autograd, "Autograd", with_keyset=True, allow_override=True)
        if inspect.signature(function).return_annotation in (None, "None"):
            known.register_fake(lambda *_: None)
        return known

    return register


def default_kernel(name: str) -> Callable[[Callable], None]:
    """A decorator that makes a function the kernel of the operator `name` of this library on every
    device that has no kernel of its own."""

    def register(function: Callable) -> None:
        eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")

    return register


def _refuse_to_write(name: str, written: list[torch.Tensor]) -> None:
    for tensor in written:
        if tensor.requires_grad:
            kind = "a leaf" if tensor.is_leaf else "a tensor"
            raise RuntimeError(
                f"{name} writes into {kind} that requires grad, but has no gradient; call it under "
                "torch.no_grad()"
            )
