"""What computes on a GPU with kernels of its own, against plain float32 or float64."""

from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():  # the modules below prepare a machine without a GPU
    pytest.skip("needs a GPU", allow_module_level=True)

import numpy as np
from attention_worker import GPU_CASES, NAMES, Alone, module_results, reference
from launch import FLASH_4, torchrun
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_grpo.models import divergence
from megatron_grpo.models.attention import FlashPackedAttention, PackedAttention, visible_keys
from megatron_grpo.models.divergence import Head, WholeVocabulary, vocab_parallel_divergence, vocab_parallel_top_k
from megatron_grpo.models.gpu_kernels import HeadsOfPack, RootMeanSquareNorm, swiglu_gradient
from megatron_grpo.models.head import vocab_parallel_log_probs
from megatron_grpo.models.layer_specs import bias_dropout_add
from megatron_grpo.models.norm import BranchNorm
from megatron_grpo.models.rope import cosines_and_sines, rotate_pack
from megatron_grpo.models.row_copies import RowCopies
from megatron_grpo.models.self_attention import Norm, queries_keys_values
from megatron_grpo.models.softcap import soft_capped_attention
from megatron_grpo.rollout.weight_sync.nccl import send_packed
from megatron_grpo.vision.attention import attend


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over norm."""
    return float((got.double() - want.double()).norm() / want.double().norm())


# torch compiles the capped kernel for each of these cases, up to 40 s: one worker has them all, others the other cases.
CAPPED_ON_ONE_WORKER = pytest.mark.xdist_group("capped")
KINDS = PackedAttention, pytest.param(FlashPackedAttention, marks=FLASH_4)
UNCAPPED = [name for name, case in GPU_CASES.items() if case.cap is None]
PROBLEMS = [
    *(
        pytest.param(name, PackedAttention, marks=() if case.cap is None else CAPPED_ON_ONE_WORKER)
        for name, case in GPU_CASES.items()
    ),
    *(pytest.param(name, FlashPackedAttention, marks=FLASH_4) for name in UNCAPPED),  # caps have a kernel of their own
]


@pytest.mark.parametrize(("name", "kind"), PROBLEMS)
def test_attention(name, kind):
    """Output and gradients in bf16 against a plain masked softmax in float32 of the same numbers."""
    case = GPU_CASES[name]
    got = module_results(case, ProcessGroupCollection(tp=Alone(), cp=Alone()), "cuda", torch.bfloat16, kind)
    want = reference(case, torch.bfloat16, "cuda", torch.float32)
    errors = {label: relative(a, b) for label, a, b in zip(NAMES, got, want, strict=False)}
    assert all(error < 2e-2 for error in errors.values()), errors  # `max` passes over NaN


@pytest.mark.gpus(2)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_with_context_parallelism(kind):
    """The worker asserts; here it must have come to the end."""
    output = torchrun(2, "tests/distributed/attention_worker.py", "--cuda", kind.__name__)
    names = GPU_CASES if kind is PackedAttention else UNCAPPED
    assert output.count("cp 2  ") == sum(all(n % 4 == 0 for n in GPU_CASES[name].lengths) for name in names), output


@CAPPED_ON_ONE_WORKER
def test_soft_capped_attention_stays_compiled():
    """Packs of any length, with and without a window, with gradients and without: never all scores of a pack.

    16 heads of 16k tokens would have 8 GiB of scores, in bf16.
    """
    rng = np.random.default_rng(0)
    torch._dynamo.reset()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lengths = [rng.integers(1, 4000, rng.integers(1, 8)).tolist() for _ in range(8)] + [[3], [70, 9], [128], [16384]]
    for pack, grad in ((pack, grad) for pack in lengths for grad in (True, False)):
        cu = tuple(np.cumsum([0, *pack]).tolist())
        q, k, v = (torch.randn(cu[-1], h, 64, device="cuda", dtype=torch.bfloat16) for h in (16, 8, 8))
        for left in (-1, 1023):
            leaves = [x.clone().requires_grad_(grad) for x in (q, k, v)]
            with torch.set_grad_enabled(grad):
                out = soft_capped_attention(*leaves, visible_keys(cu, 1, 0, left, q.device), 0.125, 50.0)
            if grad:
                out.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2 << 30


@pytest.mark.parametrize("latent", [False, True], ids=["halves", "pairs (latent attention)"])
def test_rotation(latent):
    """The compiled rotation against the formula in float64, with gradients, for heads of which a part is rotated.

    With (x, y) a pair of channels and a an angle: (x cos a - y sin a, x sin a + y cos a), RoFormer (arXiv:2104.09864),
    equation 34. It is compiled once for all packs and numbers of heads.
    """
    torch._dynamo.reset()
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    kind = {"rotary_interleaved": False, "mla_rotary_interleaved": latent, "mscale": 1.0}
    for lengths, heads in (([700, 300], 8), ([700, 300], 2), ([3], 8), ([2, 99, 156], 2)):
        cu_seqlens, tokens = torch.tensor([0, *np.cumsum(lengths)]), sum(lengths)
        x = torch.randn(tokens, heads, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        angles = torch.randn(max(lengths), 1, 1, 32, device="cuda").repeat(1, 1, 1, 2)
        out = rotate_pack(x, cu_seqlens, angles, cp_group=Alone(), **kind)
        first, second = (x[..., 0:64:2], x[..., 1:64:2]) if latent else (x[..., :32], x[..., 32:64])
        of_tokens = torch.cat([angles[:length, :, 0, :32] for length in lengths]).double()
        sine, cosine = of_tokens.sin(), of_tokens.cos()
        want = [first.double() * cosine - second.double() * sine, first.double() * sine + second.double() * cosine]
        want = torch.cat([*want, x[..., 64:].double()], -1)
        weights = torch.randn_like(want)
        gradients = [torch.autograd.grad((y.double() * weights).sum(), x)[0] for y in (out, want)]
        assert relative(out, want) < 1e-2 and relative(*gradients) < 1e-2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled + 1


@pytest.mark.parametrize("normed", [False, True])
def test_queries_keys_values(normed):
    """The compiled kernels in bf16 against the same function in float64, which the unit tests compare with others."""
    torch._dynamo.reset()
    compiled = torch.compile(queries_keys_values)
    for tokens in (1000, 257):
        heads = torch.randn(tokens, 4, 6, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weights = [torch.randn(128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2 * normed)]
        freqs = torch.randn(tokens, 1, 1, 64, device="cuda").repeat(1, 1, 1, 2)
        rows = torch.arange(tokens, device="cuda")
        results = []
        for function, dtype in ((compiled, torch.bfloat16), (queries_keys_values, torch.float64)):
            norms = [Norm(weight.to(dtype), 1e-6, False) for weight in weights] or [None, None]
            angles = cosines_and_sines(freqs.double() if dtype == torch.float64 else freqs, rows, 1.0, False, dtype)
            results.append(function(heads.to(dtype), *norms, *angles, False))
        factors = [torch.randn_like(part) for part in results[1]]
        gradients = [
            torch.autograd.grad(
                sum((p.double() * f).sum() for p, f in zip(parts, factors, strict=True)), [heads, *weights]
            )
            for parts in results
        ]
        for got, want in (*zip(*results, strict=True), *zip(*gradients, strict=True)):
            assert relative(got, want) < 1e-2


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("top_k", [None, 8])
def test_head(temperature, cap, top_k):
    """Log-probabilities and entropies of sharp logits (standard deviation 6), and gradients, against float64; over the
    whole vocabulary, and over up to 8 kept tokens.
    """
    tokens, hidden_size, vocabulary = 300, 512, 32000
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (
        torch.randn(shape, generator=generator, device="cuda").mul(std).bfloat16().requires_grad_()
        for shape, std in (((tokens, hidden_size), 1.0), ((vocabulary, hidden_size), 6 / hidden_size**0.5))
    )
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator, device="cuda")
    upstream = torch.randn(2, tokens, generator=generator, device="cuda")
    kept, inside = None, torch.ones(tokens, vocabulary, dtype=torch.bool, device="cuda")
    if top_k is not None:
        drawn = torch.rand(tokens, vocabulary, generator=generator, device="cuda").topk(top_k).indices
        drawn[:, 0] = labels
        inside = torch.zeros_like(inside).scatter(1, drawn[:, : top_k - 1], True)
        kept = drawn.int()
        kept[:, -1] = -1
    got = vocab_parallel_log_probs(hidden, weight, labels, temperature, vocabulary, None, 128, cap, kept)
    got += torch.autograd.grad((torch.stack(got) * upstream).sum(), (hidden, weight))
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logits = leaves[0] @ leaves[1].T
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    log_p = (logits / temperature).masked_fill(~inside, float("-inf")).log_softmax(-1)
    want = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p.masked_fill(~inside, 0.0)).sum(-1)
    want += torch.autograd.grad((torch.stack(want) * upstream).sum(), leaves)
    for name, a, b, limit in zip("log p, entropy, d hidden, d weight".split(", "), got, want, (1e-4, 1e-4, 5e-3, 5e-3)):
        if limit < 1e-3:
            assert float((a.detach() - b).abs().max()) < limit, (
                name
            )  # nats: logits of 20 rounded to bf16 would give 0.06
        else:
            assert relative(a, b) < limit, name


def distribution(logits: torch.Tensor, temperature: float, k: int | None, chosen: torch.Tensor | None) -> torch.Tensor:
    """Log-probabilities of the ``chosen`` tokens, [t, k], and of all others together; without k those of all tokens."""
    log_p = (logits / temperature).log_softmax(-1)
    if k is None:
        return log_p
    others = log_p.scatter(1, chosen, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(1, chosen), others], 1)


def policy_and_teacher(tokens: int, vocabulary: int, sizes=(256, 384)) -> list[torch.Tensor]:
    """Hidden states and output layers in bf16, with logits of standard deviation 3."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [((n, size), std) for size in sizes for n, std in ((tokens, 1.0), (vocabulary, 3 / size**0.5))]
    return [torch.randn(shape, generator=generator, device="cuda").mul(std).bfloat16() for shape, std in shapes]


