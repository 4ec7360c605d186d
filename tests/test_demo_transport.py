"""The few pieces of transport that the demo stands on."""

from __future__ import annotations

import stat
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

import fastmm
from fastmm.transport import bind_router, connect_dealer, engine_identity, private_directory, receive_frames, send_frames


def test_only_its_user_can_enter_the_directory_and_it_goes_with_all_it_holds() -> None:
    with private_directory() as directory:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        (directory / "socket").touch()
    assert not directory.exists()


def test_a_path_too_long_for_a_socket_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with private_directory() as directory:
        assert long not in directory.parents
        bind_router(directory / "front-end").close()
    assert not directory.exists()
    assert list(long.iterdir()) == []


def test_frames_arrive_as_they_were_sent() -> None:
    values = np.arange(100_000, dtype=np.float32)
    frames = fastmm.Encoder(threshold=256).encode({"large": values, "small": values[:2]})
    with (
        private_directory() as directory,
        bind_router(directory / "s") as front,
        connect_dealer(directory / "s", 258) as engine,
    ):
        send_frames(engine, [b"ready"])
        identity, ready = receive_frames(front, 10)
        assert identity.bytes == engine_identity(258) == b"\x02\x01"
        assert ready.bytes == b"ready"
        send_frames(front, [identity, b"\x00", *frames])
        kind, *arrived = receive_frames(engine, 10)
        assert kind.bytes == b"\x00"
        assert [frame.bytes for frame in arrived] == [bytes(frame) for frame in frames]


def test_a_message_to_an_engine_that_is_not_there_is_an_error() -> None:
    with private_directory() as directory, bind_router(directory / "s") as front:
        with pytest.raises(fastmm.TransportError, match="cannot send 2 frames"):
            send_frames(front, [engine_identity(0), b""])


def test_an_address_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(fastmm.TransportError, match="cannot use the ipc address"):
        bind_router(tmp_path / "no such directory" / "s")


def test_waiting_ends_in_time_or_with_the_peer() -> None:
    with private_directory() as directory, bind_router(directory / "s") as front:
        begun = time.monotonic()
        with pytest.raises(fastmm.TransportTimeout, match="within 0.02 s"):
            receive_frames(front, 0.02)
        with pytest.raises(fastmm.PeerClosed):
            receive_frames(front, 600, peer_lives=lambda: False)
        assert time.monotonic() - begun < 300


def test_what_a_peer_sent_before_it_ended_still_counts() -> None:
    with private_directory() as directory, bind_router(directory / "s") as front:
        with connect_dealer(directory / "s", 0) as engine:
            send_frames(engine, [b"last words"])
            receive_frames(front, 10)  # connected
            send_frames(engine, [b"and the very last"])
        assert receive_frames(front, 10, peer_lives=lambda: False)[1].bytes == b"and the very last"
