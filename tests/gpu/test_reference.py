"""The average of --sync-ref-model of a policy on a GPU: the same tests as on a CPU."""

from test_ema_update import (  # noqa: F401
    one_process,
    test_a_resumed_average_is_the_same_bit_for_bit,
    test_the_average_is_that_of_the_formula,
)
