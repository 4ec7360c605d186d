from typing import final

@final
class FrameHolder: ...
