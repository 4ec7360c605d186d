from typing import Any, TypeVar, overload

from typing_extensions import Buffer

_Out = TypeVar("_Out")

def available_isas() -> tuple[str, ...]: ...
def selected_isa() -> str: ...
@overload
def cast(src: Any, dtype: Any, *, out: _Out, inplace: bool = False, isa: str | None = None) -> _Out: ...
@overload
def cast(src: Any, dtype: Any, *, out: None = None, inplace: bool = False, isa: str | None = None) -> Any: ...
def _cast_buffer(
    src: Buffer,
    dst: Buffer,
    src_dtype: str,
    dst_dtype: str,
    *,
    isa: str | None = None,
    swapped: bool = False,
    repeat: int = 1,
) -> None: ...
