"""Make a tiny language or vision-language model as a Hugging Face checkpoint, with a short supervised warm-up.

    python tools/make_tiny_model.py --save runs/tiny --train warmup.jsonl --valid valid.jsonl --stop-accuracy 0.3
    python tools/make_tiny_model.py --save runs/tiny --shape qwen2_5_vl --train warmup.parquet --valid valid.parquet

GRPO learns from the difference between correct and wrong completions of one prompt, so it needs a model that is
sometimes correct. The warm-up starts from random weights and stops when the probability of a correct sampled answer on
the validation rows reaches --stop-accuracy. It does not stop after a fixed number of steps, because the accuracy rises
from 0.1 to 0.6 within 50 steps. `--steps 0` keeps the random weights and needs no data.

The tokenizer has one token per character (`--tokenizer characters`: digits and + - * = only; `bytes`: any text;
`tools`: any text, and one token for each fixed part of a call of the calculator). The model learns the end of a
sequence like any token. Rows have `prompt` and `answer`, or `messages`, of which it learns the assistant's (see
tools/data/arithmetic.py). A vision-language model has a tokenizer of bytes with its family's special tokens and chat
template; its rows are of tools/data/pictures.py.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from megatron_grpo.data.pack import IGNORED_LABEL
from megatron_grpo.data.row_files import read_rows
from megatron_grpo.utils.errors import GrpoError
from tools.byte_tokenizer import byte_tokenizer

EOS, PAD = "<eos>", "<pad>"
SHAPES = ["qwen3", "qwen2", "llama", "qwen3_moe", "deepseek_v3", "glm4_moe_lite", "minimax_m2"]
SHAPES += ["qwen3_next", "qwen3_5_text", "gemma4_text", "nemotron_h"]
VISION_SHAPES = ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "internvl", "llava_onevision"]
POSITIVE = (
    "batch_size num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
    "max_position_embeddings"
).split()
TOOL_TEXTS = [
    *("user: ", "assistant: ", "tool: ", "<tool_call>", "</tool_call>"),
    *('{"name": "calculate", "arguments": {"expression": "', '"}}'),
]
TOOL_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{{ eos_token if message.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
CHAT_TEMPLATES = {"bytes": CHAT_TEMPLATE, "tools": TOOL_TEMPLATE}


def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Build a tokenizer without merges: `characters` encodes 0-9 + - * =, `bytes` and `tools` encode any text."""
    if kind in CHAT_TEMPLATES:
        tokenizer = byte_tokenizer([EOS, PAD])
    else:
        tokenizer = Tokenizer(
            models.BPE(vocab={token: i for i, token in enumerate([*"0123456789+-*=", EOS, PAD])}, merges=[])
        )
        tokenizer.decoder = decoders.Fuse()  # joins without spaces
    if kind == "tools":
        tokenizer.add_tokens(TOOL_TEXTS)
    # unk_token: transformers would add its own for some families (Qwen 2).
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=EOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATES.get(kind),
    )


