"""The one error a user can cause: the command line prints it as `error: ...` and exits with code 2."""


class UserError(ValueError):
    """What was wrong, where, and what to do; never used for a fault of the program."""
