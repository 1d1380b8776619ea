"""Flags: every field of megatron-core's dataclasses is accounted for and arrives, and mistakes get one clear line."""

import dataclasses
import enum
import importlib.util
import json
import types
import typing
from typing import Literal

import pytest
import torch

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from good_args import MOE, validated
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig
from ranks import REPO

from megatron_grpo.models.config import transformer_config_from_args
from megatron_grpo.training import arguments
from megatron_grpo.training.arguments import FLAGS, build_parser, parse_args
from megatron_grpo.training.command_line import Accept, Help
from megatron_grpo.utils.arguments import args_to_json, replaced
from megatron_grpo.utils.core_flags import (
    CHOICES,
    DEFAULTS,
    EXCLUDED,
    RENAMED,
    SWITCHED_OFF_BY,
    core_flags,
    integer_or_pattern,
)
from megatron_grpo.utils.errors import GrpoError


def latent_config(args):
    args = replaced(args, multi_latent_attention=True)
    return transformer_config_from_args(args)


BUILD = {
    MLATransformerConfig: latent_config,
    OptimizerConfig: arguments.optimizer_config_from_args,
    DistributedDataParallelConfig: arguments.ddp_config_from_args,
}
FIELDS = [(config, field) for config in BUILD for field in dataclasses.fields(config)]
# The recipe is of the layers: `optimizer_config_from_args` says why the optimizer does not get it.
WITHHELD = (OptimizerConfig, "fp8_recipe")

# The model part of a Megatron-LM launch script for Qwen3-0.6B.
QWEN3 = """
    --use-mcore-models --num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16
    --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm --normalization RMSNorm
    --norm-epsilon 1e-6 --swiglu --disable-bias-linear --position-embedding-type rope --use-rotary-position-embeddings
    --rotary-base 1000000 --rotary-percent 1.0 --vocab-size 151936 --make-vocab-size-divisible-by 128
    --max-position-embeddings 40960 --seq-length 4096 --attention-dropout 0.0 --hidden-dropout 0.0
    --no-masked-softmax-fusion --attention-softmax-in-fp32 --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --no-rope-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion --use-flash-attn
    --attention-backend auto --init-method-std 0.02 --transformer-impl transformer_engine
    --cross-entropy-loss-fusion --cross-entropy-fusion-impl te --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --accumulate-allreduce-grads-in-fp32 --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2 --sequence-parallel --bf16 --recompute-activations --lr 1e-6 --min-lr 1e-7
    --lr-decay-style cosine --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
"""
QWEN3_MOE = """
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention
    --num-query-groups 4 --kv-channels 128 --qk-layernorm --normalization RMSNorm --norm-epsilon 1e-6 --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --rotary-base 1000000
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-grouped-gemm --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
    --moe-layer-freq ([1]*48) --moe-router-score-function softmax --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1 --moe-permute-fusion
"""


def test_every_field_is_a_flag_or_excluded():
    fed = [feed for flag in core_flags().values() for feed in flag.feeds]
    for config, field in FIELDS:
        assert (field.name in EXCLUDED) != ((config, field.name) in fed), f"{config.__name__}.{field.name}"
    assert len(fed) == len(set(fed)), "a field is fed by two flags"
    rows = EXCLUDED.keys() | RENAMED.keys() | SWITCHED_OFF_BY.keys() | DEFAULTS.keys()
    assert rows <= {field.name for _, field in FIELDS}


def other_value(flag):
    """Words that set this flag to something that is not its default, and the value that megatron-core should get."""
    annotation = flag.annotation
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = [k for k in typing.get_args(annotation) if k is not type(None)] if union else [annotation]
    origins = [typing.get_origin(kind) for kind in kinds]
    if bool in kinds:
        return [flag.off_options[0] if flag.default else flag.option], not flag.default
    if torch.dtype in kinds:
        return [flag.option, "bf16"], torch.bfloat16
    if Literal in origins:
        choice = next(c for c in typing.get_args(kinds[0]) if c not in (flag.default, "inference_optimized"))
        return [flag.option, choice], choice
    if isinstance(kinds[0], type) and issubclass(kinds[0], enum.Enum):
        return [flag.option, "fused"], AttnBackend.fused
    if tuple in origins:
        return [flag.option, "7,-1"], (7, -1)
    if int in kinds and list in origins:
        return [flag.option, "([1]+[0]*2)*2"], [1, 0, 0, 1, 0, 0]
    if flag.dest in CHOICES:
        choice = next(c for c in CHOICES[flag.dest] if c != flag.default)
        return [flag.option, choice], choice
    if kinds == [str]:
        return [flag.option, "word"], "word"
    if list in origins:
        (member,) = typing.get_args(kinds[origins.index(list)])
        values = [member(17), member(19)]
        return [flag.option, *map(str, values)], values
    if str in kinds:
        return [flag.option, "word"], "word"
    value = 17 if flag.kind is None or flag.kind.contains(17) else 0.5
    return [flag.option, str(value)], kinds[0](value)


