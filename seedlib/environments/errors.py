"""What can be wrong with an environment that a user asks for; each message is one line."""


class EnvironmentLoadError(ValueError):
    """An environment cannot be made as asked; base of the errors of this package."""


class UnknownEnvironmentError(EnvironmentLoadError):
    """A name says nothing that could be made; the message holds the name and what is possible."""


class UnsupportedEnvironmentError(EnvironmentLoadError):
    """An environment exists, but its spaces, rewards or interface cannot be handled."""
