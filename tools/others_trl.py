"""Comparisons of losses, advantages and rollout importance weights with TRL's GRPOTrainer and RLOOTrainer."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tools.others import END, GROUP, Case, Data, load, our_advantages, our_importance_weights, our_loss, our_mismatch


class Trl:
    """TRL's GRPOTrainer and RLOOTrainer without a model: the data has the log-probabilities and rewards."""

    def __init__(self, directory: Path) -> None:
        grpo, rloo, package = load(directory, "trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer", "trl")
        self.trainers = {"grpo": grpo.GRPOTrainer, "rloo": rloo.RLOOTrainer}
        self.version = f"TRL {package.__version__}"

    def stub(self, kind: str, data: Data, answer: Any, **settings: Any) -> Any:
        """Return a trainer without set-up; ``answer`` replaces the model: (log-probabilities, entropies)."""
        lengths = [int(row.sum()) for row in data.tokens]
        ids = [[2] * (n - 1) + [2 if cut else END] for n, cut in zip(lengths, data.cut, strict=True)]
        engine = [row[:n].tolist() for row, n in zip(data.rollout, lengths, strict=True)]
        tools = [row[:n].long().tolist() for row, n in zip(data.mask, lengths, strict=True)]
        generated: dict[str, tuple[Any, ...]] = {
            "grpo": ([[0]] * len(ids), ids, tools, ids, engine, {}, None, None),
            "rloo": ([[0]] * len(ids), ids, ids),
        }
        methods = {
            "_get_per_token_logps_and_entropies": lambda self, *_, **__: (*answer, None),
            "_generate": lambda self, prompts: generated[kind],
            "_calculate_rewards": lambda self, *_: data.rewards,
        }
        stub: Any = object.__new__(type("Stub", (self.trainers[kind],), methods))
        same = lambda x, *_, **__: x  # noqa: E731
        logs: dict[str, Any] = defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list))
        vars(stub).update(
            accelerator=SimpleNamespace(
                device=torch.device("cpu"), num_processes=1, process_index=0, sync_gradients=True, gather=same,
                gather_for_metrics=same, reduce=same, pad_across_processes=same,
            ),
            args=SimpleNamespace(
                delta=settings.pop("delta", None), use_bias_correction_kl=settings.pop("use_bias_correction_kl", False),
                sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, gradient_checkpointing_kwargs=None,
                steps_per_generation=settings.pop("steps_per_generation", 1), gradient_accumulation_steps=3,
                per_device_train_batch_size=1,
            ),
            model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
            _metrics={"train": defaultdict(list)}, _pending_extra_logs={}, _pending_metrics={},
            _logs=logs,
            _tokenizer=SimpleNamespace(pad_token_id=0), eos_token_ids=[END], pad_to_multiple_of=None,
            reward_funcs=["a", "b"], reward_func_names=["a", "b"], reward_weights=torch.ones(2).double(),
            num_generations=GROUP, num_iterations=1, aux_loss_enabled=False, tools=None, environments=None,
            environment_factories=None, _is_vlm=False, log_multimodal=False, ref_model=None, reward_clip_range=None,
            normalize_advantages=False, multi_objective_aggregation="sum_then_normalize", scale_rewards="group",
            mask_truncated_completions=False, use_vllm=False, vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_min=None,
            vllm_importance_sampling_clip_max=2.0, loss_type="grpo", importance_sampling_level="token", beta=0.0,
            epsilon_low=0.2, epsilon_high=0.2, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
            max_completion_length=512, current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
            use_adaptive_entropy=False, entropy_coef=0.0,
        )  # fmt: skip
        vars(stub).update(settings)
        return stub

    def rollout(self, data: Data, kind: str = "grpo", **settings: Any) -> dict[str, Any]:
        """Return the result of `_generate_and_score_completions`, the inputs of the loss."""
        stub = self.stub(kind, data, (data.old, data.entropies), **settings)
        return stub._generate_and_score_completions([{"prompt": "?"}] * len(data.mask))

    def metrics(self, data: Data, *names: str) -> Tensor:
        """Return the metrics that the same method logs with importance weights for the engine."""
        stub = self.stub("grpo", data, (data.old, data.entropies), use_vllm=True)
        stub._generate_and_score_completions([{"prompt": "?"}] * len(data.mask))
        return torch.tensor([stub._metrics["train"][name][0] for name in names]).double()

    def loss(self, data: Data, micro_batches: int = 1, **settings: Any) -> tuple[Tensor, Tensor]:
        """Return the sum of `_compute_loss` over the micro-batches of an update, and its gradient, as in accelerate."""
        log_probs = data.log_probs.clone().requires_grad_()
        of_rollout = {k: v for k, v in settings.items() if k.startswith(("vllm", "use_vllm", "mask_truncated"))}
        inputs = self.rollout(data, **of_rollout)
        inputs |= {"old_per_token_logps": data.old, "ref_per_token_logps": data.ref, "advantages": data.advantages}
        inputs["num_items_in_batch"] = inputs["num_items_in_batch"] * settings.pop("rollout_over_update", 1)
        size, total = len(data.mask) // micro_batches, torch.zeros(()).double()
        for start in range(0, len(data.mask), size):
            rows = slice(start, start + size)
            part = {k: v[rows] if v.dim() else v for k, v in inputs.items()}
            answer = log_probs[rows], data.entropies[rows]
            stub = self.stub(
                "grpo", data, answer, **{"steps_per_generation": micro_batches} | settings,
                current_gradient_accumulation_steps=micro_batches,
            )  # fmt: skip
            total = total + stub._compute_loss(stub.model, part)
        return total.detach(), torch.autograd.grad(total, log_probs)[0]

    def rloo_gradient(self, data: Data) -> Tensor:
        """Return the gradient of RLOOTrainer's `_compute_loss` before the first update on a rollout."""
        log_probs = data.log_probs.clone().requires_grad_()
        inputs = self.rollout(data, "rloo") | {"advantages": data.advantages}
        inputs["old_logps"] = (data.log_probs * data.tokens).sum(1)
        stub = self.stub("rloo", data, (log_probs, data.entropies))
        return torch.autograd.grad(stub._compute_loss(stub.model, inputs), log_probs)[0]


