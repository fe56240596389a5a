"""Checkpoints, weights and data at addresses, as s3://bucket/prefix.

    addresses.py          an address, and what is wrong with one
    objects.py            the interface of a store: named bytes below an address; its errors
    folder.py             file://, a directory
    fsspec_objects.py     any file system of fsspec; s3.py and gs.py configure those of two schemes
    layout.py             the names below the address of a store of checkpoints
    checkpoint_store.py   complete checkpoints in any of them, written and read by one set of rules
    ownership.py          which run writes at an address
    fetching.py           a file or a directory from an address, once per host

A scheme is one module and one line in `dlctl/registry.py`.
"""
