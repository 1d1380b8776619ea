"""Rules about flags: each refusal is one GrpoError with the flag and the numbers; what is accepted is filled in."""

import re

import pytest
from flag_conflicts import PARTIAL
from good_args import MODEL, MOE, RUN, validated, without
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import REPO

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from megatron_grpo.data.routing import check_source, reward_routes
from megatron_grpo.models import arguments as of_models
from megatron_grpo.rollout.arguments import not_measured, server_urls
from megatron_grpo.training.arguments import parse_args, print_args
from megatron_grpo.training.resolve import resolve_args
from megatron_grpo.utils.arguments import args_to_json, replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import arguments as of_families
from megatron_grpo.weights.arguments import ARCHITECTURE, resolve_architecture


def test_the_base_is_accepted_and_filled_in():
    args = validated("--tensor-model-parallel-size 2 --steps-per-generation 2 --num-iterations 2 --save out")
    assert (args.world_size, args.data_parallel_size) == (8, 4)
    assert (args.generation_batch_size, args.updates_per_rollout) == (128, 4)
    assert args.padded_vocab_size == 1024  # 1000 up to a multiple of 128 x 2
    assert args.vllm_max_model_len == 1024  # 512 + 512
    assert args.epsilon_high == 0.2 and args.reward_weights == [1.0] and args.save_hf == "out/hf_model"
    assert args_to_json(args)["padded_vocab_size"] == 1024


@pytest.mark.parametrize(
    ("flags", "bounds"),
    [
        ("--loss-type gspo", (3e-4, 4e-4)),  # arXiv:2507.18071, section 5.1
        ("--importance-sampling-level sequence_token", (3e-4, 4e-4)),
        ("--loss-type gspo --epsilon 0.01", (0.01, 0.01)),
        ("--loss-type gspo --epsilon-high 0.01", (3e-4, 0.01)),
        ("--loss-type gspo --epsilon 0.01 --epsilon-high 0.02", (0.01, 0.02)),
        ("--loss-type dapo --epsilon-high 0.28", (0.2, 0.28)),
    ],
)
def test_bounds_of_the_ratio(flags, bounds):
    args = validated(flags)
    assert (args.epsilon, args.epsilon_high) == bounds


def published_algorithms() -> str:
    """The table of docs/algorithms.md: algorithm, flags, recipe."""
    return (REPO / "docs/algorithms.md").read_text().split("| published algorithm |")[1].split("\n\n")[0]


def test_the_flags_of_every_recipe_are_accepted():
    recipes = re.findall(r'^    \[(\w+)\]="(.*?)"', (REPO / "examples/grpo/recipe.sh").read_text(), re.M | re.S)
    named = re.findall(r"^\| .* \| `(\w+)` \|$", published_algorithms(), re.M)
    assert len(recipes) >= 16 and sorted(named) == sorted(method for method, _ in recipes)
    for method, flags in recipes:
        assert validated(f"{flags} --steps-per-generation 4").updates_per_rollout == 4, method


def test_the_published_algorithms_of_the_docs_are_accepted():
    rows = re.findall(r"^\| ([^|]+?) \| `(--[^`]+)`", published_algorithms(), re.M)
    assert {name for name, _ in rows} >= {"Dr. GRPO", "DAPO", "GSPO", "CISPO", "RLOO", "REINFORCE++", "GDPO"}
    for name, flags in rows:
        functions = "--reward-funcs accuracy format" if name == "GDPO" else ""
        assert validated(f"{flags} {functions}").scale_rewards is not None, name


def test_derived_shapes_are_megatron_lms():
    args = validated("", base=without("--ffn-hidden-size").replace("--kv-channels 16", ""))
    assert args.kv_channels == 8  # 64 / 8
    assert args.ffn_hidden_size == 128  # 64 * 4 * 2 / 3 = 170.7, down to a multiple of 64
    assert validated("--load-hf model", base=without("--tokenizer-model")).tokenizer_model == "model"
    assert validated("--save out --no-save-hf").save_hf is None


MISSING = (
    "num_layers hidden_size num_attention_heads vocab_size max_position_embeddings model_family lr train_data_path "
    "tokenizer_model reward_funcs train_iters"
)


@pytest.mark.parametrize("dest", MISSING.split())
def test_what_is_missing_is_named(dest):
    flag = "--" + dest.replace("_", "-")
    with pytest.raises(GrpoError, match=f"^{flag} is missing: "):
        validated("", base=without(flag))


PP2 = "--pipeline-model-parallel-size 2"
SHARED = "--share-prompts --max-tokens-per-microbatch 4096"
HYBRID = "--context-parallel-size 2 --hybrid-context-parallel --max-tokens-per-microbatch 4096"
DELTA = """--model-family qwen3_5_text --apply-layernorm-1p --attention-output-gate --rotary-percent 0.25
 --experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 4
 --linear-num-value-heads 8 --linear-key-head-dim 16 --linear-value-head-dim 16"""
MAMBA = """--model-family nemotron_h --hybrid-layer-pattern M-M*-M --num-layers 6 --no-swiglu --squared-relu
 --position-embedding-type none --untie-embeddings-and-output-weights --no-qk-layernorm --mamba-num-heads 16
 --mamba-num-groups 4"""
MINIMAX = """--model-family minimax_m2 --num-experts 8 --moe-ffn-hidden-size 192 --qk-layernorm-across-heads
 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --untie-embeddings-and-output-weights"""
SINKS = """--model-family gpt_oss --num-experts 8 --moe-ffn-hidden-size 192 --add-bias-linear --add-qkv-bias
 --softmax-type learnable --quick-geglu --no-swiglu --glu-linear-offset 1 --activation-func-clamp-value 7
 --no-qk-layernorm --window-size 127,0 --window-attn-skip-freq 2 --untie-embeddings-and-output-weights --rope-scaling
 {"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":128,"beta_fast":32,"beta_slow":1}"""
GPT_OSS = f"{MOE} --add-bias-linear --quick-geglu --activation-func-clamp-value 7 --tensor-model-parallel-size 2"

SERVER = "--vllm-mode server --vllm-server-base-url"
SGLANG = "--rollout-engine sglang --sglang-server-base-url http://localhost:1"
SPARSE = f"{SERVER} http://localhost:1 --weight-sync-method sparse --dry-run"

