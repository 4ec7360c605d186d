"""Requests and calls whose answers coroutines wait for."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any

from ..schema import EngineCoreOutput
from .registry import Call, Live

__all__ = ["AsyncCall", "AsyncLive"]


class AsyncLive(Live):
    __slots__ = ("error", "items", "waiter")

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.items: deque[EngineCoreOutput] = deque()
        self.error: BaseException | None = None
        self.waiter: asyncio.Future[None] | None = None

    def push(self, output: EngineCoreOutput) -> None:
        self.items.append(output)
        if self.waiter is not None:
            self._wake()

    def fail(self, error: BaseException) -> None:
        self.error = error
        if self.waiter is not None:
            self._wake()

    def _wake(self) -> None:
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            with contextlib.suppress(RuntimeError):  # its loop has ended, and who waited with it
                waiter.set_result(None)


class AsyncCall(Call):
    __slots__ = ("future",)

    def __init__(self) -> None:
        super().__init__()
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answer(self, value: Any) -> None:
        if not self.future.done():
            self.future.set_result(value)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            with contextlib.suppress(RuntimeError):  # its loop has ended, and who waited with it
                self.future.set_exception(error)
                self.future.exception()  # it is looked at, even if the caller was cancelled
