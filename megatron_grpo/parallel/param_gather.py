"""Weights of modules that are read without a call, under ``--overlap-param-gather``."""

import torch


def wait_for_weights(*modules: torch.nn.Module | None) -> None:
    """Wait until the weights of these modules are gathered; do nothing without ``--overlap-param-gather``.

    megatron-core waits in a hook that runs before a module's call, for the module's own parameters only.
    """
    for module in modules:
        if module is not None:
            for wait in module._forward_pre_hooks.values():
                wait(module, ())