NGRAM = '--vllm-speculative-config {"method":"ngram","num_speculative_tokens":2}'
EVALUATED = "--save out --save-interval 5 --eval-interval 10 --valid-data-path v"
ONLY = f"{EVALUATED} --eval-only --load-hf model"  # the command of a run, repeated
REFUSED = {
    "--model-family qwen3_vl": "--model-family qwen3_vl needs the vision tower of a config.json",
    "--recompute-granularity selective --recompute-modules layernorm": "--recompute-modules layernorm needs --trans",
    f"{GPT_OSS} --sequence-parallel": "experts with biases cannot be split over 2 tensor-parallel ranks",
    f"{GPT_OSS} --sequence-parallel --expert-tensor-parallel-size 1 --bias-activation-fusion": (
        "would clamp before the bias is added"
    ),
    f"{GPT_OSS} --sequence-parallel --expert-tensor-parallel-size 1 --transformer-impl transformer_engine --dry-run": (
        "experts with biases need --moe-grouped-gemm"
    ),
    "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4": "product of all model parallel sizes (16): TP 4",
    "--tensor-model-parallel-size 8 --num-attention-heads 12 --num-query-groups 4": (
        "--num-attention-heads (12) must be divisible by tensor parallel size (8)"
    ),
    "--num-attention-heads 12 --num-query-groups 3 --tensor-model-parallel-size 2": (
        "--num-query-groups (3) must be a multiple or a divisor of tensor parallel size (2)"
    ),
    "--num-query-groups 3": "--num-attention-heads (8) must be divisible by --num-query-groups (3)",
    "--ffn-hidden-size 190 --tensor-model-parallel-size 4": (
        "--ffn-hidden-size (190) must be divisible by tensor parallel size (4)"
    ),
    "--num-layers 6 --pipeline-model-parallel-size 4": (
        "--num-layers (6) must be divisible by pipeline parallel size (4)"
    ),
    "--sequence-parallel": "--sequence-parallel needs --tensor-model-parallel-size 2 or more",
    "--apply-rope-fusion": "--apply-rope-fusion needs --transformer-impl transformer_engine",
    "--attention-backend fused": (
        "--attention-backend is fused, but --transformer-impl local supports only auto, local, flash"
    ),
    "--attention-backend flash": "--attention-backend flash needs --bf16 or --fp16: its kernels take no float32",
    "--attention-backend flash --bf16": "--attention-backend flash needs a GPU of compute capability 9.0 (Hopper)",
    "--attention-backend flash --bf16 --attn-logit-softcapping 50": (
        "--attention-backend flash with --attn-logit-softcapping"
    ),
    "--transformer-impl transformer_engine": "transformer_engine needs a GPU, and this machine has none: give --transf",
    "--use-precision-aware-optimizer --bf16 --use-distributed-optimizer": (
        "--use-precision-aware-optimizer (Transformer Engine's Adam, with --transformer-impl local, too) needs a GPU"
    ),
    "--num-layers 0": "--num-layers (0) must be greater than 0",
    "--max-prompt-length 1500 --max-completion-length 600": (
        "--max-prompt-length (1500) + --max-completion-length (600) = 2100 must be at most --max-position-embeddings "
        "(2048)"
    ),
    "--seq-length 1000": "= 1024 must be at most --seq-length (1000)",
    "--vllm-max-model-len 1000": "= 1024 must be at most --vllm-max-model-len (1000)",
    "--vllm-max-model-len 4096": "--vllm-max-model-len (4096) must be at most --max-position-embeddings (2048)",
    "--max-tokens-per-microbatch 1000": "are 1024 tokens, padded for --context-parallel-size 1: --max-tokens-per-micro"
    "batch (1000) must be at least 1024",
    "--max-tokens-per-microbatch 1025 --max-prompt-length 513 --context-parallel-size 2": "are 1028 tokens, padded",
    "--max-tokens-per-microbatch 2040 --environment calculator --max-turns 8 --max-environment-tokens 1000 "
    "--on-rewritten-history split --context-parallel-size 2": (
        "in up to 8 samples are 2048 tokens, padded for --context-parallel-size 2"
    ),
    "--max-completion-length 0": "--max-completion-length (0) must be greater than 0",
    "--vllm-tensor-parallel-size 3": "world_size (8) must be divisible by --vllm-tensor-parallel-size (3)",
    "--vllm-tensor-parallel-size 8 --num-attention-heads 12 --num-query-groups 4": (
        "--num-attention-heads (12) must be divisible by --vllm-tensor-parallel-size (8)"
    ),
    "--vllm-mode server": "--vllm-server-base-url is missing: name the servers",
    "--vllm-server-base-url http://a:1": "--vllm-server-base-url needs --rollout-engine vllm --vllm-mode server",
    "--sglang-server-timeout 5": "--sglang-server-timeout needs --rollout-engine sglang",
    "--weight-sync-method checkpoint": "--weight-sync-method needs servers",
    "--rollout-engine sglang --vllm-mode server": "--vllm-mode and --rollout-engine sglang cannot both be given",
    f"{SERVER} a:1": "--vllm-server-base-url: a value is not a server's address: give http://HOST:PORT",
    f"{SERVER} http://me:secret@a:1": "--vllm-server-base-url must not contain a password",
    f"{SERVER} http://a:1 http://a:1/v1": "--vllm-server-base-url names a server twice",
    f"{SERVER} http://a:1 --vllm-server-timeout 0": "--vllm-server-timeout (0.0) must be greater than 0",
    f"{SERVER} http://a:1 --sleep-level 1": "--sleep-level is for an engine in the training processes",
    f"{PARTIAL} --router-replay-mode R3 {MOE}": "it needs the experts of one rollout",
    f"{SERVER} http://localhost:1 --weight-sync-method ipc": "--weight-sync-method ipc is for --rollout-engine sglang",
    f"{SGLANG} http://a:1 --weight-sync-method ipc": "--weight-sync-method ipc needs servers on rank 0's host",
    f"{SGLANG} --weight-sync-method ipc": "ipc needs a GPU, and this machine has none: give checkpoint",
    f"{SGLANG} --sleep-level 2": "--sleep-level needs a GPU",
    f"{SGLANG} --vllm-dtype float32": "--vllm-dtype is for an engine in the training processes",
    f"{SERVER} http://a:1 --weight-sync-method checkpoint": "--weight-sync-dir is missing: with servers on other hosts",
    "--rollout-engine megatron --vllm-max-num-seqs 64": (
        "--vllm-max-num-seqs is vLLM's, and --rollout-engine megatron runs without vLLM"
    ),
    "--rollout-engine megatron --offload-model": "--offload-model cannot be used with --rollout-engine megatron",
    "--rollout-engine megatron --sleep-level 1": "--sleep-level cannot be used with --rollout-engine megatron",
    "--rollout-engine megatron --inference-max-requests 0": "--inference-max-requests (0) must be greater than 0",
    "--inference-max-requests 64": "--inference-max-requests needs --rollout-engine megatron",
    "--vllm-gpu-memory-utilization 1.5": "--vllm-gpu-memory-utilization (1.5) must be greater than 0 and at most 1",
    "--temperature 0": "--temperature (0.0) must lie between 0.01 and 2",
    "--top-p 1.1": "--top-p (1.1) must be greater than 0 and at most 1",
    "--top-k 0": "--top-k (0) must be at least 1, or -1",
    "--min-p -0.1": "--min-p (-0.1) must lie between 0 and 1",
    "--temperature 0.005": "--temperature (0.005) must lie between 0.01 and 2",
    "--repetition-penalty 0": "--repetition-penalty (0.0) must be greater than 0",
    "--presence-penalty 3": "--presence-penalty (3.0) must lie between -2 and 2",
    "--frequency-penalty -3": "--frequency-penalty (-3.0) must lie between -2 and 2",
    "--top-p 0.9 --frequency-penalty 1 --temperature 0.7 --mismatch-sample-rate 0.1": (
        "--top-p 0.9, --frequency-penalty 1.0 with --rollout-engine vllm --temperature 0.7: the engine's "
        "log-probabilities would include them, and could not be compared with the trainer's: give --temperature 1, or "
        "leave out --mismatch-sample-rate"
    ),
    f"{SGLANG} --presence-penalty 1 --mismatch-sample-rate 1": (
        "--presence-penalty 1.0 with --rollout-engine sglang --temperature 1.0: the engine's log-probabilities would "
        "include them, and could not be compared with the trainer's: leave out the penalties, or leave out --mismatch"
    ),
    "--rollout-engine megatron --presence-penalty 1 --m2po-threshold 0.04": (
        "leave out the penalties, or leave out --m2po-threshold"
    ),
    "--top-k 5 --temperature 0.7 --no-top-k-replay --rollout-importance-sampling-mode icepop": (
        "give --temperature 1, or --top-k within vLLM's max_logprobs (20), or leave out "
        "--rollout-importance-sampling-mode"
    ),
    "--no-top-k-replay --top-p 0.9": "--no-top-k-replay needs --rollout-engine vllm and --top-k",
    f"{SGLANG} --no-top-k-replay --top-k 5": "--no-top-k-replay needs --rollout-engine vllm and --top-k",
    "--top-k 5 --teacher-server http://a:1 --teacher-kl-coef 1": (
        "--teacher-server with --top-k 5: the server returns log-probabilities over the whole vocabulary"
    ),
    "--rollout-importance-sampling-threshold 2": (
        "--rollout-importance-sampling-threshold needs --rollout-importance-sampling-mode"
    ),
    "--rollout-importance-sampling-mode token_mask --rollout-importance-sampling-threshold 0": (
        "--rollout-importance-sampling-threshold (0.0) must be greater than 0"
    ),
    "--rollout-importance-sampling-mode token_mask --rollout-importance-sampling-lower-bound 0.5": (
        "--rollout-importance-sampling-lower-bound needs --rollout-importance-sampling-mode icepop"
    ),
    "--rollout-importance-sampling-mode icepop --rollout-importance-sampling-lower-bound 6": (
        "--rollout-importance-sampling-lower-bound (6.0) must lie between 0 and 5"
    ),
    "--mismatch-sample-rate 2": "--mismatch-sample-rate (2.0) must lie between 0 and 1",
    "--stop-words END --tokenizer-type SentencePieceTokenizer": "--stop-words needs a HuggingFaceTokenizer",
    "--reward-funcs a b --reward-weights 1": "--reward-weights has 1 values, --reward-funcs 2",
    "--reward-funcs a a": "--reward-funcs a a: name each function once; its weight is in --reward-weights",
    "--reward-timeout 0": "--reward-timeout (0.0) must be greater than 0",
    "--reward-retries -1": "--reward-retries (-1) must lie between 0 and 1000",
    "--reward-clip 0": "--reward-clip (0.0) must be greater than 0",
    "--repetition-n-grams 2": "--repetition-n-grams has no effect without --reward-funcs repetition: leave it out",
    "--dynamic-sample-reward a": "--dynamic-sample-reward needs --dynamic-sample: it says which rewards of a group",
    "--dynamic-sample --dynamic-sample-reward x": '--dynamic-sample-reward has "x", which is not among --reward-funcs',
    "--reward-funcs format --answer-extraction line": "no effect without --reward-funcs accuracy or cosine or ",
    "--reward-funcs format --unfinished-thinking read": "--unfinished-thinking has no effect without --reward-funcs ",
    "--code-sandbox strict": "--code-sandbox has no effect without --reward-funcs code",
    "--reward-funcs soft_overlong": "soft_overlong needs --soft-cache-length: the length of the penalty range",
    "--reward-funcs soft_overlong --soft-cache-length 600 --max-completion-length 500": "(600) must be at most",
    "--reward-funcs code --code-timeout 10": "--code-timeout (10) must be less than --reward-timeout (10)",
    "--reward-routing gsm8k": "--reward-routing gsm8k: expected SOURCE=NAME,NAME, each source once",
    "--reward-routing x=exact_match x=exact_match": "expected SOURCE=NAME,NAME, each source once",
    "--reward-routing x=format": "is not among --reward-funcs",
    "--reward-funcs a b --reward-routing x=a y=a": "--reward-routing sends no source to b: leave it out of",
    "--epsilon 1.5": "--epsilon (1.5) must be greater than 0 and at most 1",
    "--epsilon-high 0": "--epsilon-high (0.0) must be greater than 0",
    "--loss-type cispo": "--loss-type cispo bounds the ratio itself by --epsilon-high",
    "--loss-type cispo --epsilon-high 0.2": "must be at least 1: give --epsilon-high 5",
    "--loss-type cispo --epsilon-high 5 --epsilon 0.2": "--epsilon has no effect with --loss-type cispo",
    "--loss-type gspo --epsilon 0.2": "--epsilon 0.2 never clips the ratio of a sequence",
    "--loss-type gspo --importance-sampling-level token --epsilon 3e-4": "not token: leave one of them out",
    "--importance-sampling-level sequence --epsilon 0.2": "leave it out (3e-4, and 4e-4 as --epsilon-high)",
    "--loss-type gmpo --importance-sampling-level sequence": "has no effect with --loss-type gmpo",
    "--loss-type sapo --epsilon-high 0.3": "--epsilon-high has no effect with --loss-type sapo",
    **{
        f"--loss-type dpo --beta 0.1 {words}": f"{words.split()[0]} and --loss-type dpo cannot both be given"
        for words in (
            "--rollout-importance-sampling-mode token_truncate",
            "--top-entropy-quantile 0.2",
            "--clip-cov-ratio 1e-3",
            "--kl-cov-ratio 1e-3",
            "--off-policy-sequence-mask-delta 0.1",
            "--kl-in-reward",
        )
    },
    "--train-only l --dynamic-sample": "--train-only and --dynamic-sample cannot both be given",
    "--train-only l --reward-clip 1": "--train-only and --reward-clip cannot both be given",
    "--loss-type reinforce --dual-clip 4": "--dual-clip has no effect with --loss-type reinforce",
    "--tau-pos 2": "--tau-pos has no effect with --loss-type grpo",
    "--dual-clip 1.2": "--dual-clip (1.2) must be greater than 1 + --epsilon-high (1.2)",
    "--entropy-coef -1": "--entropy-coef (-1.0) must lie between 0 and 1e+09",
    "--top-entropy-quantile 1.5": "--top-entropy-quantile (1.5) must be greater than 0 and at most 1",
    "--clip-cov-lb 2": "--clip-cov-lb needs --clip-cov-ratio",
    "--clip-cov-ratio 1e-3 --clip-cov-lb 9": "--clip-cov-lb (9.0) must be less than --clip-cov-ub (5.0)",
    "--kl-cov-ratio 1e-3": "--kl-cov-ratio penalises the change of the policy since the rollout, which is zero",
    "--kl-cov-coef 2": "--kl-cov-coef needs --kl-cov-ratio",
    "--m2po-threshold 0.04 --top-p 0.9 --temperature 0.7": "leave out --m2po-threshold",
    "--beta -1": "--beta (-1.0) must lie between 0 and 1e+09",
    "--beta 0 --ref-load ref": "--ref-load needs --beta",
    "--num-epochs 2": "--train-iters and --num-epochs cannot both be given",
    "--train-iters 21 --num-iterations 2": (
        "--train-iters (21) must be divisible by the updates per rollout (2 = --steps-per-generation 1 x "
        "--num-iterations 2)"
    ),
    "--save out --save-interval 3 --steps-per-generation 2": "--save-interval (3) must be divisible by the updates",
    "--valid-data-path v --eval-interval 5 --num-iterations 2": "--eval-interval (5) must be divisible by the updates",
    "--exit-interval 7 --num-iterations 4": "--exit-interval (7) must be divisible by the updates per rollout (4",
    "--save-interval 4": "--save-interval needs --save: there is no directory",
    "--num-completions-to-log 3": "--num-completions-to-log needs --save",
    "--eval-interval 4": "--eval-interval needs --valid-data-path",
    "--val-before-train": "--val-before-train needs --valid-data-path",
    "--valid-data-path v.jsonl": "--valid-data-path needs --eval-interval or --val-before-train",
    "--eval-completions-to-log 3 --valid-data-path v --eval-interval 2": "--eval-completions-to-log needs --save",
    "--eval-correct-reward 0.5": "--eval-correct-reward needs --valid-data-path",
    "--eval-only": "--eval-only needs --valid-data-path",
    "--eval-only --valid-data-path v": "--eval-only needs --load, --load-hf or --pretrained-checkpoint",
    "--valid-data-path a/v.jsonl b/a/v.jsonl --eval-interval 2": '2 files with the name "a_v" in metrics',
    "--keep-best eval/greedy_accuracy": "--keep-best needs --save",
    "--keep-best eval/greedy_accuracy --save out": "--keep-best needs --save-interval",
    "--keep-best eval/greedy_accuracy --save out --save-interval 5": "--keep-best needs --eval-interval",
    f"{EVALUATED} --keep-best reward/mean": "of this run have eval/greedy_accuracy, eval/greedy_reward",
    f"{EVALUATED} --keep-best eval/greedy_length": "of this run have eval/greedy_accuracy, eval/greedy_reward",
    f"{EVALUATED} --keep-best eval/pass_at_2": "of this run have eval/greedy_accuracy, eval/greedy_reward",
    f"{EVALUATED} --keep-best eval/v/greedy_accuracy": "of this run have eval/greedy_accuracy, eval/greedy_reward",
    f"{EVALUATED} --keep-best eval/greedy_accuracy --save-interval 4": (
        "needs a checkpoint at each evaluation: --eval-interval (10) must be divisible by --save-interval (4)"
    ),
    "--bf16 --fp16": "--bf16 and --fp16 cannot both be given",
    "--min-lr 1e-3": "--min-lr (0.001) must lie between 0 and --lr (1e-06)",
    "--lr 0": "--lr (0.0) must be greater than 0",
    "--lr-warmup-iters 20": "--lr-warmup-iters (20) must be at least 0 and less than the updates in all (20)",
    "--lr-warmup-fraction 1": "--lr-warmup-fraction (1.0) must be at least 0 and less than 1",
    "--lr-warmup-iters 2 --lr-warmup-fraction 0.1": "--lr-warmup-iters and --lr-warmup-fraction cannot both be given",
    "--optimizer sgd --use-distributed-optimizer": "--use-distributed-optimizer needs --optimizer adam",
    "--overlap-param-gather": "--overlap-param-gather needs --use-distributed-optimizer",
    "--load-hf a --pretrained-checkpoint b": "--load-hf and --pretrained-checkpoint cannot both be given",
    "--finetune": "--finetune needs --load",
    "--no-load-optim": "--no-load-optim needs --load",
    "--use-checkpoint-args": "--use-checkpoint-args needs --load or --pretrained-checkpoint",
    "--wandb-exp-name run": "--wandb-exp-name needs --wandb-project",
    "--cp-comm-type p2p": "--cp-comm-type needs --context-parallel-size 2 or more",
    "--cp-comm-type p2p --context-parallel-size 2": "with --transformer-impl local only all_gather exists",
    "--context-parallel-size 2 --hierarchical-context-parallel-sizes 2": "Transformer Engine refuses packed batches",
    "--linear-num-key-heads 8": "--linear-num-key-heads has no effect without --experimental-attention-variant gated",
    f"{DELTA} --linear-attention-freq [1,1,0]": "with --linear-attention-freq [1, 1, 0]: give n for attention in every",
    f"{DELTA} --mtp-num-layers 2": "has one such layer: give 1",
    f"{DELTA} {PP2} --mtp-num-layers 1": "does not work with a head that is tied to the embedding",
    f"{DELTA} --linear-attention-freq 0": "with --linear-attention-freq 0: give n for attention in every n-th layer",
    f"{DELTA} --linear-num-value-heads 6": "--linear-num-value-heads (6) must be divisible by --linear-num-key",
    f"{DELTA} --linear-num-key-heads 2 --context-parallel-size 2 --tensor-model-parallel-size 2": (
        "--linear-num-key-heads (2) must be divisible by TP x CP (2 x 2) (4)"
    ),
    f"{DELTA} --bf16 --lora-rank 2 --lora-modules-to-save A_log": (
        "--lora-modules-to-save A_log in 16 bits needs --use-distributed-optimizer: A_log is float32"
    ),
    f"{DELTA} --bf16": "gated_delta_net in 16 bits needs --use-distributed-optimizer: A_log is float32",
    "--mamba-num-heads 8": "--mamba-num-heads has no effect without --hybrid-layer-pattern",
    f"{MAMBA} --hybrid-layer-pattern M-M": "--hybrid-layer-pattern is 'M-M': give M (Mamba-2), * (attention)",
    f"{MAMBA} --hybrid-layer-pattern M-M*-X": "--hybrid-layer-pattern is 'M-M*-X': give M (Mamba-2), * (attention)",
    f"{MAMBA} --hybrid-layer-pattern M-M*-E": "give --num-experts and --moe-layer-freq [0, 0, 0, 0, 0, 1] for its E",
    f"{MAMBA} --mamba-num-groups 3": "--mamba-num-heads (16) must be divisible by --mamba-num-groups (3)",
    f"{MAMBA} --mamba-num-groups 2 --context-parallel-size 2 --tensor-model-parallel-size 2": (
        "--mamba-num-groups (2) must be divisible by TP x CP (2 x 2) (4)"
    ),
    f"{MAMBA} --mtp-num-layers 1": "--hybrid-layer-pattern with --experimental-attention-variant, --multi-latent",
    f"{MAMBA} --bf16": "--hybrid-layer-pattern in 16 bits needs --use-distributed-optimizer: A_log is float32",
    f"{MAMBA} --transformer-impl transformer_engine --dry-run": "--hybrid-layer-pattern needs --transformer-impl local",
    MAMBA.replace("--squared-relu", "--geglu"): "model family nemotron_h has squared_relu = True",
    f"{DELTA} --transformer-impl transformer_engine --dry-run": "gated_delta_net needs --transformer-impl local",
    DELTA.replace("qwen3_5_text", "qwen3").replace(
        "--rotary-percent 0.25", ""
    ): "model family qwen3 has apply_layernorm_1p = False",
    DELTA.replace("--attention-output-gate", ""): "model family qwen3_5_text has attention_output_gate = True",
    "--share-prompts": "--share-prompts needs --max-tokens-per-microbatch",
    f"{SHARED} --transformer-impl transformer_engine --dry-run": "--share-prompts needs --transformer-impl local",
    f"{SHARED} --cuda-graphs --dry-run": "--share-prompts needs --no-cuda-graphs: packs with shared",
    "--hybrid-context-parallel --max-tokens-per-microbatch 4096": "--context-parallel-size (1) must be 2, 4, 8",
    "--hybrid-context-parallel --context-parallel-size 2": "needs --max-tokens-per-microbatch, the token budget of a",
    f"{HYBRID} --transformer-impl transformer_engine --dry-run": "--hybrid-context-parallel needs --transformer-impl",
    HYBRID.replace("4096", "300"): (
        "are 512 tokens, padded for --context-parallel-size 2 and divided by it: --max-tokens-per-microbatch (300) must"
    ),
    "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --recompute-granularity full": (
        "for packs without their gradients: give --recompute-method block"
    ),
    "--num-virtual-stages-per-pipeline-rank 2": "needs --pipeline-model-parallel-size 2 or more",
    "--decoder-first-pipeline-num-layers 1": "needs --pipeline-model-parallel-size 2 or more",
    f"{PP2} --num-virtual-stages-per-pipeline-rank 4": "divisible by pipeline parallel size x virtual stages (8)",
    f"{PP2} --num-layers-per-virtual-pipeline-stage 3": "must be divisible by --pipeline-model-parallel-size (2) x",
    f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 2": "cannot both be given",
    f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication": "would give wrong gradients",
    f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 24 --micro-batch-size 2": (
        "an update has 3 micro-batches on each data-parallel rank"
    ),
    f"{PP2} --overlap-p2p-comm": "only the interleaved schedule uses it",
    "--expert-model-parallel-size 2": "--expert-model-parallel-size needs --num-experts",
    "--moe-router-topk 4": "--moe-router-topk needs --num-experts",
    "--router-replay-mode R2": "--router-replay-mode needs --num-experts",
    "--num-experts 8": "model family qwen3 has num_experts = None, but the arguments say 8",
    f"{MOE} --expert-model-parallel-size 3": "--num-experts (8) must be divisible by expert parallel size (3)",
    f"{MOE} --moe-ffn-hidden-size 90 --expert-tensor-parallel-size 4": "--moe-ffn-hidden-size (90) must be divisible",
    f"{MOE} --expert-model-parallel-size 8 {PP2}": "world_size (8) must be divisible by EP 8 x ETP 1 x PP 2 = 16",
    f"{MOE} --vllm-enable-expert-parallel": "--vllm-enable-expert-parallel needs a GPU",
    f'{MOE} --vllm-engine-kwargs {{"enable_expert_parallel":true}}': "--vllm-enable-expert-parallel needs a GPU",
    f"{MINIMAX} --tensor-model-parallel-size 8 --sequence-parallel": "8 and 4 key/value heads: ranks that share a head",
    f"{MINIMAX} {SERVER} http://localhost:1": "a server's reload of the weights fails at its norms",
    f"{MAMBA} {SPARSE}": "--weight-sync-method sparse with --model-family nemotron_h: its tensors are not those of",
    f"{DELTA} {SPARSE}": "--weight-sync-method sparse with --model-family qwen3_5_text",
    f"{MOE} {SPARSE}": "--weight-sync-method sparse with --model-family qwen3_moe",
    f"{SINKS} {SERVER} http://localhost:1": "reload of the weights loses the sinks",
    f"{SINKS} {SERVER} http://localhost:1 --dry-run --weight-sync-method nccl": "reload of the weights loses the sinks",
    f"{MINIMAX} --no-qk-layernorm": "--qk-layernorm-across-heads needs --qk-layernorm",
    "--qk-layernorm-across-heads": "model family qwen3 has qk_layernorm_across_heads = False",
    f"{MOE} --moe-router-topk 9": "--moe-router-topk (9) must be at most --num-experts (8)",
    f"{MOE} --tensor-model-parallel-size 2": "needs --sequence-parallel: each rank routes its own shard",
    f"{MOE} --moe-router-load-balancing-type sinkhorn": "--moe-router-load-balancing-type sinkhorn: choose from none",
    f"{MOE} --moe-expert-capacity-factor 1.5": "it drops tokens; the engine does not",
    f"{MOE} --moe-router-fusion": "--moe-router-fusion needs --transformer-impl transformer_engine",
    "--fp8-format hybrid": "--fp8-format hybrid needs --transformer-impl transformer_engine",
    "--attention-dropout 0.1": "--attention-dropout is 0.1: the engine has no dropout",
    "--normalization LayerNorm": "give --normalization RMSNorm",
    "--window-size 128,0 --model-family llama --no-qk-layernorm": (
        "model family llama has window_size = None, but the arguments say [128, 0]"
    ),
    "--window-size 128,0 --window-attn-skip-freq 2": "qwen3 has window_attn_skip_freq = None, but the arguments say 2",
    "--sandwich-norm": "model family qwen3 has sandwich_norm = False, but the arguments say",
    "--rollout-engine megatron --check-weight-sync": "--check-weight-sync needs an engine with weights of its own",
    "--rollout-engine megatron --rollout-balancing dynamic": "--rollout-balancing dynamic is for colocated vLLM",
    "--attn-logit-softcapping 0": "--attn-logit-softcapping (0.0) must be greater than 0",
    "--transformer-impl transformer_engine --dry-run --context-parallel-size 2 --window-size 8,0": (
        "--context-parallel-size 2 with --window-size needs --cp-comm-type a2a"
    ),
    '--vllm-engine-kwargs {"kv_offloading_size":4}': "kv_offloading_size would keep keys and values of earlier weights",
    '--vllm-engine-kwargs {"speculative_config":{}}': "speculative_config is set by this program",
    '--vllm-speculative-config {"num_speculative_tokens":2}': "method is None: give one of ngram, suffix, draft_model",
    '--vllm-speculative-config {"method":"eagle"}': "method is 'eagle': give one of ngram",
    f'{NGRAM[:-1]},"rejection_sample_method":"synthetic"}}': "rejection_sample_method is 'synthetic': leave it out",
    f"{NGRAM} --min-p 0.1": "--min-p and --vllm-speculative-config cannot both be given",
    f"{NGRAM} --stop-words x --tokenizer-type HuggingFaceTokenizer": "--stop-words and --vllm-speculative-config",
    f"{NGRAM} --structured-outputs-regex x": "cannot be used with --vllm-speculative-config: constraints on drafts",
    f"{NGRAM} --rollout-engine megatron": "--vllm-speculative-config is vLLM's",
    f"{NGRAM} --vllm-mode server --vllm-server-base-url http://a:1": "--vllm-speculative-config is for an engine",
    NGRAM.replace("ngram", "draft_model"): "model is None: give the local directory of the draft model",
    NGRAM.replace("ngram", "mtp"): "method is mtp, but the model has no multi-token-prediction layers",
    f'{NGRAM.replace("ngram", "mtp")[:-1]},"draft_load_config":{{}}}}': "draft_load_config is not known to work with",
    f'{NGRAM.replace("ngram", "mtp")[:-1]},"model":"x"}}': "method mtp drafts with layers of the policy: leave model",
    f"{NGRAM.replace('ngram', 'mtp')} --dry-run --sleep-level 2": "vLLM would drop the buffers of these",
    "--moe-layer-recompute": "--moe-layer-recompute needs --num-experts",
    "--moe-token-dispatcher-type allgather": "--moe-token-dispatcher-type needs --num-experts",
    "--moe-aux-loss-coeff 1": "--moe-aux-loss-coeff needs --num-experts: the model has no experts",
    "--recompute-method block": "--recompute-method has no effect without --recompute-granularity full: add that, or",
    "--recompute-granularity full --recompute-modules mlp": "--recompute-modules has no effect without --recompute",
    "--recompute-granularity selective --recompute-num-layers 1": "--recompute-num-layers has no effect without --re",
    "--overlap-cpu-optimizer-d2h-h2d": "--overlap-cpu-optimizer-d2h-h2d has no effect without --optimizer-cpu-offload",
    "--optimizer-offload-fraction 0.5": "--optimizer-offload-fraction has no effect without --optimizer-cpu-offload",
    "--no-pin-cpu-grads": "--no-pin-cpu-grads has no effect without --optimizer-cpu-offload",
    "--cpu-offloading-num-layers 2": "--cpu-offloading-num-layers has no effect without --cpu-offloading",
    "--offload-modules core_attn": "--offload-modules has no effect without --fine-grained-activation-offloading",
    "--fine-grained-offloading-max-inflight-offloads 2": "has no effect without --fine-grained-activation-offloading",
    "--offload-modules fused_group_mlp": "--offload-modules fused_group_mlp: the program does not use Transformer",
    "--recompute-granularity selective --recompute-modules gdn_norm_out": "gdn_norm_out: only megatron-core's own",
    "--bf16 --hysteresis 1": "--hysteresis has no effect without --fp16: add that, or leave it out",
    "--optimizer sgd --adam-beta1 0.8": "--adam-beta1 has no effect without --optimizer adam",
    f"{PP2} --decoder-first-pipeline-num-layers 2 --account-for-loss-in-pipeline-split": "cannot both be given: each",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_refusals_name_the_flag_and_the_numbers(flags):
    with pytest.raises(GrpoError) as error:
        validated(flags)
    assert REFUSED[flags] in str(error.value)


