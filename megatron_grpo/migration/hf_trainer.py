"""Batch arithmetic that TRL, ms-swift's ``swift rlhf`` and Oumi share: the batch of a device, and accumulation.

``prefix`` precedes the names, such as "training." in Oumi.
"""

from megatron_grpo.migration.rows import Conversion, Converted, Settings, Undecided, computed, number, parse_number

DEFAULT_BATCH = 8  # of a device, in transformers' TrainingArguments


def accumulation(settings: Settings, prefix: str = "") -> float:
    """Return the micro-batches of an update on each process."""
    return settings.number(f"{prefix}gradient_accumulation_steps", 1)


def completions_per_update(settings: Settings, prefix: str = "", batch: float = DEFAULT_BATCH) -> float:
    """Return the completions of an update of all processes."""
    shards = settings.number(f"{prefix}sequence_parallel_size", 1)  # processes that share a sequence
    device = settings.number(f"{prefix}per_device_train_batch_size", batch)
    engines = 0 if settings.given("colocate_groups") else settings.number("rollout.gpus", 0)  # of ms-swift's Ray files
    return device * accumulation(settings, prefix) * (settings.gpus - engines) / shards


def global_batch(prefix: str = "") -> Conversion:
    """Return the conversion of the batch of a device to that of an update."""
    return computed(
        "of one GPU there, of all here: x gradient_accumulation_steps x GPUs",
        lambda settings: completions_per_update(settings, prefix),
    )


def steps(value: object, settings: Settings) -> Converted:
    """Return the updates of a rollout: TRL's steps_per_generation counts micro-batches."""
    updates = parse_number(str(value)) / accumulation(settings)
    if updates != int(updates):
        raise Undecided(
            f"{value} micro-batches of {accumulation(settings):g} an update are no whole number of updates of a rollout"
        )
    return number(updates)


STEPS = Conversion("micro-batches there, updates here: / gradient_accumulation_steps", steps)


def updates_per_rollout(settings: Settings) -> float:
    """Return the updates of a rollout, for intervals, which are multiples of it here."""
    per_pass = settings.number("generation_batch_size", 0) / completions_per_update(settings)
    if settings.given("steps_per_generation"):
        per_pass = settings.number("steps_per_generation", 1) / accumulation(settings)
    return max(1, per_pass) * settings.number("num_iterations", 1)
