"""User errors, in tables for test_bad_input.py: name, function of a ``Bench``, error message.

The function makes an invalid input and returns flags; they follow the valid flags and override them. The message is a
regular expression: the cause, then the remedy unless it is obvious.
"""

import json
import os
from collections.abc import Callable

import torch
from bad_input_bench import ROWS, Bench
from safetensors.torch import load_file

Make = Callable[[Bench], list[str]]
Case = tuple[str, Make, str]


def flags(words: str, world_size: int = 1) -> Make:
    def make(bench: Bench) -> list[str]:
        bench.world_size = world_size
        return words.split()

    return make


def data(*lines: str, **options: str) -> Make:
    return lambda bench: bench.data(*lines, **options)


def config(**changes: object) -> Make:
    return lambda bench: bench.config(changes)


def plugin(text: str) -> Make:
    return lambda bench: bench.plugin(text)


FLAGS: list[Case] = [
    ("unknown flag", flags("--num-generation 4"), r"unknown flag --num-generation; did you mean --num-generations\?"),
    ("flag without value", flags("--lr"), r"argument --lr: expected one argument"),
    ("text for a number", flags("--lr fast"), r"argument --lr: invalid float value: 'fast'"),
    ("not a number", flags("--beta nan"), r"--beta is nan: give a finite number"),
    ("infinite", flags("--reward-weights inf"), r"--reward-weights is inf: give a finite number"),
    (
        "no JSON",
        flags("--vllm-engine-kwargs max_num_seqs=3"),
        r"--vllm-engine-kwargs: 'max_num_seqs=3' is not a JSON object, such as '\{\"name\": 1\}' in quotes",
    ),
    (
        "a file for a text",
        flags("--system-prompt prompts/system.txt"),
        r'--system-prompt prompts/system\.txt names a file, .*: --system-prompt "\$\(cat prompts/system\.txt\)"',
    ),
    ("unknown choice", flags("--loss-type ppo"), r"--loss-type: invalid choice: 'ppo' \(choose from .*dapo"),
    ("stray value", flags("--seed 1 2"), r"unexpected argument '2': .*one value too many"),
    ("negative seed", flags("--seed -1"), r"--seed \(-1\) must lie between 0 and"),
    ("impossible Adam", flags("--adam-beta2 2"), r"--adam-beta2 \(2.0\) must lie between 0 and 1"),
    ("negative decay", flags("--weight-decay -1"), r"--weight-decay \(-1.0\) must lie between 0 and"),
    ("no learning rate", lambda b: b.without("--lr"), r"--lr is missing: give the learning rate"),
    ("no data", lambda b: b.without("--train-data-path"), r"--train-data-path is missing: name the files"),
    ("no reward", lambda b: b.without("--reward-funcs"), r"--reward-funcs is missing: name at least one"),
    ("no model", lambda b: b.without("--load-hf"), r"--num-layers is missing: give it, --load-hf, or a checkpoint"),
    ("no end", lambda b: b.without("--train-iters"), r"--train-iters is missing: give it, or --num-epochs"),
    ("two ends", flags("--num-epochs 1"), r"--train-iters and --num-epochs cannot both be given"),
    ("rewards and weights", flags("--reward-weights 1 2"), r"--reward-weights has 2 values, .* 1: give one each"),
    ("too long", flags("--max-completion-length 600"), r"\(8\).*\(600\) = 608 .*--max-position-embeddings \(512\)"),
    ("experts", flags("--num-experts 8"), r"--num-experts is 8, but .*config.json says None: leave the flag out"),
    ("greedy training", flags("--temperature 0"), r"--temperature \(0.0\) must lie between 0.01 and 2"),
    ("unread data", flags("--valid-data-path v.jsonl"), r"--valid-data-path needs --eval-interval or --val-before"),
    ("endless warm-up", flags("--lr-warmup-iters 9"), r"--lr-warmup-iters \(9\) must be .*less than .*\(2\)"),
    (
        "warm-up longer than the epochs",
        lambda b: b.without("--train-iters", "--num-epochs", 1, "--lr-warmup-iters", 9),
        r"--lr-warmup-iters \(9\) must be .*less than the updates .*\(4\)",
    ),
    (
        "no Transformer Engine",
        flags("--transformer-impl transformer_engine"),
        r"needs a GPU, and this machine has none: give --transformer-impl local",
    ),
    ("no wandb", flags("--wandb-project p"), r"--wandb-project p needs the package wandb.*pip install wandb, or leave"),
]

