"""One processed batch of a prompt's items into one `MmFeatureSpec` per item; n samples of one prompt."""

from .arguments import FlatSizes
from .build import build_features
from .samples import fan_out

__all__ = ["FlatSizes", "build_features", "fan_out"]
