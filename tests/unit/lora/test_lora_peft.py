"""Adapters against PEFT's on the same transformers model in float32: outputs, gradients, updated matrices, files."""

import json
import re

import pytest
from float64 import bound
from slow import slow_except
from toy_checkpoints import VOCAB, build, from_files, make, packed, toy_args

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model

from megatron_grpo.lora import files
from megatron_grpo.lora.attach import adapters, attach, switched_off
from megatron_grpo.lora.stream import stream_adapter, stream_merged, stream_saved
from megatron_grpo.training import train_step
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import hf, model_weights

IDS = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(5))
# Gradients differ by 5e-6. Adam divides by the size of each; with a smaller epsilon it magnifies those near zero.
UPDATE = {"lr": 1e-2, "min_lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.0, "train_iters": 1, "adam_eps": 1e-2}
MLP = ["gate_proj", "up_proj", "down_proj"]
# family, Hugging Face names of the layers with adapters, as PEFT's target_modules and ours, further settings
CASES = [
    ("qwen3", ["q_proj", "k_proj", "v_proj", "o_proj", *MLP], {}),
    ("qwen3", r".*layers\.1\.(self_attn\.v_proj|mlp\.up_proj)", {"use_rslora": True}),
    ("phi3", "all-linear", {}),
    ("qwen3_moe", ["q_proj", "o_proj", *MLP], {}),
    ("qwen3_moe", ["q_proj", "o_proj", *MLP], {"grouped": True, "config": {"mlp_only_layers": []}}),
    ("qwen3", ["q_proj", "v_proj", "o_proj", *MLP], {"use_dora": True}),
    ("qwen3_moe", ["k_proj", "o_proj", *MLP], {"use_dora": True, "grouped": True}),
    ("qwen3", ["k_proj"], {"modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
    ("glm4", "all-linear", {}),
    ("gemma3_text", "all-linear", {}),
    ("gemma4_text", "all-linear", {}),
    ("gemma4_moe", ["q_proj", "o_proj", *MLP], {}),
    ("qwen3_5_text", "all-linear", {}),
    ("nemotron_h", ["in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"], {}),
    ("nemotron_h_moe", ["in_proj", "k_proj", "up_proj", "down_proj"], {}),
    ("nemotron_h_moe", ["q_proj", "up_proj", "down_proj"], {"grouped": True}),
    ("nemotron_h", ["in_proj", "q_proj", "down_proj"], {"modules_to_save": ["lm_head", "norm_f"]}),
    ("qwen3_next", ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj", *MLP], {}),
    ("deepseek_v3", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *MLP], {}),
    ("minimax_m2", ["q_proj", "k_proj", "v_proj", "o_proj"], {"modules_to_save": ["q_norm", "k_norm"]}),
    ("glm4_moe_lite", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *MLP], {}),
]


class SeparateExperts(torch.nn.Module):
    """Experts of transformers, whose matrices are stacked parameters, as linear layers with the files' names.

    As in the modules of transformers 4, and as vLLM names the layers of an adapter.
    """

    class Expert(torch.nn.Module):
        def __init__(self, *matrices: torch.Tensor):
            super().__init__()
            for name, weight in zip(MLP[-len(matrices) :], matrices, strict=True):
                layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                layer.weight.data = weight.detach().clone()
                setattr(self, name, layer)

    def __init__(self, stacked: torch.nn.Module):
        super().__init__()
        gated = hasattr(stacked, "gate_up_proj")  # Nemotron-H's experts have no gate
        inner = stacked.gate_up_proj.chunk(2, 1) if gated else [stacked.up_proj]
        for number, matrices in enumerate(zip(*inner, stacked.down_proj, strict=True)):
            self.add_module(str(number), self.Expert(*matrices))
        self.act_fn = stacked.act_fn

    def forward(self, hidden_states, top_k_index, top_k_weights):
        output = torch.zeros_like(hidden_states)
        for number, expert in self.named_children():
            if number == "act_fn":
                continue
            token, place = (top_k_index == int(number)).nonzero(as_tuple=True)
            x = hidden_states[token]
            y = expert.up_proj(x)
            y = self.act_fn(expert.gate_proj(x)) * y if hasattr(expert, "gate_proj") else self.act_fn(y)
            y = expert.down_proj(y)
            output = output.index_add(0, token, y * top_k_weights[token, place, None])
        return output


def with_separate_experts(model: torch.nn.Module) -> torch.nn.Module:
    """Replace the experts; the logits stay the same."""
    with torch.no_grad():
        before = model(IDS[None]).logits
        for layer in model.model.layers:
            if hasattr(mlp := getattr(layer, "mlp", getattr(layer, "mixer", None)), "experts"):
                mlp.experts = SeparateExperts(mlp.experts)
        assert (model(IDS[None]).logits - before).abs().max() < bound(2e-5)
    model.config.model_type = "separate"  # PEFT converts the names of the types whose experts transformers has stacked
    return model


def theirs(directory, targets, **more):
    """PEFT's model on the transformers model of a directory, with random A and B."""
    model = with_separate_experts(from_files(directory))
    options = {"r": 4, "lora_alpha": 6, "target_modules": targets, "task_type": "CAUSAL_LM", **more}
    model = get_peft_model(model, LoraConfig(**options))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def ours(directory, adapter, **more):
    """This project's model of the directory with the adapter of PEFT's files, and its optimizer."""
    args = replaced(toy_args(directory, **UPDATE, **more), explicit=frozenset())
    args = replaced(args, **files.resolve_adapter(args, adapter))
    chunks = build(args)
    hf.load_hf(chunks, args, directory)
    attach(args, chunks)
    files.load_adapter(args, chunks, adapter)
    return args, *train_step.setup_optimizer(args, chunks)


def logits_of(model) -> torch.Tensor:
    options = {"attention_mask": None, "packed_seq_params": packed(IDS)}
    return model(IDS[None], torch.arange(len(IDS))[None], **options)[0][:, :VOCAB]


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:-1], IDS[1:])


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


