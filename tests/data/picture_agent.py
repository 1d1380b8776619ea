"""An agent with an image in each turn. The number of a colour decides which letters are right."""

import base64
import io

from openai import OpenAI
from PIL import Image

COLOURS = ["red", "green", "blue", "white"]


def shown(number):
    """Return a user's message with a picture of this colour."""
    image = Image.new("RGB", (30 + 14 * (number % 3), 40 + 9 * (number % 4)), COLOURS[number % 4])
    image.putpixel((number % 30, 3), (1, 2, 3))
    file = io.BytesIO()
    image.save(file, "PNG")
    uri = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "key?"}],
    }


def play(base_url, row, **metadata):
    """Three turns with a picture each, two other second turns, and a conversation without its beginning."""
    ask = OpenAI(base_url=base_url, api_key="any", max_retries=0).chat.completions.create
    seed, messages, reward = row["seed"], [], 0.0
    for turn in range(3):
        messages.append(shown(seed + turn))
        text = ask(model="policy", messages=messages, max_tokens=5).choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        reward += bool(text) and ord(text[0]) % 4 == (seed + turn) % 4
    for other in ({"role": "user", "content": "and now?"}, shown(seed + 7)):
        ask(model="policy", messages=[*messages[:2], other], max_tokens=3)
    if row["seed"] % 2:
        ask(model="policy", messages=[messages[0], *messages[4:], {"role": "user", "content": "why?"}], max_tokens=3)
    return reward
