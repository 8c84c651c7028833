"""The verdicts of the table."""

import enum


class Verdict(enum.Enum):
    """Outcome that a spoilt call must have. A refusal names the argument and leaves every tensor as it was."""

    TYPE = "refused with a TypeError"
    VALUE = "refused with a ValueError"
    ERROR = "refused with a TypeError or ValueError"
    SAME = "accepted, with the results of the good call"
    COPIED = "accepted, with the results of the good call and one warning that names the argument"

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        return {"TYPE": (TypeError,), "VALUE": (ValueError,), "ERROR": (TypeError, ValueError)}.get(self.name, ())


TYPE, VALUE, ERROR, SAME, COPIED = Verdict.TYPE, Verdict.VALUE, Verdict.ERROR, Verdict.SAME, Verdict.COPIED
