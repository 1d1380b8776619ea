"""An environment and an agent that show the picture of the row's column ``shown``, a file."""

import base64
from pathlib import Path

from openai import BadRequestError, OpenAI

from megatron_grpo.environments.registry import Environment, Reply, register_environment


@register_environment("odd")
class Odd(Environment):
    """The picture is in a system message, and twice in the message of each turn."""

    immediate = True

    def reset(self, row):
        self.shown, self.steps = {"type": "image", "path": row["shown"]}, 0
        return [{"role": "system", "content": [self.shown]}]

    def step(self, turn):
        self.steps += 1
        return Reply(
            [{"role": "user", "content": [self.shown] * 2}], done=self.steps == 2, reward=float(len(turn.text))
        )


def play(base_url, row, **metadata):
    """The picture is in the system's message and twice in the user's; the reward is 1 if that is refused."""
    ask = OpenAI(base_url=base_url, api_key="any", max_retries=0).chat.completions.create
    uri = f"data:image;base64,{base64.b64encode(Path(row['shown']).read_bytes()).decode()}"
    picture = {"type": "image_url", "image_url": {"url": uri}}
    messages = [{"role": "system", "content": [picture]}, {"role": "user", "content": [picture, picture]}]
    ask(model="policy", messages=[{"role": "user", "content": "begin"}], max_tokens=1)
    try:
        ask(model="policy", messages=messages, max_tokens=3)
    except BadRequestError:
        return 1
    return 0
