"""The order of cuSPARSELt's metadata, learnt from what the library packs. On a CPU the library is
emulated, with orders that are known and with invented ones."""

import random
from dataclasses import replace

import pytest
import torch

from common_kernels import nm_mask
from common_kernels.matmul import Problem, choice
from common_kernels.pack import BUFFERED, VENDOR, cpu, learn, pack24
from common_kernels.pack.cusparselt import CuSparseLtError

pytest.importorskip("triton", reason="no Triton for this platform")

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
emulated = pytest.mark.skipif(CUDA, reason="a GPU has the real library")


def shuffled(tiles, rows, groups, seed):
    """An order whose tiles have their digits in random order, but three that a word may have."""
    digits = [f"r{i}" for i in range(rows)] + [f"g{i}" for i in range(groups)]
    random.Random(seed).shuffle(digits)
    inside = [digit for digit in digits if digit not in ("r6", "g4", "g5")][:3]
    return " ".join([tiles, *(digit for digit in digits if digit not in inside), *inside])


ORDERS = {
    "9.0": cpu.ORDERS[BUFFERED][2],
    "9.0, FP8": cpu.ORDERS[BUFFERED][1],
    "8.x": "g r g3 r6 r5 r2 r1 r0 r4 g2 r3 g1 g0",  # written by torch's tile kernel
    "8.x, CUTLASS": cpu.ORDERS["cutlass_sm80"][2],
    **{f"shuffled {seed}": shuffled("r g", 6, 6, seed) for seed in range(2)},
    "shuffled 2": shuffled("g r", 7, 3, 2),
}


@pytest.fixture
def library(monkeypatch):
    """`library(addresses)` emulates a library that writes nibbles to addresses(rows, columns)."""
    cached = learn.layout_on, choice._library_layout, choice.as_learnt
    before = dict(cpu.LAYOUTS)

    def use(addresses):
        found = {}

        def pack(x, buffer=None):
            kept = x.view(cpu.INTEGERS[x.element_size()]) != 0
            values, nibbles = cpu.compress(x, kept)
            at = found.setdefault(x.shape, addresses(*x.shape).flatten())
            meta = torch.zeros(len(at), dtype=torch.uint8)
            meta[at] = nibbles.flatten()
            return torch.cat([values.flatten().view(torch.uint8), meta[::2] | meta[1::2] << 4])

        for function in cached:
            function.cache_clear()
        monkeypatch.setattr(cpu, "by_library", pack)

    yield use
    for function in cached:
        function.cache_clear()
    cpu.LAYOUTS.clear()
    cpu.LAYOUTS.update(before)


def in_order(order):
    return lambda rows, columns: cpu.addresses(order, rows, columns)


@emulated
def test_other_ways_to_pack_are_refused(library):
    base = cpu.ORDERS[BUFFERED][2]
    tile = torch.randperm(512, generator=torch.Generator().manual_seed(0))

    def within(rows, columns):
        at = cpu.addresses(base, rows, columns)
        return at // 512 * 512 + tile[at % 512]

    def crossed(rows, columns):
        at = cpu.addresses(base, rows, columns)
        return at ^ (at >> 6 & 1) << 3

    for addresses in (
        within, crossed, in_order("r g r5 r4 r3 r2 r1 g1 g0 g2 r0 r6"),  # a word of 66 rows
        in_order("r g g5 g6 r5 r4 r3 r2 r1 r0 g4 g3 g2 g1 g0"), lambda *shape: within(*shape) ^ 1,
    ):  # fmt: skip
        library(addresses)
        assert learn.order_of(BF16, DEVICE) is None and learn.layout_on(DEVICE) is None


@emulated
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_orders_are_learnt_and_our_packers_write_them(order, library):
    from common_kernels.pack import triton

    library(in_order(order))
    found = learn.order_of(BF16, DEVICE)
    for shape in ((128, 256), (384, 768), (128, 1280)):
        assert torch.equal(cpu.addresses(found, *shape), cpu.addresses(order, *shape)), found
    name = learn.layout_on(DEVICE)
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    kept = nm_mask(x)
    pruned = torch.where(kept, x, 0.0)
    for dtype in (BF16, E4M3):
        want = cpu.by_library(pruned.to(dtype))
        assert torch.equal(pack24(x.to(dtype), kept, name, backend="cpu").buffer, want)
    got = triton.pack(x.to(BF16), kept, "mask", BF16, layout=name)
    assert torch.equal(got, cpu.by_library(pruned.to(BF16)))
    assert choice.as_learnt(name, 384, 512, BF16, DEVICE)


@emulated
def test_a_shape_that_is_packed_otherwise_is_left_to_the_library(library, monkeypatch):
    known = cpu.ORDERS[BUFFERED][2]

    def addresses(rows, columns):
        return cpu.addresses(known if rows < 512 else ORDERS["8.x"], rows, columns)

    library(addresses)
    monkeypatch.setenv(choice.PACKER_VARIABLE, "learnt")
    name = choice.library_layout(DEVICE)
    assert name.startswith(VENDOR) and name not in (BUFFERED, VENDOR)
    problem = Problem(128, 256, 64, BF16, BF16, False, False)
    assert choice.library_layout_for(problem, DEVICE) == name
    with pytest.warns(UserWarning, match=r"\[512, 256\]"):
        assert choice.library_layout_for(replace(problem, rows=512), DEVICE) == VENDOR


@emulated
def test_a_library_without_codes_serves_the_others(library, monkeypatch):
    library(in_order(ORDERS["9.0"]))
    pack = cpu.by_library

    def refuses(x, buffer=None):
        if x.element_size() == 1:
            raise CuSparseLtError("cusparseLtStructuredDescriptorInit: not supported")
        return pack(x, buffer)

    monkeypatch.setattr(cpu, "by_library", refuses)
    assert set(cpu.LAYOUTS[learn.layout_on(DEVICE)].forms) == {2}


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_this_gpu():
    name = learn.layout_on(DEVICE)
    assert name is not None
    if torch.cuda.get_device_capability() == (9, 0):
        for size, form in cpu.LAYOUTS[BUFFERED].forms.items():
            assert cpu.LAYOUTS[name].forms[size].order == form.order
    for dtype in (BF16, torch.float16, E4M3, E5M2):
        for shape in ((64, 64), (192, 320), (4096, 1024)):
            assert choice.as_learnt(name, *shape, dtype, DEVICE)
