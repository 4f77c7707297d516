"""Memory that is freed between measurements."""

import gc
import weakref

import torch

from experiments.support import memory


class Compiled:
    """Stands in for compiled code. It refers to itself, so only the garbage collector frees it."""

    def __init__(self, graph):
        self.graph, self.itself = graph, self

    def __call__(self, *inputs):
        return self.graph.forward(*inputs)


def test_compiled_code_and_what_it_holds_are_freed():
    kept = []

    def backend(graph, inputs):
        compiled = Compiled(graph)
        kept.append(weakref.ref(compiled))
        return compiled

    double = torch.compile(lambda x: 2 * x, backend=backend)
    double(torch.ones(2)), double(torch.ones(2))
    gc.disable()
    try:
        assert [ref() is None for ref in kept] == [False]
        memory.free(torch.device("cpu"))
        assert [ref() is None for ref in kept] == [True]
    finally:
        gc.enable()
    assert double(torch.ones(2)).tolist() == [2, 2] and len(kept) == 2
