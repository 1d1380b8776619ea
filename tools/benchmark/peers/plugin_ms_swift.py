"""ms-swift's plug-in for the benchmark: a reward that differs between completions of a random model, and a template.

The template renders what the model's chat template renders. `--template_backend jinja`, which reads that one, writes
the ids of a completion into the training sample as text: `[17, 4, ...]`, about seven tokens for each.
"""

from swift.rewards import ORM, orms
from swift.template import TemplateMeta, register_template


class EvenCharacters(ORM):
    """Share of characters with an even code point."""

    def __call__(self, completions, **_):
        return [sum(ord(letter) % 2 == 0 for letter in text) / max(len(text), 1) for text in completions]


orms["even_tokens"] = EvenCharacters
register_template(
    TemplateMeta(
        "roles", prefix=[], prompt=["user: {{QUERY}}\nassistant: "], chat_sep=["\n"], suffix=[["eos_token_id"]]
    )
)
