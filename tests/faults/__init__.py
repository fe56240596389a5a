"""Faults on real processes: `make faults` breaks real runs and counts what they lose.

Every row of the table is one fault, done many times at random instants to a real job with real
daemons, sockets, files and torch. The judge is a ledger (`ledger.py`, `ledger_task.py`): the final
weights are themselves the count of how often each gradient was applied, and small files that
outlive a killed worker say which of them had been acknowledged. No log is trusted for that.

    make faults                              everything, 20 times and more; about half an hour
    make faults ONLY=worker-kill TIMES=3     some rows (names or patterns, with commas), shorter
    make faults SEED=7 OUT=/tmp/faults.json  the same random choices; the results as JSON, too

A fault is a function in one of the `on_*.py` modules, registered by `@row(...)`: it does the fault
once, watches, and says what it saw.
"""
