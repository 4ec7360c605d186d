"""The demo's second process: receives the request, compares it, and paints the pictures back from what it received.

It stands where an engine stands: an `EngineServer` that decodes what a client sends it. Run by ``fastmm demo``, as
``python -m fastmm.cli.painter``, with one argument: the settings, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fastmm
from fastmm.schema import FinishReason
from fastmm.transport import Add, EngineServer, UtilityCall

from .errors import CommandError
from .photograph import Photograph, load_photograph, pixels_of
from .request import REHEARSAL, bytes_of, request_for
from .verdict import compare

# A front end that says nothing for so long is gone.
PATIENCE_S = 120.0
# One that was there and has left is not waited for: this process has nothing else to do.
GONE_AFTER_S = 0.0


class TimedDecoder:
    """Decodes, and notes when the frames were there and how long it took."""

    def __init__(self, tensors: str) -> None:
        self._decoder = fastmm.Decoder(tensors=tensors)
        self.times: dict[str, int] = {}

    def decode(self, frames: Any) -> fastmm.EngineCoreRequest:
        received_ns = time.monotonic_ns()
        request: fastmm.EngineCoreRequest = self._decoder.decode(frames)
        self.times = {"received_ns": received_ns, "decode_ns": time.monotonic_ns() - received_ns}
        return request


def main(argv: Sequence[str]) -> int:
    settings = json.loads(argv[0])
    # It reads the photographs itself: what it compares with has never been near the sender's memory or the wire.
    photographs = [load_photograph(Path(path)) for path in settings["photographs"]]
    expected = request_for(photographs, settings["request_id"], settings["tensors"])
    decoder = TimedDecoder(settings["tensors"])
    report: dict[str, Any] = {}
    engine = EngineServer(
        settings["handshake"], ready={"dtype": settings["dtype"]}, local=True, decoder=decoder, patience=GONE_AFTER_S
    )
    engine.connect(PATIENCE_S)
    with engine:
        for event in engine:
            if isinstance(event, Add):
                request = event.request
                try:
                    report = dict(decoder.times)
                    if request.request_id != REHEARSAL:
                        report["pictures"] = paint(request, photographs, [Path(path) for path in settings["pictures"]])
                        report |= compare(request, expected, settings["dtype"], settings["tensors"])
                except (fastmm.FastmmError, OSError) as error:
                    engine.fail_request(request.request_id, f"{type(error).__name__}: {error}", event.client_index)
                else:
                    done = fastmm.EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.STOP)
                    engine.send_output(done, event.client_index)
            elif isinstance(event, UtilityCall):
                engine.send_utility_result(event, report)
    return 0


def paint(request: fastmm.EngineCoreRequest, photographs: Sequence[Photograph], paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Write one PNG for each feature of `request`, from its patches and its grid alone.

    Returns
    -------
    list
        For each: ``path``, and ``largest_difference`` from the resized photograph, in grey levels.
    """
    from PIL import Image

    pictures = []
    for feature, photograph, path in zip(request.mm_features or [], photographs, paths, strict=True):
        assert feature.data is not None
        grid = bytes_of(feature.data["image_grid_thw"].data).view(np.int64)
        patches = bytes_of(fastmm.cast(feature.data["pixel_values"].data, "float32")).view(np.float32)
        pixels = pixels_of(patches, (int(grid[0]), int(grid[1]), int(grid[2])))
        Image.fromarray(pixels).save(path)
        difference = np.abs(pixels.astype(np.int16) - photograph.pixels.astype(np.int16)).max()
        pictures.append({"path": str(path), "largest_difference": int(difference)})
    return pictures


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (CommandError, fastmm.FastmmError, OSError) as error:
        sys.exit(f"fastmm demo, second process: {error}")
    except KeyboardInterrupt:  # meant for the first process as well, which says so
        sys.exit(130)
