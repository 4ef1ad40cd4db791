"""Errors with three parts that every refusal must have: a code for machines, the cause, and the remedy.

`IotaError` is raised for users (bad input, unreachable peer, full disk); invariants use `assert`.
`Refused` is the same thing after it crossed the wire: a peer's request was understood and declined.
"""


class IotaError(Exception):
    """A failure that a person can act on. `code`: a stable word; `cause`: what and where; `remedy`: what to do."""

    def __init__(self, code: str, cause: str, remedy: str = "") -> None:
        super().__init__(f"{cause}{'. ' + remedy if remedy else ''}")
        self.code = code
        self.cause = cause
        self.remedy = remedy


class ConfigError(IotaError):
    """A run file, recipe or command-line value that cannot be used. Raised before anything is built."""

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__("bad_config", cause, remedy)


class Refused(IotaError):
    """The other side declined a request; nothing changed there. Codes are listed in DESIGN.md."""


class Unreachable(IotaError):
    """No answer from a peer or store within the limit; safe to try again with the same idempotency id."""

    def __init__(
        self, cause: str, remedy: str = "Check the address and that the process runs; the request may be repeated."
    ) -> None:
        super().__init__("unreachable", cause, remedy)
