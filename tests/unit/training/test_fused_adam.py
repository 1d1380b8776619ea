"""FusedAdam against torch.optim's Adam and AdamW, and its layout of the step count."""

import copy

import pytest
import torch

from megatron_grpo.training import fused_adam
from megatron_grpo.training.fused_adam import FusedAdam


def make_params():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(7, 5), (3,), (2, 4, 3), (0,)]]


def run(optimizer_class, steps, **options):
    params = make_params()
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "lr": 3e-3}]
    optimizer = optimizer_class(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.02, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize(("reference", "adam_w_mode"), [(torch.optim.AdamW, True), (torch.optim.Adam, False)])
def test_agrees_with_torch(reference, adam_w_mode):
    expected, _ = run(reference, 5)
    actual, _ = run(FusedAdam, 5, adam_w_mode=adam_w_mode)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=2e-7)


@pytest.mark.parametrize(("reference", "adam_w_mode"), [(torch.optim.AdamW, True), (torch.optim.Adam, False)])
def test_agrees_with_torch_over_many_steps(reference, adam_w_mode):
    def train(make_optimizer):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = make_optimizer(model.parameters())
        for step in range(50):
            optimizer.param_groups[0]["lr"] = 1e-3 * (50 - step) / 50  # a schedule writes the rate into the group
            x = torch.randn(16, 6)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
        return list(model.parameters())

    options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.05}
    expected = train(lambda p: reference(p, **options))
    actual = train(lambda p: FusedAdam(p, adam_w_mode=adam_w_mode, **options))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=2e-7)


def test_step_count_lives_in_the_group():
    params, optimizer = run(FusedAdam, 4)
    assert [group["step"] for group in optimizer.param_groups] == [4, 4]
    assert set(optimizer.state[params[0]]) == {"exp_avg", "exp_avg_sq"}


def test_a_parameter_without_gradient_is_left_alone():
    params = make_params()
    before = params[0].detach().clone()
    FusedAdam(params, weight_decay=0.1).step()
    assert torch.equal(params[0], before)


def test_state_dict_round_trip_continues_bit_for_bit():
    params, optimizer = run(FusedAdam, 3)
    copies = [torch.nn.Parameter(param.detach().clone()) for param in params]
    resumed = FusedAdam([{"params": copies[:2]}, {"params": copies[2:]}])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, c in zip(params, copies, strict=True):
        p.grad = c.grad = torch.ones_like(p)
    optimizer.step()
    resumed.step()
    assert resumed.param_groups[0]["step"] == 4
    assert all(torch.equal(p, c) for p, c in zip(params, copies, strict=True))


def test_closure():
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([param])

    def closure():
        loss = param.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert optimizer.param_groups[0]["step"] == 1


def test_install_replaces_torchs_adam_in_megatron_core(monkeypatch):
    import megatron.core.optimizer as factory
    from megatron.core.optimizer import distrib_optimizer

    names = {factory: ["Adam", "USING_PYTORCH_OPTIMIZER"]}
    names[distrib_optimizer] = ["HAVE_APEX_OR_TE", "USING_APEX_OPTIMIZER"]
    for module, attributes in names.items():
        for name in attributes:
            monkeypatch.setattr(module, name, getattr(module, name))  # restored after the test
    factory.USING_PYTORCH_OPTIMIZER = True
    fused_adam.install()
    assert factory.Adam is FusedAdam
    assert not factory.USING_PYTORCH_OPTIMIZER
    assert distrib_optimizer.HAVE_APEX_OR_TE and distrib_optimizer.USING_APEX_OPTIMIZER


def test_install_has_transformer_engines_adam_step_in_parts(monkeypatch):
    import megatron.core.optimizer as factory

    theirs = type(
        "FusedAdam", (torch.optim.Optimizer,), {"__module__": "transformer_engine.pytorch.optimizers.fused_adam"}
    )
    monkeypatch.setattr(factory, "Adam", theirs)
    monkeypatch.setattr(factory, "USING_PYTORCH_OPTIMIZER", False)
    fused_adam.install()
    mine = factory.Adam
    assert mine.__base__ is theirs
    fused_adam.install()
    assert factory.Adam is mine


def test_install_leaves_apexs_adam_alone(monkeypatch):
    import megatron.core.optimizer as factory

    apexs = type("FusedAdam", (torch.optim.Optimizer,), {"__module__": "apex.optimizers.fused_adam"})
    monkeypatch.setattr(factory, "Adam", apexs)
    monkeypatch.setattr(factory, "USING_PYTORCH_OPTIMIZER", False)
    fused_adam.install()
    assert factory.Adam is apexs
