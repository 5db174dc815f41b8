"""A gate that said no: the run is sound, its result is not. The command line ends with exit code 1."""


class StageFailure(RuntimeError):
    """A check of the DAG failed; the message holds the numbers or rows that decided."""
