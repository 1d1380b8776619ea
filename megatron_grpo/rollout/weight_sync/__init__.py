"""How the weights come to the engines, and the check that they have come."""