# By default fused matrices, and latent attention with experts.
QUICK = [next(case for case in CASES if case[0] == family) for family in ("qwen3", "deepseek_v3")]


@pytest.mark.parametrize(("family", "targets", "more"), slow_except(QUICK, CASES))
def test_one_update_equals_pefts(world, tmp_path, family, targets, more):
    """The output of an adapter from PEFT's files, every gradient, every matrix after a step of AdamW."""
    more = dict(more)
    grouped, config = more.pop("grouped", False), more.pop("config", {})
    make(tmp_path / "base", family, tied=False, **config)
    peft = theirs(tmp_path / "base", targets, **more)
    peft.save_pretrained(tmp_path / "adapter")
    args, (model,), optimizer, _ = ours(tmp_path / "base", tmp_path / "adapter", moe_grouped_gemm=grouped)

    expected = peft(IDS[None]).logits[0]
    found = logits_of(model)
    with torch.no_grad(), peft.disable_adapter(), switched_off([model]):
        base = peft(IDS[None]).logits[0]
        assert (logits_of(model) - base).abs().max() < bound(1e-4)
    assert (found - expected).abs().max() < bound(1e-4) < 0.1 < (expected - base).abs().max()

    model.zero_grad_buffer()
    loss_of(found).backward()
    loss_of(expected).backward()
    gradients = {}
    for parameter, tensor in _parameters(args, model):
        gradients |= _by_name(parameter, tensor)
    wanted = {_plain(name): p.grad for name, p in peft.named_parameters() if p.requires_grad}
    assert gradients.keys() == wanted.keys() and len(wanted) > 0
    for name, gradient in wanted.items():
        # An expert without tokens has no gradient; PEFT's scatters None, which is zero.
        assert (
            relative(gradients[name], gradient) < bound(5e-5)
            if gradient is not None and gradient.any()
            else (not gradients[name].any())
        ), name
    assert more.get("modules_to_save") or not any(
        p.requires_grad for name, p in model.module.named_parameters() if not name.startswith("lora.")
    )

    trained = [p for p in peft.parameters() if p.requires_grad]
    groups = [  # Megatron takes no weight decay on vectors
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": UPDATE["weight_decay"]},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=UPDATE["lr"], eps=UPDATE["adam_eps"])
    for parameter in peft.parameters():  # AdamW skips parameters without gradient, with their decay
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    adam.step()
    model.start_grad_sync()
    model.finish_grad_sync()
    optimizer.step()
    updated = {_plain(name): p.detach() for name, p in peft.named_parameters() if p.requires_grad}
    for name, tensor in [*stream_adapter([model], args), *stream_saved([model], args)]:
        assert relative(tensor, updated[_module(name)]) < bound(1e-5), name

    # The base is what it was, the merged weights are PEFT's, and PEFT loads the files of the updated adapter.
    merged = dict(peft.merge_and_unload().named_parameters())
    for name, tensor in stream_merged([model], args):
        if (name := _module(name)) in merged:
            assert (tensor - merged[name]).abs().max() < bound(5e-6), name
    files.save_adapter(args, [model], tmp_path / "ours")
    base = from_files(tmp_path / "base")
    if not config and family in ("qwen3_moe", "qwen3_next", "deepseek_v3", "glm4_moe_lite", "nemotron_h_moe"):
        # PEFT stacks the experts' matrices for transformers' modules, if no other layer has names like theirs.
        base = with_separate_experts(base)
    again = PeftModel.from_pretrained(base, tmp_path / "ours")
    with torch.no_grad():
        assert (again(IDS[None]).logits[0] - logits_of(model)).abs().max() < bound(1e-4)


def _parameters(args, model):
    """(weight, gradient) of every trained tensor, experts one by one."""
    table = {weight.name: weight for weight in model_weights.table(args)}
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and not name.startswith("lora."):
            yield table[name], parameter.main_grad
    for adapter in adapters([model]):
        for _, parameter, weights in adapter._parameters_and_weights():
            for place, weight in enumerate(weights):
                yield weight, adapter.of_expert(parameter.main_grad, place)


def _by_name(weight, tensor) -> dict[str, torch.Tensor]:
    (name,) = weight.hf
    return {_module(name): weight.split([tensor])[0]}


def _module(name: str) -> str:
    return re.sub("^backbone[.]", "model.", name)  # Nemotron-H's files


def _plain(name: str) -> str:
    return (
        name.removeprefix("base_model.model.")
        .replace(".default", "")
        .replace("vector.weight", "vector")
        .replace(".modules_to_save", "")
    )


def test_adapters_of_a_changed_base_are_refused(world, tmp_path):
    """PEFT itself shows which initialisations change the base; a converted adapter is one of the original base."""
    make(tmp_path / "base", "qwen3", tied=False)
    original, refused = from_files(tmp_path / "base").state_dict(), set()
    for init in (True, False, "gaussian", "eva", "orthogonal", "mica", "pissa", "pissa_niter_2", "olora"):
        options = {"r": 4, "lora_alpha": 6, "target_modules": ["v_proj"], "init_lora_weights": init}
        peft = get_peft_model(from_files(tmp_path / "base"), LoraConfig(**options))
        peft.save_pretrained(tmp_path / "adapter")
        if all(torch.equal(weight, original[name]) for name, weight in base_of(peft)):
            files.read_config(tmp_path / "adapter")
            continue
        refused.add(init)
        with pytest.raises(
            GrpoError, match=f'has init_lora_weights "{init}".* path_initial_model_for_weight_conversion'
        ):
            files.read_config(tmp_path / "adapter")
    assert refused == {"pissa", "pissa_niter_2", "olora"}
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    for init in ("corda", "lora_ga", "loftq", ["another"]):  # need data or more packages
        (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": init}))
        with pytest.raises(GrpoError, match=r"has init_lora_weights \S+: the adapter belongs to other base weights"):
            files.read_config(tmp_path / "adapter")

    options = {"r": 4, "lora_alpha": 6, "target_modules": ["v_proj"], "init_lora_weights": "pissa"}
    peft = get_peft_model(from_files(tmp_path / "base"), LoraConfig(**options))
    peft.peft_config["default"].init_lora_weights = True
    peft.save_pretrained(tmp_path / "start")
    peft.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape))
        expected = peft(IDS[None]).logits[0]
    peft.save_pretrained(tmp_path / "trained", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    _, (model,), *_ = ours(tmp_path / "base", tmp_path / "trained")
    with torch.no_grad():
        assert (logits_of(model) - expected).abs().max() < bound(1e-4)


def base_of(peft):
    """Yield (name in the base, weight without its adapter) of the layers that have adapters."""
    for name, weight in peft.named_parameters():
        if ".base_layer" in name:
            yield _plain(name).replace(".base_layer", ""), weight
