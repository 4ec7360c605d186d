"""The plugin puts fastmm where vLLM looks for its own codec, whatever was imported first; and switched off it does nothing.

Each case is a fresh process, because what is tested is who imports what before whom.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

PRELUDE = """
import json, os, sys, logging
logging.basicConfig(level=logging.INFO)  # vLLM sets up its log later than it loads its plugins

def everything():
    import vllm.v1.engine.core_client, vllm.v1.engine.core, vllm.v1.engine.coordinator
    from vllm.entrypoints.scale_out.token_in_token_out import mm_serde

def load():
    import vllm.plugins
    vllm.plugins.load_general_plugins()

def holders():
    "Module -> name -> whose it is."
    found = {}
    for module in ("vllm.v1.serial_utils", "vllm.v1.engine.core_client", "vllm.v1.engine.core", "vllm.v1.engine.coordinator",
                   "vllm.entrypoints.scale_out.token_in_token_out.mm_serde"):
        held = vars(sys.modules[module]) if module in sys.modules else {}
        names = {n: held[n].__module__ for n in ("MsgpackEncoder", "MsgpackDecoder") if n in held}
        names |= {n: type(held[n]).__module__ for n in ("_encoder", "_decoder") if n in held}
        found[module.split(".")[-1]] = {n: "fastmm" if m.startswith("fastmm.") else m for n, m in names.items()}
    return found

def of_fastmm():
    return sorted(name for name in sys.modules if name.split(".")[0] in ("fastmm", "fastmm_vllm_plugin"))

def answer(**what):
    print("ANSWER " + json.dumps(what))
"""

ALL_OURS = {
    "serial_utils": {"MsgpackEncoder": "fastmm", "MsgpackDecoder": "fastmm"},
    "core_client": {"MsgpackEncoder": "fastmm", "MsgpackDecoder": "fastmm"},
    "core": {"MsgpackEncoder": "fastmm", "MsgpackDecoder": "fastmm"},
    "coordinator": {"MsgpackDecoder": "fastmm"},
    "mm_serde": {"MsgpackEncoder": "fastmm", "MsgpackDecoder": "fastmm", "_encoder": "fastmm", "_decoder": "fastmm"},
}


def fresh(source, switch=None, tmp_path=None, **environment):
    """Run the source in a process of its own; return what it answered, one entry a line, and its log."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FASTMM_", "VLLM_PLUGINS"))}
    if switch is not None:
        inherited["FASTMM_VLLM"] = switch
    script = PRELUDE + textwrap.dedent(source)
    if tmp_path is not None:  # a file, where a child process must be able to import it
        file = tmp_path / "script.py"
        file.write_text(script, encoding="utf-8")
        command = [sys.executable, str(file)]
    else:
        command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    return lines, done.stdout + done.stderr


def test_without_the_switch_nothing_is_imported_and_nothing_changes():
    answers, log = fresh(
        """
        everything()
        import vllm.plugins
        before = holders()
        answer(step="before", held=before)
        load()
        answer(step="no switch", held=holders(), imported=of_fastmm())

        def again(step, **environment):
            vllm.plugins.plugins_loaded = False
            os.environ.update(environment)
            load()
            answer(step=step, held=holders(), imported=of_fastmm())

        again("0", FASTMM_VLLM="0")
        again("empty", FASTMM_VLLM="")
        again("another plugin", FASTMM_VLLM="1", VLLM_PLUGINS="another")
        del os.environ["VLLM_PLUGINS"]
        sys.modules["fastmm"] = None  # as where the compiled core does not load
        again("broken", FASTMM_VLLM="1")
        del sys.modules["fastmm"]
        again("no word", FASTMM_VLLM="banana")
        """
    )
    steps = {answer.pop("step"): answer for answer in answers}
    before = steps.pop("before")["held"]
    assert {whose for names in before.values() for whose in names.values()} == {"vllm.v1.serial_utils"}
    for step in ("no switch", "0", "empty", "another plugin"):
        assert steps[step] == {"held": before, "imported": ["fastmm_vllm_plugin"]}, step
    for step in ("broken", "no word"):
        assert steps[step]["held"] == before, step
    assert log.count("could not be switched on") == 1  # a fault of the plugin itself never stops vLLM
    assert log.count("banana") == 1


