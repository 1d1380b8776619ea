"""Packages that only some flags need. They are looked up without an import; a missing one ends a run at its start."""

import importlib.util
import sys

from megatron_grpo.utils.errors import GrpoError, prints_for_host, record_for_torchrun

# Module: the name of its package where it differs, and the command where `pip install NAME` is not enough.
NAMES = {
    "arctic_inference": "arctic-inference",
    "cutlass": "nvidia-cutlass-dsl",
    "cv2": "opencv-python-headless",
    "fla": "fla-core",
    "math_verify": "math-verify",
    "megatron": "megatron-core",
    "quack": "quack-kernels",
    "transformer_engine": "transformer-engine",
}
# vLLM pins versions of these, so pip gets them with it.
ENVIRONMENT = "pip install -r requirements-gpu.txt (without a GPU: requirements-cpu.txt)"
COMMANDS = {
    "arctic_inference": "pip install arctic-inference==0.3.0",
    "cutlass": "pip install -r requirements-gpu.txt",
    "quack": "pip install -r requirements-gpu.txt",
    "transformer_engine": 'pip install --no-build-isolation "transformer-engine[pytorch,core-cu13]==2.11.0"',
    "vllm": ENVIRONMENT,
}


# What pretrain_grpo.py imports by itself, of requirements.txt.
NEEDED = "jinja2", "megatron", "numpy", "pyarrow", "safetensors", "torch", "transformers"


def check_environment(program: str) -> None:
    """End the program with one line if a package of NEEDED is not installed: most often it is another environment."""
    if absent := missing(*NEEDED):
        names = ", ".join(NAMES.get(module, module) for module in absent)
        message = (
            f"{names} {'are' if len(absent) > 1 else 'is'} not installed for {sys.executable}: activate "
            "the environment that has the packages (tools/make_venv.sh makes .venv: source .venv/bin/activate), or "
            f"{ENVIRONMENT}"
        )
        if prints_for_host():
            print(f"{program}: error: {message}", file=sys.stderr, flush=True)
            record_for_torchrun(message)
        sys.exit(1)


def missing(*modules: str) -> list[str]:
    """Return those of the top-level ``modules`` that are not installed."""
    return [module for module in modules if importlib.util.find_spec(module) is None]


def package_names(modules: list[str]) -> str:
    """Return the names of the modules' packages in a sentence."""
    return " and ".join(NAMES.get(module, module) for module in modules)


def require(what: str, *modules: str, instead: str | None = None) -> None:
    """Raise GrpoError if some of ``modules`` are not installed: with the packages, the command, and a way without them.

    ``what`` needs them: a flag with its value, or a subject in the singular.
    """
    absent = missing(*modules)
    if not absent:
        return
    plural = len(absent) > 1
    commands = {COMMANDS.get(module, f"pip install {NAMES.get(module, module)}") for module in absent}
    raise GrpoError(
        f"{what} needs the package{'s' * plural} {package_names(absent)}, which {'are' if plural else 'is'} not "
        f"installed: {' and '.join(sorted(commands))}" + (f", or {instead}" if instead else "")
    )
