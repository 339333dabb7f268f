"""`python -m iwopd` is `iwopd`."""

from iwopd.cli import main

main()
