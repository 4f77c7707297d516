"""FSDP2 in the trainer: weights, gradients and moments are sharded by rows over all ranks.

The arithmetic is that of one process. As usual, autocast with `train.dtype` alone decides the dtype
of a product. Weights that it would round anyway are gathered in rounded form if torch supports it,
and gradients are summed in fp32.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.config.settings import ImplConfig
from experiments.support.errors import UserError
from experiments.training.blocks import blocks
from experiments.training.distributed import World
from methods import Method
from methods.nn import sharding
from methods.nn.fp8_gemms import FP8
from methods.nn.gemms import Products
from methods.nn.linear import SparseLinear
from methods.nn.plain import fill, without_numbers
from models.base import Model


def shards_weights(impl: ImplConfig, world: World) -> bool:
    """True if the weights are to be sharded over the ranks; a single process holds all of them."""
    return impl.shard == "fsdp2" and world.size > 1


def check_shardable(method: Method, impl: ImplConfig, world: World) -> None:
    """Raise a `UserError` if these settings do not work with sharded weights."""
    if not shards_weights(impl, world):
        if impl.offload:
            raise UserError(
                "impl.offload=true needs several processes that share the weights; start them with "
                "torchrun, or set impl.offload=false"
            )
        return
    if impl.repack_backward:
        raise UserError(
            "impl.repack_backward=true with impl.shard=fsdp2: no operand of sharded weights is "
            "held between passes; set it to false"
        )
    fp8 = FP8[getattr(method.config, "fp8", "off")]
    if fp8 is not None and fp8.on_units and world.device.type == "cuda":
        raise UserError(
            f"method.fp8={method.config.fp8} with impl.shard=fsdp2: FP8 units need whole weights; "
            "set method.fp8=paper, which is simulated, or impl.shard=ddp"
        )


def accelerate(method: Method, tokens: int, impl: ImplConfig) -> dict[str, Products]:
    """`Method.accelerate` with the settings of `impl`, after sharding; errors are `UserError`s."""
    try:  # with auto the environment variable decides
        matmul = None if impl.matmul == "auto" else impl.matmul
        return method.accelerate(tokens, matmul, impl.repack_backward)
    except (ValueError, RuntimeError) as error:
        raise UserError(str(error)) from error


class Shards:
    """Shards a converted, not yet trained model and its method over the ranks. dtype: of autocast.

    The weights are those of rank 0, on any device; on other ranks they may be on the meta device.
    They are moved to the devices block by block, so that no device ever holds more than its rows
    and one block (or all that is outside of blocks)."""

    def __init__(
        self,
        model: Model,
        method: Method,
        impl: ImplConfig,
        dtype: torch.dtype | None,
        world: World,
    ) -> None:
        self.model, self.method, self.world = model, method, world
        teacher = getattr(method, "teacher", None)
        # For `unsharded`: the model as it is before FSDP takes over the parameters.
        self._shapes = without_numbers((model, method), model, {id(teacher): None})
        mesh = torch.distributed.init_device_mesh(world.device.type, (world.size,))
        for block in blocks(model).values() if impl.compile else ():
            block.compile()  # before FSDP adds hooks, which would break the graph of a whole model
        try:
            for each in (model, teacher):
                if each is not None:
                    self._shard(each, mesh, dtype, impl.offload)
            sharding.shard_layers(method.layers.values(), model)
        except ValueError as error:
            raise UserError(f"impl.shard=fsdp2: {error}") from error

    def _shard(self, model: nn.Module, mesh: Any, dtype: torch.dtype | None, offload: bool) -> None:
        """Shard each block of `model`, and the parameters outside of blocks, which stay gathered
        from the forward to the backward pass if it is trained.

        dtype: autocast's dtype, if any.
        offload: keep the shards in the host's memory.
        """
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        # The dtypes in which parameters are gathered and gradients summed.
        dtypes: dict[str, Any] = {"reduce_dtype": torch.float32, "cast_forward_inputs": False}
        options: dict[str, Any] = {"mesh": mesh}
        if offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        done: set[nn.Module] = set()
        for part in (*blocks(model).values(), model):
            _materialize_from_rank0(part, done, self.world)
            if part is model:
                options["reshard_after_forward"] = None if model is self.model else True
            if dtype is not None and gathers_rounded():
                rounded = {id(p) for p in _rounded(model)}
                dtypes |= {
                    "param_dtype": dtype,
                    "param_dtype_override_fn": lambda p, own=rounded: (
                        dtype if id(p) in own else p.dtype
                    ),
                }
            fully_shard(part, mp_policy=MixedPrecisionPolicy(**dtypes), **options)
            sharding.shard_layers(part.modules())

    @torch.no_grad()
    def unsharded(self) -> tuple[Model, Method] | None:
        """A whole copy of model and method on rank 0's CPU, else None. Every rank must call it."""
        state: dict[str, Tensor] = {}
        sharding.shard_layers(self.method.layers.values(), self.model)
        for name, tensor in self.model.state_dict().items():
            gathered = sharding.full(tensor)
            if self.world.is_main:
                state[name] = gathered.cpu()
        if not self.world.is_main:
            return None
        # A new copy in each call, because the averaged weights need a second one.
        model, method = copy.deepcopy(self._shapes)
        fill(model, state)
        return model, method

    def finalize(self) -> None:
        """Finalize the sharded layers but SLoPe's, whose own parameter computes the same."""
        if all("weight" in layer._parameters for layer in self.method.sparse_layers.values()):
            self.method.finalize(self.model)


@torch.no_grad()
def _materialize_from_rank0(module: nn.Module, done: set[nn.Module], world: World) -> None:
    """Give modules in `module` that are not yet `done` rank 0's tensors; tied ones stay tied."""
    of_rank0 = cache(partial(_broadcast_tensor, world=world))
    for part in module.modules():
        for tensors in (part._parameters, part._buffers) if part not in done else ():
            places: dict[str, Any] = tensors
            places.update({name: of_rank0(own) for name, own in places.items() if own is not None})
        done.add(part)


def _broadcast_tensor(own: Tensor, world: World) -> Tensor:
    """Rank 0's tensor for this rank's `own`, on this rank's device."""
    there = own.device.type == world.device.type
    if there or world.is_main:
        tensor = own.detach().to(world.device)
    else:
        tensor = torch.empty_like(own.detach(), device=world.device)
    tensor = tensor.contiguous()
    if tensor.numel():
        torch.distributed.broadcast(tensor.view(-1).view(torch.uint8), src=0)
    if there:
        return own if tensor.data_ptr() == own.data_ptr() else own.copy_(tensor)
    if isinstance(own, nn.Parameter):
        return nn.Parameter(tensor, requires_grad=own.requires_grad)
    return tensor


def gathers_rounded() -> bool:
    """True if weights that autocast would round are gathered in rounded form. Before torch 2.15,
    which can choose for each parameter, all weights are gathered unrounded."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return "param_dtype_override_fn" in inspect.signature(MixedPrecisionPolicy).parameters


def _rounded(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that are used only in autocast's dtype."""
    everywhere = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    for module in model.modules():
        if type(module) is nn.Linear or (
            isinstance(module, SparseLinear) and module.rounds_first and not module.precision
        ):
            for parameter in module._parameters.values():
                # A weight tied to an embedding is also used in fp32.
                if parameter is not None and everywhere[id(parameter)] == 1:
                    yield parameter
