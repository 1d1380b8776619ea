"""Adam for megatron-core without Transformer Engine and apex.

torch's Adam keeps a ``step`` tensor for each parameter. megatron-core's DistributedOptimizer was written for the
FusedAdam of Transformer Engine and apex, which stores the step count in the parameter group. With torch's Adam,
DistributedOptimizer refuses to save a fresh optimizer, raises ``KeyError: 'step'`` on a resharding load, and after a
load lets all parameters share one step tensor, which then advances once for each parameter. `FusedAdam` below stores
its state as apex does and runs torch's fused kernels.
"""

from typing import Any

import torch

from megatron_grpo.patches import megatron_core as core


class FusedAdam(torch.optim.Optimizer):
    """Adam (arXiv:1412.6980), with decoupled weight decay (arXiv:1711.05101) unless ``adam_w_mode`` is False.

    The step count is ``group["step"]``, an int; the state of a parameter is ``exp_avg`` and ``exp_avg_sq``.
    """

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True, capturable=False
    ):
        assert not capturable  # megatron-core passes it for CUDA graphs of the optimizer
        self.kernel = torch._fused_adamw_ if adam_w_mode else torch._fused_adam_
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter with a gradient; increase the step count of every group, also of an empty group."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            # A call of the kernel requires tensors of one device and one type.
            buckets: dict[tuple, list] = {}
            for param in group["params"]:
                if param.grad is not None:
                    buckets.setdefault((param.device, param.dtype), []).append(param)
            for (device, _), params in buckets.items():
                self._update(group, params, device)
        return loss

    def _update(self, group, params, device):
        for param in params:
            if not self.state[param]:
                self.state[param] = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
        # The kernel only reads the step, so one tensor serves all parameters. A fill does not wait for the device.
        step = torch.full((), float(group["step"]), device=device)
        self.kernel(
            params,
            [param.grad for param in params],
            [self.state[param]["exp_avg"] for param in params],
            [self.state[param]["exp_avg_sq"] for param in params],
            [],  # the maxima of the amsgrad variant
            [step] * len(params),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


PART = 2**28  # parameters


def in_parts(adam: Any) -> type[torch.optim.Optimizer]:
    """Return Transformer Engine's Adam ``adam`` with steps of at most `PART` parameters, or of one larger tensor.

    Its step makes float32 copies of all moments of a group that are stored in another dtype (--exp-avg-dtype,
    --exp-avg-sq-dtype, --main-params-dtype), 8 bytes for each parameter: more than these dtypes save. Its state
    dict and a load copy all moments at once; a distributed optimizer needs neither (``state_is_in_place``).
    """

    class AdamInParts(adam):
        state: Any
        param_groups: Any
        state_is_in_place = False  # whether state dicts pass the state's own tensors, and a load keeps them

        def state_dict(self):
            return torch.optim.Optimizer.state_dict(self) if self.state_is_in_place else super().state_dict()

        def load_state_dict(self, state_dict):
            if not self.state_is_in_place:
                return super().load_state_dict(state_dict)
            state = self.state
            groups = {"state": {}, "param_groups": state_dict["param_groups"]}
            torch.optim.Optimizer.load_state_dict(self, groups)
            self.state = state

        def initialize_state(self, param, store_param_remainders=None):
            if store_param_remainders is None:  # megatron-core does not pass it, Transformer Engine requires it
                store_param_remainders = self.store_param_remainders and param.dtype == torch.bfloat16
            super().initialize_state(param, store_param_remainders)

        def step(self, closure=None, **options):
            if all(dtype == torch.float32 for dtype in self.name_to_dtype_map.values()):
                return super().step(closure, **options)
            loss = closure() if closure is not None else None
            groups = self.param_groups
            try:
                for group in groups:
                    before = group.copy()  # each part counts the same step
                    for params in _parts(group["params"]):
                        self.param_groups = [before | {"params": params}]
                        super().step(**options)
                        group["step"] = self.param_groups[0]["step"]
            finally:
                self.param_groups = groups
            return loss

    return AdamInParts


def _parts(params: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Cut a list of parameters into lists of at most `PART` elements, or of one parameter."""
    parts: list[list[torch.Tensor]] = []
    size = 0
    for param in params:
        if not parts or size + param.numel() > PART:
            parts.append([])
            size = 0
        parts[-1].append(param)
        size += param.numel()
    return parts


def install() -> None:
    """Register `FusedAdam` in megatron-core if it found neither Transformer Engine nor apex, else `in_parts`.

    megatron-core holds the class as an attribute and its kind as flags set at import. This function sets the flags to
    apex's kind: the step count in the group, ``adam_w_mode`` as an argument.
    """
    if not core.ADAM_IS_TORCHS.original():
        adam = core.ADAM.original()
        if adam.__module__.startswith("transformer_engine"):  # not apex's, nor what an earlier call has set
            core.ADAM.install(in_parts(adam))
        return
    core.ADAM.install(FusedAdam)
    core.ADAM_IS_TORCHS.install(False)
    core.STEP_IN_GROUP.install(True)
    core.STEP_AS_APEX.install(True)
