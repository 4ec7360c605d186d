"""Who waits for what: live requests by id, utility calls by number, and the engines that owe the answers.

No sockets, no clocks, no locks here: both faces of the client (threads and asyncio) feed it, each from one place at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from ..codec import Encoder
from ..errors import EngineDead, SchemaError, SchemaValueError, UtilityFailed
from ..schema import EngineCoreOutput, EngineCoreOutputs, FinishReason, UtilityOutput
from .handshake import EngineInfo

__all__ = ["Call", "Ended", "Engine", "Live", "Registry", "request_id_of"]

# How many ids of aborted requests are remembered.
_LATE_MAX = 1 << 16
# What a request counts for beside the prompt tokens that still have to be computed: its place in every step to come.
_PLACE = 1024


class Engine:
    """One engine, and what it owes."""

    __slots__ = (
        "calls",
        "death",
        "encoder",
        "heard",
        "identity",
        "info",
        "live",
        "longest_prompt",
        "name",
        "owed",
        "owes_since",
        "rank",
        "work",
    )

    def __init__(self, info: EngineInfo, encoder: Encoder) -> None:
        self.info = info
        self.rank = info.rank
        self.identity = info.identity
        self.name = f"engine {info.rank}"
        self.encoder = encoder
        self.longest_prompt = sys.maxsize if info.max_model_len is None else info.max_model_len
        self.live: set[Live] = set()
        self.calls: set[Call] = set()
        self.work = 0
        self.death: str | None = None  # why it counts as dead
        self.heard = 0.0  # when it last said anything
        self.owed = 0  # how many requests and calls were sent to it and have not ended
        self.owes_since = 0.0  # since when that has not been nothing

    def dead(self) -> EngineDead:
        """A new error for each who waits: one error raised in many places would mix their tracebacks."""
        return EngineDead(f"{self.name} is dead: {self.death}")


class Ended(Exception):
    """A request or a call has ended, one way or another, before it was sent. It knows why, and tells who waits for it."""


class Live:
    """A request on its way through an engine. The faces say what becomes of its outputs."""

    __slots__ = ("__weakref__", "ended", "engine", "owed", "prompt", "request_id", "sent", "wire_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.wire_id = request_id  # what the engine knows it by
        self.engine: Engine
        self.prompt = 0  # prompt tokens that count as not computed yet
        self.sent = False  # whether the engine knows of it
        self.owed = False  # whether it counts among what the engine owes
        self.ended = False  # the registry is done with it

    def check(self) -> None:
        """Raise where there is nothing to send any more: for who waits to send it, perhaps for an engine that is gone."""
        if self.ended:
            raise Ended

    def push(self, output: EngineCoreOutput) -> None:
        """Take an output; the last has a finish reason."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Take the error that ends it."""
        raise NotImplementedError


class Call:
    """A utility call that waits for its answer."""

    __slots__ = ("__weakref__", "call_id", "ended", "engine", "owed")

    def __init__(self) -> None:
        self.call_id = 0
        self.engine: Engine
        self.owed = False
        self.ended = False

    def check(self) -> None:
        """As a request's."""
        if self.ended:
            raise Ended

    def answer(self, value: Any) -> None:
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        raise NotImplementedError


