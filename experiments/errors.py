"""The one error that is for the user: the drivers print its message as one line and exit."""


class UserError(Exception):
    """What is wrong, with which value, and what to do."""
