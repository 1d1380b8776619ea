"""What a user can get wrong, as a table for test_bad_input.py: (name, what to make of the bench, what is to be said).

A case is a function that spoils something on a ``Bench`` and returns flags (they follow the good ones, so they win). The
pattern is a regular expression for the message: its cause, and then its cure.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GOOD = """--transformer-impl local --micro-batch-size 8 --num-generations 4 --train-iters 2 --lr 1e-3 --beta 0
 --max-prompt-length 8 --max-completion-length 4 --reward-funcs exact_match --reward-timeout 0.3 --vllm-enforce-eager
 --mismatch-sample-rate 0"""
ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(1, 9)]


@dataclass
class Bench:
    """A directory with all that a good run needs; methods add something bad and return the flags that name it."""

    root: Path
    model: Path  # a Hugging Face directory
    run: Path  # the --save directory of a finished run of this model
    world_size: int = 1
    good: list[str] = field(init=False)

    def __post_init__(self):
        self.train = self.write("train.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))
        self.save = self.root / "save"
        self.save.mkdir()
        (self.save / "metrics.jsonl").write_text('{"iteration": 1, "reward/mean": 0.5}\n')  # an earlier run's
        self.good = f"{GOOD} --load-hf {self.model} --train-data-path {self.train} --save {self.save}".split()

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.root / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def without(self, flag: str, values: int = 1) -> list[str]:
        """Take a flag out of the good ones."""
        at = self.good.index(flag)
        del self.good[at : at + 1 + values]
        return []

    def data(self, *lines: str, name: str = "bad.jsonl") -> list[str]:
        return ["--train-data-path", str(self.write(name, "".join(line + "\n" for line in lines)))]

    def plugin(self, body: str, name: str = "bad") -> list[str]:
        head = "from megatron_grpo.rewards.registry import register_reward\n"
        path = self.write("plugin.py", f"{head}@register_reward('bad')\ndef bad(sample):\n    {body}\n")
        return ["--external-plugins", str(path), "--reward-funcs", name]

    def hf(self, *leave_out: str) -> Path:
        """A copy of the model, some files left out."""
        return Path(shutil.copytree(self.model, self.root / "hf", ignore=shutil.ignore_patterns(*leave_out)))

    def config(self, **changes) -> list[str]:
        """A copy of the model whose config.json says something else; None takes a key out."""
        file = self.hf() / "config.json"
        config = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
        return ["--load-hf", str(file.parent)]

    def tensors(self, change: Callable[[dict], object]) -> list[str]:
        """A copy of the model in whose tensors something is changed."""
        file = self.hf() / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        return ["--load-hf", str(file.parent)]

    def checkpoint(self) -> Path:
        """A copy of the finished run, to be spoilt."""
        return Path(shutil.copytree(self.run, self.root / "run"))

    def resume(self, *flags: str) -> list[str]:
        """A copy of the finished run, to be resumed."""
        run = str(self.checkpoint())
        return ["--load", run, "--save", run, "--train-iters", "4", *flags]


Case = tuple[str, Callable[[Bench], list[str]], str]


def flags(words: str) -> Callable[[Bench], list[str]]:
    return lambda bench: words.split()


def ranks(world_size: int, words: str) -> Callable[[Bench], list[str]]:
    def case(bench: Bench) -> list[str]:
        bench.world_size = world_size
        return words.split()

    return case


FLAGS: list[Case] = [
    ("unknown flag", flags("--num-generation 4"), r"unknown flag --num-generation; did you mean --num-generations\?"),
    ("flag without value", flags("--lr"), r"argument --lr: expected one argument"),
    ("flag with text for a number", flags("--lr fast"), r"argument --lr: invalid float value: 'fast'"),
    ("flag with an unknown choice", flags("--loss-type ppo"), r"--loss-type: invalid choice: 'ppo' \(choose from .*dapo"),
    ("stray value", flags("--seed 1 2"), r"unexpected argument '2': .*one value too many"),
    ("no learning rate", lambda b: b.without("--lr"), r"--lr is missing: give the learning rate"),
    ("no data", lambda b: b.without("--train-data-path"), r"--train-data-path is missing: name the files"),
    ("no reward", lambda b: b.without("--reward-funcs"), r"--reward-funcs is missing: name at least one"),
    ("no model", lambda b: b.without("--load-hf"), r"--num-layers is missing: give it, --load-hf, or a checkpoint"),
    ("no length", lambda b: b.without("--train-iters"), r"--train-iters is missing: give it, or --num-epochs"),
    ("two lengths", flags("--num-epochs 1"), r"--train-iters and --num-epochs cannot both be given"),
    ("rewards and weights", flags("--reward-weights 1 2"), r"--reward-weights has 2 values, --reward-funcs 1: give one"),
    ("too long for the model", flags("--max-completion-length 600"), r"\(8\).*\(600\) = 608 .*embeddings \(512\)"),
    ("mixture of experts", flags("--num-experts 8"), r"--num-experts is 8: .*not supported yet: train a dense model"),
    ("greedy training", flags("--temperature 0"), r"--temperature \(0.0\) must be greater than 0"),
    (
        "held-out data that nobody reads",
        lambda b: ["--valid-data-path", str(b.train)],
        r"--valid-data-path needs --eval-interval or --val-before-train",
    ),
    (
        "no Transformer Engine",
        flags("--transformer-impl transformer_engine"),
        r"needs a GPU and Transformer Engine.*give --transformer-impl local",
    ),
    ("no wandb", flags("--wandb-project p"), r"--wandb-project p needs the package wandb.*pip install wandb, or leave"),
]

ARITHMETIC: list[Case] = [
    (
        "world size and parallel sizes",
        ranks(16, "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4"),
        r"world_size \(16\) must be divisible by the product of all model parallel sizes \(32\): TP 8 x PP 4 x CP 1",
    ),
    (
        "global batch and micro-batch",
        ranks(2, "--global-batch-size 24"),
        r"global_batch_size \(24\) must be divisible by micro_batch_size \(8\) x dp_size \(2\) = 16",
    ),
    (
        "global batch and groups",
        flags("--global-batch-size 8 --num-generations 16"),
        r"global_batch_size \(8\) must be divisible by num_generations \(16\): it holds whole groups",
    ),
    (
        "generation batch and steps",
        flags("--generation-batch-size 20 --steps-per-generation 3"),
        r"generation_batch_size \(20\) must be divisible by steps_per_generation \(3\)",
    ),
    (
        "three sizes that disagree",
        flags("--global-batch-size 8 --steps-per-generation 2 --generation-batch-size 24"),
        r"\(24\) must be global_batch_size \(8\) x steps_per_generation \(2\) = 16; any two of them give the third",
    ),
    ("group of one", flags("--num-generations 1"), r"--num-generations \(1\) must be at least 2"),
    ("nothing in a batch", flags("--micro-batch-size 0"), r"--micro-batch-size \(0\) must be greater than 0"),
    (
        "token budget below one sequence",
        lambda b: b.without("--micro-batch-size") + "--global-batch-size 8 --max-tokens-per-microbatch 11".split(),
        r"\(8\) \+ --max-completion-length \(4\) = 12 must be at most --max-tokens-per-microbatch \(11\)",
    ),
    (
        "updates and rollouts",
        flags("--steps-per-generation 4"),
        r"--train-iters \(2\) must be divisible by the updates per rollout \(4 = ",
    ),
    (
        "engine and world size",
        ranks(3, "--vllm-tensor-parallel-size 2"),
        r"world_size \(3\) must be divisible by --vllm-tensor-parallel-size \(2\)",
    ),
    (
        "heads and tensor parallelism",
        ranks(8, "--tensor-model-parallel-size 8"),
        r"--num-attention-heads \(4\) must be divisible by tensor parallel size \(8\)",
    ),
    (
        "layers and stages",
        ranks(3, "--pipeline-model-parallel-size 3"),
        r"--num-layers \(2\) must be divisible by pipeline parallel size \(3\)",
    ),
]


def _no_template(bench: Bench) -> list[str]:
    directory = bench.hf("chat_template*")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return ["--tokenizer-model", str(directory), *bench.data('{"messages": [{"role": "user", "content": "1"}]}')]


DATA: list[Case] = [
    ("missing file", flags("--train-data-path gone.jsonl"), r"gone\.jsonl: no such file"),
    ("directory for a file", lambda b: ["--train-data-path", str(b.root)], r"read from \.jsonl or \.parquet files"),
    ("other kind of file", lambda b: b.data("prompt", name="p.csv"), r"p\.csv: prompts are read from \.jsonl or"),
    ("empty file", lambda b: b.data(), r"no prompts: .*bad\.jsonl has no rows"),
    (
        "row without prompt",
        lambda b: b.data('{"prompt": "1"}', '{"question": "2", "answer": "2"}'),
        r'bad\.jsonl:2: no prompt: expected a column "prompt" \(--prompt-key\) or "messages", found question, answer',
    ),
    (
        "row with a number for a prompt",
        lambda b: b.data('{"prompt": "1"}', "", '{"prompt": 2}'),
        r'bad\.jsonl:3: "prompt" must be a string or a list of messages, found a number',
    ),
    (
        "invalid JSON",
        lambda b: b.data('{"prompt": "1"}', '{"prompt": "1'),
        r"bad\.jsonl:2: not valid JSON \(.*\); expected one object per line",
    ),
    ("not an object", lambda b: b.data('["1"]'), r"bad\.jsonl:1: expected a JSON object, found a list"),
    (
        "not UTF-8",
        lambda b: ["--train-data-path", str(b.write("bad.jsonl", b'{"prompt": "caf\xe9"}\n'))],
        r"bad\.jsonl:1: not valid JSON \('utf-8' codec",
    ),
    ("empty prompt", lambda b: b.data('{"prompt": " "}'), r'bad\.jsonl:1: "prompt" is empty'),
    (
        "message without content",
        lambda b: b.data('{"messages": [{"role": "user"}]}'),
        r'bad\.jsonl:1: message 1 of "messages" has no "content"',
    ),
    (
        "conversation that is over",
        lambda b: b.data('{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}'),
        r"bad\.jsonl:1: .*ends with an assistant message; .*leave it out",
    ),
    ("no chat template", _no_template, r"bad\.jsonl:1: .*the tokenizer in .* has none; give .* plain strings or add a"),
    (
        "damaged Parquet",
        lambda b: b.data("PAR1 and no more", name="bad.parquet"),
        r"bad\.parquet: not a readable Parquet file",
    ),
    (
        "all prompts too long",
        lambda b: ["--truncation-strategy", "delete", *b.data('{"prompt": "123456789"}')],
        r"no prompts left: all 1 are longer than --max-prompt-length 8",
    ),
    (
        "less data than one rollout",
        lambda b: b.without("--train-iters") + ["--num-epochs", "1", *b.data('{"prompt": "1", "answer": "1"}')],
        r"--num-epochs 1.0 over 1 prompts is less than one rollout of 2 prompts: give more data or a smaller batch",
    ),
    (
        "bad held-out row",
        lambda b: ["--val-before-train", "--valid-data-path", *b.data("{}")[1:]],
        r'bad\.jsonl:1: no prompt: expected a column "prompt"',
    ),
]


def _damaged_tokenizer(bench: Bench) -> list[str]:
    directory = bench.hf()
    os.truncate(directory / "tokenizer.json", 500)
    return ["--tokenizer-model", str(directory)]


TOKENIZER: list[Case] = [
    ("no directory", flags("--tokenizer-model gone"), r"--tokenizer-model gone: no such directory.*fetch a model"),
    (
        "no tokenizer in it",
        lambda b: ["--tokenizer-model", str(b.hf("tokenizer*"))],
        r"--tokenizer-model .*hf: the directory has none of tokenizer\.json",
    ),
    ("damaged", _damaged_tokenizer, r"--tokenizer-model .*hf: transformers cannot read this tokenizer"),
    (
        "not a SentencePiece model",
        lambda b: ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(b.train)],
        r"--tokenizer-model .*train\.jsonl: not a SentencePiece model",
    ),
    (
        "larger than the vocabulary",
        lambda b: b.config(vocab_size=200),
        r"the tokenizer has 258 entries but the model's vocabulary holds 200; give the tokenizer that belongs",
    ),
]


def _plugin_text(text: str) -> Callable[[Bench], list[str]]:
    return lambda b: ["--external-plugins", str(b.write("plugin.py", text)), "--reward-funcs", "mine"]


REWARDS: list[Case] = [
    ("unknown", flags("--reward-funcs exact_macth"), r'no reward function "exact_macth" \(did you mean "exact_match"\?\)'),
    ("plugin missing", flags("--external-plugins gone.py"), r"--external-plugins gone\.py: no such file"),
    ("plugin with a syntax error", _plugin_text("x = 1\ndef f(:\n"), r"plugin\.py: line 2: SyntaxError: .*def f\(:"),
    ("plugin that fails", _plugin_text("import gone\n"), r"plugin\.py: line 1: ModuleNotFoundError: .*'gone'"),
    (
        "plugin that registers nothing",
        _plugin_text("def mine(sample):\n    return 1.0\n"),
        r'no reward function "mine".*comes from --external-plugins FILE and @register_reward',
    ),
]

# These show in the first rollout of a run that is resumed.
FAILING_REWARDS: list[Case] = [
    ("always raises", lambda b: b.resume(*b.plugin("raise ValueError('no key')")), r'"bad" failed on all 8 .*ValueError: no key'),
    ("always hangs", lambda b: b.resume(*b.plugin("while True: pass")), r'"bad" .*timed out.*longer than 0\.3 s \(--reward-timeout\)'),
    ("always gives a string", lambda b: b.resume(*b.plugin("return '1'")), r'"bad" failed on all 8 .*returned .1., no finite number'),
    ("always dies", lambda b: b.resume(*b.plugin("import os; os._exit(3)")), r'"bad" failed on all 8 .*ended its process.*status 3'),
    (
        "gold that is no mathematics",
        lambda b: b.resume("--reward-funcs", "accuracy", *b.data(*['{"prompt": "1", "answer": "blue"}'] * 8)),
        r"\"accuracy\" on .*bad\.jsonl:\d: .*no mathematical expression in .*'blue'; for text use exact_match",
    ),
    (
        "no gold",
        lambda b: b.resume(*b.data(*['{"prompt": "1", "solution": "1"}'] * 8)),
        r'"exact_match" on .*bad\.jsonl:\d: the row has no "answer" to compare with, only prompt, solution',
    ),
]


def _truncated(bench: Bench) -> list[str]:
    directory = bench.hf()
    os.truncate(directory / "model.safetensors", 50_000)
    return ["--load-hf", str(directory)]


def _missing_shard(bench: Bench) -> list[str]:
    directory = bench.hf("model.safetensors")
    names = load_file(bench.model / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return ["--load-hf", str(directory)]


def _pickle_only(bench: Bench) -> list[str]:
    directory = bench.hf("*.safetensors")
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04")
    return ["--load-hf", str(directory)]


def _not_json(bench: Bench) -> list[str]:
    directory = bench.hf()
    (directory / "config.json").write_text("{")
    return ["--load-hf", str(directory)]


HUGGING_FACE: list[Case] = [
    ("no directory", flags("--load-hf gone"), r"gone/config\.json does not exist: gone is not a Hugging Face model dir"),
    ("no config.json", lambda b: ["--load-hf", str(b.hf("config.json"))], r"hf/config\.json does not exist"),
    ("config.json is not JSON", _not_json, r"hf/config\.json is not valid JSON"),
    (
        "unknown architecture",
        lambda b: b.config(architectures=["MambaForCausalLM"], model_type="mamba"),
        r"architecture MambaForCausalLM, which is not supported; supported are: .*Qwen3ForCausalLM",
    ),
    ("config.json lacks a size", lambda b: b.config(intermediate_size=None), r"config\.json lacks 'intermediate_size'"),
    (
        "sliding window",
        lambda b: b.config(use_sliding_window=True, sliding_window=8, max_window_layers=0, layer_types=None),
        r"sliding-window attention .*set use_sliding_window to false",
    ),
    ("quantised", lambda b: b.config(quantization_config={"quant_method": "fp8"}), r"\(fp8\): use the checkpoint in bf16"),
    ("truncated file", _truncated, r"hf/model\.safetensors is truncated or no safetensors file"),
    ("missing shard", _missing_shard, r"model-00001-of-00002\.safetensors does not exist .*shard .* is missing"),
    ("no weights", lambda b: ["--load-hf", str(b.hf("*.safetensors"))], r"hf holds neither model\.safetensors nor"),
    ("pickle only", _pickle_only, r"pytorch_model\.bin is a pickle, .*: save the model as safetensors"),
    (
        "extra tensor",
        lambda b: b.tensors(lambda t: t.update({"vision.weight": torch.zeros(2)})),
        r"hf holds the tensor vision\.weight, for which the family has no place",
    ),
    (
        "missing tensor",
        lambda b: b.tensors(lambda t: t.pop("model.norm.weight")),
        r"hf lacks the tensor model\.norm\.weight",
    ),
    (
        "wrong shape",
        lambda b: b.tensors(lambda t: t.update({"model.norm.weight": torch.zeros(32)})),
        r"tensor model\.norm\.weight has shape \(32,\), but the configuration says \(64,\)",
    ),
    (
        "flags that contradict config.json",
        flags("--hidden-size 128"),
        r"--hidden-size is 128, but .*config\.json says 64: leave the flag out",
    ),
]


def _truncated_checkpoint(bench: Bench) -> list[str]:
    words = bench.resume()
    data = next((bench.root / "run" / "iter_0000002").glob("*.distcp"))
    os.truncate(data, data.stat().st_size - 100)
    return words


def _latest(text: str) -> Callable[[Bench], list[str]]:
    def case(bench: Bench) -> list[str]:
        words = bench.resume()
        (bench.root / "run" / "latest_checkpointed_iteration.txt").write_text(text)
        return words

    return case


def _foreign_export(bench: Bench) -> list[str]:
    (bench.root / "thesis").mkdir()
    (bench.root / "thesis" / "chapter1.tex").write_text("years of work")
    return ["--save-hf", str(bench.root / "thesis")]


def _fewer_rows(bench: Bench) -> list[str]:
    return bench.resume(*bench.data(*(json.dumps(row) for row in ROWS[:6])))


CHECKPOINTS: list[Case] = [
    ("truncated file", _truncated_checkpoint, r"iter_0000002 is damaged: .*distcp has \d+ bytes instead of \d+; to go back"),
    ("latest names nothing", _latest("7"), r"names iteration 7, but .*iter_0000007 does not exist: .*one of iter_0000002"),
    ("latest is no number", _latest("seven"), r"holds 'seven', not an iteration: write the number of one of iter_0000002"),
    ("the iteration's directory", lambda b: b.without("--load-hf", 1) + ["--pretrained-checkpoint", str(b.run / "iter_0000002"), "--use-checkpoint-args", "--tokenizer-model", str(b.model)], r"it is a checkpoint itself: give "),
    (
        "flags that contradict the checkpoint",
        lambda b: b.resume("--num-layers", "4"),
        r"--num-layers is 4, but the checkpoint .*run says 2: leave the flag out",
    ),
    (
        "another architecture",
        lambda b: b.without("--load-hf") + ["--pretrained-checkpoint", str(b.run), "--tokenizer-model", str(b.model)]
        + "--model-family qwen3 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 258 --swiglu".split()
        + "--max-position-embeddings 512 --normalization RMSNorm --disable-bias-linear --qk-layernorm".split(),
        r"is of another architecture: hidden_size is 64 there and 32 here.*Give flags that agree, or --use-checkpoint-args",
    ),
    ("resume with other data", _fewer_rows, r"belongs to other data: .*number of prompts\) was 8 and is now 6; restore it"),
    ("resume with another seed", lambda b: b.resume("--seed", "5"), r"--seed was 1234 and is now 5; restore it, or"),
    (
        "resume without the distributed optimizer's state",
        lambda b: b.resume("--use-distributed-optimizer"),
        r"was written with .*, this run has DistributedOptimizer: give the same",
    ),
    ("no reference checkpoint", flags("--beta 0.1 --ref-load gone"), r"no checkpoint in gone: there is no latest_"),
    ("--save is a file", lambda b: ["--save", str(b.train)], r"--save .*train\.jsonl .*: "),
    ("--save below a file", lambda b: ["--save", str(b.train / "run")], r"--save .*train\.jsonl/run .*: "),
    ("--save where nobody may write", flags("--save /proc/run"), r"--save /proc/run .*: "),
    ("export over something else", _foreign_export, r"--save-hf .*thesis .*no Hugging Face model directory: choose another"),
    ("two sources of weights", lambda b: ["--pretrained-checkpoint", str(b.run)], r"--load-hf and --pretrained-checkpoint"),
]


def _tool(script: str, words: Callable[[Bench], list]) -> Callable[[Bench], list[str]]:
    return lambda bench: [script, *map(str, words(bench))]


GSM8K, CONVERT, TINY = "tools/data/gsm8k.py", "tools/checkpoint/convert.py", "tools/make_tiny_model.py"
PLOT, ARITHMETIC_TOOL = "tools/plot_metrics.py", "tools/data/arithmetic.py"

TOOLS: list[Case] = [
    ("gsm8k: no file", _tool(GSM8K, lambda b: ["--input", "gone.jsonl", "--output", b.root / "o.jsonl"]), r"gone\.jsonl: no such file"),
    ("gsm8k: no number", _tool(GSM8K, lambda b: ["--input", b.data('{"question": "1+1?", "answer": "#### 2"}', '{"question": "?", "answer": "two"}')[1], "--output", b.root / "o.jsonl"]), r"bad\.jsonl:2: \"answer\" must end with \"#### NUMBER\", found 'two'"),
    ("gsm8k: no question", _tool(GSM8K, lambda b: ["--input", b.data('{"answer": "#### 2"}')[1], "--output", b.root / "o.jsonl"]), r'bad\.jsonl:1: expected a text in "question", found null'),
    ("gsm8k: other ending", _tool(GSM8K, lambda b: ["--input", b.data('{"question": "1+1?", "answer": "#### 2"}')[1], "--output", b.root / "o.txt"]), r"o\.txt: the name must end in \.jsonl or \.parquet"),
    ("arithmetic: shares", _tool(ARITHMETIC_TOOL, lambda b: ["--save", b.root / "a", "--shares", 1, 1, 1, 1]), r"--shares .*four numbers >= 0 with the sum 1"),
    ("convert: no directory", _tool(CONVERT, lambda b: ["--hf-to-megatron", "--load", "gone", "--save", b.root / "c"]), r"gone/config\.json does not exist"),
    ("convert: onto itself", _tool(CONVERT, lambda b: ["--hf-to-megatron", "--load", b.model, "--save", b.model]), r"--save and --load are the same directory"),
    ("convert: no direction", _tool(CONVERT, lambda b: ["--load", b.model, "--save", b.root / "c"]), r"one of the arguments --hf-to-megatron --megatron-to-hf is required"),
    ("convert: over a run", _tool(CONVERT, lambda b: ["--hf-to-megatron", "--load", b.model, "--save", b.checkpoint()]), r"holds a training run's checkpoints: choose another --save"),
    ("convert: nothing to export", _tool(CONVERT, lambda b: ["--megatron-to-hf", "--load", b.root, "--save", b.root / "c"]), r"no checkpoint in .*: there is no latest"),
    ("convert: over something else", _tool(CONVERT, lambda b: ["--megatron-to-hf", "--load", b.run, "--save", _foreign_export(b)[1]]), r"thesis .*no Hugging Face model directory: choose"),
    ("convert: save is a file", _tool(CONVERT, lambda b: ["--hf-to-megatron", "--load", b.model, "--save", b.train]), r"train\.jsonl"),
    ("convert: dtype", _tool(CONVERT, lambda b: ["--hf-to-megatron", "--load", b.tensors(lambda t: t.pop("model.norm.weight"))[1], "--save", b.root / "c"]), r"lacks the tensor model.norm"),
    ("tiny model: heads", _tool(TINY, lambda b: ["--save", b.root / "m", "--num-query-groups", 3, "--steps", 0, "--threads", 1]), r"--num-attention-heads \(4\) must be a multiple of --num-query-groups \(3\)"),
    ("tiny model: 0 heads", _tool(TINY, lambda b: ["--save", b.root / "m", "--num-query-groups", 0, "--steps", 0, "--threads", 1]), r"--num-query-groups"),
    ("tiny model: layers", _tool(TINY, lambda b: ["--save", b.root / "m", "--num-layers", 0, "--steps", 0, "--threads", 1]), r"--num-layers"),
    ("tiny model: no data", _tool(TINY, lambda b: ["--save", b.root / "m", "--threads", 1]), r"the warm-up needs --train and --valid; --steps 0"),
    ("tiny model: unknown characters", _tool(TINY, lambda b: ["--save", b.root / "m", "--train", b.data('{"prompt": "one", "answer": "1"}')[1], "--valid", b.train, "--threads", 1]), r"bad\.jsonl:1: .*has characters that the tokenizer lacks; --tokenizer bytes"),
    ("tiny model: threads", _tool(TINY, lambda b: ["--save", b.root / "m", "--steps", 0, "--threads", 0]), r"--threads"),
    ("tiny model: save is a file", _tool(TINY, lambda b: ["--save", b.train, "--steps", 0, "--threads", 1]), r"train.jsonl"),
    ("plot: empty run", _tool(PLOT, lambda b: [b.write("metrics.jsonl", ""), "--output", b.root / "p.png"]), r"metrics\.jsonl is empty: the run has not finished its first update"),
    ("plot: no run", _tool(PLOT, lambda b: ["gone", "--output", b.root / "p.png"]), r"gone .*: give the --save directory of a run"),
    ("plot: not metrics", _tool(PLOT, lambda b: [b.train, "--output", b.root / "p.png"]), r"train\.jsonl:1 is no row of metrics"),
    ("plot: other ending", _tool(PLOT, lambda b: [b.save, "--output", b.root / "p.doc"]), r"p\.doc cannot be written"),
]
