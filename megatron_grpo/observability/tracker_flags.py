"""The flags of TensorBoard, W&B (by Megatron-LM's names) and SwanLab."""

PACKAGES = ("wandb", "swanlab")

TRACKER_FLAGS = (
    ("--tensorboard-dir", str, None, "directory for TensorBoard"),
    ("--wandb-project", str, None, "Weights & Biases project"),
    ("--wandb-exp-name", str, None, "Weights & Biases run name"),
    ("--wandb-entity", str, None, "user or team that the project belongs to"),
    ("--wandb-save-dir", str, None, "directory for the folder wandb [{save}]"),
    ("--wandb-mode", ("online", "offline"), None, "offline: keep the run here, for wandb sync [WANDB_MODE]"),
    ("--swanlab-project", str, None, "SwanLab project"),
    ("--swanlab-exp-name", str, None, "SwanLab run name"),
    ("--swanlab-workspace", str, None, "user or organization that the project belongs to"),
    ("--swanlab-save-dir", str, None, "directory for its runs [{save}/swanlog]"),
    ("--swanlab-mode", ("online", "offline", "local"), None, "offline: keep the run here, for swanlab sync"),
    ("--log-completions", bool, False, "show what completions.jsonl gets as tables in these, too"),
)
