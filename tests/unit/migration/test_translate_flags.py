"""Scripts in the style of every system become ours: the values, the open points, and a script that bash accepts."""

import subprocess

import pytest

from megatron_grpo.migration import translate
from megatron_grpo.migration.source import read_source
from megatron_grpo.rollout.arguments import ENGINES_OWN
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.errors import GrpoError
from tools import generate_migration_doc, translate_flags

MEGATRON_SWIFT = """
NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 \\
megatron rlhf --rlhf_type grpo --model /m/tiny --dataset rows.jsonl --global_batch_size 64 --micro_batch_size 2 \\
    --steps_per_generation 2 --num_generations 8 --reward_funcs accuracy format --lr 2e-6 --bf16 true \\
    --tensor_model_parallel_size 2 --sequence_parallel true --save_steps 25 --move_model_batches 4 --use_vllm true \\
    --train_iters 100 --padding_free true --tuner_type full --beta 0.001 --max_completion_length 128
"""
SWIFT = """
NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model /m/tiny --dataset rows.jsonl --per_device_train_batch_size 2 \\
    --gradient_accumulation_steps 8 --steps_per_generation 32 --num_generations 16 --learning_rate 1e-6 \\
    --tuner_type lora --deepspeed zero3 --warmup_ratio 0.05
"""
VERL = """
set -x
prompts=32
NGPUS=${NGPUS:-4}
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files="['/d/a.parquet', '/d/b.parquet']" \\
    data.train_batch_size=$((prompts * 4)) actor_rollout_ref.actor.ppo_mini_batch_size=${prompts} \\
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.model.path=/m/tiny actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1000 actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.002 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl +actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean \\
    trainer.n_gpus_per_node=$NGPUS trainer.total_training_steps=10 trainer.save_freq=5 trainer.new_setting=1 $@
"""
SLIME = """
MODEL_ARGS=(--num-layers 2 --hidden-size 64)
ROLLOUT_ARGS=(
   --prompt-data /d/a.jsonl
   --rollout-batch-size 16
   --n-samples-per-prompt 4   # completions
   --num-steps-per-rollout 2
   --num-rollout 50
   --save-interval 10
)
ray job submit --address=x -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 4 --colocate \\
   ${MODEL_ARGS[@]} ${ROLLOUT_ARGS[@]} --hf-checkpoint /m/tiny --advantage-estimator gspo --eps-clip 3e-4 --lr 1e-6 \\
   --use-dynamic-batch-size --max-tokens-per-gpu 512 --context-parallel-size 2 --use-tis --apply-rope-fusion
"""
TRL = """
model_name_or_path: /m/tiny
dataset_name: org/some-data
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
num_generations: 8
use_vllm: true
max_steps: 100
warmup_steps: 0.1
scale_rewards: false
"""
ROLL = """
pretrain: /m/tiny
rollout_batch_size: 16
num_return_sequences_in_group: 8
prompt_length: 64
response_length: 32
max_steps: 10
dual_clip_loss: true
actor_train:
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 1, gradient_accumulation_steps: 8}
  data_args: {file_name: [/d/a.jsonl]}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2}}
  device_mapping: list(range(0,8))
actor_infer:
  generating_args: {max_new_tokens: "${response_length}", temperature: 0.9}
"""
NEMO_BASE = """
grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4, max_num_steps: 20, use_leave_one_out_baseline: true}
policy: {model_name: /m/tiny, train_global_batch_size: 16, max_total_sequence_length: 64, precision: bfloat16}
"""
NEMO = """
defaults: base.yaml
policy:
  max_total_sequence_length: 128
  train_micro_batch_size: 2
  sequence_packing:
    enabled: true
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
cluster: {gpus_per_node: 2, num_nodes: 2}
"""
OUMI = """
model: {model_name: /m/tiny}
data: {train: {datasets: [{dataset_name: org/some-data}]}}
training:
  trainer_type: VERL_GRPO
  learning_rate: 1.0e-6
  save_steps: 10
  grpo: {temperature: 0.7}
  verl_config_overrides:
    data: {train_batch_size: 64}
    actor_rollout_ref: {actor: {ppo_mini_batch_size: 16}, rollout: {n: 4}}
    trainer: {n_gpus_per_node: 2}
"""
TRL_COMMAND = """
accelerate launch --config_file zero3.yaml --num_processes 4 train_grpo.py --config grpo.yaml --learning_rate 5e-6 \\
    --save_steps 100 --output_dir ${OUT_DIR}/run
"""
OUMI_COMMAND = "oumi train -c train.yaml --training.learning_rate 2e-6\n"
SIIRL = "python -m siirl.main_dag data.train_batch_size=8 actor_rollout_ref.rollout.n=2 data.train_files=/d/a.parquet "
SIIRL += "actor_rollout_ref.model.path=/m/tiny\n"
# name: (file, text, system, flags that must be there, flags that must not, words that a person must see)
CASES = {
    "megatron rlhf": (
        "run.sh",
        MEGATRON_SWIFT,
        "ms-swift",
        # 64 completions an update as there; intervals are multiples of the 2 updates of a rollout: 25 -> 26
        "--global-batch-size 64 --micro-batch-size 2 --steps-per-generation 2 --save-interval 26 --lr 2e-6 "
        "--beta 0.001 --reward-funcs accuracy format --sequence-parallel --train-iters 100 --temperature 0.9 "
        "--adam-beta2 0.95",
        "--num-epochs",
        ["Nothing to do (docs/migration/ms_swift.md", "move_model_batches", "GPUS_PER_NODE=${GPUS_PER_NODE:-4}"],
    ),
    "megatron rlhf on Ray": (  # a section for each role; the engines have GPUs of their own
        "ray.yaml",
        "rlhf_type: grpo\nmodel: /m/tiny\nreward_funcs: [accuracy]\nmicro_batch_size: 2\nglobal_batch_size: 16\n"
        "num_generations: 8\ntrain_iters: 100\nlr: 5e-5\nmax_completion_length: 64\ndataset: t.jsonl\nuse_vllm: true\n"
        "train:\n  gpus: 8\n  tuner_type: lora\n  lora_rank: 8\n  output_dir: o\n"
        "rollout:\n  gpus: 8\n  vllm_tensor_parallel_size: 2\n",
        "ms-swift",
        "--lora-rank 8 --vllm-tensor-parallel-size 2 --train-iters 100",
        "--gpus",
        ["NNODES=${NNODES:-2} GPUS_PER_NODE=${GPUS_PER_NODE:-8}", "--rollout-ranks N, with --max-staleness"],
    ),
    "megatron rlhf with servers": (  # the program refuses what a server is started with, also ms-swift's defaults
        "run.sh",
        MEGATRON_SWIFT.rstrip() + " --vllm_mode server --vllm_server_base_url http://h:8000 "
        "--vllm_tensor_parallel_size 2 --vllm_enable_prefix_caching false\n",
        "ms-swift",
        "--vllm-mode server --vllm-server-base-url http://h:8000",
        "--vllm-gpu-memory-utilization",
        [
            "start the servers with their own flags for --vllm-tensor-parallel-size 2 "
            "--vllm-gpu-memory-utilization 0.9 --no-vllm-enable-prefix-caching"
        ],
    ),
    "swift rlhf": (
        "run.sh",
        SWIFT,
        "ms-swift",
        # 2 completions x 8 micro-batches x 8 GPUs = 128; 32 micro-batches / 8 = 4 updates
        "--global-batch-size 128 --micro-batch-size 2 --steps-per-generation 4 --lr-warmup-fraction 0.05 "
        "--lora-rank 8 --lora-dropout 0.05 --lr 1e-6",
        "--adapters",
        ["--deepspeed: --use-distributed-optimizer"],
    ),
    "verl": (
        "run.sh",
        VERL,
        "verl",
        # 128 prompts x 5 = 640, 32 x 5 = 160: 4 updates a rollout; 1000 tokens x 2 ranks; 10 rollouts = 40 updates
        "--generation-batch-size 640 --global-batch-size 160 --max-tokens-per-microbatch 2000 "
        "--context-parallel-size 2 --beta 0.002 --kl-estimator k3 --loss-type gmpo --train-iters 40 --save-interval 20 "
        "--train-data-path t.jsonl",
        "--dual-clip",
        ["trainer.new_setting", "FSDP shards the weights"],
    ),
    "slime": (
        "run.sh",
        SLIME,
        "slime",
        # 16 prompts x 4; 50 rollouts x 2 updates; 512 tokens a GPU x CP 2
        "--generation-batch-size 64 --steps-per-generation 2 --train-iters 100 --save-interval 20 --loss-type gspo "
        "--max-tokens-per-microbatch 1024 --rollout-importance-sampling-mode token_truncate --sleep-level 2 --beta 0",
        "--num-layers",
        ["--transformer-impl transformer_engine --apply-rope-fusion", "flags of the architecture"],
    ),
    "swift rlhf on Ray": (  # 2 x 2 completions of each of the trainer's 4 GPUs; the engines' have none
        "ray.yaml",
        "rlhf_type: grpo\nmodel: /m/tiny\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 2\n"
        "num_generations: 8\nmax_steps: 100\nlearning_rate: 5e-5\ndataset: t.jsonl\nuse_vllm: true\n"
        "train:\n  gpus: 4\n  output_dir: o\nrollout:\n  gpus: 4\n",
        "ms-swift",
        "--global-batch-size 16 --num-generations 8",
        "--gpus",
        ["NNODES=${NNODES:-1} GPUS_PER_NODE=${GPUS_PER_NODE:-8}", "--rollout-ranks N, with --max-staleness"],
    ),
    "TRL": (
        "grpo.yaml",
        TRL,
        "TRL",
        # 4 x 2 x 8 GPUs that the file does not mention
        "--global-batch-size 64 --train-iters 100 --lr-warmup-fraction 0.1 --scale-rewards none --loss-type dapo "
        "--rollout-importance-sampling-mode sequence_mask --rollout-importance-sampling-threshold 3",
        "--num-epochs",
        ["8 are assumed", "dataset_name: a JSON-lines or Parquet file", "use_vllm"],
    ),
    "TRL in Python": (
        "train.py",
        "from datasets import load_dataset\nfrom peft import LoraConfig\nfrom trl import GRPOConfig, GRPOTrainer\n"
        "LR = 2e-6\ndef short(completions, **kwargs):\n    return [-len(c) for c in completions]\n"
        'config = GRPOConfig(output_dir="o", learning_rate=LR, max_steps=40, num_generations=4, beta=0.1, '
        "per_device_train_batch_size=8, max_completion_length=2**6, bf16=True)\n"
        'trainer = GRPOTrainer(model="/m/tiny", args=config, reward_funcs=[short], peft_config=LoraConfig(r=4),\n'
        '    train_dataset=load_dataset("me/sums", split="train"))\ntrainer.train()\n',
        "TRL",
        "--lr 2e-06 --train-iters 40 --num-generations 4 --beta 0.1 --lora-rank 4 --lora-alpha 8 --lora-dropout 0.0",
        "--seed",
        ["max_completion_length=2 ** 6: the script computes it", "reward functions: [short]", "me/sums"],
    ),
    "TRL in Python with what only a run could tell": (  # N is set twice, BETA is also a parameter
        "train.py",
        "\ufeffLR: float = 2e-6\nN = 8\nN *= 2\nBETA = 0.3\ndef main(BETA=0.1):\n"
        '    args = GRPOConfig("out", 5, learning_rate=LR, num_generations=N, beta=BETA, '
        "reward_weights=(1.0, 0.5))\n"
        '    lora = LoraConfig(r=4, target_modules={"v_proj", "q_proj"}, bias="none", layers_to_transform=[0])\n'
        '    GRPOTrainer("/m/tiny", [f], args, peft_config=lora)\n',
        "TRL",
        "--lr 2e-06 --load-hf /m/tiny --save out --lora-rank 4 --beta 0 "
        "--reward-weights 1.0 0.5 --lora-target-modules q_proj v_proj",
        "--num-generations",
        [
            *("HF_MODEL=${HF_MODEL:-/m/tiny}", "SAVE=${SAVE:-out}"),
            *("num_generations=N: the script computes it", "beta=BETA: the script computes it", "functions: [f]"),
            *("an argument without a name: 5", "LoraConfig: layers_to_transform=[0] is not translated"),
        ],
    ),
    "TRL by its command": (
        "run.sh",
        TRL_COMMAND,
        "TRL",
        # 4 x 2 x 4 processes; the command line overrides the file
        "--global-batch-size 32 --train-iters 100 --lr 5e-6 --save-interval 100",
        "--num-epochs",
        ["OUT_DIR: variables of the environment"],
    ),
    "Oumi by its command": (
        "run.sh",
        OUMI_COMMAND,
        "Oumi",
        "--generation-batch-size 256 --lr 2e-6",
        "--micro-batch-size",
        ["GPUS_PER_NODE=${GPUS_PER_NODE:-2}"],
    ),
    "siiRL": (
        "run.sh",
        SIIRL,
        "verl",
        "--generation-batch-size 16 --num-generations 2",
        "--kl-estimator",
        ["8 are assumed"],
    ),
    "ROLL": (
        "rlvr.yaml",
        ROLL,
        "ROLL",
        # 1 x 8 x (8 GPUs / TP 2) = 32 of 16 x 8 = 128: 4 updates a rollout; 1 + 2 x 0.2
        "--global-batch-size 32 --generation-batch-size 128 --train-iters 40 --dual-clip 1.4 --temperature 0.9 "
        "--max-completion-length 32",
        "--num-epochs",
        ["ground_truth"],
    ),
    "NeMo-RL": (
        "grpo.yaml",
        NEMO,
        "NeMo-RL",
        # 8 prompts x 4 = 32 of which an update has 16: 20 rollouts = 40 updates; 128 x 2 tokens
        "--generation-batch-size 32 --global-batch-size 16 --train-iters 40 --max-tokens-per-microbatch 256 "
        "--advantage-estimator rloo --bf16 --seq-length 128",
        "--micro-batch-size",
        ["NNODES=${NNODES:-2} GPUS_PER_NODE=${GPUS_PER_NODE:-2}", "half each is assumed"],
    ),
    "Oumi with verl": (
        "train.yaml",
        OUMI,
        "Oumi",
        # 64 x 4 = 256, 16 x 4 = 64: 4 updates a rollout
        "--generation-batch-size 256 --global-batch-size 64 --save-interval 40 --temperature 0.7 --lr 1e-06",
        "--micro-batch-size",
        ["dataset_name: a JSON-lines or Parquet file"],
    ),
}


