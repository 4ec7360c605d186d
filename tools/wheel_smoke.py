"""Uses an installed fastmm with its run-time requirements alone.  `make wheel-check` runs it in a clean environment."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

import numpy as np

import fastmm


def main() -> None:
    assert fastmm.__version__ == importlib.metadata.version("fastmm"), "two versions in one package"
    for absent in ("torch", "msgspec", "ml_dtypes", "vllm", "Cython"):
        assert importlib.util.find_spec(absent) is None, f"{absent} is here: this environment proves nothing"
    assert "zmq" not in sys.modules, "import fastmm loads zmq before anybody asked for a socket"

    pixels = np.random.default_rng(0).standard_normal((256, 1176), dtype=np.float32)
    before = pixels.copy()
    features = fastmm.build_features(
        tensors={"pixel_values": pixels, "image_grid_thw": np.array([[1, 8, 16], [1, 8, 16]]), "n": np.array([128, 128])},
        flat={"pixel_values": "n"},
        batched={"image_grid_thw"},
        keep_on_cpu={"image_grid_thw"},
        placeholders=[(1, 32), (40, 32)],
        hashes=["a", "b"],
        prompt_token_ids=list(range(80)),
    )
    request = fastmm.EngineCoreRequest(
        request_id="r-1",
        prompt_token_ids=list(range(80)),
        mm_features=features,
        sampling_params=fastmm.SamplingParams(max_tokens=4),
    )
    # An item's rows, as they were: first on the float32 wire, then as bfloat16, cast in place.
    for dtype in (None, "bfloat16"):
        frames = fastmm.encode_request(request, dtype=dtype, threshold=256)
        back = fastmm.decode_request(frames, tensors="wire")
        assert back.request_id == "r-1"
        assert list(back.prompt_token_ids) == list(range(80))
        for index, feature in enumerate(back.mm_features):
            leaf = feature.data["pixel_values"].data
            rows = before[index * 128 : index * 128 + 128]
            if dtype is None:
                assert bytes(leaf.data) == rows.tobytes()
            else:
                assert leaf.dtype == "bfloat16"
                assert leaf.shape == rows.shape
                got = (np.frombuffer(leaf.data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(rows.shape)
                assert np.all(np.abs(got - rows) <= np.abs(rows) * 2.0**-8)
    print(f"fastmm {fastmm.__version__}: a request went through {len(frames)} frames, kernel {fastmm.selected_isa()}")


if __name__ == "__main__":
    main()