def test_the_budget_of_a_rank_takes_its_share_of_the_longest_sequence():
    assert validated(HYBRID.replace("4096", "512")).hybrid_context_parallel  # 512 + 512 tokens over two ranks


def test_query_groups_and_group_query_attention_go_together():
    with pytest.raises(GrpoError, match="--num-query-groups needs --group-query-attention"):
        validated("", base=without("--group-query-attention"))
    with pytest.raises(GrpoError, match="--group-query-attention needs --num-query-groups"):
        validated("", base=without("--num-query-groups"))


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --bf16",
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "--max-tokens-per-microbatch 4096 --vllm-tensor-parallel-size 2",
        "--top-p 0.9 --repetition-penalty 1.1",
        "--top-p 0.9 --temperature 0.7 --mismatch-sample-rate 0",
        "--top-p 0.95 --temperature 0.6",
        "--top-k 20 --top-p 0.95 --temperature 0.6 --rollout-importance-sampling-mode icepop",
        "--top-k 5 --no-top-k-replay --teacher-server http://a:1 --teacher-kl-coef 1",
        f"{SGLANG} --top-p 0.9 --temperature 0.7",
        f"{SGLANG} --presence-penalty 1 --mismatch-sample-rate 0",
        "--rollout-engine megatron --top-p 0.9 --temperature 0.7 --m2po-threshold 0.04",
        "--temperature 0.7 --rollout-importance-sampling-mode token_mask --mismatch-sample-rate 0",
        "--valid-data-path v.jsonl --eval-interval 5 --val-before-train --eval-num-generations 4",
        f"{EVALUATED} --keep-best eval/greedy_accuracy",
        f"{EVALUATED} --eval-num-generations 4 --keep-best eval/pass_at_4",
        f"{EVALUATED} w.jsonl --keep-best eval/w/greedy_reward",
        f"{EVALUATED} b=w.jsonl --keep-best eval/b/greedy_reward --async-save --max-checkpoints-to-keep 1",
        "--valid-data-path v.jsonl --eval-only --load-hf model",
        "--valid-data-path v.jsonl --eval-only --load-hf model --profile --use-pytorch-profiler",
        f"{ONLY} --kl-cov-ratio 0.0002 --kl-cov-coef 0.1 --generation-batch-size 128 --save-interval 2",
        f"{ONLY} --kl-cov-ratio 0.0002 --num-iterations 5",
        f"{ONLY} --kl-cov-ratio 0.0002 --generation-batch-size 320 --steps-per-generation 5",
        f"{ONLY} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --micro-batch-size 2",
        f"{ONLY} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --micro-batch-size 16",
        f"{EVALUATED} --keep-best eval/greedy_reward --eval-only --load-hf model --async-save --overlap-grad-reduce",
        "--tensor-model-parallel-size 8",  # twice as many ranks as key/value heads
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--bias-activation-fusion --bias-dropout-fusion",
    ],
)
def test_what_works_is_accepted(flags):
    validated(flags)