DAPO = """
python3 -m verl.trainer.main_ppo model_engine=fsdp algorithm.adv_estimator=grpo data.train_files=/d/a.parquet \\
    data.val_files=/d/b.parquet data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    data.max_response_length=2048 actor_rollout_ref.model.path=/m/tiny actor_rollout_ref.rollout.n=8 \\
    actor_rollout_ref.actor.clip_ratio=0.3 actor_rollout_ref.rollout.over_sample_rate=0.1 \\
    reward.custom_reward_function.path=my.py reward.reward_manager.name=dapo \\
    +reward.reward_kwargs.overlong_buffer_cfg.enable=True +reward.reward_kwargs.overlong_buffer_cfg.len=512 \\
    +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 trainer.n_gpus_per_node=8 trainer.wibble=1 \\
    trainer.resume_mode=auto
"""


def test_what_changes_behaviour_comes_first_and_nothing_to_do_last(tmp_path, monkeypatch, groups):
    monkeypatch.setattr(translate_flags, "groups", lambda: groups)
    (tmp_path / "dapo.sh").write_text(DAPO)
    script = translate_flags.translated(tmp_path / "dapo.sh", None, None, None)
    in_order = [
        "# Changes behaviour, compared with verl:",
        "over_sample_rate=0.1: every completion is finished",
        "# To do:",
        "clip_ratio=0.3 has no effect in verl",
        "# Not translated",
        "trainer.wibble",
        "--generation-batch-size 512 ",
        "--reward-adapter score=my.py:compute_score",
        "--soft-cache-length 512",
        "--reward-weights 1 0.5",
        "--reward-funcs score soft_overlong",
        "# Nothing to do (docs/migration/verl.md has the reasons)",
        "trainer.resume_mode",
    ]
    places = [script.find(text) for text in in_order]
    assert -1 not in places and places == sorted(places), dict(zip(in_order, places, strict=True))


