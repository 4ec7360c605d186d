from collections.abc import Callable
from typing import Any, final

from fastmm.schema.profile import WireProfile

@final
class Decoder:
    def __init__(
        self,
        type: Any = ...,
        *,
        tensors: str = "torch",
        token_ids: str = "list",
        copy: bool = False,
        profile: WireProfile | str | None = None,
        oob_tensor_provider: Callable[[str, tuple[int, ...], dict[str, Any]], Any] | None = None,
        max_depth: int = 64,
        max_elements: int = 16777216,
        max_frames: int = 65536,
        max_payload_nbytes: int | None = None,
    ) -> None: ...
    @property
    def counters(self) -> dict[str, int]: ...
    def decode(self, frames: Any) -> Any: ...