@pytest.mark.parametrize(
    ("flags", "included"),
    [
        ("", None),
        ("--top-p 0.95", None),
        ("--top-k 20 --top-p 0.95 --temperature 0.6", None),
        ("--top-p 0.95 --temperature 0.6 --mismatch-sample-rate 0", None),
        ("--top-p 0.95 --temperature 0.6", "--top-p 0.95,"),
        ("--top-k 50 --top-p 0.95 --temperature 0.6", "--top-p 0.95, --top-k 50,"),
        ("--top-k 5 --temperature 0.6 --no-top-k-replay", "--top-k 5,"),
        (f"{SGLANG} --presence-penalty 1 --top-p 0.9", "--presence-penalty 1.0,"),
    ],
)
def test_a_run_whose_mismatch_cannot_be_measured_says_so_and_starts(flags, included):
    args = validated(flags)
    line = not_measured(args)
    if included is None:
        assert line is None and args.mismatch_sample_rate == (0 if "rate 0" in flags else 1)
    else:
        assert args.mismatch_sample_rate == 0 and "\n" not in line
        assert line.startswith(f"mismatch is not measured: the engine's log-probabilities would include {included} and")


@pytest.mark.parametrize(
    ("mode", "bounds"), [("token_mask", (2.0, None)), ("sequence_truncate", (2.0, None)), ("icepop", (5.0, 0.5))]
)
def test_bounds_of_the_correction(mode, bounds):
    args = validated(f"--rollout-importance-sampling-mode {mode}")
    assert (args.rollout_importance_sampling_threshold, args.rollout_importance_sampling_lower_bound) == bounds