def test_flags_of_an_engine_are_those_that_servers_refuse():
    flags = {flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in translate.OF_ENGINE}
    assert flags == set(ENGINES_OWN)


@pytest.fixture(scope="module")
def groups():
    return translate_flags.groups()


@pytest.mark.parametrize("name", CASES)
def test_a_script_of_each_system(name, tmp_path, monkeypatch, groups):
    monkeypatch.setattr(translate_flags, "groups", lambda: groups)
    file, text, system, given, absent, shown = CASES[name]
    for name, base in (("base.yaml", NEMO_BASE), ("grpo.yaml", TRL), ("train.yaml", OUMI)):
        (tmp_path / name).write_text(base)
    path = tmp_path / file
    path.write_text(text)
    assert read_source(path).system == system
    script = translate_flags.translated(path, None, None, None)
    assert "\n    exec torchrun " in script  # signals of a scheduler reach torchrun, and do not end bash alone
    words = printed_flags(script, tmp_path)
    for flag in given.split(" --"):
        wanted = ("--" + flag.removeprefix("--")).split()
        place = words.index(wanted[0])
        assert words[place : place + len(wanted)] == wanted
    assert absent not in words
    comments = " ".join(line.lstrip("# ") for line in script.splitlines())
    assert [part for part in shown if part not in comments] == []
    args = parse_args(words)  # every value is one that the parser takes
    assert args.load_hf == "/m/tiny" and args.save == args.load