BATCHES: list[Case] = [
    (
        "world size and parallel sizes",
        flags("--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4", 16),
        r"world_size \(16\) must be divisible by the product of all model parallel sizes \(32\): TP 8 x PP 4 x CP 1",
    ),
    (
        "global batch and micro-batch",
        flags("--global-batch-size 24", 2),
        r"global_batch_size \(24\) must be divisible by micro_batch_size \(8\) x dp_size \(2\) = 16",
    ),
    (
        "global batch and groups",
        flags("--num-generations 16"),
        r"global_batch_size \(8\) must be divisible by num_generations \(16\), because .*: give a multiple of 16",
    ),
    (
        "generation batch and steps",
        flags("--generation-batch-size 20 --steps-per-generation 3"),
        r"generation_batch_size \(20\) must be divisible by steps_per_generation \(3\)",
    ),
    (
        "three sizes that disagree",
        flags("--global-batch-size 8 --steps-per-generation 2 --generation-batch-size 24"),
        r"\(24\) must be global_batch_size \(8\) x steps_per_generation \(2\) = 16: leave one of the three out",
    ),
    ("group of one", flags("--num-generations 1"), r"--num-generations \(1\) must be at least 2"),
    ("empty batch", flags("--micro-batch-size 0"), r"--micro-batch-size \(0\) must be greater than 0"),
    (
        "budget below a sequence",
        lambda b: b.without("--micro-batch-size", "--global-batch-size", 8, "--max-tokens-per-microbatch", 11),
        r"\(4\) are 12 tokens, padded for .* 1: --max-tokens-per-microbatch \(11\) must be at least 12",
    ),
    ("updates", flags("--steps-per-generation 4"), r"\(2\) must be divisible by the updates per rollout \(4 = "),
    ("engines", flags("--vllm-tensor-parallel-size 2", 3), r"\(3\) must be divisible by --vllm-tensor-.* \(2\)"),
    ("heads and TP", flags("--tensor-model-parallel-size 8", 8), r"\(4\) must be divisible by tensor .*\(8\)"),
    ("layers and PP", flags("--pipeline-model-parallel-size 3", 3), r"\(2\) must be divisible by pipeline .*\(3\)"),
]

OVER = '{"prompt": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}'


def no_template(bench: Bench) -> list[str]:
    directory = bench.hf("chat_template*")
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in settings.items() if key != "chat_template"}))
    row = '{"messages": [{"role": "user", "content": "1"}]}'
    return ["--tokenizer-model", str(directory), *bench.data(row)]


