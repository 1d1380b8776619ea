"""Early ends by signal or time, and megatron-core's schedules of learning rate and weight decay against formulas."""

import math
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

from noted_signal import raise_noted_signal

from megatron_grpo.training import early_exit, train_step
from megatron_grpo.training.early_exit import EarlyExit
from megatron_grpo.training.trainer import Trainer
from megatron_grpo.utils.errors import Preempted


@pytest.fixture
def votes(monkeypatch):
    """One process votes: what it hands to the others, in order."""
    seen = []
    monkeypatch.setattr(early_exit, "host_group", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op, group: seen.append((tensor.tolist(), op)))
    kept = {number: signal.getsignal(number) for number in early_exit.SIGNALS}
    yield seen
    signal.set_wakeup_fd(-1)
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_without_the_flags_nobody_is_asked(votes):
    assert EarlyExit(None, on_signal=False).reason() is None and not votes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_noted_and_told_at_the_next_question(votes, number, tmp_path):
    leaving = EarlyExit(None, on_signal=True, grace=1e6, save=tmp_path)
    assert leaving.reason() is None
    raise_noted_signal(number)  # would end this process without the handler
    assert number.name in leaving.reason()
    assert votes == [([0, 0], dist.ReduceOp.MAX), ([number, 0], dist.ReduceOp.MAX)]
    assert (tmp_path / "preempted").read_text() == f"{number.name}\n"  # whatever happens next


def test_a_signal_is_told_on_a_full_disk(votes, tmp_path):
    (tmp_path / "preempted").symlink_to("/dev/full")
    leaving = EarlyExit(None, on_signal=True, grace=1e6, save=tmp_path)
    leaving._note(signal.SIGTERM)
    assert "SIGTERM" in leaving.reason()


def test_a_signal_of_a_rank_that_leads_no_replica_ends_the_rollout(votes, monkeypatch):
    """Its main thread waits for the others, in a collective."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    waiting, stepping = (EarlyExit(None, on_signal=True, grace=1e6) for _ in range(2))
    engine = SimpleNamespace(replica=0, is_lead=True, num_replicas=1)
    stepping.check_rollout(engine)
    waiting._note(signal.SIGTERM)
    while not store.check([early_exit.TOLD]):
        time.sleep(0.01)
    stepping._next_look = 0.0
    with pytest.raises(Preempted):
        stepping.check_rollout(engine)


def test_a_save_that_takes_longer_than_the_grace_is_not_begun(votes):
    leaving = EarlyExit(None, on_signal=True, grace=100.0)
    assert leaving.leaves_time(1000.0)  # nobody waits for the end
    leaving._note(signal.SIGTERM)
    assert not leaving.leaves_time(1000.0)
    assert not leaving.leaves_time(90.0)  # and a fifth more
    assert leaving.leaves_time(70.0)


def test_the_time_is_up_after_so_many_minutes(votes, monkeypatch):
    now = time.monotonic()
    monkeypatch.setattr(early_exit.time, "monotonic", lambda: now)
    leaving = EarlyExit(3, on_signal=False)
    now += 179.9
    assert leaving.reason() is None
    now += 0.2
    assert leaving.reason() == "--exit-duration-in-mins is over"


def test_another_ranks_signal_is_enough(monkeypatch, votes):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op, group: tensor.copy_(torch.tensor([15, 0])))
    assert "SIGTERM" in EarlyExit(60, on_signal=False).reason()


def leaving_trainer(iteration, why):
    args = SimpleNamespace(train_iters=8, exit_interval=None, rollout_only=False)
    ways = SimpleNamespace(reason=lambda: why)
    trainer = SimpleNamespace(args=args, iteration=iteration, first_iteration=0, early_exit=ways, left_early=None)
    trainer.source = SimpleNamespace(ended=False)
    trainer.due = lambda interval: False
    return trainer


def test_a_run_that_is_told_to_leave_is_finished_early_unless_it_is_done(capsys):
    trainer = leaving_trainer(4, "SIGTERM")
    assert Trainer.finished(trainer) and trainer.left_early == "SIGTERM"
    assert "leaving at iteration 4: SIGTERM" in capsys.readouterr().out
    assert not Trainer.finished(leaving_trainer(4, None))
    done = leaving_trainer(8, "SIGTERM")
    assert Trainer.finished(done) and done.left_early is None  # so it exports


LR, MIN_LR, STEPS, WARMUP = 1e-3, 1e-4, 20, 4


def schedule(**changes):
    """(learning rates, weight decays) before each update of ``STEPS``."""
    args = SimpleNamespace(
        **{
            "lr": LR,
            "min_lr": MIN_LR,
            "lr_decay_style": "constant",
            "lr_decay_iters": None,
            "train_iters": STEPS,
            "lr_warmup_iters": WARMUP,
            "lr_warmup_fraction": None,
            "weight_decay": 0.01,
            "start_weight_decay": None,
            "end_weight_decay": None,
            "weight_decay_incr_style": "constant",
        }
        | changes
    )
    parameter = torch.nn.Parameter(torch.zeros(1))
    groups = [{"params": [parameter], "max_lr": LR, "min_lr": MIN_LR}]
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=0.5)
    scheduler = train_step._learning_rate_schedule(args, optimizer)
    rates, decays = [], []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        decays.append(optimizer.param_groups[0]["weight_decay"])
        scheduler.step(increment=1)
    return rates, decays


def after_warmup(formula):
    """The rise over four updates, then the formula of the share of the other sixteen that is over."""
    rise = [LR * step / WARMUP for step in range(WARMUP)]
    return rise + [formula((step - WARMUP) / (STEPS - WARMUP)) for step in range(WARMUP, STEPS)]


@pytest.mark.parametrize(
    ("style", "formula"),
    [
        ("constant", lambda share: LR),
        ("linear", lambda share: LR - share * (LR - MIN_LR)),
        ("cosine", lambda share: MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * share)) / 2),
        # lr sqrt(warm-up / update)
        ("inverse-square-root", lambda share: LR * math.sqrt(WARMUP / (WARMUP + share * (STEPS - WARMUP)))),
    ],
)
def test_learning_rates(style, formula):
    assert schedule(lr_decay_style=style)[0] == pytest.approx(after_warmup(formula), rel=1e-9)


def test_the_warmup_as_a_fraction_and_a_decay_that_ends_early():
    rates, _ = schedule(lr_decay_style="linear", lr_decay_iters=10, lr_warmup_iters=0, lr_warmup_fraction=0.2)
    expected = [0, LR / 2] + [LR - (step - 2) / 8 * (LR - MIN_LR) for step in range(2, 10)] + [MIN_LR] * 10
    assert rates == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("style", "formula"),
    [("linear", lambda share: 0.1 + 0.2 * share), ("cosine", lambda s: 0.1 + 0.2 * (1 - math.cos(math.pi * s)) / 2)],
)
def test_weight_decays(style, formula):
    _, decays = schedule(start_weight_decay=0.1, end_weight_decay=0.3, weight_decay_incr_style=style)
    assert decays == pytest.approx([formula(step / STEPS) for step in range(STEPS)], rel=1e-9)
    assert set(schedule()[1]) == {0.01}
