"""The one exception that a user can cause."""


class GrpoError(Exception):
    """A mistake that the user can mend: the message names the cause and the cure, and the run ends with exit code 1."""