@pytest.mark.parametrize("k", [1, 32, None])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_divergence(beta, k):
    """Divergences from a teacher in bf16, and gradients, against the definition (arXiv:2306.13649) in float64."""
    tokens, vocabulary, temperature = 300, 32000, 0.8
    hidden, weight, *theirs = policy_and_teacher(tokens, vocabulary)
    hidden.requires_grad_(), weight.requires_grad_()
    upstream = torch.randn(tokens, device="cuda")
    teacher = WholeVocabulary(theirs[0], Head(theirs[1]))
    if k is not None:
        teacher = vocab_parallel_top_k(*theirs, k, temperature, vocabulary, chunk=128)
    value = vocab_parallel_divergence(hidden, weight, teacher, beta, temperature, vocabulary, chunk=128)
    got = value, *torch.autograd.grad((value * upstream).sum(), (hidden, weight))

    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    of_teacher = theirs[0].double() @ theirs[1].double().T
    chosen = None if k is None else of_teacher.topk(k).indices
    log_p = distribution(of_teacher, temperature, k, chosen)
    log_q = distribution(leaves[0] @ leaves[1].T, temperature, k, chosen)

    def kl(one, other):
        return (one.exp() * (one - other)).sum(-1)

    if beta in (0, 1):
        want_value = kl(log_p, log_q) if beta == 0 else kl(log_q, log_p)
    else:
        mixture = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
        want_value = beta * kl(log_p, mixture) + (1 - beta) * kl(log_q, mixture)
    want = want_value, *torch.autograd.grad((want_value * upstream).sum(), leaves)
    assert float((got[0] - want[0]).detach().abs().max()) < 2e-4
    assert relative(got[1], want[1]) < 5e-3 and relative(got[2], want[2]) < 5e-3


