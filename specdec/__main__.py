"""`python -m specdec` is the command `specdec`."""

from specdec.cli import main

if __name__ == "__main__":
    main()
