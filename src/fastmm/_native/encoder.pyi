from collections.abc import Callable, Iterable
from typing import Any

from typing_extensions import disjoint_base

from fastmm.schema.profile import WireProfile

THRESHOLD_VARIABLE: str
DEFAULT_THRESHOLD: int

def default_threshold() -> int: ...

@disjoint_base
class Encoder:
    def __init__(
        self,
        *,
        dtype: Any = None,
        inplace: bool = True,
        threshold: int | None = None,
        dedup: bool = True,
        hook: Callable[[Any], Any] | None = None,
        profile: WireProfile | str | None = None,
        oob_tensor_consumer: Any = None,
        max_depth: int = 64,
        max_frames: int = 65536,
        max_payload_nbytes: int | None = None,
    ) -> None: ...
    @property
    def threshold(self) -> int: ...
    @property
    def counters(self) -> dict[str, int]: ...
    def encode(self, obj: Any) -> list[Any]: ...
    def encode_into(self, obj: Any, buffer: bytearray) -> list[Any]: ...
    def encode_many(self, requests: Iterable[Any]) -> list[list[Any]]: ...