def test_a_dry_run_needs_only_the_model():
    validated("--dry-run", base=MODEL)
    validated("--dry-run --transformer-impl transformer_engine --apply-rope-fusion", base=MODEL)
    with pytest.raises(GrpoError, match="--num-layers is missing"):
        validated("--dry-run", base=without("--num-layers"))


def test_rules_and_architecture_name_real_arguments():
    args = parse_args([])
    names = [dest for dests, _, _ in of_models.ONLY + of_families.ONLY for dest in dests.split()] + ARCHITECTURE
    assert [name for name in names if not hasattr(args, name)] == []


def test_the_default_architecture_is_the_parsers():
    args = parse_args([])
    assert of_families.default_architecture() == {dest: getattr(args, dest) for dest in ARCHITECTURE}


def test_architecture_comes_from_the_source_and_given_flags_must_agree():
    source = {"num_layers": 28, "norm_epsilon": 1e-6, "swiglu": True, "kv_channels": None, "lr": 5.0}
    args = parse_args(["--norm-epsilon", "0.000001"])
    args = replaced(args, **resolve_architecture(args, source, "model/config.json"))
    assert (args.num_layers, args.swiglu, args.kv_channels) == (28, True, None)
    assert args.lr is None  # not the model's shape

    rounded = {"norm_epsilon": 9.999999974752427e-07}  # 1e-6 in 32 bits, as some converters write it
    args = parse_args(["--norm-epsilon", "1e-6"])
    assert resolve_architecture(args, rounded, "model/config.json") == rounded
    args = parse_args(["--norm-epsilon", "1.1e-6"])
    with pytest.raises(GrpoError, match=r"--norm-epsilon is 1\.1e-06, but model/config.json says"):
        resolve_architecture(args, rounded, "model/config.json")

    args = parse_args(["--num-layers", "24"])
    with pytest.raises(GrpoError) as error:
        resolve_architecture(args, source, "model/config.json")
    assert str(error.value).startswith("--num-layers is 24, but model/config.json says 28: leave the flag out")


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--max-tokens-per-microbatch 4096", None),
        ("", "--share-prompts needs --max-tokens-per-microbatch"),
        ("--max-tokens-per-microbatch 4096 --cuda-graphs --dry-run", "--share-prompts needs --no-cuda-graphs"),
        (
            "--max-tokens-per-microbatch 4096 --transformer-impl transformer_engine --dry-run",
            "--share-prompts needs --transformer-impl local",
        ),
    ],
)
def test_prompts_are_shared_where_nothing_excludes_it(flags, note):
    args = validated(flags)
    assert args.share_prompts == (note is None)
    assert of_models.share_note(args) is None if note is None else note in of_models.share_note(args)
    given = validated(f"{flags} --no-share-prompts")
    assert not given.share_prompts and of_models.share_note(given) is None
    assert of_models.share_note(replaced(args, eval_only=True)) is None  # it computes no micro-batches


