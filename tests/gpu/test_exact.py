"""--exact-log-probs on a GPU: log-probabilities of engine and trainer are equal, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch import REPO, cache_flags, torchrun
from models import make
from run_files import metrics_of

if not torch.cuda.is_available():  # the kernels need Triton
    pytest.skip("needs a GPU", allow_module_level=True)

from planted import FIRST

from megatron_grpo.models.exact import head, kernels

FLAGS = """--bf16 --transformer-impl local --exact-log-probs --temperature 1 --beta 0 --max-prompt-length 200
    --max-completion-length 64 --vllm-max-num-seqs 128""".split()
UPDATES = """--global-batch-size 64 --num-generations 8 --lr 1e-3 --no-save-hf
    --use-distributed-optimizer""".split()
OTHER = "--temperature 0.7 --max-tokens-per-microbatch 4096"
DEVICE = torch.device("cuda", 0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).bfloat16()


@pytest.mark.parametrize(("columns", "depth"), [(1152, 896), (896, 4864), (6144, 2560), (4100, 250)])
def test_products_do_not_depend_on_other_rows(columns, depth):
    x, weight, bias = random(3000, depth), random(columns, depth), random(columns)
    whole = kernels.linear(x, weight, bias)
    for first, count in ((5, 1), (77, 3), (3, 64), (9, 200), (31, 257), (7, 1000)):
        assert torch.equal(kernels.linear(x[first : first + count], weight, bias), whole[first : first + count])
    logits = kernels.linear(x, weight, dtype=torch.float32)
    for first, count in ((5, 1), (9, 200), (0, 2999), (1, 1500)):
        part = x[first : first + count].clone()  # no rows follow in its storage
        assert torch.equal(kernels.linear(part, weight, dtype=torch.float32), logits[first : first + count])
    wanted = x.float() @ weight.float().T + bias.float()
    assert (whole.float() - wanted).norm() < 5e-3 * wanted.norm()


def test_products_do_not_depend_on_other_columns():
    """Tensor-parallel ranks of engine and trainer may divide the vocabulary at other tokens, which both pad."""
    x, weight = random(700, 896), random(5000, 896)
    whole = kernels.linear(x, weight, dtype=torch.float32, multiple=64)
    for first, last in ((0, 2500), (2500, 5000), (2528, 5000), (2560, 4999), (64, 73)):
        shard = weight[first:last].clone()
        for rows in (700, 64, 1):
            assert torch.equal(kernels.linear(x[:rows], shard, dtype=torch.float32), whole[:rows, first:last])


@pytest.mark.parametrize("size", [64, 896, 2560, 4096])
def test_the_norm_of_a_sum_is_that_of_the_rounded_sum(size):
    """An engine adds and norms in one launch where the first layer of a pipeline stage norms alone."""
    x, residual, weight = random(1000, size), random(1000, size), random(size)
    normed, total, _ = kernels.add_and_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, kernels.rms_norm(total, weight, 1e-6)[0])
    for first, count in ((8, 1), (16, 5), (1, 300)):
        rows = slice(first, first + count)
        assert torch.equal(kernels.add_and_norm(x[rows], residual[rows], weight, 1e-6)[0], normed[rows])
    wanted = torch.nn.functional.rms_norm(total.float(), (size,), weight.float(), 1e-6)
    assert (normed.float() - wanted).norm() < 5e-3 * wanted.norm()


@pytest.mark.parametrize(("groups", "each", "size"), [(2, 7, 64), (8, 4, 128), (4, 1, 64)])
def test_norms_and_rotations_do_not_depend_on_the_order_of_heads(groups, each, size):
    """The trainer has a key and a value after the queries of each group, the engine all queries, then all keys."""
    heads, positions, weight = random(300, groups, each + 2, size), torch.randperm(300, device=DEVICE), random(size)
    both = torch.cat([heads[:, :, :-2].flatten(1), heads[:, :, -2].flatten(1)], 1).unflatten(1, (-1, size))[:, None]
    split = groups * each
    for ours, theirs in ((heads[:, :, :-2], both[:, :, :split]), (heads[:, :, -2:-1], both[:, :, split:])):
        normed = kernels.head_norm(ours, weight, 1e-6).flatten(1)
        assert torch.equal(normed, kernels.head_norm(theirs, weight, 1e-6).flatten(1))
        assert torch.equal(normed[77:78], kernels.head_norm(theirs[77:78], weight, 1e-6).flatten(1))
        wanted = torch.nn.functional.rms_norm(ours.float(), (size,), weight.float(), 1e-6).flatten(1)
        assert (normed - wanted).norm() < 5e-3 * wanted.norm()
    inv_freq = 1e4 ** -(torch.arange(0, size, 2) / size)
    table = kernels.rotation_table(inv_freq, 300, 1.0, DEVICE)
    queries, keys = kernels.rotate(heads[:, :, :-2], heads[:, :, -2:-1], positions, table)
    again = kernels.rotate(both[:, :, :split], both[:, :, split:], positions.int(), table)
    assert torch.equal(queries, again[0]) and torch.equal(keys, again[1])
    pairs = torch.complex(*both[:, 0].double().chunk(2, -1))
    pairs = pairs * torch.exp(1j * positions[:, None] * inv_freq.double().to(DEVICE))[:, None]
    wanted = torch.cat([pairs.real, pairs.imag], -1)
    assert (torch.cat([queries, keys], 1) - wanted).norm() < 5e-3 * wanted.norm()


SHAPES = (14, 2, 64), (32, 8, 128), (4, 4, 64), (40, 8, 128), (16, 1, 128), (64, 2, 64), (80, 2, 64), (64, 1, 128)


@pytest.mark.parametrize(("heads", "groups", "size"), SHAPES)
def test_attention_of_decode_steps_is_that_of_prompts(heads, groups, size):
    """Of parts of prompts, too, which divide into other programs than the whole ones do."""
    assert kernels.steps_agree(heads, groups, size, DEVICE) == (heads // groups <= kernels.STEP_ROWS)
    lengths, block = [1, 63, 64, 65, 300, 1000, 15], 16
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    q, k, v = random(sum(lengths), heads, size), random(sum(lengths), groups, size), random(sum(lengths), groups, size)
    of_lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    rows = (starts[:-1, None] + torch.arange(max(lengths), device=DEVICE)).clamp(max=sum(lengths) - 1).int()
    pages = kernels.Pages(starts, of_lengths, rows, 1)
    out, log_sum = kernels.attention(q, k[:, None], v[:, None], pages, size**-0.5)
    shape = max(lengths), max(lengths), 0.0, True, False
    wanted = torch.ops.aten._flash_attention_forward(q, k, v, starts, starts, *shape, scale=size**-0.5)
    assert (out.float() - wanted[0].float()).norm() < 5e-3 * wanted[0].float().norm()
    assert (log_sum - wanted[1]).abs().max() < 1e-3

    counts = [-(-length // block) for length in lengths]
    order = torch.randperm(sum(counts) + 3).tolist()
    cache = torch.full((len(order), groups, block, 2 * size), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for s, count in enumerate(counts):
        for b in range(count):
            table[s, b] = number = order.pop()
            first, length = int(starts[s]) + b * block, min(block, lengths[s] - b * block)
            both = torch.cat([k[first : first + length], v[first : first + length]], -1)
            cache[number, :, :length] = both.transpose(0, 1)
    keys, values = cache.transpose(1, 2).split(size, -1)
    for before_end in (0, 1, 7):
        own = [s for s, length in enumerate(lengths) if length > before_end]
        at = (starts[1:].long() - 1 - before_end)[own]
        each = kernels.Pages(
            torch.arange(len(own) + 1, device=DEVICE).int(), of_lengths[own] - before_end, table[own].to(DEVICE), block
        )
        for longest in (None, 1):  # in programs of `ROWS` and of `STEP_ROWS`
            steps, _ = kernels.attention(q[at], keys, values, each, size**-0.5, longest=longest)
            assert torch.equal(steps, out[at])
        padded = each._replace(starts=each.starts.clamp(max=3))  # a CUDA graph of more sequences
        steps, _ = kernels.attention(q[at[:3]], keys, values, padded, size**-0.5, longest=1)
        assert torch.equal(steps, out[at[:3]])
    for most in (2, 37):  # queries of a part
        counts = [min(most, length) for length in lengths]
        at = torch.cat([torch.arange(end - n, end) for end, n in zip(starts[1:].tolist(), counts, strict=True)])
        firsts = torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()
        each = kernels.Pages(firsts, of_lengths, table.to(DEVICE), block)
        for longest in (None, most):
            parts, sums = kernels.attention(q[at], keys, values, each, size**-0.5, longest=longest)
            assert torch.equal(parts, out[at]) and torch.equal(sums, log_sum[:, at])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_do_not_depend_on_other_rows(temperature):
    """A row has several programs, the last one a part."""
    columns = 2 * kernels.LOGITS + 1000
    hidden, weight = random(600, 896), random(columns, 896) * 896**-0.5
    ids = torch.randint(0, columns, (600,), device=DEVICE)
    logits = head.float32_logits(hidden, weight)
    wanted = (logits / temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    whole = head.token_log_probs(logits, ids, temperature)
    assert (whole - wanted).abs().max() < 1e-4
    for first, count in ((3, 1), (5, 64), (8, 256), (40, 300)):
        rows = slice(first, first + count)
        part = head.token_log_probs(head.float32_logits(hidden[rows], weight), ids[rows], temperature)
        assert torch.equal(part, whole[rows])
    several = torch.cat([torch.randint(0, columns, (600, 2 * kernels.IDS), device=DEVICE), ids[:, None]], 1)
    found = kernels.token_log_probs(logits, several)  # which have been divided
    assert torch.equal(found[:, -1], whole)
    assert (found - logits.log_softmax(-1).gather(1, several)).abs().max() < 1e-4


@pytest.mark.alone
def test_engine_and_trainer_are_equal_and_planted_differences_are_found(tmp_path):
    model = make(tmp_path / "model", "qwen3", 10.0)
    output = torchrun(1, "tests/gpu/planted_worker.py", "--load-hf", model, *FLAGS, *cache_flags(256))
    found = json.loads(next(line for line in output.splitlines() if line.startswith('{"steps"')))
    assert len(found["steps"]) == 6 and all(found["steps"].values()), found
    assert found["mismatch"] == 0
    assert found["first"] == {"": None, **FIRST}


def check_a_run(root: Path, ranks: int, updates: int, flags: str, runs: int = 1, shape: str = "qwen3") -> None:
    """Updates of an untrained model with a large learning rate: its weights change in each of them.

    Each of several ``runs`` resumes the one before.
    """
    sizes = "--steps 0 --hidden-size 128 --ffn-hidden-size 256 --kv-channels 64 --max-position-embeddings 512".split()
    for script, *words in (
        ("data/arithmetic.py", "--save", root / "data", "--digits", "2", "--reversed"),
        ("make_tiny_model.py", "--save", root / "model", "--shape", shape, *sizes),
    ):
        subprocess.run([sys.executable, REPO / "tools" / script, *map(str, words)], check=True, capture_output=True)
    places = "--load-hf", root / "model", "--train-data-path", root / "data/train.jsonl", "--save", root / "run"
    plugins = "--reward-funcs", "even_tokens", "--external-plugins", REPO / "tools/benchmark/even_tokens.py"
    words = [*FLAGS, *UPDATES, "--train-iters", updates, *cache_flags(64), *places, *plugins, *flags.split()]
    for _ in range(runs):
        torchrun(ranks, "pretrain_grpo.py", *words, "--load", root / "run", "--exit-interval", updates // runs)
    rows = metrics_of(root / "run")
    assert [row["iteration"] for row in rows] == [*range(1, updates + 1)]
    assert all(row["mismatch/max_abs"] == 0 and row["mismatch/kl"] == 0 for row in rows)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("shape", "runs", "flags"),
    [
        ("qwen3", 1, "--micro-batch-size 16"),
        ("qwen3", 2, f"{OTHER} --steps-per-generation 2"),
        ("llama", 1, "--micro-batch-size 16"),
    ],
)
def test_a_run_has_no_mismatch(tmp_path, shape, runs, flags):
    check_a_run(tmp_path, 1, 4, flags, runs, shape)


@pytest.mark.alone
@pytest.mark.gpus(2)
@pytest.mark.parametrize("flags", ["--micro-batch-size 16", f"{OTHER} --sequence-parallel"])
def test_two_tensor_parallel_ranks_have_no_mismatch(tmp_path, flags):
    """Both ranks have tokens of the vocabulary, which is smaller than its usual padding."""
    layout = "--tensor-model-parallel-size 2 --vllm-tensor-parallel-size 2 --make-vocab-size-divisible-by 1"
    check_a_run(tmp_path, 2, 2, f"{layout} {flags}")
