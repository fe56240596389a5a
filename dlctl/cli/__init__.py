"""The command line: `main.py` has the table of commands, `console.py` all that is written."""
