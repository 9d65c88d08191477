"""`python -m prl.testing.contracts KIND NAME [TABLE]`: check one plugin in a process of its own.

TABLE is JSON, the plugin's settings. The last line of standard output is a JSON list of results; the exit code is 0
when all are well, 1 when one is not, 2 when there is no such plugin.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from prl.errors import UsageError
from prl.testing.contracts import check


def main(argv: list[str]) -> int:
    if len(argv) not in (2, 3):
        print("usage: python -m prl.testing.contracts KIND NAME [TABLE]", file=sys.stderr)
        return 2
    try:
        results = check(argv[0], argv[1], json.loads(argv[2]) if len(argv) == 3 else None)
    except UsageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print()
    print(json.dumps([asdict(result) for result in results]), flush=True)
    return 0 if all(result.ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
