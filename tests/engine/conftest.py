"""Real vLLM engines for tests, on the CPU: ``make test-vllm-engine`` (part of ``make test-vllm``) runs this directory.

An engine takes half a minute to start, so there is one for each model and session, shared by all tests; what a test needs
beside that it starts itself with `engines.Process`.  What there is to use:

``model``            ``"llava"`` (batched fields), then ``"qwen2vl"`` (flat fields): a session parameter, so tests that use any of
                     the fixtures below run once for each.  All tests of one model run before those of the other.
``model_directory``  where it lies: config, tokenizer with a chat template, processors, weights (1.5 MB).  `models(name)`
                     gives the directory of one by name, without the parameter.
``reference``        what vLLM's own front end answered: ``reference.answer("two")`` for each of `cases.CASES`, an `Answer`;
                     ``reference.prompt_token_ids("two")``; ``reference.messages()``: all that crossed between vLLM's front end
                     and its engine meanwhile, as ``(direction, type name, frames)``.  `references(name)` by name.
``front``            a `front_end.FrontEnd`: ``front.request("two", sampling={...}, full_slices=True, ...)`` is a fastmm request
                     made of photographs by the HuggingFace processor and `build_features`; its float32 pixels are fresh.
``engine``           the headless engine of this model and an `AsyncEngineClient` connected to it, on a loop in a thread:
                     ``engine.client``, ``engine.run(coroutine, timeout=60)``, ``engine.ask(request) -> Answer``.
``vllm_environment`` environment variables for any other process of vLLM; add ``FASTMM_VLLM="1"`` and the like by
                     ``{**vllm_environment, ...}``.
``engine_log``       a path for the log of another process: ``engine_log("front-end")``.

Another engine, or another program of vLLM (it ends with the block; its log is shown when it fails):

    with headless_engine(models("llava"), port, log=engine_log("mine"), environment=vllm_environment) as process: ...
    with Process(vllm_command("serve", str(directory), "--port", "...", *engine_arguments()), log=..., environment=...) as server:
        server.wait_for_line("Application startup complete", 120)
    with Process([sys.executable, HERE / "reference.py", name, directory, new_folder], log=..., environment=...) as offline:
        assert offline.wait(180) == 0

An answer is right when ``engine.ask(request) == reference.answer(case)``: tokens, log probabilities to the last bit, reasons.
Mark a test that ends the session's engine ``@pytest.mark.ends_engine``: it runs after all others of its model.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from cases import CASES  # noqa: E402
from engines import Process, engine_environment, free_port, headless_engine  # noqa: E402
from front_end import Answer, FrontEnd  # noqa: E402
from models import WRITERS, write_model  # noqa: E402

logging.getLogger("vllm").setLevel(logging.ERROR)
STARTUP_S = 300.0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ends_engine: ends the engine of its model, so it comes after all others of that model")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # pytest then brings the tests of one model together, and keeps this order among them.
    items.sort(key=lambda item: item.get_closest_marker("ends_engine") is not None)


@pytest.fixture(scope="session")
def engine_log(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directory = tmp_path_factory.mktemp("logs")
    return lambda name: directory / f"{name}.log"


@pytest.fixture(scope="session")
def kept() -> Path:
    """What is the same in each run is kept: models, vLLM's answers, its cache. Made anew when what it is made of changes."""
    makers = [*(HERE / f"{name}.py" for name in ("models", "cases", "reference", "engines")), ROOT / "requirements/engine.txt"]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in makers) + sys.version.encode() + cpu().encode())
    directory = ROOT / "build/engine" / digest.hexdigest()[:16]
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def cpu() -> str:
    """What the last bits of an answer may depend on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))


def make_once(final: Path, make: Callable[[Path], object]) -> Path:
    """`final`, made by `make` at another name first, so that it is there as a whole or not at all."""
    if not final.exists():
        with tempfile.TemporaryDirectory(dir=final.parent) as directory:
            work = Path(directory) / final.name
            make(work)
            with contextlib.suppress(OSError):  # somebody else was quicker
                work.rename(final)
    return final


@pytest.fixture(scope="session")
def vllm_environment(kept: Path) -> dict[str, str]:
    return engine_environment(kept / "vllm-cache")


@pytest.fixture(scope="session")
def models(kept: Path) -> Callable[[str], Path]:
    return functools.cache(lambda name: make_once(kept / name, functools.partial(write_model, name)))


class Reference:
    """What vLLM's own front end got from its own engine, for every case."""

    def __init__(self, directory: Path) -> None:
        self._frames = directory / "messages.frames"
        self._answers: dict[str, Any] = json.loads((directory / "answers.json").read_text(encoding="utf-8"))

    def answer(self, case: str) -> Answer:
        return Answer.from_reference(self._answers[case])

    def prompt_token_ids(self, case: str) -> list[int]:
        return self._answers[case]["prompt_token_ids"]

    def text(self, case: str) -> str:
        return self._answers[case]["text"]

    def messages(self) -> Iterator[tuple[str, str, list[bytes]]]:
        import msgpack

        with self._frames.open("rb") as file:
            yield from msgpack.Unpacker(file, max_buffer_size=1 << 30)

    def frames_of_requests(self) -> dict[str, list[bytes]]:
        """Case to the frames that vLLM's encoder made of vLLM's request."""
        requests = [frames for direction, what, frames in self.messages() if (direction, what) == ("sent", "EngineCoreRequest")]
        return dict(zip(CASES, requests, strict=True))


