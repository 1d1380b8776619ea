"""One gloo device for all groups of a process: each device has a thread that wakes up 100 times a second.

A rank of this project makes some 60 groups, and models of megatron-core hold theirs: a file of tests left 285 such
threads, which took half a processor until the end.
"""

import torch.distributed.distributed_c10d as c10d

gloo = c10d.ProcessGroupGloo


class _Gloo(type):
    """torch's class, but for the device of what it makes: torch also asks what is an instance of it."""

    device = None

    def __call__(cls, store, rank, size, timeout):
        _Gloo.device = _Gloo.device or gloo.create_default_device()
        options = gloo._Options()
        options._devices, options._timeout = [_Gloo.device], timeout
        return gloo(store, rank, size, options)

    def __instancecheck__(cls, group):
        return isinstance(group, gloo)

    def __getattr__(cls, name):
        return getattr(gloo, name)


class SharedDevice(metaclass=_Gloo):
    """The gloo groups that torch makes, with the device of this process."""


def share_gloo_device(set_name=setattr) -> None:
    """Let the groups that this process makes from now on share a device, which the first of them makes."""
    set_name(c10d, "ProcessGroupGloo", SharedDevice)
