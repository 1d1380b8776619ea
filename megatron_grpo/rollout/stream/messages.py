"""Messages between trainer rank 0 and the lead rank of each engine replica, through the store of the launch."""

import json
import time
from typing import Any

import torch.distributed as dist

from megatron_grpo.parallel.agreement import of_lead
from megatron_grpo.parallel.initialize import host_group

Message = dict[str, Any]


class Sender:
    """Writer of the messages with a common name; they arrive in order."""

    def __init__(self, store: dist.Store, name: str):
        self._store, self._name, self._sent = store, name, 0

    def send(self, message: Message) -> None:
        """Send a JSON object; its key "do" says what it is."""
        self._store.set(f"{self._name}/{self._sent}", json.dumps(message))
        self._sent += 1


class Receiver:
    """Reader of the messages with a common name; it never waits."""

    def __init__(self, store: dist.Store, name: str):
        self._store, self._name, self._received = store, name, 0

    def receive(self) -> Message | None:
        """Return the next message, or None if there is none yet."""
        key = f"{self._name}/{self._received}"
        if not self._store.check([key]):
            return None
        message = json.loads(self._store.get(key))
        self._store.delete_key(key)
        self._received += 1
        return message


def trainers_are_ready(store: dist.Store) -> None:
    """Let the engine ranks go on: the ledger is open."""
    store.set("ready", "")


def wait_for_trainers(store: dist.Store) -> None:
    """Wait on an engine rank for `trainers_are_ready`: the trainers build their model first, which has no bound."""
    while not store.check(["ready"]):
        time.sleep(0.05)


def commands(replica: int) -> str:
    """Return the name of the messages to a replica."""
    return f"commands/{replica}"


def reports(replica: int) -> str:
    """Return the name of the messages from a replica."""
    return f"reports/{replica}"


def agreed(message: Message | None) -> Message | None:
    """Return the message of this process group's rank 0 on all its ranks. Collective."""
    return of_lead(message, host_group())
