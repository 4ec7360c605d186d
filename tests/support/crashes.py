"""Code for a process of its own, in which a hook takes apart the tree that is being encoded, and memory is used again."""

CRASHES = """
import collections, collections.abc, dataclasses, enum, gc, sys
import numpy as np, fastmm
from fastmm import Encoder, EngineCoreRequest
class Thing: pass
def churn():  # what was let go is overwritten
    gc.collect()
    return [bytearray(size) for size in (16, 32, 48, 64, 80, 96, 128, 256, 512) for _ in range(300)], [[i] for i in range(3000)]
def go(tree, drop):
    def hook(_):
        drop(); churn()
        return [[1.5]] * 3
    try:
        Encoder(hook=hook).encode(tree)
    except fastmm.FastmmError as error:
        str(error)
    del tree
def nest(): return [[[1.5, Thing(), [2.5] * 10, {"k": Thing(), "l": [Thing()]}] * 3, (Thing(), [Thing()])]]
"""
