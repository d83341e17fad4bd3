"""`python -m minirl.cli`."""

from minirl.cli import main

main()
