"""vLLM as a subprocess: the headless engine, and anything else of vLLM's, in a process group that always ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reference import ENGINE_OPTIONS

HERE = Path(__file__).resolve().parent


def _end_with_parent() -> None:
    """In the child: SIGTERM when the thread that started it ends, so that a killed test run leaves no engine behind."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)


def free_port() -> int:
    """A TCP port of loopback that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def engine_environment(cache: Path, **more: str) -> dict[str, str]:
    """The environment every process of vLLM gets: no network, little memory, one thread, nothing written into the home."""
    ours = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_CONFIG_ROOT": str(cache),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Answers repeat to the last bit only with the same number of threads; more of them would not be quicker here.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "FASTMM_"))}
    return {**kept, **ours, **more}


def engine_arguments(**more: Any) -> list[str]:
    """The options of `reference.ENGINE_OPTIONS`, and `more`, as words of vLLM's command line."""
    words: list[str] = []
    for name, value in {**ENGINE_OPTIONS, **more}.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict):
            words += [word for key, each in value.items() for word in (f"--{flag}.{key}", str(each))]
        else:
            words += [f"--{flag}", str(value)]
    return words


class Process:
    """A command in a process group of its own, whose output is kept in a file. Stops with the ``with`` block, whatever happens."""

    def __init__(self, command: Sequence[str], *, log: Path, environment: Mapping[str, str], cwd: Path | None = None) -> None:
        self.log_path = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=cwd,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def log(self, last: int = 60) -> str:
        """The last lines of its output."""
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([f"--- {self.log_path.name}, {len(lines)} lines, the last:", *lines[-last:]])

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL to all of it, workers and children included, as a lost machine would."""
        self.signal_group(signal.SIGKILL)
        self.process.wait()

    def stop(self, timeout: float = 15.0) -> int:
        """Ask, wait, then insist. Children that outlive the first process are ended too."""
        if self.alive:
            self.signal_group(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout)
        self.signal_group(signal.SIGKILL)
        return self.process.wait()

    def wait(self, timeout: float) -> int:
        """Its exit status; an error with the end of its output when it is not done by then."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done after {timeout} s\n{self.log()}") from None

    def wait_for_line(self, text: str, timeout: float) -> None:
        """Until its output contains `text`; an error when it ends before, or does not say so in time."""
        deadline = time.monotonic() + timeout
        while text.encode() not in self.log_path.read_bytes():
            assert self.alive, f"ended with {self.process.returncode} before it said {text!r}\n{self.log()}"
            assert time.monotonic() < deadline, f"did not say {text!r} in {timeout} s\n{self.log()}"
            time.sleep(0.1)


def vllm_command(*words: str) -> list[str]:
    """``vllm WORDS``, by the interpreter that runs this."""
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", *words]


def headless_engine(
    model: Path, port: int, *, log: Path, environment: Mapping[str, str], rank: int = 0, of: int = 1, **options: Any
) -> Process:
    """An engine core without vLLM's front end: it dials the handshake at ``tcp://127.0.0.1:PORT`` until somebody answers.

    `rank` is which it is `of` how many that share the load, each started by itself, as on as many machines.
    """
    words = [
        "--headless",
        "--data-parallel-size",
        str(of),
        "--data-parallel-size-local",
        "1",
        *(["--data-parallel-start-rank", str(rank)] if of > 1 else []),
        "--data-parallel-address",
        "127.0.0.1",
        "--data-parallel-rpc-port",
        str(port),
        *engine_arguments(**options),
    ]
    return Process(vllm_command("serve", str(model), *words), log=log, environment=environment)
