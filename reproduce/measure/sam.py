"""The image encoder of SAM: torchao's Tables 2 and 5.

torchao's benchmark (benchmarks/benchmark_semi_sparse_training.py of pytorch/ao, removed in August
2026) calls this encoder ViT-L. Its script takes `image_encoder` of segment-anything-fast on
8 x 3 x 1024 x 1024 random pixels, all in fp16: forward, backward from a random gradient down to the
pixels, no optimizer. Here the encoder is timm's, without trained weights."""

import copy
import re
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from experiments.bench import gates, variants
from experiments.bench.jobs import ATTENTION, PATCH, encoder
from experiments.bench.timing import Call
from experiments.bench.variants import Bench
from reproduce.measure.base import Base, Metrics, Report, Result, gate
from reproduce.measure.packed import packed_layers, to_packed

# max-autotune without its two slowest parts, which would take minutes: inductor's own kernels are
# tuned, products stay with cuBLAS. CUDA graphs come from experiments.bench.timing.
COMPILED = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}


@dataclass(frozen=True, kw_only=True)
class Images(Base):
    """An encoder and its batch."""

    batch: int = 1
    width: int = 0  # of the model, with `heads`, if it is not that of timm
    heads: int = 1
    model: str  # its name in timm
    image: int = 1024  # side of the images in pixels

    @property
    def tokens(self) -> int:
        """Number of patches of a batch."""
        return self.batch * (self.image // PATCH) ** 2


@dataclass(frozen=True, kw_only=True)
class EncoderTraining(Images):
    """Speed of the encoder in training: forward and backward with the hooks of a step.

    On a GPU it is compiled and runs in a CUDA graph, except for figures named `launched`.
    """

    what: ClassVar[str] = "sam"
    method: str

    def measure(self, report: Report) -> Result:
        images = random_images(self)
        built: dict[str, Bench] = {}
        held: dict[str, int] = {}  # bytes between steps
        metrics: Metrics = {"launched_speedup": None}
        for label, name in {"dense": "dense", "sparse": self.method}.items():
            before = torch.cuda.memory_allocated()
            built[label] = encoder_bench(name, images, self)
            held[label] = torch.cuda.memory_allocated() - before
            metrics |= {f"{label}_launched_ms": None, f"{label}_gb": None}
        calls: dict[str, Call] = {label: one.whole for label, one in built.items()}
        with sdpa_kernel(ATTENTION):
            if self.on.type == "cuda":
                times = self.in_turns(calls, 1, graphs=False)
                metrics |= {f"{label}_launched_ms": ms for label, ms in times.items()}
                metrics["launched_speedup"] = times["dense"] / times["sparse"]
                report(f"launched: dense {times['dense']:.1f} ms, 2:4 {times['sparse']:.1f} ms")
                for label, one in built.items():
                    compile_blocks(label, one)
                for label, one in built.items():
                    metrics[f"{label}_gb"] = peak(one, held[label]) / 1e9
            times = self.in_turns(calls, 1)
        metrics |= times.load | {f"{label}_ms": ms for label, ms in times.items()}
        metrics["speedup"] = times["dense"] / times["sparse"]
        used = built["sparse"].converted.used
        return metrics, f"{used}, {times.launched}"


def build_encoder(config: Images) -> Any:
    """SAM's encoder of the config's size, with random weights."""
    changed: dict[str, Any] = {"img_size": config.image}
    if config.width:
        changed |= {"embed_dim": config.width, "num_heads": config.heads}
    with config.on:
        return encoder(config.model, **changed).to(config.dtype)


def random_images(config: Images) -> Tensor:
    """A batch of random pixels."""
    size = config.batch, 3, config.image, config.image
    return torch.randn(size, device=config.on, dtype=config.dtype)


def encoder_bench(name: str, images: Tensor, config: EncoderTraining) -> Bench:
    """The encoder under the method `name`, after its products were checked."""
    torch.manual_seed(config.seed)
    model = build_encoder(config)
    mlp = model.blocks[0].mlp
    for layer in (mlp.fc1, mlp.fc2):
        shape = config.tokens, layer.in_features, layer.out_features
        gate(config.method, shape, config.dtype, config.on, config.matmul)
    size = (config.dtype, config.tokens, config.matmul)
    converted = variants.convert(name, model, ("*mlp.*",), *size)
    with torch.no_grad():
        gradient = torch.randn_like(model(images))
    return Bench(converted, [images], [gradient])


def compile_blocks(name: str, built: Bench) -> None:
    """Compile the blocks, which share their code."""
    built.whole(0)
    want = built.found()
    blocks: Any = built.converted.model.blocks
    for block in blocks:
        block.compile(fullgraph=True, options=COMPILED)
    with variants.compiling():
        built.whole(0)
    gates.check_same(name, built.found(), want)
    built.clear()


def peak(built: Bench, held: int) -> int:
    """Peak bytes in a step of this model alone, which has `held` bytes between steps."""
    built.clear()
    others = torch.cuda.memory_allocated() - held
    torch.cuda.reset_peak_memory_stats()
    built.whole(0)
    built.clear()
    return torch.cuda.max_memory_allocated() - others


@dataclass(frozen=True, kw_only=True)
class EncoderInference(Images):
    """Images per second of the encoder whose linears in the parts `packed` are 2:4, its speed over
    dense, and the peak memory of a forward pass in MiB."""

    what: ClassVar[str] = "sam_inference"
    packed: tuple[str, ...] = ()

    def measure(self, _: Report) -> Result:
        torch.manual_seed(self.seed)
        images = random_images(self)
        dense: Any = build_encoder(self).eval()
        built, products = {"dense": dense}, "dense"
        if self.packed:
            built["sparse"] = copy.deepcopy(dense)
            chosen = re.compile(rf"\.({'|'.join(self.packed)})\.").search
            sparse, tokens = built["sparse"], (self.tokens,)
            products = to_packed(sparse, lambda name: bool(chosen(name)), tokens, self.on)

        @torch.no_grad()
        def run(model: Any, _: int) -> Any:
            return model(images)

        calls: dict[str, Call] = {name: partial(run, model) for name, model in built.items()}
        times = self.in_turns(calls, 1)
        own = "sparse" if self.packed else "dense"
        rate, speedup = 1e3 * self.batch / times[own], times["dense"] / times[own]
        on_gpu = self.on.type == "cuda"
        mib = forward_mib(calls[own], built[own]) if on_gpu else None
        metrics = times.load | {"rate": rate, "speedup": speedup, "mib": mib}
        return metrics, f"{products}, {times.launched}"


def forward_mib(call: Call, model: nn.Module) -> float:
    """Peak MiB that torch has allocated during a call on a GPU, counting this model's weights as
    they are stored (packed ones without their dense copies) and no other model's."""
    own = sum(p.nbytes for p in model.parameters())
    own += sum(m.packed.buffer.nbytes - m.weight.nbytes for m in packed_layers(model))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(0)
    return (torch.cuda.max_memory_allocated() - before + own) / 2**20
