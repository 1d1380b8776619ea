"""Level of the messages that libraries log: --log-level."""

import logging
import os


def set_log_level(level: str | None) -> None:
    """Set the lowest level that megatron-core, vLLM, transformers and other libraries log to standard error.

    ``level`` is "debug", "info", "warning", "error", or None for the defaults: warnings, of vLLM errors alone. Call it
    before vLLM is imported. Lines begin with this process's rank. torch has its own variables (TORCH_LOGS).
    """
    rank = f"[rank {os.environ.get('RANK', '0')}] "
    os.environ.setdefault("VLLM_LOGGING_PREFIX", rank)
    logging.basicConfig(format=rank + "%(levelname)s %(name)s: %(message)s", level=(level or "warning").upper())
    if level is None:
        return
    from transformers.utils import logging as transformers_logging

    os.environ["VLLM_LOGGING_LEVEL"] = level.upper()
    transformers_logging.set_verbosity(logging.getLevelName(level.upper()))
    transformers_logging.disable_default_handler()  # with CI=true it logs every message twice, once without the rank
    transformers_logging.enable_propagation()
