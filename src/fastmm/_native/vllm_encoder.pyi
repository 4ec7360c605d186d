from typing import Any

from typing_extensions import disjoint_base

from .encoder import Encoder

@disjoint_base
class VllmEncoder(Encoder):
    size_threshold: int
    oob_tensor_consumer: Any
    def __init__(self, size_threshold: int, oob_tensor_consumer: Any = None, *, passive: bool = False) -> None: ...
    @property
    def counters(self) -> dict[str, int]: ...
    def encode(self, obj: Any) -> list[Any]: ...
    def encode_into(self, obj: Any, buf: bytearray) -> list[Any]: ...
