"""Flags and rules of vision-language models."""

from argparse import Namespace

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flags import COUNT, POSITIVE, FlagRow
from megatron_grpo.utils.rules import flag, needs
from megatron_grpo.vision.kinds import kind_of

VISION: tuple[FlagRow, ...] = (
    (
        "--max-image-pixels",
        COUNT,
        None,
        "larger images are scaled down to about this many pixels [that of the processor]",
    ),
    (
        "--min-image-pixels",
        COUNT,
        None,
        "smaller images are scaled up to about this many pixels [that of the processor]",
    ),
    ("--freeze-vision-tower", bool, False, "do not train the vision tower, except its projector"),
    ("--freeze-projector", bool, False, "do not train the projector from the vision tower to the language model"),
    ("--vision-tower-lr", POSITIVE, None, "learning rate of the vision tower, on the schedule of --lr [that of --lr]"),
    ("--projector-lr", POSITIVE, None, "learning rate of the projector, on the schedule of --lr [that of --lr]"),
)

# Attributes that do not work with images yet: (attribute, values that do, why).
_REFUSED = (
    ("rollout_engine", ("vllm",), "images are sent to vLLM only"),
    ("vllm_speculative_config", (None,), "drafts in a sequence with images are not tested"),
    ("teacher_load_hf", (None,), "a teacher model gets no images"),
    ("teacher_server", (None,), "a teacher server gets no images"),
    ("mtp_num_layers", (None, 0), "multi-token-prediction layers get no images"),
    ("apply_rope_fusion", (False,), "the fused kernel turns by one position of each token"),
    ("tokenizer_type", ("HuggingFaceTokenizer",), "the processor of images needs a Hugging Face tokenizer"),
)


def check_vision(args: Namespace) -> None:
    """Refuse settings that do not work with a vision-language model, and flags of images without one."""
    if not args.vision_config:
        for name, *_ in VISION:
            dest = name[2:].replace("-", "_")
            needs(args, dest, "vision_config", f"model family {args.model_family} has no vision tower")
        return
    if args.vllm_mode == "server" and args.lora_weight_sync == "adapter":
        raise GrpoError(
            f"--lora-weight-sync adapter with --vllm-mode server does not work with model family {args.model_family} "
            "yet: adapters beside images have not been tested on servers; give --lora-weight-sync merged"
        )
    for rate, frozen in ("vision_tower_lr", "freeze_vision_tower"), ("projector_lr", "freeze_projector"):
        if getattr(args, rate) is not None and getattr(args, frozen):
            raise GrpoError(f"{flag(rate)} cannot be used with {flag(frozen)}: what is frozen has no rate")
    for dest in "max_image_pixels", "min_image_pixels":
        if kind_of(args).tiles and getattr(args, dest) is not None:
            raise GrpoError(
                f"{flag(dest)} does not work with model family {args.model_family}: its processor cuts images into "
                "tiles of one size; set max_patches in preprocessor_config.json"
            )
    low, high = args.min_image_pixels, args.max_image_pixels
    if low is not None and high is not None and low > high:
        raise GrpoError(f"--min-image-pixels ({low}) is larger than --max-image-pixels ({high}): exchange them")
    for dest, allowed, reason in _REFUSED:
        value = getattr(args, dest)
        if value not in allowed:
            given = flag(dest) if value is True else f"{flag(dest)} {value}"
            text = kind_of(args).text
            cure = "leave it out" + (f", or give --model-family {text} and no images" if text else "")
            raise GrpoError(f"{given} does not work with model family {args.model_family} yet: {reason}; {cure}")