@pytest.mark.parametrize(
    ("flags", "keeps"), [("", True), (DELTA, False), (MAMBA, False), (f"{MOE} --router-replay-mode R3", False)]
)
def test_engines_keep_prefixes_except_of_states_and_experts(flags, keeps):
    args = validated(flags)
    assert args.vllm_enable_prefix_caching == keeps
    assert validated(f"{flags} --vllm-enable-prefix-caching").vllm_enable_prefix_caching
    assert not validated(f"{flags} --no-vllm-enable-prefix-caching").vllm_enable_prefix_caching


def test_a_default_is_no_contradiction():
    args = parse_args([])
    args = replaced(
        args,
        **resolve_architecture(
            args, {"rotary_base": 1000000, "untie_embeddings_and_output_weights": True}, "the checkpoint c"
        ),
    )
    assert args.rotary_base == 1000000 and args.untie_embeddings_and_output_weights
    with pytest.raises(GrpoError, match="--rotary-base is 10000, but the checkpoint c says 1000000"):
        resolve_architecture(parse_args(["--rotary-base", "10000"]), {"rotary_base": 1000000}, "the checkpoint c")


number = st.one_of(st.integers(-2, 40), st.integers(0, 4096))
NUMBERS = (
    "tensor-model-parallel-size pipeline-model-parallel-size vllm-tensor-parallel-size num-layers hidden-size "
    "num-attention-heads num-query-groups kv-channels ffn-hidden-size vocab-size max-position-embeddings seq-length "
    "max-prompt-length max-completion-length max-tokens-per-microbatch micro-batch-size global-batch-size "
    "num-generations steps-per-generation generation-batch-size num-iterations train-iters save-interval "
    "lr-warmup-iters lr top-k top-p temperature epsilon min-lr reward-workers recompute-num-layers"
).split()