class Registry:
    """Live requests and calls of all engines, and the choice of an engine for the next."""

    def __init__(self, engines: Iterable[Engine]) -> None:
        self.engines: tuple[Engine, ...] = tuple(engines)
        self.by_rank = {engine.rank: engine for engine in self.engines}
        self._alive: list[Engine] = list(self.engines)
        self._live: dict[str, Live] = {}  # by wire id
        self._renamed: dict[str, Live] = {}  # by request id, those whose wire id is another
        # Wire ids of requests that ended here before they did on the engine. It confirms no abort, and may still send outputs:
        # a new request of the same id must not get them, so it gets another id on the wire.
        self._late: dict[str, None] = {}
        self._names = 0
        self._calls: dict[int, Call] = {}
        self._next_call = 1
        self._turn = 0  # where to begin to look, so that engines of equal work take turns
        self.unknown = 0
        """Outputs and answers that nobody waits for: late ones of what was aborted, or strays."""

    # --- requests ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: object) -> bool:
        return isinstance(request_id, str) and bool(self.find([request_id]))

    @property
    def alive(self) -> Sequence[Engine]:
        return self._alive

    def add(self, live: Live, request: Any) -> Engine:
        """Take a request in, and choose its engine.

        Raises
        ------
        SchemaValueError
            Its id is that of a live request, its rank is none of the engines', or its prompt is longer than the model takes.
        EngineDead
            The engine it must go to is dead, or all are.
        """
        request_id = live.request_id
        other = self._live.get(request_id)
        if request_id in self._renamed or (other is not None and other.request_id == request_id):
            raise SchemaValueError(f"a request {request_id!r:.80} is live already", path="$.request_id")
        engine = self._choose(request.data_parallel_rank)
        prompt = request.prompt_embeds if request.prompt_token_ids is None else request.prompt_token_ids
        live.prompt = 0 if prompt is None else _length(prompt)
        if live.prompt >= engine.longest_prompt:
            _check_length(live.prompt, request, engine)
        if other is not None or request_id in self._late:  # a name that means, or may yet mean, another one to the engine
            while live.wire_id in self._live or live.wire_id in self._late:
                self._names += 1
                live.wire_id = f"{request_id}~{self._names}"
            self._renamed[request_id] = live
        live.engine = engine
        engine.live.add(live)
        engine.work += _PLACE + live.prompt
        self._live[live.wire_id] = live
        return engine

    def _choose(self, rank: Any) -> Engine:
        if rank is not None:
            engine = self.by_rank.get(rank)
            if engine is None:
                known = ", ".join(map(str, self.by_rank))
                raise SchemaValueError(
                    f"expected the rank of an engine ({known}), got {rank!r:.40}", path="$.data_parallel_rank"
                )
            if engine.death is not None:
                raise engine.dead()
            return engine
        alive = self._alive
        if len(alive) == 1:
            return alive[0]
        if not alive:
            raise self._none_left()
        self._turn = turn = (self._turn + 1) % len(alive)
        return min(alive[turn:] + alive[:turn], key=_work)

    def _none_left(self) -> EngineDead:
        if len(self.engines) == 1:
            return self.engines[0].dead()
        return EngineDead("all engines are dead: " + "; ".join(f"{engine.name}: {engine.death}" for engine in self.engines))

    def drop(self, live: Live, *, finished: bool = False) -> bool:
        """Forget a request as if it had never been; False where it had ended. `finished`: the engine has done so too."""
        if live.ended:
            return False
        live.ended = True
        engine = live.engine
        del self._live[live.wire_id]
        if self._renamed.get(live.request_id) is live:
            del self._renamed[live.request_id]
        engine.live.discard(live)
        engine.work -= _PLACE + live.prompt
        if live.owed:
            engine.owed -= 1
        if live.sent and not finished:
            self._late[live.wire_id] = None
            self._late[live.request_id] = None
            while len(self._late) > _LATE_MAX:
                del self._late[next(iter(self._late))]
        return True

    def owe(self, what: Live | Call, now: float) -> None:
        """A request or a call was sent: its engine owes an answer. It owes nothing for what still waits to be sent."""
        if what.ended or what.owed:
            return
        what.owed = True
        engine = what.engine
        if not engine.owed:
            engine.owes_since = now
        engine.owed += 1

    def find(self, request_ids: Iterable[str]) -> list[Live]:
        """The live requests of these ids; others are passed over."""
        lives = []
        for request_id in request_ids:
            live = self._renamed.get(request_id) or self._live.get(request_id)
            if live is not None and live.request_id == request_id:
                lives.append(live)
        return lives

    def abort(self, lives: Iterable[Live]) -> dict[Engine, list[str]]:
        """End requests with an output that says ABORT.

        Returns
        -------
        dict
            What to tell which engines. An engine that does not know of a request yet is not told to end it.
        """
        told: dict[Engine, list[str]] = {}
        for live in lives:
            if not self.drop(live):
                continue
            if live.sent and live.engine.death is None:
                told.setdefault(live.engine, []).append(live.wire_id)
            live.push(_aborted(live))
        return told

    # --- what engines say -------------------------------------------------------------------------------------------

    def take(self, message: EngineCoreOutputs, now: float) -> None:
        """Hand a message's outputs and answer to those who wait for them."""
        engine = self.by_rank.get(message.engine_index)
        if engine is not None:
            engine.heard = now
        lives = self._live
        for output in message.outputs:
            live = lives.get(output.request_id)
            if live is None:
                self.unknown += 1
                if output.finish_reason is not None:
                    self._late.pop(output.request_id, None)  # that was the last
                continue
            if live.wire_id is not live.request_id:
                output.request_id = live.request_id
            if output.finish_reason is not None:
                self.drop(live, finished=True)
            elif live.prompt:  # its prompt is computed
                live.engine.work -= live.prompt
                live.prompt = 0
            live.push(output)
        if message.finished_requests:
            # The engine is done with these. Those still live had no last output: it ended them on its own.
            for request_id in message.finished_requests:
                live = lives.get(request_id)
                if live is not None and live.sent:
                    self.drop(live, finished=True)
                    live.push(_aborted(live))
        if message.utility_output is not None:
            self._answer(message.utility_output)

    def _answer(self, output: UtilityOutput) -> None:
        call = self._calls.get(output.call_id)
        if call is None:
            self.unknown += 1
            return
        self.forget(call)
        if output.failure_message is not None:
            call.fail(UtilityFailed(output.failure_message))
        else:
            call.answer(None if output.result is None else output.result.result)

    # --- utility calls ----------------------------------------------------------------------------------------------

    def call_targets(self, rank: int | None) -> list[Engine]:
        """The engines that a utility call is for: the one of `rank`, or all that live."""
        if rank is not None:
            return [self._choose(rank)]
        if not self._alive:
            raise self._none_left()
        return list(self._alive)

    def call(self, call: Call, engine: Engine) -> int:
        """Take a utility call in; its number."""
        call.call_id = self._next_call
        self._next_call += 1
        call.engine = engine
        engine.calls.add(call)
        self._calls[call.call_id] = call
        return call.call_id

    def forget(self, call: Call) -> None:
        """Wait for a call's answer no more."""
        call.ended = True
        if self._calls.pop(call.call_id, None) is not None:
            call.engine.calls.discard(call)
            if call.owed:
                call.engine.owed -= 1

    # --- death ------------------------------------------------------------------------------------------------------

    def bury(self, engine: Engine, why: str) -> bool:
        """End all that a dead engine owes; False where it was dead already."""
        if engine.death is not None:
            return False
        engine.death = why
        self._alive = [other for other in self._alive if other is not engine]
        for live in list(engine.live):
            self.drop(live)
            live.fail(engine.dead())
        for call in list(engine.calls):
            self.forget(call)
            call.fail(engine.dead())
        return True

    def silent(self, now: float, timeout: float) -> list[Engine]:
        """Engines that owe something and have said nothing for `timeout` seconds."""
        return [engine for engine in self._alive if engine.owed and now - max(engine.heard, engine.owes_since) >= timeout]

    def silent_at(self, timeout: float) -> float | None:
        """When the first engine will be, as things stand."""
        return min((max(engine.heard, engine.owes_since) + timeout for engine in self._alive if engine.owed), default=None)

    def end_all(self, error: type[Exception], message: str) -> dict[Engine, list[str]]:
        """End everything with an error, for a client that closes. Returns what to abort on which engines."""
        told: dict[Engine, list[str]] = {}
        for live in list(self._live.values()):
            self.drop(live)
            if live.sent and live.engine.death is None:
                told.setdefault(live.engine, []).append(live.wire_id)
            live.fail(error(message))
        for call in list(self._calls.values()):
            self.forget(call)
            call.fail(error(message))
        return told


