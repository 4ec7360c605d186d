"""vLLM's own encoder and decoder, kept from before anything was put in their place.

Imported before the first name is replaced, so that whoever needs vLLM's own class after that takes it from here.
"""

from __future__ import annotations

from typing import Any

from vllm.v1 import serial_utils

VllmEncoder: Any = serial_utils.MsgpackEncoder
VllmDecoder: Any = serial_utils.MsgpackDecoder