def printed_flags(script, folder, **own):
    """Return the words after pretrain_grpo.py, by running our own script with a torchrun that prints them."""
    stub = folder / "torchrun"
    stub.write_text('#!/bin/bash\nwhile [[ $1 != pretrain_grpo.py ]]; do shift; done\nshift\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "TRAIN_DATA": "t.jsonl", "VALID_DATA": "v.jsonl", "OUT_DIR": "o"}
    environment |= own
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, check=True)
    return run.stdout.splitlines()


@pytest.mark.parametrize(
    ("own", "files"), [("", ["/d/a.parquet", "/d/b.parquet"]), ("x.jsonl 2/y.jsonl", ["x.jsonl", "2/y.jsonl"])]
)
def test_train_data_takes_the_place_of_several_files(tmp_path, monkeypatch, groups, own, files):
    monkeypatch.setattr(translate_flags, "groups", lambda: groups)
    path = tmp_path / "run.sh"
    path.write_text(VERL)
    words = printed_flags(translate_flags.translated(path, None, None, None), tmp_path, TRAIN_DATA=own)
    place = words.index("--train-data-path") + 1
    assert words[place : place + 2] == files and words[place + 2].startswith("--")


def test_a_brace_in_one_of_several_files(tmp_path, monkeypatch, groups):
    """A } would end ${TRAIN_DATA:-...}."""
    monkeypatch.setattr(translate_flags, "groups", lambda: groups)
    path = tmp_path / "run.sh"
    assert "/d/a.parquet" in VERL and "/d/b.parquet" in VERL
    path.write_text(VERL.replace("/d/a.parquet", "/d/a}b.parquet"))
    words = printed_flags(translate_flags.translated(path, None, None, None), tmp_path)
    place = words.index("--train-data-path") + 1
    assert words[place : place + 2] == ["/d/a}b.parquet", "/d/b.parquet"]


