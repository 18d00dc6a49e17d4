"""The errors that a user's mistake can raise: one sentence that says what is wrong and what to do."""


class WindowedMTPError(ValueError):
    """Base of every error this package raises for bad input; the CLI prints it and exits with code 2."""


class WindowError(WindowedMTPError):
    """A window that cannot be: negative sink, window below 1, or options that contradict it."""


class CheckpointError(WindowedMTPError):
    """A checkpoint without a usable draft head, or of a family that is not supported."""


class CheckpointFileError(CheckpointError):
    """A file of a checkpoint that is missing, damaged or something else than its name says.

    Parameters
    ----------
    cause : str
        What is wrong, without a full stop.
    remedy : str
        What to do, likewise.
    """

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause, remedy)
        self.cause = cause
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.cause}; {self.remedy}."


class GenerationError(WindowedMTPError):
    """A generation request that the engine cannot serve."""


class ResultError(WindowedMTPError):
    """A result file that cannot be written, or that is not one."""


class VocabularyError(WindowedMTPError):
    """A hot vocabulary that cannot be: a size or ids out of range, or a file made with another tokenizer."""
