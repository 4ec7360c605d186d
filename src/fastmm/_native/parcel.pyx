"""What is on its way: a Parcel for each frame, a Ticket for each message, a Room for all messages of a ledger.

ZMQ says that it is done with a frame it did not copy by dropping the object it was given.  That object is a Parcel: it holds
the frame's memory exported, and when it dies it first lets go of the memory and then tells its ticket.  A ticket whose parcels
have all died is done, and gives its bytes back to the room, which admits whoever waited longest.

A parcel dies wherever its last reference goes: on pyzmq's thread, in a signal handler, in a garbage collection that started in
the middle of this very module.  So there is no lock here that could be waited for.  Instead all state changes under the GIL;
between looking at the state and changing it nothing calls out to Python, and nothing is allocated that the collector knows
(that may start a collection).  What has to be called (callbacks, wakers) is called last, when the state is whole again.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport int64_t

from fastmm.errors import TransportError

from .options cimport whole

cdef enum State:
    WAITING  # for room
    HELD  # has its room; no parcel was made yet
    SENT  # has parcels
    DONE  # they are gone, or the ticket was cancelled

# Set when the interpreter ends: pyzmq then drops what it keeps although libzmq may still read it, so memory must stay.
cdef bint memory_stays = False


def keep_memory():
    """From now on parcels let go of no memory; tickets are told as ever.  For the end of the process."""
    global memory_stays
    memory_stays = True


def nbytes_of(frames):
    """The bytes of all frames together."""
    cdef Py_buffer buffer
    cdef int64_t nbytes = 0
    for frame in frames:
        PyObject_GetBuffer(frame, &buffer, PyBUF_SIMPLE)
        nbytes += buffer.len
        PyBuffer_Release(&buffer)
    return nbytes


# A callback's failure is nobody's who runs here: `noexcept` hands it to sys.unraisablehook.
cdef void call(object function) noexcept:
    function()


@cython.final
cdef class Room:
    """How many bytes may be on their way at once, and who waits for room, first come, first served.

    A message larger than the whole room is admitted when nothing else is on its way.
    """

    cdef readonly int64_t limit_nbytes
    cdef readonly int64_t inflight_nbytes
    cdef readonly int64_t peak_nbytes
    cdef readonly Py_ssize_t inflight
    cdef readonly unsigned long long admitted
    cdef readonly unsigned long long finished
    cdef Ticket first, last  # of those who wait; linked by `next`, those that left among them
    cdef readonly Py_ssize_t waiting
    cdef list when_empty  # of callables
    # id of a bytearray that is on its way -> address of its ticket, which its parcels keep: the room must not keep it, too
    cdef dict buffers
    cdef int generation

    def __cinit__(self, limit_nbytes):
        self.limit_nbytes = whole("max_inflight_nbytes", limit_nbytes, 1, (1 << 63) - 1)
        self.when_empty = []
        self.buffers = {}

    def enter(self, nbytes, waker):
        """A ticket for a message of so many bytes, or None where there is no room and no `waker`.

        With a waker, the ticket joins those who wait, and the waker is called once, on any thread, when it is admitted.
        """
        cdef Ticket ticket = Ticket.__new__(Ticket)
        ticket.nbytes = whole("nbytes", nbytes, 0, (1 << 63) - 1)
        Py_INCREF(self)
        ticket.room = <PyObject*>self
        ticket.generation = self.generation
        ticket.waker = waker
        if self.first is None and self.fits(ticket.nbytes):
            self.take(ticket)
        elif waker is None:
            return None
        else:
            if self.first is None:
                self.first = ticket
            else:
                self.last.next = ticket
            self.last = ticket
            self.waiting += 1
        return ticket

    def leave(self, Ticket ticket):
        """Take a ticket back, whether it still waits or has its room."""
        if ticket.state == WAITING:
            ticket.state = DONE
            if ticket.generation == self.generation:
                self.waiting -= 1
                self.admit()  # whoever stood behind it may fit
        else:
            ticket.cancel()

    def call_when_empty(self, function):
        """Call `function` once, on any thread, when nothing is on its way: now, if so it is."""
        if self.inflight:
            self.when_empty.append(function)
        else:
            call(function)

    def call_no_more(self, function):
        """Take back a `call_when_empty`; nothing, where it was called."""
        if function in self.when_empty:
            self.when_empty.remove(function)

    def ticket_of(self, buffer):
        """The ticket that a bytearray is on its way with, or None."""
        address = self.buffers.get(id(buffer))
        return None if address is None else <Ticket><PyObject*><size_t>address

    def forget(self):
        """Start over with nothing on its way and nobody waiting; tickets of before count no more.  For a forked child."""
        self.generation += 1
        cdef Ticket ticket
        self.inflight = self.inflight_nbytes = self.waiting = 0
        while self.first is not None:  # one by one: a long chain that dies at once recurses
            ticket = self.first
            self.first = ticket.next
            ticket.next = None
            ticket = None
        self.last = None
        self.when_empty = []
        self.buffers = {}

    cdef bint fits(self, int64_t nbytes) noexcept:
        return not self.inflight or nbytes <= self.limit_nbytes - self.inflight_nbytes

    cdef void take(self, Ticket ticket) noexcept:
        ticket.state = HELD
        self.inflight += 1
        self.inflight_nbytes += ticket.nbytes
        self.admitted += 1
        if self.inflight_nbytes > self.peak_nbytes:
            self.peak_nbytes = self.inflight_nbytes

    cdef void give(self, Ticket ticket) noexcept:
        cdef list empty, fresh
        if ticket.generation != self.generation:
            return
        self.inflight -= 1
        self.inflight_nbytes -= ticket.nbytes
        self.finished += 1
        self.admit()
        if not self.inflight and self.when_empty:
            fresh = []
            empty, self.when_empty = self.when_empty, fresh
            for function in empty:
                call(function)

    cdef void admit(self) noexcept:
        while self.admit_first():
            pass

    # A function of its own: a ticket dies when it is let go of, and that may admit others.  So all references are let go of at
    # the end, when the state is whole, and never in the middle, as by giving a loop's variable its next value.
    cdef bint admit_first(self) noexcept:
        cdef Ticket ticket = self.first
        if ticket is None:
            return False
        if ticket.state == WAITING:
            if not self.fits(ticket.nbytes):
                return False
            self.waiting -= 1
            self.take(ticket)
        self.first = ticket.next
        ticket.next = None
        if self.first is None:
            self.last = None
        waker = ticket.waker
        ticket.waker = None
        if ticket.state == HELD:
            call(waker)
        return True


@cython.final
@cython.no_gc_clear  # it dies knowing all it knew, even in a cycle that the collector breaks (by its list of callbacks)
cdef class Ticket:
    """One message on its way: its room, its parcels, and who wants to know when it is done.  A ledger makes it."""

    cdef PyObject* room  # counted; raw, for a ticket that dies in a collection still needs it
    cdef readonly int64_t nbytes
    cdef Py_ssize_t parcels_out
    cdef State state
    cdef int generation
    cdef Ticket next  # who waits behind it
    cdef object waker
    cdef list callbacks
    cdef tuple buffers  # ids of the bytearrays among the frames; a list the collector would empty in a dead cycle
    cdef object __weakref__

    def __init__(self):
        raise TypeError("a Ticket comes from a Ledger")

    def __dealloc__(self):
        if self.room:
            if self.state == HELD:  # dropped without a word: an error between reserve() and send
                self.state = DONE
                (<Room>self.room).give(self)
            Py_DECREF(<object>self.room)

    @property
    def done(self):
        """Whether ZMQ is done with all frames, or the ticket was cancelled."""
        return self.state == DONE

    @property
    def admitted(self):
        """Whether it has its room, or had it."""
        return self.state != WAITING

    def parcels(self, frames):
        """Wrap the frames of the message: what to give to ``send_multipart(..., copy=False)``, in place of them.

        Drop the list when it is sent: the ticket is done when nobody holds a parcel any more.

        Raises
        ------
        TransportError
            The ticket was used before, or something is no frame.
        """
        cdef list parcels = [], given = list(frames)
        cdef Parcel parcel
        if self.state != HELD:
            raise TransportError(
                "expected a ticket that is not used yet, got one that " +
                ("waits for room" if self.state == WAITING else "is done" if self.state == DONE else "has its parcels"))
        for frame in given:
            parcel = Parcel.__new__(Parcel)
            try:
                PyObject_GetBuffer(frame, &parcel.buffer, PyBUF_SIMPLE)
            except Exception as error:
                raise TransportError(f"expected frames, got a {type(frame).__qualname__} ({error})") from error
            parcel.held = True
            parcel.ticket = self
            self.parcels_out += 1
            parcels.append(parcel)
        self.buffers = tuple([id(frame) for frame in given if type(frame) is bytearray]) or None
        if self.buffers is not None:
            for key in self.buffers:
                (<Room>self.room).buffers[key] = <size_t><PyObject*>self
        self.state = SENT
        if not parcels:
            finish(self)
        return parcels

    def cancel(self):
        """Give the room back, where no parcels were made; else do nothing: the parcels have the word."""
        if self.state == HELD:
            finish(self)

    def add_done_callback(self, function):
        """Call ``function(ticket)`` when the ticket is done: on any thread, soon and short; now, if it is done.

        It runs where the last parcel died. What it raises goes to `sys.unraisablehook`.
        """
        cdef list callbacks
        if not callable(function):
            raise TypeError(f"expected a callable, got a {type(function).__qualname__}")
        if self.state == DONE:
            tell(self, function)
            return
        callbacks = self.callbacks
        if callbacks is None:
            callbacks = []  # an allocation, in which the ticket may become done
            if self.state == DONE:
                tell(self, function)
                return
            self.callbacks = callbacks
        callbacks.append(function)

    def remove_done_callback(self, function):
        """Take back an `add_done_callback`; nothing, where it was called."""
        if self.callbacks is not None and function in self.callbacks:
            self.callbacks.remove(function)

    def __repr__(self):
        word = ("waiting", "held", f"{self.parcels_out} frames on their way", "done")[<int>self.state]
        return f"<fastmm ticket of {self.nbytes} bytes, {word}>"


cdef void tell(Ticket ticket, object function) noexcept:
    function(ticket)


cdef void finish(Ticket ticket) noexcept:
    cdef Room room = <Room>ticket.room
    cdef list callbacks = ticket.callbacks
    ticket.state = DONE
    ticket.callbacks = None
    if ticket.buffers is not None:
        for key in ticket.buffers:
            if room.buffers.get(key) == <size_t><PyObject*>ticket:
                del room.buffers[key]
        ticket.buffers = None
    room.give(ticket)
    if callbacks is not None and ticket.generation == room.generation:
        for function in callbacks:
            tell(ticket, function)


@cython.final
@cython.freelist(256)
@cython.no_gc_clear  # the collector may find it in a dead cycle, and must break that elsewhere: __dealloc__ needs the ticket
cdef class Parcel:
    """One frame on its way: a buffer over the frame's memory that keeps it.  pyzmq holds it for libzmq, which reads it."""

    cdef Py_buffer buffer
    cdef bint held
    cdef Ticket ticket

    def __init__(self):
        raise TypeError("a Parcel comes from a Ticket")

    def __dealloc__(self):
        cdef Ticket ticket
        if self.held and not memory_stays:
            PyBuffer_Release(&self.buffer)
        ticket = self.ticket
        if ticket is not None:
            ticket.parcels_out -= 1
            if not ticket.parcels_out and ticket.state == SENT:
                finish(ticket)

    def __len__(self):
        return self.buffer.len

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.buffer.buf, self.buffer.len, 1, flags)

    def __repr__(self):
        return f"<fastmm parcel of {self.buffer.len} bytes>"