@pytest.fixture(scope="session")
def references(
    kept: Path, models: Callable[[str], Path], vllm_environment: dict[str, str], engine_log: Callable[[str], Path]
) -> Callable[[str], Reference]:
    @functools.cache
    def references(name: str) -> Reference:
        def make(output: Path) -> None:
            output.mkdir()
            command = [sys.executable, str(HERE / "reference.py"), name, str(models(name)), str(output)]
            with Process(command, log=engine_log(f"reference-{name}"), environment=vllm_environment) as process:
                assert process.wait(STARTUP_S + 60) == 0, process.log()

        return Reference(make_once(kept / f"{name}-answers", make))

    return references


@pytest.fixture(scope="session", params=tuple(WRITERS))
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def model_directory(model: str, models: Callable[[str], Path]) -> Path:
    return models(model)


@pytest.fixture(scope="session")
def reference(model: str, references: Callable[[str], Reference]) -> Reference:
    return references(model)


@pytest.fixture(scope="session")
def front(model: str, model_directory: Path) -> FrontEnd:
    return FrontEnd(model, model_directory)


class Loop:
    """An event loop in a thread of its own, where the session's client lives."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any], timeout: float = 60.0) -> Any:
        """What the coroutine returns or raises; cancelled when it takes longer."""

        async def bounded() -> Any:
            return await asyncio.wait_for(work, timeout)

        return asyncio.run_coroutine_threadsafe(bounded(), self._loop).result(timeout + 10)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        if not self._thread.is_alive():
            self._loop.close()


class DrivenEngine:
    """A headless engine and the AsyncEngineClient that drives it."""

    def __init__(self, process: Process, handshake: str, **options: Any) -> None:
        from fastmm.transport import AsyncEngineClient

        self.process = process
        self.loop = Loop()
        self.progress: list[Any] = []

        async def connect() -> Any:
            client = AsyncEngineClient(handshake=handshake, startup_timeout=STARTUP_S, **options)
            return await client.__aenter__()

        self.client = self.run(connect(), STARTUP_S + 10)

    def run(self, work: Coroutine[Any, Any, Any], timeout: float = 60.0) -> Any:
        return self.loop.run(work, timeout)

    async def answer(self, request: Any, **options: Any) -> Answer:
        return Answer.of([output async for output in self.client.generate(request, **options)])

    def ask(self, request: Any, **options: Any) -> Answer:
        return self.run(self.answer(request, **options))

    def close(self) -> None:
        try:
            self.run(self.client.__aexit__(None, None, None), 20)
        finally:
            self.loop.close()


def drive(process: Process, handshake: str, **options: Any) -> Iterator[DrivenEngine]:
    """Connect a client to an engine that starts; the engine's log goes into the failure when it does not."""
    with process:
        try:
            driven = DrivenEngine(process, handshake, **options)
        except Exception as error:
            raise AssertionError(f"no client: {error!r}\n{process.log()}") from error
        try:
            yield driven
        finally:
            driven.close()


@pytest.fixture(scope="session")
def engine(
    model: str,
    model_directory: Path,
    reference: Reference,  # first: one engine at a time
    vllm_environment: dict[str, str],
    engine_log: Callable[[str], Path],
) -> Iterator[DrivenEngine]:
    port = free_port()
    log = engine_log(f"engine-{model}")
    process = headless_engine(model_directory, port, log=log, environment=vllm_environment)
    yield from drive(process, f"tcp://127.0.0.1:{port}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    driven = getattr(item, "funcargs", {}).get("engine")
    if report.failed and isinstance(driven, DrivenEngine):
        report.sections.append(("the engine's log", driven.process.log()))
    return report
