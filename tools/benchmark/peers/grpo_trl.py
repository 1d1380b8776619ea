"""Train with TRL's GRPOTrainer, with the settings that its documentation recommends for speed.

    python tools/benchmark/peers/grpo_trl.py --model MODEL --data runs/peers/inputs/rows.jsonl --save OUT

It runs in TRL's environment: `bash tools/benchmark/peers/trl.sh equal runs/peers` makes that and the inputs. Writes
steps.jsonl: the seconds of each update and the mean length of its completions. Without a GPU, transformers generates.

Pages: huggingface.co/docs/trl/speeding_up_training (vLLM, attention and layers from the Kernels Hub, bf16) and
/vllm_integration (colocate, sleep mode). Layers from the Hub take the place of Liger's, which TRL 1.16 calls
deprecated. Gradient checkpointing, on where nothing is said, is off: it saves memory that this shape does not need.
"""

import argparse
import json
import time
from pathlib import Path


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="Hugging Face checkpoint")
    add("--data", type=Path, required=True, metavar="FILE", help="rows with `prompt`")
    add("--save", type=Path, required=True, metavar="DIR", help="folder of steps.jsonl")
    add("--max-prompt-length", type=int, default=320, metavar="TOKENS", help="longest prompt [320]")
    add("--max-completion-length", type=int, default=512, metavar="TOKENS", help="longest completion [512]")
    add("--batch-size", type=int, default=512, metavar="N", help="completions of a GPU in an update [512]")
    add("--micro-batch-size", type=int, default=16, metavar="N", help="completions of a forward pass [16]")
    add("--num-generations", type=int, default=8, metavar="N", help="completions of a prompt [8]")
    add("--engine-share", type=float, default=0.35, metavar="X", help="share of the GPU's memory for vLLM [0.35]")
    add("--updates", type=int, default=10, metavar="N", help="updates [10]")
    add("--no-hub-kernels", action="store_true", help="attention by torch, on a machine that cannot reach the Hub")
    add("--liger", action="store_true", help="layers of the package liger-kernel, beside --no-hub-kernels")
    return parser.parse_args()


def main() -> None:
    own = parse()
    import torch
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    gpu = torch.cuda.is_available()
    rows = (own.save / "steps.jsonl").open("w")

    class Steps(TrainerCallback):
        """Write a row for each update: the seconds since the one before."""

        def on_train_begin(self, *_, **__):
            self.before = time.perf_counter()

        def on_log(self, args, state, control, logs, **__):
            if state.is_world_process_zero and "completions/mean_length" in logs:
                now = time.perf_counter()
                row = {
                    "step": state.global_step,
                    "seconds": now - self.before,
                    "length": logs["completions/mean_length"],
                }
                self.before = now
                print(json.dumps(row), file=rows, flush=True)

    def even_tokens(completion_ids, **_):
        return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    attention = {} if own.no_hub_kernels or not gpu else {"attn_implementation": "kernels-community/flash-attn2"}
    settings = GRPOConfig(
        output_dir=str(own.save),
        max_steps=own.updates,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        learning_rate=1e-6,
        beta=0.0,
        temperature=1.0,
        num_generations=own.num_generations,
        max_completion_length=own.max_completion_length,
        per_device_train_batch_size=own.micro_batch_size,
        gradient_accumulation_steps=own.batch_size // own.micro_batch_size,
        gradient_checkpointing=False,
        ddp_find_unused_parameters=False,
        use_liger_kernel=own.liger,
        bf16=gpu,
        use_cpu=not gpu,
        use_vllm=gpu,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=True,
        vllm_gpu_memory_utilization=own.engine_share,
        vllm_max_model_length=own.max_prompt_length + own.max_completion_length,
        # No importance weights for the engine's mismatch, as in the other runs: they cost TRL another forward pass.
        vllm_importance_sampling_correction=False,
        # Without float32 master weights: TRL then has less to do than the others.
        model_init_kwargs={"dtype": "bfloat16", "use_kernels": bool(attention), **attention} if gpu else None,
        generation_kwargs=None if gpu else {"min_new_tokens": own.max_completion_length},
    )
    data = load_dataset("json", data_files=str(own.data), split="train")
    GRPOTrainer(
        model=str(own.model), reward_funcs=even_tokens, args=settings, train_dataset=data, callbacks=[Steps()]
    ).train()


if __name__ == "__main__":
    main()
