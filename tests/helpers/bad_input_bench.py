"""Directory with all inputs of a valid run, for test_bad_input.py to damage."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

GOOD = """--transformer-impl local --micro-batch-size 8 --num-generations 4 --train-iters 2 --lr 1e-3 --beta 0
 --max-prompt-length 8 --max-completion-length 4 --reward-funcs exact_match --vllm-enforce-eager"""
ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(1, 9)]


class Bench:
    """A directory with all inputs of a valid run; the methods make an invalid input and return its flags."""

    def __init__(self, root: Path, model: Path, finished: Path | None = None):
        """Write the inputs of a valid run to ``root``.

        ``model`` is a Hugging Face directory, ``finished`` the --save directory of a run of this model with 2 updates.
        """
        self.root, self.model, self.finished, self.world_size = root, model, finished, 1
        self.train = self.write("train.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))
        self.save = root / "save"
        self.save.mkdir()
        (self.save / "metrics.jsonl").write_text('{"iteration": 1, "reward/mean": 0.5}\n')  # of an earlier run
        self.good = f"{GOOD} --load-hf {model} --train-data-path {self.train} --save {self.save}".split()

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.root / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def without(self, flag: str, *instead: object) -> list[str]:
        """Remove a flag with its value from the valid flags; return the flags ``instead``."""
        at = self.good.index(flag)
        del self.good[at : at + 2]
        return [str(word) for word in instead]

    def data(self, *lines: str, name: str = "bad.jsonl") -> list[str]:
        return ["--train-data-path", str(self.write(name, "".join(line + "\n" for line in lines)))]

    def plugin(self, text: str) -> list[str]:
        path = self.write("plugin.py", "from megatron_grpo.rewards.registry import register_reward\n" + text)
        return ["--external-plugins", str(path), "--reward-funcs", "mine"]

    def hf(self, *leave_out: str) -> Path:
        """Return a copy of the model without the files ``leave_out``."""
        return Path(shutil.copytree(self.model, self.root / "hf", ignore=shutil.ignore_patterns(*leave_out)))

    def hf_file(self, name: str, text: str, *leave_out: str) -> list[str]:
        """Return the flags of a copy of the model with the file ``name`` replaced."""
        directory = self.hf(*leave_out)
        (directory / name).write_text(text)
        return ["--load-hf", str(directory)]

    def config(self, changes: dict) -> list[str]:
        """Return the flags of a copy of the model with changes of config.json; None removes a key."""
        config = json.loads((self.model / "config.json").read_text()) | changes
        return self.hf_file(
            "config.json", json.dumps({key: value for key, value in config.items() if value is not None})
        )

    def tensors(self, change: Callable[[dict], object]) -> list[str]:
        """Return the flags of a copy of the model with changed tensors."""
        file = self.hf() / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        return ["--load-hf", str(file.parent)]

    def run(self) -> Path:
        """Return a copy of the finished run."""
        return Path(shutil.copytree(self.finished, self.root / "run"))

    def resume(self, *words: str) -> list[str]:
        """Return the flags that resume a copy of the finished run."""
        run = str(self.run())
        return ["--load", run, "--save", run, "--train-iters", "4", *words]

    def thesis(self) -> Path:
        """Return a directory that no export may replace."""
        (self.root / "thesis").mkdir()
        self.write("thesis/chapter1.tex", "years of work")
        return self.root / "thesis"

    def truncate(self, file: Path, by: int = 100) -> None:
        os.truncate(file, file.stat().st_size - by)
