"""The ledger against a model of it: whatever is done in whatever order, the same messages are admitted, in the same order."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from fastmm._native.parcel import Parcel, Room, Ticket

LIMIT = 100


class Message:
    """What the model knows of one message."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.state = "waiting"
        self.told = 0  # how often its callback was called
        self.ticket: Ticket | None = None
        self.parcels: list[Parcel] = []


class LedgerMachine(RuleBasedStateMachine):
    messages: Bundle[Message] = Bundle("messages")

    def __init__(self) -> None:
        super().__init__()
        self.room = Room(LIMIT)
        self.queue: list[Message] = []
        self.inflight: list[Message] = []
        self.woken: list[Message] = []
        self.wanted: list[Message] = []
        self.emptied = self.emptied_wanted = 0
        self.waiting_for_empty = 0

    # --- the model ---------------------------------------------------------------------------------------------------

    def fits(self, message: Message) -> bool:
        return not self.inflight or sum(one.nbytes for one in self.inflight) + message.nbytes <= LIMIT

    def admit(self) -> None:
        while self.queue and self.fits(self.queue[0]):
            message = self.queue.pop(0)
            message.state = "held"
            self.inflight.append(message)
            self.wanted.append(message)
        if not self.inflight:
            self.emptied_wanted += self.waiting_for_empty
            self.waiting_for_empty = 0

    def end(self, message: Message) -> None:
        message.state = "done"
        self.inflight.remove(message)
        self.admit()

    # --- what may happen ---------------------------------------------------------------------------------------------

    @rule(target=messages, nbytes=st.one_of(st.integers(0, 60), st.integers(90, 300)), wait=st.booleans())
    def enter(self, nbytes: int, wait: bool) -> Message:
        message = Message(nbytes)
        at_once = not self.queue and self.fits(message)
        message.ticket = self.room.enter(nbytes, (lambda: self.woken.append(message)) if wait else None)
        assert (message.ticket is not None) == (at_once or wait)
        if message.ticket is None:
            message.state = "refused"
            return message
        assert message.ticket.admitted == at_once
        if at_once:
            message.state = "held"
            self.inflight.append(message)
        else:
            self.queue.append(message)
        return message

    @rule(message=messages)
    def leave(self, message: Message) -> None:
        if message.ticket is None:
            return
        self.room.leave(message.ticket)
        if message.state == "waiting":
            message.state = "left"
            self.queue.remove(message)
            self.admit()
        elif message.state == "held":
            self.end(message)

    @rule(message=messages, frames=st.lists(st.sampled_from([b"", b"frame", bytearray(3)]), max_size=4))
    def send(self, message: Message, frames: list[Any]) -> None:
        if message.state != "held":
            return
        assert message.ticket is not None

        def told(ticket: Ticket) -> None:
            assert ticket is message.ticket
            assert ticket.done
            message.told += 1

        message.ticket.add_done_callback(told)
        message.parcels = message.ticket.parcels(frames)
        message.state = "sent"
        if not frames:
            self.end(message)

    @rule(message=messages, first=st.booleans())
    def drop_a_parcel(self, message: Message, first: bool) -> None:
        if message.state == "sent":
            message.parcels.pop(0 if first else -1)
            if not message.parcels:
                self.end(message)

    @rule(message=consumes(messages))
    def drop_the_ticket(self, message: Message) -> None:
        if message.state in ("waiting", "sent"):
            return  # the queue, or a parcel, keeps it
        message.ticket = None
        if message.state == "held":
            self.end(message)

    @rule()
    def wait_for_empty(self) -> None:
        def empty() -> None:
            self.emptied += 1

        self.room.call_when_empty(empty)
        if self.inflight:
            self.waiting_for_empty += 1
        else:
            self.emptied_wanted += 1

    def teardown(self) -> None:
        for message in self.inflight.copy():
            message.parcels.clear()  # a cycle through its callback would end by the collector, at its own time

    # --- what must be true -------------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        room = self.room
        assert room.inflight == len(self.inflight)
        assert room.inflight_nbytes == sum(message.nbytes for message in self.inflight)
        assert room.inflight_nbytes <= max([LIMIT, *(message.nbytes for message in self.inflight)])
        assert room.waiting == len(self.queue)
        assert room.admitted - room.finished == room.inflight
        assert self.woken == self.wanted
        assert self.emptied == self.emptied_wanted
        for message in self.inflight:
            assert message.told == 0
            if message.ticket is not None:
                assert not message.ticket.done


LedgerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestTheLedgerAgreesWithItsModel = LedgerMachine.TestCase


def test_tickets_that_are_dropped_by_their_own_wakers_wake_the_next_ones_and_nobody_is_lost() -> None:
    room, tickets, woken = Room(10), {}, []

    def waker_of(index: int) -> Any:
        def wake() -> None:
            woken.append(index)
            if index % 3 == 2:
                tickets.pop(index - 2, None)
            if index % 2:
                tickets.pop(index)  # the last reference is now the room's own, in the middle of its work

        return wake

    held = room.enter(10, None)
    assert held is not None
    for index in range(30):
        tickets[index] = room.enter(1 + index % 10, waker_of(index))
    assert room.waiting == 30
    held.cancel()
    while tickets:
        tickets.pop(min(tickets))
    assert woken == list(range(30))
    assert (room.inflight, room.inflight_nbytes, room.waiting) == (0, 0, 0)
