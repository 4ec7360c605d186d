from collections.abc import Callable
from typing import Any

from typing_extensions import disjoint_base

def adopt_classes(
    feature: type, placeholder: type, item: type, elem: type, factories: dict[str, type], tensor: type
) -> None: ...

@disjoint_base
class VllmDecoder:
    aux_buffers: Any
    share_mem: bool
    pin_tensors: bool
    oob_tensor_provider: Callable[[str, tuple[int, ...], dict[str, Any]], Any] | None
    def __init__(
        self,
        read: Callable[[Any], Any],
        of_type: Any,
        *,
        whole: Any = None,
        ids: tuple[int, str] | None = None,
        features: tuple[int, str] | None = None,
        feature: type | None = None,
        tensor_class: type | None = None,
        array_class: type | None = None,
    ) -> None: ...
    def decode(self, bufs: Any) -> Any: ...
    def pickles_allowed(self) -> bool: ...
    def after_error(self, error: Exception, bufs: Any) -> Any: ...
    def dec_hook(self, t: Any, obj: Any) -> Any: ...
    def ext_hook(self, code: int, data: memoryview) -> Any: ...
    def _decode_tensor(self, arr: Any) -> Any: ...
    def _decode_ndarray(self, arr: Any) -> Any: ...