def test_flags_of_the_command_line_name_the_gpus(tmp_path, monkeypatch, groups):
    monkeypatch.setattr(translate_flags, "groups", lambda: groups)
    path = tmp_path / "grpo.yaml"
    path.write_text(TRL)
    script = translate_flags.translated(path, None, 2, 3)
    assert "--global-batch-size 48 " in script and "NNODES=${NNODES:-3} GPUS_PER_NODE=${GPUS_PER_NODE:-2}" in script


def test_a_second_command_that_trains_is_named(tmp_path, monkeypatch, groups):
    monkeypatch.setattr(translate_flags, "groups", lambda: groups)
    (tmp_path / "run.sh").write_text(VERL + VERL.replace("rollout.n=5", "rollout.n=7"))
    script = translate_flags.translated(tmp_path / "run.sh", None, None, None)
    assert "2 commands of the script train: the first one is translated" in script and "--num-generations 5 " in script


def test_the_words_behind_a_function_are_shown(tmp_path, monkeypatch, groups):
    monkeypatch.setattr(translate_flags, "groups", lambda: groups)
    text = (
        "run() {\n    shift\n"
        + VERL.replace("set -x\n", "")
        + "}\nlog() { echo hi; }\nlog\nrun 8 trainer.save_freq=3\n"
    )
    (tmp_path / "run.sh").write_text(text)
    script = translate_flags.translated(tmp_path / "run.sh", None, None, None)
    assert "# - run 8 trainer.save_freq=3: the words behind a function are not read" in script.replace("#   -", "# -")
    assert script.count("behind a function") == 1