DATA: list[Case] = [
    ("missing file", flags("--train-data-path gone.jsonl"), r"gone\.jsonl: no such file"),
    (
        "directory",
        lambda b: ["--train-data-path", str(b.root)],
        r"is a directory, .*: give the \.jsonl, \.parquet or \.arrow files",
    ),
    ("other kind of file", data("1", name="p.csv"), r"p\.csv: a run reads no \.csv: python tools/data/own_rows\.py"),
    (
        "a row's own temperature",
        data(
            '{"prompt": "1", "answer": "1"}', '{"prompt": "2", "answer": "1", "sampling_params": {"temperature": 0.5}}'
        ),
        r"bad\.jsonl:2: temperature of sampling_params cannot differ by row",
    ),
    (
        "curriculum without pass rates",
        lambda b: [*b.data('{"prompt": "1", "answer": "1"}'), "--curriculum"],
        r'bad\.jsonl:1: "pass_rate" is None: --curriculum',
    ),
    (
        "nothing but bad rows",
        lambda b: [*b.data('{"prompt": 1}'), "--bad-rows", "skip"],
        r'no prompts left: left out 1 of 1 prompts that are invalid: .*bad\.jsonl:1: "prompt" must be a string',
    ),
    (
        "weights for some",
        lambda b: ["--train-data-path", "0.5", str(b.train), str(b.train)],
        r"a weight before each file",
    ),
    (
        "weight of nothing",
        lambda b: ["--train-data-path", "0", str(b.train)],
        r"weights must be finite and greater than 0",
    ),
    (
        "weights and epochs",
        lambda b: b.without("--train-iters", "--num-epochs", 1, "--train-data-path", 1, b.train),
        r"--num-epochs and weights in --train-data-path cannot both be given: .*; give --train-iters",
    ),
    (
        "weights of held-out prompts",
        lambda b: ["--valid-data-path", "1", str(b.train), "--eval-interval", "2"],
        r"--valid-data-path has weights, .*: leave them out",
    ),
    (
        "a role that nobody has",
        data('{"prompt": [{"role": "human", "content": "1"}]}'),
        r"bad\.jsonl:1: \"role\" of message 1 of \"prompt\" is 'human': expected one of system, ",
    ),
    (
        "tools without a chat",
        data('{"prompt": "1", "tools": [{"name": "f"}]}'),
        r'jsonl:1: "tools" needs a prompt of chat',
    ),
    (
        "a key twice",
        data('{"prompt": "1", "prompt": "2"}'),
        r'bad\.jsonl:1: not valid JSON \(the key "prompt" occurs twice',
    ),
    ("empty file", data(), r"no prompts: .*bad\.jsonl has no rows: give files that have some"),
    (
        "row without prompt",
        data('{"prompt": "1", "answer": "1"}', '{"q": 2}'),
        r'jsonl:2: no prompt: expected .*"prompt".*, found q',
    ),
    (
        "prompt of a wrong type",
        data('{"prompt": "1", "answer": "1"}', "", '{"prompt": 2}'),
        r'bad\.jsonl:3: "prompt" must be a string or a list of messages, found a number',
    ),
    (
        "invalid JSON",
        data('{"prompt": "1", "answer": "1"}', '{"prompt": "1'),
        r"bad\.jsonl:2: not valid JSON \(.*\); expected one object per line",
    ),
    ("endless JSON", data("[" * 100_000), r"bad\.jsonl:1: not valid JSON"),
    ("not an object", data('["1"]'), r"bad\.jsonl:1: expected a JSON object, found a list"),
    (
        "not UTF-8",
        lambda b: ["--train-data-path", str(b.write("bad.jsonl", b'{"prompt": "caf\xe9"}\n'))],
        r"bad\.jsonl:1: not valid JSON \('utf-8' codec",
    ),
    ("empty prompt", data('{"prompt": " "}'), r'bad\.jsonl:1: "prompt" is empty'),
    ("no content", data('{"messages": [{"role": "user"}]}'), r'bad\.jsonl:1: message 1 of "messages" has no "content"'),
    ("nothing to answer", data(OVER), r"bad\.jsonl:1: .*ends with an assistant message, .*: leave it out"),
    (
        "no chat template",
        no_template,
        r"bad\.jsonl:1: .*the tokenizer in .* has none; give .* plain strings .*, or a template",
    ),
    (
        "a system prompt without a chat template",
        lambda b: [*no_template(b), *b.data('{"prompt": "1", "answer": "1"}'), "--system-prompt", "Think."],
        r"bad\.jsonl:1: .* has none; give the prompts as plain strings \(and no --system-prompt\), or a template",
    ),
    ("damaged Parquet", data("PAR1", name="bad.parquet"), r"bad\.parquet: not a readable Parquet file"),
    (
        "prompt too long",
        data('{"prompt": "1", "answer": "1"}', '{"prompt": "123456789"}'),
        r"bad\.jsonl:2: the prompt has 9 tokens, more than --max-prompt-length 8; raise it, or give --truncation-",
    ),
    (
        "all prompts too long",
        lambda b: [*b.data('{"prompt": "123456789", "answer": "1"}'), "--truncation-strategy", "delete"],
        r"no prompts left: left out 1 of 1 prompts that are longer than --max-prompt-length 8 \(raise it, or give",
    ),
    (
        "less than one rollout",
        lambda b: b.without("--train-iters", "--num-epochs", 1, *b.data('{"prompt": "1", "answer": "1"}')),
        r"--num-epochs 1.0 over 1 prompts is less than one rollout of 2 prompts: give more data or a smaller batch",
    ),
    (
        "bad held-out row",
        lambda b: ["--val-before-train", "--valid-data-path", *b.data('{"answer": "1"}')[1:]],
        r'bad\.jsonl:1: no prompt: expected a column "prompt"',
    ),
]