@pytest.mark.parametrize("dest", core_flags())
def test_every_flag_arrives_in_its_dataclasses(dest, monkeypatch):
    for config in BUILD:  # one flag alone need not make sense to megatron-core
        monkeypatch.setattr(config, "__post_init__", lambda self: None)
    flag = core_flags()[dest]
    words, expected = other_value(flag)
    if dest == "num_query_groups":
        words = [*words, "--group-query-attention"]
    args = parse_args(words)
    assert dest in args.explicit
    for config, field in flag.feeds:
        value = getattr(BUILD[config](args), field)
        wanted = None if (config, field) == WITHHELD else expected
        assert value == wanted and type(value) is type(wanted), f"{config.__name__}.{field}"


def test_without_flags_the_defaults_are_megatron_cores(monkeypatch):
    for config in BUILD:
        monkeypatch.setattr(config, "__post_init__", lambda self: None)
    args = parse_args([])
    expected = {
        (MLATransformerConfig, "multi_latent_attention"): True,
        (MLATransformerConfig, "pipeline_dtype"): torch.float32,
        (MLATransformerConfig, "deallocate_pipeline_outputs"): True,
        (MLATransformerConfig, "mtp_detach_heads"): True,
        (MLATransformerConfig, "cuda_graph_modules"): [],  # what the default "full" becomes
        WITHHELD: None,
    }
    for config, field in FIELDS:
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = DEFAULTS[field.name][0] if field.name in DEFAULTS else default
        assert getattr(BUILD[config](args), field.name) == expected.get((config, field.name), default), field.name


def test_a_qwen3_script_of_megatron_lm_parses_and_builds():
    args = parse_args(QWEN3.split())
    config = transformer_config_from_args(args)
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (28, 1024, 3072)
    assert (config.num_attention_heads, config.num_query_groups, config.kv_channels) == (16, 8, 128)
    assert config.gated_linear_unit and config.activation_func is torch.nn.functional.silu
    assert config.qk_layernorm and not config.add_bias_linear and config.layernorm_epsilon == 1e-6
    assert config.params_dtype == config.pipeline_dtype == torch.bfloat16 and config.bf16
    assert config.sequence_parallel and config.variable_seq_lengths and config.batch_p2p_comm
    assert config.recompute_granularity == "selective" and not config.bias_activation_fusion
    assert (args.swiglu, args.rotary_base, args.vocab_size) == (True, 1000000, 151936)
    assert "--use-mcore-models" in args.accepted and "--cross-entropy-fusion-impl" in args.accepted
    optimizer, ddp = arguments.optimizer_config_from_args(args), arguments.ddp_config_from_args(args)
    assert (optimizer.lr, optimizer.min_lr, optimizer.adam_beta2, optimizer.weight_decay) == (1e-6, 1e-7, 0.95, 0.1)
    assert optimizer.use_distributed_optimizer and ddp.use_distributed_optimizer
    assert ddp.overlap_grad_reduce and ddp.overlap_param_gather and ddp.grad_reduce_in_fp32


def test_a_qwen3_moe_script_of_megatron_lm_parses():
    args = parse_args(QWEN3_MOE.split())
    assert (args.num_experts, args.moe_router_topk, args.moe_ffn_hidden_size) == (128, 8, 768)
    assert args.moe_layer_freq == [1] * 48 and args.moe_grouped_gemm and args.expert_tensor_parallel_size == 1


def test_underscores_are_hyphens_and_what_was_given_is_known():
    args = parse_args(["--num_generations=4", "--train_data_path", "my_file.jsonl", "--no_shuffle", "--beta", "0.04"])
    assert (args.num_generations, args.train_data_path, args.no_shuffle) == (4, ["my_file.jsonl"], True)
    assert args.explicit == {"num_generations", "train_data_path", "no_shuffle", "beta"}  # 0.04 is also the default


