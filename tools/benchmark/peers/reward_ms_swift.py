"""ms-swift's reward plug-in for the benchmark: values that differ between completions of a random model."""

from swift.rewards import ORM, orms


class EvenCharacters(ORM):
    """Share of characters with an even code point."""

    def __call__(self, completions, **_):
        return [sum(ord(letter) % 2 == 0 for letter in text) / max(len(text), 1) for text in completions]


orms["even_tokens"] = EvenCharacters
