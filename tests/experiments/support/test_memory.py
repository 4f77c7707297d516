"""Memory that is freed between measurements."""

import gc
import weakref

import torch
from torch import nn

from experiments.support import memory


def test_compiled_code_and_cycles_are_freed():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    double = torch.compile(lambda x: 2 * x, backend=backend)
    double(torch.ones(2)), double(torch.ones(2))
    assert len(compiled) == 1
    layer = nn.Linear(2, 2)
    layer.itself = [layer]  # a cycle, which only the garbage collector frees
    kept = weakref.ref(layer)
    gc.disable()
    try:
        del layer
        assert kept() is not None
        memory.free(torch.device("cpu"))
        assert kept() is None
    finally:
        gc.enable()
    assert double(torch.ones(2)).tolist() == [2, 2] and len(compiled) == 2
