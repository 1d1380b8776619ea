"""Pairs of tensors of all kinds, for `planned.differing`."""

from collections.abc import Callable

import torch

PLACES = {torch.uint8: 0.0, torch.int16: 1.0, torch.int32: 0.6, torch.int64: 0.3}  # of the changed bit, from the first


def wrong_answers(differing: Callable, device: str) -> list[str]:
    """Return the names of the pairs for which ``differing`` gives a wrong answer."""
    wrong = []
    generator = torch.Generator().manual_seed(0)
    for dtype, place in PLACES.items():
        base = torch.randint(0, 100, (2, 40, 36), generator=generator, dtype=dtype).to(device)
        whole = torch.randint(0, 100, (2100,), generator=generator, dtype=dtype).to(device)
        ones = {
            "whole": whole,
            "not at its word's multiple": whole[1:],
            "one element": whole[:1],
            "none": whole[:0],
            "columns": base[0, :, 3:30],
            "transposed": base[1].mT,
            "axes that are one": base[:, :, 1:],
            "axes that are not": base[:, 1:35, :5],
            "every other": whole[::2],
        }
        kinds = [(name, one, other) for name, one in ones.items() for other in (one.clone(), one)]
        kinds += [(f"{name}, from whole", one.contiguous(), one) for name, one in ones.items()]
        for changes in False, True:
            pairs = []
            for name, one, other in kinds:
                changed = torch.empty_strided(other.shape, other.stride(), dtype=dtype, device=device).copy_(other)
                if changes and changed.numel():
                    changed[tuple(int(place * (size - 1)) for size in changed.shape)] ^= 1
                pairs.append((name, one, changed))
            found = differing([one for _, one, _ in pairs], [other for *_, other in pairs]).tolist()
            wanted = [changes and one.numel() > 0 for _, one, _ in pairs]
            wrong += [f"{dtype} {name} {changes}" for (name, *_), a, b in zip(pairs, found, wanted) if a != b]
    return wrong
