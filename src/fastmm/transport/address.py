"""Where the client's sockets are: ipc in a directory of its own, or TCP, on loopback unless more is asked for by name."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket as stdlib_socket
import tempfile
from pathlib import Path
from typing import NamedTuple

import zmq

from ..errors import TransportError

__all__ = ["Addressing", "PrivateDirectory", "TcpAddress", "bind"]

# sockaddr_un.sun_path of Linux holds 108 bytes, the closing NUL included; the rest is left to a socket's own name.
_LONGEST_PATH_NBYTES = 107
_LONGEST_NAME_NBYTES = 16


class PrivateDirectory:
    """A new directory of mode 0700, for sockets that only its user may reach. `remove` takes it away with all it holds.

    It lies in the system's directory for temporary files, or in ``/tmp`` where that path is too long for a Unix socket.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        path = tempfile.mkdtemp(prefix="fastmm-")  # mkdtemp's mode is 0700
        if len(os.fsencode(path)) + 1 + _LONGEST_NAME_NBYTES > _LONGEST_PATH_NBYTES:
            os.rmdir(path)
            path = tempfile.mkdtemp(prefix="fastmm-", dir="/tmp")
        self.path = Path(path)

    def remove(self) -> None:
        if self._owner == os.getpid():  # a forked child must not take the parent's sockets away
            shutil.rmtree(self.path, ignore_errors=True)


class TcpAddress(NamedTuple):
    """``tcp://host:port``; port 0 is any that is free."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def wildcard(self) -> bool:
        """Whether it is all of the machine's interfaces: nothing that an engine could be told to connect to."""
        return self.host in {"*", "0.0.0.0", "::"}

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port or '*'}"


def parse_tcp(address: str) -> TcpAddress:
    """The host and port of a ``tcp://`` address."""
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    number = 0 if port == "*" else int(port) if port.isascii() and port.isdigit() else -1
    if not colon or not host or not 0 <= number <= 65535:
        raise TransportError(f"expected tcp://host:port, with port 0 for any that is free, got {address!r}")
    return TcpAddress(host[1:-1] if host.startswith("[") and host.endswith("]") else host, number)


class Addressing:
    """Which addresses a client binds: those that were given, else what goes with the handshake's.

    Parameters
    ----------
    handshake, input, output
        ``ipc://path`` or ``tcp://host:port``. None: ipc in a directory that only this user can enter; for input and output,
        where the handshake is TCP beyond loopback, TCP on the handshake's host and any free port.
    allow_remote
        Whether TCP addresses that other machines can reach are meant to be.
    advertise
        The host that engines are told, where a TCP address is of all interfaces (``0.0.0.0``) or of an inner network.
    """

    def __init__(
        self,
        handshake: str | None,
        input: str | None,
        output: str | None,
        *,
        allow_remote: bool = False,
        advertise: str | None = None,
    ) -> None:
        self._allow_remote = allow_remote
        self._advertise = advertise
        self._directory: PrivateDirectory | None = None
        others = None
        if isinstance(handshake, str) and handshake.startswith("tcp://"):
            tcp = parse_tcp(handshake)
            others = None if tcp.loopback else str(tcp._replace(port=0))
        self._given = {"handshake": handshake, "input": input or others, "output": output or others}
        for name, address in self._given.items():
            self._check(name, address)

    def _check(self, name: str, address: str | None) -> None:
        if address is None:
            return
        if not isinstance(address, str):
            raise TransportError(f"expected {name}= to be an address, a str, got a {type(address).__qualname__}")
        if address.startswith("ipc://"):
            if not 0 < len(os.fsencode(address.removeprefix("ipc://"))) <= _LONGEST_PATH_NBYTES:
                raise TransportError(f"expected a path of 1 to {_LONGEST_PATH_NBYTES} bytes in {name}={address!r}")
            return
        if not address.startswith("tcp://"):
            raise TransportError(f"expected {name}= to be ipc://path or tcp://host:port, got {address!r}")
        tcp = parse_tcp(address)
        if not tcp.loopback and not self._allow_remote:
            raise TransportError(
                f"{name}={address!r} can be reached from other machines, and whoever reaches it can send requests' answers; "
                "say allow_remote=True if that is meant, or use 127.0.0.1"
            )
        if tcp.wildcard and name != "handshake" and self._advertise is None:
            raise TransportError(f"{name}={address!r} is no address to connect to: say advertise= with this machine's host")

    @property
    def tcp(self) -> bool:
        """Whether any of them is TCP."""
        return any(address is not None and address.startswith("tcp://") for address in self._given.values())

    def address(self, name: str) -> str:
        """What to bind for `name`."""
        given = self._given[name]
        if given is not None:
            return given
        if self._directory is None:
            self._directory = PrivateDirectory()
        return f"ipc://{self._directory.path / name}"

    def told(self, endpoint: str) -> str:
        """What to tell an engine of a socket that was bound to `endpoint`."""
        if self._advertise is None or not endpoint.startswith("tcp://"):
            return endpoint
        return str(parse_tcp(endpoint)._replace(host=self._advertise.strip("[]")))

    def close(self) -> None:
        """Remove the private directory, where there is one."""
        if self._directory is not None:
            self._directory.remove()
            self._directory = None


def bind(socket: zmq.Socket[bytes], address: str) -> str:
    """Bind, and say where: the address with the port that it got."""
    try:
        if address.startswith("tcp://"):
            tcp = parse_tcp(address)
            if tcp.host == "localhost":
                tcp = tcp._replace(host="127.0.0.1")  # libzmq 4.3.4 binds no names
            socket.ipv6 = ":" in tcp.host
            address = str(tcp)
        elif _is_listening(address.removeprefix("ipc://")):  # libzmq would take the path away from whoever is there
            raise TransportError(f"cannot bind {address}: somebody listens there")
        socket.bind(address)
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)
    except zmq.ZMQError as error:
        raise TransportError(f"cannot bind {address}: {error.strerror}") from None


def _is_listening(path: str) -> bool:
    with stdlib_socket.socket(stdlib_socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
