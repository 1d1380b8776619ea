"""Flags and rules of low-rank adapters."""

from argparse import Namespace
from typing import Any

from megatron_grpo.lora import table
from megatron_grpo.lora.targets import saved_weights
from megatron_grpo.models.arguments import needs_one_dtype
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flags import COUNT, PATH, POSITIVE, FlagRow, Number
from megatron_grpo.utils.rules import excludes, flag, needs

LORA: tuple[FlagRow, ...] = (
    ("--lora-rank", COUNT, None, "train low-rank adapters of this rank; the base weights are frozen [all weights]"),
    ("--lora-alpha", POSITIVE, 32.0, "an adapter's output is multiplied by alpha / rank"),
    ("--lora-use-rslora", bool, False, "multiply by alpha / sqrt(rank) (rsLoRA)"),
    (
        "--lora-use-dora",
        bool,
        False,
        "scale every row of W + s B A to a trained norm (DoRA); the engine gets merged weights",
    ),
    ("--lora-dropout", Number(float, 0, 0.99), 0.0, "dropout of an adapter's input during updates"),
    (
        "--lora-target-modules",
        [str],
        ["all-linear"],
        "layers with adapters: Hugging Face names (q_proj), regular expressions of whole module names, all-linear "
        "(all of the decoder except routers), all-router",
    ),
    (
        "--lora-modules-to-save",
        [str],
        [],
        "modules trained whole beside the adapters and stored with them (lm_head, embed_tokens), named as in "
        "--lora-target-modules; the engine gets merged weights",
    ),
    (
        "--lora-base-dtype",
        ("model", "fp8"),
        "model",
        "storage of the decoder's frozen linear layers: the model's dtype, or e4m3 with a float32 scale for each block "
        "of 128 x 128, dequantized for every product",
    ),
    (
        "--lora-init",
        ("default", "gaussian"),
        "default",
        "distribution of A: uniform with variance 1 / (3 inputs), PEFT's default, or normal with deviation 1 / rank; "
        "B is zero",
    ),
)
ADAPTER_FILES: tuple[FlagRow, ...] = (
    ("--load-adapter", PATH, None, "directory of a PEFT adapter to start from; it sets rank, alpha and target modules"),
    (
        "--reference-adapter",
        PATH,
        None,
        "directory of a PEFT adapter, of the policy's shape, of the reference model [no adapter]",
    ),
    ("--save-adapter", PATH, None, "directory of the adapter in PEFT's files at the end of the run [{save}/adapter]"),
)
_DESTS = [name.removeprefix("--").replace("-", "_") for name, *_ in (*LORA, *ADAPTER_FILES)]


def check_lora(args: Namespace) -> None:
    """Raise GrpoError for settings of adapters that do not work, alone or with the other arguments."""
    for dest in _DESTS[1:]:
        needs(args, dest, "lora_rank", "it describes an adapter")
    if not args.lora_rank:
        return
    refused = {
        "ref_load": "the reference is the model without its adapter",
        "ref_load_hf": "the reference is the model without its adapter",
        "sync_ref_model": "the reference is the model without its adapter, which does not change",
        "moe_shared_expert_overlap": "adapters of shared experts communicate by themselves",
        "mtp_loss_scaling_factor": "multi-token-prediction layers have no adapters, so nothing would be trained",
    }
    for dest, reason in refused.items():
        if getattr(args, dest):
            raise GrpoError(f"{flag(dest)} and --lora-rank cannot both be given: {reason}")
    excludes(args, "lora_use_dora", "lora_dropout", "dropout would change the norms' part of the output, too")
    etp, tp = args.expert_tensor_parallel_size, args.tensor_model_parallel_size
    if args.num_experts and etp not in (1, tp):
        raise GrpoError(
            f"--lora-rank with --expert-tensor-parallel-size {etp} and --tensor-model-parallel-size {tp}: adapters of "
            "experts need an expert tensor-parallel size of 1 or TP"
        )
    if args.lora_base_dtype == "fp8" and args.transformer_impl == "transformer_engine":
        raise GrpoError(
            "--lora-base-dtype fp8 and --transformer-impl transformer_engine cannot both be given: Transformer "
            "Engine's layers need weights of their own classes; give --transformer-impl local"
        )
    if not args.with_reference:
        needs(args, "reference_adapter", "beta", "there is no reference model without the KL term")
    table.check(args)
    if any(weight.name.endswith("A_log") for weight in saved_weights(args)):
        needs_one_dtype(args, "--lora-modules-to-save A_log")


def resolve_adapter_export(args: Namespace) -> dict[str, Any]:
    """Return --save-adapter, by default in --save."""
    return {"save_adapter": f"{args.save}/adapter"} if args.lora_rank and args.save and not args.save_adapter else {}
