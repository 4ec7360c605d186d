"""ZMQ: the only room that imports it. Sockets in the shapes that vLLM's EngineCore uses, messages as lists of frames."""

from .aio import AsyncEngineClient, AsyncOutputs
from .client import EngineClient, Outputs
from .handshake import Addresses, EngineInfo
from .lifetime import Ledger, Ticket
from .server import Abort, Add, EngineServer, StartWave, UtilityCall
from .torch_shm import TorchShmConsumer, TorchShmProvider

__all__ = [
    "Abort",
    "Add",
    "Addresses",
    "AsyncEngineClient",
    "AsyncOutputs",
    "EngineClient",
    "EngineInfo",
    "EngineServer",
    "Ledger",
    "Outputs",
    "StartWave",
    "Ticket",
    "TorchShmConsumer",
    "TorchShmProvider",
    "UtilityCall",
]
