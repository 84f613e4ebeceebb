"""The one error of the build: a message for the user, never a traceback."""


class BuildError(RuntimeError):
    """Horovod could not be built, installed or run.

    Attributes:
        what: what is wrong.
        mend: what to install or do; empty where `what` says it all.
    """

    def __init__(self, what: str, mend: str = "") -> None:
        super().__init__(f"{what} {mend}".rstrip())
        self.what = what
        self.mend = mend
