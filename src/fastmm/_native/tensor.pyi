"""Everything here is for the other compiled modules; Python sees the one class and cannot make one."""

from typing_extensions import disjoint_base

@disjoint_base
class Producer: ...
