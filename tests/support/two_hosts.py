"""Two hosts on one machine: network namespaces, and a cable between them that can be slow, or cut without a word.

    host a (10.77.0.1) --veth-- the cable: a process that passes frames on --veth-- host b (10.77.0.2)

The cable is not the kernel's (netem is not everywhere): frames are taken from one interface by a packet socket and put on the
other after a while. A cut cable drops them; no interface goes down, no connection is reset, as when a switch between them fails.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

A, B = "10.77.0.1", "10.77.0.2"

_CLONE_NEWNET = 0x40000000
_ETH_P_ALL = 3
# Offload, both ways: without it a packet socket gets frames that lack their checksum and are longer than it may send.
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23


def why_not() -> str | None:
    """Why there are no two hosts here, or None where there are."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if not shutil.which("ip"):
        return "network namespaces need the ip command (iproute2)"
    name = f"fmm-try-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"no network namespaces here: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None


class Hosts:
    """Both hosts; what happens on the cable is said here."""

    def __init__(self, tag: str, cable: subprocess.Popen[bytes]) -> None:
        self._tag = tag
        self._cable = cable

    def _tell(self, word: str) -> None:
        assert self._cable.stdin is not None
        assert self._cable.stdout is not None
        self._cable.stdin.write(word.encode() + b"\n")
        self._cable.stdin.flush()
        if self._cable.stdout.readline() != b"done\n":
            raise OSError("the cable does not work: packet sockets may be forbidden here")

    def cut(self) -> None:
        """From now on nothing arrives; nobody is told."""
        self._tell("cut")

    def heal(self) -> None:
        self._tell("heal")

    def delay(self, seconds: float) -> None:
        """How long each frame takes, each way."""
        self._tell(f"delay {seconds}")

    def command(self, host: str) -> list[str]:
        """What to put before a command, so that it runs on host ``"a"`` or ``"b"``."""
        return ["ip", "netns", "exec", f"{self._tag}{host}"]

    def on(self, host: str, work: Callable[[], Any], timeout: float) -> Any:
        """Run something of this process on a host: in a thread that has entered its network, as have all threads it starts."""
        outcome: list[Any] = []

        def enter() -> None:
            try:
                enter_namespace(f"{self._tag}{host}")
                outcome.append((work(), None))
            except BaseException as error:
                outcome.append((None, error))

        thread = threading.Thread(target=enter, daemon=True)
        thread.start()
        thread.join(timeout)
        assert not thread.is_alive(), f"still at work after {timeout} s"
        value, error = outcome[0]
        if error is not None:
            raise error
        return value


def enter_namespace(name: str) -> None:
    """The calling thread leaves this machine's network for another."""
    fd = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {name}")
    finally:
        os.close(fd)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    tag = f"fmm{os.getpid()}"

    def run(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    with ExitStack() as stack:
        for name in ("a", "b", "c"):
            run("netns", "add", tag + name)
            stack.callback(subprocess.run, ["ip", "netns", "del", tag + name], check=False)
            run("-n", tag + name, "link", "set", "lo", "up")
        for name, address in (("a", A), ("b", B)):
            run("link", "add", "eth0", "netns", tag + name, "type", "veth", "peer", "name", f"to{name}", "netns", tag + "c")
            run("-n", tag + name, "address", "add", f"{address}/24", "dev", "eth0")
            run("-n", tag + name, "link", "set", "eth0", "up")
            run("-n", tag + "c", "link", "set", f"to{name}", "up")
        command = ["ip", "netns", "exec", tag + "c", sys.executable, __file__]
        cable = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stack.callback(cable.wait)
        stack.callback(cable.kill)
        hosts = Hosts(tag, cable)
        hosts.delay(0)
        yield hosts


# --- the cable ---------------------------------------------------------------------------------------------------------


def main() -> None:
    import select

    ends = []
    for name in ("toa", "tob"):
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        end.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        end.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 23)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 23)
        end.bind((name, _ETH_P_ALL))
        end.setblocking(False)
        ends.append(end)
    others = {ends[0]: ends[1], ends[1]: ends[0]}
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    delay_s, is_cut = 0.0, False
    while True:
        left = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
        for source in select.select([sys.stdin, *ends], [], [], left)[0]:
            if source is sys.stdin:
                word, _, value = sys.stdin.readline().strip().partition(" ")
                if not word:
                    return
                if word == "delay":
                    delay_s = float(value)
                else:
                    is_cut = word == "cut"
                    waiting.clear()
                print("done", flush=True)
                continue
            while True:
                try:
                    frame = source.recv(1 << 18)
                except BlockingIOError:
                    break
                if not is_cut:
                    waiting.append((time.monotonic() + delay_s, others[source], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, frame = waiting.popleft()
            try:
                target.send(frame)
            except OSError:  # no room: lost on the way, as frames are
                continue


if __name__ == "__main__":
    main()
