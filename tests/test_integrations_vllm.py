"""The vLLM integration where there is no vLLM: it says so, imports nothing, and breaks nothing."""

import os
import subprocess
import sys
import textwrap

import pytest

NO_VLLM = "import sys; sys.modules['vllm'] = None\n"


def python(*arguments, **environment):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("FASTMM_VLLM")}
    return subprocess.run(
        [sys.executable, *arguments], env=inherited | environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("switch", [{}, {"FASTMM_VLLM": "0"}, {"FASTMM_VLLM": " "}])
def test_the_entry_point_switched_off_imports_nothing_of_fastmm(switch):
    done = python(
        "-c",
        "import sys, fastmm_vllm_plugin as plugin; plugin.register(); print(sorted(m for m in sys.modules if m.startswith('fastmm')))",
        **switch,
    )
    assert done.stdout.strip() == "['fastmm_vllm_plugin']", done.stderr


def test_the_entry_point_switched_on_without_vllm_raises_nothing_and_says_so():
    done = python("-c", NO_VLLM + "import fastmm_vllm_plugin; fastmm_vllm_plugin.register()", FASTMM_VLLM="1")
    assert done.returncode == 0
    assert "could not be switched on" in done.stderr


def test_the_command_without_vllm_says_so_and_has_an_exit_status_of_its_own():
    source = NO_VLLM + "import runpy; runpy.run_module('fastmm.integrations.vllm', run_name='__main__')"
    done = python("-c", source)
    assert done.returncode == 2
    assert "no vLLM in this environment" in done.stdout
    assert done.stderr == ""


def test_the_package_imports_without_vllm_and_the_names_ask_for_it():
    source = """
    import fastmm.integrations.vllm as integration
    from fastmm.integrations.vllm import gate, plugin, counters, log
    try:
        integration.MsgpackEncoder
    except ImportError as error:
        print("asks for", error.name.split(".")[0])
    try:
        integration.MsgpackThing
    except AttributeError:
        print("no such name")
    """
    done = python("-c", NO_VLLM + textwrap.dedent(source))
    assert done.stdout.split("\n")[:2] == ["asks for vllm", "no such name"], done.stderr