TOKENIZERS: list[Case] = [
    ("missing", flags("--tokenizer-model gone"), r"--tokenizer-model gone: no such directory.*download the model"),
    (
        "not in there",
        lambda b: ["--tokenizer-model", str(b.hf("tokenizer*"))],
        r"has none of tokenizer.*; copy the model's there, or",
    ),
    ("damaged", lambda b: ["--tokenizer-model", b.hf_file("tokenizer.json", "{")[1]], r"cannot read this tokenizer"),
    (
        "no vocabulary of tiktoken",
        lambda b: ["--tokenizer-type", "TikTokenizer", "--tokenizer-model", str(b.train)],
        r"--tokenizer-model .*train\.jsonl: TikTokenizer reads Megatron-LM's vocabulary file, .*a \.tiktoken file or a",
    ),
    ("tiktoken's flag", flags("--tiktoken-pattern v1"), r"--tiktoken-pattern needs --tokenizer-type TikTokenizer"),
    (
        "not SentencePiece",
        lambda b: ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(b.train)],
        r"--tokenizer-model .*train\.jsonl: not a SentencePiece model",
    ),
    (
        "larger than the vocabulary",
        config(vocab_size=200),
        r"the tokenizer has 258 entries but the model's vocabulary holds 200; give the tokenizer of the model",
    ),
]

REWARDS: list[Case] = [
    (
        "no answers",
        lambda b: b.data('{"prompt": "1", "gold": "1"}'),
        r'^pretrain_grpo.py: error: .*bad\.jsonl:1: reward "exact_match": the row has no answer to compare with',
    ),
    (
        "no held-out answers",
        lambda b: ["--val-before-train", "--valid-data-path", *b.data('{"prompt": "1"}')[1:]],
        r'error: .*bad\.jsonl:1: reward "exact_match": the row has no answer to compare with',
    ),
    (
        "gold that is no mathematics",
        lambda b: ["--reward-funcs", "accuracy", *b.data('{"prompt": "1", "answer": "\\\\frac{1}{"}')],
        r'bad\.jsonl:1: reward "accuracy": the gold answer .* cannot be compared with, because its braces do not match',
    ),
    (
        "no gold in a later row",
        data('{"prompt": "1", "answer": "1"}', '{"prompt": "1", "gold": "1"}'),
        r'bad\.jsonl:2: reward "exact_match": the row has no answer to compare with: .*found prompt, gold',
    ),
    ("unknown", flags("--reward-funcs exact_macth"), r'"exact_macth" \(did you mean "exact_match"\?\)'),
    (
        "no route",
        lambda b: [*b.data('{"prompt": "1", "answer": "1"}'), "--reward-routing", "x=exact_match"],
        r":1: --reward-routing has no \"data_source\" None, only x",
    ),
    ("no plugin", flags("--external-plugins gone.py"), r"--external-plugins gone\.py: no such file"),
    ("syntax error", plugin("def f(:\n"), r"plugin\.py: line 2: SyntaxError: .*def f\(:"),
    ("missing import", plugin("import gone\n"), r"plugin\.py: line 2: ModuleNotFoundError: .*'gone'"),
    ("exit", plugin("import sys\nsys.exit(0)\n"), r"plugin\.py: line 3: SystemExit: 0"),
    (
        "nothing registered",
        plugin("def mine(sample):\n    return 1.0\n"),
        r'mine: \S+plugin\.py defines the function and does not register it: write @register_reward\("mine"\) above',
    ),
    (
        "another name registered",
        plugin("@register_reward('own')\ndef own(sample):\n    return 1.0\n"),
        r'unknown reward function "mine".*by @register_reward in a file of --external-plugins',
    ),
]


def index(value: object) -> Make:
    """Return a function that copies the model with an index, without weights; a string is the file of all tensors."""

    def make(bench: Bench) -> list[str]:
        names = load_file(bench.model / "model.safetensors")
        text = json.dumps({"weight_map": dict.fromkeys(names, value) if isinstance(value, str) else value})
        return bench.hf_file("model.safetensors.index.json", text, "model.safetensors")

    return make


