"""`python -m tests.ops.spoiling [OPERATOR [ARGUMENT [SPOILING [SEED]]]]` prints rows of the table, or makes one call."""

import sys

from tests.ops.spoiling.judge import Wrong, check
from tests.ops.spoiling.table import TABLE, rows


def main(operator: str = "", argument: str | None = None, spoiling: str = "", seed: str = "") -> int:
    if operator not in TABLE:
        print("\n".join(TABLE))
        return 0 if not operator else 2
    for row in rows(operator, argument):
        if spoiling not in ("", row.spoiling):
            continue
        print(f"{row}: {row.verdict.value}")
        if seed:
            try:
                print("  holds" if check(row, int(seed)) else "  does not apply to the call of this seed")
            except Wrong as wrong:
                print(f"  WRONG: {wrong}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