@pytest.mark.parametrize("k", [1, 32, None])
def test_divergence_in_chunks(k, monkeypatch):
    """The memory of an update is that of some chunks: the logits of a model would take 4.6 GiB."""
    monkeypatch.setattr(divergence, "KEPT", 2)
    tokens, vocabulary = 8192, 151936
    hidden, weight, *theirs = policy_and_teacher(tokens, vocabulary, (64, 64))
    hidden.requires_grad_(), weight.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    teacher = WholeVocabulary(theirs[0], Head(theirs[1]))
    if k is not None:
        teacher = vocab_parallel_top_k(*theirs, k, 1.0, vocabulary)
    vocab_parallel_divergence(hidden, weight, teacher, 0.5, 1.0, vocabulary).sum().backward()
    assert hidden.grad.isfinite().all() and torch.cuda.max_memory_allocated() - before < 4 << 30


class Received:
    """In place of vLLM's group of processes: what is broadcast is copied, on the stream of the broadcast."""

    def __init__(self):
        self.buckets: list[torch.Tensor] = []

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Keep a copy of ``tensor``."""
        self.buckets.append(tensor.clone())


def test_packed_weights_wait_for_their_last_change():
    """A change of the weights that the GPU has not made yet when the sync begins is part of what is sent.

    Many rounds: the first load kernels and take memory, for which the GPU waits anyway (and conftest.py sees to it that
    streams run side by side).
    """
    weights = {f"layer.{i}": torch.zeros(1 << 20, device="cuda") for i in range(4)}
    stale = []
    for round_number in range(1, 41):
        torch.cuda._sleep(int(5e7))  # cycles, some 25 ms
        for i, tensor in enumerate(weights.values()):
            tensor.fill_(10 * round_number + i)
        group = Received()
        send_packed(iter(weights.items()), group)
        torch.cuda.synchronize()
        sent = torch.cat([bucket.view(torch.float32) for bucket in group.buckets])
        if not torch.equal(sent, torch.cat(list(weights.values()))):
            stale.append(round_number)
    assert not stale


@pytest.mark.parametrize("width", [80, 64])  # of Qwen2.5-VL's and Qwen3-VL's heads
def test_attention_of_towers(width):
    """Windows and images of different sizes: output and gradients in bf16 against float32, a call for each segment."""
    lengths = [64, 64, 16, 4, 3000]
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")
    given = torch.randn(4, 1, 16, sum(lengths), width, device="cuda").bfloat16()
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [x.detach().to(dtype).requires_grad_() for x in given[:3]]
        out, _ = attend(None, *leaves, attention_mask=None, cu_seq_lens_q=cu, max_length_q=max(lengths))
        out.backward(given[3].transpose(1, 2).to(dtype))
        found.append([out, *(x.grad for x in leaves)])
    assert all(relative(a, b) < 2e-2 for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("normed", [True, False])
def test_heads_of_a_pack(trained, size, normed):
    """Queries, keys and values in bf16 with their gradients against the plain function in float64."""
    tokens, groups, queries = 333, 2, 3
    heads = torch.randn(tokens, groups, queries + 2, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.rand(size, device="cuda", dtype=torch.bfloat16, requires_grad=trained) for _ in range(2 * normed)]
    angles = torch.randn(tokens, 1, 1, size // 2, device="cuda").repeat(1, 1, 1, 2)
    rotation = cosines_and_sines(angles, torch.arange(tokens, device="cuda"), 1.5, False, torch.float32)
    upstream = [torch.randn(tokens, n, size, device="cuda", dtype=torch.bfloat16) for n in (6, 2, 2)]
    inputs = [heads, *weights] if trained else [heads]

    got = HeadsOfPack.apply(heads, *(weights or [None, None]), *rotation, 1e-6, 0.0)
    got_grads = torch.autograd.grad(got, inputs, upstream)
    double = [x.detach().double().requires_grad_() for x in [heads, *weights]]
    norms = [Norm(weight, 1e-6, False) for weight in double[1:]] or [None, None]
    want = queries_keys_values(double[0], *norms, *(x.double() for x in rotation), False)
    want_grads = torch.autograd.grad(want, double[: len(inputs)], [x.double() for x in upstream])
    for a, b in zip([*got, *got_grads], [*want, *want_grads], strict=True):
        assert relative(a, b) < 4e-3


@pytest.mark.parametrize("shape", [(5000, 1, 1024), (3, 1, 2560), (1, 1, 96)], ids=str)
def test_gradient_of_a_norm(shape):
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.rand(shape[-1], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream, residual = torch.randn_like(x), torch.randn_like(x)
    double = [t.detach().double().requires_grad_() for t in (x, weight)]
    out = torch.nn.functional.rms_norm(double[0], shape[-1:], double[1], 1e-6)
    for used in (1, 2):  # without and with what else reads x
        ours = RootMeanSquareNorm.apply(x, weight, 1e-6)[:used]
        got = torch.autograd.grad(ours, (x, weight), (upstream, residual)[:used])
        want = torch.autograd.grad(
            (out, double[0])[:used], double, (upstream.double(), residual.double())[:used], retain_graph=True
        )
        for a, b in zip(got, want, strict=True):
            assert relative(a, b) < 4e-3


def test_gradient_along_a_residual_connection():
    """A norm, a branch and the addition as a layer of the local specification has them, against autograd in float64."""
    norm = BranchNorm(
        SimpleNamespace(params_dtype=torch.bfloat16, sequence_parallel=False, layernorm_zero_centered_gamma=False), 256
    )
    x = torch.randn(300, 1, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    start = x * 1.0  # not a leaf, as in a layer
    out = bias_dropout_add(True, False)((torch.tanh(norm(start)), None), start, 0.0)
    assert not vars(start), "the input would hold its own graph in memory"
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, (x, norm.weight), upstream)
    double = [t.detach().double().requires_grad_() for t in (x, norm.weight)]
    branch = torch.tanh(torch.nn.functional.rms_norm(double[0], (256,), double[1], norm.eps))
    want = torch.autograd.grad(double[0] + branch, double, upstream.double())
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 2e-2  # the branch rounds its own results


@pytest.mark.parametrize("size", [24, 1500, 9728])
def test_gradient_of_swiglu(size):
    x = torch.randn(37, 1, 2 * size, device="cuda", dtype=torch.bfloat16)
    upstream = torch.randn(37, 1, size, device="cuda", dtype=torch.bfloat16)
    double = x.double().requires_grad_()
    first, second = double.chunk(2, -1)
    (want,) = torch.autograd.grad(torch.nn.functional.silu(first) * second, double, upstream.double())
    assert relative(swiglu_gradient(upstream, x), want) < 4e-3


@pytest.mark.parametrize("heads", [(8, 128), (3, 40), (20, 192), (2048,)], ids=str)
def test_sums_of_copies(heads):
    """Sums of copies in bf16: of rows without a copy, with one, and with hundreds (shared keys, tokens of experts)."""
    rows = torch.cat([torch.randint(0, 500, (3000,)), torch.full((300,), 7), torch.arange(600, 700)]).cuda()
    gradients = torch.randn(len(rows), *heads, device="cuda", dtype=torch.bfloat16)
    want = torch.zeros(900, *heads, device="cuda", dtype=torch.float64).index_add_(0, rows, gradients.double())
    got = RowCopies(rows, 900).sum(gradients)
    assert got.dtype == torch.bfloat16 and relative(got, want) < 4e-3
    assert not got[700:].any()
    none = RowCopies(rows[:0], 900)  # a rank without tokens
    assert none.sum(gradients[:0]).shape == (900, *heads) and not none.sum(gradients[:0]).any()


@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("groups", "heads", "d"), [(8, 2, 128), (2, 7, 64), (2, 8, 256)])
@pytest.mark.parametrize("parts", [1, 3])
def test_attention_of_decode_steps(groups, heads, d, parts, quantized):
    """Against float64 over each sequence alone: no token, one, a whole block or part and the next token.

    Three sequences share the blocks of a part, three others those of two parts.
    """
    pytest.importorskip("vllm")
    from megatron_grpo.rollout.vllm.decode_attention import decode_attention

    generator = torch.Generator("cuda").manual_seed(0)
    lengths, part, size = [0, 1, 16, 17, 64, 128, 129, 255, 256, 257, 383], 128 if parts > 1 else 1024, 16
    most = -(-max(lengths) // size)

    def numbers(*shape):
        drawn = torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        return drawn.to(torch.float8_e4m3fn) if quantized else drawn

    cache, query = numbers(len(lengths) * most, groups, size, 2 * d), numbers(len(lengths), groups * heads, d)
    blocks = torch.randperm(len(cache), generator=generator, device="cuda").view(len(lengths), most).int()
    blocks[5:8, :8], blocks[8:, :16] = blocks[5, :8], blocks[8, :16]
    scales = [torch.tensor(scale, device="cuda") for scale in (0.5, 0.75, 1.25)] if quantized else None
    output = torch.full_like(query, 7, dtype=torch.bfloat16)
    decode_attention(
        query, cache, blocks, torch.tensor(lengths, device="cuda", dtype=torch.int32), output, d**-0.5,
        scales, parts, part,
    )  # fmt: skip
    of_query, of_keys, of_values = map(float, scales) if scales else (1, 1, 1)
    for i, length in enumerate(lengths):
        entries = cache.double()[blocks[i].long()].transpose(1, 2).flatten(0, 1)[:length]  # [length, groups, 2 d]
        keys, values = entries.repeat_interleave(heads, 1).split(d, -1)
        scores = torch.einsum("hd,lhd->hl", query[i].double() * of_query, keys * of_keys) * d**-0.5
        want = torch.einsum("hl,lhd->hd", scores.softmax(-1), values * of_values)
        assert (output[i].double() - want).abs().max() < 0.02, length


@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_sampled_tokens_have_their_probabilities(over):
    """Chi-square over a vocabulary of two programs and a part of a third; each token has 20 draws or more."""
    pytest.importorskip("vllm")
    from megatron_grpo.rollout.vllm.sampling_kernels import sample

    columns, rows = 9000, 2**18
    generator = torch.Generator().manual_seed(0)
    logits = torch.full((columns,), float("-inf"))
    likely = torch.randperm(columns, generator=generator)[:2000]
    logits[likely] = torch.randn(2000, generator=generator)
    draws = torch.arange(rows, device="cuda")
    spread, fixed = draws.flip(0) * 2**20 + 5, torch.full_like(draws, 11)
    seeds, positions = (spread, fixed) if over == "seeds" else (fixed, draws)
    slots, hot = draws.int(), torch.ones(rows, device="cuda")
    tokens = [
        sample(logits.cuda().expand(len(part), -1).contiguous(), slots[part], hot, seeds, positions[part])
        for part in draws.split(2**14)
    ]
    counts = torch.cat(tokens).bincount(minlength=columns).double().cpu()
    assert counts[likely].sum() == rows
    expected = rows * logits.double().softmax(0)
    enough = expected > 20
    value, freedom = float(((counts - expected)[enough] ** 2 / expected[enough]).sum()), int(enough.sum()) - 1
    assert freedom > 500 and abs(value - freedom) < 5 * (2 * freedom) ** 0.5, (value, freedom)
