"""`python -m dlctl`: the command line."""

from dlctl.cli.app import main

if __name__ == "__main__":
    main()
