"""Makes ``import torchvision`` work beside torch's CPU build; tools/make_venv.sh copies this file into the environment.

PyPI's torchvision is built for CUDA: its compiled operators do not load here, and its import ends where it describes
the first of them to torch ("operator torchvision::nms does not exist"). Its transforms of images, which the processors
of vision-language models need, are Python. So the operators are declared before the import; a call stays an error.
"""

import importlib.machinery
import re
import sys
from pathlib import Path


class DeclareFirst:
    """Finder that finds nothing; asked for torchvision, it first declares torchvision's operators."""

    def __init__(self):
        self.libraries = []  # torch forgets the declarations of a library that nothing refers to

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and not self.libraries:
            self._declare(importlib.machinery.PathFinder.find_spec(name))
        return None

    def _declare(self, spec) -> None:
        if spec is None or spec.origin is None:
            return
        import torch

        if torch.version.cuda is not None:
            return
        files = [Path(spec.origin).parent / f"_{kind}_registrations.py" for kind in ("meta", "autograd")]
        text = "".join(file.read_text() for file in files)
        names = re.findall(r'torchvision::(\w+)|register_meta\("(\w+)"', text)
        library = torch.library.Library("torchvision", "DEF")
        for name in sorted({first or second for first, second in names}):
            library.define(f"{name}(Tensor self) -> Tensor")
        self.libraries.append(library)


sys.meta_path.insert(0, DeclareFirst())