@given(st.dictionaries(st.sampled_from(NUMBERS), number, max_size=6), st.integers(1, 32))
@settings(max_examples=3 * settings.default.max_examples, deadline=None)
def test_any_numbers_are_accepted_or_refused_with_a_grpo_error(values, world_size):
    words = [f"--{name}={value}" for name, value in values.items()]
    try:
        args = parse_args((MODEL + RUN).split() + words)
        args = resolve_args(args, world_size)
    except GrpoError as error:
        assert "\n" not in str(error)
    else:
        assert args.train_iters % args.updates_per_rollout == 0


def test_servers_are_accepted_and_filled_in():
    args = validated(f"{SERVER} http://127.0.0.1:1 http://localhost:2/v1/ --weight-sync-method checkpoint")
    assert args.weight_sync_dir == "/dev/shm"
    assert server_urls(args) == ["http://127.0.0.1:1", "http://localhost:2/v1/"]
    assert server_urls(validated("")) == []


def test_keys_are_neither_printed_nor_saved(capsys):
    args = validated(f"{SERVER} http://localhost:1 --vllm-server-api-key secret-of-mine")
    print_args(args, everything=True)
    assert "secret-of-mine" not in capsys.readouterr().out + str(args_to_json(args))


def test_rows_without_a_route_are_refused():
    routes = reward_routes(["math=accuracy,format", "code=code"], ["accuracy", "format", "code"])
    assert routes == {"math": ["accuracy", "format"], "code": ["code"]}
    check_source("--reward-routing", routes, {"data_source": "code"})
    check_source("--reward-routing", {}, {})
    with pytest.raises(GrpoError, match=r"--reward-routing has no .* 'maths', only math, code"):
        check_source("--reward-routing", routes, {"data_source": "maths"})
    with pytest.raises(GrpoError, match=r'--reward-routing has no "data_source" None'):
        check_source("--reward-routing", routes, {})
