"""Several commands in one process, for tests: each import costs seconds once. Reads their arguments as JSON on stdin.

Prints a list of [exit code, stdout, stderr] as JSON; an operator's error is exit code 2 and its words, as in `main`.
"""

import json
import sys

from typer.testing import CliRunner

from clawstream.cli import app
from clawstream.errors import OperatorError


def main() -> None:
    """Run the commands one after the other."""
    said = []
    for argv in json.load(sys.stdin):
        result = CliRunner().invoke(app, argv)
        if result.exception is not None and not isinstance(result.exception, OperatorError | SystemExit):
            raise result.exception
        refused = isinstance(result.exception, OperatorError)
        code, words = (2, str(result.exception)) if refused else (result.exit_code, result.stderr)
        said.append((code, result.stdout, words))
    print(json.dumps(said))


if __name__ == "__main__":
    main()
