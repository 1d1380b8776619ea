"""Ratios of a new policy to the old one over samples of a truncated distribution, with and without the kept tokens."""

import torch

from megatron_grpo.models.head import vocab_parallel_log_probs

SAMPLES, HIDDEN, VOCAB, TEMPERATURE, TOP_K, TOP_P = 50_000, 16, 40, 0.6, 8, 0.9


def ratios(kept, hidden, weights, labels) -> torch.Tensor:
    old, new = (
        vocab_parallel_log_probs(hidden, w, labels, TEMPERATURE, VOCAB, kept_token_ids=kept)[0] for w in weights
    )
    return (new - old).exp().double()


def test_the_mean_ratio_is_1_under_the_distribution_that_was_sampled_from():
    """Importance sampling: the mean of p_new / p_old over samples of p_old is 1. Truncated samples are those of p_old
    over the kept tokens. Over the whole vocabulary the mean is p_new(S) / p_old(S), another number in each state.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(SAMPLES, HIDDEN, generator=generator)
    old = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.4
    new = old * 0.8 + torch.randn(VOCAB, HIDDEN, generator=generator) * 0.05
    p, ids = torch.softmax(hidden @ old.T / TEMPERATURE, -1).sort(descending=True)
    p, ids = p[:, :TOP_K], ids[:, :TOP_K].int()
    before = (p / p.sum(-1, keepdim=True)).cumsum(-1).roll(1, -1)
    before[:, 0] = 0
    kept = ids.masked_fill(before >= TOP_P, -1)
    place = torch.multinomial(p * (kept >= 0), 1, generator=generator)
    labels = ids.gather(1, place)[:, 0].long()

    replayed, whole = (ratios(sets, hidden, (old, new), labels) for sets in (kept, None))
    errors = [values.std().item() / SAMPLES**0.5 for values in (replayed, whole)]
    print(f"with kept tokens {replayed.mean():.4f} +- {errors[0]:.4f}, without {whole.mean():.4f} +- {errors[1]:.4f}")
    assert replayed.std() > 0.1  # the policies differ
    assert abs(replayed.mean() - 1) < 4 * errors[0]
    assert abs(whole.mean() - 1) > 40 * errors[1]
