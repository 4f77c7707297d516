"""The sparse product of a warp by its definition (PTX ISA, mma.sp.m16n8k32 with 16-bit values); the
tests compare the fragments and the kernel with it."""

import itertools

import torch


def few_tokens24(
    values: torch.Tensor, meta: torch.Tensor, scales: torch.Tensor | None, x: torch.Tensor,
    rows: int,
) -> torch.Tensor:  # fmt: skip
    """x [tokens, columns] W^T in fp64, W given by its fragments; each lane's registers are put
    where the definition of the instruction says that they belong."""
    columns, dtype = x.shape[1], x.dtype
    bits = 128 * values.numel() // (rows * columns)
    registers = values.view(rows // 16, columns // 64, -1).tolist()
    words = meta.view(rows // 16, columns // 64, 32).tolist()
    w = torch.zeros(rows, columns, dtype=torch.float64)
    for tile, parts in enumerate(registers):
        for part, held in enumerate(parts):
            for product, row, stored in itertools.product(*map(range, (2, 16, 16))):
                # stored: column of the 16 x 16 compressed fragment, of which a register has two:
                # a0 a1 | a2 a3 | a4 a5 | a6 a7: rows g, g + 8, then both 8 columns on
                p, pair, second = stored // 8, stored % 8 // 2, stored % 2
                lane, half = 4 * (row % 8) + pair, row // 8
                # The word of 64 bits, and where in it the value begins.
                at, shift = {
                    16: (64 * product + 32 * p + lane, 32 * half + 16 * second),
                    8: (32 * product + lane, 32 * p + 8 * half + 16 * second),
                    4: (lane, 32 * product + 8 * p + 4 * half + 16 * second),
                }[bits]
                value = held[at] >> shift & 2**bits - 1
                # Lanes 0 and 1 of four give positions to the first product, 2 and 3 to the second;
                # each has those of 16 columns: bits 0 to 15 of row g, then g + 8.
                word = words[tile][part][4 * (row % 8) + 2 * product + p]
                place = word >> 16 * half + 2 * (stored % 8) & 3
                column = 64 * part + 32 * product + 4 * (stored // 2) + place
                if scales is None:
                    number = torch.tensor(value).to(torch.uint16).view(dtype).double()
                else:  # in two's complement; 128 columns of a row share a scale
                    both = scales.view(rows // 16, -1, 8)[tile, part // 2, row % 8]
                    number = both.view(1).view(torch.bfloat16)[half].double()
                    number *= value - (value >> bits - 1 << bits)
                w[16 * tile + row, column] += number
    return x.double() @ w.t()
