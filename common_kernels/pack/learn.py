"""The order of cuSPARSELt's metadata on a GPU where we do not know it, learnt from its packing.

A few dozen small matrices, packed once for each GPU and size of a value, tell which group's nibble
lies at each address. Where the addresses' binary digits are those of row and group in some order,
as in every order that we know, our packers write it. Before a product uses it, they are compared
with the library for the very matrix that will be packed (matmul/choice.py).
"""

import functools

import torch

from common_kernels.pack import cpu
from common_kernels.pack.cpu import VENDOR, Form, Layout
from common_kernels.pack.cusparselt import CuSparseLtError

DIGITS = {"r": 8, "g": 7}  # of a row and of a group in a matrix that is packed to learn
ROWS, GROUPS = (1 << digits for digits in DIGITS.values())
DTYPES = {2: torch.bfloat16, 1: torch.float8_e4m3fn}
MULTIPLE = 64
# Our packers write words of metadata, whose nibbles lie in a block of 64 rows by 16 groups.
WORD = [f"r{i}" for i in range(6)] + [f"g{i}" for i in range(4)]


@functools.cache
def layout_on(device: torch.device) -> str | None:
    """The name of the layout that the library has on `device`, for our packers; None if they cannot
    write it for 16-bit values."""
    forms = {}
    for size, dtype in DTYPES.items():
        try:
            order = order_of(dtype, device)
        except CuSparseLtError:  # without FP8, for example
            continue
        if order is not None:
            rows, groups = cpu.tile(order)
            needs = max(rows, MULTIPLE), max(4 * groups, MULTIPLE)
            forms[size] = Form(*needs, torch.uint8, order)
    if 2 not in forms:
        return None
    kind = device.type
    if device.type == "cuda":
        kind = "sm{}{}".format(*torch.cuda.get_device_capability(device))
    name = f"{VENDOR}_learnt_{kind}"
    cpu.LAYOUTS[name] = Layout(forms)
    return name


def order_of(dtype: torch.dtype, device: torch.device) -> str | None:
    """The library's order for values of `dtype`; None if our packers cannot write it."""
    number = torch.arange(ROWS * GROUPS, device=device)
    found = torch.zeros_like(number)  # the number of the group at each address
    for digit in range(sum(DIGITS.values())):
        late = (number >> digit & 1).view(ROWS, GROUPS, 1) != 0
        x = torch.cat([~late, ~late, late, late], -1).view(ROWS, 4 * GROUPS).to(dtype)
        meta = cpu.by_library(x)[x.numel() // 2 * dtype.itemsize :][: len(number) // 2]
        nibbles = torch.stack([meta & 15, meta >> 4], -1).flatten()
        if not ((nibbles == 0b0100) | (nibbles == 0b1110)).all():
            return None
        found |= (nibbles == 0b1110).long() << digit
    ones = found[1 << torch.arange(sum(DIGITS.values()), device=device)]
    if not torch.equal(sum(one * (number >> i & 1) for i, one in enumerate(ones)), found):
        return None
    names = {1 << i: f"g{i}" for i in range(DIGITS["g"])}
    names |= {GROUPS << i: f"r{i}" for i in range(DIGITS["r"])}
    digits = [names.get(one, "") for one in reversed(ones.tolist())]
    in_a_word = all(digit in WORD for digit in digits[-3:])
    if set(digits) != set(names.values()) or not in_a_word:
        return None
    outer = digits[0][0]
    inner = "r" if outer == "g" else "g"
    for name in outer, inner:  # the highest digits count tiles
        highest = [f"{name}{i}" for i in reversed(range(DIGITS[name]))]
        same = [one == other for one, other in zip(digits, highest, strict=False)]
        tiles = [*same, False].index(False)
        if not tiles:
            return None
        del digits[:tiles]
    return " ".join([outer, inner, *digits])
