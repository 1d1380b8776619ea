"""Compare greedy completions of a Hugging Face export in transformers and in vLLM, for the prompts of a file.

    python tools/check_export.py --hf runs/quickstart/run/hf_model --data test.jsonl --max-completion-length 5
    python tools/check_export.py --hf BASE --adapter runs/lora/adapter --data test.jsonl

Both load the directory with their own code, in float32, and complete the same token ids. Prints the number of
completions that are equal token by token, and the accuracy if the rows have answers. The exit code is 1 if any
completion differs. On a CPU vLLM computes gated delta nets in bfloat16 only: completions of such a model may differ
where transformers finds both tokens equally probable, up to that rounding. With `--adapter` PEFT
(requirements-test.txt) and vLLM load the adapter onto the model of `--hf`.
"""

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no second process for one small check
for name, value in {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}.items():
    os.environ.setdefault(name, value)

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from megatron_grpo.data.answer_column import find_answers
from megatron_grpo.data.row_files import read_rows
from megatron_grpo.data.row_prompt import parse_prompt
from megatron_grpo.data.text_start import encode_once, text_start
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.json_files import read_json_object
from megatron_grpo.utils.packages import require
from megatron_grpo.weights.families.mla import set_latent_epsilon
from megatron_grpo.weights.safetensors_files import Safetensors

ROUNDING = 0.1  # nats, difference of two log-probabilities that bfloat16 may turn round
# vLLM's CPU kernel rotates the wrong rows of latent attention's three-dimensional queries; torch's is correct.
ON_CPU = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}


class AdapterFiles(Safetensors):
    """Reader of a PEFT adapter's tensors."""

    single = "adapter_model.safetensors"


def load(path: Path, adapter: Path | None) -> torch.nn.Module:
    """Return transformers' model in float32, with the adapter in PEFT."""
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    set_latent_epsilon(model, model.config)
    if adapter is None:
        return model
    from peft import PeftModel

    return PeftModel.from_pretrained(model, adapter)


def transformers_completions(model: Any, prompts: list[list[int]], max_tokens: int, eos: int) -> list[list[int]]:
    """Return transformers' greedy completions, without the end token; a batch has prompts of one length, unpadded."""
    completions: list[list[int]] = [[] for _ in prompts]
    for length in sorted({len(prompt) for prompt in prompts}):
        numbers = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        for part in (numbers[i : i + 256] for i in range(0, len(numbers), 256)):
            ids = torch.tensor([prompts[i] for i in part])
            output = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=eos,
                pad_token_id=eos,
            )
            for i, row in zip(part, output[:, length:].tolist(), strict=True):
                completions[i] = row[: row.index(eos)] if eos in row else row
    return completions


def vllm_completions(
    path: Path, adapter: Path | None, dtype: str, prompts: list[list[int]], max_tokens: int, eos: int
) -> list[list[int]]:
    """Return vLLM's greedy completions, without the end token."""
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # it warns that a CPU has no triton
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    longest = max(map(len, prompts)) + max_tokens
    llm = LLM(
        model=str(path),
        dtype=dtype,
        max_model_len=longest,
        skip_tokenizer_init=True,
        enforce_eager=True,
        use_tqdm_on_load=False,
        seed=0,
        **({} if adapter is None else {"enable_lora": True, "max_lora_rank": _slot_rank(adapter)}),
        **({} if torch.cuda.is_available() else ON_CPU),
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=[eos], detokenize=False)
    request = None if adapter is None else LoRARequest("adapter", 1, str(adapter.resolve()))
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, sampling, use_tqdm=False, lora_request=request)
    completions = [list(output.outputs[0].token_ids) for output in outputs]
    return [row[:-1] if row and row[-1] == eos else row for row in completions]


@torch.no_grad()
def gap(model: Any, prompt: list[int], one: list[int], other: list[int], eos: int) -> float:
    """Return log p(``one``) - log p(``other``) in nats for the tokens at which two completions of a prompt part."""
    place, (own, theirs) = next(
        (place, both) for place, both in enumerate(zip([*one, eos], [*other, eos], strict=False)) if both[0] != both[1]
    )
    logits = model(input_ids=torch.tensor([[*prompt, *one[:place]]])).logits[0, -1]
    return (logits[own] - logits[theirs]).item()


