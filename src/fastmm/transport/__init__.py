"""ZMQ: the only room that imports it. Sockets in the shapes that vLLM's EngineCore uses, messages as lists of frames."""

from .aio import AsyncEngineClient, AsyncOutputs
from .client import EngineClient, Outputs
from .message import bind_router, connect_dealer, engine_identity, receive_frames, send_frames
from .private import private_directory

__all__ = [
    "AsyncEngineClient",
    "AsyncOutputs",
    "EngineClient",
    "Outputs",
    "bind_router",
    "connect_dealer",
    "engine_identity",
    "private_directory",
    "receive_frames",
    "send_frames",
]
