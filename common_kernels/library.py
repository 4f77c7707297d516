"""Registration of the operators in `torch.ops.sparse24`."""

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._C._dynamo import eval_frame
from torch._library.autograd import make_autograd_impl

LIBRARY = torch.library.Library("sparse24", "FRAGMENT")
KERNELS: dict[str, Callable[..., torch.Tensor | None]] = {}  # see `kernels_of`
# Called in the first operator on a GPU that C++ can take over: `start` of matmul/native.py.
STARTS: list[Callable[[], None]] = []

# A call whose dispatch keys are all in this set goes straight to the function: strided tensors on
# a CPU or a GPU, and no active mode that must see the call.
_DIRECT = functools.reduce(
    int.__or__,
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
            written = [args[i] for i in mutated if i < len(args) and args[i] is not None]
            if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
                if any(tensor.requires_grad for tensor in written):
                    raise RuntimeError(
                        f"{name} writes into a tensor that requires grad, but has no gradient; "
                        "call it under torch.no_grad()"
                    )
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


def launched_by_cpp(schema: str, fake: Callable | None = None) -> Callable[[Callable], Any]:
    """A decorator that makes a function the operator of this schema, until C++ takes it over on
    GPUs (matmul/native.py). Autograd passes it by, which is quicker: it is called only where no
    gradient is recorded. `fake` returns what fake tensors shall become; None if C++ calls it."""
    name = schema.partition("(")[0]

    def register(function: Callable) -> Any:
        def in_python(*arguments: Any) -> Any:
            if fake and any(isinstance(x, torch.Tensor) and x.is_cuda for x in arguments):
                for start in STARTS:  # for the next call
                    start()
            return function(*arguments)

        LIBRARY.define(schema)
        for code in (in_python.__code__, function.__code__):
            eval_frame.set_code_exec_strategy(code, _SKIP)
        LIBRARY.impl(name, in_python, "CompositeExplicitAutograd")
        if fake is not None:
            LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
            torch.library.register_fake(f"sparse24::{name}", fake, lib=LIBRARY)
        return getattr(torch.ops.sparse24, name).default

    return register


def kernels_of(name: str) -> Callable[[Callable], None]:
    """A decorator for the function that launches, in Python, the kernels that C++ asks for by this
    name to launch them itself from then on. It takes the words that follow the name, whole numbers,
    and tensors, and returns the packed buffer that they fill, if any."""
    return functools.partial(KERNELS.__setitem__, name)
