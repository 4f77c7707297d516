"""Holds what the methods share: protocol, sparse layers and products, and what is built on them.

    base            `Config` and `Method`: the options and the hooks of every method, with defaults
    conversion      which linears of a model are converted, and the report of it
    linear          the sparse layer, and the one with a mask
    phases          layers and methods that are dense for a part of the training
    transposable    the layer whose mask is 2:4 along both dims
    compressed      the layer that stores its weight as the kept values, and low-rank adapters
    optimizer       AdamW that does a step's work on the sparse weights in its own pass
    slorb           the low-rank term of AST
    gemms           the three products of a layer, dense or 2:4; fp8_gemms: in FP8
    distillation    methods whose loss has a dense teacher
    calibration     statistics of the inputs of layers
    sparsegpt       pruning by them
    keys, ranks     random choices, and choices that hold for all ranks
    order           a training loop that leaves out a call
"""
