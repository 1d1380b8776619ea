"""Environment for tests: three turns, each rewarded by its letters; the row that says 3 has no environment.

Each step is a line in the file that the variable ECHO_CALLS names. "saved" has snapshots, each restored one is a line.
In another process "changed" answers otherwise.
"""

import os

from megatron_grpo.environments.registry import Environment, Reply, register_environment


@register_environment("echo")
class Echo(Environment):
    immediate = True

    def reset(self, row):
        if row["messages"][0]["content"] == "say 3":
            raise OSError("no connection")

    def step(self, turn):
        if "ECHO_CALLS" in os.environ:
            with open(os.environ["ECHO_CALLS"], "a") as calls:
                calls.write(f"{turn.number}\n")
        reward = sum(character.isalpha() for character in turn.text) / 10
        if turn.number == 3:
            return Reply(reward=reward, done=True)
        return Reply([{"role": "user", "content": f"{len(turn.text)}"}], reward=reward)


@register_environment("down")
class Down(Echo):
    def reset(self, row):
        if "ECHO_WORKS" not in os.environ:
            raise OSError("nobody answers")


@register_environment("saved")
class Saved(Echo):
    def snapshot(self):
        return {"row": "saved"}

    def restore(self, state):
        with open(os.environ["ECHO_CALLS"], "a") as calls:
            calls.write(f"restored {state['row']}\n")


@register_environment("changed")
class Changed(Echo):
    def step(self, turn):
        reply = super().step(turn)
        return reply if reply.done else Reply([{"role": "user", "content": f"{os.getpid()}"}], reward=reply.reward)
