"""What the engine of a LoRA run receives, by default and by --lora-weight-sync."""

import pytest
from good_args import MOE, validated

from megatron_grpo.rollout.arguments import lora_note
from megatron_grpo.utils.errors import GrpoError

LORA = "--lora-rank 4"
SERVER = "--vllm-mode server --vllm-server-base-url http://127.0.0.1:1"
_LAYERS = """{"global_head_dim":16,"num_global_key_value_heads":4,"attention_k_eq_v":%s,"num_kv_shared_layers":0,
    "use_double_wide_mlp":false,"hidden_size_per_layer_input":4,"partial_rotary_factor":0.25}"""
GEMMA4 = f"""--model-family gemma4_text --no-swiglu --geglu --sandwich-norm --scale-embeddings --softmax-scale 1
    --rotary-base-local 100 --gemma4-config {"".join(_LAYERS.split())}"""
MAMBA = """--model-family nemotron_h --no-qk-layernorm --no-swiglu --squared-relu --position-embedding-type none
    --hybrid-layer-pattern M*M* --mamba-num-heads 4 --mamba-head-dim 6 --mamba-num-groups 2 --mamba-state-dim 8
    --untie-embeddings-and-output-weights"""
MERGED = {
    GEMMA4 % "true": "vLLM does not add an adapter of k_proj to values that are keys",
    MAMBA: "vLLM divides an adapter of Mamba's in_proj",
    f"{SERVER} --weight-sync-method nccl --dry-run": "--weight-sync-method is nccl",
    f"{SERVER} --lora-base-dtype fp8": "servers hold the base of their own files",
    "--rollout-engine sglang --sglang-server-base-url http://127.0.0.1:1": "SGLang's servers receive whole weights",
    f"--rollout-ranks 1 {SERVER} --weight-sync-method checkpoint": "servers of --rollout-ranks receive whole weights",
    "--lora-use-dora": "vLLM has no DoRA",
    "--lora-rank 520 --hidden-size 1024 --lora-target-modules q_proj --kv-channels 128": "largest rank",
    "--lora-modules-to-save lm_head --untie-embeddings-and-output-weights": "--lora-modules-to-save",
    MOE: "vLLM runs mixtures of experts with adapters on GPUs alone",
    f"{MOE} --dry-run": "adapters of experts",
    f"{MOE} --dry-run --lora-target-modules all-router": "vLLM has no adapters of routers",
}


def test_a_dense_model_sends_its_adapter():
    args = validated(LORA)
    assert args.lora_weight_sync == "adapter" and "the adapter alone" in lora_note(args)
    assert validated(f"{LORA} --rollout-ranks 2", 4).lora_weight_sync == "adapter"
    assert validated(f"{LORA} --lora-weight-sync merged").lora_weight_sync == "merged"


@pytest.mark.parametrize(
    "flags",
    [
        GEMMA4 % "false",
        f"{GEMMA4} --lora-target-modules q_proj o_proj" % "true",
        f"{MAMBA} --lora-target-modules q_proj k_proj v_proj o_proj",
    ],
)
def test_layers_of_several_kinds_send_their_adapter(flags):
    assert validated(f"{LORA} {flags}").lora_weight_sync == "adapter"


def test_an_adapter_goes_with_drafts():
    drafts = '--vllm-speculative-config {"method":"ngram","num_speculative_tokens":2}'
    assert validated(f"{LORA} {drafts}").lora_weight_sync == "adapter"
    assert validated(f"{LORA} {drafts} --lora-weight-sync merged").lora_weight_sync == "merged"


def test_servers_load_an_adapter_if_they_are_told_to():
    args = validated(f"{LORA} {SERVER}")
    assert args.lora_weight_sync == "merged" and "only with --lora-weight-sync adapter" in lora_note(args)
    args = validated(f"{LORA} {SERVER} --lora-weight-sync adapter --dry-run")  # as on GPUs
    assert (args.lora_weight_sync, args.weight_sync_method) == ("adapter", "checkpoint")
    assert "the servers load the adapter from files" in lora_note(args)


def test_attention_beside_experts_sends_its_adapter_on_a_gpu():
    args = validated(f"{LORA} {MOE} --dry-run --lora-target-modules q_proj o_proj")
    assert args.lora_weight_sync == "adapter"


@pytest.mark.parametrize("flags", MERGED)
def test_what_vllms_adapters_cannot_hold_is_sent_merged(flags):
    args = validated(f"{LORA} {flags}")
    assert args.lora_weight_sync == "merged" and MERGED[flags] in lora_note(args)
    with pytest.raises(GrpoError, match=r"--lora-weight-sync adapter: .*; give merged, or leave it out"):
        validated(f"{LORA} {flags} --lora-weight-sync adapter")


def test_an_engine_without_weights_of_its_own_receives_nothing():
    args = validated(f"{LORA} --rollout-engine megatron")
    assert args.lora_weight_sync is None and lora_note(args) is None
    with pytest.raises(GrpoError, match="needs an engine with weights of its own"):
        validated(f"{LORA} --rollout-engine megatron --lora-weight-sync merged")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--lora-weight-sync adapter", "--lora-weight-sync needs --lora-rank"),
        ("--no-check-lora-sync", "--no-check-lora-sync needs --lora-rank"),
        (f"{LORA} --lora-weight-sync merged --no-check-lora-sync", "merged weights are not read back"),
        ('--vllm-engine-kwargs {"enable_lora":true}', "enable_lora is set by this program"),
    ],
)
def test_refusals(flags, reason):
    with pytest.raises(GrpoError, match=reason):
        validated(flags)
