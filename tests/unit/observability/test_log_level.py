"""Messages of libraries on standard error: those of the level and above, with the rank."""

import os
import subprocess
import sys

import pytest
from ranks import REPO

PROGRAM = """
import logging, os, sys
from megatron_grpo.observability.log_level import set_log_level
set_log_level(None if sys.argv[1] == "none" else sys.argv[1])
for name in ("megatron.core.optimizer", "transformers.modeling_utils"):
    logger = logging.getLogger(name)
    for level in ("debug", "info", "warning", "error"):
        getattr(logger, level)(f"{name.partition('.')[0]} {level}")
print(os.environ.get("VLLM_LOGGING_LEVEL"), os.environ["VLLM_LOGGING_PREFIX"])
"""


@pytest.mark.parametrize(
    "level, shown, ci",
    [("none", 2, ""), *(pytest.param("debug", 4, ci, marks=pytest.mark.slow) for ci in ("", "true"))],
)
def test_levels(level, shown, ci):
    names = ["DEBUG", "INFO", "WARNING", "ERROR"][-shown:]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_LOGGING")}
    environment |= {"RANK": "3", "PYTHONPATH": str(REPO), "CI": ci}  # transformers reads CI
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, level], capture_output=True, text=True, env=environment, check=True
    )
    lines = run.stderr.splitlines()
    for logger in ("megatron.core.optimizer", "transformers.modeling_utils"):
        expected = [f"[rank 3] {name} {logger}: {logger.partition('.')[0]} {name.lower()}" for name in names]
        assert [line for line in lines if logger in line] == expected
    assert run.stdout.split(" ", 1) == [str(None if level == "none" else level.upper()), "[rank 3] \n"]
