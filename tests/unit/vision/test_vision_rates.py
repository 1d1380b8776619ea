"""Learning rates of the vision tower and the projector."""

import pytest
from toy_checkpoints import build, toy_args

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
from vision_models import make

from megatron_grpo.training.train_step import setup_optimizer
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.arguments import check_vision


@pytest.mark.parametrize("distributed", [False, True])
def test_each_part_has_its_rate(world, tmp_path, distributed):
    """On the schedule of --lr: warm-up over 4 updates, then linear to a tenth at update 12."""
    make(tmp_path)
    schedule = {"lr": 1e-3, "min_lr": 1e-4, "lr_warmup_iters": 4, "lr_decay_iters": 12, "lr_decay_style": "linear"}
    rates = {"vision_tower_lr": 1e-5, "projector_lr": 4e-3, "train_iters": 12}
    args = toy_args(
        tmp_path, padded_vocab_size=264, use_distributed_optimizer=distributed, weight_decay=0.1, **schedule, **rates
    )
    model, optimizer, scheduler = setup_optimizer(args, build(args))
    names = {id(parameter): name for name, parameter in model[0].named_parameters()}
    main = {id(getattr(p, "main_param", None)): name for p, name in ((p, names[id(p)]) for p in model[0].parameters())}
    seen = set()
    for share in (0.0, 0.25, 0.5, 0.75, 1.0, *(1 - 0.9 * step / 8 for step in range(1, 9))):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter)) or main.get(id(parameter))
                if name is None:  # a shard of the distributed optimizer has no name
                    continue
                part = name.partition("vision.tower.")[2]
                rate = (4e-3 if part.startswith("merger.") else 1e-5) if part else 1e-3
                assert group["lr"] == pytest.approx(share * rate), name
                assert (group["wd_mult"] == 0) == (parameter.ndim == 1 or name.endswith(".bias"))
                seen.add(rate)
        found = sorted({group["lr"] for group in optimizer.param_groups})
        assert found == pytest.approx(sorted({share * rate for rate in (1e-3, 1e-5, 4e-3)}))
        scheduler.step(increment=1)
    assert distributed or seen == {1e-3, 1e-5, 4e-3}


@pytest.mark.parametrize(
    ("rate", "frozen"), [("vision_tower_lr", "freeze_vision_tower"), ("projector_lr", "freeze_projector")]
)
def test_a_frozen_part_has_no_rate(world, tmp_path, rate, frozen):
    make(tmp_path)
    args = toy_args(tmp_path, padded_vocab_size=264, **{rate: 1e-5, frozen: True})
    with pytest.raises(GrpoError, match="what is frozen has no rate"):
        check_vision(args)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"vllm_mode": "server", "lora_weight_sync": "adapter"}, "give --lora-weight-sync merged"),
        ({"rollout_engine": "sglang"}, "images are sent to vLLM only"),
    ],
)
def test_refused_with_images(world, tmp_path, flags, message):
    make(tmp_path)
    with pytest.raises(GrpoError, match=message):
        check_vision(toy_args(tmp_path, padded_vocab_size=264, **flags))
