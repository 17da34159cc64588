"""The one exception that means "your input, and here is how to mend it"."""


class UserError(ValueError):
    """Input that the user can mend: a flag, a file, a machine that lacks something.

    The message names the flag or the file and both numbers. The command line prints it without a traceback and
    exits with code 2; library callers catch it as a `ValueError`.
    """
