"""Updates with the trainer's tensors away in between are those without, to the last bit."""

import pytest
from offload_worker import CASES

from tools import make_tiny_model

# Each kind of optimizer state, of gradients and of buffers once.
FEW = ["float32", "bf16 gradients", "bf16 overlapped", "experts"]
OTHERS = [name for name in CASES if name not in FEW]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("names", [FEW, OTHERS], ids=["few cases", "the other cases"])
def test_updates_and_checkpoints_do_not_notice_an_absence(names, tmp_path, torchrun):
    """The worker asserts; here each of its cases must have come to its end on both ranks."""
    model = tmp_path / "model"
    sizes = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --kv-channels 32 --max-position-embeddings 512"
    words = f"--save {model} --tokenizer bytes --steps 0 --quiet {sizes}".split()
    make_tiny_model.make(make_tiny_model.build_parser().parse_args(words))
    output = torchrun(2, "tests/distributed/offload_worker.py", model, tmp_path, *names).stdout
    assert output.count("equal: ") == 2 * len(names), output
