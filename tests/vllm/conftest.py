"""Tests against the real vLLM 0.33.0. They run in an environment of their own: `make test-vllm`."""

import logging
import sys
from pathlib import Path

# The tests' shared code lies one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# vLLM warns of missing accelerators on import; the tests are about its wire.
logging.getLogger("vllm").setLevel(logging.ERROR)