def test_every_switch_is_taken_back_by_a_later_flag():
    """Of a launch script's switch and its opposite at the end of the command line the second counts, and vice versa."""
    parser = build_parser()
    switches = [a for a in parser._actions if a.nargs == 0 and not isinstance(a, Accept | Help)]
    ours = {row[0] for rows in FLAGS.values() for row in rows if row[1] is bool} | {"--bf16", "--moe-layer-recompute"}
    assert ours < {option for switch in switches for option in switch.option_strings}
    for switch in switches:
        rest = [a for a in parser._actions if a.dest == switch.dest and a is not switch]
        (opposite,) = [a for a in rest if a.nargs == 0] or rest  # that of --no-save-hf has a value
        words = [opposite.option_strings[0], *["there"] * (opposite.nargs is None)]
        for option in switch.option_strings:
            last = [getattr(parser.parse_args(both), switch.dest) for both in ([option, *words], [*words, option])]
            assert last == [opposite.const if opposite.nargs == 0 else "there", switch.const], option
            named = "--" + option[5:] if option.startswith("--no-") else "--no-" + option[2:]
            assert option not in ours or named in opposite.option_strings
    help_ = parser.format_help()
    assert "--no-offload-model" not in help_ and "--offload-model" in help_


def test_a_switch_that_is_off_again_needs_nothing():
    """Flags that would be refused here are taken back: as for a script with vLLM that runs with other engines."""
    validated("--rollout-engine megatron --vllm-enforce-eager --no-vllm-enforce-eager")
    with pytest.raises(GrpoError, match="--vllm-enforce-eager is vLLM's"):
        validated("--rollout-engine megatron --vllm-enforce-eager")


def test_recomputation_and_the_export_of_a_script_are_taken_back():
    """With the flags that only recomputation reads, which a script has beside it."""
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    args = validated(f"{full} --no-recompute-activations")
    assert (args.recompute_granularity, args.recompute_method, args.recompute_num_layers) == (None, None, None)
    selective = "--recompute-granularity selective --recompute-modules mlp"
    assert validated(f"{selective} --no-recompute-activations").recompute_modules is None
    assert validated(f"--no-recompute-activations {full}").recompute_granularity == "full"
    experts = f"{MOE} --moe-layer-recompute --no-recompute-activations"
    with pytest.raises(GrpoError, match="--no-recompute-activations and --moe-layer-recompute cannot both be given"):
        validated(experts)
    args = validated(f"{experts} --no-moe-layer-recompute")
    assert (args.recompute_granularity, args.recompute_modules) == (None, None)
    assert validated("--save out --no-save-hf --save-hf there").save_hf == "there"
    assert validated("--save out --save-hf there --no-save-hf").save_hf is None


def test_the_load_of_a_script_is_taken_back():
    assert validated("--save out --load out --no-load").load is None
    assert validated("--save out --no-load --load out").load == "out"
    with pytest.raises(GrpoError, match="--finetune needs --load"):
        validated("--save out --load out --finetune --no-load")


def test_an_empty_system_prompt_is_none():
    assert validated("--system-prompt Think. --system-prompt=").system_prompt is None
    assert validated("--system-prompt Think.").system_prompt == "Think."
    with pytest.raises(GrpoError, match="--prompt-key is empty"):
        parse_args(["--prompt-key", ""])