def test_loaded_before_the_engine_is_imported_it_is_everywhere():
    (answer,), log = fresh(
        """
        load()
        early = holders()
        everything()
        from vllm.v1 import serial_utils
        serial_utils.MsgpackEncoder(), serial_utils.MsgpackDecoder()
        answer(early=early, late=holders())
        """,
        "1",
    )
    assert answer["early"]["core"] == {}
    assert answer["late"] == ALL_OURS
    assert log.count("in place of the encoder and decoder") == 1


def test_loaded_after_the_engine_is_imported_it_is_everywhere_once_and_leaves_without_a_trace():
    (answer,), log = fresh(
        """
        everything()
        before = holders()
        load()
        first = [id(sys.modules["vllm.v1.serial_utils"].MsgpackEncoder), holders()]
        import vllm.plugins
        vllm.plugins.plugins_loaded = False
        load()
        second = [id(sys.modules["vllm.v1.serial_utils"].MsgpackEncoder), holders()]
        from vllm.distributed.device_communicators.shm_object_storage import MsgpackSerde
        lazy = {type(codec).__module__ for codec in vars(MsgpackSerde()).values() if "Msgpack" in type(codec).__name__}
        from vllm.entrypoints.scale_out.token_in_token_out import mm_serde
        threshold = mm_serde._encoder.size_threshold
        from fastmm.integrations.vllm import plugin
        plugin.switch_off()
        answer(before=before, first=first, second=second, lazy=list(lazy), threshold=threshold, off=holders())
        """,
        "1",
    )
    assert answer["first"][1] == ALL_OURS
    assert answer["first"] == answer["second"]
    assert log.count("in place of the encoder and decoder") == 1
    assert answer["lazy"] == ["fastmm.integrations.vllm.drop_in"]
    assert answer["threshold"] == 2**62  # what the instance was made with is kept
    assert answer["off"] == answer["before"]


# The engine core's own first act is to load the plugins; what comes after that fails here, for there is no configuration.
ENGINE_CORE = """
def engine_core():
    from vllm.v1.engine import core
    imported_before = "vllm.v1.engine.core" in sys.modules and "fastmm" not in sys.modules
    try:
        core.EngineCore(None, None, False)
    except AttributeError:
        pass
    decoder = eval("MsgpackDecoder(t)", vars(core), {"t": core.EngineCoreRequest})
    elsewhere = eval("MsgpackDecoder()", vars(sys.modules["vllm.v1.serial_utils"]))
    answer(held=holders()["core"], imported_before=imported_before, tolerant=hasattr(decoder, "_tolerates"),
           elsewhere=hasattr(elsewhere, "_tolerates"), process=os.getpid())
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_an_engine_core_in_a_process_of_its_own_has_it(method, tmp_path):
    answers, log = fresh(
        ENGINE_CORE
        + textwrap.dedent(f"""
        if __name__ == "__main__":
            import multiprocessing
            import vllm.plugins
            load()
            assert "vllm.v1.engine.core" not in sys.modules or {method == "spawn"}
            process = multiprocessing.get_context("{method}").Process(target=engine_core, name="EngineCore")
            process.start()
            process.join(250)
            assert process.exitcode == 0, process.exitcode
            sys.stdout.flush()
            answer(process=os.getpid())
        """),
        "1",
        tmp_path,
        FASTMM_VLLM_COUNTERS=str(tmp_path / "counters"),
    )
    child, parent = answers
    assert child["process"] != parent["process"]
    assert child["imported_before"] is (method == "spawn")
    assert child["held"] == {"MsgpackEncoder": "fastmm", "MsgpackDecoder": "fastmm"}
    # The input thread's decoder tolerates malformed messages, and no other does.
    assert child["tolerant"]
    assert not child["elsewhere"]
    # Where a codec is made it is said, in a forked process too; the parent made none.
    assert log.count("in place of the encoder and decoder") == 1
    assert f"on in process {child['process']}" in log
    from fastmm.integrations.vllm.counters import read_directory

    kept = read_directory(tmp_path / "counters")
    assert set(kept) >= {child["process"], parent["process"]}  # and whatever else was forked on the way
    assert kept[child["process"]]["process"] == "EngineCore"
    assert kept[child["process"]]["decoders"] == 2
    assert kept[parent["process"]]["decoders"] == 0
