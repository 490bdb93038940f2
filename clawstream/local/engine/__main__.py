"""`python -m clawstream.local.engine`: the CPU engine as a process of its own."""

import argparse
import logging
import sys

from clawstream.config import share_cores
from clawstream.errors import OperatorError


def main() -> int:
    """Serves until told to stop; 2 means that a person has to change something."""
    parser = argparse.ArgumentParser(prog="clawstream.local.engine", description=__doc__)
    parser.add_argument("--model-path", required=True, help="folder with config.json and safetensors")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=30100, help="port to listen on (30100)")
    parser.add_argument("--context-length", type=int, help="tokens per request (the model's own limit)")
    parser.add_argument("--max-running-requests", type=int, default=32, help="requests computed at once (32)")
    parser.add_argument(
        "--threads", type=int, help="threads for tensor operations (1 for small models, else all cores)"
    )
    parser.add_argument("--weight-version", default="default", help="name of the weights loaded at the start (default)")
    parser.add_argument(
        "--dtype", choices=("float32", "float16"), default="float32",
        help="of weights where a step has few tokens (float32); float16 takes less time with several requests to a "
        "model of 100 million parameters, and a step of training that changes all weights by little is rounded away",
    )  # fmt: skip
    options = vars(parser.parse_args())
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    share_cores()
    # Imported here, so that --help does not wait for torch.
    from clawstream.local.engine.server import serve

    try:
        serve(**options)
    except OperatorError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