def request_id_of(request: Any) -> str:
    """The id of a request of fastmm's or vLLM's class; a `SchemaError` where it is none."""
    try:
        request_id = request.request_id
        request.client_index, request.current_wave, request.data_parallel_rank, request.prompt_embeds  # noqa: B018
    except AttributeError:
        raise SchemaError(f"expected an EngineCoreRequest, got a {type(request).__qualname__}") from None
    if type(request_id) is not str:
        raise SchemaError(f"expected a str, got a {type(request_id).__qualname__}", path="$.request_id")
    return request_id


def _length(prompt: Any) -> int:
    try:
        return len(prompt)
    except TypeError:  # the encoder says what is wrong with it
        return 0


def _check_length(length: int, request: Any, engine: Engine) -> None:
    """Refuse a prompt that the model has no room for. The engine does not look, and dies of one (measured with vLLM 0.32)."""
    path = "$.prompt_embeds" if request.prompt_token_ids is None else "$.prompt_token_ids"
    if length > engine.longest_prompt:
        why = f"{engine.name} takes prompts of at most {engine.longest_prompt} tokens (max_model_len), got {length}"
        raise SchemaValueError(why, path=path)
    if request.sampling_params is not None:
        why = f"a prompt of {length} tokens fills {engine.name}'s max_model_len, and leaves no room for one to be generated"
        raise SchemaValueError(why, path=path)


def _aborted(live: Live) -> EngineCoreOutput:
    return EngineCoreOutput(request_id=live.request_id, new_token_ids=[], finish_reason=FinishReason.ABORT)


def _work(engine: Engine) -> int:
    return engine.work