def truncated_weights(bench: Bench) -> list[str]:
    directory = bench.hf()
    bench.truncate(directory / "model.safetensors")
    return ["--load-hf", str(directory)]


WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None}

HUGGING_FACE: list[Case] = [
    (
        "no directory",
        flags("--load-hf models/Qwen3-0.6B"),
        r"there is no models/Qwen3-0\.6B\. A run downloads nothing: hf download OWNER/NAME --local-dir models/Qwen3-0",
    ),
    (
        "name of the hub",
        flags("--load-hf Qwen/Qwen3-0.6B"),
        r"0\.6B is not a Hugging Face model directory\. A run downloads nothing: hf download Qwen/Qwen3-0\.6B",
    ),
    (
        "Megatron checkpoints",
        lambda b: ["--load-hf", str(b.finished)],
        r"is not a Hugging Face model directory, but one of Megatron checkpoints: give it to --pretrained-",
    ),
    ("no config.json", lambda b: ["--load-hf", str(b.hf("config.json"))], r"hf/config\.json .*: .* not a Hugging Face"),
    ("config.json is not JSON", lambda b: b.hf_file("config.json", "{"), r"hf/config\.json is not valid JSON"),
    (
        "unknown architecture",
        config(architectures=["MambaForCausalLM"], model_type="mamba"),
        r"architecture MambaForCausalLM, which is not supported; supported are: .*Qwen3ForCausalLM",
    ),
    ("no size", config(intermediate_size=None), r"config\.json lacks 'intermediate_size'"),
    ("size of a wrong type", config(num_hidden_layers="2"), r"config\.json has a value of the wrong type"),
    ("sliding window in a layer", config(**WINDOW), r"in some layers only, .*set use_sliding_window to false"),
    (
        "quantised",
        config(quantization_config={"quant_method": "awq"}),
        r"'awq'; supported are .*: give the model's checkpoint in",
    ),
    ("truncated", truncated_weights, r"hf/model\.safetensors is truncated or not a safetensors file"),
    (
        "missing shard",
        index("model-1.safetensors"),
        r"model-1\.safetensors does not exist .*a shard .* is missing; copy or download",
    ),
    ("index of a wrong type", index(["a"]), r"model\.safetensors\.index\.json is not an index of tensors"),
    ("no weights", lambda b: ["--load-hf", str(b.hf("*.safetensors"))], r"hf holds neither model\.safetensors nor"),
    ("pickle only", lambda b: b.hf_file("pytorch_model.bin", "", "*.safetensors"), r"pickle, .*: save .*safetensors"),
    (
        "extra tensor",
        lambda b: b.tensors(lambda tensors: tensors.update({"vision.weight": torch.zeros(2)})),
        r"hf holds the tensor vision\.weight, which is not in the model family",
    ),
    (
        "missing tensor",
        lambda b: b.tensors(lambda tensors: tensors.pop("model.norm.weight")),
        r"hf lacks the tensor model\.norm\.weight",
    ),
    (
        "wrong shape",
        lambda b: b.tensors(lambda tensors: tensors.update({"model.norm.weight": torch.zeros(32)})),
        r"tensor model\.norm\.weight has shape \(32,\), but the configuration says \(64,\)",
    ),
    (
        "contradiction",
        flags("--hidden-size 128"),
        r"--hidden-size is 128, but .*config\.json says 64: leave the flag out",
    ),
]


def truncated_checkpoint(bench: Bench) -> list[str]:
    words = bench.resume()
    bench.truncate(next(bench.root.glob("run/iter_0000002/*.distcp")))
    return words


def latest(text: str) -> Make:
    def make(bench: Bench) -> list[str]:
        words = bench.resume()
        bench.write("run/latest_checkpointed_iteration.txt", text)
        return words

    return make


def smaller_model(bench: Bench) -> list[str]:
    sizes = "--model-family qwen3 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 258 --swiglu"
    kind = "--max-position-embeddings 512 --normalization RMSNorm --disable-bias-linear --qk-layernorm"
    names = ["--pretrained-checkpoint", bench.finished, "--tokenizer-model", bench.model]
    return bench.without("--load-hf", *names, *sizes.split(), *kind.split())


