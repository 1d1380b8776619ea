"""The flags of rewards, as a group of ``arguments.FLAGS``."""

SANDBOXES = ("auto", "strict")

REWARDS = (
    ("--reward-funcs", [str], None, "names of reward functions, summed by weight"),
    ("--reward-weights", [float], None, "a weight for each of them [1 each]"),
    ("--reward-routing", [str], None, "SOURCE=NAME,NAME: who scores rows of a data_source [all score all]"),
    ("--reward-clip", float, None, "limit each function's value to between minus this and this"),
    ("--external-plugins", [str], None, "Python files that register reward functions"),
    ("--reward-timeout", float, 10.0, "seconds that one reward function may take for one completion"),
    ("--reward-retries", int, 1, "how often a call that failed is tried again"),
    ("--reward-workers", int, 1, "processes that score, on each rank that scores"),
    ("--reward-model", [str], None, "NAME=DIR or NAME=URL: reward models, to be named in --reward-funcs"),
    ("--reward-model-template", [str], None, "NAME=FILE: it is a generative judge, and is asked this (Jinja)"),
    ("--reward-model-pattern", [str], None, "NAME=REGEX: the judge's score, in one group [Score: NUMBER]"),
    ("--reward-model-plugin", [str], None, "NAME=JUDGE: it is a judge, asked and read by this one of a plugin"),
    ("--reward-model-max-tokens", int, 512, "tokens that a judge with a template may answer"),
    ("--reward-model-timeout", float, 120.0, "seconds for which a reward model that does not answer is asked again"),
    ("--reward-model-concurrency", int, 64, "completions that a reward model is asked for at once, by each rank"),
    ("--cosine-min-len-value-correct", float, 1.0, "cosine: reward of a right answer of length 0"),
    ("--cosine-max-len-value-correct", float, 0.5, "cosine: of a right one as long as --max-completion-length"),
    ("--cosine-min-len-value-wrong", float, -0.5, "cosine: of a wrong answer of length 0"),
    ("--cosine-max-len-value-wrong", float, 0.0, "cosine: of a wrong one as long as --max-completion-length"),
    ("--repetition-n-grams", int, 3, "repetition: words of a sequence that should not come twice"),
    ("--soft-cache-length", int, None, "soft_overlong: tokens before --max-completion-length that are punished"),
    ("--code-sandbox", SANDBOXES, SANDBOXES[0], "code: isolate by what there is, or refuse less than namespaces"),
    ("--code-timeout", float, 4.0, "code: seconds that one test may take"),
    ("--code-memory", int, 512, "code: MiB that a process of a test may have"),
)