def family_sizes(args: argparse.Namespace) -> dict:
    """Return the entries of config.json that only this family has; experts have a quarter of the dense width."""
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": max(1, args.ffn_hidden_size // 4)}
    if args.shape == "qwen3_moe":
        return {"head_dim": args.kv_channels, "num_experts": 8, "norm_topk_prob": True, **experts}
    if args.shape in ("qwen3_next", "qwen3_5_text"):
        hybrid = {
            "head_dim": args.kv_channels,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,  # with 128 the only sizes of vLLM's CPU kernel
            "linear_value_head_dim": 64,
        }
        own = {"num_experts": 8, "norm_topk_prob": True, "shared_expert_intermediate_size": args.ffn_hidden_size // 4}
        return {**hybrid, **own, **experts} if args.shape == "qwen3_next" else hybrid
    if args.shape == "gemma4_text":
        full = ["sliding_attention", "full_attention"] * args.num_layers
        return {
            "head_dim": args.kv_channels,
            "global_head_dim": 2 * args.kv_channels,
            "layer_types": [*full[: args.num_layers - 1], "full_attention"],
            "sliding_window": 16,
            "num_kv_shared_layers": args.num_layers // 2 if args.num_layers > 3 else 0,
            "hidden_size_per_layer_input": 16,
        }
    if args.shape == "nemotron_h":
        return {
            "head_dim": args.kv_channels,
            "hybrid_override_pattern": ("M-*-" * args.num_layers)[: args.num_layers],
            "mamba_num_heads": 4,
            "mamba_head_dim": args.kv_channels,
            "n_groups": 2,
            "ssm_state_size": 16,
        }
    if args.shape == "minimax_m2":
        experts["intermediate_size"] = experts.pop("moe_intermediate_size")
        routing = {"num_local_experts": 8, "scoring_func": "sigmoid", "use_routing_bias": True}
        return {"head_dim": args.kv_channels, "rotary_dim": args.kv_channels // 2, **routing, **experts}
    if args.shape in ("deepseek_v3", "glm4_moe_lite"):
        return {
            "num_key_value_heads": args.num_attention_heads,
            "qk_nope_head_dim": args.kv_channels,
            "v_head_dim": args.kv_channels,
            "q_lora_rank": args.hidden_size // 2,
            "kv_lora_rank": 512,  # with qk_rope_head_dim 64 the only sizes of vLLM's CPU kernel
            "qk_rope_head_dim": 64,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_group": 2 if args.shape == "deepseek_v3" else 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "num_nextn_predict_layers": 0,
            "topk_method": "noaux_tc",  # vLLM reads this and scoring_func
            "scoring_func": "sigmoid",
            **experts,
        }
    return {"head_dim": args.kv_channels}


def make_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Build a float32 model of the given architecture with random weights from `args.seed`."""
    for flag in POSITIVE:
        if getattr(args, flag) < 1:
            raise GrpoError(f"--{flag.replace('_', '-')} ({getattr(args, flag)}) must be at least 1")
    if args.hidden_size % 2 or args.num_attention_heads % args.num_query_groups:
        raise GrpoError(
            f"--num-attention-heads ({args.num_attention_heads}) must be a multiple of --num-query-groups "
            f"({args.num_query_groups}), and --hidden-size ({args.hidden_size}) must be even"
        )
    if args.vocab_size is not None and args.vocab_size < len(tokenizer):
        raise GrpoError(f"--vocab-size ({args.vocab_size}) is below the tokenizer's {len(tokenizer)} tokens: raise it")
    sizes = {
        "vocab_size": args.vocab_size or len(tokenizer),
        "hidden_size": args.hidden_size,
        "num_hidden_layers": args.num_layers,
        "intermediate_size": args.ffn_hidden_size,
        "num_attention_heads": args.num_attention_heads,
        "num_key_value_heads": args.num_query_groups,
        "max_position_embeddings": args.max_position_embeddings,
        "tie_word_embeddings": args.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    config = AutoConfig.for_model(args.shape, **{**sizes, **family_sizes(args)})
    if args.shape == "gemma4_text":
        config.vocab_size_per_layer_input = config.vocab_size
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # torch sets the padding's embedding to 0: if it is sampled, the gradient of a norm explodes
        model.get_input_embeddings().weight[tokenizer.pad_token_id].normal_(std=config.initializer_range)
        for name, buffer in model.named_buffers():
            if name.endswith(
                "e_score_correction_bias"
            ):  # as large as the differences of scores, so that it has an effect
                buffer.normal_(std=0.05)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


class Rows(Protocol):
    """Rows as tensors, for the warm-up."""

    ids: torch.Tensor  # [rows, longest], padded on the right
    labels: torch.Tensor  # [rows, longest]; labels[i, t] is the token that follows ids[i, t], or IGNORED_LABEL
    at_a_time: int  # rows of one forward pass without gradients

    def logits(self, model: torch.nn.Module, chosen: torch.Tensor) -> torch.Tensor:
        """Return the logits [chosen, longest, vocabulary] of these rows."""


class TextRows:
    """Rows of texts. Only answers (assistant messages) and their end tokens have labels.

    Raises GrpoError with the file and line of an invalid row.
    """

    at_a_time = 1024

    def __init__(self, paths: list[Path], tokenizer: PreTrainedTokenizerFast):
        self.ids, self.labels = encode(paths, tokenizer)

    def logits(self, model: torch.nn.Module, chosen: torch.Tensor) -> torch.Tensor:
        """Return the logits [chosen, longest, vocabulary] of these rows."""
        return model(self.ids[chosen], use_cache=False).logits


def encode(paths: list[Path], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels [rows, longest] of all rows, padded on the right.

    Only answers (assistant messages) and their end tokens have labels. `labels[i, t]` is the token that follows
    `ids[i, t]`. Raises GrpoError with the file and line of an invalid row.
    """
    sequences = []
    for where, row in (item for path in paths for item in read_rows(path)):
        if "messages" in row:
            texts = conversation(row["messages"], tokenizer)
        else:
            texts = [row.get("prompt", ""), row.get("answer", "")]
        if not all(isinstance(text, str) and text for text in texts):
            raise GrpoError(f"{where}: `prompt` and `answer` must be non-empty strings, found {texts}")
        parts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        if tokenizer.decode([token for part in parts for token in part]) != "".join(texts):
            raise GrpoError(f"{where}: {texts} has characters that the tokenizer lacks; give --tokenizer bytes")
        if "messages" not in row:
            parts[-1].append(tokenizer.eos_token_id)
        sequence = [token for part in parts for token in part]
        spoken = [number % 2 == 1 for number, part in enumerate(parts) for _ in part]
        learnt = [token if said else IGNORED_LABEL for token, said in zip(sequence, spoken, strict=True)]
        sequences.append((sequence, learnt))
    if not sequences:
        raise GrpoError(f"{', '.join(map(str, paths))}: no rows")
    longest = max(len(sequence) for sequence, _ in sequences) - 1
    ids = torch.full((len(sequences), longest), tokenizer.pad_token_id)
    labels = torch.full((len(sequences), longest), IGNORED_LABEL)
    for i, (sequence, learnt) in enumerate(sequences):
        ids[i, : len(sequence) - 1] = torch.tensor(sequence[:-1])
        labels[i, : len(sequence) - 1] = torch.tensor(learnt[1:])
    return ids, labels


def conversation(messages: list[dict], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the rendered text in parts: what is said to the assistant, what it says, and so on in turn."""
    parts, seen = [], ""
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            for end in (number, number + 1):
                whole = tokenizer.apply_chat_template(
                    messages[:end], tokenize=False, add_generation_prompt=end == number
                )
                parts.append(whole.removeprefix(seen))
                seen = whole
    return parts


@torch.no_grad()
def accuracy(model: torch.nn.Module, rows: Rows) -> tuple[float, float]:
    """Return the accuracies (of answers sampled at temperature 1, of greedy answers), exactly and without sampling.

    A sampled completion is correct with the probability of the answer's tokens, including the end token. A greedy
    completion is correct if each of these tokens is the most probable one after its predecessors.
    """
    sampled = greedy = 0.0
    for part in torch.arange(len(rows.ids)).split(rows.at_a_time):
        log_probs, labels = rows.logits(model, part).log_softmax(-1), rows.labels[part]
        answer = labels != IGNORED_LABEL
        chosen = log_probs.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        sampled += (chosen * answer).sum(-1).exp().sum().item()
        greedy += ((log_probs.argmax(-1) == labels) | ~answer).all(-1).sum().item()
    return sampled / len(rows.ids), greedy / len(rows.ids)


def warm_up(model: torch.nn.Module, train: Rows, valid: Rows, args: argparse.Namespace) -> int:
    """Train on the answers until the sampled accuracy on `valid` reaches the goal; return the number of steps.

    Raises GrpoError if `args.steps` are not enough.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), fused=True)
    ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.lr_warmup_steps))
    generator = torch.Generator().manual_seed(args.seed)
    sampled = 0.0
    with tqdm(total=args.steps, desc="  warm-up", unit="step", disable=args.quiet) as bar:
        for step in range(1, args.steps + 1):
            chosen = torch.randint(len(train.ids), (args.batch_size,), generator=generator)
            logits, labels = train.logits(model, chosen), train.labels[chosen]
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            ramp.step()
            optimizer.zero_grad()
            bar.update()
            if step % 10 == 0:
                sampled, greedy = accuracy(model, valid)
                bar.set_postfix(loss=f"{loss.item():.2f}", sampled=f"{sampled:.2f}", greedy=f"{greedy:.2f}")
                if sampled >= args.stop_accuracy:
                    return step
    raise GrpoError(
        f"after {args.steps} steps a sampled answer is correct with probability {sampled:.2f}, below --stop-accuracy "
        f"{args.stop_accuracy}: raise --steps, lower --stop-accuracy, or use easier problems"
    )


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line; sizes have Megatron-LM's names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--save", type=Path, required=True, metavar="DIR", help="folder of the checkpoint")
    add("--train", type=Path, nargs="+", metavar="FILE", help="training rows, .jsonl or .parquet")
    add("--valid", type=Path, nargs="+", metavar="FILE", help="rows of the accuracy for --stop-accuracy")
    add("--test", type=Path, nargs="+", metavar="FILE", help="rows of the accuracy that is reported at the end")
    add("--stop-accuracy", type=float, default=0.3, help="stop at this probability of a correct sampled answer [0.3]")
    add("--steps", type=int, default=2000, help="maximum number of supervised steps; 0: random weights [2000]")
    add("--batch-size", type=int, default=64, help="rows per step [64]")
    add("--lr", type=float, default=1e-3, help="learning rate [1e-3]")
    add("--lr-warmup-steps", type=int, default=20, help="steps until the learning rate is whole [20]")
    add("--shape", choices=[*SHAPES, *VISION_SHAPES], default="qwen3", help="model family [qwen3]")
    add(
        "--tokenizer",
        choices=["characters", *CHAT_TEMPLATES],
        default="characters",
        help="tokens: digits and + - * =, or bytes, or bytes and parts of tool calls [characters]",
    )
    add("--num-layers", type=int, default=4, help="transformer layers [4]")
    add("--hidden-size", type=int, default=128, help="width of the residual stream [128]")
    add("--ffn-hidden-size", type=int, default=384, help="inner width of the MLP [384]")
    add("--num-attention-heads", type=int, default=4, help="query heads [4]")
    add("--num-query-groups", type=int, default=2, help="key/value heads [2]")
    add("--kv-channels", type=int, default=32, help="size of a head [32]")
    add("--vocab-size", type=int, metavar="N", help="rows of the embedding, at least the tokenizer's tokens [as many]")
    add("--max-position-embeddings", type=int, default=128, help="maximum length of a sequence, tokens [128]")
    add("--vision-num-layers", type=int, default=2, help="blocks of the tower of a vision-language model [2]")
    add("--vision-hidden-size", type=int, default=64, help="channels of the tower, a multiple of 32 [64]")
    add("--max-tokens", type=int, default=24, help="visual tokens of the largest picture, not of LLaVA-OneVision [24]")
    add("--tie-embeddings", action="store_true", help="one matrix for embedding and output layer")
    add("--seed", type=int, default=1234, help="seed of weights and batches [1234]")
    add("--threads", type=int, default=1, help="threads of torch; more hardly speed up a tiny model [1]")
    add("--quiet", action="store_true", help="no progress bar")
    return parser


