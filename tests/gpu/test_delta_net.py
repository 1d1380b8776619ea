"""The gated delta net by the kernels of flash-linear-attention, against plain torch in float32."""

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():  # the modules below prepare a machine without a GPU
    pytest.skip("needs a GPU", allow_module_level=True)

from megatron_grpo.data.pack import SharedPrompts
from megatron_grpo.models import delta_net
from megatron_grpo.models.recurrence import State, of_pack

pytestmark = pytest.mark.needs("fla")

KEY_HEADS, VALUES, KEY, VALUE, WIDTH = 4, 2, 128, 128, 4
CHANNELS = 2 * KEY + VALUES * VALUE
# A token, fewer than the convolution is wide, less than a chunk, exactly two chunks, one more, and many.
LENGTHS = [1, 3, 40, 128, 129, 700]
CU = (0, *np.cumsum(LENGTHS).tolist())


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over norm."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def inputs(tokens: int, states: int) -> list[torch.Tensor]:
    """qkv, weight, log decays, betas, and the state before ``states`` sequences; the first two in bf16."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    return [
        normal(tokens, KEY_HEADS, CHANNELS).bfloat16(),
        (normal(KEY_HEADS, CHANNELS, WIDTH) / 2).bfloat16(),
        -0.3 * normal(tokens, KEY_HEADS, VALUES).exp(),
        normal(tokens, KEY_HEADS, VALUES).sigmoid(),
        normal(states, WIDTH - 1, KEY_HEADS * CHANNELS).bfloat16(),
        normal(states, KEY_HEADS, VALUES, KEY, VALUE),
    ]


def results(function, tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Outputs of a function of the inputs, qkv and weight in ``dtype``, and the gradients of all inputs."""
    made = [x.to(dtype) if x.dtype == torch.bfloat16 else x for x in tensors]
    leaves = [x.detach().clone().requires_grad_() for x in made]
    outs = function(*leaves)
    generator = torch.Generator("cuda").manual_seed(1)
    loss = sum((out.float() * torch.randn(out.shape, device="cuda", generator=generator)).sum() for out in outs)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*outs, *(x for x in gradients if x is not None)]


@pytest.mark.parametrize("goes_on", [False, True], ids=["anew", "from states"])
def test_outputs_states_and_gradients(goes_on):
    def function(qkv, weight, log_decay, beta, last_inputs, memory):
        before = State(last_inputs, memory) if goes_on else None
        out, state = delta_net.delta_net(qkv, weight, log_decay, beta, KEY, CU, before)
        return out, *state

    tensors = inputs(CU[-1], len(LENGTHS))
    got, want = results(function, tensors, torch.bfloat16), results(function, tensors, torch.float32)
    assert len(got) == len(want) == (9 if goes_on else 7)
    errors = [relative(a, b) for a, b in zip(got, want, strict=True)]
    assert all(error < 2e-2 for error in errors), errors  # `max` passes over NaN


@pytest.mark.parametrize("paths", [[[0], [0, 1], [0, 2], [0, 3]], [[0], [0, 1], [0, 1, 2], [0, 1, 3]]])
def test_sequences_go_on_from_others(paths):
    lengths = [70, 5, 64, 90]
    cu = (0, *np.cumsum(lengths).tolist())
    keys = [np.concatenate([np.arange(cu[n], cu[n + 1]) for n in path]) for path in paths]
    ends = np.append(0, np.cumsum([len(key) for key in keys])).astype(np.int32)
    parent = np.array([path[-2] if len(path) > 1 else -1 for path in paths])
    shared = SharedPrompts(np.concatenate(keys), ends, np.zeros(cu[-1], np.int64), parent, np.diff(ends))

    def whole_pack(*tensors):
        qkv, weight, log_decay, beta = tensors[:4]

        def compute(own, offsets, before):
            return delta_net.delta_net(own[0], weight, *own[1:], KEY, offsets, before)

        return [of_pack(compute, (qkv, log_decay, beta), cu, shared)]

    def one_by_one(qkv, weight, log_decay, beta, *_):
        outs = []
        for key, length in zip(keys, lengths, strict=True):
            rows = torch.tensor(key, device="cuda")
            own = [x[rows] for x in (qkv, log_decay, beta)]
            out, _ = delta_net.delta_net(own[0], weight, *own[1:], KEY, (0, len(rows)))
            outs.append(out[-length:])
        return [torch.cat(outs)]

    tensors = inputs(cu[-1], 0)
    got, want = results(whole_pack, tensors, torch.bfloat16), results(one_by_one, tensors, torch.float32)
    errors = [relative(a, b) for a, b in zip(got, want, strict=True)]
    assert all(error < 2e-2 for error in errors), errors  # `max` passes over NaN
