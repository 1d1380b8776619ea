"""Stand-in, on a CPU, for Transformer Engine's Adam: it holds moments in other dtypes, and copies them as that does."""

import sys
from copy import deepcopy
from itertools import chain
from types import ModuleType
from unittest import mock

import megatron.core.optimizer as factory
import torch
from megatron.core.optimizer import distrib_optimizer, optimizer_config


class Adam(torch.optim.Optimizer):
    """Adam with a state of any dtypes; it holds and copies what Transformer Engine's does, and computes something else.

    Its update depends on the gradient and the number of the step. ``copied`` has the elements of each group that
    Transformer Engine would copy in a step.
    """

    def __init__(
        self,
        params,
        lr,
        betas,
        eps,
        weight_decay,
        adam_w_mode,
        exp_avg_dtype,
        exp_avg_sq_dtype,
        master_weights,
        master_weight_dtype,
        use_decoupled_grad,
        store_param_remainders,
        capturable=False,
    ):
        assert not capturable and adam_w_mode and master_weights and use_decoupled_grad
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.store_param_remainders = store_param_remainders
        moments = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self.name_to_dtype_map = moments | {"master_param": master_weight_dtype}
        self._scales = {}
        self.copied = []

    def initialize_state(self, param, store_param_remainders):
        for name in self.name_to_dtype_map:
            self._initialize(param, name, store_param_remainders)
        if not store_param_remainders:
            self.set_scaled_state(param, "master_param", param.detach().float())

    def _initialize(self, param, name, store_param_remainders):
        remainders = name == "master_param" and store_param_remainders
        dtype = torch.int16 if remainders else self.name_to_dtype_map[name]
        self.state[param][name] = torch.zeros(param.shape, dtype=dtype, device=param.device)
        self._scales.setdefault(param, {})[name] = torch.ones(1, device=param.device)

    def get_unscaled_state(self, param, name):
        held = self.state[param][name]
        if held.dtype in (torch.float32, torch.int16):
            return held
        return held.float() if held.dtype == torch.bfloat16 else held.float().mul_(self._scales[param][name])

    def set_scaled_state(self, param, name, value):
        if name not in self.state[param]:
            self._initialize(param, name, self.store_param_remainders and param.dtype == torch.bfloat16)
        held = self.state[param][name]
        if held.dtype == torch.float16:
            assert value.dtype == torch.float32
            scale = self._scales[param][name]
            scale.copy_(value.abs().max() / (torch.finfo(torch.float16).max / 2))
            value = value / scale.clamp_min(1e-30)
        held.copy_(value)

    def _pairs(self, state_dict):
        numbers = chain.from_iterable(group["params"] for group in deepcopy(state_dict["param_groups"]))
        return zip(numbers, chain.from_iterable(group["params"] for group in self.param_groups), strict=True)

    def state_dict(self):
        state_dict = super().state_dict()
        for number, param in self._pairs(state_dict):
            if number in state_dict["state"]:
                names = list(state_dict["state"][number])
                state_dict["state"][number] = {name: self.get_unscaled_state(param, name) for name in names}
        return state_dict

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for number, param in self._pairs(state_dict):
            if number in state_dict["state"]:
                self.state[param] = {}
                for name, value in state_dict["state"][number].items():
                    self.set_scaled_state(param, name, value if value.dtype == torch.int16 else value.float())

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            self.copied.append(sum(param.numel() for param in group["params"]))
            for param in group["params"]:
                remainders = self.store_param_remainders and param.dtype == torch.bfloat16
                if not self.state[param]:
                    self.initialize_state(param, remainders)
                grad = param.decoupled_grad.float()
                for name, value, weight in ("exp_avg", grad, 0.1), ("exp_avg_sq", grad.square(), 0.05):
                    self.set_scaled_state(param, name, self.get_unscaled_state(param, name).lerp(value, weight))
                if remainders:
                    self.state[param]["master_param"].add_((1000 * grad).to(torch.int16))
                else:
                    main = self.get_unscaled_state(param, "master_param") - group["lr"] / group["step"] * grad
                    self.set_scaled_state(param, "master_param", main)
                    param.copy_(main)


Adam.__module__ = "transformer_engine.pytorch.optimizers.fused_adam"  # fused_adam.install recognises it by its module


def install() -> None:
    """Have megatron-core build `Adam` in this process, as if Transformer Engine were installed."""
    factory.Adam = distrib_optimizer.Adam = Adam
    factory.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    factory.is_te_min_version = optimizer_config.is_te_min_version = lambda version: True
    names = "transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"
    modules = {name: ModuleType(name) for name in names}
    modules[names[-1]].FusedAdam = Adam
    mock.patch.dict(sys.modules, modules).start()
