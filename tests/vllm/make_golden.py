"""Write tests/golden/frames.json with the real vLLM's encoder: ``python tests/vllm/make_golden.py`` in its environment."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
import vllm
from support import golden
from support.golden_cases import CASES
from vllm.v1.serial_utils import MsgpackEncoder
from vllm_family import FAMILY


def golden_cases() -> dict[str, dict[str, object]]:
    """Name to threshold and frames."""
    return {
        case.name: {
            "threshold": case.threshold,
            "frames": [golden.describe(frame) for frame in MsgpackEncoder(case.threshold).encode(case.build(FAMILY))],
        }
        for case in CASES
    }


if __name__ == "__main__":
    cases = golden_cases()
    golden.save({"vllm": vllm.__version__, "msgspec": msgspec.__version__}, cases)
    print(f"{len(cases)} cases, {golden.PATH.stat().st_size} bytes")