def of_trl(trl: Trl, data: Data) -> Iterator[Case]:
    """Yield the comparisons with GRPOTrainer and RLOOTrainer."""

    def loss(thing: str, flags: str, difference: str = "", data: Data = data, said: str = "", **settings: Any) -> Case:
        shown = said or ", ".join(f"{k}={v}" for k, v in settings.items()).replace("micro_batches", "accumulation")
        function = f"`_compute_loss`, {shown}" if shown else "`_compute_loss`"
        return Case(thing, flags, function, data, our_loss, lambda d: trl.loss(d, **settings), difference)

    plain = "--beta 0 --loss-type"
    yield loss("GRPO", f"{plain} grpo", loss_type="grpo")
    yield loss("GRPO, k3 to the reference", "--beta 0.1", beta=0.1)
    yield loss("GRPO in 6 micro-batches", f"{plain} grpo", micro_batches=6)
    yield loss("clip-higher, delta", f"{plain} grpo --epsilon-high 0.28 --dual-clip 4", epsilon_high=0.28, delta=4.0)
    yield loss("BNPO in 6 micro-batches", f"{plain} bnpo --micro-batch-size 4", loss_type="bnpo", micro_batches=6)
    yield loss("DAPO in 6 micro-batches", f"{plain} dapo", loss_type="dapo", micro_batches=6)
    yield loss(
        "DAPO, two updates a rollout",
        f"{plain} dapo",
        "TRL divides by the tokens of the rollout over the number of updates, we by the tokens of the update. In "
        "DAPO's paper (section 3.3) the mean is over the summed tokens, as here. TRL's is exact only if all updates "
        "have equally many tokens.",
        said="loss_type=dapo, steps_per_generation=2, tokens of the rollout 2.2 times those of the update",
        loss_type="dapo",
        steps_per_generation=2,
        rollout_over_update=2.2,
    )
    yield loss("Dr. GRPO", f"{plain} dr_grpo --max-completion-length 512", loss_type="dr_grpo")
    yield loss("CISPO", f"{plain} cispo --epsilon-high 2", loss_type="cispo", epsilon_high=2.0)
    yield loss("SAPO", f"{plain} sapo", loss_type="sapo")
    level: dict[str, Any] = {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.06}
    yield loss("GSPO", f"{plain} gspo --epsilon 0.05 --epsilon-high 0.06", **level)
    yield loss("unbiased KL", "--beta 0.1 --kl-estimator unbiased", beta=0.1, use_bias_correction_kl=True)
    yield loss(
        "unbiased KL, GSPO",
        "--beta 0.1 --kl-estimator unbiased --loss-type gspo --epsilon 0.05 --epsilon-high 0.06",
        "TRL multiplies the k3 of a token by the ratio of the sequence, we by the ratio of the token. DeepSeek-V3.2's "
        "formula has the ratio of the token, and only with it the mean over old samples is the KL.",
        beta=0.1,
        use_bias_correction_kl=True,
        **level,
    )
    yield loss("top entropy", f"{plain} dapo --top-entropy-quantile 0.2", loss_type="dapo", top_entropy_quantile=0.2)
    yield loss(
        "top entropy in 6 micro-batches",
        f"{plain} dapo --top-entropy-quantile 0.2",
        "TRL's threshold is that of a micro-batch, ours that of the update. The paper's (arXiv:2506.01939) is that of "
        "a batch, as here; it does not depend on micro-batches.",
        loss_type="dapo",
        top_entropy_quantile=0.2,
        micro_batches=6,
    )
    entropy: dict[str, Any] = {"_entropy_bonus_enabled": True, "entropy_coef": 0.01}
    said = "entropy_coef=0.01, loss_type="
    yield loss(
        "entropy bonus, DAPO", f"{plain} dapo --entropy-coef 0.01", said=f"{said}dapo", loss_type="dapo", **entropy
    )
    yield loss(
        "entropy bonus, GRPO",
        f"{plain} grpo --entropy-coef 0.01",
        "TRL averages the entropy over tokens with every loss type, we with the aggregation of the loss type. No paper "
        "decides; for equal lengths both are the same.",
        said=f"{said}grpo",
        loss_type="grpo",
        **entropy,
    )
    yield loss("overlong filter", f"{plain} grpo --overlong-filter", mask_truncated_completions=True)
    yield loss(
        "off-policy sequence mask",
        f"{plain} grpo --off-policy-sequence-mask-delta 0.02",
        said="off_policy_mask_threshold=0.02",
        off_policy_mask_threshold=0.02,
    )
    engine: dict[str, Any] = {"use_vllm": True}
    yield loss(
        "rollout importance weights in the loss",
        "--beta 0.1 --rollout-importance-sampling-mode token_truncate",
        beta=0.1,
        **engine,
    )

    def factors(mode: str, difference: str = "") -> Case:
        def theirs(d: Data) -> Tensor:
            ratio = trl.rollout(d, use_vllm=True, vllm_importance_sampling_mode=mode)["importance_sampling_ratio"]
            return ratio * d.mask

        name = f"`_generate_and_score_completions`, {mode}"
        flags = f"--rollout-importance-sampling-mode {mode}"
        return Case(
            f"rollout importance weights, {mode}", flags, name, data, our_importance_weights, theirs, difference
        )

    yield factors("token_truncate")
    yield factors("token_mask")
    product = (
        "TRL uses the product of a completion's ratios, we their geometric mean. The product is the unbiased "
        "importance weight of a sequence, as in theory, but exceeds any bound for long completions. The geometric "
        "mean is GSPO's length-normalised ratio, biased and of low variance"
    )
    yield factors("sequence_truncate", f"{product}.")
    yield factors("sequence_mask", f"{product}. It only determines the mask; other completions have weights by token.")

    of_engine = "sampling/sampling_logp_difference"
    names = "mismatch/mean_abs", "mismatch/max_abs"
    yield Case(
        "engine mismatch, mean and largest",
        f"{names[0]}, {names[1]}",
        f"`{of_engine}`, mean and max",
        data,
        lambda d, _: our_mismatch(d, *names),
        lambda d: trl.metrics(d, f"{of_engine}/mean", f"{of_engine}/max"),
    )

    def advantages(thing: str, flags: str, kind: str, difference: str = "", data: Data = data, **settings: Any) -> Case:
        def theirs(d: Data) -> Tensor:
            return trl.rollout(d, kind, **settings)["advantages"].double()[:, None] * d.mask

        name = {"grpo": "GRPOTrainer", "rloo": "RLOOTrainer"}[kind]
        shown = ", ".join(f"{k}={v}" for k, v in settings.items() if k != "ref_model")
        return Case(thing, flags, f"`{name}`, {shown}", data, our_advantages, theirs, difference)

    def rloo_loss(thing: str, flags: str, difference: str = "") -> Case:
        first = data._replace(mask=data.tokens, old=data.log_probs)  # TRL's RLOO has no tools
        function = "`RLOOTrainer._compute_loss`, gradient"
        return Case(thing, flags, function, first, lambda d, f: our_loss(d, f)[1], trl.rloo_gradient, difference)

    yield rloo_loss(
        "RLOO's loss, one update a rollout",
        f"{plain} reinforce",
        "TRL's loss is the mean over completions of A times the log-probability of the completion, as in the paper; "
        "ours is the mean over tokens, smaller by the mean length of the update. This is a varying factor of the "
        "learning rate; with dr_grpo it is constant (next line).",
    )
    yield rloo_loss("the same", f"{plain} dr_grpo --max-completion-length 1")
    missing = data.rewards.clone()
    missing[5] = missing[13] = torch.nan
    for scale in ("group", "batch", "none"):
        yield advantages(f"advantage, std of {scale}", f"--scale-rewards {scale}", "grpo", scale_rewards=scale)
    some = data._replace(rewards=missing)
    yield advantages("some not scored", "--scale-rewards group", "grpo", data=some, scale_rewards="group")
    gdpo = "normalize_then_sum"
    yield advantages("GDPO", "--advantage-estimator gdpo", "grpo", multi_objective_aggregation=gdpo)
    yield advantages("RLOO", "--advantage-estimator rloo", "rloo", normalize_advantages=False)
    yield advantages(
        "RLOO, some not scored", "--advantage-estimator rloo", "rloo", data=some, normalize_advantages=False
    )
    yield advantages(
        "RLOO, scaled",
        "--advantage-estimator rloo --scale-rewards batch",
        "rloo",
        "TRL divides by the std of the advantages, we by the std of the rewards. RLOO's paper has neither: scaling is "
        "an option of both, not part of the method.",
        normalize_advantages=True,
    )
