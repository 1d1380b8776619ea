"""Engines on ranks of their own (``--rollout-ranks``), which generate while the trainer updates.

    conductor.py   which groups start and where, and which ones the trainer takes: a plain object on rank 0
    producer.py    the loop of an engine replica: commands, engine steps, rewards
    placed.py      the trainer's side: take a batch, publish weights, evaluate, save
    messages.py    commands and announcements, through the store of the launch
    weights.py     parts of the weights from the trainer ranks that hold them to the engine ranks that read them

Two collectives cross the roles, over all ranks: the exchange of a batch, and that of the weights. The trainer enters
them when every replica has acknowledged the command, so that no rank waits in a collective for what has no bound.
Everything else goes through the store, which nobody waits for.
"""
