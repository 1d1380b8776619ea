"""Order of the tests, and the fixtures that they share."""

import gc
import os
import subprocess
from collections.abc import Callable

import case_report
import pytest
import ranks
from hypothesis import HealthCheck, settings
from ranks import end_warm_ranks, run_torchrun


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "more examples of each property, and pretrain_grpo.py started by torchrun itself: tests/run_tests.sh --all"
    parser.addoption("--thorough", action="store_true", help=text)
    text = "models in float64, with the bounds of its rounding: tests/unit/weights/test_float64.py"
    parser.addoption("--float64", action="store_true", help=text)
    case_report.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Set the number of examples, and how runs are started; no example fails because the machine is slow."""
    ranks.thorough = config.getoption("--thorough")
    patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("thorough", max_examples=100, **patient)
    settings.register_profile("quick", max_examples=25, **patient)
    settings.load_profile("thorough" if ranks.thorough else "quick")
    case_report.start(config)
    if config.getoption("--float64"):
        import float64  # imports torch

        float64.install()
    on_gpu = all(arg.startswith("tests/gpu") for arg in config.args)  # these tests start torchrun itself
    if getattr(config.option, "numprocesses", None) and not on_gpu:  # the lanes share these processes
        ranks.start_warm_ranks()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Unit tests first: they are quick, and their failures explain those of the tests that start processes."""
    # Of the others, files that take 8 seconds or more, the longest first: lanes then end at about one time.
    files = "parallel_layouts end_to_end rollout adapter_sync placed_ranks restart checkpoint_layouts torchrun_report "
    files += "vision_environments environment_runs server_runs watchdog"
    long = {f"test_{name}": place for place, name in enumerate(files.split())}

    starting = {item.path for item in items for name in ("distributed", "vllm") if item.get_closest_marker(name)}

    def place(item: pytest.Item) -> tuple[bool, int]:  # a lane runs whole files
        starts_processes = item.path in starting
        return starts_processes, long.get(item.path.stem, len(long)) if starts_processes else 0

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Exclude the imported objects from garbage collections, as entry_point.py does for a run."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the sum that CONTRIBUTING.md limits for the default selection."""
    reports = [report for stat in terminalreporter.stats.values() for report in stat]
    seconds = sum(report.duration for report in reports if isinstance(report, pytest.TestReport))
    terminalreporter.write_line(f"all cases together: {seconds:.0f} s")


@pytest.fixture
def torchrun() -> Callable[..., subprocess.CompletedProcess]:
    """`torchrun(nproc, script, *args, timeout=600, check=True, env=None)`: run a script on `nproc` local ranks.

    Output of all ranks is in `.stdout` (stderr joined in). With `check` a failing script fails the test with that
    output. At the time-out (seconds) all processes are killed. The ranks are forked from `warm_rank.py`; with
    --thorough those of pretrain_grpo.py, which is what users run, are started as users start them.
    """
    return run_torchrun


def pytest_sessionfinish() -> None:
    """End what forks ranks."""
    end_warm_ranks()


@pytest.fixture(scope="session", autouse=True)
def one_gloo_device():
    """Let all gloo groups of this process share a device."""
    from gloo_device import share_gloo_device  # imports torch

    with pytest.MonkeyPatch.context() as patch:
        share_gloo_device(patch.setattr)
        yield


@pytest.fixture(scope="module", autouse=True)
def no_rank_left():
    """Restore torchrun's variables after each file: a run of one process sets them, and later tests would read them."""
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"
    before = {name: os.environ.pop(name, None) for name in names}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture
def one_process(monkeypatch):
    """A process group of this process alone, as a trainer has it."""
    import torch.distributed as dist

    from megatron_grpo.parallel import initialize  # now that the test has prepared for machines without a GPU

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(initialize, "_host_group", dist.group.WORLD)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_rank(one_process):
    """As `one_process`, for tests that make megatron-core's groups."""
    from megatron.core import parallel_state

    yield
    parallel_state.destroy_model_parallel()


@pytest.fixture(scope="module")
def world():
    """A process group of this process alone with megatron-core's groups, for all tests of a file."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_grpo.parallel import initialize  # now that the test has prepared for machines without a GPU
    from megatron_grpo.training.arguments import parse_args

    initialize.initialize_distributed(parse_args([]))
    initialize.set_random_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory) -> dict[str, str]:
    """Hugging Face directories of tiny random models by family, with a byte tokenizer that has a chat template."""
    from tools import make_tiny_model

    root = tmp_path_factory.mktemp("models")

    sizes = "--num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --kv-channels 32 --max-position-embeddings 512"

    class Made(dict):
        """Each model is made at its first use."""

        def __missing__(self, family: str) -> str:
            words = f"--save {root / family} --shape {family} --tokenizer bytes --steps 0 --quiet {sizes}".split()
            make_tiny_model.make(make_tiny_model.build_parser().parse_args(words))
            return self.setdefault(family, str(root / family))

    return Made()
