"""What vLLM loads through the entry point group ``vllm.general_plugins``: is fastmm switched on?

A module of its own beside the package: a vLLM that has fastmm installed and not switched on looks at one environment
variable, and imports nothing more of it.
"""

import os


def register() -> None:
    """Put fastmm's encoder and decoder in vLLM's place when ``FASTMM_VLLM`` says so. Never raises: vLLM would not start."""
    if os.environ.get("FASTMM_VLLM", "0").strip() in {"", "0"}:
        return
    try:
        from fastmm.integrations.vllm.plugin import register as switch_on

        switch_on()
    except Exception:
        import logging

        logging.getLogger("vllm.fastmm").exception("fastmm: could not be switched on; vLLM keeps its own encoder and decoder")
