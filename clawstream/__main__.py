"""`python -m clawstream` is `clawstream`."""

from clawstream.cli import main

main()
