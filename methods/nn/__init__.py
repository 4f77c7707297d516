"""Code that the methods share: the base classes, sparse layers and their products.

base            `Method`: the hooks of every method, with defaults
converter       its part before training: conversion, and the choice of products
metrics         flip rates, densities and illegal groups
config          `Config`: the options that every method takes; what drivers must know of it
conversion      the choice of the linears to convert, and the report about it
matrices        matrices of a model that are no linear's, converted as if they were
check           whether a finished model is 2:4
acceleration    the record of which products run sparse, and why
derived         the state of a sparse layer: what is derived from its weight
linear          the sparse layer with its products, and the masked layer
phases          layers and methods that are dense for a part of the training, and the layer whose
                mask is 2:4 along both dims
compressed      the layer that stores only the kept values, and low-rank adapters;
                compressed_gemms: its products
precision       FP8 as the precision of a layer's products
lowrank         sparse linears with a low-rank term, as trained layers end
at_run_time     linears whose weight or input is pruned in each forward pass
optimizer       AdamW that also does a method's work on the sparse weights
slorb           the low-rank term of AST
gemms           the three products of a layer, dense or 2:4; fp8_gemms: in FP8
operands        the operands of these products
delayed         FP8 scales from the magnitudes of earlier steps
distillation    methods whose loss includes a dense teacher
plain           the plain model of a converted one, and copies on the meta device
calibration     statistics of layer inputs
sparsegpt       pruning with these statistics
columns         input columns that stay dense beside a mask
permutation     a permutation of hidden channels that masks keep more of
learnt          masks learnt with the loss, of ProxSparse and MaskLLM
sharding        sparse layers under FSDP2; dtensors: their tensors
ranks           what must be equal on all ranks: choices, and the seeds of random ones
order           a check that the training loop calls every hook
"""