@pytest.mark.parametrize(
    "words, message",
    [
        ("--num-generation 4", "unknown flag --num-generation; did you mean --num-generations?"),
        ("--temprature=1", "unknown flag --temprature; did you mean --temperature?"),
        ("--xyzzy", "unknown flag --xyzzy; --help-all lists all flags"),
        ("--is-hybrid-model", "--is-hybrid-model is not a flag of this program: this program's Mamba-2 layer has"),
        (
            "--no-tp-comm-bulk-wgrad",
            "--no-tp-comm-bulk-wgrad is not a flag of this program: needs Transformer Engine's",
        ),
        ("--grad-norm-skip-threshold 5", "is not a flag of this program: use --on-bad-update skip --bad-update-factor"),
        ("--fp32-residual-connection", "is not a flag of this program: with --bf16 or --fp16 the linear layers refuse"),
        ("--lr 1e-6 5", "unexpected argument '5': a value without its flag"),
        ("--bf16 true", "unexpected argument 'true': --bf16 is a switch and takes no value; leave it out"),
        ("--bf16 false", "--bf16 is a switch and takes no value; leave both out, --bf16 is off then"),
        ("--shuffle false", "--shuffle is a switch and takes no value; give --no-shuffle in place of both"),
        ("--lr 1e-6 --offload-model False", "takes no value; leave both out, --offload-model is off then"),
        ("--lr fast", "argument --lr: invalid float value: 'fast'"),
        ("--loss-type ppo", "argument --loss-type: invalid choice: 'ppo'"),
        ("--moe-layer-freq [1]*x", "argument --moe-layer-freq: invalid integer_or_pattern value: '[1]*x'"),
        ("--lr", "argument --lr: expected one argument"),
        ("--num-lay 4", "unknown flag --num-lay; did you mean --num-layers?"),  # no abbreviations
        ("--lrwarmup-iters 4", "unknown flag --lrwarmup-iters; did you mean --lr-warmup-iters?"),
        ("--scale-output", "unknown flag --scale-output; --help-all lists all flags"),
        ("--no-temperature", "unknown flag --no-temperature; --help-all lists all flags"),  # not its opposite
        ("--grad-reduce-in-fp32", "megatron-core's grad_reduce_in_fp32 is --accumulate-allreduce-grads-in-fp32 here"),
        ("--no-disable-bias-linear", "unknown flag --no-disable-bias-linear: --add-bias-linear takes"),
        ("--no-grad-reduce-in-fp32", "--no-grad-reduce-in-fp32 is --grad-reduce-in-bf16 here"),
        (
            "--max-tokens-per-gpu 9216",
            "slime's --max-tokens-per-gpu is --max-tokens-per-microbatch here (tokens of one",
        ),
        ("--learning-rate 1e-6", "ms-swift's and TRL's --learning-rate is --lr here"),
        ("--output-dir x", "--output-dir is --save here"),
        ("--steps-per-epoch 3", "unknown flag --steps-per-epoch; --help-all lists all flags"),
        (
            "--use_kl_loss",
            "slime's and ROLL's --use-kl-loss has no counterpart: --beta above 0 switches the KL term on",
        ),
        (
            "--lr 1e-6 data.train_batch_size=1024",
            "verl's data.train_batch_size is --generation-batch-size here (prompts there, completions here",
        ),
    ],
)
def test_mistakes_end_with_one_line_from_rank_0(words, message, capsys, monkeypatch):
    for rank, shown in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            parse_args(words.split())
        output = capsys.readouterr()
        assert end.value.code == 2 and output.out == ""
        assert (message in output.err) is shown and output.err.count("\n") == shown


def test_help_shows_every_group_and_no_hidden_opposite():
    text = arguments.build_parser().format_help()
    assert all(f"\n{group}:\n" in text for group in arguments.FLAGS)
    assert "--sequence-parallel" in text and "--no-sequence-parallel" not in text
    assert "--disable-bias-linear" in text and "--add-bias-linear" not in text


@pytest.mark.parametrize(
    "text, value", [("4", 4), ("[1,0]", [1, 0]), ("[0]+[1]*3", [0, 1, 1, 1]), ("([1]*2+[0])*2", [1, 1, 0, 1, 1, 0])]
)
def test_patterns_of_layers(text, value):
    assert integer_or_pattern(text) == value


@pytest.mark.parametrize("text", ["__import__('os')", "x", "[1", "[1]-[1]", "[1]*[1]", ""])
def test_patterns_are_not_code(text):
    with pytest.raises(ValueError):
        integer_or_pattern(text)


def test_arguments_survive_a_checkpoint():
    args = parse_args(QWEN3.split() + ["--stop-words", "a", "b"])
    stored = json.loads(json.dumps(args_to_json(args)))
    again = parse_args([])
    vars(again).update(stored)
    left_out = {"explicit", "vllm_server_api_key", "sglang_server_api_key"}
    assert {k: v for k, v in vars(again).items() if k not in left_out} == stored
    assert again.explicit == frozenset() and again.stop_words == ["a", "b"]
    assert transformer_config_from_args(again).num_layers == 28


def test_print_args_shows_the_given_arguments(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    args = parse_args("--lr 1e-6 --stop-words a b --no-shuffle --vllm-server-api-key secret --use-flash-attn".split())
    arguments.print_args(args, everything=False)
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines()[:-1])) <= 60
    text = " ".join(output.split())
    assert text.endswith(
        "lr=1e-06 no_shuffle=True stop_words=['a', 'b'] note: --use-flash-attn has no effect: packed batches always "
        "take a flash kernel on a GPU"
    )
    assert "beta" not in text and "secret" not in text


def test_print_args_shows_values_and_what_has_no_effect(capsys):
    arguments.print_args(parse_args(["--lr", "1e-6", "--use-flash-attn"]), everything=True)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("* lr ....") and line.endswith(" 1e-06") for line in lines)
    assert any(line.startswith("  beta ....") and line.endswith(" 0.04") for line in lines)
    assert any(line.startswith("note: --use-flash-attn has no effect") for line in lines)


def test_the_documentation_is_up_to_date():
    path = REPO / "tools" / "generate_arguments_doc.py"
    spec = importlib.util.spec_from_file_location("generate_arguments_doc", path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.DOCUMENT.read_text() == tool.document(), f"run python {path.relative_to(REPO)}"