CHECKPOINTS: list[Case] = [
    (
        "truncated",
        truncated_checkpoint,
        r"iter_0000002 is damaged: .*distcp has \d+ bytes instead of \d+; to use another",
    ),
    ("latest names nothing", latest("7"), r"names iteration 7, but .*iter_0000007 does not exist; .*: iter_0000002"),
    ("latest is no number", latest("x"), r"holds 'x', not an iteration; in .*: iter_0000002"),
    (
        "latest is no number that Python reads",
        latest("9" * 5000),
        r"holds '9{40}', not an iteration; in .*: iter_0000002",
    ),
    (
        "contradiction",
        lambda b: b.resume("--num-layers", "4"),
        r"--num-layers is 4, but the checkpoint .*run says 2: leave the flag out",
    ),
    (
        "another architecture",
        smaller_model,
        r"hidden_size is 64 in the checkpoint and 32 in this run.*, or --use-checkpoint-args",
    ),
    (
        "other data",
        lambda b: b.resume(*b.data(*map(json.dumps, ROWS[:6]))),
        r"belongs to other data: --train-data-path \(number of rows\) was 8 and is now 6; restore it, or restart",
    ),
    (
        "another reuse",
        lambda b: b.resume("--num-iterations", "4"),
        r"checkpoint of iteration 2, which is not a multiple of the updates per rollout \(4 = --steps-per",
    ),
    ("other seed", lambda b: b.resume("--seed", "5"), r"--seed was 1234 and is now 5; restore it, or restart the data"),
    (
        "Adam, then SGD",
        lambda b: b.resume("--optimizer", "sgd"),
        r"was written with FP32Optimizer, this run has FP32Optimizer of SGD: give the same --optimizer, .* without its",
    ),
    (
        "other optimizer",
        lambda b: b.resume("--use-distributed-optimizer"),
        r"was written with .*, this run has DistributedOptimizer: give the same",
    ),
    (
        "a Hugging Face directory",
        lambda b: b.without("--load-hf", "--pretrained-checkpoint", b.model, "--tokenizer-model", b.model),
        r"no checkpoint in \S+model: there is no latest_\S+; it is a Hugging Face directory, for --load-hf",
    ),
    ("no reference", flags("--beta 0.1 --ref-load gone"), r"no checkpoint in gone: there is no latest_"),
    (
        "two sources",
        lambda b: ["--pretrained-checkpoint", str(b.finished)],
        r"--load-hf and --pretrained-checkpoint cannot both be given: the initial weights have one origin",
    ),
    (
        "over a run",
        lambda b: ["--save", str(b.run())],
        r"--save .*run holds the checkpoint of iteration 2 .*: add --load",
    ),
    ("save to a file", lambda b: ["--save", str(b.train)], r"--save .*train\.jsonl .*; choose another directory"),
    ("save below a file", lambda b: ["--save", f"{b.train}/run"], r"--save .*jsonl/run .*; choose another directory"),
    ("save in /proc", flags("--save /proc/run"), r"--save /proc/run .*; choose another directory"),
    ("full disk", lambda b: os.symlink("/dev/full", b.save / "args.json.tmp") or [], r"No space left.*make room there"),
    (
        "curves to a file",
        lambda b: ["--tensorboard-dir", str(b.train)],
        r"--tensorboard-dir .* choose another directory",
    ),
    ("foreign export", lambda b: ["--save-hf", str(b.thesis())], r"--save-hf .*thesis .*: choose another directory"),
    (
        "export onto the base",
        lambda b: ["--save-hf", str(b.model)],
        r"--save-hf (\S+) contains \1, which the export would replace: choose another directory",
    ),
]


def failing(body: str, *words: str) -> Make:
    """Return a function that resumes the finished run with a reward function of this ``body``."""
    return lambda b: b.resume(*words, *b.plugin(f"@register_reward('mine')\ndef mine(sample):\n    {body}\n"))


