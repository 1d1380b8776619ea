"""A configuration of another system, translated by the tool, makes an update here."""

import os
import subprocess

from bad_input_runs import TRAIN, bench, finished, launch, model  # noqa: F401 (fixtures)
from run_files import metrics_of

from tools import translate_flags

CONFIGURATION = """
model_name_or_path: {model}
dataset_name: org/sums
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
num_generations: 4
max_prompt_length: 8
max_completion_length: 4
max_steps: 2
learning_rate: 1.0e-5
beta: 0.01
use_vllm: true
vllm_importance_sampling_correction: false  # the engine of the test returns no log-probabilities
vllm_mode: colocate
save_steps: 2
"""


def test_a_translated_configuration_of_trl_trains(bench, tmp_path):
    (tmp_path / "grpo.yaml").write_text(CONFIGURATION.format(model=bench.model))
    script = translate_flags.translated(tmp_path / "grpo.yaml", None, gpus_per_node=1, nnodes=1)
    torchrun = tmp_path / "torchrun"  # prints the words after the program
    torchrun.write_text('#!/bin/bash\nwhile [[ $1 != pretrain_grpo.py ]]; do shift; done\nshift\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TRAIN_DATA": str(bench.train), "SAVE": str(tmp_path / "run")}
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=os.environ | own, check=True)
    assert launch(TRAIN, [*run.stdout.splitlines(), "--reward-funcs", "exact_match"]) == 0
    rows = metrics_of(tmp_path / "run")
    assert [row["iteration"] for row in rows] == [1, 2]
    assert (tmp_path / "run" / "iter_0000002").is_dir() and (tmp_path / "run" / "hf_model").is_dir()
