"""`python -m dlctl`: the command line."""

from dlctl.cli.main import main

if __name__ == "__main__":
    main()