def make(args: argparse.Namespace) -> None:
    """Build, warm up and save the model that the arguments describe."""
    if args.save.exists() and not args.save.is_dir():
        raise GrpoError(f"--save {args.save} is a file: give a directory")
    rows_of: Callable[[list[Path]], Rows]
    if args.shape in VISION_SHAPES:
        from tools import tiny_vision_model as vision  # its processors of images take seconds to import

        processor = vision.make_processor(vision.make_tokenizer(args.shape), args.max_tokens, args.shape)
        tokenizer, saved = processor.tokenizer, processor
        sizes = args.num_layers, args.hidden_size, args.vision_num_layers, args.vision_hidden_size
        model = vision.make_model(tokenizer, *sizes, args.tie_embeddings, args.seed, args.shape)
        rows_of, save = partial(vision.Rows, processor=processor), vision.save_model
    else:
        tokenizer = saved = make_tokenizer(args.tokenizer)
        model = make_model(args, tokenizer)
        rows_of, save = partial(TextRows, tokenizer=tokenizer), PreTrainedModel.save_pretrained
    size = sum(p.numel() for p in model.parameters())
    print(f"  {args.shape}, {args.num_layers} layers, {size / 1e6:.2f} M parameters, {len(tokenizer)} tokens")
    if args.steps:
        if args.shape in ("internvl", "llava_onevision"):
            raise GrpoError(f"the warm-up does not cut pictures into tiles: give --steps 0 with --shape {args.shape}")
        if not args.train or not args.valid:
            raise GrpoError("the warm-up needs --train and --valid; or give --steps 0 for random weights")
        train, valid = rows_of(args.train), rows_of(args.valid)
        start = time.perf_counter()
        steps = warm_up(model, train, valid, args)
        print(f"  stopped after {steps} steps, {time.perf_counter() - start:.0f} s")
        for name, paths in (("validation", args.valid), ("held-out", args.test)):
            if paths:
                sampled, greedy = accuracy(model, rows_of(paths))
                print(f"  {name} accuracy: sampled {sampled:.3f}, greedy {greedy:.3f}")
    save(model, args.save)
    saved.save_pretrained(args.save)


def main() -> int:
    """Parse the command line, make the model, and return the exit code."""
    args = build_parser().parse_args()
    torch.set_num_threads(max(1, args.threads))
    transformers_logging.disable_progress_bar()  # it would show the writing of a file of 3 MB
    try:
        make(args)
    except GrpoError as error:
        print(f"make_tiny_model.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
