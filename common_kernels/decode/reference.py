"""The sparse product of a warp by its definition (PTX ISA, mma.sp.m16n8k32 with 16-bit values); the
tests compare the fragments and the kernel with it."""

import torch


def few_tokens24(values: torch.Tensor, meta: torch.Tensor, x: torch.Tensor, rows: int):
    """x [tokens, columns] W^T in fp64, W given by its fragments; each lane's registers are put
    where the definition of the instruction says that they belong."""
    columns, dtype = x.shape[1], x.dtype
    registers = values.view(rows // 16, columns // 64, 2, 2, 32, 1).view(dtype).tolist()
    words = meta.view(rows // 16, columns // 64, 32).tolist()
    w = torch.zeros(rows, columns, dtype=torch.float64)
    for tile, parts in enumerate(registers):
        for part, products in enumerate(parts):
            for product, a in enumerate(products):
                for row in range(16):
                    for stored in range(16):  # column of the 16 x 16 compressed fragment
                        # a0 a1 | a2 a3 | a4 a5 | a6 a7: rows g, g + 8, then both 8 columns on
                        lane = 4 * (row % 8) + stored % 8 // 2
                        value = a[stored // 8][lane][2 * (row // 8) + stored % 2]
                        # Lanes 0 and 1 of four give positions to the first product, 2 and 3 to the
                        # second; each has those of 16 columns: bits 0 to 15 of row g, then g + 8.
                        word = words[tile][part][4 * (row % 8) + 2 * product + stored // 8]
                        place = word >> 16 * (row // 8) + 2 * (stored % 8) & 3
                        column = 64 * part + 32 * product + 4 * (stored // 2) + place
                        w[16 * tile + row, column] += value
    return x.double() @ w.t()
