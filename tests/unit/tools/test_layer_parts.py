"""tools/benchmark/layer_parts.py: the times of a module, which computes what it did before."""

import time

import torch

from tools.benchmark import layer_parts


class Slow(torch.nn.Module):
    """A mixer of two weights that sleeps in both passes."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
        self.config = None

    def forward(self, hidden_states, factor):
        time.sleep(0.02)
        out = hidden_states * self.weight * factor
        out.register_hook(lambda _: time.sleep(0.03))
        return out, None


def test_the_passes_of_a_module_are_timed():
    model = torch.nn.ModuleDict({"self_attention": Slow(), "other": Slow()})
    found = layer_parts.watch_layers([model])
    x = torch.ones(2, requires_grad=True)
    out, _ = model["self_attention"](x, 5.0)
    time.sleep(0.1)  # not in the module
    out.sum().backward()
    assert out.tolist() == [10, 15] and x.grad.tolist() == [10, 15]
    assert model["self_attention"].weight.grad.tolist() == [5, 5]
    [times] = found.pop("Slow")
    assert not found and [name for name, _ in times.marks] == ["begin", "end"] * 2
    forward, backward = ((end - begin) * 1e3 for (_, begin), (_, end) in (times.marks[:2], times.marks[2:]))
    assert forward >= 20 and backward >= 30 and abs(times.milliseconds() - forward - backward) < 1e-6