CONDITION = """
TP=${TP:-}
MEMORY=${MEMORY:-}
EXTRA=()
MODE=no
NAME=run_$(date "+%Y %m")_$USER
case "$(uname)" in
    Linux)
        TP=${TP:-2}
        MEMORY=${MEMORY:-0.6}
        GPUS=8
        ;;
    *)
        TP=${TP:-4}
        MEMORY=0.3
        GPUS=4
        EXTRA+=(actor_rollout_ref.rollout.enforce_eager=True trainer.balance_batch=False)
        ;;
esac
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.logger=wandb trainer.project_name=$(rm -r x) \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=$TP trainer.n_gpus_per_node=$GPUS "${EXTRA[@]}" \\
    actor_rollout_ref.rollout.gpu_memory_utilization=${MEMORY} trainer.experiment_name="$NAME" \\
    trainer.default_local_dir='s/`touch made`' actor_rollout_ref.model.path=/m/tiny
"""


def test_values_of_conditions_are_shown_and_only_harmless_commands_run(tmp_path, monkeypatch, groups):
    monkeypatch.setattr(translate_flags, "groups", lambda: groups)
    path = tmp_path / "run.sh"
    path.write_text(CONDITION)
    script = translate_flags.translated(path, None, None, None)
    text = " ".join(line.lstrip("# ") for line in script.splitlines())
    rollout = "actor_rollout_ref.rollout."
    for name, values in {
        f"{rollout}tensor_model_parallel_size": "4 or 2",
        f"{rollout}gpu_memory_utilization": "0.3 or 0.6",
        f"{rollout}enforce_eager": "not set or True",
    }.items():
        assert f"{name}: its value is set in a condition of the script: {values}" in text
    assert "trainer.n_gpus_per_node is 4 or 8" in text and "balance_batch: its value" not in text
    nothing = text.partition("Nothing to do")[2]
    assert "gpu_memory" not in nothing and "tensor_model" not in nothing
    assert "--wandb-project: $(rm -r x) runs a command, and is not run here" in text
    assert "SAVE=${SAVE:?give SAVE}" in script and "--save: s/`touch made` runs a command" in text
    words = printed_flags("export SAVE=s USER=me\n" + script, tmp_path)
    assert words[words.index("--wandb-project") + 1] == "$(rm -r x)"
    date = subprocess.run(["date", "+%Y %m"], capture_output=True, text=True, check=True).stdout.strip()
    assert words[words.index("--wandb-exp-name") + 1] == f"run_{date}_me"
    assert parse_args(words).vllm_gpu_memory_utilization == 0.3


