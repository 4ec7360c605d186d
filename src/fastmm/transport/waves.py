"""Data-parallel waves: engines of one group (mixture-of-experts models) step together or not at all.

All are idle until one gets a request; then the others must be told to begin the wave, or the first waits for them forever.
When the group has nothing left it says that the wave is complete, and is idle again. vLLM has a process of its own for this;
without it, it falls to the client. Engines that do not depend on each other (dense models) know no waves.
"""

from __future__ import annotations

from typing import NamedTuple

from ..schema import EngineCoreOutputs

__all__ = ["Start", "Waves"]


class Start(NamedTuple):
    """To be said to all engines: begin `wave`, but for the one of rank `exclude`, which has."""

    wave: int
    exclude: int | None


class Waves:
    """The wave as far as the client knows, and what to tell the engines."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.current = 0
        self.running = False

    def on_request(self, rank: int) -> Start | None:
        """A request goes to the engine of `rank`."""
        if not self.enabled or self.running:
            return None
        self.running = True
        return Start(self.current, rank)

    def on_outputs(self, message: EngineCoreOutputs, work_left: bool) -> Start | None:
        """An engine said something. `work_left`: there are live requests, so some engine has one it got when all were idle."""
        if not self.enabled:
            return None
        if message.wave_complete is not None and message.wave_complete >= self.current:
            self.current = message.wave_complete + 1
            self.running = work_left
            return Start(self.current, None) if work_left else None
        if message.start_wave is not None and (
            message.start_wave > self.current or (message.start_wave == self.current and not self.running)
        ):
            self.current = message.start_wave
            self.running = True
            return Start(self.current, message.engine_index)
        return None
