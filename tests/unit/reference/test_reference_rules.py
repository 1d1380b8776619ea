"""Flags of reference model and teacher: refused combinations, and the arguments of both models."""

import json
import shutil
from pathlib import Path

import pytest
from good_args import MOE, validated

from megatron_grpo.data.tokenizer import HuggingFaceTokenizer
from megatron_grpo.reference.arguments import SIZES, has_own_parallel_configuration
from megatron_grpo.reference.model_args import check_teacher_tokenizer, reference_args, teacher_args
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import families

TEACHER, GKD = "--teacher-load-hf t --teacher-kl-coef 1", "--teacher-load-hf t --loss-type gkd"
REF_TP2 = "--ref-tensor-model-parallel-size 2"
REFUSED = {
    f"--beta 0 {REF_TP2}": "--ref-tensor-model-parallel-size needs --beta: there is no reference model without",
    "--beta 0 --ref-load-hf r": "--ref-load-hf needs --beta",
    "--beta 0 --ref-load r": "--ref-load needs --beta",
    "--beta 0 --sync-ref-model": "--sync-ref-model needs --beta",
    "--beta 0 --ref-micro-batch-size 2": "--ref-micro-batch-size needs --beta",
    "--ref-load a --ref-load-hf b": "--ref-load and --ref-load-hf cannot both be given: the reference model has one",
    "--ref-pipeline-model-parallel-size 0": r"--ref-pipeline-model-parallel-size \(0\) must be greater than 0",
    "--ref-expert-model-parallel-size 2": "--ref-expert-model-parallel-size needs --num-experts",
    "--ref-micro-batch-size 2 --logprobs-max-tokens-per-microbatch 2048": "cannot both be given: both set the size",
    "--logprobs-max-tokens-per-microbatch 1023": r"1024 tokens, .*: --logprobs-max-tokens-per-microbatch \(1023\) must",
    "--ref-model-sync-steps 4": "--ref-model-sync-steps needs --sync-ref-model",
    "--ref-model-mixup-alpha 0.5": "--ref-model-mixup-alpha needs --sync-ref-model",
    "--sync-ref-model --ref-model-mixup-alpha 0": r"\(0.0\) must be greater than 0 and at most 1",
    "--sync-ref-model --ref-model-mixup-alpha 1.5": r"\(1.5\) must be greater than 0 and at most 1",
    "--sync-ref-model --ref-model-sync-steps 3 --num-iterations 2": r"\(3\) must be divisible by .* per rollout \(2\)",
    "--teacher-load-hf t": "--teacher-load-hf needs --teacher-kl-coef: .*1, for example.*, or --loss-type gkd",
    "--teacher-load-hf a=t t --teacher-kl-coef 1": "--teacher-load-hf t: with several teachers give SOURCE=DIR, each",
    "--teacher-load-hf a=t a=u --teacher-kl-coef 1": "a=u: with several teachers give SOURCE=DIR, each data",
    "--teacher-server a=http://h:1 http://h:2 --teacher-kl-coef 1": "http://h:2: with several teachers give SOURCE=URL",
    "--teacher-server a=http://h:1 b=h:2 --teacher-kl-coef 1": "is not the address of a server: give http://HOST:PORT",
    "--loss-type gkd": "--loss-type gkd needs --teacher-load-hf or --teacher-server: there is no teacher",
    f"{TEACHER} --loss-type gkd": "gkd with --teacher-kl-coef: each learns from the teacher, .*: leave one of them out",
    f"{TEACHER} --gkd-beta 0": "--gkd-beta has no effect with --loss-type grpo: leave it out, or give --loss-type gkd",
    f"{GKD} --gkd-beta 1.5": r"--gkd-beta \(1.5\) must lie between 0 and 1",
    f"{GKD} --epsilon 0.1": "--epsilon has no effect with --loss-type gkd",
    f"{GKD} --clip-cov-ratio 0.1": "--clip-cov-ratio has no effect with --loss-type gkd, which reads no advantages",
    f"{GKD} --beta 0.1 --kl-in-reward": "--kl-in-reward has no effect with --loss-type gkd, which reads no advantages",
    f"{GKD} --advantage-estimator rloo": "--advantage-estimator has no effect with --loss-type gkd",
    f"{GKD} --gkd-logits-topk 1001": r"--gkd-logits-topk \(1001\) is larger than the vocabulary \(1000\)",
    f"{GKD} --top-k 5": "--loss-type gkd with --top-k 5: .*add --no-top-k-replay",
    "--teacher-server http://h:1 --loss-type gkd": "needs --gkd-logits-topk: a server returns its likely tokens only",
    "--teacher-server http://h:1 --loss-type gkd --gkd-logits-topk 4 --temperature 0.5": "at temperature 1 only",
    "--teacher-server http://h:1": "--teacher-server needs --teacher-kl-coef",
    "--teacher-kl-coef 1": "--teacher-kl-coef needs --teacher-load-hf or --teacher-server",
    f"{TEACHER} --teacher-server http://h:1": "--teacher-load-hf and --teacher-server cannot both be given",
    "--teacher-load-hf t --teacher-kl-coef -1": r"--teacher-kl-coef \(-1.0\) must be greater than 0",
    f"{TEACHER} --teacher-server-timeout 9": "--teacher-server-timeout needs --teacher-server",
    "--teacher-tensor-model-parallel-size 2": "--teacher-tensor-model-parallel-size needs --teacher-load-hf",
    f"{TEACHER} --loss-type gmpo": "with --teacher-kl-coef each token has its own advantage: leave one",
    "--teacher-server h:1 --teacher-kl-coef 1": "is not the address of a server: give http://HOST:PORT",
    "--teacher-server http://u:secret@h:1 --teacher-kl-coef 1": "must not contain a password",
    "--teacher-server http://h:1 --teacher-kl-coef 1 --temperature 0.5": "at temperature 1 only",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_refused(flags):
    with pytest.raises(GrpoError, match=REFUSED[flags]):
        validated(flags)


LAYOUTS = {
    "--ref-tensor-model-parallel-size 3": r"world_size \(8\) must be divisible by the product of --ref-.* \(3\): TP 3",
    "--ref-tensor-model-parallel-size 16": r"world_size \(8\) must be divisible .* \(16\)",
    "--ref-pipeline-model-parallel-size 8": r"--num-layers \(4\) must be divisible by --ref-pipeline-.*-size \(8\)$",
    f"{MOE} --ref-expert-model-parallel-size 3": r"reference model .*--num-experts \(8\) must be divisible by .*\(3\)",
    "--ref-micro-batch-size 16": r"_size \(64\) must be divisible by --ref-micro-batch-size \(16\) x DP",
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --ref-micro-batch-size 16": "x PP",
}


@pytest.mark.parametrize("flags", LAYOUTS)
def test_layouts_that_do_not_fit(flags):
    args = validated(flags)
    with pytest.raises(GrpoError, match=LAYOUTS[flags]):
        reference_args(args)


def test_the_references_arguments():
    policy = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    policy += " --num-virtual-stages-per-pipeline-rank 2 --num-experts 8 --model-family qwen3_moe"
    args = validated(f"{policy} --router-replay-mode R2")
    own = reference_args(args)
    assert not has_own_parallel_configuration(args)
    assert [getattr(own, size) for size in SIZES] == [2, 2, 1, 1, 2] and own.num_virtual_stages_per_pipeline_rank == 2
    assert own.router_replay_mode == "disabled" and args.router_replay_mode == "R2"

    sizes = "--ref-tensor-model-parallel-size 1 --ref-pipeline-model-parallel-size 1 --ref-expert-model-parallel-size 4"
    args = validated(f"{policy} {sizes} --ref-micro-batch-size 4 --max-tokens-per-microbatch 2048")
    own = reference_args(args)
    assert has_own_parallel_configuration(args)
    # Experts are cut as the rest of the reference is, and not as the policy's.
    assert [getattr(own, size) for size in SIZES] == [1, 1, 1, 4, 1]
    assert (own.data_parallel_size, own.micro_batch_size, own.max_tokens_per_microbatch) == (8, 4, None)
    assert not own.sequence_parallel and own.num_virtual_stages_per_pipeline_rank is None
    assert (own.padded_vocab_size, args.padded_vocab_size) == (1024, 1024)
    assert args.sequence_parallel and args.tensor_model_parallel_size == 2  # the policy's are as they were


@pytest.fixture
def hf_directory(tmp_path):
    """A directory with the config.json of the validated model of other flags."""

    def make(flags: str):
        args = validated(flags)
        config = families.for_args(args).hf_from_args(args)
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return make


def test_a_reference_of_another_architecture_is_refused(hf_directory):
    same = hf_directory("--max-position-embeddings 4096")
    reference_args(validated(f"--ref-load-hf {same}"))
    with pytest.raises(GrpoError, match=r"config.json says --num-layers 2, the policy has 4: give a reference model"):
        reference_args(validated(f"--ref-load-hf {hf_directory('--num-layers 2')}"))


def test_the_teachers_arguments(hf_directory):
    directory = hf_directory("--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2")
    args = validated(f"{MOE} --teacher-load-hf {directory} --teacher-kl-coef 1 --expert-model-parallel-size 4")
    (own,) = teacher_args(args)
    assert (own.model_family, own.num_experts, own.num_layers, own.hidden_size) == ("qwen3", None, 2, 32)
    assert (own.expert_model_parallel_size, own.tensor_model_parallel_size, own.temperature) == (1, 1, 1.0)
    assert (args.model_family, args.num_layers) == ("qwen3_moe", 4)
    flags = f"--teacher-load-hf {directory} --teacher-kl-coef 1"
    with pytest.raises(GrpoError, match=r"teacher with --teacher-.*--num-layers \(2\) must be divisible .* \(4\)"):
        teacher_args(validated(f"{flags} --teacher-pipeline-model-parallel-size 4"))
    with pytest.raises(GrpoError, match="has vocab_size 999, the policy has 1000: give a teacher with"):
        directory = hf_directory("--vocab-size 999")
        teacher_args(validated(flags))


def test_a_teacher_with_another_tokenizer_is_refused(tiny_models, tmp_path):
    tokenizer = HuggingFaceTokenizer(tiny_models["qwen3"])
    check_teacher_tokenizer(tiny_models["llama"], tokenizer)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(tiny_models["llama"], name), tmp_path)
    changed = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = changed["model"]["vocab"]
    one, other = list(vocabulary)[40:42]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    with pytest.raises(GrpoError, match=r"has another tokenizer than .*: give a teacher with the same token ids"):
        check_teacher_tokenizer(str(tmp_path), tokenizer)
    check_teacher_tokenizer(str(tmp_path / "none"), tokenizer)  # no tokenizer to compare with: the size has to do


def test_the_reference_has_hybrid_context_parallelism_where_it_has_context_parallelism():
    """A budget of 512 is enough for the policy's half of 1,024 tokens, and not for a reference without CP."""
    policy = "--context-parallel-size 2 --hybrid-context-parallel --max-tokens-per-microbatch"
    with_cp = f"{policy} 512 --ref-tensor-model-parallel-size 2"
    assert reference_args(validated(with_cp)).hybrid_context_parallel
    alone = "--ref-context-parallel-size 1"
    assert not reference_args(validated(f"{policy} 1024 {alone}")).hybrid_context_parallel
    with pytest.raises(GrpoError, match=r"reference model .*: .* 1024 tokens, padded .*\(512\) must be at least 1024"):
        reference_args(validated(f"{policy} 512 {alone}"))