def test_keys_that_hydra_deletes_are_not_set(tmp_path):
    path = tmp_path / "run.sh"
    command = "python3 -m verl.trainer.main_ppo --config-name=c --config-path p "
    path.write_text(f"{command} ~a.low=0.3 a.b.c=1 a.b.d=2 a.bc=3 +e=4 ~a.b ~e=4 ++f=5 g=6\n")
    values = read_source(path).settings.values
    assert values == {"config_name": "c", "config_path": "p", "a.bc": "3", "f": "5", "g": "6"}


def test_the_overlong_penalty_of_verls_older_recipe_of_dapo(tmp_path, monkeypatch, groups):
    """recipe/dapo/main_dapo.py reads config.reward_model.overlong_buffer."""
    monkeypatch.setattr(translate_flags, "groups", lambda: groups)
    buffer = "enable=True len=4096 penalty_factor=0.5".split()
    settings = " ".join(f"reward_model.overlong_buffer.{one}" for one in buffer)
    path = tmp_path / "run.sh"
    path.write_text(f"python3 -m recipe.dapo.main_dapo reward_model.reward_manager=dapo {settings}\n")
    script = translate_flags.translated(path, None, None, None)
    for flag in ("--soft-cache-length 4096", "--reward-weights 1 0.5", "--reward-funcs accuracy soft_overlong"):
        assert f" {flag} " in script


@pytest.mark.parametrize(("train", "rollout", "whole"), [(8, 8, True), (4, 2, True), (8, 4, False)])
def test_gpus_of_roles_that_are_no_whole_nodes_are_named(tmp_path, train, rollout, whole):
    (tmp_path / "ray.yaml").write_text(f"rlhf_type: grpo\ntrain:\n  gpus: {train}\nrollout:\n  gpus: {rollout}\n")
    source = read_source(tmp_path / "ray.yaml")
    assert any(note.startswith(f"the script uses {train + rollout} GPUs") for note in source.notes) != whole
    if whole:
        assert source.settings.gpus_per_node * source.settings.nnodes == train + rollout


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("lr = 1e-5\nGRPOConfig(learning_rate=lr)", 1e-5),
        ("lr: float = 1e-5\nGRPOConfig(learning_rate=lr)", 1e-5),
        ("lr = 1e-6\nlr *= 10\nGRPOConfig(learning_rate=lr)", None),
        ("lr = 1e-6\nlr, n = 1e-5, 4\nGRPOConfig(learning_rate=lr)", None),
        ("lr = 1e-6\nfor lr in (1e-6, 1e-5):\n    GRPOConfig(learning_rate=lr)", None),
        ("lr = 1e-6\ndef config(lr):\n    return GRPOConfig(learning_rate=lr)", None),
        ("args = GRPOConfig(learning_rate=1e-6)\nargs.learning_rate = 1e-5", None),
        ("args = GRPOConfig(learning_rate=1e-6)\nargs.learning_rate *= 10", None),
        ("a = made(GRPOConfig(learning_rate=1e-6))\na.beta = 1\nargs.learning_rate = 2", 1e-6),
        ("def config():\n    return GRPOConfig(learning_rate=1e-6)\na = config()\na.learning_rate = 1e-5\n"
         "GRPOTrainer(m, f, a)", None),
    ],
)  # fmt: skip
def test_a_value_that_a_trl_script_may_change_is_left_to_a_person(tmp_path, lines, found):
    (tmp_path / "run.py").write_text(lines)
    source = read_source(tmp_path / "run.py")
    assert source.settings.values.get("learning_rate") == (found and str(found))
    assert any("learning_rate" in note for note in source.notes) == (found is None)


