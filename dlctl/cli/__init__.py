"""The command line: `app.py` has the table of commands, `ui/console.py` writes all output."""
