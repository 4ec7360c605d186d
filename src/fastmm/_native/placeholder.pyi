from typing import Any, final

from fastmm.schema import PlaceholderRange

@final
class Prompt:
    nelem: int | None
    def __init__(self, token_ids: Any) -> None: ...

def first_outside(ids: list[Any], end: int, begin: int = 0) -> int: ...

@final
class Marks:
    def __init__(self, ids: list[int]) -> None: ...

def place(
    placeholders: list[Any], prompt: Prompt, embed_ids: list[int] | None, as_torch: bool
) -> tuple[list[PlaceholderRange], bool]: ...
