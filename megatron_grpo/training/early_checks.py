"""Checks of the flags together that need neither torch nor the model: the rules of a run, files, names of rewards."""

from argparse import Namespace

from megatron_grpo.data.blend import absent_files
from megatron_grpo.data.held_out_files import valid_paths
from megatron_grpo.data.routing import teacher_routes
from megatron_grpo.models.arguments import check_model, check_settings
from megatron_grpo.patches import vllm
from megatron_grpo.patches.replacement import check_all
from megatron_grpo.rewards.adapters import adapters
from megatron_grpo.rewards.registry import check_package, check_reward
from megatron_grpo.rewards.reward_models.arguments import reward_models
from megatron_grpo.training.run_rules import resolve_run
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.json_files import read_config
from megatron_grpo.utils.packages import require
from megatron_grpo.utils.rules import flag


def check_packages(args: Namespace) -> None:
    """Raise GrpoError if a package is missing that engine and built-in rewards need, or another vLLM than ours."""
    if (args.rollout_engine, args.vllm_mode) == ("vllm", "colocate") and not (args.replay_rollouts or args.train_only):
        require("--rollout-engine vllm", "vllm", instead="give --rollout-engine megatron, or servers")
        check_all(vllm.ENTRIES)
    for name in args.reward_funcs:
        check_package(name)


def check_reward_names(args: Namespace) -> None:
    """Raise GrpoError for a name that is no reward function, reward model or adapter; load none of them."""
    others = reward_models(args).keys() | adapters(args.reward_adapter).keys()
    for name in sorted({*(args.reward_funcs or ())} - others):
        check_reward(name)


def absent_data(args: Namespace) -> list[str]:
    """Return the flags, with their values, that name data files of the run which this machine does not have."""
    train = [] if args.eval_only else args.train_data_path or []
    files = {"train_data_path": train, "valid_data_path": valid_paths(args.valid_data_path)}
    files["sft_data_path"] = args.sft_data_path or []
    return [f"{flag(dest)} {path}" for dest, words in files.items() for path in absent_files(words)]


def check_early(args: Namespace, world_size: int) -> None:
    """Raise GrpoError for what ``setup`` would refuse after the imports, as far as the flags alone tell it."""
    args = resolve_run(args, world_size)
    check_settings(args)
    if not (args.load_hf or args.load or args.pretrained_checkpoint):  # the flags alone give the architecture
        check_model(args)
    teachers = teacher_routes("--teacher-load-hf", args.teacher_load_hf).values()
    for directory in filter(None, (args.load_hf, args.ref_load_hf, *teachers)):
        read_config(directory)
    if args.dry_run:
        return
    check_packages(args)
    for absent in absent_data(args):
        raise GrpoError(f"{absent}: no such file")
    check_reward_names(args)