def _slot_rank(adapter: Path) -> int:
    """Return the rank of vLLM's slot for an adapter: one of the ranks that vLLM has."""
    rank = read_json_object(adapter / "adapter_config.json")["r"]
    return next(size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank)


def check(args: argparse.Namespace) -> bool:
    """Complete the prompts, print the comparison, and return whether all completions are equal."""
    require("tools/check_export.py", "vllm")
    if args.adapter is not None:
        require(f"--adapter {args.adapter}", "peft")
    if not (args.hf / "config.json").is_file():
        raise GrpoError(f"--hf {args.hf}: no config.json; give a Hugging Face model directory")
    if "vision_config" in read_json_object(args.hf / "config.json"):
        raise GrpoError(f"--hf {args.hf} is a vision-language model; this tool compares models of text only")
    if args.adapter is not None:
        config = args.adapter / "adapter_config.json"
        if not config.is_file():
            raise GrpoError(f"--adapter {args.adapter}: no adapter_config.json; give a folder of --save-adapter")
        if read_json_object(config).get("use_dora"):
            raise GrpoError(
                f"--adapter {args.adapter} has DoRA, which vLLM lacks: check merged weights, which "
                "tools/checkpoint/convert.py --merge-lora writes"
            )
    for name in ("max_prompts", "max_completion_length"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise GrpoError(f"--{name.replace('_', '-')} ({value}) must be at least 1")
    for source in (Safetensors(args.hf), *([AdapterFiles(args.adapter)] if args.adapter else [])):
        for name in source.names():
            source.shape(name)  # opens every file: transformers and PEFT do not name one that is damaged
    tokenizer = AutoTokenizer.from_pretrained(args.hf)
    rows = [row for path in args.data for _, row in read_rows(path)][: args.max_prompts]
    if not rows:
        raise GrpoError(f"--data {' '.join(map(str, args.data))}: no rows")
    prompts = []
    for row in rows:
        prompt = parse_prompt(row, "prompt")
        if isinstance(prompt, str):
            prompts.append(encode_once(tokenizer, prompt, text_start(tokenizer)))
        else:
            prompts.append(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))

    found = [next(iter(find_answers(row).values()), None) for row in rows]
    answers = [answer.strip() for answer in found if isinstance(answer, str)]
    config = read_json_object(args.hf / "config.json")
    rounded = not torch.cuda.is_available() and "linear_attention" in (config.get("layer_types") or [])
    model, what = load(args.hf, args.adapter), (prompts, args.max_completion_length, tokenizer.eos_token_id)
    completions = {"transformers": transformers_completions(model, *what)}
    completions["vLLM"] = vllm_completions(args.hf, args.adapter, "bfloat16" if rounded else "float32", *what)
    for name in completions:
        if len(answers) == len(rows):
            texts = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in completions[name]]
            right = sum(text == answer for text, answer in zip(texts, answers, strict=True))
            print(f"{name}: greedy accuracy {right / len(rows):.3f} ({right} of {len(rows)})")
    one, other = completions.values()
    different = [i for i in range(len(rows)) if one[i] != other[i]]
    ties = [
        i for i in different if rounded and gap(model, prompts[i], one[i], other[i], tokenizer.eos_token_id) < ROUNDING
    ]
    different = [i for i in different if i not in ties]
    print(
        f"equal greedy completions in transformers and vLLM: {len(rows) - len(different) - len(ties)} of {len(rows)}"
        + (f", and {len(ties)} that part at tokens of equal probability up to the rounding of bfloat16" * bool(ties))
    )
    for i in different[:5]:
        print(
            f"  {tokenizer.decode(prompts[i])!r}: transformers {tokenizer.decode(one[i])!r}, "
            f"vLLM {tokenizer.decode(other[i])!r}"
        )
    return not different


def main() -> int:
    """Parse the command line, check, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="the exported model")
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="PEFT adapter of the model")
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, metavar="FILE", help="files of rows with a prompt"
    )
    parser.add_argument("--max-prompts", type=int, metavar="N", help="use the first N prompts [all]")
    parser.add_argument(
        "--max-completion-length",
        type=int,
        default=64,
        metavar="N",
        help="maximum tokens of a completion [64]",
    )
    args = parser.parse_args()
    try:
        return 0 if check(args) else 1
    except (GrpoError, OSError) as error:
        print(f"check_export.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
