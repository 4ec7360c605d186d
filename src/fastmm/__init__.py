"""fastmm moves a multimodal request into an LLM engine's process without copying it."""

from ._include import get_include
from ._native.cast import available_isas, cast, selected_isa
from ._native.frame import Frame
from .codec import Decoder, Encoder, decode_request, encode_request, encode_requests
from .errors import (
    CompatError,
    DecodeError,
    EncodeError,
    FastmmError,
    LimitError,
    Overloaded,
    PeerClosed,
    ProcessorError,
    SchemaError,
    TransportError,
    TransportTimeout,
    TruncatedError,
)
from .features import FlatSizes, build_features, fan_out
from .schema import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    LoRARequest,
    MmBatchedField,
    MmFeatureSpec,
    MmFieldElem,
    MmFlatField,
    MmSharedField,
    PlaceholderRange,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
    UtilityOutput,
    WireTensor,
)

__all__ = [
    "CompatError",
    "DecodeError",
    "Decoder",
    "EncodeError",
    "Encoder",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "FastmmError",
    "FlatSizes",
    "Frame",
    "LimitError",
    "LoRARequest",
    "MmBatchedField",
    "MmFeatureSpec",
    "MmFieldElem",
    "MmFlatField",
    "MmSharedField",
    "Overloaded",
    "PeerClosed",
    "PlaceholderRange",
    "PoolingParams",
    "ProcessorError",
    "SamplingParams",
    "SchemaError",
    "StructuredOutputsParams",
    "TransportError",
    "TransportTimeout",
    "TruncatedError",
    "UtilityOutput",
    "WireTensor",
    "__version__",
    "available_isas",
    "build_features",
    "cast",
    "decode_request",
    "encode_request",
    "encode_requests",
    "fan_out",
    "get_include",
    "selected_isa",
]

__version__ = "0.1.0"
