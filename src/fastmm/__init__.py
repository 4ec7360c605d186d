"""fastmm moves a multimodal request into an LLM engine's process without copying it."""

from fastmm._include import get_include

__all__ = ["__version__", "get_include"]

__version__ = "0.1.0"