FAILING_REWARDS: list[Case] = [
    ("always raises", failing("raise ValueError('no key')"), r'"mine" failed on all 8 .*jsonl:\d.*ValueError: no key'),
    (
        "always hangs",
        failing("while True: pass", "--reward-timeout", "0.3", "--reward-retries", "0"),
        r'"mine" returned no value and timed out on 4 samples; .*longer than 0\.3 s \(--reward-timeout\)',
    ),
    ("always gives text", failing("return '1'"), r"\"mine\" failed on all 8 .*returned '1', not a finite number"),
    (
        "always dies",
        failing("import os; os._exit(3)", "--reward-retries", "0"),
        r'"mine" failed on all 8 .*ended its process.*status 3',
    ),
]


def tool(script: str, words: Callable[[Bench], list]) -> Make:
    return lambda bench: [script, *map(str, words(bench))]


def gsm8k(row: str, output: str = "out.jsonl") -> Make:
    good = '{"question": "1+1?", "answer": "#### 2"}'
    return tool("tools/data/gsm8k.py", lambda b: ["--input", b.data(good, row)[1], "--output", b.root / output])


def convert(words: Callable[[Bench], list], direction: str = "--hf-to-megatron") -> Make:
    return tool("tools/checkpoint/convert.py", lambda b: [direction, *words(b)])


def tiny(words: Callable[[Bench], list]) -> Make:
    return tool("tools/make_tiny_model.py", lambda b: ["--save", b.root / "m", "--threads", 1, *words(b)])


def plot(words: Callable[[Bench], list], output: str = "out.png") -> Make:
    return tool("tools/plot_metrics.py", lambda b: [*words(b), "--output", b.root / output])


TOOLS: list[Case] = [
    ("gsm8k: no number", gsm8k('{"question": "?", "answer": "2"}'), r'jsonl:2: "answer" must end with "#### NUMBER"'),
    ("gsm8k: no question", gsm8k('{"answer": "#### 2"}'), r'bad\.jsonl:2: expected a text in "question", found null'),
    ("gsm8k: ending", gsm8k("", "out.txt"), r"out\.txt: the name must end in \.jsonl or \.parquet"),
    (
        "arithmetic: shares",
        tool("tools/data/arithmetic.py", lambda b: ["--save", b.root / "a", "--shares", 1, 1, 1, 1]),
        r"--shares 1.0 .*: give four numbers >= 0 with the sum 1",
    ),
    ("convert: no model", convert(lambda b: ["--load", "gone", "--save", b.root / "c"]), r"there is no gone"),
    ("convert: onto itself", convert(lambda b: ["--load", b.model, "--save", b.model]), r"are the same directory"),
    ("convert: over a run", convert(lambda b: ["--load", b.model, "--save", b.run()]), r"give another --save"),
    (
        "convert: no checkpoint",
        convert(lambda b: ["--load", b.root, "--save", b.root / "c"], "--megatron-to-hf"),
        r"no checkpoint in .*: there is no latest_checkpointed_iteration\.txt",
    ),
    (
        "convert: over other things",
        convert(lambda b: ["--load", b.finished, "--save", b.thesis()], "--megatron-to-hf"),
        r"thesis .*not a Hugging Face model directory: choose another directory",
    ),
    (
        "convert: a name that is too long",
        convert(lambda b: ["--load", b.model, "--save", b.root / ("a" * 300)]),
        r"File name too long: .*: correct the path, or its permissions",
    ),
    ("tiny model: heads", tiny(lambda b: ["--num-query-groups", 3]), r"\(4\) must be a multiple of .*\(3\)"),
    ("tiny model: layers", tiny(lambda b: ["--num-layers", 0]), r"--num-layers \(0\) must be at least 1"),
    ("tiny model: no data", tiny(lambda b: []), r"the warm-up needs --train and --valid; or give --steps 0"),
    ("tiny model: onto a file", tiny(lambda b: ["--save", b.train, "--steps", 0]), r"--save .*train\.jsonl is a file"),
    ("plot: empty", plot(lambda b: [b.write("e.jsonl", "")]), r"e\.jsonl is empty: the run has not finished its first"),
    ("plot: no run", plot(lambda b: ["gone"]), r"gone cannot be read .*: give the --save directory of a run"),
    ("plot: no metrics", plot(lambda b: [b.train]), r"train\.jsonl:1 is not a row of a run"),
    ("plot: ending", plot(lambda b: [b.save], "out.doc"), r"--output .*out\.doc cannot be written: .*supported"),
]
