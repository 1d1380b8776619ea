"""How a run is spread over ranks: process groups, context and sequence parallelism, and the rules about them."""
