"""An environment that shows its screen: a key is right if its code, modulo 4, is the number of the screen's colour."""

import os

from PIL import Image

from megatron_grpo.environments.registry import Environment, Reply, register_environment

COLOURS = ["red", "green", "blue", "white"]


@register_environment("screen")
class Screen(Environment):
    """Row: ``seed``. The screen has another size and another colour in every turn; every third answer is a text."""

    immediate = True

    def reset(self, row):
        self.seed, self.steps = row["seed"], 0
        if row["seed"] % 4 == 3:  # the first screen comes with the answer to the first turn
            return [{"role": "user", "content": "begin"}]
        return [self.screen()]

    def screen(self):
        """Return the message with the screenshot."""
        size = 30 + 14 * (self.steps % 3), 40 + 9 * (self.seed % 4)
        image = Image.new("RGB", size, COLOURS[self.colour()])
        image.putpixel((self.steps % 30, self.seed % 30), (1, 2, 3))
        return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "key?"}]}

    def colour(self):
        """Return the number of the colour of the present screen."""
        return (self.seed + self.steps) % 4

    def step(self, turn):
        if path := os.environ.get("SCREEN_CALLS"):
            with open(path, "a") as file:
                file.write(f"{turn.number}\n")
        reward = float(bool(turn.text) and ord(turn.text[0]) % 4 == self.colour())
        self.steps += 1
        text = [{"role": "user", "content": "again"}]
        return Reply(text if self.steps % 3 == 2 else [self.screen()], reward=reward)


@register_environment("clip")
class Clip(Screen):
    """The same, but every second screen is a video."""

    videos = True

    def screen(self):
        """Return the message with the screenshot, or a video that ends with it."""
        message = super().screen()
        if self.steps % 2:
            return message
        last = message["content"][0]["image"]
        frames = [Image.new("RGB", last.size, COLOURS[(self.seed + i) % 4]) for i in range(2 + self.seed % 2)]
        video = {"type": "video", "video": [*frames, last], "fps": 2 if self.seed % 4 < 2 else 4}
        return {"role": "user", "content": [video, {"type": "text", "text": "key?"}]}