@pytest.mark.parametrize(
    ("lines", "noted"),
    [
        ("GRPOTrainer(model, peft_config=None)", []),
        ("GRPOTrainer(model, peft_config=mine())", ["mine(): give --lora-rank"]),
        ("model = FastModel.get_peft_model(model, r=16)", ["FastModel.get_peft_model(model, r=16): give --lora-rank"]),
        ("get_peft_model(model, LoraConfig(r=4))", []),
    ],
)
def test_adapters_that_are_no_loraconfig_are_named(tmp_path, lines, noted):
    (tmp_path / "run.py").write_text(f"GRPOConfig(beta=0.1)\n{lines}\n")
    notes = [note for note in read_source(tmp_path / "run.py").notes if "--lora-rank" in note]
    assert notes == [f"{note}, without which all weights are trained" for note in noted]


def test_places_and_computed_adapters_of_a_trl_script(tmp_path):
    text = "r = 16\nGRPOTrainer('/m', [f], GRPOConfig('out', beta=0.1), peft_config=LoraConfig(r=r, lora_alpha=2 * r))"
    (tmp_path / "run.py").write_text(text)
    source = read_source(tmp_path / "run.py")
    expected = {"model_name_or_path": "/m", "output_dir": "out", "beta": "0.1", "lora_r": "16", "lora_dropout": "0.0"}
    assert source.settings.values == expected | {"use_peft": "True"}  # not PEFT's alpha of 8
    assert any(note.startswith("lora_alpha=2 * r: ") for note in source.notes)


@pytest.mark.parametrize(
    "file, text, message",
    [
        ("run.sh", "echo hello\n", "no command of a known system"),
        ("run.py", "print(1)\n", r"run\.py: no GRPOConfig\(\.\.\.\): of Python scripts"),
        ("run.py", "def (\n", "cannot be read as Python"),
        (
            "run.py",
            "GRPOConfig(beta=0)\nGRPOConfig(beta=0.04)\n",
            r"run\.py: GRPOConfig\(\.\.\.\) is there more than once",
        ),
        ("run.yaml", "a: 1\n", r"its top-level keys \(a\) belong to no known system; give --system"),
        ("run.yaml", "- a\n", "its top level is no mapping"),
        ("run.yaml", "a: [\n", "cannot be read as YAML"),
        (
            "run.yaml",
            "defaults: gone.yaml\npolicy: {}\n",
            r"its defaults are in .*gone\.yaml, and there is no such file",
        ),
    ],
)
def test_unreadable_scripts_are_refused(file, text, message, tmp_path, capsys):
    (tmp_path / file).write_text(text)
    with pytest.raises(GrpoError, match=message):
        read_source(tmp_path / file)
    assert translate_flags.main([str(tmp_path / "absent.sh")]) == 2
    assert "absent.sh: there is no such file" in capsys.readouterr().err


def test_the_pages_are_fresh():
    for system in generate_migration_doc.SYSTEMS.values():
        page = generate_migration_doc.file_of(system)
        assert page.read_text() == generate_migration_doc.document(system), "run tools/generate_migration_doc.py"
        assert f"migration/{page.name}" in (generate_migration_doc.REPO / "mkdocs.yml").read_text()
